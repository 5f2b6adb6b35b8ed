#!/usr/bin/env bash
# A test program in Python, with a library that was built and the package as it lies in the sources.
#   run.sh ROOT LIBRARY TEST MODULES [PRELOAD...]    MODULES: what it imports; PRELOAD: what a library with sanitizers needs first
set -euo pipefail
usage="usage: run.sh ROOT LIBRARY TEST MODULES [PRELOAD...]"
root=$(cd "${1:?$usage}" && pwd)
library=${2:?$usage} test=${3:?$usage} modules=${4:?$usage}
shift 4

# build/pytorch is CI's; the distribution's counts where another one comes first.
for python in "$root/build/pytorch/bin/python" python3 /usr/bin/python3; do
  "$python" -c "import sys, $modules; sys.exit(sys.version_info < (3, 10))" 2>/dev/null || continue
  export PYTHONPATH=$root/python PYTHONDONTWRITEBYTECODE=1 TOPKNOT_LIBRARY=$library
  [ $# -eq 0 ] || export LD_PRELOAD="$*" ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0"
  exec "$python" "$root/$test"
done
echo "skipped: no Python 3.10 with $modules"
