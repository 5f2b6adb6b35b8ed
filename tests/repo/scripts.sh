#!/usr/bin/env bash
# The shell scripts parse and can be run, and doctor and install-deps tell what is missing.
#   scripts.sh ROOT
set -euo pipefail
root=$(cd "${1:?usage: scripts.sh ROOT}" && pwd)
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

while IFS= read -r file; do
  head -n 1 "$file" | grep -q '^#!.*bash' || continue
  bash -n "$file" || complain "$file does not parse"
  [ -x "$file" ] || complain "$file cannot be run"
done < <(find "$root/scripts" "$root/.ci" "$root/tests/repo" "$root/tests/python" "$root/lab" -type f -not -path "*/records/*")

mkdir "$work/scripts"
cp "$root"/scripts/{doctor,install-deps,packages} "$work/scripts"
echo 'topknot-no-such-package | required | command:topknot-no-such-command | a planted fault' >>"$work/scripts/packages"
expect 1 'apt-get install topknot-no-such-package' "$work/scripts/doctor"
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  expect 1 'topknot-no-such-package' "$work/scripts/install-deps" --dry-run
fi

# The Python programs parse; the peer of netlab explains itself without PyTorch, and says politely that it is missing.
if command -v python3 >/dev/null; then
  while IFS= read -r file; do
    case $file in *.py) ;; *) head -n 1 "$file" | grep -q '^#!.*python' || continue ;; esac
    python3 -c 'import ast, sys; ast.parse(open(sys.argv[1], encoding="utf-8").read())' "$file" || complain "$file does not parse"
  done < <(find "$root/scripts" "$root/lab" -type f -not -path "*/records/*")
  mkdir "$work/no_torch"
  echo 'raise ImportError("planted")' >"$work/no_torch/torch.py"
  peer=(env PYTHONPATH="$work/no_torch" PYTHONDONTWRITEBYTECODE=1 RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1
        python3 "$root/lab/peers/lab_ddp.py")
  expect 0 '--hook {none,fp16,powersgd,topknot,local,off}' "${peer[@]}" --help
  expect 2 'WORLD_SIZE must be set' env -u WORLD_SIZE "${peer[@]:0:3}" RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 \
    python3 "$root/lab/peers/lab_ddp.py" --model mlp --batch 1 --steps 1 --out "$work/run"
  expect 3 'PyTorch is not installed' "${peer[@]}" --model mlp --batch 1 --steps 1 --out "$work/run"
fi

expect 0 'scripts/wheel [--out DIR]' "$root/scripts/wheel" --help
expect 2 'usage: scripts/wheel' "$root/scripts/wheel" --where "$work"
expect 1 'false has no venv' "$root/scripts/wheel" --python false --out "$work/wheels"
[ ! -e "$work/wheels" ] || complain "scripts/wheel makes a folder before it knows that it can"

# A system without apt: only the few commands that the script needs before it looks for apt.
mkdir "$work/bin"
for command in bash dirname cat; do ln -s "$(command -v "$command")" "$work/bin/$command"; done
expect 1 'Dockerfile' env PATH="$work/bin" bash "$work/scripts/install-deps"
exit "$status"
