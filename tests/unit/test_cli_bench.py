"""The parts of ``mpiplus bench`` that need no MPI."""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_python import printed, python

from torchmpi_plugin.cli.bench.files import Files
from torchmpi_plugin.cli.bench.report import table_cells, table_header
from torchmpi_plugin.cli.bench.results import FRONT_END, NONBLOCKING, RAW, Row, bus_factor, fit_size, parse_size

ALL = (RAW, NONBLOCKING, "mpiplus", "gloo", FRONT_END)


def test_a_size() -> None:
    """In powers of 1024; it grows to whole elements for every rank."""
    for text, size in {"8": 8, "64k": 65536, "16MiB": 16 << 20, "2 GB": 2 << 30, " 4M ": 4 << 20, "12B": 12}.items():
        assert parse_size(text) == size
    for wrong in ("", "0K", "-8", "1.5M", "1T", "K", "8 8"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)
    assert (fit_size(8, 4, 1), fit_size(8, 4, 3), fit_size(8, 4, 4), fit_size(1, 2, 1)) == (8, 12, 16, 2)


def test_cells_stand_under_their_titles() -> None:
    us = {RAW: 2.0, NONBLOCKING: 2.5, "mpiplus": 5.0, "gloo": 400.0, FRONT_END: 3.0}
    row = Row("all_reduce", "float32", 32768, 2, us, {name: [time] for name, time in us.items()}, {})
    assert dict(zip(table_header(ALL), table_cells(row, ALL), strict=True)) == {
        **{"operation": "all_reduce", "dtype": "float32", "size": "32 KiB", "raw": "2.00"},
        **{"raw\nnonblocking": "2.50", "mpiplus": "5.00", "gloo": "400", "front\nend": "3.00"},
        **{"mpiplus\nGB/s": "6.55", "mpiplus/\nraw": "2.50", "gloo/\nmpiplus": "80.00"},
    }
    barrier = table_cells(Row("barrier", "", 0, 2, {"mpiplus": 1.0}, {}, {}), ("mpiplus",))
    assert barrier == ["barrier", "-", "-", "1.00", "-"]


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """On 4 ranks, of a million bytes in a millisecond, which is 1 GB/s."""
    parts = dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"), 0.75)
    for operation, factor in {"all_reduce": 1.5, "ping_pong": 2.0, "broadcast": 1.0, **parts, "barrier": None}.items():
        found = Row(operation, "float32", 10**6, 4, {"mpiplus": 1000.0, FRONT_END: 3.0}, {}, {})
        assert found.bus_gb_per_s("mpiplus") == factor
        assert found.bus_gb_per_s(FRONT_END) is None  # it moves nothing
        assert found.bus_gb_per_s("gloo") is None  # not measured
        assert bus_factor(operation, 1) is None


#: Command lines, and why they are refused.
REFUSED = {
    "bench --ops all_reduce,all_shuffle": "no operation all_shuffle; there are all_reduce, ping_pong",
    "bench --train --ops barrier": "does not go with --train",
    "bench --train --no-raw": "does not go with --train",
    "bench --train ddp,fsdp1": "no way fsdp1; there are",
    "bench --plot out.txt": "must end in .png, .svg, .pdf",
    "bench --tune out.json --backends gloo": "does not go with --tune",
    "bench --sizes 8,9999999999G": "10,737,418,238,926,258,176 bytes are more than this node's memory",
    "info --timeout nan": "'nan' is not a number of seconds",
    "status --interval inf": "inf is not in the range",
    "status --watch nan": "--watch takes seconds",
    "status --timeline t.txt": "t.txt must end with .json, .json.gz or .html",
    "status --timeline nowhere/t.json": "there is no directory",
}
PROGRAM = """
import sys, click
from click.testing import CliRunner
from torchmpi_plugin.cli import main
from torchmpi_plugin.cli.bench import command
print(*command.parse_operations(None, None, "all_gather,barrier,reduce_scatter"))
for words in sys.argv[1:]:
    result = CliRunner().invoke(main, words.split())
    print(result.exit_code, *click.unstyle(result.output).split())
"""


@pytest.mark.timeout(120)
def test_operations_may_have_mpis_names_and_others_are_refused() -> None:
    """In a process of its own: the table of operations imports mpi4py, and that starts MPI."""
    told = printed(PROGRAM, *REFUSED).splitlines()
    assert told[0].split() == ["all_gather_into_tensor", "barrier", "reduce_scatter_tensor"]
    for line, reason in zip(told[1:], REFUSED.values(), strict=True):
        assert line.startswith("2 ") and reason in line


@pytest.mark.timeout(120)
def test_a_picture_is_not_promised_without_matplotlib(tmp_path: Path) -> None:
    """Before anything is measured; in a process of its own, as above."""
    program = "import sys; sys.modules['matplotlib'] = None; from torchmpi_plugin.cli import main; main()"
    result = python(program, "bench", "--plot", tmp_path / "out.png")
    assert result.returncode == 1
    assert "Error: --plot needs matplotlib" in result.stderr and "pip install matplotlib" in result.stderr
    assert "mpiplus bench" not in result.stdout


def test_two_ranks_on_a_host_have_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(None, None, tmp_path / "tuning.json")
    assert "or of three and more ranks on one" in files.why_not(["a", "a"])
    assert files.why_not(["a", "b"]) == files.why_not(["a", "a", "a"]) == ""
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only")
    assert "MPIPLUS_COLLECTIVES=mpi-only forbids" in files.why_not(["a", "b"])
