"""Programs, each with a deadline, and the signals that end them."""

import ctypes
import dataclasses
import os
import re
import selectors
import shutil
import signal
import subprocess
import time

import runs

from . import Interrupted

# Signals. The first asks for an end; a second one ends this process at once, unless it comes within 0.1 s, as senders such as
# timeout(1) signal a process and then its group.

stop = {"signal": 0, "time": 0.0}


def on_stop_signal(number, _frame):
    if not stop["signal"]:
        stop.update(signal=number, time=time.monotonic())
    elif time.monotonic() - stop["time"] > 0.1:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


USED_UP = "the stage's time is used up"
KEPT = 64 << 10  # bytes of a program's output, of its end
KILL_GRACE = 5.0  # seconds for a killed program to be gone
REST_OF_OUTPUT = 0.3  # seconds for what is still in a pipe
PR_SET_PDEATHSIG = 1
LAUNCHERS_VARIABLE = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)$|OMPI_|PMI_|PMIX_|MPI_LOCAL|SLURM_|TOPKNOT_RANK|TORCHELASTIC_"
)


def last_line(output):
    """The last line that is more than a rule, for a note; at most 300 characters."""
    last = ""
    for line in output.split("\n"):
        line = line.rstrip("\r ").rpartition("\r")[2]
        if line.strip(" \t=~-."):
            last = line
    return last[:300]


@dataclasses.dataclass
class Outcome:
    code: int = -1  # exit status; 128 + signal where one ended it; -1: it was never started
    timed_out: bool = False  # was killed at its deadline
    cut_off: bool = False  # likewise, but because its stage had no more time: says nothing of the program
    found: bool = True  # False: there is no such program
    seconds: float = 0.0
    output: str = ""  # of both streams, the last 64 kB

    def ok(self):
        return self.found and not self.timed_out and self.code == 0

    def reason(self, name):
        """Why it is not ok(), in one line."""
        if not self.found:
            return f"{name} is not there"
        last = last_line(self.output)
        if self.timed_out:
            why = USED_UP if self.cut_off else f"hangs, or is slow: not done in {self.seconds:.3g} s"
            return why + (f"; its last line: {last}" if last else "")
        if self.code > 128:
            return f"ended by signal {self.code - 128}" + (f": {last}" if last else "")
        return last or f"exit status {self.code}"


def is_program(name):
    """Whether a program of this name is on the PATH, or is a file that can be run."""
    return shutil.which(name) is not None


class Child:
    """A program with a process group of its own, so that its children can be killed with it."""

    def __init__(self, argv, environment):
        self.process, self.output, self.outcome = None, b"", Outcome(found=is_program(argv[0]))
        if not self.outcome.found:
            return
        mine = {name: value for name, value in os.environ.items() if not LAUNCHERS_VARIABLE.match(name)}
        libc = ctypes.CDLL(None)  # before fork()

        def become():
            os.setpgid(0, 0)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)

        try:  # without an input: a terminal would stop a background group that reads from it
            self.process = runs.start(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,
                stderr=subprocess.STDOUT,
                env=mine | environment,
                prepare=become,
            )
        except OSError as error:
            self.output = f"{argv[0]} cannot be started: {error.strerror}".encode()

    def running(self):
        return self.process is not None and self.process.returncode is None

    def read_some(self):
        """False at the end of the output."""
        got = os.read(self.process.stdout.fileno(), 8192)
        self.output = (self.output + got)[-KEPT:]
        return bool(got)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)

    def collect(self, begin):
        """If it has ended: its group is killed while its number is still its own, then its status is collected."""
        if not self.running() or not os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        self.kill()
        code = self.process.wait()
        self.outcome.code = runs.exit_status(code)
        self.outcome.seconds = time.monotonic() - begin

    def drain(self):
        """Reads the rest of an ended program's output. One that got away from its group may hold the pipe for ever."""
        deadline = time.monotonic() + REST_OF_OUTPUT
        with selectors.DefaultSelector() as selector, self.process.stdout as pipe:
            selector.register(pipe, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(0.05) and not self.read_some():
                    break


def run_all(commands, seconds):
    """Runs pairs of arguments and environment (added to this process's own) side by side, without an input and without the
    variables of a launcher of ranks (torchrun, mpirun, srun). A program that still runs after `seconds` is killed; the rest
    of a program's process group is killed when the program ends. Returns their outcomes some seconds after the deadline at
    the latest, also if a program cannot be killed because it hangs in a driver. Throws Interrupted after a signal."""
    begin = time.monotonic()
    deadline, give_up, killed = begin + max(0.0, seconds), float("inf"), False
    children = [Child(argv, environment) for argv, environment in commands]
    with selectors.DefaultSelector() as selector:
        for child in children:
            if child.process:
                selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while True:
            for child in children:
                child.collect(begin)
            now = time.monotonic()
            if now >= give_up or not any(child.running() for child in children):
                break
            if not killed and (now >= deadline or stop["signal"]):
                for child in filter(Child.running, children):
                    child.outcome.timed_out = True
                    child.outcome.seconds = now - begin
                    child.kill()
                killed, give_up = True, now + KILL_GRACE
            wait = min(max((give_up if killed else deadline) - now, 0.001), 0.02)
            if not selector.get_map():
                time.sleep(wait)
            for key, _ in selector.select(wait) if selector.get_map() else []:
                if not key.data.read_some():
                    selector.unregister(key.fileobj)
    for child in children:
        if child.process:
            child.drain()
        child.outcome.output = child.output.decode(errors="replace")
    if stop["signal"]:
        raise Interrupted("stopped by a signal")
    return [child.outcome for child in children]


def run(argv, seconds):
    return run_all([(argv, {})], seconds)[0]
