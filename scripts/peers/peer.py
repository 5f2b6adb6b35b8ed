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


def serve(items, run_steps):
    """Speaks the protocol; run_steps(k) returns a list of k seconds."""
    print(f"ready {items}", flush=True)
    for line in sys.stdin:
        if line.strip():
            print(" ".join(f"{seconds:.9f}" for seconds in run_steps(int(line))), flush=True)
