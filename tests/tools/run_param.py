"""Runs PARAM's communication benchmark on mpiplus and on gloo; writes its section of pytorch-tests.md.

    python tests/tools/run_param.py ~/param       # facebookresearch/param, or MPIPLUS_TEST_PARAM; --page - for stdout
    python tests/tools/run_param.py --only all_reduce "pt2pt pairwise" --ranks 3 -- ~/param

Each collective with the check of its data on, blocking and not, on several numbers of ranks, by MPIPLUS_REPLACE; PARAM
itself checks no sums of collectives that do not block. Those that can go in one program do, and alone where that fails.
It reads the variables of the launcher, which here is Open MPI's. The exit code is 1 where something passes on gloo and
not on mpiplus.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from others_programs import PAGE, outcome, write_section

CHECKOUT = "MPIPLUS_TEST_PARAM"
HEADING = "## PARAM's communication benchmark"
PROGRAM = Path("train/comms/pt/comms.py")
#: What does not block is not checked in a program that has one of these.
SUMS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v")
OTHERS = (
    *("all_gather", "all_gather_base", "all_gather_v", "all_to_all", "all_to_allv", "broadcast", "gather", "incast"),
    *("multicast", "reduce_scatter_base", "scatter"),
)
#: Two at once, each in a group of its own. Of several sizes PARAM fills the later ones' tensors while they are reduced.
PAIR = "all_reduce beside all_to_allv"
PATTERNS = ("pt2pt one2one", "pt2pt pairwise")
SIZES = ("--b", "64", "--e", "256K", "--f", "16", "--w", "2", "--n", "5")
HOW = {1: "blocking", 0: "not blocking"}


Outcome = tuple[bool, str]


class Run(NamedTuple):
    ranks: int
    blocking: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {HOW[self.blocking]}"


def options_of(names: Sequence[str], ranks: int) -> list[str]:
    if names[0] == PAIR:
        beside = ["--pair", "--collective-pair", "all_to_allv", "--overlap-pair-pgs"]
        return ["--collective", "all_reduce", *beside, "--ss", "65536"]
    if names[0] not in PATTERNS:
        return ["--collective", ",".join(names)]
    senders = ranks // 2 if names[0].endswith("pairwise") else 1
    lists = [",".join(map(str, range(first, first + senders))) for first in (0, senders)]
    return ["--pt2pt", names[0].split()[1], "--src-ranks", lists[0], "--dst-ranks", lists[1]]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def tried(names: Sequence[str], run: Run, replace: str, given: argparse.Namespace, links: Path) -> Outcome:
    program = given.checkout / PROGRAM
    paths = [str(program.parent), str(given.checkout), str(links), os.environ.get("PYTHONPATH", "")]
    options = ["--device", "cpu", "--backend", "gloo", "--c", "1", "--z", str(run.blocking), *SIZES]
    variables = {"MPIPLUS_REPLACE": replace, "PYTHONPATH": os.pathsep.join(paths), "MASTER_PORT": free_port()}
    command = [str(program), *options, *options_of(names, run.ranks)]
    return outcome(command, variables, run.ranks, given.seconds)


def results_of(run: Run, replace: str, given: argparse.Namespace, links: Path) -> Iterator[tuple[str, Outcome]]:
    for group in (SUMS, OTHERS, *((each,) for each in (PAIR, *PATTERNS))):
        names = [name for name in group if name in given.only]
        together = tried(names, run, replace, given, links) if names else (True, "")
        for name in names:
            alone = together[0] or len(names) == 1
            yield name, together if alone else tried([name], run, replace, given, links)


def cell(found: dict[Run, Outcome]) -> str:
    """How many have passed, and what the others say."""
    failed = [f"{run}: {words}" for run, (passed, words) in found.items() if not passed]
    count = f"{len(found) - len(failed)} of {len(found)}"
    return "; ".join([count, *failed]).replace("|", "\\|")


def section(rows: list[str], runs: list[Run]) -> str:
    ranks = " and ".join(str(ranks) for ranks in sorted({run.ranks for run in runs}))
    return f"""{HEADING}

`tests/tools/run_param.py` writes this section. `{PROGRAM}` of facebookresearch/param runs each
collective with the check of its data on, on 64 bytes to 256 KiB, with mpiplus in gloo's place and on gloo: on {ranks}
ranks, blocking and not. PARAM itself checks no sums of collectives that do not block.

Tried were {len(rows)} collectives and patterns. All passed on both, but for:

| collective | mpiplus | gloo |
|---|---|---|
""" + "".join(f"{line}\n" for line in rows if ";" in line or "| 0 of" in line)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = os.environ.get(CHECKOUT)
    parser.add_argument("checkout", type=Path, nargs="?", default=given and Path(given), help="of param")
    parser.add_argument("--only", nargs="+", default=[*SUMS, *OTHERS, PAIR, *PATTERNS], metavar="COLLECTIVE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=120, help="for each program")
    parser.add_argument("--page", default=str(PAGE), help="the page that has the section; - for stdout")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if not ((given.checkout or Path("nowhere")) / PROGRAM).exists():
        print(f"not run: it is in a checkout of param, which {CHECKOUT} may name")
        return 1
    given.checkout = given.checkout.resolve()
    runs = [Run(ranks, blocking) for ranks, blocking in product(given.ranks, HOW)]
    with tempfile.TemporaryDirectory() as links:
        (Path(links) / "param_bench").symlink_to(given.checkout)  # the name under which newer ones import themselves
        found: dict[str, dict[str, dict[Run, Outcome]]] = defaultdict(lambda: defaultdict(dict))
        for run, replace in product(runs, ("gloo", "")):
            for name, result in results_of(run, replace, given, Path(links)):
                found[name][replace][run] = result
                print(f"{name}, {run}, {'mpiplus' if replace else 'gloo'}: {result[1] or 'passed'}", flush=True)
    rows = [f"| `{name}` | {cell(found[name]['gloo'])} | {cell(found[name][''])} |" for name in sorted(found)]
    write_section(given.page, HEADING, section(rows, runs))
    worse = (by[""][run][0] and not by["gloo"][run][0] for by in found.values() for run in runs)
    return int(any(worse))


if __name__ == "__main__":
    sys.exit(main())
