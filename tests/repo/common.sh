# Sourced by the scripts of this folder: a folder to work in, which goes at the end, and how they complain.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

skip() { echo "skipped: $1"; exit 0; }

status=0
complain() { echo "$1"; status=1; }

# expect STATUS TEXT COMMAND...: it ends with STATUS and says TEXT. Its words stay in $output.
expect() {
  local wanted=$1 text=$2 got=0
  shift 2
  output=$("$@" 2>&1 </dev/null) || got=$?
  [ "$got" = "$wanted" ] || complain "'$*' ended with $got, not $wanted: $output"
  grep -qF -- "$text" <<<"$output" || complain "'$*' does not say '$text': $output"
}
