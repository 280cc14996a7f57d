"""A timeline of two nodes that share no files: on one clock, with the calls of both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from made_up_calls import about, all_reduces, leave
from mpi_installations import Installation, run_limited
from network import ONE_ON_EACH, Hosts, launch, mpiplus_run
from trace_rules import SECONDS_LATE, STRAGGLER, check, straggler

from torchmpi_plugin.timeline import operations, rows, trace

LATE = Path(__file__).parents[1] / "jobs/scripts/late.py"


def test_waits_for_a_rank_of_another_node(three_hosts: Hosts, installation: Installation) -> None:
    """Of three nodes the last one learns of the others by a message that has waited for theirs."""
    words = launch(three_hosts, installation.mpiexec, installation.vendor, 1, [sys.executable, str(LATE)])
    code, output = run_limited(words, {**installation.full_environment(), "UCX_TLS": "tcp"}, 60)
    assert code == 0 and output.count("] end\n") == 3, output


def test_two_nodes(two_hosts: Hosts, installation: Installation, tmp_path: Path) -> None:
    """Pretended nodes have one clock, so what is measured is the error; how small it gets is up to what else runs."""
    in_shell = ["sh", "-c", f'MPIPLUS_TIMELINE={tmp_path}/$(hostname) exec "$@"', "sh"]
    command = [*in_shell, sys.executable, str(straggler(tmp_path))]
    words = launch(two_hosts, installation.mpiexec, installation.vendor, 2, command)
    code, output = run_limited(words, {**installation.full_environment(), "UCX_TLS": "tcp"}, 120)
    assert code == 0, output
    job = operations.in_directory(tmp_path / "node1")
    assert [each["host"] for each in job.ranks] == ["node1", "node1", "node2", "node2"], output
    clocks = rows.read(next((tmp_path / "node1").glob("*.0.json"))).clocks
    assert len(clocks) == 2 and all(abs(each["offset"]) <= each["error"] for each in clocks), clocks
    assert job.errors[1] == max(each["error"] for each in clocks) > 0, clocks
    trace.write(job, tmp_path / "t.json")
    events = check(tmp_path / "t.json")
    waits = [event for event in events if event["name"] == "waits for rank 1"]
    assert {event["pid"] for event in waits} == {1, 2}
    assert sum(event["dur"] for event in waits) > 0.5e6 * 3 * 4 * SECONDS_LATE


def test_clocks_that_are_further_off_than_an_operation_takes(tmp_path: Path) -> None:
    """No arrow goes back in time, as on a busy machine, where the clocks are compared less well."""
    for rank in range(2):
        ring = all_reduces(rank, 2, 50)
        for name in ("begun", "complete", "asked"):
            ring[name][1:51] += 600_000 * rank
        leave(tmp_path, about(rank, 2, 1), ring, [{"name": "all_reduce", "op": "SUM"}])
    trace.write(operations.in_directory(tmp_path), tmp_path / "t.json")
    assert 0 < sum(event["ph"] == "s" for event in check(tmp_path / "t.json")) < 50


@pytest.mark.parametrize(
    "script", [pytest.param(STRAGGLER, marks=pytest.mark.every_change), LATE.with_name("recorded_and_killed.py")]
)
def test_nothing_is_left(two_hosts: Hosts, installation: Installation, script: Path) -> None:
    """The files of a node come to the one where `mpiplus run` is, of a killed job too, and none stays anywhere."""
    words = mpiplus_run(two_hosts, installation.vendor, *ONE_ON_EACH, "--timeline", two_hosts.own / "t.json", script)
    code, output = run_limited(words, {**installation.full_environment(), "UCX_TLS": "tcp"}, 60)
    assert (code == 0) == (script == STRAGGLER), output
    events = check(Path(f"{two_hosts.own}-node1") / "t.json")
    count = {pid: sum(e["name"] == "all_reduce" and e["pid"] == pid for e in events) for pid in (1, 2)}
    assert count[1] == count[2] >= 30, output
    assert [path.name for node in (1, 2) for path in Path(f"{two_hosts.own}-node{node}").iterdir()] == ["t.json"], (
        output
    )
