#!/bin/bash
# Trains on two machines of a Slurm cluster, one process a GPU, and goes on by itself after a preemption.
#
#   sbatch examples/cluster/slurm.sh my_run.yaml
#
# Slurm sends SIGTERM two minutes before the end of the time or a preemption. All ranks finish their step, and rank 0
# writes a checkpoint. Slurm puts the job back into its queue, and the next start goes on (checkpoint.resume: auto).
#SBATCH --job-name=speedtronic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG}
# The first machine is where the processes meet.
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One torchrun a machine, which starts a process for each of its GPUs.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$address:29500" \
    --max-restarts=3 \
    -m speedtronic train "$config" checkpoint.resume=auto ||
    {
        code=$?
        # 128 + 15: ended by SIGTERM, with a checkpoint. torchrun itself says 1 where it was told to end.
        if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        exit "$code"
    }
