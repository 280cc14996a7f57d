#!/bin/bash
# mpiplus on PBS Pro or OpenPBS:  qsub pbs.sh
#PBS -N train
#PBS -l select=2:ncpus=8:mpiprocs=2:ompthreads=4
#PBS -l walltime=01:00:00
#PBS -j oe

cd "$PBS_O_WORKDIR" || exit

# What the job needs: your site's MPI and your Python environment, for example
#   module load openmpi
#   source "$HOME/venv/bin/activate"

# The node file has a line per rank (select x mpiprocs), so it says how many ranks and where. An MPI built for PBS starts
# them through PBS; others, such as those from PyPI, through ssh between the nodes.
exec mpiplus run --hostfile "$PBS_NODEFILE" train.py --lr 0.1
