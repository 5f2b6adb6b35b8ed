#!/usr/bin/env bash
# Relative links in Markdown pages lead to files of the repository.
#   md_links.sh ROOT
set -euo pipefail
cd "${1:?usage: md_links.sh ROOT}"

status=0
pages=0
while IFS= read -r page; do
  pages=$((pages + 1))
  while IFS=: read -r line link; do  # code, fenced or indented, holds no links
    target=${link#*](} target=${target%)} target=${target%% *} target=${target%%#*}
    case $target in '' | *://* | mailto:*) continue ;; esac
    if [ ! -e "$(dirname "$page")/$target" ]; then
      echo "$page:$line: the link to $target leads nowhere"
      status=1
    fi
  done < <(awk '/^ *```/ { code = !code } { print code || /^    / ? "" : $0 }' "$page" | grep -noE '\]\([^)]+\)' || true)
done < <(find . -name '*.md' -not -path './build*' -not -path './runs/*' -not -path './.*/*' | sort)
[ "$pages" -gt 0 ] || { echo "no pages found: is '$1' the root of the repository?"; status=1; }
exit "$status"
