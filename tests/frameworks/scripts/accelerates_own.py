"""One of the scripts with which Accelerate tests itself, on the CPU: its name, and a backend's.

They are written for accelerate launch and GPUs; on the CPU they go on with the state that is made here, before them.
"""

import os
import runpy
import sys

import torch.distributed as dist
from accelerate import PartialState

from torchmpi_plugin import integrations

SCRIPT, BACKEND = sys.argv[1:]

integrations.activate("accelerate")
os.environ["ACCELERATE_USE_CPU"] = "true"
state = PartialState(cpu=True, backend=BACKEND)
rank, ranks, backend = state.process_index, state.num_processes, dist.get_backend()
runpy.run_module(f"accelerate.test_utils.scripts.{SCRIPT}", run_name="__main__")
# One line in one write: the ranks share the output.
sys.stdout.write(f"<{rank} of {ranks} came to the end of {SCRIPT} on {backend}>\n")
sys.stdout.flush()
