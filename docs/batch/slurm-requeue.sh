#!/bin/bash
# mpiplus on Slurm, put back into the queue when a rank or a node is lost:  sbatch slurm-requeue.sh train.py --lr 0.1
# For programs that go on from their last checkpoint. LAUNCHER=mpirun in place of srun; for mpiplus run see the end.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
#SBATCH --open-mode=append

# What the job needs: your site's MPI and your Python environment, for example
#   module load openmpi
#   source "$HOME/venv/bin/activate"

# Which start this is, in torchrun's variables: Slurm counts them.
export TORCHELASTIC_RESTART_COUNT="${SLURM_RESTART_COUNT:-0}" TORCHELASTIC_MAX_RESTARTS="${MAX_RESTARTS:-3}"

if [ "${LAUNCHER:-srun}" = mpirun ]; then
    mpirun python "$@"
else
    srun --kill-on-bad-exit=1 --mpi="${MPI_TYPE:-pmix}" python "$@"
fi
code=$?

# A lost node is replaced: the job waits for a new allocation. (With spare nodes in this one, "mpiplus run --nnodes 1:2
# --nproc-per-node 2 --max-restarts 3" starts again at once, on those that answer.)
if [ "$code" -ne 0 ] && [ "$TORCHELASTIC_RESTART_COUNT" -lt "$TORCHELASTIC_MAX_RESTARTS" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60    # until Slurm ends this start
fi
exit "$code"
