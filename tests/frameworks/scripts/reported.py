"""What a script has come to, for test_features.py to compare."""

import sys
from collections.abc import Sequence

import torch.distributed as dist


def report(numbers: Sequence[float]) -> None:
    """One line in one write: the ranks share the output."""
    words = " ".join(f"{number:.5f}" for number in numbers)
    sys.stdout.write(f"<{dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: {words}>\n")
    sys.stdout.flush()
