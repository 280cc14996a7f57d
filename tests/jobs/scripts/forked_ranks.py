"""Imported by a program, it lets the ranks that `launch_subprocesses` starts come from the fork server."""

import sys
from pathlib import Path

from torchmpi_plugin.launch import processes

sys.path.append(str(Path(__file__).parents[2]))
import fork_server

command_of = processes.python_command
processes.python_command = lambda code: [fork_server.python(), *command_of(code)[1:]]
