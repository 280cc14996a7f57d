#!/bin/bash
# mpiplus on Slurm, ranks started by srun:  sbatch slurm-srun.sh train.py --lr 0.1
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log

# What the job needs: your site's MPI and your Python environment, for example
#   module load openmpi
#   source "$HOME/venv/bin/activate"

# How Slurm and MPI find each other: pmix for Open MPI, pmi2 for MPICH and its relatives, as far as your Slurm has it
# ("srun --mpi=list"). The wrong one makes every rank a world of its own, which mpiplus reports as an error.
# kill-on-bad-exit: without it the other ranks wait for one that has died.
exec srun --kill-on-bad-exit=1 --mpi="${MPI_TYPE:-pmix}" python "$@"
