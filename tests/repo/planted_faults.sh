#!/usr/bin/env bash
# The checks of this folder find what they are for: each is run on a small tree, clean, then with one planted fault.
#   planted_faults.sh ROOT
set -euo pipefail
checks=$(cd "${1:?usage: planted_faults.sh ROOT}" && pwd)/tests/repo
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

clean_tree() {
  rm -rf "$work/tree"
  mkdir -p "$work/tree"/{nn/base,nn/core,nn/ops/cpu,nn/ops/cuda,nn/models,data,compress,dist,optim,train,tools}
  cd "$work/tree"
  echo 'int core;' >nn/core/core.h
  printf '#include "nn/core/core.h"\n' >nn/ops/cpu/op.cpp
  printf 'Registry<F>& models();\nconst bool m = (add_model("model_a", "help", f), true);\n' >nn/models/a.cpp
  printf 'add_model<B>("model_b", "x");\nadd_model(\n    "model_c", "y", g);\n' >nn/models/b.cpp
  printf 'const bool d = (add_dataset<D>("data_a",\n  "help"), true);\n' >data/a.cpp
  printf 'compressors().add(\n    "method_a", "help", f);\n' >compress/a.cpp
  printf 'add_sparse("method_b",\n  "help", p);\nadd_selector<A>("select_a", "help");\n' >compress/b.cpp
  printf 'add_memory<M>("memory_a", "help");\nindex_codecs().add("code_a", "help", f);\n' >compress/c.cpp
  printf 'value_codecs().add(\n  "values_a", "help", f);\n' >compress/d.cpp
  printf 'optimizers().add("rule_a", f);\nconst bool x = (schedules().add("plan_a", f), true);\n' >optim/a.cpp
  printf 'collectives().add("collect_a", "help", f);\nmerge_rules().add("merge_a", "help", f);\nbackends().add("backend_a", "help", f);\n' >dist/a.cpp
  cat >fake_train <<'END'
#!/bin/sh
case $2 in models) n="model_a model_b model_c" ;; datasets) n=data_a ;; compressors) n="method_a method_b" ;; selections) n=select_a ;; memories) n=memory_a ;; codecs) n=code_a ;; values) n=values_a ;; optimizers) n=rule_a ;; schedules) n=plan_a ;; collectives) n=collect_a ;; merges) n=merge_a ;; backends) n=backend_a ;; esac
for name in $n; do echo "$name   help"; done
END
  chmod +x fake_train
  echo '[a](data/a.cpp) [b](https://example.org/x) [c](#here)' >README.md
}

# caught CHECK TEXT: the check fails on the tree and says TEXT.
caught() {
  local output
  if output=$("$checks/$1" . ./fake_train 2>&1); then
    echo "$1 did not notice: $2"
    status=1
  elif ! grep -qF -- "$2" <<<"$output"; then
    echo "$1 failed without saying '$2': $output"
    status=1
  fi
}

clean_tree
for check in include_directions file_sizes backends_by_file registered_names md_links; do
  "$checks/$check.sh" . ./fake_train || { echo "$check.sh complains about a clean tree"; status=1; }
done

clean_tree; echo '#include "nn/ops/op.h"' >nn/core/bad.cpp; echo >nn/ops/op.h
caught include_directions.sh 'nn/core may not include "nn/ops/op.h"'
clean_tree; echo '#include "core.h"' >nn/core/bad.cpp
caught include_directions.sh '"core.h" is no file'
clean_tree; echo '#include "nn/ops/op.h"' >dist/bad.cpp; echo >nn/ops/op.h
caught include_directions.sh 'dist/bad.cpp:1'
clean_tree; seq 601 >data/long.cpp
caught file_sizes.sh 'data/long.cpp: 601 lines'
clean_tree; echo '#ifdef TOPKNOT_CUDA' >nn/ops/bad.cpp
caught backends_by_file.sh 'nn/ops/bad.cpp:1'
clean_tree; echo '#include <oneapi/dnnl/dnnl.hpp>' >compress/bad.cpp
caught backends_by_file.sh 'compress/bad.cpp:1'
clean_tree; echo '#include <cuda_runtime.h>' >compress/bad.cpp
caught backends_by_file.sh 'compress/bad.cpp:1'
clean_tree; echo '#include <cudnn.h>' >nn/core/far.h; echo '#include "nn/core/far.h"' >nn/core/near.h
cp nn/core/near.h nn/ops/cuda/fine.cpp; echo '#include "nn/core/near.h"' >nn/ops/bad.cpp
caught backends_by_file.sh 'nn/ops/bad.cpp:1'
clean_tree; printf '__global__ void f(const int* __restrict__ x);\nlaunch(f, 1);\n' >nn/ops/cuda/bad.cu
caught restricted_pointers.sh 'nn/ops/cuda/bad.cu:2'
clean_tree; echo '#include <nlohmann/json.hpp>' >dist/bad.cpp
caught backends_by_file.sh 'dist/bad.cpp:1'
clean_tree; echo '[gone](pages/gone.md#part)' >data/page.md
caught md_links.sh 'data/page.md:1: the link to pages/gone.md'
if clang-format --version 2>/dev/null | grep -q ' 14\.'; then
  clean_tree; echo 'int   spaced;' >data/bad.cpp
  caught format.sh 'data/bad.cpp'
fi
clean_tree; sed -i 's/model_c//' fake_train
caught registered_names.sh "registers 'model_c'"
clean_tree; sed -i 's/method_b/method/; s/select_a/select/' fake_train
caught registered_names.sh "registers 'method_b'"
caught registered_names.sh "registers 'select_a'"
clean_tree; printf '#!/bin/sh\nexit 1\n' >fake_train
caught registered_names.sh 'train --list models failed'
clean_tree; echo 'compressors().add(name, help, f);' >compress/bad.cpp
caught registered_names.sh 'compress/bad.cpp registers compressors in a way'
exit "$status"
