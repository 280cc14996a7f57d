"""``mpiplus timeline``: what the ranks of a job have recorded, as a file to look at."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..names import counted

if TYPE_CHECKING:
    from .operations import Job


def _drawable(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Refuse, before a job runs, a name that no file can be written for."""
    if file is None:
        return None
    if file.suffix not in (".json", ".gz", ".html"):
        raise click.BadParameter(f"{file} must end with .json, .json.gz or .html", context, parameter)
    if file.suffix == ".html" and importlib.util.find_spec("plotly") is None:
        raise click.BadParameter("a page needs plotly: pip install 'torchmpi-plugin[report]'", context, parameter)
    if not file.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {file.absolute().parent}", context, parameter)
    return file


_FILE: dict[str, Any] = {"type": click.Path(dir_okay=False, path_type=Path), "callback": _drawable}
#: An option of other commands; wants its ``help``.
file_option = functools.partial(click.option, "--timeline", metavar="FILE", **_FILE)


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("file", **_FILE)
def timeline(*, directory: Path, file: Path) -> None:
    """Draw what a job's ranks have recorded: mpiplus timeline DIRECTORY FILE

    DIRECTORY is that of MPIPLUS_TIMELINE, whose latest job is taken, however it has ended. FILE gets a trace that
    ui.perfetto.dev and chrome://tracing open (.json, .json.gz), or is a page to look at (.html, which needs plotly).
    """
    from . import operations

    try:
        write(operations.in_directory(directory), file)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def write(job: Job, file: Path) -> None:
    """Write the job as the file's name says, and tell what it lacks."""
    if file.suffix == ".html":
        from .page import write as draw_all
    else:
        from .trace import write as draw_all
    draw_all(job, file)
    size = max((each["size"] for each in job.ranks), default=0)
    lines = [f"{file}: {counted(len(job.begun), 'operation')} of {len(job.ranks)} of {counted(size, 'rank')}"]
    if job.dropped:
        lines.append(f"  {sum(job.dropped.values())} calls before them are not recorded any more")
    errors = {node: error for node, error in job.errors.items() if error != 0}
    lines += [
        f"  clock of node {node}: " + ("not compared" if error is None else f"within {error / 1000:.0f} us")
        for node, error in sorted(errors.items())
    ]
    click.echo("\n".join(lines), err=True)


def directory_of(file: Path) -> Path:
    """Return where the ranks of ``mpiplus run --timeline FILE`` record, which is beside it."""
    return file.absolute().with_name(f"{file.name}.calls")


def draw(file: Path) -> None:
    """Write what they have recorded, and remove the directory; say so where that is not possible."""
    from . import operations

    directory = directory_of(file)
    try:
        write(operations.in_directory(directory), file)
        shutil.rmtree(directory)
    except (OSError, ValueError) as error:
        click.echo(f"mpiplus run: no timeline: {error}", err=True)
