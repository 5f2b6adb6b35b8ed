#!/usr/bin/env bash
# Every entry of lab/faults.txt fits the sources, and plant-faults tells what is noticed, what is not, and what a table
# does wrong: on a small tree, whose test program is a script.
#   faults.sh ROOT
set -euo pipefail
root=$(cd "${1:?usage: faults.sh ROOT}" && pwd)
command -v python3 >/dev/null || { echo "skipped: no python3"; exit 0; }
export PYTHONDONTWRITEBYTECODE=1
# shellcheck source=../../tests/repo/common.sh
source "$root/tests/repo/common.sh"

python3 "$root/lab/plant-faults" --check || complain "lab/faults.txt does not fit the sources"

# The table in lab/plant-faults.md has as many faults of each subject as lab/faults.txt.
diff <(sed -n 's/^\([a-z_]*\)\.[a-z_0-9]*: .*/\1/p' "$root/lab/faults.txt" | sort | uniq -c | awk '{ print $2, $1 }') \
  <(sed -n 's/^| .* | `\([a-z_]*\)\.\*` | \([0-9]*\) | .*/\1 \2/p' "$root/lab/plant-faults.md" | sort) ||
  complain "the table of faults in lab/plant-faults.md is not that of lab/faults.txt"

# The small tree: a program that fails where the limit is not 3, and does not end where it is 9. Its sources hold the limit.
tree=$work/tree
mkdir -p "$tree/lab" "$tree/tests/small" "$tree/nn"
cp "$root"/lab/{plant-faults,runs.py} "$tree/lab"
cat >"$tree/program" <<'END_OF_PROGRAM'
#!/bin/sh
limit=$(sed -n 's/.*int limit = \([0-9]*\).*/\1/p' "$(dirname "$0")/small.cpp")
echo '<TestCase name="three &amp; no more">'
[ $limit -ne 9 ] || sleep 1000
[ $limit -eq 3 ]
END_OF_PROGRAM
chmod +x "$tree/program"
cat >"$tree/nn/small.cpp" <<'END_OF_SOURCE'
#include <vector>
namespace small {
class Limits {
 public:
  int most() const { return limit_; }  // "limit = 5" { in a comment
 private:
  int limit_{7};
};
template <class T>
std::vector<T> Limits::words(T first) {
  const char* text = "a word, a word {";
  int limit = 3;
  return {first};
}
Limits::Limits() : limit_{1}, more_{2} { word(); }
constexpr int kWord = 4, kOther = 5;
const bool registered = add({"word", [] { return word(1); }});
void other(int n = 2) { use(n); }
void few(int n) {
  if (n < 2)
    use(n + 1);
}
}  // namespace small
END_OF_SOURCE
: >"$tree/tests/small/test.cpp"
cat >"$tree/CMakeLists.txt" <<'END_OF_CMAKE'
cmake_minimum_required(VERSION 3.22)
project(small NONE)
add_custom_target(test_small COMMAND ${CMAKE_COMMAND} -E make_directory bin
                  COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/program bin/test_small
                  COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/nn/small.cpp bin/small.cpp)
END_OF_CMAKE

# table NAME FUNCTION CHANGE [LINE...]: the small tree's table has this entry alone.
table() {
  { printf 'tests: test_small\n%s: %s\n  %s\n' "$1" "$2" "$3"; printf '  %s\n' "${@:4}"; } >"$tree/lab/faults.txt"
}
# plant STATUS TEXT ARGUMENTS...: plant-faults ends with STATUS and says TEXT.
plant() { expect "$1" "$2" python3 "$tree/lab/plant-faults" "${@:3}"; }

table a.b Limits::words 'limit = 4 => limit = 5'
plant 2 "a.b: 'limit = 4' occurs 0 times in Limits::words, not once" --check
table a.b Limits::words 'word => line'
plant 2 "a.b: 'word' occurs 3 times in Limits::words, not once" --check
table a.b Limits::word 'word => line'
plant 2 "a.b: nothing is called Limits::word" --check
table a.b Limits::words 'limit = 3 => limit = 3'
plant 2 'a.b: it changes nothing' --check
table a.b Limits::words 'limit = 3 => limit = 4' 'because: of this'
plant 2 "'  because: of this' is neither tests, nor an entry" --check
printf 'tests: test_small\na.b: Limits::words\n' >"$tree/lab/faults.txt"
plant 2 'a.b lacks OLD => NEW' --check
printf 'a.b: Limits::words\n  limit = 3 => limit = 4\n' >"$tree/lab/faults.txt"
plant 2 'a.b lacks tests' --check
printf 'tests: test_large\na.b: Limits::words\n  limit = 3 => limit = 4\n' >"$tree/lab/faults.txt"
plant 2 "a.b: 'test_large' is no test program" --check
table a.b Limits::words 'word => line' 'after: word, '
plant 0 '1 faults fit the sources' --check
for name in 'Limits::most: return limit_' 'Limits::limit_: 7' 'Limits::Limits: word' 'kWord: 4, kOther' \
  'registered: word(1)' 'other: n = 2'; do
  table a.b "${name%: *}" "${name#*: } => x"
  plant 0 '1 faults fit the sources' --check
done

if command -v git >/dev/null; then
  commit() { git -C "$tree" -c user.name=t -c user.email=t@example.org commit -q -a -m "$1"; }
  table a.b Limits::words 'limit = 3 => limit = 4'
  git -C "$tree" init -q
  git -C "$tree" add .
  commit first
  plant 0 'a.b: noticed test_small: three & no more' --work "$work/bench"
  plant 0 '| a | 1 | 1 | 0 | 0 |' --work "$work/bench"  # from the results
  table a.b Limits::words 'a word, =>'
  commit second
  plant 1 'survived: a.b (Limits::words: a word,' --work "$work/bench"
  table a.b Limits::words 'a word, =>' 'equivalent: nobody reads it'
  plant 0 '| a | 1 | 0 | 1 | 0 |' --work "$work/bench"
  table a.b few 'n < 2 => n < 3'
  plant 1 '5 of 5 mutants of 1 functions' --work "$work/bench" --sample 9
  for text in '(few: n < 2 => !(n < 2))' '(few: < => <=)' '(few: use(n + 1); => )' '(few:  + 1 =>  + 2)'; do
    grep -qF -- "$text" <<<"$output" || complain "no mutant $text: $output"
  done
  sed -i 's/limit = 3/limit = 2/' "$tree/nn/small.cpp"
  commit third
  plant 2 'test_small does not pass without a fault: three & no more' --work "$work/bench" --again
  git -C "$tree" status --porcelain | grep -v lab/faults.txt && complain "plant-faults changed the user's tree"
fi
exit "$status"
