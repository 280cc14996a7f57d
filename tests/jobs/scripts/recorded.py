"""A program under torch's ``@record``: rank 1 fails without a word on stderr."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    print(f"rank {os.environ['RANK']} prints")
    printed = Path(f"printed.{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    if os.environ["RANK"] == "0":
        printed.touch()
    while not printed.exists():  # the launcher ends rank 0 as soon as rank 1 fails
        time.sleep(0.01)
    print("to stderr", file=sys.stderr, flush=True)
    if os.environ["RANK"] == "1":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise ArithmeticError("no more")
    time.sleep(1000)


main()
