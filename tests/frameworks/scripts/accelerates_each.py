"""Each test of a script with which Accelerate tests itself, on the CPU, alone: the script's name, and a backend's.

For scripts whose main() stops at the first thing that needs a GPU: what follows that is tried here as well.
"""

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from torchmpi_plugin import integrations

SCRIPT, BACKEND = sys.argv[1:]


class OnTheCPU(torch.nn.parallel.DistributedDataParallel):
    """What the scripts make for a GPU each: a model on the CPU takes no devices."""

    def __init__(self, model: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **named: Any) -> None:
        super().__init__(model, **named)


def attempt(name: str, test: Callable[..., None], *arguments: Any) -> None:
    """One line in one write: the ranks share the output."""
    try:
        test(*arguments)
        outcome = "passed"
    except (Exception, SystemExit) as error:
        outcome = f"{type(error).__name__}: {error}".splitlines()[0][:150]
    sys.stdout.write(f"<{state.process_index} of {state.num_processes}: {name}: {outcome}>\n")
    sys.stdout.flush()
    dist.barrier()


def attempt_hook(hook: Any, wrapper: Any, options: dict[str, int]) -> None:
    words = [hook.value, wrapper.value, *(f"{option} {value}" for option, value in options.items())]
    attempt("_".join(words).replace(" ", "_"), hook_test, hook, wrapper, options)


integrations.activate("accelerate")
os.environ["ACCELERATE_USE_CPU"] = "true"
state = PartialState(cpu=True, backend=BACKEND)
module = import_module(f"accelerate.test_utils.scripts.{SCRIPT}")
if SCRIPT == "test_ddp_comm_hook":  # one function, which main() calls for each hook
    torch.nn.parallel.DistributedDataParallel = OnTheCPU  # type: ignore[misc]
    hook_test = module.test_ddp_comm_hook
    setattr(module, "test_ddp_comm_hook", attempt_hook)  # noqa: B010 - mypy knows no attributes of it
    module.main()
else:
    for name, test in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("test_") and test.__module__ == module.__name__:
            takes_one = "accelerator" in inspect.signature(test).parameters
            attempt(name, test, *([module.create_accelerator()] if takes_one else []))
