#!/usr/bin/env bash
# The commands of the pages and of --help run; a page with a wrong command is found.
#   doc_commands.sh ROOT PROGRAM
# PROGRAM: one of the folder that has them all.
set -euo pipefail
root=$(cd "${1:?usage: doc_commands.sh ROOT PROGRAM}" && pwd)
bin=$(cd "$(dirname "${2:?}")" && pwd)
command -v python3 >/dev/null || { echo "skipped: no python3"; exit 0; }
export PYTHONDONTWRITEBYTECODE=1
status=0

"$root/scripts/doc-commands" --bin "$bin" || status=1

# A small tree with the configurations and one page, some of whose commands are wrong.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree"/{scripts,docs}
cp "$root/scripts/doc-commands" "$tree/scripts"
cp -r "$root/configs" "$tree"
cat >"$tree/docs/page.md" <<'PAGE'
    train model.name=mlp \
      output.dir=runs/mine          # this one is right
    train model.nmae=mlp
    build/bin/compare runs/mine runs/absent

`train --list nothing` and `train FILE --validate`; y = x

```sh
for name in topk dense; do
  build/bin/train --validate compress.name=$name compress.density=7
done
make test
```
PAGE
output=$("$tree/scripts/doc-commands" --bin "$bin" docs/page.md 2>&1) && { echo "a page with wrong commands passes"; status=1; }
for line in "ok: docs/page.md:1:" "FAILED: docs/page.md:3:" "FAILED: docs/page.md:4:" "FAILED: docs/page.md:6: train --list nothing" \
  "ok: docs/page.md:6: train FILE" "FAILED: docs/page.md:9: for name" "not here: docs/page.md:12: make test  (minutes:" \
  "unknown key 'model.nmae'" "ELSEWHERE: no command fits" "6 commands run"; do
  grep -qF -- "$line" <<<"$output" || { echo "missing: $line"; echo "$output"; status=1; }
done
exit "$status"
