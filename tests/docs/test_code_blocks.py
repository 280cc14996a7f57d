"""Every code block of the documentation runs, or is at least what it says it is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import fork_server
import pytest
from code_blocks import LANGUAGES, PAGES, ROOT, Block, all_blocks, programs, rank_numbers
from mpi_installations import Installation, find_installations
from patience import patient
from rank_runs import no_mpi_message
from sampling import share

from torchmpi_plugin.cli import main as command_line

sys.path.append(str(ROOT / "tests" / "jobs"))
from job_runs import run_process

HERE = Path(__file__).parent
SECONDS = patient(120)  # for all programs of a page together, or one block of commands
INLINE = re.compile(r"`(mpiplus (?:run|info|bench)(?: [^`]*)?)`")
SHELL = re.compile(r"[|&;<>()]+")
MPIPLUS = ("-m", "torchmpi_plugin.cli")


@pytest.fixture(scope="module")
def installation() -> Installation:
    """One MPI is enough: that the programs work on each of them is for other tests to show."""
    found, _ = find_installations()
    if not found:
        pytest.fail(no_mpi_message(), pytrace=False)
    return found[0]


@pytest.fixture
def environment(installation: Installation) -> dict[str, str]:
    """A reader's, who is root on a machine with fewer cores than ranks, perhaps."""
    found = installation.full_environment()
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1"}
    # The first `python` of the path is the fork server's client.
    path = f"{Path(fork_server.python()).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**found, **root, **crowded, "PATH": path, "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where a reader stands: in a checkout, with scripts of their own."""
    shutil.copytree(HERE / "reader", tmp_path, dirs_exist_ok=True)
    shutil.copy(HERE / "reader" / "script.py", tmp_path / "train.py")  # a command of a page may write it
    for name in ("docs", "tests", ".ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def ids(blocks: list[Block]) -> list[str]:
    return [block.place for block in blocks]


# ---- what runs ----


@pytest.mark.parametrize("ranks", rank_numbers())
def test_python_blocks_run(ranks: int, installation: Installation, environment: dict[str, str], checkout: Path) -> None:
    chosen = share(f"programs of the pages on {ranks} ranks", list(programs(ranks)), 4)
    script = [str(HERE / "run_programs.py"), str(ranks), *(blocks[0].place for blocks in chosen)]
    command = [fork_server.python(), *script] if ranks == 1 else installation.command(ranks, script)
    outcome = run_process(command, environment, checkout, SECONDS)
    wanted = [block.place for blocks in chosen for block in blocks]
    missing = [place for place in wanted if outcome.stdout.count(f"ran {place}\n") != ranks]
    if missing:
        outcome.problem(f"not run on all ranks: {missing[0]}, and {len(missing) - 1} more")
    outcome.ended()


COMMANDS = all_blocks("sh")


@pytest.mark.cases(4)
@pytest.mark.parametrize("block", COMMANDS, ids=ids(COMMANDS))
def test_commands_run(block: Block, environment: dict[str, str], checkout: Path) -> None:
    if not block.runs:
        pytest.skip(f"{block.place}: {block.reason}")
    script = f"set -euo pipefail\n{block.comments.get('before', '')}\n{block.text}"
    run_process(["bash", "-c", script], environment, checkout, SECONDS).ended()


# ---- what can be said of those that do not run, and of all others ----


def words_of(text: str) -> Iterator[list[str]]:
    """The commands of a shell script, each as its words."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in lexer:
            if SHELL.fullmatch(word):
                yield command
                command = []
            else:
                command.append(word)
        yield command


def arguments_of_mpiplus(command: list[str]) -> list[str] | None:
    for place, word in enumerate(command):
        if Path(word).name == "mpiplus":
            return command[place + 1 :]
        if tuple(command[place : place + 2]) == MPIPLUS:
            return command[place + 2 :]
    return None


def parse(arguments: list[str]) -> None:
    """As ``mpiplus ARGUMENTS`` does, without doing anything; a program or subcommand may be missing."""
    context = click.Context(command_line, info_name="mpiplus", **command_line.context_settings)
    try:
        name = arguments[0] if arguments else ""
        found = command_line.get_command(context, name)
        if found is not None:
            found.make_context(name, list(arguments[1:]), parent=context)
        elif name and not name.startswith("-"):
            raise click.UsageError(f"there is no mpiplus {name}")
        else:
            command_line.make_context("mpiplus", list(arguments))
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError, click.exceptions.Exit):
        pass


@pytest.mark.parametrize("block", COMMANDS, ids=ids(COMMANDS))
def test_commands_are_what_the_programs_take(block: Block) -> None:
    """A shell can read them, mpiplus takes its options, and files of this repository that they name are there."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=30)
    for command in words_of(block.text):
        if (arguments := arguments_of_mpiplus(command)) is not None:
            parse(arguments)
        for word in command:
            if word.startswith(("docs/", "tests/", ".ci/")):
                assert (ROOT / word).exists(), f"{block.place} names {word}"


def test_commands_in_the_text() -> None:
    wrong = []
    for page in PAGES:
        for command in INLINE.findall(page.read_text()):
            try:
                if "..." not in command:
                    parse(shlex.split(command.replace("\n", " "))[1:])
            except click.ClickException as error:
                wrong.append(f"{page.name}: {command}: {error.format_message()}")
    assert not wrong


def test_what_a_parser_would_say() -> None:
    """The check above can fail."""
    for command in ("mpiplus run --no-such-option", "mpiplus info --timeout soon", "mpiplus no-such-command"):
        with pytest.raises(click.ClickException):
            parse(command.split()[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language(page: Path) -> None:
    """A block made by indenting says none, and would not be tested."""
    blocks_and_comments = re.compile(r"^```[^\n]*\n.*?^```$|^<!--.*?-->$", re.M | re.S)
    text = blocks_and_comments.sub(lambda found: "\n" * found.group().count("\n"), page.read_text())
    indented = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"    |\s*```", line)]
    assert not indented, f"{page.name}: indented blocks or fences at the lines {indented}"
    assert {block.language for block in all_blocks(*LANGUAGES) if block.page == page} <= LANGUAGES


def test_code_fits_the_column() -> None:
    """But for the commands that CI runs from README.md, which are one line each."""
    shown = [block for block in all_blocks("python", "sh") if "ci" not in block.comments]
    lines = [(block.place, line) for block in shown for line in block.text.splitlines()]
    assert [found for found in lines if len(found[1]) > 80 and not found[0].startswith("CONTRIBUTING")] == []


@pytest.mark.parametrize("block", [b for b in all_blocks("python") if not b.runs], ids=lambda b: b.place)
def test_python_blocks_that_do_not_run_can_be_compiled(block: Block) -> None:
    compile(block.text, block.place, "exec")
    assert block.reason
