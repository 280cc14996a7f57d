"""An Accelerator made in one of several ways, and what it says of itself: cpu, name, first; none: plain."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

ways = sys.argv[1:]
arguments: dict[str, Any] = {"cpu": True} if "cpu" in ways else {}
if "name" in ways:
    arguments["kwargs_handlers"] = [InitProcessGroupKwargs(backend="mpiplus", timeout=timedelta(seconds=77))]
if "first" in ways:
    dist.init_process_group("mpiplus")
accelerator = Accelerator(**arguments)
state = accelerator.state
# One line in one write: the ranks share the output.
sys.stdout.write(f"<{accelerator.process_index} of {accelerator.num_processes} on {state.backend}>\n")
sys.stdout.flush()
if accelerator.num_processes > 1:
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
accelerator.end_training()
