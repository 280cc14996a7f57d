#!/usr/bin/env python3
"""Print the command that README.md shows right after the comment `<!-- ci: NAME -->`.

CI runs what the reader is told to run, so the two cannot drift apart.

Usage: readme_command.py README.md NAME
"""

import re
import sys
from pathlib import Path

path, name = sys.argv[1:]
block = rf"^<!-- ci: {re.escape(name)} -->\n```sh\n(.*?)^```$"
blocks = re.findall(block, Path(path).read_text(), re.DOTALL | re.MULTILINE)
if len(blocks) != 1:
    sys.exit(f"{path}: {len(blocks)} sh blocks follow the comment <!-- ci: {name} -->, there must be one")
command = blocks[0].strip()
if "\n" in command.replace("\\\n", ""):
    sys.exit(f"{path}: the command after <!-- ci: {name} --> is not one line:\n{command}")
print(command)
