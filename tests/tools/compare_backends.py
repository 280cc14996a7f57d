"""Write the table "Why" of README.md: each cell is tried on 2 ranks, on CPU tensors, with the torch that is here.

    python tests/tools/compare_backends.py           # --check: compare with README.md

gloo is started by torchrun, mpiplus by `mpiplus run`. What this torch has not, or what is for devices only, is not
tried. commux is a backend on UCX from PyPI, installed for the moment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

README = Path(__file__).parents[2] / "README.md"
MARKS = ("<!-- why -->\n", "<!-- /why -->")
COLUMNS = ("comes with", "tensors", "plain `mpirun`", "strided `all_reduce`", "sums float8, uint16", "a late rank is")
SECONDS = 250


# ---- on each rank ----


def answer(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception:
        return "no"


def strided() -> str:
    whole = torch.zeros(4, 2)
    whole[:, 0] = 1
    dist.all_reduce(whole[:, 0])
    return "right" if whole.tolist() == [[2, 0]] * 4 else "silently wrong"


def narrow() -> str:
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        tensor = torch.ones(4).to(dtype)
        dist.all_reduce(tensor)
        assert tensor.float().tolist() == [2, 2, 2, 2]
    return "yes"


def late() -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    message = "Not arrived: rank 1"
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except Exception as error:
            message = str(error)
    store = dist.distributed_c10d._get_default_store()
    store.set("late" if dist.get_rank() == 0 else "not yet", "over")
    store.get("late")
    return "named" if "Not arrived: rank 1" in message else "not named"


def probe(backend: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    found = [answer(question) for question in (strided, narrow, late)]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- here ----


def command(backend: str) -> list[str]:
    if backend == "mpiplus":
        return [sys.executable, "-m", "torchmpi_plugin.cli", "run", "--no-prefix", "-n", "2", __file__]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]


def run(words: list[str]) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=SECONDS)
    return done.stdout if done.returncode == 0 else ""


def under_mpirun(backend: str) -> str:
    """Whether a script starts that sets no variable: mpirun's own are left, and none of torch's."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    code = f"import os; [os.environ.pop(name, None) for name in {names}]; import torch.distributed as dist; "
    code += f"dist.init_process_group({backend!r}); print('made', dist.get_world_size())"
    words = [sys.executable, "-m", "torchmpi_plugin.cli", "run", "-n", "2", "-c", sys.executable, "-c", code]
    return "starts" if "made 2" in run(words) else "needs four variables"


def tried(backend: str) -> list[str]:
    output = run([*command(backend), "--probe", backend])
    return json.loads(next(line for line in output.splitlines() if line.startswith("[")))


def commux() -> list[str]:
    """Version 0.2.1 is its wheel's newest; it is compiled against one torch."""
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", folder, "commux==0.2.1"])
        loads = run([sys.executable, "-c", f"import sys, torch; sys.path.append({folder!r}); import commux; print(1)"])
    return ["its wheel 0.2.1", *(["not tried"] if loads else [f"does not load with torch {short()}"]), *["-"] * 4]


def short() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def kinds(backend: str) -> str:
    return ", ".join(kind.upper() for kind in dist.Backend.backend_capability[backend])


def table() -> str:
    wheel = "torch's wheels" if dist.is_gloo_available() else "-"
    own = "torch's wheels" if dist.is_mpi_available() else "a torch built from source"
    rows = {
        "mpiplus": ["its wheel", "CPU, CUDA", under_mpirun("mpiplus"), *tried("mpiplus")],
        "gloo": [wheel, kinds("gloo"), under_mpirun("gloo"), *tried("gloo")],
        'torch\'s "mpi"': [own, kinds("mpi"), *["-"] * 4],
        "NCCL": ["torch's CUDA wheels", kinds("nccl"), *["-"] * 4],
        "commux (UCX)": commux(),
    }
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]) + "\n"


def main() -> None:
    found, text = table(), README.read_text()
    before, _, rest = text.partition(MARKS[0])
    old, _, after = rest.partition(MARKS[1])
    print(found)
    if "--check" in sys.argv:
        sys.exit(old != found and "README.md says:\n" + old)
    README.write_text(before + MARKS[0] + found + MARKS[1] + after)


if __name__ == "__main__":
    probe(sys.argv[2]) if sys.argv[1:2] == ["--probe"] else main()
