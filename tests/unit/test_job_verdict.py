"""Which rank is to blame, and what is said about it."""

from __future__ import annotations

from torchmpi_plugin.jobs.outcome import Ending, RankRecord
from torchmpi_plugin.jobs.verdict import describe_ending, find_culprit, judge, name_ranks, signal_name


def records(count: int = 3) -> list[RankRecord]:
    return [RankRecord(rank, host=f"h{rank}") for rank in range(count)]


def ending(found: list[RankRecord], order: list[int], **more) -> Ending:
    return Ending(found, [found[rank] for rank in order], **{"launcher_code": 1, **more})


def test_success() -> None:
    found = records()
    for record in found:
        record.code = 0
    assert judge(ending(found, [2, 0, 1], launcher_code=0), "mpirun") == (0, None, "")


def test_the_first_to_fail_is_to_blame() -> None:
    """Not the lowest, nor those that were ended because of it."""
    found = records()
    found[2].code = 3
    found[0].code, found[0].signal, found[0].ended_by_us = 143, 15, True
    found[1].code, found[1].signal, found[1].ended_by_mpi = 137, 9, True
    result = judge(ending(found, [0, 2, 1]), "mpirun")
    assert result.returncode == 3
    assert result.failure is not None
    assert (result.failure.rank, result.failure.host, result.failure.exit_code) == (2, "h2", 3)
    assert result.message.endswith("rank 2 on host h2 failed first: exit code 3; the other 2 ranks were ended")


def test_an_abort_is_known_by_its_last_words() -> None:
    """mpirun has killed all; one of them had said why."""
    found = records()
    for record in found:
        record.code, record.signal, record.ended_by_mpi = 137, 9, True
    found[1].heard(["Traceback (most recent call last)\n", "ValueError: no\n"], 5.0)
    found[0].heard(["Traceback (most recent call last)\n", "DistBackendError: rank 1 has gone\n"], 6.0)
    result = judge(ending(found, [0, 1, 2], launcher_code=6), "mpirun")
    assert result.failure is not None
    assert (result.failure.rank, result.failure.exit_code) == (1, 6)
    assert result.failure.traceback.endswith("ValueError: no\n")
    assert result.message.splitlines()[-1].startswith("mpiplus run: rank 1 on host h1 failed first: ended the job")


def test_a_lost_host() -> None:
    found = records()
    found[2].gone = True
    found[0].ended_by_us = found[1].ended_by_us = True
    assert find_culprit([found[2]], found) is found[2]
    assert "lost without a word" in describe_ending(found[2])


def test_nobody_to_blame() -> None:
    found = records()
    found[1].code = 0
    for record in (found[0], found[2]):
        record.code, record.signal, record.ended_by_mpi = 137, 9, True
    result = judge(ending(found, [1, 0, 2], noise="a long story"), "mpirun")
    assert (result.returncode, result.failure) == (1, None)
    assert "a long story" in result.message
    assert "Rank 1 had ended with exit code 0, perhaps without MPI_Finalize" in result.message


def test_the_time_limit_and_signals() -> None:
    found = records()
    for record in found:
        record.code, record.signal, record.ended_by_us = 143, 15, True
    late = judge(ending(found, [0, 1, 2], is_timeout=True, timed_out=[0, 2]), "mpirun")
    assert late.returncode == 124
    assert "ranks 0, 2 had not ended" in late.message
    ended = judge(ending(found, [0, 1, 2], signalled=15), "mpirun")
    assert (ended.returncode, ended.failure) == (143, None)
    assert "SIGTERM was passed on" in ended.message


def test_a_job_that_did_not_start() -> None:
    told = Ending(records(), launcher_code=1, trouble="the ranks did not come up", noise="no such host", missing=[1, 2])
    result = judge(told, "mpirun")
    assert result.returncode == 1
    for words in ("no such host", "did not start", "ranks 1, 2 did not", "mpiplus info"):
        assert words in result.message


def test_the_last_words_start_at_the_traceback() -> None:
    record = RankRecord(0)
    record.heard(["noise\n"] * 100, 1.0)
    record.heard(["Traceback (most recent call last)\n", "  File\n", "ValueError\n"], 2.0)
    assert record.last_words() == "Traceback (most recent call last)\n  File\nValueError\n"
    assert record.complained == 2.0


def test_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(250) == "signal 250"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(20)).endswith("14, 15 and 4 more")
