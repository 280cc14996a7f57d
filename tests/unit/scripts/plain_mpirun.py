"""A launcher of ranks like mpirun, without MPI. Ends as the first that fails; with ``LINGERS`` when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

if __name__ == "__main__":
    option, size, *command = sys.argv[1:]
    assert option == "-n"
    ranks = [
        subprocess.Popen(command, env={**os.environ, "PMI_SIZE": size, "PMI_RANK": str(rank)})
        for rank in range(int(size))
    ]
    code = next((code for rank in ranks if (code := rank.wait())), 0)
    if "LINGERS" in os.environ:
        signal.pause()
    sys.exit(code)
