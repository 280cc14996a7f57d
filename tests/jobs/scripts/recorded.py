"""A program under torch's ``@record``: rank 1 fails without a word on stderr."""

from __future__ import annotations

import os
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    print(f"rank {os.environ['RANK']} prints")
    print("to stderr", file=sys.stderr, flush=True)
    if os.environ["RANK"] == "1":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise ArithmeticError("no more")
    time.sleep(1000)


main()
