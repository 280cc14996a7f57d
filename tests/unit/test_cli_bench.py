"""The parts of ``mpiplus bench`` that need no MPI; its clock is in test_cli_training.py."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from plain_python import printed, python

from torchmpi_plugin import cli
from torchmpi_plugin.cli.bench.files import Files
from torchmpi_plugin.cli.bench.report import table_cells, table_header
from torchmpi_plugin.cli.bench.results import (
    FRONT_END,
    NONBLOCKING,
    RAW,
    SMALL,
    Bus,
    Row,
    bus_factor,
    comparisons,
    fit_size,
    format_us,
    parse_size,
)

BUS = Bus(size=16 * 1024**2, latency_us=12.34, to_device_us=1000.0, from_device_us=2000.0, exchange_us=4000.0)
ALL = (RAW, NONBLOCKING, "mpiplus", "gloo", FRONT_END)


def row(size: int = 8, **us: float) -> Row:
    """Return the row of an all_reduce with these times."""
    return Row("all_reduce", "float32", size, 2, us, {name: [time] for name, time in us.items()}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("1K", 1024),
        ("64k", 65536),
        ("16MiB", 16 * 1024**2),
        ("2 GB", 2 * 1024**3),
        (" 4M ", 4 * 1024**2),
        ("12B", 12),
    ],
)
def test_a_size_is_read_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_grows_to_whole_elements_for_every_rank() -> None:
    assert fit_size(8, element=4, parts=1) == 8
    assert fit_size(8, element=4, parts=3) == 12
    assert fit_size(8, element=4, parts=4) == 16
    assert fit_size(1, element=2, parts=1) == 2


def test_the_first_backend_is_compared_with_raw_and_the_others_with_it() -> None:
    assert comparisons(ALL) == [("mpiplus", RAW), ("gloo", "mpiplus")]
    assert comparisons(("mpiplus", "gloo", FRONT_END)) == [("gloo", "mpiplus")]
    assert comparisons((RAW, "gloo")) == [("gloo", RAW)]


def test_cells_stand_under_their_titles() -> None:
    titles = table_header(ALL)
    us = {RAW: 2.0, NONBLOCKING: 2.5, "mpiplus": 5.0, "gloo": 400.0, FRONT_END: 3.0}
    cells = table_cells(row(32768, **us), ALL)
    assert dict(zip(titles, cells, strict=True)) == {
        "operation": "all_reduce",
        "dtype": "float32",
        "size": "32 KiB",
        "raw": "2.00",
        "raw\nnonblocking": "2.50",
        "mpiplus": "5.00",
        "gloo": "400",
        "front\nend": "3.00",
        "mpiplus\nGB/s": "6.55",
        "mpiplus/\nraw": "2.50",
        "gloo/\nmpiplus": "80.00",
    }


def test_large_data_and_refusals_leave_dashes() -> None:
    assert row(SMALL, raw=2.0, mpiplus=5.0).extra_us("mpiplus") == 3.0
    assert row(SMALL * 2, raw=2.0, mpiplus=5.0).extra_us("mpiplus") is None
    without_raw = table_cells(row(mpiplus=5.0, gloo=400.0), ALL)
    assert without_raw[3:] == ["-", "-", "5.00", "400", "-", "0.00", "-", "80.00"]
    barrier = table_cells(Row("barrier", "", 0, 2, {"mpiplus": 1.0}, {}, {}), ("mpiplus",))
    assert barrier == ["barrier", "-", "-", "1.00", "-"]


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("ping_pong", 2.0),
        ("broadcast", 1.0),
        ("all_gather_into_tensor", 0.75),
        ("reduce_scatter_tensor", 0.75),
        ("all_to_all_single", 0.75),
        ("barrier", None),
    ],
)
def test_the_bus_bandwidth_is_that_of_nccl_tests(operation: str, factor: float | None) -> None:
    """On 4 ranks, of a million bytes in a millisecond, which is 1 GB/s."""
    found = Row(operation, "float32", 10**6, 4, {"mpiplus": 1000.0, FRONT_END: 3.0}, {}, {})
    assert found.bus_gb_per_s("mpiplus") == factor
    assert found.bus_gb_per_s(FRONT_END) is None  # it moves nothing
    assert found.bus_gb_per_s("gloo") is None  # not measured
    assert bus_factor(operation, 1) is None


def test_the_bus_in_words() -> None:
    assert BUS.in_words() == (
        "the bus, all ranks at once: 12.3 us for 8 B; 16.78 GB/s to the device, 8.39 from it, 4.19 GB/s each way "
        "at once (16 MiB)"
    )
    assert BUS.to_json()["gb_per_s"] == BUS.gb_per_s


@pytest.mark.parametrize(
    ("us", "text"), [(None, "-"), (1.234, "1.23"), (-1.2, "-1.20"), (12.34, "12.3"), (9876.5, "9,876")]
)
def test_microseconds_are_written_to_three_digits(us: float | None, text: str) -> None:
    assert format_us(us) == text


#: Options of the command, and why they are refused.
REFUSED = {
    "--ops all_reduce,all_shuffle": "no operation all_shuffle; there are all_reduce, ping_pong",
    "--train --ops barrier": "does not go with --train",
    "--train --sizes 8": "does not go with --train",
    "--train --no-raw": "does not go with --train",
    "--train ddp,fsdp1": "no way fsdp1; there are",
}
PROGRAM = """
import sys
from click.testing import CliRunner
from torchmpi_plugin.cli import main
from torchmpi_plugin.cli.bench import command
print(*command.parse_operations(None, None, "all_gather,barrier,reduce_scatter"))
for words in sys.argv[1:]:
    result = CliRunner().invoke(main, ["bench", *words.split()])
    print(result.exit_code, *result.output.split())
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
    picture = tmp_path / "out.png"
    result = python(program, "bench", "--plot", picture)
    assert result.returncode == 1
    assert re.search(r"Error: --plot needs matplotlib .*pip install matplotlib", result.stderr)
    assert "mpiplus bench" not in result.stdout
    assert not picture.exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--plot", "out.txt"], "must end in .png, .svg, .pdf"),
        (["--tune", "--no-raw"], "does not go with --tune"),
        (["--tune", "out.json", "--backends", "gloo"], "does not go with --tune"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], reason: str) -> None:
    result = CliRunner().invoke(cli.main, ["bench", *options])
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_two_ranks_on_a_host_have_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(None, None, tmp_path / "tuning.json")
    assert "or of three and more ranks on one" in files.why_not(["a", "a"])
    assert files.why_not(["a", "b"]) == files.why_not(["a", "a", "a"]) == ""
    monkeypatch.setenv("MPIPLUS_COLLECTIVES", "mpi-only")
    assert "MPIPLUS_COLLECTIVES=mpi-only forbids" in files.why_not(["a", "b"])


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("bench --sizes 8,9999999999G", "10,737,418,238,926,258,176 bytes are more than this node's memory"),
        ("info --timeout nan", "'nan' is not a number of seconds"),
        ("status --interval inf", "inf is not in the range"),
        ("status --watch nan", "--watch takes seconds"),
        ("status --timeline t.txt", "t.txt must end with .json, .json.gz or .html"),
        ("status --timeline nowhere/t.json", "there is no directory"),
    ],
)
def test_arguments_that_nothing_can_be_done_with(command: str, problem: str) -> None:
    result = CliRunner().invoke(cli.main, command.split())
    assert result.exit_code == 2
    assert problem in " ".join(click.unstyle(result.output).split())


@pytest.mark.parametrize("text", ["", "0", "0K", "-8", "1.5M", "1T", "K", "1KK", "8 8"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
