"""All that torch's classes have besides operations: a group and its backends answer, or say what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import groups
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchmpi_plugin import Options, torch_internals
from torchmpi_plugin.group.process_group import ProcessGroupMPI

CPU = torch.device("cpu")
CALLS = {name for name, method in vars(ProcessGroupMPI).items() if hasattr(method, "first_form")}
#: What ends the group, or is made for other arguments.
LEFT_OUT = CALLS | {"abort", "shutdown", "recv_anysource", "unbox", "Options", "BackendType"}


def questions(thing: Any, kind: Any) -> Iterator[str]:
    """What is wrong with the answers to all that ``kind`` has."""
    for name in sorted(vars(kind)):
        if name in LEFT_OUT or name.startswith("__") or name.isupper():
            continue
        try:
            answer = getattr(thing, name)
            if callable(answer):
                answer()
        except TypeError:  # it takes arguments
            pass
        except RuntimeError as error:
            ours = "mpiplus" in str(error) or torch.__version__ in str(error)
            if isinstance(error, RecursionError) or not ours or "backend type 0" in str(error):
                yield f"{type(thing).__name__}.{name}: {type(error).__name__}: {str(error)[:200]}"
        except AttributeError as error:
            yield f"{type(thing).__name__}.{name}: {error}"


def test_every_question_is_answered(new_group) -> None:
    group = new_group(None, pg_options=Options(api_mode=groups.API_MODE))
    asked = [(group, dist.ProcessGroup), (group._get_backend(CPU), torch_internals.backend_class())]
    if torch_internals.has_python_backends():  # what C++ sees of it
        asked.append((dist.ProcessGroup._get_backend(group, CPU), torch_internals.backend_class()))
    assert [wrong for thing, kind in asked for wrong in questions(thing, kind)] == []


@pytest.mark.skipif(not hasattr(c10d, "_supports_reconfigure"), reason="this torch does not ask that")
def test_what_torch_asks_by_functions_of_its_own(group) -> None:
    asked: Any = c10d
    assert asked._supports_reconfigure() is False
    assert asked._supports_window() is (groups.API_MODE == "direct" and torch_internals.has_python_backends())
    with pytest.raises(NotImplementedError, match="estimator"), c10d._time_estimator():
        pass


@pytest.mark.skipif(not torch_internals.has_python_backends(), reason="this torch has no such argument")
def test_reconfiguration_is_refused(group) -> None:
    class Asked:
        enable_reconfigure = True

    with pytest.raises(NotImplementedError, match="enable_reconfigure=True"):
        dist.Backend._plugins["MPIPLUS"].creator_fn(Asked(), None)
