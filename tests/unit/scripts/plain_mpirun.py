"""A launcher of ranks like mpirun, for jobs without MPI. Ends as the first of them that fails."""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    option, size, *command = sys.argv[1:]
    assert option == "-n"
    told = {**os.environ, "PMI_SIZE": size}
    ranks = [subprocess.Popen(command, env={**told, "PMI_RANK": str(rank)}) for rank in range(int(size))]
    sys.exit(next((code for rank in ranks if (code := rank.wait())), 0))
