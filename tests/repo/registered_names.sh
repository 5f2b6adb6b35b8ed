#!/usr/bin/env bash
# Every name that a source file registers shows in `train --list`: a linker may drop a file that nobody calls.
#   registered_names.sh ROOT TRAIN
set -euo pipefail
cd "${1:?usage: registered_names.sh ROOT TRAIN}"
train=${2:?usage: registered_names.sh ROOT TRAIN}

status=0
complain() { echo "$1"; status=1; }

names_in() {  # FILE CALL: what it registers, by CALL("name"
  local text
  text=$(sed 's|//.*||' "$1" | tr '\n' ' ')
  grep -oE "($2)\( *\"[^\"]+\"" <<<"$text" | grep -oE '"[^"]+"' || true
}

check() {  # LIST FOLDER [CALL]
  local listed file names name total=0 call=${3:-$1\\(\\)\\.add}
  if ! listed=$("$train" --list "$1" 2>&1); then
    complain "train --list $1 failed: $listed"
    return
  fi
  while IFS= read -r file; do
    names=$(names_in "$file" "$call" | tr -d '"')
    [ -n "$names" ] || complain "$file registers $1 in a way that this check cannot read"
    for name in $names; do
      total=$((total + 1))
      awk '{ print $1 }' <<<"$listed" | grep -qxF -- "$name" || complain "$file registers '$name', which 'train --list $1' does not show"
    done
  done < <(grep -rlE --include='*.cpp' "($call)\(" "$2" | grep -vxF compress/sparse.cpp || true)  # which defines add_sparse
  [ "$total" -gt 0 ] || complain "no source in $2 registers any of the $1"
}

check models nn/models 'add_model(<[A-Za-z0-9]+>)?'
check datasets data 'add_dataset<[A-Za-z0-9]+>'
check compressors compress 'compressors\(\)\.add|add_sparse'
check selections compress 'add_selector<[A-Za-z]+>'
check memories compress 'add_memory<[A-Za-z0-9]+>'
check codecs compress 'index_codecs\(\)\.add'
check values compress 'value_codecs\(\)\.add'
check optimizers optim
check schedules optim
check collectives dist
check backends dist
check merges dist 'merge_rules\(\)\.add'
exit "$status"
