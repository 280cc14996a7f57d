#!/bin/bash
# mpiplus on Slurm, ranks started by the MPI's own mpirun or mpiexec:  sbatch slurm-mpirun.sh train.py --lr 0.1
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
## Uncomment this only if train.py handles SIGUSR1 (to write a checkpoint, say): it comes 120 s before the time is over.
##SBATCH --signal=B:USR1@120

# What the job needs, in the environment of all its ranks: your site's MPI and your Python environment, for example
#   module load openmpi
#   source "$HOME/venv/bin/activate"

# Slurm says how many ranks (nodes x tasks per node) and where. exec: signals from Slurm reach mpiplus run, which passes
# them on to the ranks; the exit code of the job is that of the rank that failed first.
exec mpiplus run --stdout "logs/$SLURM_JOB_ID/{rank}.out" --stderr "logs/$SLURM_JOB_ID/{rank}.err" "$@"
