"""The table of variables: what is allowed, what is said of the rest, nothing is missing; names that were given up."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from development_variables import DEVELOPMENT

import torchmpi_plugin
from torchmpi_plugin import Options, options, settings, torch_internals
from torchmpi_plugin.errors import RankFailedError

ROOT = Path(__file__).parents[2]

WRONG = {
    "MPIPLUS_ABORT_ON_EXCEPTION": ("banana", "2", "01", " "),
    "MPIPLUS_COLLECTIVES": ("ours", "Own", "1", "mpi-", " "),
    "MPIPLUS_ASYNC_PROGRESS": ("thread", "Auto", "1"),
    "MPIPLUS_REPRODUCIBLE": ("yes", "2", "True"),
    "MPIPLUS_WIRE_DTYPE": ("bfloat16", "half"),
    "MPIPLUS_TUNING": ("/", ".", "/dev/zero"),
    "MPIPLUS_TIMELINE": ("/dev/null",),
    "MPIPLUS_CUDA": ("on", "Staged", "0"),
    "MPIPLUS_EXIT_GRACE": ("nan", "inf", "-5", "5 s", "banana"),
    "MPIPLUS_WATCHDOG": ("banana", "-5", "-0.1", "nan", "-inf", "1e999"),
    "MPIPLUS_STATUS": ("banana", "2", "yes"),
    "MPIPLUS_SUMMARY": ("banana", "2", "figures.txt"),
    "MPIPLUS_REPLACE": ("mpiplus", "gloo;nccl", "1", "gloo,cpu:nccl"),
    "MPIPLUS_INTEGRATIONS": ("banana", "accelerate,banana", "Ignite", "accelerate;ignite", "1"),
}
RIGHT = (
    ("MPIPLUS_COLLECTIVES", "mpi-only", "mpi-only"),
    ("MPIPLUS_ABORT_ON_EXCEPTION", "0", False),
    ("MPIPLUS_TUNING", "not/there.json", "not/there.json"),
    ("MPIPLUS_EXIT_GRACE", "0.5", 0.5),
    ("MPIPLUS_WATCHDOG", "1e3", 1000.0),
    ("MPIPLUS_INTEGRATIONS", "accelerate, ignite", ("accelerate", "ignite")),
    ("MPIPLUS_INTEGRATIONS", " ", ()),
    ("MPIPLUS_SUMMARY", "0", ""),
    ("MPIPLUS_SUMMARY", "figures.json", "figures.json"),
    ("MPIPLUS_REPLACE", "gloo, NCCL,default", ("gloo", "nccl", "default")),
)
BY_NAME = {setting.name: setting for setting in settings.SETTINGS}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_wrong_values(name: str, text: str) -> None:
    """The error has the name, what is allowed, and the value."""
    with pytest.raises(ValueError, match=f"^{name} must be {BY_NAME[name].allowed}, not {text!r}$"):
        settings.check({name: text})


@pytest.mark.parametrize(("name", "text", "value"), RIGHT)
def test_right_values(name: str, text: str, value: object) -> None:
    settings.check({name: text})
    assert BY_NAME[name].value({name: text}) == value


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda setting: setting.name)
def test_not_set_and_empty_are_the_default(setting: settings.Setting) -> None:
    default = setting.value({setting.name: setting.default})
    assert setting.value({}) == setting.value({setting.name: ""}) == default


def test_unknown_names() -> None:
    near = {"MPIPLUS_CUDAA": "MPIPLUS_CUDA", "MPIPLUS_WATCH_DOG": "MPIPLUS_WATCHDOG", "MPIPLUS_QQQ": ""}
    assert settings.unknown({**dict.fromkeys(near, "1"), "MPIPLUSOTHER": "1", "PATH": "/bin"}) == near


def test_what_forbids_shared_memory(monkeypatch) -> None:
    only = "MPIPLUS_COLLECTIVES=mpi-only"
    for shares, whose, told in (("", "", ""), ("1", "mpi", ""), ("0", "own", "MPIPLUS_SHM=0"), ("", "mpi-only", only)):
        monkeypatch.setenv("MPIPLUS_SHM", shares)
        monkeypatch.setenv("MPIPLUS_COLLECTIVES", whose)
        assert settings.unshared() == told


QUOTED = r"[\"'](MPIPLUS_[A-Z_]*[A-Z])[\"'=]"
SET_BY_A_SHELL = r"\b(MPIPLUS_[A-Z_]+)="


def names_in(files: Iterable[Path], *patterns: str) -> dict[str, Path]:
    """The names in some files, each with a place where it stands."""
    texts = {file: file.read_text(errors="replace") for file in files if file.suffix in ("", ".py")}
    return {name: file for file, text in texts.items() for how in patterns for name in re.findall(how, text)}


def test_the_package_takes_every_name_from_the_table() -> None:
    files = set(Path(torchmpi_plugin.__file__).parent.rglob("*.py"))
    table = Path(settings.__file__)
    assert set(names_in([table], QUOTED)) == settings.known()
    assert names_in(files - {table}, QUOTED) == {}


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not in a checkout")
def test_the_table_has_every_name_in_the_build_and_the_tests() -> None:
    files = {ROOT / "c_src" / "build_shim.py", *(ROOT / ".ci").iterdir(), *(ROOT / "tests").rglob("*")}
    files -= {Path(__file__), ROOT / "tests" / "development_variables.py"}
    used = names_in(filter(Path.is_file, files), QUOTED, SET_BY_A_SHELL)
    used.pop("MPIPLUS_CUDAA", None)  # misspelt on purpose
    assert {name: file for name, file in used.items() if name not in {*settings.known(), *DEVELOPMENT}} == {}


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert set(WRONG) == set(BY_NAME)  # nothing is left out above
    with pytest.raises(ValueError, match=r"MPIPLUS_WATCHDOG must be .*'-5'; MPIPLUS_SHM must be .*'banana'"):
        settings.check({"MPIPLUS_WATCHDOG": "-5", "MPIPLUS_SHM": "banana"})


@pytest.mark.parametrize(
    ("name", "old", "mode"),
    [("face", "process_group", "direct"), ("api_mode", "process_group", "direct"), ("face", "backend", "dispatcher")],
)
def test_old_names_of_modes(name: str, old: str, mode: str, monkeypatch) -> None:
    monkeypatch.setattr(torch_internals, "has_python_backends", lambda: True)
    with pytest.warns(FutureWarning, match=rf"use Options\(api_mode='{mode}'\)") as told:
        options = Options(**{name: old})
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(options, cuda="staged").api_mode == mode


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("given", [[], {}, -1, float("nan"), b"own", torch.ones(2), "neither"], ids=repr)
def test_wrong_options(given: object) -> None:
    for name in (field.name for field in dataclasses.fields(Options)):
        is_a_word = given == "neither" and name not in ("comm", "abort_on_exception", "reproducible")
        told = "api_mode" if name == "face" else name
        with pytest.raises(ValueError if is_a_word else TypeError, match=rf"^Options\({told}=\.\.\.\) is .+, not "):
            options.among(Options(**{name: given}), shared=False)


def test_the_host_of_a_failure() -> None:
    error = RankFailedError("rank 1 failed", ranks=[1], node="node07")
    with pytest.warns(FutureWarning, match=r"use RankFailedError\.node"):
        assert error.host == "node07"
