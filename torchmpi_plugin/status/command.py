"""``mpiplus status``: what the ranks of running jobs are doing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from ..seconds import LONGEST, Seconds
from ..timeline.command import file_option, write
from .asking import PYTHON_SECONDS, STACKS_SECONDS, Rank, ask_job, ask_words
from .files import RankSocket, all_sockets
from .screen import attention_of, job_line, late_of, screen_of

_ALL, _EVERY = "all", "2"


@click.command()
@click.argument("job", required=False)
@click.option(
    "--watch", metavar="SECONDS", is_flag=False, flag_value=_EVERY, help="Show it anew every so many seconds (2)."
)
@click.option(
    "--interval",
    metavar="SECONDS",
    type=Seconds(min=0, max=LONGEST),
    default=0.5,
    show_default=True,
    help="Over which operations a second are counted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option(
    "--stacks",
    metavar="RANKS",
    is_flag=False,
    flag_value=_ALL,
    help="Print the Python stacks of all ranks, or of these: 0,2.",
)
@click.option("--dump", is_flag=True, help="Have each rank write its flight recorder's trace, on its node.")
@file_option(help="Write the last operations of all ranks there, as mpiplus timeline does.")
def status(
    *,
    job: str | None,
    watch: str | None,
    interval: float,
    as_json: bool,
    stacks: str | None,
    dump: bool,
    timeline: Path | None,
) -> None:
    """Show what the ranks of a running job do: mpiplus status [JOB]

    Lists the jobs of this user that have a rank on this node; with JOB, or where there is one only, shows its ranks:
    what each is doing, for how long, whom it waits for. Ranks that need a look come first. It answers while ranks are
    stuck, and works however the job was started. The exit code is 1 where there is no such job.
    """
    if watch and (as_json or stacks or dump or timeline):
        raise click.UsageError("--watch goes with none of --json, --stacks, --dump and --timeline")
    jobs = _jobs()
    if job is None and watch and _named(jobs, watch):
        job, watch = watch, _EVERY
    if job is None and stacks and _named(jobs, stacks):
        job, stacks = stacks, _ALL
    seconds = _seconds(watch)
    if job is None and len(jobs) > 1 and (watch or stacks or dump or timeline):
        raise click.ClickException(f"there are several jobs: name one of {', '.join(jobs)}")
    if job is None and len(jobs) != 1:
        _list(jobs, as_json)
        return
    if job is None:
        (job,) = jobs
    sockets = _find(jobs, job)
    if stacks is not None:
        _show(sockets, "stacks", STACKS_SECONDS, _numbers(stacks))
    elif dump:
        _show(sockets, "dump", PYTHON_SECONDS, None)
    elif timeline:
        _draw(sockets, timeline)
    elif as_json:
        ranks = ask_job(sockets)
        about = {"job": sockets[0].job, "attention": attention_of(ranks)}
        click.echo(json.dumps({**about, "ranks": [asdict(rank) for rank in ranks]}))
    elif seconds:
        _watch(job, seconds)
    else:
        before, began = ask_job(sockets), time.monotonic()
        time.sleep(interval)
        click.echo(screen_of(ask_job(sockets), before, time.monotonic() - began))


def _draw(sockets: Sequence[RankSocket], file: Path) -> None:
    from ..timeline import operations, rows

    recorded = []
    for told in ask_words(sockets, "timeline", PYTHON_SECONDS, None):
        try:
            recorded.append(rows.answered(told.text))
        except (ValueError, KeyError, TypeError):
            click.echo(f"rank {told.rank}: {told.problem or 'gave an answer that was cut off'}", err=True)
    if not recorded:
        raise click.ClickException("no rank has answered")
    write(operations.of(recorded), file)


def _jobs() -> dict[str, list[RankSocket]]:
    try:
        return {job: list(of_job) for job, of_job in groupby(all_sockets(), key=lambda each: each.job)}
    except PermissionError as error:
        raise click.ClickException(str(error)) from None


def _find(jobs: dict[str, list[RankSocket]], job: str) -> list[RankSocket]:
    """The sockets of the job with this name, or with this port if it is the only one."""
    names = _named(jobs, job)
    if len(names) == 1:
        return jobs[names[0]]
    if names:
        raise click.ClickException(f"several jobs have the port {job}: name one of {', '.join(names)}")
    known = f"there are {', '.join(jobs)}" if jobs else "there is none"
    raise click.ClickException(f"no job {job!r} of this user has a rank on this node; {known}")


def _named(jobs: Iterable[str], job: str) -> list[str]:
    return [name for name in jobs if name == job] or [name for name in jobs if name.rpartition("-")[0] == job]


def _list(jobs: dict[str, list[RankSocket]], as_json: bool) -> None:
    ranks = {name: ask_job(sockets) for name, sockets in jobs.items()}
    if as_json:
        click.echo(json.dumps({name: [asdict(rank) for rank in of_job] for name, of_job in ranks.items()}))
    elif not jobs:
        click.echo("no job of this user on this node has called init_process_group with mpiplus")
    else:
        click.echo("\n".join(job_line(name, of_job) for name, of_job in ranks.items()))
    if not jobs:
        sys.exit(1)


def _seconds(watch: str | None) -> float:
    """0: not to watch."""
    if watch is None:
        return 0.0
    try:
        return Seconds(min=0.1, max=LONGEST, clamp=True).convert(watch, None, None)
    except click.BadParameter:
        raise click.UsageError(f"--watch takes seconds, or the name of a job that runs here, not {watch!r}") from None


def _numbers(ranks: str) -> list[int] | None:
    """None: all."""
    if ranks == _ALL:
        return None
    try:
        return [int(rank) for rank in ranks.split(",")]
    except ValueError:
        raise click.UsageError(f"--stacks takes numbers of ranks, as 0,2, not {ranks!r}") from None


def _show(sockets: Sequence[RankSocket], request: str, seconds: float, ranks: Sequence[int] | None) -> None:
    try:
        answers = ask_words(sockets, request, seconds, ranks)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    for told in answers:
        process = f" (process {told.pid})" if told.pid else ""
        click.echo(f"rank {told.rank}{process}:\n{told.text.rstrip() or told.problem}\n")
    if not any(told.text for told in answers):
        raise click.ClickException(f"no rank has answered with its {'trace' if request == 'dump' else request}")


def _watch(name: str, seconds: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        for screen, late in _screens(name, seconds):
            text = Text(screen, no_wrap=True, overflow="ellipsis")
            for rank in late:
                text.highlight_regex(rf"(?m)^ +(rank )?{rank} .*$", "bold")
            live.update(text, refresh=True)


def _screens(name: str, seconds: float) -> Iterator[tuple[str, set[int]]]:
    """Until the job is over; and the ranks that others wait for."""
    before: list[Rank] = []
    last = time.monotonic()
    while names := _named(jobs := _jobs(), name):
        ranks, now = ask_job(jobs[names[0]]), time.monotonic()
        head = f"{time.strftime('%H:%M:%S')}  every {seconds:g} s  {names[0]}  Ctrl-C: end"
        yield f"{head}\n{screen_of(ranks, before or ranks, now - last, bool(before))}", late_of(ranks)
        before, last = ranks, now
        time.sleep(seconds)
    yield f"job {name} has ended", set()
