#!/usr/bin/env bash
# lab/same-bits finds a program equal to itself, also resumed, and notices another seed and a program that fails.
#   same_bits.sh ROOT TRAIN
set -euo pipefail
root=$(cd "${1:?usage: same_bits.sh ROOT TRAIN}" && pwd)
train=$(realpath "${2:?usage: same_bits.sh ROOT TRAIN}")
command -v python3 >/dev/null || { echo "skipped: no python3"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{same,seed,fails}/bin
ln -s "$train" "$work/same/bin/train"
printf '#!/bin/sh\ncase "$*" in *--resume*) exec "%s" "$@";; esac\nexec "%s" "$@" seed=2\n' "$train" "$train" >"$work/seed/bin/train"
printf '#!/bin/sh\necho broken\nexit 3\n' >"$work/fails/bin/train"
chmod +x "$work"/*/bin/train

# expect STATUS TEXT ARGUMENTS...
expect() {
  local wanted=$1 text=$2 output got=0
  shift 2
  output=$("$root/lab/same-bits" "$@" 2>&1) || got=$?
  [ "$got" = "$wanted" ] && grep -qF -- "$text" <<<"$output" ||
    { echo "same-bits $*: status $got, not $wanted, or without '$text': $output"; exit 1; }
}
expect 0 '1 equal, 0 different, 0 left out' --only signsgd "$work/same" "$work/same"
expect 0 '1 left out' --only 'powersgd, staged' "$work/same" "$work/same"
expect 1 'signsgd: loss of step 1: ' --only signsgd "$work/same" "$work/seed"
expect 1 'exit code 3: broken' --only signsgd "$work/same" "$work/fails"
expect 2 'build it first' "$work" "$work/same"
expect 2 'no run has this in its name' --only nothing "$work/same" "$work/same"
