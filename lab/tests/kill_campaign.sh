#!/usr/bin/env bash
# lab/kill-campaign: what it refuses and what it notices, and a few of its runs.
#   kill_campaign.sh ROOT notices TRAIN
#   kill_campaign.sh ROOT KINDS RUNS TRAIN     KINDS as for --only
#   kill_campaign.sh ROOT elastic RUNS TRAIN   lab/elastic-campaign
set -euo pipefail
root=$(cd "${1:?usage: kill_campaign.sh ROOT notices|KINDS [RUNS] TRAIN}" && pwd)
what=${2:?notices, or kinds of disturbances}
train=${!#}
# shellcheck source=../../tests/repo/common.sh
source "$root/tests/repo/common.sh"
export TMPDIR=$work

command -v python3 >/dev/null || skip 'no python3'
python3 -c 'import signal; signal.pidfd_send_signal' 2>/dev/null || skip 'no Python 3.9 on Linux'

# campaign STATUS TEXT ARGUMENT...: the campaign ends with STATUS and says TEXT.
campaign() { expect "$1" "$2" "$root/lab/kill-campaign" "${@:3}"; }

if [ "$what" = notices ]; then
  campaign 2 'known are killed, signalled' --train "$train" --only bombed
  campaign 2 'there is no program' --train "$work/none"
  campaign 2 '1 at least' --train "$train" --runs 0
  campaign 2 'no run is of these kinds: cut' --train "$train" --run 0 --only cut
  # Run 0 is a SIGKILL. This program leaves a process behind, and writes a step twice when it is resumed.
  cat >"$work/train" <<END
#!/bin/sh
case "\$*" in
  --resume*)
    "$train" "\$@" || exit
    echo '{"event":"step","rank":0,"step":1}' >>"\$2/metrics.jsonl"
    exit ;;
  */undisturbed-*) ;;
  *) setsid sleep 1000$$ >/dev/null 2>&1 & ;;
esac
exec "$train" "\$@"
END
  chmod +x "$work/train"
  campaign 1 '1 processes still ran' --train "$work/train" --run 0 --deadline 8
  grep -qF 'metrics.jsonl has the steps [1' <<<"$output" || complain "a step that stands twice is not noticed: $output"
  if pgrep -f "^sleep 1000$$\$" >/dev/null; then complain 'the process is left'; fi
elif [ "$what" = elastic ]; then
  expect 0 'all passed' "$root/lab/elastic-campaign" --train "$train" --runs "$3" --epochs 10 --events 5
  # This program writes a step twice.
  cat >"$work/train" <<END
#!/bin/sh
"$train" "\$@"
for key; do
  case "\$key" in output.dir=*) echo '{"event":"step","step":1,"loss":1}' >>"\${key#*=}/metrics.jsonl" ;; esac
done
END
  chmod +x "$work/train"
  expect 1 'does not have each step once' "$root/lab/elastic-campaign" --train "$work/train" --runs 1 --epochs 2 --events 0
  rm -r "$work"/topknot-elastic-*
else
  campaign 0 '' --train "$train" --only "$what" --runs "$3"
  if grep -q '^left out: ' <<<"$output"; then skip "$(grep '^left out: ' <<<"$output")"; fi
  grep -q '^| all |' <<<"$output" || complain "there is no table: $output"
  echo "$output"
fi
[ -z "$(ls "$work" | grep -v '^train$')" ] || complain "left in the temporary directory: $(ls "$work")"
exit "$status"
