#!/bin/bash
#SBATCH --job-name=stratagem
#SBATCH --nodes=2
#SBATCH --ntasks=4
# One key per job, readable by you only; every node sees your home directory.
umask 077
export STRATAGEM_CLUSTER_KEY_FILE="$HOME/.stratagem-$SLURM_JOB_ID.key"
python -c 'import secrets; print(secrets.token_hex(32))' > "$STRATAGEM_CLUSTER_KEY_FILE"
export DONE="$HOME/.stratagem-$SLURM_JOB_ID.done"
trap 'rm -f "$STRATAGEM_CLUSTER_KEY_FILE" "$DONE"' EXIT

# The chief ends when training has ended; --wait then kills the other tasks after 5 seconds, which srun reports as
# a failure. The chief creates the file when it has succeeded.
srun --wait=5 python on_slurm.py || test -f "$DONE"
