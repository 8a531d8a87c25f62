#!/bin/bash
# Trains on two machines of a Slurm cluster, one process a GPU, and goes on by itself after a preemption.
#
#   sbatch examples/cluster/slurm.sh my_run.yaml
#
# Two minutes before the end of the time, and before a preemption where the partition allows for it, Slurm sends SIGTERM
# to this script. All ranks then finish their step, rank 0 writes a checkpoint, and the job goes back into the queue. Its
# next start goes on (checkpoint.resume: auto). A run that fails by itself does not go back.
#SBATCH --job-name=speedtronic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -uo pipefail

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
  -m speedtronic train "$config" checkpoint.resume=auto &
step=$!

# srun passes the signal on to torchrun, and that to its processes.
asked=
trap 'asked=1; kill -TERM "$step"' TERM
wait "$step"
code=$?
if [ -n "$asked" ]; then
  wait "$step"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
