#!/usr/bin/env bash
# Backends are chosen by file, not by #ifdef, and each outside library is met in few files. What instruction
# sets differ in is in nn/core/simd.h and nn/core/stream.h.
#   backends_by_file.sh ROOT
set -euo pipefail
cd "${1:?usage: backends_by_file.sh ROOT}"

status=0
sources() { find nn data compress dist optim train -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null; }
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

cpu_file='[^:]*_cpu\.cpp'
cuda_file='[^:]*(_cuda\.cpp|\.cuh?)'
stub_file='[^:]*_stub\.cpp'
only_in "a conditional on a backend" \
  '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif|elifdef)\b.*(CUDA|NVCC|CUDNN|NCCL|DNNL|ONEDNN|GLOO|_OPENMP|__x86|__AVX|__SSE|__aarch64|__ARM)' \
  "$cpu_file|$cuda_file|$stub_file|nn/core/(simd|stream|host_device)\.h|nn/ops/onednn\.(h|cpp)" \
  "choose by file instead: x_cpu.cpp, x_cuda.cpp or x.cu, x_stub.cpp"
include='^[[:space:]]*#[[:space:]]*include[[:space:]]*<'
only_in "oneDNN" "${include}(oneapi|dnnl)" "$cpu_file|nn/ops/onednn\.(h|cpp)" "it is met in *_cpu.cpp and nn/ops/onednn only"
# CUDA's headers may be met in *_cuda.cpp and *.cu, and in headers that only such files include, by whatever way.
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
  echo "CUDA; it is met in *_cuda.cpp and *.cu, and in headers that only they include:"
  sed 's/^/  /' <<<"$found"
  status=1
fi
only_in "Gloo" "${include}gloo/" 'dist/gloo_[^:]*' "it is met in dist/gloo_* only"
only_in "a library of the programs" "${include}(yaml-cpp|nlohmann|CLI)/" 'train/[^:]*' "it is met in train only"
exit "$status"
