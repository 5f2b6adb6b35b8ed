#!/usr/bin/env bash
# The workloads of lab/netlab: every command of ours is a valid configuration, and every peer's is understood.
#   netlab_specs.sh ROOT TRAIN
set -euo pipefail
cd "${1:?usage: netlab_specs.sh ROOT TRAIN}"
train=${2:?usage: netlab_specs.sh ROOT TRAIN}
command -v python3 >/dev/null || { echo "no python3: nothing checked"; exit 0; }
python3 - "$train" lab/configs/netlab/*.json <<'END'
import json, os, subprocess, sys, tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, "lab")
from netlab_lib.compare import filled

program, specs, bad = sys.argv[1], sys.argv[2:], 0
data = tempfile.TemporaryDirectory()
for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
    with open(os.path.join(data.name, name), "wb") as file:
        file.truncate(10000 * 3073)
for name in ["train", "valid", "test"]:
    with open(os.path.join(data.name, f"ptb.{name}.txt"), "w") as file:
        file.write("yes no " * 500)
with open(os.path.join(data.name, "input.txt"), "w") as file:
    file.write("yes no " * 50000)
for name in specs:
    with open(name, encoding="utf-8") as file:
        spec = json.load(file)
    if not all(spec[key] for key in ("rates", "hosts", "rounds", "methods")):
        sys.exit(f"{name}: rates, hosts, rounds or methods are missing")
    for method, words in spec["methods"].items():
        if not any("{out}" in word for word in words):
            sys.exit(f"{name}: {method}: no {{out}}: its runs would overwrite each other")
        words = filled(words, {"out": os.path.join(data.name, "run"), "hosts": 2, "rate": "none", "round": 1, "data": data.name})
        ours = words[0] == "build/bin/train"
        # A peer that lacks RANK says so (status 2) only after it has understood all its arguments.
        command = [program, *words[1:], "--validate"] if ours else ["env", "-u", "RANK", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        warned = "warning" in done.stdout + done.stderr
        if (done.returncode != 0 or warned) if ours else (done.returncode != 2 or "RANK" not in done.stderr):
            print(f"{name}: {method}: {done.stdout}{done.stderr}")
            bad = 1
sys.exit(bad)
END
