#!/usr/bin/env bash
# Train on several machines under SLURM, one torchrun per node:
#   sbatch --nodes=2 launch/slurm.sh plan.json --steps 1000 --out /shared/run
# RANKS_PER_NODE times the number of nodes must equal the GPUs of the plan, times --replicas. The
# plan, the task and --out must be visible on every node. 120 s before the time limit SLURM sends
# SIGTERM: the run stops and saves, for which torchrun gives it 110 s (its default is 30 s), and the
# same command with --resume instead of --out goes on.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
set -euo pipefail
plan=${1:?usage: sbatch --nodes=N launch/slurm.sh PLAN [flags of pipeplan.launch]}
shift

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
python -m pipeplan.launch --plan "$plan" "$@" --dry-run >&2
exec srun torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${RANKS_PER_NODE:-1}" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$head:${RENDEZVOUS_PORT:-29400}" \
  -m pipeplan.launch --plan "$plan" "$@"
