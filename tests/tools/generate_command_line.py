"""Write docs/command-line.md: what `mpiplus --help` and its subcommands print.

python tests/tools/generate_command_line.py
"""

from __future__ import annotations

from pathlib import Path

import click

from torchmpi_plugin.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
WIDTH = 80
INTRODUCTION = """# Command line

The options of each command, to look them up: what it says of itself. `tests/tools/generate_command_line.py` writes this
page; each takes `-h` too. For places without a `PATH`, `python -m torchmpi_plugin.cli` is the same command. What it all
means is in [Launching](launching.md), the benchmark's table in [Performance](performance.md).
"""


def help_of(command: click.Command, name: str, parent: click.Context | None) -> str:
    how = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **how)
    lines = [line for line in command.get_help(context).splitlines() if "-h, --help" not in line]
    return "\n".join(["```text", *lines, "```", ""])


def page() -> str:
    """The whole page."""
    context = click.Context(main, info_name="mpiplus", **main.context_settings)
    parts = [INTRODUCTION]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        parts.append(f"## mpiplus {name}\n\n{help_of(command, name, context)}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
