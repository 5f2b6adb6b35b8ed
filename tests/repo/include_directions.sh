#!/usr/bin/env bash
# Who may include whom. The folders form layers; an include against the direction is how they would grow together.
#   include_directions.sh ROOT
set -euo pipefail
cd "${1:?usage: include_directions.sh ROOT}"

# folder: the folders whose headers its files may include. The longest prefix of a file's path counts.
declare -A may_include=(
  [nn/base]="nn/base"
  [nn/core]="nn/core nn/base"
  [nn/ops]="nn/ops nn/core nn/base"
  [nn/layers]="nn/layers nn/models nn/ops nn/core nn/base"
  [nn/models]="nn/layers nn/models nn/ops nn/core nn/base"
  [data]="data nn/core nn/base"
  [compress]="compress nn/core nn/base"
  [compress/library]="compress include nn/core nn/base"
  [include]="include"
  [dist]="dist compress nn/core nn/base"
  [dist/rendezvous]="dist/rendezvous nn/base"
  [dist/comm]="dist/comm dist/rendezvous nn/core nn/base"
  [dist/launch]="dist/launch dist/comm dist/rendezvous nn/base"
  [dist/plan]="dist/plan dist/comm compress nn/core nn/base"
  [dist/sparse]="dist/sparse dist/comm dist/plan compress nn/core nn/base"
  [dist/exchange]="dist compress nn/core nn/base"
  [optim]="optim nn/core nn/base"
  [train]="train optim dist compress data nn"
  [train/metrics]="train/metrics nn/core nn/base"
  [lab/common]="lab/common nn/base"
  [lab/predict]="lab/predict lab/common train/metrics train/plan dist/comm dist/plan dist/sparse compress nn/base"
  [lab/replay]="lab/replay lab/common train dist compress nn"
  [lab/gpu_timings]="lab/gpu_timings compress nn/core nn/base"
  [lab/bench]="lab/bench lab/common optim dist compress data nn"
  [lab/tests]="lab tests train optim dist compress data nn include"
  [tests]="tests lab/gpu_timings train optim dist compress data nn include"
)

folder_of() {  # sets `folder` to a file's folder of the table
  folder=${1%/*}
  while [ -z "${may_include[$folder]:-}" ]; do
    case "$folder" in */*) folder=${folder%/*} ;; *) return 1 ;; esac
  done
}

status=0
complain() { echo "$1"; status=1; }

count=0
while IFS=: read -r file line text; do
  count=$((count + 1))
  included=${text#*\"} included=${included%%\"*}
  folder_of "$file" || { complain "$file: its folder is not in the table of $0"; continue; }
  if [ ! -e "$included" ]; then
    complain "$file:$line: \"$included\" is no file; includes give the path from the root of the repository"
    continue
  fi
  allowed=no
  for prefix in ${may_include[$folder]}; do [[ $included == "$prefix"/* ]] && allowed=yes; done
  [ "$allowed" = yes ] || complain "$file:$line: $folder may not include \"$included\" (only ${may_include[$folder]})"
done < <(find "${!may_include[@]}" -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null |
  sort -zu | xargs -0 -r grep -nHE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"')

[ "$count" -gt 0 ] || complain "no includes found: is '$1' the root of the repository?"
exit "$status"
