"""Removes labs. As a program it is the watcher of one lab: it waits for the end of its standard input, which follows any end of
the lab's owner (SIGKILL included), and then removes the lab. The owner closes the pipe at its normal end too.

The names of a lab's namespaces are netlab-PID-START-NAME: the owner's process id and, since ids are reused, its start time."""

import os
import re
import signal
import subprocess
import sys
import time

NAMES = "/run/netns"


def start_ticks(pid):
    """Start time of a process in the kernel's ticks; None where there is none (or a zombie, which owns nothing)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def own_prefix():
    return f"netlab-{os.getpid()}-{start_ticks(os.getpid())}-"


def namespaces(prefix):
    try:
        return sorted(name for name in os.listdir(NAMES) if name.startswith(prefix))
    except OSError:
        return []


def processes(namespace):
    try:
        done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(word) for word in done.stdout.split() if word.isdigit()]


def remove(prefix, timeout_s=15):
    """Kills the processes in the lab and removes its namespaces with their links. Returns whether all are removed."""
    deadline = time.monotonic() + timeout_s
    while namespaces(prefix) and time.monotonic() < deadline:
        for name in namespaces(prefix):
            alive = processes(name)
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not alive:
                # The name is removed first, so no process can enter; one that entered before has no links left to wait on.
                try:
                    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=10)
                except (OSError, subprocess.TimeoutExpired):
                    pass
        if namespaces(prefix):
            time.sleep(0.02)
    return not namespaces(prefix)


def remove_stale():
    """Removes the labs whose owner is dead; returns their number."""
    owners = {}
    for name in namespaces("netlab-"):
        match = re.match(r"netlab-(\d+)-(\d+)-", name)
        if match:
            owners[match[0]] = (int(match[1]), int(match[2]))
    stale = [prefix for prefix, (pid, ticks) in owners.items() if start_ticks(pid) != ticks]
    for prefix in stale:
        remove(prefix)
    return len(stale)


def watch(prefix):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    return 0 if remove(prefix) else 1


if __name__ == "__main__":
    sys.exit(watch(sys.argv[1]))
