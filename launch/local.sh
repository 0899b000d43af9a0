#!/usr/bin/env bash
# Train on this machine, one process per GPU of the plan and replica:
#   launch/local.sh plan.json --steps 100 --out run
# All but the task (that, too, with --task) is checked in one process first: a mistake gives one message and its own exit code
# (2 wrong input, 4 invalid plan), without the report that torchrun adds to any failure.
set -euo pipefail
plan=${1:?usage: launch/local.sh PLAN [flags of pipeplan.launch]}
shift

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "$(uname)" = Linux ]; then
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi

checked=$(python -m pipeplan.launch --plan "$plan" "$@" --dry-run)
printf '%s\n' "$checked" >&2
# The last line begins with "4 ranks:", those of all replicas.
ranks=$(printf '%s\n' "$checked" | tail -n 1 | cut -d ' ' -f 1)
if [ "$ranks" = 1 ]; then
  exec python -m pipeplan.launch --plan "$plan" "$@"
fi
exec torchrun --standalone --nproc-per-node "$ranks" -m pipeplan.launch --plan "$plan" "$@"
