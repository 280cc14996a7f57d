"""`mpiplus run` starts what it is told, once per rank, and shows and keeps what it prints."""

from __future__ import annotations

import re

from job_runs import Job
from launch_runs import MPIPLUS, MPIPLUS_MODULE, launch, mpiplus


def test_arguments_output_and_variables(job: Job) -> None:
    """Options after the script are the script's; stale variables of another job do not reach the ranks."""
    environment = {"GREETING": "a b; c", "RANK": "7", "LOCAL_RANK": "7"}
    outcome = launch(job, 3, "launched.py", "hello", "--lr", "0.1", "-n", "9", environment=environment).ended()
    for rank in range(3):
        outcome.says(rf"\[rank {rank}\] hello --lr 0.1 -n 9 {rank} 3 0 1 a b; c\n")
        outcome.says(rf"\[rank {rank}\] ümläut, and no end of line\n", rf"\[rank {rank}\] to stderr\n")
    assert outcome.stderr.count("to stderr") == 3
    outcome.says_not("\x1b", "mpiplus run:")


def test_a_module_of_the_working_directory(job: Job) -> None:
    (job.directory / "my_module.py").write_text("import sys; print('module', sys.argv[1:])")
    mpiplus(job, "run", "-n", 2, "-m", "my_module", "-m", "x").ended().says(r"\[rank 1\] module \['-m', 'x'\]")


def test_modules_of_the_working_directory_do_not_disturb_the_launcher(job: Job) -> None:
    for name in ("json", "socket", "signal", "mpi4py"):
        (job.directory / f"{name}.py").write_text("raise SystemExit('imported the wrong module')")
    mpiplus(job, "run", "-n", 2, "-c", "echo", "fine").ended().says(r"\[rank 0\] fine", r"\[rank 1\] fine")


def test_input_is_for_rank_0(job: Job) -> None:
    """The others see its end at once, rather than never. (Open MPI does not tell rank 0 of the end.)"""
    (job.directory / "program.sh").write_text('if [ "$RANK" = 0 ]; then head -n 2; else cat; fi')
    command = ["sh", "-c", f"printf 'one\\ntwo\\n' | {MPIPLUS} run -n 3 -c sh program.sh"]
    outcome = job.start(command, None).ended()
    assert outcome.stdout == "[rank 0] one\n[rank 0] two\n"


def test_a_reader_that_has_seen_enough(job: Job) -> None:
    """Nothing goes on to print into a closed pipe, or fails where there is no output."""
    outcome = job.start(["sh", "-c", f"{MPIPLUS} run -n 2 -c yes | head -n 2"], None).ended().says_not("Traceback")
    assert len(outcome.stdout.splitlines()) == 2
    job.start(["sh", "-c", f"{MPIPLUS} run -n 2 -c echo hi >&-"], None).ended().says_not("Traceback")


def test_colours_on_a_terminal(job: Job) -> None:
    """And none where NO_COLOR is set."""
    command = ["script", "-qec", f"{MPIPLUS} run -n 2 -c echo hi", "/dev/null"]
    job.start(command, None).ended().says(r"\x1b\[33m\[rank 1\]\x1b\[0m hi")
    job.start(command, {"NO_COLOR": "1"}).ended().says(r"\[rank 1\] hi").says_not("\x1b")


def test_a_command(job: Job) -> None:
    mpiplus(job, "run", "-n", 2, "--no-prefix", "--no-python", "echo", "one", "two").ended().says("(?m)^one two$")


def test_a_file_per_rank(job: Job) -> None:
    formats = ("--stdout", "logs/{world_size}/{rank}-{local_rank}.out", "--stderr", "logs/{node_rank}-{rank}.err")
    launch(job, 2, "launched.py", "hello", "x", options=formats).ended().says(r"\[rank 1\] hello")
    for rank in range(2):
        assert (job.directory / f"logs/2/{rank}-{rank}.out").read_text().startswith("hello x")
        assert (job.directory / f"logs/0-{rank}.err").read_text() == "to stderr\n"


def test_a_directory_per_attempt_and_rank(job: Job) -> None:
    """As torchrun has it; and the launcher tells what ``@record`` has written where no traceback was shown."""
    options = ("--log-dir", "logs", "--max-restarts", 1)
    outcome = launch(job, 2, "recorded.py", options=options).ended(1)
    assert outcome.stderr.count("rank 1 on node") >= 2
    assert len(re.findall("rank 1 on node .* has recorded: ArithmeticError: no more\n", outcome.stderr)) == 2
    for attempt in range(2):
        directory = job.directory / f"logs/attempt_{attempt}"
        assert [(directory / f"{rank}/stdout.log").read_text() for rank in range(2)] == [
            *("rank 0 prints\n", "rank 1 prints\n")
        ]
        assert (directory / "1/stderr.log").read_text() == "to stderr\n"
        assert "py_callstack" in (directory / "1/error.json").read_text()
        assert not (directory / "0/error.json").exists()


def test_an_error_file_that_does_not_stay(job: Job) -> None:
    """And of each node the output of some ranks only, which all do print into their files."""
    options = ("--local-ranks-filter", "0", "--stdout", "{rank}.out")
    outcome = launch(job, 2, "recorded.py", options=options).ended(1)
    outcome.says("rank 0 prints", "has recorded: ArithmeticError: no more").says_not(r"\[rank 1\]")
    assert (job.directory / "1.out").read_text() == "rank 1 prints\n"


def test_a_file_that_cannot_be_written(job: Job) -> None:
    (job.directory / "logs").write_text("a file where a directory is needed")
    outcome = launch(job, 2, "launched.py", "hello", options=("--stdout", "logs/{rank}"))
    outcome.ended(127).says("cannot start on node .*logs").says_not("Traceback")


def test_in_place_under_a_launcher(job: Job) -> None:
    """It does not start ranks of ranks, and says which options have no effect; the size is mpirun's."""
    program = (
        "import os; from mpi4py import MPI; world = MPI.COMM_WORLD; world.Barrier(); "
        "os.write(1, f'[{world.Get_rank()}] size {world.Get_size()}\\n[{world.Get_rank()}] end\\n'.encode())"
    )
    (job.directory / "program.py").write_text(program)
    words = [*MPIPLUS_MODULE, "run", "-n", "4", "--timeout", "50", "program.py"]
    outcome = job.start(job.installation.command(2, words), None).succeeded(2)
    assert outcome.output.count("size 2") == 2
    assert outcome.output.count("--timeout has no effect") == 1
    assert outcome.output.count("-n 4 asks for 4 ranks, but this process is already one of 2") == 1


def test_verbose_says_how_it_starts(job: Job) -> None:
    outcome = mpiplus(job, "run", "-n", 1, "-v", "-c", "true").ended()
    outcome.says(re.escape(job.installation.vendor) + "|Hydra|Intel", "mpi(run|exec).* -n 1 ")


def test_hosts_and_arguments_for_mpirun(job: Job) -> None:
    """This node by name takes as many ranks as it is said to have; the rest of the command line is mpirun's."""
    argument = "--mca mpi_show_handle_leaks 0" if job.installation.vendor == "Open MPI" else "-genv EXTRA 1"
    options = ("--hosts", "localhost:3", "--mpi-args", argument)
    launch(job, 3, "launched.py", "hello", options=options).ended().says(r"\[rank 2\] hello 2 3 0")
