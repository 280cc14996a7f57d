"""Which rank is to blame, and what is said about it."""

from __future__ import annotations

from torchmpi_plugin.jobs.outcome import Ending, RankRecord, result_of
from torchmpi_plugin.jobs.stderr import TRACEBACK, StderrTail
from torchmpi_plugin.names import NOT_ARRIVED


def records(count: int = 3) -> list[RankRecord]:
    return [RankRecord(rank, node=f"h{rank}") for rank in range(count)]


def ending(found: list[RankRecord], order: list[int], **more) -> Ending:
    return Ending(found, [found[rank] for rank in order], **{"launcher_code": 1, **more})


def test_an_abort_is_known_by_its_last_words() -> None:
    """mpirun has killed all; one of them had said why."""
    found = records()
    for record in found:
        record.code, record.signal, record.ended_by_mpi = 137, 9, True
    found[1].heard(["Traceback (most recent call last)\n", "ValueError: no\n"], 5.0)
    found[0].heard(["Traceback (most recent call last)\n", "DistBackendError: rank 1 has gone\n"], 6.0)
    result = result_of(ending(found, [0, 1, 2], launcher_code=6), "mpirun")
    assert result.failure is not None
    assert (result.failure.rank, result.failure.exit_code) == (1, 6)
    assert result.failure.traceback.endswith("ValueError: no\n")
    assert result.message.splitlines()[-1].startswith("mpiplus run: rank 1 on node h1 failed first: ended the job")


def test_the_last_line_says_who_what_and_where() -> None:
    """Once, of all ranks that say the same; without the traceback, which stands above, unless that was not shown."""
    found = records()
    for record in found:
        record.code = 1
        lines = [f"{TRACEBACK}:\n", '  File "a/train.py", line 5, in step\n', "    loss()\n"]
        lines += [
            '  File "/x/site-packages/torch/y.py", line 7, in all_reduce\n',
            f"ValueError: bad on {record.rank}\n",
        ]
        record.heard(lines, 1.0)
    what = "mpiplus run: rank 1 on node h1 failed first: exit code 1 (ValueError: bad on 1, at a/train.py:5 in step)"
    assert result_of(ending(found, [1, 0, 2]), "mpirun").message == f"{what}; the same on ranks 0, 1, 2"
    found[1].hidden = True
    message = result_of(ending(found, [1, 0, 2]), "mpirun").message
    assert "\n    ValueError: bad on 1\n" in message and message.endswith("the same on ranks 0, 1, 2")


def test_who_is_late_is_to_blame() -> None:
    """Not the one that waited for it."""
    found = records()
    found[0].code = 1
    doing = "rank 1 (does not wait; its last call was barrier (group '0'), at train.py:6 in step)"
    error = f"E: all_reduce timed out on rank 0. {NOT_ARRIVED}{doing}; arrived: ranks 0, 2"
    found[0].heard([f"{TRACEBACK}:\n", '  File "train.py", line 9, in step\n', f"{error}\n"], 1.0)
    message = result_of(ending(found, [0]), "mpirun").message
    assert message == f"mpiplus run: {doing} did not come; rank 0 on node h0 gave up waiting first: exit code 1"


def test_nobody_to_blame() -> None:
    found = records()
    for record in (found[0], found[2]):
        record.code, record.signal, record.ended_by_mpi = 137, 9, True
    found[1].code, found[1].signal, found[1].ended_by_mpi = 137, 9, True
    result = result_of(ending(found, [1, 0, 2], noise="a long story"), "mpirun")
    assert (result.returncode, result.failure) == (1, None)
    assert "a long story" in result.message
    assert "no rank had failed before" in result.message


def tail_of(text: str) -> str:
    tail = StderrTail()
    for line in text.splitlines(keepends=True):
        tail.add(line)
    return tail.text()


def test_a_long_traceback_is_kept() -> None:
    """As far as 400 lines; of a longer one its start and its end."""
    frames = "".join(f"  File number {number}\n" for number in range(200))
    text = f"Traceback (most recent call last):\n{frames}ValueError: no\n"
    assert tail_of("noise\n" * 50 + text) == text
    text = f"Traceback (most recent call last):\n{frames * 4}ValueError: no\n"
    lines = tail_of(text).splitlines()
    assert len(lines) == 401
    assert (lines[0], lines[1], lines[-1]) == (text.splitlines()[0], "  File number 0", "ValueError: no")
    assert lines[100] == "... 402 lines left out ..."


def test_output_that_nobody_has_read() -> None:
    found = records()
    assert "the last 7 characters of output are lost" in result_of(ending(found, [], unread=7), "mpirun").message
