"""One word for one thing: names that were given up stay away, in code, comments, texts and docs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchmpi_plugin"

#: Words that were given up: for config, failures, API mode, failure report, JobMonitor, layers, adopt_orphan, message,
#: Listener, the first that failed, Training, why_not, StoreBarrier, JobSpec; SignedStore, receive buffer, pause.
FORBIDDEN = (
    *(
        "[Ww]ish(es|ed)?",
        "[Oo]utcomes",
        "[Ff]aces?",
        "[Vv]erdicts?",
        "Watch|(?<!Stderr)Tail",
        "[Rr]ooms",
        "[Rr]escued?",
    ),
    *("[Pp]arcels?", "[Ss]pokesman", "[Rr]eception", "[Cc]ulprits?|[Gg]uilty", "[Tt]rainees?", "[Hh]indrances?"),
    *("[Mm]eetings?(?! place)|[Dd]oors?", "Orders", "[Ss]eals?", "[Ii]nbox(es)?", "[Nn]aps?", "[Bb]risk", "[Jj]udges?"),
)
#: Of the C code, looked for there and in the package, where docs/ may use some of them in their plain meaning: for
#: pipeline slot, phase, call summary, piggyback, exchange_results, peer_rank.
FORBIDDEN_OF_C = (
    *("[Ff]lights?(?!.?recorder)", "[Ll]egs?", "[Oo]pinions?", "[Rr]ides?", "[Tt]rades?", "[Cc]ounterparts?"),
)

#: A machine of the job is a node; "host" is the other side of a device, the network's word, and in names that stay.
HOST = re.compile(r"\bhosts?\b|_hosts?\b|\bhosts?_", re.I)
STAYS = re.compile(
    "|".join(
        (
            # Beside a device.
            r"host memory|memory of the host|driven by the host|the host that waits",
            r"\*host\* waits|runs on the host|tensors in host$",
            # The network's, and of containers.
            r"host names?|/etc/hosts|list of hosts|://host:|[-=]host\b|host: sysctl",
            # Of launchers' options and ours.
            r"--?hosts\b|HOST\[|\bhosts(?=[:=,)}]| = | or hostfile| else )|\.hosts\b|if hosts\b|standalone_with_hosts",
            # What programs read from JSON, files and variables.
            r"[\"'`]hosts?[\"'`]|hardware_threads_of_host|ranks_per_host|MPIPLUS_TEST_HOST\w*|has hosts \{",
            # Files and headings.
            r"#between-hosts|tests/hosts|test_pretended_hosts|bench-two-hosts",
        )
    )
)
#: Lines that have an old name on purpose: it is still taken.
DEPRECATED = {
    "torchmpi_plugin/options.py": re.compile(r"\bface\b"),
    "torchmpi_plugin/errors.py": re.compile(r"\bhost\b"),
    "torchmpi_plugin/dist/waiting.py": re.compile(r"\bdoor\b"),  # a key in the store, as other builds have it
    "torchmpi_plugin/node/lookups.py": re.compile(r"\bhosts?\b", re.I),  # names that a name server knows
}


def files() -> list[Path]:
    docs, tools = ROOT / "docs", ROOT / "tests" / "tools"
    python = [*PACKAGE.rglob("*.py"), *docs.rglob("*.py"), *tools.glob("*.py")]
    return sorted([*python, *docs.rglob("*.md"), *(ROOT / "c_src").rglob("*.[ch]")])


def pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Underscores and capitals part a name into words."""
    return re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?:{'|'.join(words)})(?![a-z])")


IN_DOCS, EVERYWHERE = pattern(FORBIDDEN), pattern((*FORBIDDEN, *FORBIDDEN_OF_C))


def found(file: Path) -> list[str]:
    """The lines with a word that is in none of our names any more."""
    name = file.relative_to(ROOT).as_posix()
    old = IN_DOCS if name.startswith(("docs/", "tests/")) else EVERYWHERE
    has_nodes, allowed = file.is_relative_to(PACKAGE) or file.suffix == ".md", DEPRECATED.get(name)
    lines = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        rest = allowed.sub("", line) if allowed else line
        if old.search(rest) or (has_nodes and HOST.search(rest) and HOST.search(STAYS.sub("", rest))):
            lines.append(f"{name}:{number}: {line.strip()!r}: say what stands above")
    return lines


def test_old_names_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line for file in files() for line in found(file)] == []
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "x.md").write_text(
        "class GroupWishes:\nwishes_of_rank\nits host_rank\nwhat comes in flight\nmpirun --host a\n"
    )
    assert len(found(tmp_path / "x.md")) == 4


ALLOWED = Path(__file__).with_name("allowed_nouns.txt")
_C_TYPE = re.compile(r"^\}\s*(\w+);|^typedef (?:struct|enum|union) \w+ (\w+);|^(?:struct|enum) (\w+) \{", re.M)


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def nouns() -> set[str]:
    """The words in the names of modules, classes, C files and C types."""
    python, c = list(PACKAGE.rglob("*.py")), list((ROOT / "c_src").rglob("*.[ch]"))
    names = [part for path in (*python, *c) for part in (path.stem, path.parent.name) if not part.startswith("__")]
    for path in python:
        names += re.findall(r"^ *class (\w+)", path.read_text(), re.M)
    for path in c:
        names += ["".join(found) for found in _C_TYPE.findall(path.read_text())]
    return set().union(*map(words_of, names))


def test_names_are_made_of_words_that_were_agreed_on() -> None:
    """A new word is one of MPI's, of c10d's or of plain programming, and no picture; then it goes into the list."""
    new = nouns() - set(ALLOWED.read_text().split())
    assert new == set(), f"decide on these words, and if they are good add them to {ALLOWED.name}"
