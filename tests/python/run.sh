#!/usr/bin/env bash
# python/tests/test_numpy.py, with a library that was built and the package as it lies in the sources.
#   numpy.sh ROOT LIBRARY [PRELOAD...]    PRELOAD: what a library with sanitizers needs first
set -euo pipefail
root=$(cd "${1:?usage: numpy.sh ROOT LIBRARY [PRELOAD...]}" && pwd)
library=${2:?usage: numpy.sh ROOT LIBRARY [PRELOAD...]}
shift 2

for python in python3 /usr/bin/python3; do  # the distribution's, where another one comes first
  "$python" -c 'import sys, numpy; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
  export PYTHONPATH=$root/python PYTHONDONTWRITEBYTECODE=1 TOPKNOT_LIBRARY=$library
  [ $# -eq 0 ] || export LD_PRELOAD="$*" ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0"
  exec "$python" "$root/python/tests/test_numpy.py"
done
echo "skipped: no Python 3.10 with NumPy (Debian: python3-numpy)"
