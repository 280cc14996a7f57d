"""One word for one thing: names that were given up stay away, in code, comments, texts and docs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchmpi_plugin"

#: Words that were given up, each with what is said in its place.
FORBIDDEN = {
    r"[Ww]ish(es|ed)?": "config, GroupConfig",
    r"[Oo]utcomes": "failures, results",
    r"[Ff]aces?": "API mode (direct, dispatcher), api/",
    r"[Vv]erdicts?": "failure report",
    r"Watch|(?<!Stderr)Tail": "JobMonitor, StderrTail",
    r"[Rr]ooms": "layers",
    r"[Rr]escued?": "adopt_orphan",
    r"[Pp]arcels?": "message",
    r"[Ss]pokesman": "Monitor",
    r"[Rr]eception": "Listener",
    r"[Cc]ulprits?|[Gg]uilty": "the first that failed",
    r"[Tt]rainees?": "Training",
    r"[Hh]indrances?": "why_not",
    r"Meeting|[Dd]oors?": "StoreBarrier",
    r"Orders": "JobSpec",
}
#: Words of the C code: looked for there and in the package, where docs/ may use some of them in their plain meaning.
FORBIDDEN_OF_C = {
    r"[Ff]lights?(?!.?recorder)": "pipeline slot",
    r"[Ll]egs?": "phase",
    r"[Oo]pinions?": "call summary",
    r"[Rr]ides?": "piggyback",
    r"[Tt]rades?": "exchange_results",
    r"[Cc]ounterparts?": "peer_rank",
}

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


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def found(name: str, text: str, words: dict[str, str]) -> list[str]:
    """The lines with a word that is in none of our names any more."""
    allowed = DEPRECATED.get(name)
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        rest = allowed.sub("", line) if allowed else line
        for word, instead in words.items():
            # Underscores and capitals part a name into words.
            if re.search(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?:{word})(?![a-z])", rest):
                lines.append(f"{name}:{number}: {line.strip()!r}: say {instead}")
    return lines


def found_hosts(name: str, text: str) -> list[str]:
    allowed = DEPRECATED.get(name)
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        rest = STAYS.sub("", allowed.sub("", line) if allowed else line)
        if HOST.search(rest):
            lines.append(f"{name}:{number}: {line.strip()!r}: say node")
    return lines


def test_old_names_are_gone() -> None:
    problems = []
    for file in files():
        name = name_of(file)
        words = FORBIDDEN if name.startswith(("docs/", "tests/")) else FORBIDDEN | FORBIDDEN_OF_C
        problems += found(name, file.read_text(), words)
    assert problems == []


def test_a_machine_is_a_node() -> None:
    problems = []
    for file in files():
        if file.is_relative_to(PACKAGE) or file.suffix == ".md":
            problems += found_hosts(name_of(file), file.read_text())
    assert problems == []


WRONG = "class GroupWishes:", "wishes_of_rank = 1", "# the verdict on a job", "what comes in flight"
WRONG_HOSTS = "two hosts", "def most_on_a_host():", "its host_rank"
RIGHT = (
    *("an interface and its surface", "the flight recorder and flight_recorder.py"),
    *("through host memory", "mpirun --host a", "socket.gethostname()"),
)


@pytest.mark.parametrize("line", [*WRONG, *WRONG_HOSTS, *RIGHT])
def test_an_old_name_is_found(line: str) -> None:
    assert bool(found("x.py", line, FORBIDDEN | FORBIDDEN_OF_C)) == (line in WRONG)
    assert bool(found_hosts("x.py", line)) == (line in WRONG_HOSTS)


# ---- what classes, modules and C types may be called ----

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


HEADLESS = re.compile(r"(What|Whether|Who|Whom|Whose|Where|How|Why|When|That|Which)\b")


def headless(text: str) -> list[str]:
    """The docstrings that are clauses without a head, such as "What a rank encoded"."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [docstring for docstring in found if HEADLESS.match(docstring)]


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    assert headless('"""Messages."""\ndef f():\n    """What a rank encoded."""') == ["What a rank encoded."]
    assert [line for path in sorted(PACKAGE.rglob("*.py")) for line in headless(path.read_text())] == []
