#!/usr/bin/env bash
# Every entry of scripts/faults.txt fits the sources, and plant-faults tells what is noticed, what is not, and what a table
# does wrong: on a small tree, whose test program is a script.
#   faults.sh ROOT
set -euo pipefail
root=$(cd "${1:?usage: faults.sh ROOT}" && pwd)
command -v python3 >/dev/null || { echo "skipped: no python3"; exit 0; }
export PYTHONDONTWRITEBYTECODE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
complain() { echo "$1"; status=1; }

python3 "$root/scripts/plant-faults" --check || complain "scripts/faults.txt does not fit the sources"

# The table in CONTRIBUTING.md has as many faults of each subject as scripts/faults.txt.
diff <(sed -n 's/^id: *\([a-z_]*\)\..*/\1/p' "$root/scripts/faults.txt" | sort | uniq -c | awk '{ print $2, $1 }') \
  <(sed -n 's/^| .* | `\([a-z_]*\)\.\*` | \([0-9]*\) | .*/\1 \2/p' "$root/CONTRIBUTING.md" | sort) ||
  complain "the table of faults in CONTRIBUTING.md is not that of scripts/faults.txt"

# The small tree: a program that fails where the limit is not 3, and does not end where it is 9.
tree=$work/tree
mkdir -p "$tree/scripts" "$tree/tests/small"
cp "$root/scripts/plant-faults" "$tree/scripts"
cat >"$tree/program" <<'END_OF_PROGRAM'
#!/bin/sh
limit=3
text='a word, a word'
echo '<TestCase name="three &amp; no more">'
[ $limit -ne 9 ] || sleep 1000
[ $limit -eq 3 ]
END_OF_PROGRAM
chmod +x "$tree/program"
: >"$tree/tests/small/test.cpp"
cat >"$tree/CMakeLists.txt" <<'END_OF_CMAKE'
cmake_minimum_required(VERSION 3.22)
project(small NONE)
add_custom_target(test_small COMMAND ${CMAKE_COMMAND} -E make_directory bin
                  COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/program bin/test_small)
END_OF_CMAKE

# table ID OLD NEW [LINE...]: the small tree's table has this entry alone.
table() {
  { printf 'id: %s\nfile: program\nold: %s\nnew: %s\ntests: test_small\n' "$1" "$2" "$3"; printf '%s\n' "${@:4}"; } \
    >"$tree/scripts/faults.txt"
}
# expect STATUS TEXT ARGUMENTS...: plant-faults ends with STATUS and says TEXT.
expect() {
  local wanted=$1 text=$2 output got=0
  shift 2
  output=$(python3 "$tree/scripts/plant-faults" "$@" 2>&1) || got=$?
  [ "$got" = "$wanted" ] || complain "plant-faults $* ended with $got, not $wanted: $output"
  grep -qF -- "$text" <<<"$output" || complain "plant-faults $* does not say '$text': $output"
}

table a.b 'limit=4' 'limit=5'
expect 2 "a.b: 'limit=4' occurs 0 times in program, not once" --check
table a.b 'word' 'line'
expect 2 "a.b: 'word' occurs 2 times in program, not once" --check
table a.b 'word' 'line' 'after: word, '
expect 0 '1 faults fit the sources' --check
table a.b 'limit=3' 'limit=3'
expect 2 'a.b: it changes nothing' --check
table a.b 'limit=3' 'limit=4' 'because: of this'
expect 2 "'because' is no key here" --check
printf 'id: a.b\nfile: program\n' >"$tree/scripts/faults.txt"
expect 2 'the entry lacks old, new, tests' --check
printf 'id: a.b\nfile: program\nold: limit=3\nnew: limit=4\ntests: test_large\n' >"$tree/scripts/faults.txt"
expect 2 "a.b: 'test_large' is no test program" --check

if command -v git >/dev/null; then
  commit() { git -C "$tree" -c user.name=t -c user.email=t@example.org commit -q -a -m "$1"; }
  table a.b 'limit=3' 'limit=4'
  git -C "$tree" init -q
  git -C "$tree" add .
  commit first
  expect 0 'a.b: noticed test_small: three & no more' --work "$work/bench"
  expect 0 '| a | 1 | 1 | 0 | 0 |' --work "$work/bench"  # from the results
  table a.b 'a word, ' ''
  commit second
  expect 1 'survived: a.b (program: a word,' --work "$work/bench"
  table a.b 'a word, ' '' 'equivalent: nobody reads it'
  expect 0 '| a | 1 | 0 | 1 | 0 |' --work "$work/bench"
  sed -i 's/limit=3/limit=2/' "$tree/program"
  commit third
  expect 2 'test_small does not pass without a fault: three & no more' --work "$work/bench" --again
  git -C "$tree" status --porcelain | grep -v scripts/faults.txt && complain "plant-faults changed the user's tree"
fi
exit "$status"
