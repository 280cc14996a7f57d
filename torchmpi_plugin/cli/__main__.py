"""``python -m torchmpi_plugin.cli``: the command ``mpiplus`` of this very interpreter."""

from . import main

main(prog_name="mpiplus")
