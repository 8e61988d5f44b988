#!/usr/bin/env bash
# Checks on one GPU what CPUs cannot show; at most 8 minutes. What has never run on a GPU comes first.
# Needs an environment with torch for CUDA, Triton and shardcompile[demo].
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SHARDCOMPILE_SHARE_GPUS=1 # two ranks on one GPU

echo "== one rank compiles: Triton code loaded by the second rank"
timeout 150 python -m benchmarks.first_step --ranks 2 --backend nccl
echo "== one rank tunes: the second rank has no tuning of its own"
TORCHINDUCTOR_MAX_AUTOTUNE=1 timeout 200 python -m benchmarks.first_step --ranks 2 --backend nccl
echo "== the demo's training, with its report"
timeout 120 python -m examples.poisson --ranks 2 --backend nccl --steps 20 --no-compare --out "$(mktemp -d)"
