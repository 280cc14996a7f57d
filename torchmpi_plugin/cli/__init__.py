"""The command ``mpiplus``.

Subcommands are imported only when they are asked for.

A subcommand is a click command of its own name, and a line in ``SUBCOMMANDS``.

Uses ``jobs``, ``launchers``, ``mpi``, ``node``, ``timeline`` and ``communicator``; the commands ``status`` and
``timeline`` are in the layers of their names. Start with ``run/command.py``.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

SUBCOMMANDS = {
    "bench": "torchmpi_plugin.cli.bench.command",
    "info": "torchmpi_plugin.cli.info.command",
    "run": "torchmpi_plugin.cli.run.command",
    "status": "torchmpi_plugin.status.command",
    "timeline": "torchmpi_plugin.timeline.command",
}


class LazyGroup(click.Group):
    """A group that finds its subcommands in ``SUBCOMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with a guess at what was meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # needed by few

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"A program is started by: mpiplus run -n 2 {args[0]}"
            raise click.UsageError(f"{error.message.rstrip('.')}. {hint}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """As click does it; a full disk behind the output, or behind a file, is an error of one line."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed, as by >&-
                setattr(sys, name, click.open_file(os.devnull, "w"))
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise click.ClickException(f"what was to be written has no room: {error}") from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(import_module(SUBCOMMANDS[cmd_name]), cmd_name) if cmd_name in SUBCOMMANDS else None


@click.group(name="mpiplus", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchmpi-plugin", prog_name="mpiplus")
def main() -> None:
    """torch.distributed on MPI: tools around the backend "mpiplus"."""
