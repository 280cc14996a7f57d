"""What a rank runs that ``launch_subprocesses`` has started: ``python -m torchmpi_plugin.launch.rank FILE``."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from .. import mpi_runtime
from .payload import Payload

_INTERRUPTED = 130


def _receive(path: str) -> Payload:
    """Rank 0, on the launcher's host, reads the file; other hosts may not have it."""
    comm = mpi_runtime.mpi().COMM_WORLD.Dup()
    data = comm.bcast(Path(path).read_bytes() if comm.Get_rank() == 0 else None)
    comm.Free()
    search_path, rest = pickle.loads(data)
    sys.path[:] = search_path
    payload: Payload = pickle.loads(rest)
    return payload


def _leave(code: int) -> NoReturn:
    """End at once: an orderly end would wait in MPI for ranks that wait for this one."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main(path: str) -> None:
    """Receive the function, and run it."""
    try:
        payload = _receive(path)
        payload.run()
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        _leave(error.code & 0xFF if isinstance(error.code, int) else 1)
    except KeyboardInterrupt:
        _leave(_INTERRUPTED)
    except BaseException:
        traceback.print_exc()
        _leave(1)


if __name__ == "__main__":
    main(sys.argv[1])
