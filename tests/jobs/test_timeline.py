"""`mpiplus run --timeline` and `mpiplus status --timeline`: what ranks did, also those that were killed."""

from __future__ import annotations

import pytest
import test_status
from job_runs import SCRIPTS, Job
from launch_runs import launch, mpiplus
from trace_rules import SECONDS_LATE, Event, check, straggler


def seconds(events: list[Event], name: str) -> float:
    return 1e-6 * sum(event["dur"] for event in events if event["ph"] == "X" and event["name"] == name)


@pytest.mark.parametrize("collectives", ["auto", "mpi-only"])
def test_a_straggler(job: Job, collectives: str) -> None:
    """DDP waits for rank 1, at the line of its backward(); and the ranks' files are gone."""
    script = straggler(job.directory)
    words = ("run", "-n", 3, "--timeline", "t.json", script)
    outcome = mpiplus(job, *words, environment={"MPIPLUS_COLLECTIVES": collectives}).ended()
    assert "of 3 of 3 ranks" in outcome.stderr
    events = check(job.directory / "t.json")
    assert seconds(events, "waits for rank 1") > 0.5 * 2 * 4 * SECONDS_LATE
    slices = [event for event in events if event["ph"] == "X" and "args" in event]
    backward = next(n for n, line in enumerate(script.read_text().splitlines(), 1) if "backward()" in line)
    of_ddp = [e for e in slices if e["args"].get("at") == f"{script}:{backward}" and e["name"] == "all_reduce"]
    assert len(of_ddp) >= 3 * 12 and of_ddp[-1]["args"]["op"] == "SUM" and of_ddp[-1]["args"]["dtype"] == "float32"
    assert sum(event["name"] == "message" and event["ph"] == "s" for event in events) == 3 * 12
    assert any(event["name"] == "complete, not yet asked for" for event in events)
    assert not (job.directory / "t.json.calls").exists()


def test_messages_that_cross(job: Job) -> None:
    """Each arrow joins two calls of one length; and it is seen when a future was waited for."""
    launch(job, 2, "crossing.py", options=("--timeline", "t.json")).ended()
    events = check(job.directory / "t.json")
    ends: dict[int, list[set[int]]] = {}
    for event in events:
        if event["name"] == "message":
            around = [e for e in events if e["ph"] == "X" and "args" in e and e["tid"] == event["tid"]]
            around = [e for e in around if -0.01 <= event["ts"] - e["ts"] <= e["dur"] + 0.01]
            ends.setdefault(event["id"], []).append({e["args"]["bytes"] for e in around})
    assert len(ends) == 3 * 20 + 2 * 2 * 50
    names = {event["args"]["name"].split(" (")[0] for event in events if event["name"] == "thread_name"}
    assert names == {f"rank {rank}, {group}" for rank in (0, 1) for group in ("default_pg", "1")}
    assert all(sent & received for sent, received in ends.values()), ends
    assert seconds(events, "complete, not yet asked for") > 2 * 0.04


def test_ranks_that_are_killed(job: Job) -> None:
    """They leave what they had: the calls before, and one that others wait in."""
    outcome = launch(job, 3, "recorded_and_killed.py", options=("--timeline", "t.json"))
    assert outcome.code not in (0, None)
    events = check(job.directory / "t.json")
    done = [event for event in events if event["name"] == "all_reduce"]
    assert [sum(event["tid"] == rank for event in done) for rank in (1, 2, 3)] == [50] * 3
    assert sum(event["name"] == "barrier (not complete)" for event in events) == 2


def test_a_rank_without_room(job: Job) -> None:
    """Its timeline is lost, and nobody else's."""
    outcome = launch(job, 2, "no_room_for_calls.py", options=("--timeline", "t.json")).ended()
    outcome.says("there will be no timeline of rank 1: .*No space left", "1 operation of 1 of 2 ranks")
    check(job.directory / "t.json")


@pytest.mark.every_change
def test_of_a_running_job(job: Job) -> None:
    """However it was started."""
    command = job.installation.command(test_status.RANKS, [str(SCRIPTS / "asked.py"), "sleeps"])
    with test_status.running(job, command) as environment:
        test_status.told_when_waiting(environment)
        done = test_status.asked(environment, "--timeline", job.directory / "t.json")
        assert done.returncode == 0 and "of 3 of 3 ranks" in done.stderr, done.stderr
        events = check(job.directory / "t.json")
        assert any(event["name"].endswith("(not complete)") for event in events), events
