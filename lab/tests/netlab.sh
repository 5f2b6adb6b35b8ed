#!/usr/bin/env bash
# lab/netlab: what it refuses and how it counts (anywhere), and real labs (as root, where the kernel has what they need).
#   netlab.sh ROOT arguments [COMPARE]
#   netlab.sh ROOT lab TRAIN
set -euo pipefail
root=$(cd "${1:?usage: netlab.sh ROOT arguments|lab [PROGRAM]}" && pwd)
part=${2:?which part: arguments or lab}
program=${3:-}  # compare of the part arguments, train of the part lab
netlab=$root/lab/netlab
# shellcheck source=../../tests/repo/common.sh
source "$root/tests/repo/common.sh"
cd "$work"

# within SECONDS COMMAND...: it succeeds before long.
within() {
  local tries=$(($1 * 10))
  shift
  while ! "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || return 1
    sleep 0.1
  done
}

labs_of() { find /run/netns -maxdepth 1 -name "netlab-$1-*" 2>/dev/null; }
none_of() { [ -z "$(labs_of "$1")" ]; }
# shellcheck disable=SC2317
both() { [ -s "$1"0 ] && [ -s "$1"1 ]; }
# shellcheck disable=SC2317
gone() { ! [ -e "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status"; }  # a zombie is no running process

spec() {  # METHODS
  printf '{"hosts": [2], "rates": ["100mbit"], "rounds": 2, "methods": %s}\n' "$1" >spec.json
}

test_arguments() {
  expect 2 "'1gbps' is no rate" "$netlab" --hosts 2 --rate 1gbps -- true
  expect 2 'outside of 1mbit to 100gbit' "$netlab" --hosts 2 --rate 10kbit -- true
  expect 2 'outside of 1mbit to 100gbit' "$netlab" --hosts 2 --rate 101gbit -- true
  expect 2 "'0' is not a whole number" "$netlab" --hosts 0 --rate 1gbit -- true
  expect 2 '--rate' "$netlab" --hosts 2 -- true
  expect 2 'write it after --' "$netlab" --hosts 2 --rate 1gbit
  expect 2 'go together' "$netlab" --hosts 2 --rate 1gbit --cut 1 -- true
  expect 2 'only the hosts 0 to 1' "$netlab" --hosts 2 --rate 1gbit --cut 2 --after 1 -- true
  expect 2 'no number of seconds' "$netlab" --hosts 2 --rate 1gbit --timeout soon -- true
  expect 2 '--measure takes no command' "$netlab" --hosts 2 --rate 1gbit --measure -- true
  expect 127 'no program ./no-such-program' "$netlab" --hosts 2 --rate 1gbit -- ./no-such-program
  expect 0 '--ranks-per-host' "$netlab" --help

  expect 2 'No such file' "$netlab" compare no-such.json --out out
  echo '{' >spec.json
  expect 2 'spec.json is no JSON' "$netlab" compare spec.json --out out
  spec '{"dense": "true"}'
  expect 2 'should be an object of commands' "$netlab" compare spec.json --out out
  spec '{"dense": ["true"]}, "round": 3'
  expect 2 'unknown key "round"' "$netlab" compare spec.json --out out
  spec '{"dense": ["true"]}, "title": 1'
  expect 2 '"title" should be a text' "$netlab" compare spec.json --out out
  spec '{"a b": ["true"], "a/b": ["true"]}'
  expect 2 'would share a folder' "$netlab" compare spec.json --out out
  spec '{"dense": ["true"]}'
  expect 2 "has no method 'sparse'" "$netlab" compare spec.json --out out --only sparse
  spec '{"dense": ["true", "data.root={data}"]}'
  expect 2 '--data DIR says where' "$netlab" compare spec.json --out out
  expect 2 "there is no folder 'set'" "$netlab" compare spec.json --out out --data set
  expect 2 "there is no method 'sparse'" "$netlab" compare spec.json --out out --steps sparse=3
  local steps
  for steps in dense dense= dense=0 dense=5,6 dense=5,1,1 dense=-1; do
    expect 2 "'$steps' is not N, N,M, METHOD=N or METHOD=N,M" "$netlab" compare spec.json --out out --steps "$steps"
  done
  spec '{"dense": ["true"], "topk": ["true"]}'
  expect 2 "the time of the baseline 'dense', which is not among the methods (topk)" \
    "$netlab" compare spec.json --out out --only topk --steps 9,2
  [ ! -e out ] || complain 'compare made a folder though its arguments were wrong'

  if ! command -v ip >/dev/null && [ ! -e /sbin/ip ]; then
    expect 2 'apt-get install iproute2' "$netlab" --hosts 2 --rate 1gbit -- true
  elif [ "$(id -u)" != 0 ]; then
    expect 2 'needs root' "$netlab" --hosts 2 --rate 1gbit -- true
    [ "$(wc -l <<<"$output")" = 1 ] || complain "more than one line: $output"
  fi
}

# Ten steps, of which the last five count: 3 s each up to the fifth, then 2 s.
test_figures() {
  local step time
  for step in 1 2 3 4 5 6 7 8 9 10; do
    if [ $step -le 5 ]; then time=$((step * 3)); else time=$((15 + (step - 5) * 2)); fi
    printf '{"event":"step","step":%d,"time_s":%d,"exposed_s":0.%d,"bytes_sent":%d}\n' $step $time $((step % 10)) $((step * 100))
  done >metrics.jsonl
  printf '{"event":"step","st' >>metrics.jsonl
  python3 -B - "$root/lab" <<'END' || complain 'the figures are wrong'
import sys
sys.path.insert(0, sys.argv[1])
import os
from runs import write_text
from netlab_lib.figures import figures, parts, summarise
from netlab_lib.lab import burst_bytes, parse_rate
from netlab_lib.report import markdown
os.symlink("metrics.jsonl", "table.md.part")  # no other file is written through a link
write_text("table.md", "a table\n")
assert open("table.md").read() == "a table\n" and "a table" not in open("metrics.jsonl").read()
os.unlink("table.md.part")
assert parse_rate("2.5gbit") == 2.5e9 and parse_rate("100MBIT") == 1e8 and parse_rate("none") is None
assert burst_bytes(1e9) == 131072 and burst_bytes(1e7) == 16384 and burst_bytes(1e10) == 2500000
found = figures(".")
assert found["steps"] == 5 and found["step_s"] == 2, found
assert found["exposed_s"] == 0.7 and found["bytes_sent"] == 800, found
assert found["encode_s"] is None and found["images_per_second"] is None, found
assert parts(found) == [("compute", 1.3), ("encode and decode", 0), ("exposed communication", 0.7)], parts(found)
def cell(round, method, step_s):
    return {"hosts": 2, "rate": "1gbit", "round": round, "method": method, "figures": dict(found, step_s=step_s),
            "lab": {"nominal_bits": 1e9, "measured": {"lowest_bits": 7e8}}}
spec = {"rates": ["1gbit"], "hosts": [2], "methods": ["dense", "topk"], "baseline": "dense", "steps": {"topk": [100, 10]}}
rows = summarise([cell(1, "dense", 1), cell(1, "topk", 0.5), cell(2, "dense", 3), cell(2, "topk", 1), cell(3, "topk", 9)], spec)
assert [row["step_s"] for row in rows] == [2, 1] and [row["speedup"] for row in rows] == [1, 2.5], rows
assert rows[1]["step_lowest_s"] == 0.5 and rows[1]["step_highest_s"] == 9 and rows[1]["cpu_bound"], rows
late = cell(4, "topk", 1)
late["lab"]["measured"]["lowest_bits"] = 2e8
slow = summarise([cell(1, "dense", 1), cell(1, "topk", 1), late], spec)
assert [row["measured_bits"] for row in slow] == [7e8, 2e8], slow
assert "200.0 Mbit/s (CPU-bound" in markdown(spec, slow), markdown(spec, slow)
os.mkdir("skipped")
with open("skipped/metrics.jsonl", "w") as file:
    file.write(open("metrics.jsonl").read().replace('"step":8,', '"step":8,"skipped":true,'))
try:
    raise SystemExit(f"a skipped step counts: {figures('skipped')}")
except ValueError as problem:
    assert "skipped" in str(problem), problem
assert rows[0]["training_s"] is None and rows[1]["training_s"] == 90 * 1 + 10 * 2, rows
END
}

# A step takes 1 s. Behind every fourth one there is a sync of 10 s, the fourth of 17 s, with 1000 bytes and 4 s exposed.
test_local_figures() {
  mkdir -p local
  printf '%s\n' data: '  every: 7' exchange: '  merge: all  # every: 9' '  every: 4  # command line' '  fragments: 1' \
    train: '  every: 3' >local/config.yaml
  python3 -B - "$root/lab" <<'END' || complain 'the figures of local steps are wrong'
import json, sys
sys.path.insert(0, sys.argv[1])
from netlab_lib.figures import figures

def write(count, change=lambda record: record):
    time, records = 0, []
    for step in range(1, count + 1):
        sync = step % 4 == 0
        time += 1 + 10 * sync + 7 * (step == 16)
        records.append({"event": "step", "step": step, "time_s": time, "bytes_sent": 1000 * sync, "exposed_s": 4.0 * sync,
                        "encode_s": None if step == 9 else 0, "images_per_second": 1 / 11 if sync else 1})
    with open("local/metrics.jsonl", "w") as file:
        file.writelines(json.dumps(change(record)) + "\n" for record in records)

def refused(part):
    try:
        raise SystemExit(f"not refused: {figures('local')}")
    except ValueError as problem:
        assert part in str(problem), problem

write(22)  # rounds 9 to 12, 13 to 16 and 17 to 20
found = figures("local")
assert found["steps"] == 12 and found["step_s"] == 14 / 4, found
assert found["bytes_sent"] == 250 and found["exposed_s"] == 1, found
assert found["encode_s"] == 0 and found["decode_s"] is None, found
assert abs(found["images_per_second"] - 4 / 14) < 1e-9, found
write(16)
assert figures("local")["step_s"] == (14 + 21) / 2 / 4
write(15)
refused("15 steps; 16 are needed for two rounds of exchange.every=4 after the first 8")
write(22, lambda record: dict(record, skipped=record["step"] == 18))
refused("left out")
write(22, lambda record: dict(record, skipped=record["step"] in (8, 21)))
assert figures("local")["steps"] == 12
write(22, lambda record: dict(record, time_s=None))
refused("no time_s")
with open("local/config.yaml", "a") as file:
    file.write("exchange:\n  every: 4\n  fragments: 2\n")
write(16)
refused("17 are needed")
write(20)  # behind the last step all fragments are sent
assert figures("local")["steps"] == 8
with open("local/config.yaml", "w") as file:
    file.write("exchange:\n  every: 0\n")
assert figures("local")["step_s"] == 1
END
}

# The page shows what results.json says, in the colours of all pages.
test_page() {
  [ -x "$program" ] || { complain "no compare at '$program'"; return 0; }
  python3 -B - "$root" "$program" <<'END' || complain 'the page is wrong'
import contextlib, io, os, sys
root, compare = sys.argv[1:]
sys.path.insert(0, root + "/lab")
from netlab_lib import report
from netlab_lib.figures import summarise
sys.path.insert(0, root + "/python")
from topknot.compare.style import PART_COLOURS as colours
os.mkdir("bin")
os.symlink(compare, "bin/compare")  # as beside the train that the commands name
open("bin/train", "w").close()
os.chmod("bin/train", 0o755)
spec = {"rates": ["1gbit"], "hosts": [2], "baseline": "dense",
        "methods": {"dense": ["bin/train"], "topk <1 %>": ["bin/train", "compress.name=topk"], "new": ["true", "compress.name=of_my_own"]}}
step = {name: 0.1 for name in ("encode_s", "decode_s", "communicate_s", "exposed_s", "bytes_sent", "bytes_received",
                               "images_per_second")}
cells = [{"hosts": 2, "rate": "1gbit", "round": 1, "method": name, "figures": dict(step, step_s=1)} for name in spec["methods"]]
cells[2] = dict(cells[2], figures=None, problem="exit code 5; no luck")
def written():
    os.makedirs("drawn", exist_ok=True)
    open("elsewhere", "w").close()
    if not os.path.lexists("drawn/report.html"):
        os.symlink("../elsewhere", "drawn/report.html")  # no other file is written through a link
    table, files = report.write_reports("drawn", spec, cells, summarise(cells, spec))
    assert files.endswith("report.html") and not os.path.getsize("elsewhere"), files
    assert sorted(os.listdir("drawn")) == ["report.html", "results.json", "table.csv", "table.md"], os.listdir("drawn")
    return open("drawn/report.html").read(), table
text, _ = written()
for part in (colours["encode"], colours["exposed"], "exposed communication 100.0 ms", "prefers-color-scheme: dark",
             "<span>1000.0 ms</span>", "<span>failed</span>", "topk &lt;1 %&gt;", "<h1>netlab: methods compared</h1>",
             "<h2>2 hosts, links of 1gbit, measured TCP rate -</h2>", "compute</span>", "All hosts share this machine",
             "<li>2 hosts, 1gbit, new: exit code 5; no luck</li>", "<code>bin/train compress.name=topk</code>"):
    assert part in text, part
assert "training s" not in text
spec["steps"] = {"dense": [9000, 0], "topk <1 %>": [1500, 300]}
text, table = written()
for got, cell, less, more in ((text, "<td>{}</td>", "&lt;", "&gt;"), (table, " {} |", "<", ">")):
    for part in (cell.format("9,000"), cell.format("1,500"),
                 f"dense 9,000, topk {less}1 %{more} 1,500 (300 at the step time of dense)"):
        assert part in got, part
assert "<script" not in text and "http" not in text and "src=" not in text
spec["methods"] = {name: ["true"] for name in spec["methods"]}
report.runs.ROOT = "nowhere"
assert report.find_compare(spec) is None
said = io.StringIO()
with contextlib.redirect_stderr(said):  # after every group of a comparison
    assert not report.draw("drawn", spec) and not report.draw("drawn", spec)
assert said.getvalue().count("no program compare") == 1, said.getvalue()
END
  expect 2 'stands alone' "$program" drawn/results.json drawn --out page.html
  expect 2 'stands alone' "$program" drawn/results.json --out page.csv
  echo '{}' >other.json
  expect 2 'other.json: not a results.json' "$program" other.json --out page.html
  [ ! -e page.html ] || complain 'compare wrote a page of nothing'
}

can_make_labs() {
  [ "$(id -u)" = 0 ] || skip 'not root'
  PATH=$PATH:/usr/sbin:/sbin
  { command -v ip && command -v tc; } >/dev/null || skip 'no ip and tc (iproute2)'
  local name=topknot-probe-$$ reason=''
  ip netns add "$name" 2>/dev/null || skip 'no network namespaces here'
  ip -n "$name" link add p0 type veth peer name p1 2>/dev/null || reason='no veth pairs'
  [ -n "$reason" ] || ip -n "$name" link add b0 type bridge 2>/dev/null || reason='no bridges'
  [ -n "$reason" ] || tc -n "$name" qdisc add dev p0 root tbf rate 1gbit burst 128kb latency 50ms 2>/dev/null ||
    reason='no token bucket filter'
  ip netns delete "$name"
  [ -z "$reason" ] || skip "$reason here"
}

# Bytes go from host 1 to host 0 by the variables; codes and outputs of the hosts come through.
test_transfer() {
  cat >talk.py <<'END'
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
if rank == 0:
    server = socket.create_server(address)
    open("up", "w").close()
    server.settimeout(20)
    peer, place = server.accept()
    peer.settimeout(20)
    total = 0
    while part := peer.recv(1 << 16):
        total += len(part)
    print(total, "bytes from", place[0], "of", size, "ranks,", os.environ["NETLAB_HOSTS"], os.environ["NETLAB_RATE"])
else:
    for _ in range(200):
        if os.path.exists("up"):
            break
        time.sleep(0.1)
    with socket.create_connection(address, timeout=20) as out:
        out.sendall(bytes(1000000))
END
  expect 0 '1000000 bytes from 10.77.0.2 of 2 ranks, 2 100mbit' \
    "$netlab" --hosts 2 --rate 100mbit --no-measure -- python3 talk.py
  # shellcheck disable=SC2016
  expect 3 'host 1 ended with 3' "$netlab" --hosts 2 --rate none --no-measure --log log -- \
    sh -c 'echo words of $RANK; exit $((RANK * 3))'
  grep -qF '| words of 1' <<<"$output" || complain "the failing host's output is not shown: $output"
  expect 124 'still ran after 1 s' "$netlab" --hosts 2 --rate none --no-measure --timeout 1 --log log -- sleep 1000
  # shellcheck disable=SC2016
  expect 0 'rank 0' "$netlab" --hosts 2 --ranks-per-host 2 --rate none --no-measure --log log -- \
    sh -c 'echo rank $RANK local $LOCAL_RANK of $WORLD_SIZE on $NETLAB_HOST'
  grep -qxF 'rank 3 local 1 of 4 on 1' log/host1-rank3.log || complain "the variables of rank 3 are wrong"
}

# The links are shaped: nothing is faster than they are, bar the bucket, and what a receiver that had to wait for a core finds in its
# socket when its second begins (measured beside a build: 22.2 Mbit/s). An unshaped link is a hundred times faster.
test_measure() {
  expect 0 '"lowest_bits"' "$netlab" --hosts 2 --rate 20mbit --measure --log log
  python3 -c 'import json; m = json.load(open("log/netlab.json"))["measured"]
assert len(m["host_bits"]) == 2 and 0 < m["lowest_bits"] <= m["mean_bits"] <= max(m["host_bits"]) < 1.5 * 20e6, m
assert m["round_trip_s"] > 0' || complain 'the measured rates are wrong'
}

# start NAME: a lab of two hosts in the background, each with its process's id in NAME0 and NAME1; sets $owner.
start() {
  # shellcheck disable=SC2016
  "$netlab" --hosts 2 --rate 1gbit --no-measure --log "$1" -- sh -c 'echo $$ >'"$1"'$RANK; exec sleep 1000' \
    >/dev/null 2>&1 </dev/null &
  owner=$!
  within 30 both "$1" || { complain "the lab '$1' did not start"; return 1; }
}

test_killed() {
  local owner watcher host
  start killed || return 0
  expect 0 '2 hosts' "$netlab" --hosts 2 --rate 1gbit --no-measure -- true  # beside it, leaves it alone
  [ "$(labs_of "$owner" | wc -l)" = 3 ] || complain "a lab of 2 hosts has not 3 namespaces: $(labs_of "$owner")"
  watcher=$(pgrep -f "sweep.py netlab-$owner-") || { complain 'there is no watcher'; return 0; }
  kill -KILL "$owner"
  wait "$owner" 2>/dev/null || true
  # Checked as soon as the watcher is done: later, another lab on this machine could have swept.
  within 30 gone "$watcher" || complain 'the watcher goes on after its lab'
  none_of "$owner" || complain "after SIGKILL there are left: $(labs_of "$owner")"
  for host in 0 1; do
    within 10 gone "$(cat killed$host)" || complain "host $host's process outlived the lab"
  done

  # Its watcher killed as well: the next lab removes it.
  start orphan || return 0
  watcher=$(pgrep -f "sweep.py netlab-$owner-") || { complain 'there is no watcher'; return 0; }
  kill -KILL "$watcher" "$owner"
  wait "$owner" 2>/dev/null || true
  ! none_of "$owner" || complain 'nothing was left to be removed: the test shows nothing'
  expect 0 '' "$netlab" --hosts 2 --rate none --no-measure -- true
  within 10 none_of "$owner" || complain "the next lab left: $(labs_of "$owner")"
  within 10 gone "$(cat orphan0)" || complain "the next lab left a process"
}

test_ended() {  # SIGNAL CODE
  local owner got=0
  start "ended$1" || return 0
  kill "-$1" "$owner"
  wait "$owner" || got=$?
  [ $got = "$2" ] || complain "after SIG$1 the code is $got, not $2"
  none_of "$owner" || complain "after SIG$1 there are left: $(labs_of "$owner")"
}

test_cut() {
  [ -x "$program" ] || { complain "no train at '$program'"; return 0; }
  expect 1 'host 1 is cut' timeout 100 "$netlab" --hosts 2 --rate 1gbit --no-measure --cut 1 --after 3 --log cut -- "$program" \
    "$root/configs/demo_dense.yaml" dist.backend=gloo dist.timeout_s=5 train.epochs=1000 data.test_size=64 output.dir=cut/run
  grep -q 'gave up after dist.timeout_s (5 s)' <<<"$output" || complain "rank 0 does not say what happened: $output"
  grep -q 'gave up after dist.timeout_s (5 s)' cut/host1.log || complain "rank 1 does not say what happened"
}

test_compare() {
  cat >method.sh <<'END'
echo x >>"runs-$1"
[ "$RANK" = 0 ] || exit 0
mkdir -p "$2"
for i in 1 2 3 4 5 6 7 8; do echo "{\"event\":\"step\",\"step\":$i,\"time_s\":$((i * $3))}"; done >"$2/metrics.jsonl"
END
  # The last word: beside it lies the program that draws the page.
  spec '{"dense": ["sh", "method.sh", "dense", "{out}", "4", "'"$program"'"], "half": ["sh", "method.sh", "half", "{out}", "2"],
         "bad": ["sh", "-c", "[ $NETLAB_HOST = 0 ] || sleep 5; echo no luck with {hosts} at {rate}, seed {round}, {data}; exit 5"]}'
  mkdir set
  expect 1 "2 hosts, 100mbit, round 2, bad: exit code 5; host 0: no luck with 2 at 100mbit, seed 2, $PWD/set" \
    "$netlab" compare spec.json --out compared --data set
  grep -q '^| half | 2000.0 (2000.0 to 2000.0) | - | - | - | - | - | - | 2.00 |$' compared/table.md ||
    complain "the table is wrong: $(cat compared/table.md)"
  grep -q '^| bad | failed |' compared/table.md || complain 'the failing method is not in the table'
  grep -q '^2,100mbit,dense,2,4' compared/table.csv || complain "the CSV is wrong: $(cat compared/table.csv)"
  [ -s compared/report.html ] || complain 'there is no report'
  if grep -qE 'https?://|<script' compared/report.html; then complain 'the report is not self-contained'; fi
  python3 -c 'import json; assert len(json.load(open("compared/results.json"))["runs"]) == 6' || complain 'results.json is wrong'
  expect 0 'written' "$netlab" compare spec.json --out compared --only dense --only half
  [ "$(cat runs-dense runs-half | wc -l)" = 8 ] || complain 'finished runs were run again'
  expect 0 'written' "$netlab" compare spec.json --out compared --only dense --rounds 1 --fresh
  [ "$(wc -l <runs-dense)" = 6 ] || complain '--fresh did not run it again'
  echo '# another version' >>method.sh
  expect 0 'written' "$netlab" compare spec.json --out compared --only dense --rounds 1
  [ "$(wc -l <runs-dense)" = 8 ] || complain 'a run of another version of a file counts as finished'
}

command -v python3 >/dev/null || skip 'no python3'
case $part in
  arguments)
    test_arguments
    test_figures
    test_local_figures
    test_page
    ;;
  lab)
    can_make_labs
    test_transfer
    test_measure
    test_killed
    test_ended TERM 143
    test_ended HUP 129
    test_cut
    test_compare
    ;;
  *) echo "no such part: $part"; exit 2 ;;
esac
exit "$status"
