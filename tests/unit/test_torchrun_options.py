"""Every option of torchrun's is known to `mpiplus run`, and to the page that says what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from torchmpi_plugin.cli.run.command import run
from torchmpi_plugin.cli.run.options import files_of, with_hyphens

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
