"""The screen of ``mpiplus status``, made of the ranks' answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..names import counted, describe_ranks
from .asking import Rank

#: A rank that others have waited for longer than that is worth a line of its own.
_LONG = 1.0
_FIGURES = ("calls", "bytes", "in_calls", "waited")


def job_line(name: str, ranks: Sequence[Rank]) -> str:
    about = next((rank.answer for rank in ranks if rank.answer), None)
    if about is None:
        return f"job {name}: no rank answers ({len(ranks)} on this node)"
    nodes = len({rank.answer["host"] for rank in ranks if rank.answer})
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
    size = counted(about["world_size"], "rank")
    restart = f", restart {about['attempt']}" if about["attempt"] != "0" else ""
    return f"job {name}: {about['program']}: {size} on {counted(nodes, 'node')}, since {since}{restart}"


def attention_of(ranks: Sequence[Rank]) -> list[str]:
    """Return what is worth a look, the worst first: ranks that do not answer, are stopped, are waited for."""
    lines = [f"rank {rank.rank} {rank.problem}" for rank in ranks if rank.problem]
    for (group_name, late), waiting in _waited_for(ranks).items():
        who = describe_ranks([rank for rank, _ in waiting])
        verb = "waits" if len(waiting) == 1 else "wait"
        longest = max(since for _, since in waiting)
        lines.append(f"rank {late} is behind: {who} {verb} for it in group {group_name} for {longest:.1f} s")
    return lines


def late_of(ranks: Sequence[Rank]) -> set[int]:
    """The ranks that others have waited for for long."""
    return {late for _, late in _waited_for(ranks)}


def _waited_for(ranks: Sequence[Rank]) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """By group and late rank: who waits, for how long; the longest first, and without short waits."""
    waited: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for rank in ranks:
        for group in rank.groups:
            for late in group["missing"] if group["inside"] else []:
                waited.setdefault((group["name"], group["ranks"][late]), []).append((rank.rank, group["begun_ago"]))
    longest = {key: max(since for _, since in waiting) for key, waiting in waited.items()}
    return {key: waited[key] for key in sorted(waited, key=lambda key: -longest[key]) if longest[key] >= _LONG}


def screen_of(ranks: Sequence[Rank], before: Sequence[Rank], seconds: float, recent: bool = False) -> str:
    name = next((rank.answer["job"] for rank in ranks if rank.answer), "?")
    lines = [job_line(name, ranks)]
    if attention := attention_of(ranks):
        lines += ["", "attention:", *(f"  {line}" for line in attention)]
    earlier = {rank.rank: rank for rank in before}
    by_node: dict[str, list[Rank]] = {}
    for rank in ranks:
        by_node.setdefault(rank.answer["host"] if rank.answer else "node unknown", []).append(rank)
    for node, of_node in by_node.items():
        lines += ["", f"{node}:", f"  {'rank':>5} {'calls/s':>9} {'MB/s':>8} {'comm.':>6} {'waits':>6}  doing"]
        lines += [_row(rank, earlier.get(rank.rank), seconds, recent) for rank in of_node]
    return "\n".join(lines)


def _sum(rank: Rank | None, name: str) -> float:
    return float(sum(group[name] for group in rank.groups)) if rank else 0.0


def _row(rank: Rank, before: Rank | None, seconds: float, recent: bool) -> str:
    if rank.answer is None:
        return f"  {rank.rank:>5} {'-':>9} {'-':>8} {'-':>6} {'-':>6}  {rank.problem}"
    passed = max(seconds, 1e-9)
    changes = {name: max(0.0, _sum(rank, name) - _sum(before, name)) for name in _FIGURES}
    age, spent = max(time.time() - rank.answer["since"], 1e-9), {name: _sum(rank, name) for name in _FIGURES}
    if recent and before is not None:
        age, spent = passed, changes
    shares = [f"{min(1.0, spent[name] / age):.0%}" for name in ("in_calls", "waited")]
    figures = f"{changes['calls'] / passed:>9.0f} {changes['bytes'] / passed / 1e6:>8.1f} {shares[0]:>6} {shares[1]:>6}"
    return f"  {rank.rank:>5} {figures}  {doing(rank)}"


def doing(rank: Rank) -> str:
    """In words: what it waits for, else what it last did."""
    waits = [_waiting(group) for group in rank.groups if group["inside"]]
    if waits:
        return "; ".join(waits)
    last = min((group for group in rank.groups if group["calls"]), key=lambda group: group["begun_ago"], default=None)
    if last is None:
        return "has called nothing yet" if rank.groups else "has no group: not yet, or not any more"
    return f"elsewhere for {max(0.0, last['ended_ago']):.1f} s, after {_call(last)}"


def _call(group: Mapping[str, Any]) -> str:
    peer = f" with {group['ranks'][group['peer']]}" if 0 <= group["peer"] < len(group["ranks"]) else ""
    number = f" #{group['number']}" if group["operation"] not in ("send", "recv") else ""
    return f"{group['operation']}{number} of {group['length']} bytes{peer} ({group['name']})"


def _waiting(group: Mapping[str, Any]) -> str:
    missing = [group["ranks"][rank] for rank in group["missing"]]
    of_whom = f", waits for {describe_ranks(missing, 8)}" if missing else ""
    return f"in {_call(group)} for {group['begun_ago']:.1f} s{of_whom}"
