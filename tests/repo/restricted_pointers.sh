#!/usr/bin/env bash
# Kernels whose parameters are __restrict__ are started by launch_in_turn() (nn/core/cuda/nvcc/topknot_kernel.h says why).
#   restricted_pointers.sh ROOT
set -euo pipefail
cd "${1:?usage: restricted_pointers.sh ROOT}"

mapfile -t files < <(grep -rl --include='*.cu' __restrict__ nn compress data dist optim)
[ ${#files[@]} -gt 0 ] || { echo "no file has __restrict__: this check is of no use any more"; exit 1; }
! grep -HnE '\blaunch(_each)?\(' "${files[@]}"
