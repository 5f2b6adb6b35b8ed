"""Processes that `lab/bench/against-pytorch` steps in alternation; lab/peers/peer.py describes their protocol."""

import contextlib
import json
import os
import selectors
import statistics
import subprocess
import tempfile
import time

import runs


class Unavailable(Exception):
    """Something this contender needs is not here; the message says what."""


class Contender:
    """One process under the protocol."""

    warm_up = True

    def __init__(self, name, command, environment=None, ours=False):
        self.name, self.command, self.environment, self.ours = name, command, environment or {}, ours
        self.process = self.items = None

    def start(self, timeout):
        self.errors = tempfile.TemporaryFile()
        try:
            self.process = runs.start(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env={**os.environ, **self.environment},
            )
        except OSError as error:
            raise Unavailable(f"{self.name}: {os.path.basename(self.command[0])}: {error.strerror}") from error
        os.set_blocking(self.process.stdout.fileno(), False)
        self.buffer = b""
        line = self._line(timeout).split()
        while line[:1] == ["[Gloo]"]:  # PyTorch from 2.10 on says who has connected
            line = self._line(timeout).split()
        if len(line) != 2 or line[0] != "ready":
            raise Unavailable(f"{self.name} answered '{' '.join(line)}' where 'ready N' was due")
        self.items = int(line[1])

    def steps(self, count, timeout):
        """Seconds of `count` steps; they may come on one line or on several."""
        return self.ask(str(count), count, timeout)

    def ask(self, request, count, timeout):
        try:
            self.process.stdin.write(f"{request}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        seconds = []
        while len(seconds) < count:
            seconds += [float(word) for word in self._line(timeout).split()]
        return seconds

    def stop(self):
        if self.process is None:
            return
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        self.process = None

    def _line(self, timeout):
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                left = end - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"{self.name} gave no answer within {timeout} s")
                if selector.select(left):
                    chunk = self.process.stdout.read(65536)
                    if chunk == b"":
                        raise self._ended()
                    self.buffer += chunk or b""
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()

    def _ended(self):
        status = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        # Status 3 is a peer's polite "not here": all of its message. Else the last line, which names the error.
        reason = "\n".join(lines if status == 3 else lines[-1:]) or f"it ended with status {status}"
        return Unavailable(f"{self.name}: {reason}")


class TopkRun(Contender):
    """bench_topk on one stream, started anew for each request. Beside its speed: how long it took relative to the plain `r += g`, a
    value per request."""

    warm_up = False

    def __init__(self, name, program, stream, threads, skip):
        super().__init__(
            name,
            [program, "--stream", stream, "--threads", str(threads), "--from", str(skip), "--steps", str(skip + 100), "--json"],
            ours=True,
        )
        self.plain_seconds, self.over_plain = [], []

    def start(self, timeout):
        if not os.access(self.command[0], os.X_OK):
            raise Unavailable(f"{self.name}: {os.path.basename(self.command[0])} is not built")

    def steps(self, count, timeout):
        done = runs.run(self.command, timeout=timeout)
        if done.returncode != 0:
            raise Unavailable(f"{self.name}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
        figures = json.loads(done.stdout.splitlines()[-1])
        self.items = figures["size"]
        self.plain_seconds.append(figures["plain_ms"] / 1000)
        self.over_plain.append(figures["ratio"])
        return [figures["topk_ms"] / 1000]


@contextlib.contextmanager
def started(contenders, missing, timeout=120):
    """Those that can be started, until the block ends; messages about the others go to `missing`."""
    running = []
    try:
        for contender in contenders:
            try:
                contender.start(timeout)
                running.append(contender)
            except Unavailable as problem:
                missing.append(str(problem))
                contender.stop()
        yield running
    finally:
        for contender in running:
            contender.stop()


def alternate(contenders, rounds, steps, timeout=600):
    """Each round steps every contender once, the first one changing from round to round.

    Returns ({name: [items per second, by round]}, [messages about those that are missing]); without ours none is measured.
    """
    speeds, missing, running = {}, [], []

    def attempt(contender, action):
        try:
            return action(contender)
        except (Unavailable, subprocess.TimeoutExpired) as problem:
            missing.append(str(problem))
            contender.stop()
            return None

    def begin(contender):
        contender.start(timeout)
        if contender.warm_up:
            contender.steps(2, timeout)
            contender.steps(steps, timeout)  # for what settles late: primitive caches, allocators
        return True

    try:
        for contender in contenders:
            if attempt(contender, begin):
                running.append(contender)
                speeds[contender.name] = []
            elif contender.ours:
                return {}, missing  # nothing to compare the others with
        for round_ in range(rounds):
            for contender in runs.rotated(running, round_):
                seconds = attempt(contender, lambda c: c.steps(steps, timeout))
                if seconds is None:
                    speeds.pop(contender.name)
                else:
                    speeds[contender.name].append(contender.items / statistics.median(seconds))
                time.sleep(0.05)  # waiting threads of the last one stop spinning
            running = [contender for contender in running if contender.name in speeds]
    finally:
        for contender in contenders:
            contender.stop()
    return speeds, missing
