#!/bin/bash
# mpiplus on LSF:  bsub < lsf.sh
#BSUB -J train
#BSUB -n 4
#BSUB -R "span[ptile=2]"
#BSUB -W 01:00
#BSUB -o train-%J.log

# What the job needs: your site's MPI and your Python environment, for example
#   module load openmpi
#   source "$HOME/venv/bin/activate"

# The node file has a line per slot (-n 4, two on each node), so it says how many ranks and where. An MPI built for LSF
# starts them through LSF; others, such as those from PyPI, through ssh between the nodes.
exec mpiplus run --hostfile "$LSB_DJOB_HOSTFILE" train.py --lr 0.1
