"""What the peers share: the stepping protocol, and messages where PyTorch is missing.

A peer is a process that stays alive so that a driver can step it in alternation with others. It prints `ready N` (N items a
step), then answers each line `k` on its standard input with one line of k numbers: the seconds of k steps. It ends with its
input.
"""

import sys
import time


def import_torch():
    """torch, or a polite end of the process (status 3, so that a driver can tell it from a failure)."""
    try:
        import torch
    except ImportError as error:
        print(f"PyTorch is not installed for {sys.executable} ({error}).\n"
              "On Debian: apt-get install python3-torch; elsewhere: pip install torch in a virtual environment.",
              file=sys.stderr)
        sys.exit(3)
    return torch


def timed(step, prepare=None):
    """Seconds of one step(); prepare() runs before it, untimed."""
    if prepare is not None:
        prepare()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def both_passes(forward, backward, count, warm_up=3):
    """Seconds of `count` forward passes, then of the backward pass behind each."""
    seconds = [(timed(forward), timed(backward)) for _ in range(count + warm_up)][warm_up:]
    return [there for there, _ in seconds] + [back for _, back in seconds]


def answer(measure):
    """Prints `ready 1`, then for each line of words the seconds that measure(*words) returns."""
    print("ready 1", flush=True)
    for line in sys.stdin:
        print(" ".join(f"{seconds:.9f}" for seconds in measure(*line.split())), flush=True)


def serve(items, run_steps):
    """Speaks the protocol; run_steps(k) returns a list of k seconds."""
    print(f"ready {items}", flush=True)
    for line in sys.stdin:
        if line.strip():
            print(" ".join(f"{seconds:.9f}" for seconds in run_steps(int(line))), flush=True)
