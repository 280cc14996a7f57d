#!/usr/bin/env python3
"""Print what a machine's pip is set up with as variables for uv, which reads neither pip.conf nor PIP_*.

Usage: eval "$(python3 .ci/uv_settings.py)"
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from ast import literal_eval

#: pip's options that uv has under another name, and what stands between several values there.
NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "proxy": ("ALL_PROXY", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
}
#: As pip looks for them: a later one replaces an earlier one.
SECTIONS = ("global", "site", "user", "install", ":env:")
LINE = re.compile(r"(?P<section>[^.]+)\.(?P<option>[\w.-]+)=(?P<value>.*)")


def translated(listing: str) -> dict[str, str]:
    """uv's variables for what ``pip config list`` says."""
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        match = LINE.fullmatch(line.strip())
        if match is None or match["section"] not in SECTIONS:
            continue
        option, rank = match["option"].replace("_", "-"), SECTIONS.index(match["section"])
        if option in NAMES and rank >= found.get(option, (-1, ""))[0]:
            found[option] = rank, str(literal_eval(match["value"]))
    variables = {}
    for option, (_, value) in found.items():
        name, between = NAMES[option]
        variables[name] = between.join(value.split()) if between else value
    if "UV_INDEX" in variables:
        # pip takes the best version that any index has, uv by default that of the first index with the package
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


def main() -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name, value in sorted(translated(listing).items()):
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
