#!/usr/bin/env bash
# No C++ file grows past 600 lines: there, look for two concepts.
#   file_sizes.sh ROOT
set -euo pipefail
cd "${1:?usage: file_sizes.sh ROOT}"

limit=600
status=0
count=0
while IFS= read -r file; do
  count=$((count + 1))
  lines=$(wc -l <"$file")
  if [ "$lines" -gt "$limit" ]; then
    echo "$file: $lines lines, $limit are allowed; split it by subject"
    status=1
  fi
done < <(find include nn data compress dist optim train lab tests -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort)
[ "$count" -gt 0 ] || { echo "no sources found: is '$1' the root of the repository?"; status=1; }
exit "$status"
