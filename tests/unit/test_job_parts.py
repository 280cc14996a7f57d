"""The parts of `mpiplus run` that start nothing: file names, nodes, places, output."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest

from torchmpi_plugin.jobs.formats import check_format
from torchmpi_plugin.jobs.output import Stream, Terminal, destination, say
from torchmpi_plugin.launchers.layout import Node, allocated_ranks, lay_out, parse_nodes, read_hostfile
from torchmpi_plugin.node import node
from torchmpi_plugin.node.node import Place, places

# ---- file names ----


@pytest.mark.parametrize(
    ("format_", "problem"),
    [
        ("log-{rnak}", "unknown field {rnak}"),
        ("log-{}", "unknown field {}"),
        ("log-{rank", "no file name"),
        ("log-{rank!x}", "no file name"),
        ("log-{rank:x.5}", "no file name"),
        ("log", "same file for all 4"),
        ("log-{node_rank}", "same file"),
    ],
)
def test_a_format_that_cannot_work(format_: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_format(format_, 4)


# ---- nodes ----


@pytest.mark.parametrize("text", ["", "h1,,h2", "h1:", "h1:x", "h1:0", ":4"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="is no node"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1 slots=2 max-slots=4\n\n# a comment\nh2 slots=3 # and another\n", [Node("h1", 2), Node("h2", 3)]),
        ("h1:2\nh2\n", [Node("h1", 2), Node("h2", None)]),
        ("h1\nh1\nh2\n", [Node("h1", 2), Node("h2", 1)]),
    ],
)
def test_hostfiles_of_each_kind(tmp_path, text: str, hosts: list[Node]) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


def test_hostfiles_that_are_none(tmp_path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_hostfile(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match="names no node"):
        read_hostfile(tmp_path / "empty")


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


# ---- places ----


def test_places_go_by_the_order_of_ranks() -> None:
    assert places(["b", "a", "b", "a", "a"]) == [
        Place(0, 2, 0),
        Place(0, 3, 1),
        Place(1, 2, 0),
        Place(1, 3, 1),
        Place(2, 3, 1),
    ]


def test_addresses_of_interfaces_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else tells them: no route, and no name."""
    made = {"lo": "127.0.0.1", "ib0": "192.168.7.1", "docker0": "172.17.0.1"}
    interfaces = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address), SimpleNamespace(family=socket.AF_INET6)]
        for name, address in made.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "docker0") for name in made}
    )
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: (made["lo"], 9))
    assert node.addresses(of_all_interfaces=True) == ["192.168.7.1", socket.gethostname()]


def test_a_session_is_killed_and_nobody_else() -> None:
    leader, other = (
        subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    )
    children = [psutil.Process(int(process.stdout.readline())) for process in (leader, other)]
    node.kill_session(leader.pid)
    assert leader.wait(20) == -signal.SIGKILL
    until = time.monotonic() + 20
    while children[0].is_running() and children[0].status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert children[1].is_running() and other.poll() is None
    node.kill_session(other.pid)
    for process in (leader, other):
        process.wait(20)
        process.stdout.close()


# ---- output ----


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


def test_an_open_line_goes_on_unless_another_rank_speaks() -> None:
    assert show((0, b"a"), (0, b"b\n")) == "[rank 0] ab\n"
    assert show((0, b"a"), (1, b"c\n"), (0, b"b")) == "[rank 0] a\n[rank 1] c\n[rank 0] b\n"


def test_a_character_that_comes_in_two_pieces() -> None:
    assert show((0, b"\xc3"), (1, b"x\n"), (0, b"\xbc\n"), (0, b"\xff\n"), prefix=False) == "x\nü\n�\n"


def test_streams_that_lead_to_one_place(tmp_path) -> None:
    """Their lines must keep their order."""
    with (tmp_path / "a").open("a") as one, (tmp_path / "a").open("a") as other, (tmp_path / "b").open("a") as third:
        assert destination(one) == destination(other) != destination(third)
    text = io.StringIO()
    assert destination(text) == destination(text) != destination(io.StringIO())


def test_last_words_have_longer_than_a_thread_can_be_waited_for() -> None:
    """As after `mpiplus run --grace 1e10`."""
    stream = io.StringIO()
    say(stream, "the end", 1e10)
    assert stream.getvalue() == "the end"
