"""A launcher of ranks like mpirun, on whose node strangers come to the port of `mpiplus run`, before its ranks do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
import strangers

if __name__ == "__main__":
    option, size, *command = sys.argv[1:]
    assert option == "-n"
    port = json.loads(os.environ["MPIPLUS_JOB"])["port"]
    kept = strangers.ATTACKS[os.environ["ATTACK"]](port)
    told = {"PMI_SIZE": size, "PORT": str(port)}
    ranks = [subprocess.Popen(command, env={**os.environ, **told, "PMI_RANK": str(rank)}) for rank in range(int(size))]
    codes = [rank.wait() for rank in ranks]
    sys.exit(max(codes))
