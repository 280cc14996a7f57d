"""Says what is logged when the world is made."""

import logging
import os

import torch.distributed as dist


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        os.write(1, f"logged: {record.getMessage()}\n".encode())


logging.getLogger("torchmpi_plugin").setLevel(logging.INFO)
logging.getLogger("torchmpi_plugin").addHandler(Told())
dist.init_process_group("mpiplus")
dist.destroy_process_group()
