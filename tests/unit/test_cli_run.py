"""What `mpiplus run` makes of its options, before it starts anything; all of torchrun's are known to it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from torchmpi_plugin.cli import main
from torchmpi_plugin.cli.run.command import Numbers, count_ranks, in_place, other_number, program_command, run
from torchmpi_plugin.cli.run.options import files_of, with_hyphens
from torchmpi_plugin.launchers.variables import started_by


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """No launcher, no batch system, and nothing may be started."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_NTASKS", "PBS_NODEFILE", "LSB_DJOB_NUMPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchmpi_plugin.jobs.job.Attempts", lambda *_, **__: pytest.fail("it started something"))
    (tmp_path / "train.py").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-n", "0", "train.py"], "0 is not in the range"),
        (["train.py"], "how many ranks"),
        (["-n", "2", "nowhere.py"], "the script 'nowhere.py' does not exist"),
        (["-n", "2", "."], "is a directory"),
        (["-n", "2", "-m", "no_such_module.at.all"], "there is no module"),
        (["-n", "2", "-c", "print(1)"], "there is no command 'print\\(1\\)'.*python -c"),
        (["-n", "2", "-m", "-c", "x"], "exclude each other"),
        (["-n", "2", "-c", "echo it's"], "is no command line: No closing quotation"),
        (["-n", "2", "--local-ranks-filter", "\u00b2", "train.py"], "is no list of ranks"),
        (["-n", "2", "--hostfile", "bytes", "train.py"], "the hostfile 'bytes' cannot be read"),
        (["-n", "2", "--nproc-per-node", "2", "train.py"], "exclude each other"),
        (["-n", "2", "--stdout", "{who}", "train.py"], "unknown field {who}"),
        (["-n", "2", "--hosts", "a:x", "train.py"], "is no node"),
        (["-n", "9", "--hosts", "a:2", "train.py"], "do not fit"),
        (["-n", "2", "--attempt-timeout", "nan", "train.py"], "'nan' is not a number of seconds"),
        (["--nproc-per-node", "gpu", "train.py"], "tensors on the CPU; give a number, auto or cpu"),
        (["-n", "2", "--nnodes", "1:2", "train.py"], "needs the names of at least 1 node, .* give none"),
        (["-n", "2", "--nnodes", "2:3", "--hosts", "a", "train.py"], "needs the names of at least 2 .* give 1 of them"),
        (["-n", "2", "--nnodes", "2:1", "train.py"], "the lower number comes first"),
        (["-n", "2", "--restart-on", "signal,what", "train.py"], "'what' is no end of a job; there are any, signal"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, ["run", *words])
    assert result.exit_code == 2, result.output
    assert click.unstyle(" ".join(result.output.split())).find("Error: ") > 0
    assert re.search(problem, " ".join(result.output.split()))


def test_no_room_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchmpi_plugin.jobs.job.Attempts", lambda *_, **__: Path("/dev/full").write_text("x"))
    result = CliRunner().invoke(main, ["run", "-n", "2", "train.py"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "has no room: [Errno 28] No space left on device" in result.output


def test_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    assert program_command("train.py", ["-m", "x"], False, False) == [sys.executable, "train.py", "-m", "x"]
    assert program_command("json.tool", ["x"], True, False) == [sys.executable, "-m", "json.tool", "x"]
    assert program_command("echo", ["a b"], False, True) == ["echo", "a b"]
    assert program_command("python3", ["-u", "train.py"], False, False) == [sys.executable, "-u", "train.py"]
    assert program_command("echo 'a b' c", [], False, True) == ["echo", "a b", "c"]


def test_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun; a command needs none."""
    monkeypatch.setenv("PYTHON_EXEC", "/bin/sh")
    assert program_command("json.tool", [], True, False) == ["/bin/sh", "-m", "json.tool"]
    monkeypatch.setenv("PYTHON_EXEC", "/no/python")
    assert program_command("echo", [], False, True) == ["echo"]
    with pytest.raises(click.UsageError, match="there is no program '/no/python', which PYTHON_EXEC names"):
        program_command("train.py", [], False, False)


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_ranks(4, None, None, None, None) == Numbers(4, None)
    assert count_ranks(4, None, 2, None, None) == Numbers(4, 2)
    assert count_ranks(None, 4, None, None, None) == Numbers(4, 1)
    assert count_ranks(None, 4, None, "a,b,c", None) == Numbers(4, 3)
    monkeypatch.setenv("SLURM_NTASKS", "6")
    assert count_ranks(None, None, None, None, None) == Numbers(6, None)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"WORLD_SIZE": "2", "RANK": "0"}, True),
        ({"WORLD_SIZE": "1", "RANK": "0"}, False),  # a leftover, and not what -n 4 asks for
        ({"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),  # srun --pty bash
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "1"}, False),  # with --mpi=pmi2
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "1"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, True),
    ],
)
def test_already_under_a_launcher(environment: dict[str, str], expected: bool) -> None:
    assert (in_place(4, environment) is not None) is expected
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}  # enough for one rank
    assert in_place(None, alone) is not None and in_place(1, alone) is not None


def test_another_number_than_the_launchers() -> None:
    """Both are named; torchrun on each node has started all ranks, whatever srun has."""
    launch = started_by({"OMPI_COMM_WORLD_SIZE": "2"})
    assert launch is not None
    assert other_number(launch, 2, None, None) == other_number(launch, None, None, None) == []
    assert other_number(launch, None, 1, None) == []  # it may be one on each of two nodes
    told = other_number(launch, 2, None, 2)[0]
    for words in ("-n 2 --nnodes 2 asks for 4 rank", "one of 2 that Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=2"):
        assert words in told
    torchrun = started_by(
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": ""}
    )
    assert torchrun == ("torchrun", 4, "WORLD_SIZE")


PAGE = Path(__file__).parents[2] / "docs/launching.md"


def test_each_option_is_known() -> None:
    theirs = [action.option_strings for action in get_args_parser()._actions if action.option_strings]
    ours = {spelling for option in run.params for spelling in option.opts}
    wanted = {spelling for spellings in theirs for spelling in spellings} - {"-h", "--help"}
    assert sorted({with_hyphens(spelling) for spelling in wanted} - ours) == []
    parsed = run.make_context("run", ["--log_dir", "a_b", "--nproc_per_node=2", "c_d.py", "--e_f"]).params
    found = [parsed[name] for name in ("log_dir", "nproc_per_node", "program", "arguments")]
    assert found == ["a_b", 2, "c_d.py", ("--e_f",)]


def test_each_option_is_in_the_table() -> None:
    text = PAGE.read_text()
    table = text[text.index("| of torchrun") :].split("\n\n")[0]
    names = {max(a.option_strings, key=len) for a in get_args_parser()._actions if a.option_strings} - {"--help"}
    missing = [name for name in sorted(names) if name.replace("_", "-") not in table]
    assert missing == []


@pytest.mark.parametrize(
    ("given", "stdout"), [("logs", "logs/attempt_{attempt}/{rank}/stdout.log"), ("a{b}", "a{{b}}/attempt_{attempt}/")]
)
def test_files_below_a_directory(given: str, stdout: str) -> None:
    files = files_of(given, None, "own")
    assert (files["stdout"] or "").startswith(stdout)
    assert files["stderr"] == "own"
    assert set(files_of(None, None, None).values()) == {None}
