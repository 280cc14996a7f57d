"""The command ``mpiplus``.

Subcommands are imported only when they are asked for.

A subcommand is a module of this package that defines a click command under its own name, and a line in
``SUBCOMMANDS``.

Uses ``jobs``, ``mpi``, ``host`` and ``communicator``. Start with ``run.py``; ``info.py`` and ``survey/`` look at a
machine, the other modules measure.
"""

from __future__ import annotations

from importlib import import_module

import click

SUBCOMMANDS = {
    "bench": "torchmpi_plugin.cli.bench",
    "info": "torchmpi_plugin.cli.info",
    "run": "torchmpi_plugin.cli.run",
}


class LazyGroup(click.Group):
    """A group that finds its subcommands in ``SUBCOMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, in alphabetical order."""
        return sorted({*super().list_commands(ctx), *SUBCOMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand, or None for an unknown name."""
        if cmd_name not in SUBCOMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(SUBCOMMANDS[cmd_name]), cmd_name)
        return command


@click.group(name="mpiplus", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchmpi-plugin", prog_name="mpiplus")
def main() -> None:
    """torch.distributed on MPI: tools around the backend "mpiplus"."""
