"""A command of mpiplus on ranks that believe to be on nodes: believing.py 0,1 bench --tune."""

import sys

from mpi4py import MPI

from torchmpi_plugin.cli import main
from torchmpi_plugin.node import node

hosts, *words = sys.argv[1:]
here = hosts.split(",")[MPI.COMM_WORLD.rank]
node.identity = lambda: f"node {here}"
main(words)
