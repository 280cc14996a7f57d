"""A launcher of ranks like mpirun, for jobs without MPI. Ends as the first of them that fails.

With ``ATTACK`` in its environment strangers come to the port of `mpiplus run`, before its ranks do. With ``LINGERS`` it
does not end before it is told to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    option, size, *command = sys.argv[1:]
    assert option == "-n"
    told = {**os.environ, "PMI_SIZE": size}
    if attack := os.environ.get("ATTACK"):
        sys.path.append(str(Path(__file__).parents[2]))
        import strangers

        port = json.loads(os.environ["MPIPLUS_JOB"])["port"]
        told["PORT"] = str(port)
        kept = strangers.ATTACKS[attack](port)
    ranks = [subprocess.Popen(command, env={**told, "PMI_RANK": str(rank)}) for rank in range(int(size))]
    code = next((code for rank in ranks if (code := rank.wait())), 0)
    if "LINGERS" in os.environ:
        signal.pause()
    sys.exit(code)
