#!/usr/bin/env bash
# The shell scripts parse and can be run, and doctor and install-deps tell what is missing.
#   scripts.sh ROOT
set -euo pipefail
root=$(cd "${1:?usage: scripts.sh ROOT}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

status=0
complain() { echo "$1"; status=1; }

# expect STATUS TEXT COMMAND...: it ends with STATUS and says TEXT.
expect() {
  local wanted=$1 text=$2 output got=0
  shift 2
  output=$("$@" 2>&1) || got=$?
  [ "$got" = "$wanted" ] || complain "'$*' ended with $got, not $wanted: $output"
  grep -qF -- "$text" <<<"$output" || complain "'$*' does not say '$text': $output"
}

while IFS= read -r file; do
  head -n 1 "$file" | grep -q '^#!.*bash' || continue
  bash -n "$file" || complain "$file does not parse"
  [ -x "$file" ] || complain "$file cannot be run"
done < <(find "$root/scripts" "$root/.ci" "$root/tests/repo" -type f)

mkdir "$work/scripts"
cp "$root"/scripts/{doctor,install-deps,packages} "$work/scripts"
echo 'topknot-no-such-package | required | command:topknot-no-such-command | a planted fault' >>"$work/scripts/packages"
expect 1 'apt-get install topknot-no-such-package' "$work/scripts/doctor"
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  expect 1 'topknot-no-such-package' "$work/scripts/install-deps" --dry-run
fi

# A system without apt: only the few commands that the script needs before it looks for apt.
mkdir "$work/bin"
for command in bash dirname cat; do ln -s "$(command -v "$command")" "$work/bin/$command"; done
expect 1 'Dockerfile' env PATH="$work/bin" bash "$work/scripts/install-deps"
exit "$status"
