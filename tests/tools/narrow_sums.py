"""Errors of sums that cross between nodes in float32, and in the tensor's own type: the table of docs/sharp-bits.md.

As the engine adds: a node's ranks in float32; the sums of the nodes in float32, all but one of them rounded first where
they cross in the tensor's type; one rounding at the end.

Usage: python tests/tools/narrow_sums.py
"""

from __future__ import annotations

import torch

ELEMENTS = 100_000
LAYOUTS = ((2, 2), (4, 8), (16, 8))
DTYPES = (torch.bfloat16, torch.float16)


def error(dtype: torch.dtype, nodes: int, ranks: int, is_narrow: bool) -> float:
    """Root mean square over the elements, relative to the exact sums' own, in units of the rounding error at 1."""
    inputs = torch.randn(nodes, ranks, ELEMENTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums = inputs.float().sum(1)
    if is_narrow:
        sums[1:] = sums[1:].to(dtype).float()
    exact = inputs.double().sum((0, 1))
    off = sums.sum(0).to(dtype).double() - exact
    return (off.square().mean().sqrt() / exact.square().mean().sqrt()).item() / torch.finfo(dtype).eps * 2


def main() -> None:
    print("| nodes x ranks |", " | ".join(f"{nodes} x {ranks}" for nodes, ranks in LAYOUTS), "|")
    print("|---" * (len(LAYOUTS) + 1) + "|")
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for is_narrow, between in ((False, "float32 between nodes"), (True, "`tensor`")):
            errors = (f"{error(dtype, *layout, is_narrow):.2f}" for layout in LAYOUTS)
            print(f"| {name}, {between} |", " | ".join(errors), "|")


if __name__ == "__main__":
    main()
