"""The parts of `mpiplus run` that start nothing: file names, nodes, places, output."""

from __future__ import annotations

import io

import pytest

from torchmpi_plugin.jobs.formats import check_format
from torchmpi_plugin.jobs.output import Stream, Terminal, destination
from torchmpi_plugin.launchers.layout import Node, allocated_ranks, lay_out, parse_nodes, read_hostfile
from torchmpi_plugin.node.node import Place, places


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("log-{rnak}", "unknown field {rnak}"),
        ("log-{rank!x}", "no file name"),
        ("log-{rank:x.5}", "no file name"),
        ("log", "same file for all 4"),
    ],
)
def test_a_format_that_cannot_work(words: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_format(words, 4)


@pytest.mark.parametrize("text", ["h1,,h2", "h1:", "h1:x", "h1:0", ":4"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="is no node"):
        parse_nodes(text)


def test_hostfiles(tmp_path) -> None:
    file = tmp_path / "hosts"
    with pytest.raises(ValueError, match="cannot be read"):
        read_hostfile(file)
    for text, nodes in {
        "h1 slots=2 max-slots=4\n\n# a comment\nh2 slots=3 # and another\n": [Node("h1", 2), Node("h2", 3)],
        "h1:2\nh2\n": [Node("h1", 2), Node("h2", None)],
        "h1\nh1\nh2\n": [Node("h1", 2), Node("h2", 1)],
    }.items():
        file.write_text(text)
        assert read_hostfile(file) == nodes
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="names no node"):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("nproc", "nnodes", "hosts", "ranks", "spread"),
    [
        (4, None, "h1:2,h2:2", 4, [("h1", 2), ("h2", 2)]),
        (3, None, "h1,h2", 3, [("h1", 2), ("h2", 1)]),
        (2, None, "h1:4,h2:4", 2, [("h1", 2)]),
        (2, 2, "h1,h2,h3", 4, [("h1", 2), ("h2", 2)]),
    ],
)
def test_ranks_are_spread(nproc: int, nnodes: int | None, hosts: str, ranks: int, spread: list) -> None:
    layout = lay_out(nproc, nnodes, hosts, environment={})
    assert (layout.ranks, list(layout.nodes)) == (ranks, spread)
    assert not layout.here


def test_where_the_ranks_are() -> None:
    """This decides whether the launcher listens to other nodes, and whether Open MPI needs its fabrics."""
    assert lay_out(2, environment={})[-2:] == (True, True)
    assert lay_out(2, hosts="localhost:2", environment={})[-2:] == (True, True)
    assert lay_out(2, environment={"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"})[-2:] == (True, False)
    assert lay_out(2, environment={"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"})[-2:] == (False, False)
    assert lay_out(2, 2, environment={"PBS_NODEFILE": "f"})[-2:] == (False, False)


def test_the_ranks_of_an_allocation(tmp_path) -> None:
    (tmp_path / "nodes").write_text("h1\nh1\nh2\n")
    assert allocated_ranks({}) is None
    assert allocated_ranks({"SLURM_NTASKS": "8"}) == 8
    assert allocated_ranks({"LSB_DJOB_NUMPROC": "6"}) == 6
    assert allocated_ranks({"PBS_NODEFILE": str(tmp_path / "nodes")}) == 3


def test_places_go_by_the_order_of_ranks() -> None:
    wanted = (0, 2, 0), (0, 3, 1), (1, 2, 0), (1, 3, 1), (2, 3, 1)
    assert places(["b", "a", "b", "a", "a"]) == [Place(*place) for place in wanted]


def test_lines_are_kept_together() -> None:
    sent: list[bytes] = []
    stream = Stream(io.BytesIO(), None, sent.append)
    stream.feed(b"one\ntw")
    assert stream.unfinished
    stream.feed(b"o\n10%\r")
    assert not stream.unfinished
    stream.feed(b"prompt> ")
    stream.flush()
    stream.feed(b"x" * 100_000)
    assert sent == [b"one\n", b"two\n10%\r", b"", b"prompt> ", b"x" * 100_000]


def show(*pieces: tuple[int, bytes], **options: bool) -> str:
    stream = io.StringIO()
    terminal = Terminal(stream, **{"prefix": True, "colour": False, **options})
    for rank, data in pieces:
        terminal.show(rank, data)
    terminal.finish()
    terminal.writer.close(10)
    assert not terminal.writer.waiting
    return stream.getvalue()


def test_pieces_of_lines() -> None:
    """An open line goes on unless another rank speaks; a character may come in two pieces."""
    assert show((0, b"a"), (0, b"b\n")) == "[rank 0] ab\n"
    assert show((0, b"a"), (1, b"c\n"), (0, b"b")) == "[rank 0] a\n[rank 1] c\n[rank 0] b\n"

    assert show((0, b"\xc3"), (1, b"x\n"), (0, b"\xbc\n"), (0, b"\xff\n"), prefix=False) == "x\nü\n�\n"


def test_streams_that_lead_to_one_place(tmp_path) -> None:
    """Their lines must keep their order."""
    with (tmp_path / "a").open("a") as one, (tmp_path / "a").open("a") as other, (tmp_path / "b").open("a") as third:
        assert destination(one) == destination(other) != destination(third)
    text = io.StringIO()
    assert destination(text) == destination(text) != destination(io.StringIO())
