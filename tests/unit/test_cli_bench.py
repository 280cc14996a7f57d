"""The parts of ``mpiplus bench`` that need neither MPI nor a clock."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from torchmpi_plugin import cli
from torchmpi_plugin.cli import measure
from torchmpi_plugin.cli.bench import parse_names, parse_sizes
from torchmpi_plugin.cli.measure import Timing, calls_per_block, interleave
from torchmpi_plugin.cli.report import Report, format_us, open_console, table_cells, table_header
from torchmpi_plugin.cli.results import RAW, SMALL, Overlap, Row, comparisons
from torchmpi_plugin.cli.sizes import fit_size, format_size, parse_size

ALL = (RAW, "mpiplus", "gloo")


class OneRank:
    """The ranks of a measurement in a single process."""

    def synchronise(self) -> None:
        """Wait for nobody."""

    def slowest(self, seconds: float) -> float:
        """Return the only time there is."""
        return seconds


class Clock:
    """A clock that stands still but for the work done on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def work(self, seconds: float) -> measure.Call:
        """Return a call that takes ``seconds``."""

        def call() -> None:
            self.now += seconds

        return call


def row(size: int = 8, **us: float) -> Row:
    """Return the row of an all_reduce with these times."""
    return Row("all_reduce", "float32", size, us, {name: [time] for name, time in us.items()}, {})


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


@pytest.mark.parametrize("text", ["", "0", "0K", "-8", "1.5M", "1T", "K", "1KK", "8 8"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(8, "8 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1536 B"), (64 * 1024**2, "64 MiB")]
)
def test_a_size_is_written_exactly(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


def test_a_size_grows_to_whole_elements_for_every_rank() -> None:
    assert fit_size(8, element=4, parts=1) == 8
    assert fit_size(8, element=4, parts=3) == 12
    assert fit_size(8, element=4, parts=4) == 16
    assert fit_size(1, element=2, parts=1) == 2


def test_the_median_ignores_one_disturbed_turn() -> None:
    assert Timing(calls=1, seconds=[1.0, 900.0, 2.0]).median == 2.0
    assert Timing(calls=1, seconds=[1.0, 2.0]).median == 1.5


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 10), (1.0, 1), (4e-3, 3)])
def test_a_block_lasts_about_as_long_as_asked(monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int) -> None:
    clock = Clock(monkeypatch)
    assert calls_per_block(clock.work(seconds), block_seconds=0.01, ranks=OneRank()) == calls


def test_calls_that_take_no_time_do_not_fill_a_block_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_per_block(Clock(monkeypatch).work(0.0), block_seconds=0.01, ranks=OneRank()) > 1000


def test_contestants_take_turns_and_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    order: list[str] = []

    def contestant(name: str, seconds: float) -> measure.Call:
        work = clock.work(seconds)

        def call() -> None:
            order.append(name)
            work()

        return call

    timings = interleave({"a": contestant("a", 0.5), "b": contestant("b", 2.0)}, 3, 1.0, OneRank())

    turns = [name for name, _ in itertools.groupby(order)]
    assert turns == ["a", "b"] * 4  # the first round chooses how many calls make a block
    assert timings["a"].calls == 2
    assert timings["b"].calls == 1
    assert timings["a"].seconds == pytest.approx([0.5] * 3)
    assert timings["b"].seconds == pytest.approx([2.0] * 3)


def test_the_first_backend_is_compared_with_raw_and_the_others_with_it() -> None:
    assert comparisons(ALL) == [("mpiplus", RAW), ("gloo", "mpiplus")]
    assert comparisons(("mpiplus", "gloo")) == [("gloo", "mpiplus")]
    assert comparisons((RAW, "gloo")) == [("gloo", RAW)]


def test_cells_stand_under_their_titles() -> None:
    titles = table_header(ALL)
    cells = table_cells(row(raw=2.0, mpiplus=5.0, gloo=400.0), ALL)
    assert dict(zip(titles, cells, strict=True)) == {
        "operation": "all_reduce",
        "dtype": "float32",
        "size": "8 B",
        "raw": "2.00",
        "mpiplus": "5.00",
        "gloo": "400",
        "mpiplus/raw": "2.50",
        "gloo/mpiplus": "80.00",
        "mpiplus-raw": "3.00",
    }


def test_large_data_and_refusals_leave_dashes() -> None:
    large = table_cells(row(SMALL * 2, raw=2.0, mpiplus=5.0, gloo=400.0), ALL)
    assert large[-1] == "-"
    without_raw = table_cells(row(mpiplus=5.0, gloo=400.0), ALL)
    assert without_raw[3:] == ["-", "5.00", "400", "-", "80.00", "-"]
    barrier = table_cells(Row("barrier", "", 0, {"mpiplus": 1.0}, {}, {}), ("mpiplus",))
    assert barrier == ["barrier", "-", "-", "1.00"]


@pytest.mark.parametrize(
    ("us", "text"), [(None, "-"), (1.234, "1.23"), (-1.2, "-1.20"), (12.34, "12.3"), (9876.5, "9,876")]
)
def test_microseconds_are_written_to_three_digits(us: float | None, text: str) -> None:
    assert format_us(us) == text


def test_the_json_holds_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Row("all_reduce", "bfloat16", 8, {"mpiplus": 7.0}, {"mpiplus": [7.0]}, {RAW: "no such datatype"})
    report = Report(
        {"ranks": 2}, {"repeats": 1}, ALL, [row(raw=2.0, mpiplus=5.0), refused], [Overlap("mpiplus", 8.0, 2.0)]
    )
    report.print(open_console(rank=0))
    found = json.loads(json.dumps(report.to_json()))
    printed = capsys.readouterr().out

    assert found["operations"][0]["ratio"] == {"mpiplus/raw": 2.5, "gloo/mpiplus": None}
    assert found["operations"][0]["extra_us"] == {"mpiplus": 3.0}
    assert found["operations"][0]["turns_us"] == {"raw": [2.0], "mpiplus": [5.0]}
    assert found["overlap"] == [{"contestant": "mpiplus", "sync_us": 8.0, "wait_us": 2.0, "percent": 25.0}]
    assert found["notes"] == ["raw has no all_reduce of bfloat16: no such datatype"]
    for text in ("all_reduce", "2.50", "25.0 %", *found["notes"]):
        assert text in printed


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    Report({}, {}, ALL, [row(raw=2.0)], []).print(open_console(rank=1))
    assert capsys.readouterr().out == ""


def test_lists_are_split_at_commas() -> None:
    assert parse_names(None, None, "mpiplus, gloo,") == ["mpiplus", "gloo"]
    assert parse_sizes(None, None, "8,1K") == [8, 1024]
    assert parse_sizes(None, None, None) is None
    with pytest.raises(click.BadParameter, match="'x' is not a size"):
        parse_sizes(None, None, "8,x")


def test_the_command_lists_its_subcommands() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    assert "bench" in result.output


def test_an_unknown_subcommand_is_refused() -> None:
    result = CliRunner().invoke(cli.main, ["stir"])
    assert result.exit_code == 2
    assert "No such command 'stir'" in result.output


@pytest.mark.timeout(120)
def test_an_unknown_operation_is_refused() -> None:
    # In a process of its own: the table of operations imports mpi4py, and that starts MPI.
    command = [sys.executable, "-m", "torchmpi_plugin.cli", "bench", "--ops", "all_reduce,all_shuffle"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 2
    assert "no operation all_shuffle; there are all_reduce, ping_pong" in " ".join(result.stderr.split())
