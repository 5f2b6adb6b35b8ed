#!/usr/bin/env bash
# scripts/fetch-data refuses what is wrong with one message and leaves nothing that looks like data behind. Good data is not in
# the repository, so that way is tried by hand.
set -uo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# refused WHAT WORD ARGUMENTS...: a non-zero exit, WORD in the message, and no data file in the target.
refused() {
  local what=$1 word=$2 output
  shift 2
  rm -rf "$work/to"
  if output=$(scripts/fetch-data "$@" 2>&1); then
    echo "$what: was accepted: $output"
    failed=1
  elif ! grep -q -- "$word" <<<"$output"; then
    echo "$what: the message lacks '$word': $output"
    failed=1
  elif find "$work/to" \( -name '*.bin' -o -name '*-ubyte*' \) -type f 2>/dev/null | grep -q .; then
    echo "$what: left files behind: $(find "$work/to" -type f)"
    failed=1
  fi
}

refused "an unknown data set" cifar10 imagenet --to "$work/to"
refused "a folder that is not there" "$work/nowhere" cifar10 --from "$work/nowhere" --to "$work/to"
mkdir "$work/damaged"
for batch in 1 2 3 4 5; do printf 'not a picture' >"$work/damaged/data_batch_$batch.bin"; done
printf 'not a picture' >"$work/damaged/test_batch.bin"
refused "damaged pictures" data_batch_1.bin cifar10 --from "$work/damaged" --to "$work/to"
printf 'not an archive' >"$work/junk.tar.gz"
refused "a damaged archive" junk.tar.gz cifar10 --from "$work/junk.tar.gz" --to "$work/to"
scripts/fetch-data --help | grep -q -- --from || { echo "--help does not teach --from"; failed=1; }
exit "$failed"
