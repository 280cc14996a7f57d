"""Runs the documentation's programs in Python, one after another: mpirun -n 2 python run_programs.py 2 [PAGE[:LINE]]"""

from __future__ import annotations

import os
import sys

import code_blocks
import torch
import torch.distributed as dist

from torchmpi_plugin.dist import barrier


def run(block: code_blocks.Block, names: dict[str, object]) -> None:
    exec(block.comments.get("before", ""), names)
    # Lines are counted as in the page, so a traceback shows the page.
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)


def main() -> None:
    ranks, wanted = int(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    environment = dict(os.environ)
    for blocks in code_blocks.programs(ranks):
        if wanted and not {blocks[0].page.name, blocks[0].place} & {*wanted}:
            continue
        names: dict[str, object] = {"__name__": "__main__"}
        for block in blocks:
            run(block, names)
            os.write(1, f"ran {block.place}\n".encode())  # in one piece, whatever the other ranks print
        if dist.is_initialized():
            barrier(timeout=60)  # nobody leaves what another may still need; the group's own deadline may be short
            dist.destroy_process_group()
        # What the world has set would be the next one's rendezvous.
        os.environ.clear()
        os.environ.update(environment)


if __name__ == "__main__":
    main()
