#!/usr/bin/env bash
# lab/train-runs: the lists of runs are valid; a small list is made, interrupted, resumed to the same bits and compared.
#   train_runs.sh ROOT TRAIN
set -euo pipefail
root=$(cd "${1:?usage: train_runs.sh ROOT TRAIN}" && pwd)
BUILD=$(cd "$(dirname "${2:?usage: train_runs.sh ROOT TRAIN}")/.." && pwd)
export BUILD
command -v python3 >/dev/null || { echo 'skipped: no python3'; exit 0; }
# shellcheck source=../../tests/repo/common.sh
source "$root/tests/repo/common.sh"

# train_runs STATUS TEXT ARGUMENT...: train-runs ends with STATUS and says TEXT.
train_runs() { expect "$1" "$2" "$root/lab/train-runs" "${@:3}"; }
checksums() { cut -d, -f7 "$1/runs.csv"; }

mkdir "$work/data"  # CIFAR-10, recordings, texts and pictures
for file in data_batch_{1..5} test_batch; do truncate -s 30730000 "$work/data/$file.bin"; done
python3 -c 'import sys, wave
with wave.open(sys.argv[1], "wb") as file: file.setparams((1, 2, 16000, 0, "NONE", "")), file.writeframes(bytes(64000))' "$work/data/a.wav"
for _ in {1..16}; do printf 'a.wav\tYES\n'; done | tee "$work/data/train.tsv" >"$work/data/test.tsv"
for text in train valid test; do printf 'yes no yes no %.0s' {1..200} >"$work/data/ptb.$text.txt"; done
mkdir -p "$work/data"/{train,val}/{no,yes}
for picture in "$work/data"/{train,val}/{no,yes}/{1..120}.ppm; do printf 'P6 2 2 255 abcdefghijkl' >"$picture"; done
for list in "$root"/lab/configs/*/*.runs; do train_runs 0 '' "$list" --validate --data "$work/data" -- train.precision=fp32; done

cat >"$work/base.yaml" <<'END'
model: {name: mlp}
data: {name: synthetic_images, train_size: 320, test_size: 32, image_size: 8, batch_size: 8}
train: {epochs: 1}
dist: {ranks: 2}
END
cat >"$work/list" <<END
config $work/base.yaml
run dense 2 compress.name=dense
keys compress.density=0.01  # of what follows
run topk 1 compress.name=topk
END
small=("$work/list" --out "$work/out")
train_runs 0 '| dense | 2 |' "${small[@]}" --jobs 1
train_runs 0 '3 of 3 finished' "${small[@]}" --status
checksums "$work/out" >"$work/whole"
[ "$(sort -u "$work/whole" | wc -l)" = 4 ] || complain "not three checksums: $(cat "$work/whole")"

# The metric is that of the task, whatever its name.
cat >"$work/speech" <<END
config $root/lab/configs/papers/gk_lstm_an4.yaml
run speech 1 model.width=8 model.layers=1 data.batch_size=2 dist.ranks=2 train.max_steps=1 train.epochs=1
END
train_runs 0 'word error rate' "$work/speech" --data "$work/data" --out "$work/spoken"
grep -q '^| speech | 1 | [0-9.]* %' "$work/spoken/summary.md" || complain "speech: $(cat "$work/spoken/summary.md")"

# Of a text the perplexity of the test set stands beside that of the validation set.
cat >"$work/written" <<END
config $root/lab/configs/papers/ptb_small.yaml
keys model.width=8 data.batch_size=2 dist.ranks=2 train.max_steps=1
run text 2 compress.name=dense
END
train_runs 0 '| run | seeds | perplexity | minus dense | each seed | test perplexity | minus dense |' "$work/written" --data "$work/data" --out "$work/text"
grep -Eq '^text,1,[^,]*,perplexity,[0-9.]+,[0-9.]+,' "$work/text/runs.csv" || complain "text: $(cat "$work/text/runs.csv")"
grep -Eq '^\| text \| 2 \| [0-9.]+ ± [0-9.]+ \|  \| [0-9., ]+ \| [0-9.]+ ± [0-9.]+ \|' "$work/text/summary.md" ||
  complain "text: $(cat "$work/text/summary.md")"

# Keys behind -- are keys of every run, in the table too: runs with others are not mixed with these.
train_runs 0 'train.max_steps=2' "$work/list" --only 'topk-s1' --out "$work/more" -- train.max_steps=2
grep -q "$work/base.yaml,.*train.max_steps=2$" "$work/more/runs.csv" || complain "keys behind --: $(cat "$work/more/runs.csv")"
train_runs 2 'topk-s1 was made with other keys' "$work/list" --out "$work/rest" --with "$work/more/runs.csv"
train_runs 2 'topk-s1 was made with other keys' "$work/list" --out "$work/out" --check "$work/more/runs.csv"
sed 's/,train.max_steps=2$//; s/ train.max_steps=2$//' "$work/more/runs.csv" >"$work/other.csv"
train_runs 2 'topk-s1 ended with other bits than' "$work/list" --out "$work/out" --with "$work/other.csv"

# What trains for another number of steps has no difference to dense.
train_runs 0 '' "$work/list" --only dense-s1 --out "$work/longer" --with "$work/other.csv"
grep -Eq '^\| topk \| 1 \| [0-9.]+ % \|  \|' "$work/longer/summary.md" || complain "other steps: $(cat "$work/longer/summary.md")"
grep -Eq '^\| topk \| 1 \| [0-9.]+ % \| [+-]' "$work/out/summary.md" || complain "as many steps: $(cat "$work/out/summary.md")"

# Again: nothing is made anew, and everything is as before; of some runs alone too.
train_runs 0 '' "${small[@]}"
train_runs 0 '| dense | 2 |' "${small[@]}" --only topk-s1
checksums "$work/out" | cmp -s - "$work/whole" || complain "with --only: $(cat "$work/out/runs.csv")"
train_runs 0 '3 runs compared, 0 outside' "${small[@]}" --check "$work/out/runs.csv"
sed -E 's/^(dense,1,.*,20,)[0-9]+/\17/' "$work/out/runs.csv" >"$work/other.csv"
train_runs 1 'the same bits, OTHER FIGURES: sent_per_step' "${small[@]}" --check "$work/other.csv"
train_runs 0 '1 runs compared, 0 outside, 0 not judged; 2 of the table are not finished here' "$work/list" --out "$work/longer" --check "$work/out/runs.csv"
train_runs 0 '2 runs compared, 0 outside' "${small[@]}" --only 'topk-*' --only dense-s2 --check "$work/out/runs.csv"
sed -E 's/^(dense,[12],[^,]*,accuracy),[^,]*,,[^,]*/\1,99.99,,0/' "$work/out/runs.csv" >"$work/other.csv"
train_runs 1 'OUTSIDE' "${small[@]}" --check "$work/other.csv"
train_runs 1 '1 runs compared, 1 outside, 0 not judged' "${small[@]}" --only dense-s1 --check "$work/other.csv"  # by both seeds of the table
sed -E 's/^(topk,1,[^,]*,accuracy),[^,]*,,[^,]*/\1,99.99,,0/' "$work/out/runs.csv" >"$work/other.csv"
train_runs 0 '3 runs compared, 0 outside, 1 not judged' "${small[@]}" --check "$work/other.csv"
train_runs 1 '1 runs compared, 0 outside, 1 not judged' "${small[@]}" --only topk-s1 --check "$work/other.csv"
train_runs 2 'not a runs.csv' "${small[@]}" --check "$work/list"
train_runs 2 'not a runs.csv' "${small[@]}" --check "$work/data/a.wav"
train_runs 2 'Is a directory' "${small[@]}" --check "$work/out"
train_runs 2 'the row of topk-s1 is damaged' "${small[@]}" --check <(sed '/^topk/s/,20,.*//' "$work/out/runs.csv")
train_runs 2 'not a text file' "$work/data/a.wav" --list
BUILD=$work train_runs 2 "'make build' builds it" "$work/list" --validate

# Runs of an earlier table are not made again, and stand in the new one.
grep -v '^topk,' "$work/out/runs.csv" >"$work/earlier.csv"
train_runs 0 '1 of 1 finished' "$work/list" --out "$work/rest" --with "$work/earlier.csv"
train_runs 0 '3 of 3 finished' "$work/list" --out "$work/rest" --with "$work/earlier.csv" --status
[ ! -e "$work/rest/dense-s1" ] || complain 'a run of an earlier table was made again'
checksums "$work/rest" | cmp -s - "$work/whole" || complain "with an earlier table: $(cat "$work/rest/runs.csv")"
sed 's/^\(dense,1\),[^,]*/\1,0000000/' "$work/earlier.csv" >"$work/other.csv"
train_runs 2 'dense-s1 was made by commit 0000000' "$work/list" --out "$work/rest" --with "$work/other.csv"
sed 's/compress.name=dense/compress.name=topk/' "$work/earlier.csv" >"$work/other.csv"
train_runs 2 'dense-s1 was made with other keys' "$work/list" --out "$work/rest" --with "$work/other.csv"

# What several seeds of several methods show together: dense 90 and 92, a 88 and 90, b 86 and 88.
cat >"$work/three" <<END
config $work/base.yaml
run dense 2 compress.name=dense
run a 2 compress.name=topk
run b 2 compress.name=topk compress.density=0.02
END
{ head -1 "$work/out/runs.csv"
  for row in dense,1,90 dense,2,92 a,1,88 a,2,90 b,1,86 b,2,88; do
    keys=compress.name=topk; [ "${row%%,*}" = dense ] && keys=compress.name=dense; [ "${row%%,*}" = b ] && keys="$keys compress.density=0.02"
    grep '^dense,1,' "$work/out/runs.csv" | awk -F, -v OFS=, -v row="$row" -v keys="$keys" '{ split(row, r, ","); $1 = r[1]; $2 = r[2]; $5 = r[3]; $NF = keys; print }'
  done; } >"$work/made.csv"
train_runs 0 'All 4 runs but dense together, minus dense: -3.00 ± 1.22, its standard error by the deviation within methods, 1.41' "$work/three" --out "$work/together" --with "$work/made.csv"
train_runs 0 'over that within: 2.00 (1 and 3 degrees of freedom)' "$work/three" --out "$work/together" --with "$work/made.csv"

# Interrupted inside a run, which goes on from its checkpoint to the same bits.
small=("$work/list" --out "$work/cut")
"$root/lab/train-runs" "${small[@]}" -- train.stop_after=5 >"$work/log" 2>&1 && complain 'stopped runs count as finished'
grep -q '3 of 3 runs failed' "$work/log" || complain "stopped runs are not told: $(cat "$work/log")"
until "$root/lab/train-runs" "${small[@]}" -- train.stop_after=5 >"$work/log" 2>&1; do
  grep -q 'goes on' "$work/log" || { complain "a run does not go on: $(cat "$work/log")"; break; }
done
checksums "$work/cut" | cmp -s - "$work/whole" || complain "resumed runs end with other bits: $(cat "$work/cut/runs.csv")"

# Runs of another commit or of other settings are not mixed with these: of other keys, another order of them, another configuration.
train_runs 2 'was made with other settings (compress.density: 0.01, now 0.02)' <(sed 's/0.01/0.02/' "$work/list") --out "$work/out"
train_runs 2 'compress.name: topk, now dense)' <(sed 's/=topk/=topk compress.name=dense/' "$work/list") --out "$work/out"
sed -i 's/batch_size: 8/batch_size: 4/' "$work/base.yaml"
train_runs 2 '(data.batch_size: 8, now 4)' "$work/list" --out "$work/out"
sed -i 's/batch_size: 4/batch_size: 8/' "$work/base.yaml"
cp "$work/base.yaml" "$work/copy.yaml"
train_runs 2 'dense-s1 was made with other config' "$work/list" --config "$work/copy.yaml" --out "$work/none" --with "$work/earlier.csv"
cp -r "$work/out" "$work/resumed"
sed -i '1s/"revision":"[^"]*"/"revision":"0000000"/' "$work/resumed/topk-s1/metrics.jsonl"
train_runs 2 'topk-s1 was made by commit 0000000 and ' "$work/list" --out "$work/resumed"
sed -i -E 's/"revision": "[^"]*"/"revision": "0000000"/' "$work/out/dense-s1/environment.json"
train_runs 2 'a folder holds the runs of one commit' "$work/list" --out "$work/out"
rm "$work/out/dense-s1/environment.json"
train_runs 2 ' and unknown, ' "$work/list" --out "$work/out"
mkfifo "$work/out/dense-s1/environment.json"  # not waited for
train_runs 2 ' and unknown, ' "$work/list" --out "$work/out"
rm "$work/out/dense-s1/environment.json"

# The program becomes another one between two runs.
mkdir -p "$work/changing/bin"
cat >"$work/changing/bin/train" <<END
#!/bin/sh
[ "\$1" != --version ] || exec "\$0.version"
printf '#!/bin/sh\necho "topknot (bbbbbbb)"' >"\$0.version.part"
case "\$*" in *--validate) ;; *) mv "\$0.version.part" "\$0.version"; chmod +x "\$0.version" ;; esac
exec "$BUILD/bin/train" "\$@"
END
printf '#!/bin/sh\necho "topknot (aaaaaaa)"' >"$work/changing/bin/train.version"
chmod +x "$work/changing/bin"/*
BUILD=$work/changing train_runs 1 'has become another commit, bbbbbbb' "$work/list" --out "$work/changed"
# Or it is gone, as while it is built anew.
printf '#!/bin/sh\necho "topknot (aaaaaaa)"' >"$work/changing/bin/train.version"
sed -i 's/echo "topknot (bbbbbbb)"/exit 1/' "$work/changing/bin/train"
BUILD=$work/changing train_runs 1 'does not run any more' "$work/list" --out "$work/gone"
BUILD=$work/changing train_runs 2 'does not run: see' "$work/list" --out "$work/begun"

# A value that was not finite is shown, and is in the mean.
cp -r "$work/cut" "$work/diverged"
sed -i '$s/"test_accuracy":[0-9.]*/"test_accuracy":null/' "$work/diverged/dense-s2/metrics.jsonl"
train_runs 0 '| dense | 2 | nan' "$work/list" --out "$work/diverged" -- train.stop_after=5

# A key that train refuses is told before the first run begins.
echo 'run wrong 1 compress.density=2' >>"$work/list"
train_runs 2 'wrong-s1 is no valid configuration' "$work/list" --out "$work/none"
[ -z "$(ls "$work/none")" ] || complain 'a list with a wrong key has begun'

train_runs 2 'there is no list' "$work/nowhere" --out "$work/none"
train_runs 2 "did you mean 'keys'?" <(echo 'kays a=b') --list
train_runs 2 "no 'config FILE' stands above" <(echo 'run a 1') --list
train_runs 2 "expected 'run NAME SEEDS" <(echo 'run a none') --list
train_runs 2 '--out DIR is missing' "$work/list"
train_runs 2 "no run is called 'x*'" "$work/list" --only 'topk*' --only 'x*' --list
train_runs 2 'no seed up to --seeds 0' "$work/list" --seeds 0 --list
train_runs 2 'the number of cores' "$work/list" --out "$work/none" --jobs 1000
exit "$status"
