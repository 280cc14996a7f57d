#!/usr/bin/env python3
"""Print the names of all shell scripts below a directory: by their first line or their name.

Usage: shell_files.py DIRECTORY
"""

import os
import re
import sys
from pathlib import Path

SHELL = re.compile(rb"#!.*\b(ba|da|k)?sh\b|# shellcheck shell=", re.MULTILINE)

for folder, folders, names in os.walk(sys.argv[1]):
    folders[:] = sorted(name for name in folders if not name.startswith(".") or name in (".ci", ".github"))
    for name in sorted(names):
        file = Path(folder, name)
        with file.open("rb") as opened:
            if name.endswith(".sh") or SHELL.match(opened.read(200)):
                print(file)
