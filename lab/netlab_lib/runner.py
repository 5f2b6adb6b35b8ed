"""Runs one command on every host of a lab, with the variables that torchrun sets."""

import os
import signal
import sys
import time

import runs

from . import Interrupted, LabError
from .lab import INTERFACE, MASTER_PORT

TERMINATE_S = 10  # time between the signal to end and the kill


class Rank:
    def __init__(self, number, host, local, log):
        self.number, self.host, self.local, self.log = number, host, local, log
        self.process = None
        self.code = None
        self.ended = None  # seconds after the start
        self.stop_requested = False  # netlab sent the signal to end


def environment(lab, rank, per_host, extra):
    result = dict(os.environ, **extra)
    result.update(
        {
            "RANK": rank.number,
            "WORLD_SIZE": lab.hosts * per_host,
            "LOCAL_RANK": rank.local,
            "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": rank.host,
            "GROUP_WORLD_SIZE": lab.hosts,
            "MASTER_ADDR": lab.address(0),
            "MASTER_PORT": MASTER_PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "NETLAB_HOST": rank.host,
        }
    )
    return {name: str(value) for name, value in result.items()}


def cores_of(rank, ranks):
    """The rank's equal share of the cores, or one core where there are more ranks than cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    return cores[rank * share : (rank + 1) * share] if share else [cores[rank % len(cores)]]


class Run:
    """The processes of one command. Rank 0 stays in netlab's process group, so that it has the terminal; the other ranks have
    their own sessions and log files."""

    def __init__(self, lab, command, folder, per_host=1, extra=None, quiet=False, pin=False):
        self.lab, self.command, self.folder = lab, command, folder
        self.per_host, self.extra, self.quiet, self.pin = per_host, extra or {}, quiet, pin
        self.ranks = []
        for number in range(lab.hosts * per_host):
            host, local = divmod(number, per_host)
            name = f"host{host}.log" if per_host == 1 else f"host{host}-rank{number}.log"
            self.ranks.append(Rank(number, host, local, os.path.join(folder, name) if number or quiet else None))
        self.begin = None

    def _start(self, rank):
        rank.process = runs.start(
            self.lab.inside(rank.host, self.command),
            rank.log,
            prepare=runs.default_signals,
            cores=cores_of(rank.number, len(self.ranks)) if self.pin else None,
            env=environment(self.lab, rank, self.per_host, self.extra),
            start_new_session=bool(rank.log),
        )

    def alive(self):
        now = time.monotonic() - self.begin
        for rank in self.ranks:
            if rank.process is not None and rank.code is None and rank.process.poll() is not None:
                rank.code, rank.ended = runs.exit_status(rank.process.returncode), now
        return [rank for rank in self.ranks if rank.process is not None and rank.code is None]

    def stop(self, number=signal.SIGTERM, but=(), timeout_s=TERMINATE_S):
        """Sends the signal to running processes except `but`, kills them after timeout_s, and waits for every process."""
        for rank in self.alive():
            rank.stop_requested = True
            if rank not in but:
                rank.process.send_signal(number)
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in self.alive():
            rank.process.kill()
        deadline = time.monotonic() + 5
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def wait(self, timeout_s, grace_s, cut=None):
        """Runs the command; returns rank 0's exit code, or that of the first rank that failed; 124 after timeout_s. cut:
        (host, seconds). After the first failure the other ranks may continue for grace_s."""
        self.begin = time.monotonic()
        failed_at, late = None, False
        try:
            for rank in self.ranks:
                self._start(rank)
            while self.alive():
                now = time.monotonic() - self.begin
                if cut and now >= cut[1]:
                    self.lab.cut(cut[0])
                    log_line(f"the link of host {cut[0]} is cut, {now:.1f} s after the start")
                    cut = None
                if failed_at is None and any(rank.code for rank in self.ranks):
                    failed_at = now
                if now > timeout_s:
                    log_line(f"{self.names(self.alive())} still ran after {timeout_s:g} s (--timeout); stopped")
                    late = True
                    self.stop()
                elif failed_at is not None and now > failed_at + grace_s:
                    log_line(f"{self.names(self.alive())} still ran {grace_s:g} s after the first failure (--grace); stopped")
                    self.stop()
                time.sleep(0.02)
        except Interrupted as interrupted:
            # Ctrl-C reached rank 0 from the terminal already; a second signal may have another meaning for the command.
            signalled = [self.ranks[0]] if interrupted.number == signal.SIGINT and self._has_terminal() else []
            self.stop(interrupted.number, but=signalled)
            raise
        except BaseException:
            self.stop(timeout_s=1)
            raise
        if late:
            return 124
        failed = [rank for rank in self.ranks if rank.code]
        if not failed:
            return 0
        # A rank that netlab stopped is not the cause.
        first = min(failed, key=lambda rank: (rank.stop_requested, rank.number != 0, rank.ended))
        return first.code

    def _has_terminal(self):
        try:
            return self.ranks[0].log is None and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False

    def names(self, ranks):
        return ", ".join(self.name(rank) for rank in ranks)

    def name(self, rank):
        return f"host {rank.host}" if self.per_host == 1 else f"rank {rank.number} (host {rank.host})"

    def show_failures(self, lines=20):
        for rank in self.ranks:
            if not rank.code:
                continue
            how = "was stopped" if rank.stop_requested else f"ended with {rank.code} after {rank.ended:.1f} s"
            log_line(f"{self.name(rank)} {how}" + (f"; the end of {rank.log}:" if rank.log else ""))
            for line in tail(rank.log, lines):
                print(f"  | {line}", file=sys.stderr)
        sys.stderr.flush()


def tail(path, lines):
    return runs.content(path, 65536).decode("utf-8", "replace").splitlines()[-lines:] if path else []


def log_line(text):
    """Prints a line with the prefix "netlab: " to stderr."""
    print(f"netlab: {text}", file=sys.stderr, flush=True)


def find_program(command):
    """Raises LabError where the program of the command does not exist or is not executable."""
    name = command[0]
    if os.sep in name:
        if not os.path.isfile(name):
            raise LabError(f"there is no program {name}; check that it is built and that the working directory is right", 127)
        if not os.access(name, os.X_OK):
            raise LabError(f"{name} cannot be run", 126)
    elif not any(os.access(os.path.join(place, name), os.X_OK) for place in os.get_exec_path()):
        raise LabError(f"there is no program {name} on the PATH", 127)
