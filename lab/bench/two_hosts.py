#!/usr/bin/env python3
"""The recipe of docs/two_hosts.md on two emulated hosts: the page's script with and without the page's lines.

sudo lab/bench/two_hosts.py TEXT [--rates 100mbit,1gbit] [--rounds 3] [--out runs.json] [-- OPTIONS OF docs/examples/gpt.py]

Trains by DistributedDataParallel, by it with PyTorch's sums of bfloat16, and by each block of lines of the page, in an order
that turns with the rounds, one thread a host, started by the page's torchrun. Prints medians over the rounds.
PYTHONPATH=python TOPKNOT_LIBRARY=build/lib/libtopknot.so, if topknot is not installed.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "two_hosts.md"
SCRIPT = ROOT / "docs" / "examples" / "gpt.py"
BF16 = """\
 from torch.nn.parallel import DistributedDataParallel
+from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
...
 model = DistributedDataParallel(model)
+model.register_comm_hook(None, bf16_compress_hook)
"""


def diffs():
    """The blocks of changed lines of the page, by the name of the class that they add."""
    blocks = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {re.findall(r"^\+.*topknot\.torch\.(\w+)\(", block, re.MULTILINE)[0]: block for block in blocks}


def patched(script, diff):
    """The script with the lines of a diff without line numbers: each of its parts is replaced where it stands, once."""
    for part in re.split(r"^\.\.\.\n", diff, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        if script.count(before) != 1:
            raise ValueError(f"{SCRIPT.name} has these lines {script.count(before)} times:\n{before}")
        script = script.replace(before, after)
    return script


def command(script, text, options):
    """The page's torchrun, for both hosts, and the bytes that the host sends meanwhile."""
    (line,) = re.findall(r"^    (torchrun .*)", PAGE.read_text(), re.MULTILINE)
    for word, here in [
        ("--node-rank 0", "--node-rank $NETLAB_HOST"),
        ("HOST0", "$MASTER_ADDR"),
        (f"docs/examples/{SCRIPT.name}", script),
    ]:
        if line.count(word) != 1:
            raise ValueError(f"the page's torchrun has '{word}' {line.count(word)} times")
        line = line.replace(word, str(here))
    line = re.sub(r" TEXT\b.*", f" {text} {' '.join(options)}", line)
    sent = "/sys/class/net/eth0/statistics/tx_bytes"
    return ["sh", "-c", f"before=$(cat {sent}); {line} && echo sent $(($(cat {sent}) - before)) bytes"]


def train(script, text, rate, options, log):
    """[(step, seconds, loss)], and the bytes that host 0 sent. log: a folder for host 1's output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if library := os.environ.get("TOPKNOT_LIBRARY"):
        environment["TOPKNOT_LIBRARY"] = os.path.abspath(library)
    with tempfile.TemporaryDirectory() as folder:
        torchrun, program = pathlib.Path(folder, "torchrun"), pathlib.Path(folder, SCRIPT.name)
        torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        torchrun.chmod(0o755)
        # Some PyTorch's gloo aborts as the interpreter ends.
        program.write_text(script + "\nimport sys\nsys.stdout.flush()\nos._exit(0)\n")
        environment["PATH"] = f"{folder}:{environment['PATH']}"
        netlab = [ROOT / "lab" / "netlab", "--hosts", "2", "--rate", rate, "--no-measure", "--log", log, "--"]
        done = subprocess.run(
            [*netlab, *command(program, text, options)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
    sent = re.findall(r"^sent (\d+) bytes", done.stdout, re.MULTILINE)
    if done.returncode or not sent:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    curve = re.findall(r"^step (\d+), ([\d.]+) s, validation loss ([\d.]+)", done.stdout, re.MULTILINE)
    return [(int(step), float(seconds), float(loss)) for step, seconds, loss in curve], int(sent[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, more = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    script = SCRIPT.read_text()
    contenders = {"DDP": script, "DDP, bf16": patched(script, BF16)}
    contenders.update({name: patched(script, diff) for name, diff in diffs().items()})
    rates, names, found = options.rates.split(","), list(contenders), []
    for turn in range(options.rounds):
        for rate, name in [(rate, name) for rate in rates for name in names[turn % len(names) :] + names[: turn % len(names)]]:
            with tempfile.TemporaryDirectory() as log:
                curve, sent = train(contenders[name], os.path.abspath(options.text), rate, more, log)
            found.append({"rate": rate, "name": name, "curve": curve, "sent": sent, "load": os.getloadavg()[0]})
            print(f"{rate} {name}: {curve[-1][1]:.1f} s, loss {curve[-1][2]:.4f}, load {os.getloadavg()[0]:.1f}", flush=True)
            if options.out:
                pathlib.Path(options.out).write_text(json.dumps(found))
    for rate in rates:
        for name in names:
            print(f"{rate:8} {name:14} {summary([run for run in found if (run['rate'], run['name']) == (rate, name)])}")


def summary(runs):
    """Medians over the runs of one contender at one rate."""
    median = lambda of: statistics.median(map(of, runs))
    steps, seconds = runs[0]["curve"][-1][0], [run["curve"][-1][1] for run in runs]
    return (
        f"{1000 * statistics.median(seconds) / steps:7.1f} ms a step; {steps} steps: {statistics.median(seconds):.1f} s "
        f"({min(seconds):.1f} to {max(seconds):.1f}), loss {median(lambda run: run['curve'][-1][2]):.4f}, "
        f"{median(lambda run: run['sent']) / 1e6:.1f} MB sent, load {median(lambda run: run['load']):.1f}"
    )


if __name__ == "__main__":
    main()
