#!/bin/bash
# mpiplus on Flux:  flux batch flux.sh
#flux: --job-name=train
#flux: --nodes=2
#flux: --nslots=4
#flux: --cores-per-slot=4
#flux: --time-limit=1h
#flux: --output=train-{{id}}.log

# What the job needs: your site's MPI and your Python environment, for example
#   module load mpich
#   source "$HOME/venv/bin/activate"

# Flux starts the ranks itself. MPICH and its relatives find it as it is; for Open MPI 5 add "-o pmi=pmix", which comes
# with the package flux-pmix. exit-timeout: how long the other ranks may take to end once one has.
exec flux run --ntasks=4 --cores-per-task=4 -o exit-timeout=10s python train.py --lr 0.1
