"""Writes docs/settings.md from the tables in torchmpi_plugin/settings.py.

python tests/tools/generate_settings.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmpi_plugin import settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

INTRODUCTION = f"""# Settings

The variables of mpiplus, and what else it reads and sets: a page to look things up. Which of them to change is in
[Tuning](tuning.md). `tests/tools/generate_settings.py` writes it from the table that the package reads.

| variable | allowed | default | effect |
|---|---|---|---|
{{rows}}

- **When they are read.** `{settings.COLLECTIVES.name}`, `{settings.TUNING.name}`, `{settings.REPRODUCIBLE.name}`,
  `{settings.WIRE_DTYPE.name}` and `{settings.WATCHDOG.name}` when a group is made, `{settings.REPLACE.name}` and
  `{settings.INTEGRATIONS.name}` by `import torch`, the others when the world is made, so a program may set them itself.
  An empty variable is one that is not set.
- **A wrong value** is a `ValueError` from `init_process_group`, or `new_group`, on the rank that has it. It names the
  variable, the value and what is allowed.
- **A name that means nothing**, such as `{settings.CUDA.name}A`, is reported once, by rank 0, with the nearest right
  one.
- **Other nodes.** Launchers differ in whether they hand variables on: Open MPI wants
  `mpirun -x {settings.COLLECTIVES.name}=mpi`.
- **Deprecated**: `{settings.SHM.name}`; {settings.SHM.meaning}.

To see what shared memory does for your messages, run `mpirun -n 2 mpiplus bench` with and without
`{settings.COLLECTIVES.name}={settings.MPI_ONLY}`.

## Set by mpiplus, for its own processes

For processes of its own and for those that ranks start.

| variable | meaning |
|---|---|
{{internal}}
"""


def _pairs(table: Mapping[str, str]) -> str:
    return "\n".join(f"| `{name}` | {meaning} |" for name, meaning in table.items())


def page() -> str:
    """The whole page; what is about the variables of others is written by hand, and stays."""
    rows = "\n".join(
        f"| `{setting.name}` | {setting.allowed} | `{setting.default}` | {setting.meaning} |"
        for setting in settings.SETTINGS
    )
    _, heading, by_hand = PAGE.read_text().partition("\n## Variables of others")
    return INTRODUCTION.format(rows=rows, internal=_pairs(settings.INTERNAL)) + heading + by_hand


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
