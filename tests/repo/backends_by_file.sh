#!/usr/bin/env bash
# Backends are chosen by file, not by #ifdef, and each outside library is met in few files. What instruction
# sets differ in is in nn/core/simd.h.
#   backends_by_file.sh ROOT
set -euo pipefail
cd "${1:?usage: backends_by_file.sh ROOT}"

status=0
sources() { find include nn data compress dist optim train -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null; }
[ "$(sources | tr -dc '\0' | wc -c)" -gt 0 ] || { echo "no sources found: is '$1' the root of the repository?"; exit 1; }

# only_in WHAT PATTERN ALLOWED REMEDY: lines that match PATTERN may stand only in files whose path matches ALLOWED.
only_in() {
  local found
  found=$(sources | sort -z | xargs -0 grep -nHE -- "$2" | grep -vE "^($3):" || true)
  [ -n "$found" ] || return 0
  echo "$1; $4:"
  sed 's/^/  /' <<<"$found"
  status=1
}

cpu_file='nn/ops/cpu/[^:]*'
cuda_file='[^:]*/cuda/[^:]*|[^:]*\.cu'
stub_file='[^:]*_stub\.cpp'
only_in "a conditional on a backend" \
  '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif|elifdef)\b.*(CUDA|NVCC|CUDNN|NCCL|DNNL|ONEDNN|GLOO|_OPENMP|__x86|__AVX|__SSE|__aarch64|__ARM)' \
  "$cpu_file|$cuda_file|$stub_file|nn/core/simd\.h|nn/base/host_device\.h" \
  "choose by file instead: cpu/x.cpp, cuda/x.cpp or cuda/x.cu, x_stub.cpp"
include='^[[:space:]]*#[[:space:]]*include[[:space:]]*<'
only_in "oneDNN" "${include}(oneapi|dnnl)" "$cpu_file" "it is met in nn/ops/cpu only"
# CUDA's headers may be met in folders named cuda, in .cu files, and in headers that only files there include, by whatever way.
cuda_headers=$(sources | xargs -0 grep -lE -- "${include}(cuda|cudnn|cublas|nccl|nvtx3/|topknot_kernel)" | grep '\.h$' || true)
for _ in 1 2 3 4 5 6 7 8; do
  pattern=$(sed 's/.*/#include "&"/' <<<"$cuda_headers")
  more=$(sources | xargs -0 grep -lFf <(echo "$pattern") | grep '\.h$' || true)
  grown=$(printf '%s\n%s\n' "$cuda_headers" "$more" | sed '/^$/d' | sort -u)
  [ "$grown" != "$cuda_headers" ] || break
  cuda_headers=$grown
done
found=$(sources | sort -z | xargs -0 grep -nHE -- "${include}(cuda|cudnn|cublas|nccl|cub/)" | grep -vE "^($cuda_file|[^:]*\.h):" || true)
found+=$([ -z "$cuda_headers" ] || sources | sort -z | xargs -0 grep -nHFf <(sed 's/.*/#include "&"/' <<<"$cuda_headers") |
         grep -vE "^($cuda_file|[^:]*\.h):" || true)
if [ -n "$found" ]; then
  echo "CUDA; it is met in folders named cuda, in .cu files, and in headers that only these include:"
  sed 's/^/  /' <<<"$found"
  status=1
fi
only_in "Gloo" "${include}gloo/" 'dist/comm/gloo_[^:]*' "it is met in dist/comm/gloo_* only"
only_in "a library of the programs" "${include}(yaml-cpp|nlohmann|CLI)/" 'train/[^:]*' "it is met in train only"
exit "$status"
