"""dmlcloud: a pipeline of one stage under DDP, whose metrics are reduced over all ranks."""

import sys

import dmlcloud
import torch
import torch.distributed as dist
from reported import report
from torch.nn.functional import mse_loss


class Fit(dmlcloud.Stage):
    """A line through each rank's own points."""

    def pre_stage(self) -> None:
        torch.manual_seed(1)
        self.model = dmlcloud.wrap_ddp(torch.nn.Linear(8, 1), self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        torch.manual_seed(100 + dmlcloud.rank())
        self.data, self.targets = torch.randn(64, 8), torch.randn(64, 1)

    def run_epoch(self) -> None:
        for data, targets in zip(self.data.split(16), self.targets.split(16), strict=True):
            loss = mse_loss(self.model(data), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.log("loss", loss.detach())
            self.finish_step()


dist.init_process_group(sys.argv[1])
pipeline, stage = dmlcloud.Pipeline(name="fit"), Fit(epochs=4)
pipeline.append(stage)
pipeline.run()
report([float(epoch) for epoch in stage.history["loss"]])
dist.destroy_process_group()
