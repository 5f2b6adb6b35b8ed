#!/usr/bin/env bash
# Sources are formatted: C++ and CUDA by clang-format 14 (Debian 12's), Python by ruff. Without one of them
# its part is left out.
#   format.sh ROOT
set -euo pipefail
cd "${1:?usage: format.sh ROOT}"
status=0 missing=

# Prints the files, each with a NUL after it, whether or not this is a clone.
files() {
  find . -type f \( "$@" \) -not -path './build*' -not -path './.*' -not -path './runs/*' -print0
}

clang_format=$(command -v clang-format-14 || command -v clang-format || true)
if [ -n "$clang_format" ] && "$clang_format" --version | grep -q ' 14\.'; then
  found=$(files -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' |
    xargs -0 -r -n 20 -P "$(nproc)" "$clang_format" --dry-run 2>&1 | sed -n 's/^\([^:]*\):[0-9]*:.*/\1/p' | sort -u)
  [ -z "$found" ] || { echo "not formatted; make format does it:"; echo "$found"; status=1; }
else
  missing="clang-format 14"
fi
if command -v ruff >/dev/null; then
  mapfile -t python < <(files -name '*.py' | tr '\0' '\n'; grep -rlE --exclude-dir='.*' --exclude-dir='build*' '^#!/usr/bin/env python3' scripts lab | grep -v '\.py$')
  ruff format --check --quiet "${python[@]}" || { echo "not formatted; ruff format FILE does it"; status=1; }
  ruff check --quiet "${python[@]}" || status=1
else
  missing=${missing:+$missing and }ruff
fi
[ "$missing" != "clang-format 14 and ruff" ] || echo "skipped: $missing are not here"
exit "$status"
