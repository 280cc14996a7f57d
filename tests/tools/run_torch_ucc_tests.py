"""Runs torch-ucc's tests with mpiplus in UCC's place, and with gloo in it; writes their section of pytorch-tests.md.

    python tests/tools/run_torch_ucc_tests.py ~/torch_ucc       # or MPIPLUS_TEST_TORCH_UCC; --page - for stdout

They are programs that compare each collective with that of a second backend, here gloo, and read Open MPI's variables:
so the MPI must be Open MPI. They import torch_ucc, which here is a module that puts the backend to be tried in the
place of "ucc". The exit code is 1 where a program passes with gloo in that place and not with mpiplus.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from others_programs import PAGE, outcome, write_section

CHECKOUT = "MPIPLUS_TEST_TORCH_UCC"
HEADING = "## torch-ucc's tests"
TRIED = "TRIED_BACKEND"
STAND_IN = f"""
import functools, os
import torch.distributed as dist

def taking_its_place(make):
    @functools.wraps(make)
    def replacing(*arguments, **named):
        words = [os.environ["{TRIED}"] if word == "ucc" else word for word in arguments]
        named = {{key: os.environ["{TRIED}"] if word == "ucc" else word for key, word in named.items()}}
        return make(*words, **named)
    return replacing

dist.init_process_group, dist.new_group = map(taking_its_place, (dist.init_process_group, dist.new_group))
"""
#: What is no test of a collective: a benchmark, what starts others, and what a GPU is needed for.
LEFT_OUT = ("torch_alltoall_bench", "torch_ucc_test_setup", "torch_tests", "torch_pg_ucc_test")


def tried(program: Path, backend: str, stand_in: Path, ranks: int, seconds: float) -> tuple[bool, str]:
    paths = os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])
    return outcome([str(program), "--backend=gloo"], {TRIED: backend, "PYTHONPATH": paths}, ranks, seconds)


def together(rows: list[str]) -> list[str]:
    """Programs of which the same is to be said share a row."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        program, words = row.removeprefix("| ").split(" | ", 1)
        alike.setdefault(words, []).append(program)
    return [f"| {', '.join(programs)} | {words}" for words, programs in alike.items()]


def section(rows: list[str], ranks: int) -> str:
    return f"""{HEADING}

`tests/tools/run_torch_ucc_tests.py` writes this section. The programs in `test` of facebookresearch/torch_ucc each
compare a collective of the backend under test with gloo's: here on {ranks} ranks, with mpiplus in UCC's place, and with
gloo there, which tells what is a mistake of the program's own.

| program | mpiplus | gloo |
|---|---|---|
""" + "".join(f"{line}\n" for line in together(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = os.environ.get(CHECKOUT)
    parser.add_argument("checkout", type=Path, nargs="?", default=given and Path(given), help="of torch_ucc")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="for each program")
    parser.add_argument("--page", default=str(PAGE), help="the page that has the section; - for stdout")
    return parser.parse_args()


def main() -> int:
    given, rows, differ = arguments(), [], False
    programs = sorted((given.checkout or Path("nowhere")).glob("test/torch_*_test.py"))
    if not programs:
        print(f"not run: they are in a checkout of torch_ucc, which {CHECKOUT} may name")
        return 1
    with tempfile.TemporaryDirectory() as directory:
        stand_in = Path(directory)
        (stand_in / "torch_ucc.py").write_text(STAND_IN)
        for program in programs:
            if program.stem not in LEFT_OUT:
                (ours, words), (its, _) = (
                    tried(program, backend, stand_in, given.ranks, given.seconds) for backend in ("mpiplus", "gloo")
                )
                differ |= its and not ours
                rows.append(f"| `{program.name}` | {'passes' if ours else words} | {'passes' if its else 'fails'} |")
                print(rows[-1], flush=True)
    write_section(given.page, HEADING, section(rows, given.ranks))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
