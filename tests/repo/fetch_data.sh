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
  elif find "$work/to" ! -name '.*' \( -name '*.bin' -o -name '*-ubyte*' -o -name '*.txt' \) -type f 2>/dev/null | grep -q .; then
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
for part in train valid test; do printf 'no words' >"$work/damaged/ptb.$part.txt"; done
refused "damaged words" ptb.train.txt ptb --from "$work/damaged" --to "$work/to"
# Texts of one file: from a file, a folder or a program, and a source that cannot be reached.
printf 'no Shakespeare' >"$work/damaged/input.txt"
refused "a damaged text" "input.txt from $work/damaged is damaged" tiny-shakespeare --from "$work/damaged" --to "$work/to"
refused "a damaged text, by its name" SHA-256 king-james --from "$work/damaged/input.txt" --to "$work/to"
mkdir "$work/programs"
printf '#!/bin/sh\necho "Ge1:1 In the beginning"\n' >"$work/programs/bible"
chmod +x "$work/programs/bible"
PATH=$work/programs:$PATH refused "another program named bible" "from the program bible is damaged" king-james --to "$work/to"
command -v bible >/dev/null ||
  refused "a program that is not installed" "apt-get install bible-kjv bible-kjv-text" king-james --to "$work/to"
if command -v curl >/dev/null || command -v wget >/dev/null; then
  FETCH_TIMEOUT=2 refused "a source that cannot be reached" "could not download input.txt.*--from" tiny-shakespeare \
    --mirror http://127.0.0.1:1 --to "$work/to"
fi
printf 'not an archive' >"$work/junk.tar.gz"
refused "a damaged archive" junk.tar.gz cifar10 --from "$work/junk.tar.gz" --to "$work/to"
refused "a damaged archive of pictures" SHA-256 imagenette --from "$work/junk.tar.gz" --to "$work/to"
[ ! -e "$work/to/train" ] || { echo "a damaged archive of pictures: left a folder behind"; failed=1; }
refused "a damaged archive of recordings" SHA-256 an4 --from "$work/junk.tar.gz" --to "$work/to"
# AN4's manifests, of recordings that are there.
mkdir -p "$work/an4/etc" "$work/an4/wav/a"
for split in train test; do
  printf 'a/1\na/2\n' >"$work/an4/etc/an4_$split.fileids"
  printf '<s> ENTER FIVE </s> (1)\n<s> YES </s> (2)\n' >"$work/an4/etc/an4_$split.transcription"
done
touch "$work/an4/wav/a/1.sph"
[ "$(lab/an4-manifests "$work/an4" | grep -c '1 recordings, 1 are not there')" = 2 ] || { echo "an4-manifests: a wrong count"; failed=1; }
[ "$(cat "$work/an4/train.tsv")" = "$(printf 'wav/a/1.sph\tENTER FIVE')" ] || { echo "an4-manifests: $(cat "$work/an4/train.tsv")"; failed=1; }
lab/an4-manifests "$work/nowhere" >/dev/null 2>&1 && { echo "an4-manifests accepts a folder without AN4"; failed=1; }
# A server that never ends, and one that stalls.
if command -v python3 >/dev/null && { command -v curl || command -v wget; } >/dev/null; then
  cat >"$work/server.py" <<'EOF2'
import http.server, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16) if "endless" in self.path else b"x")
                if "short" in self.path:
                    return
                if "stalled" in self.path:
                    time.sleep(600)
        except OSError:
            pass
    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
EOF2
  python3 "$work/server.py" >"$work/port" &
  server=$!
  trap 'kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
  for _ in $(seq 100); do [ -s "$work/port" ] || sleep 0.1; done
  url=http://127.0.0.1:$(cat "$work/port")
  refused "an endless file" "did not give an intact" mnist --mirror "$url/endless" --to "$work/to"
  largest=$(find "$work/to" -type f -printf '%s\n' | sort -n | tail -n 1)
  [ "${largest:-0}" -le 11000000 ] || { echo "an endless file: $largest bytes were kept"; failed=1; }
  # What is whole and wrong, and what this server cannot continue, does not stay: else no later attempt could succeed.
  part=$work/short/.train-images-idx3-ubyte.gz.part
  refused "a wrong file" "did not give an intact" mnist --mirror "$url/short" --to "$work/short"
  [ ! -e "$part" ] || { echo "a wrong file is kept"; failed=1; }
  if command -v curl >/dev/null; then
    echo abc >"$part"
    refused "a file that is not continued" "did not give an intact" mnist --mirror "$url/short" --to "$work/short"
    [ ! -e "$part" ] || { echo "a part that is not continued is kept"; failed=1; }
  fi
  start=$SECONDS
  FETCH_TIMEOUT=1 refused "a stalled server" "did not give an intact" mnist --mirror "$url/stalled" --to "$work/to"
  [ $((SECONDS - start)) -lt 100 ] || { echo "a stalled server: took $((SECONDS - start)) s"; failed=1; }
  FETCH_TIMEOUT=soon refused "a wrong timeout" FETCH_TIMEOUT mnist --mirror "$url" --to "$work/to"
else
  echo "skipped: python3 and curl or wget are needed for a server that misbehaves"
fi
scripts/fetch-data --help | grep -q -- --from || { echo "--help does not teach --from"; failed=1; }
exit "$failed"
