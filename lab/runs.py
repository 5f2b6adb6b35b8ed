"""Runs of programs, and what they leave: starts them, reads a run's log and configuration, sums up figures. The tools that
start programs stand on this module. Standard library only."""

import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAST_BYTES = 64 << 10  # that hold the last record of a log


def program(name):
    """The path of a program that was built; BUILD names the build folder."""
    return os.path.join(ROOT, os.environ.get("BUILD", "build"), "bin", name)


def not_built(path):
    """Why the program cannot be started; "" if it can."""
    return "" if os.access(path, os.X_OK) else f"{path} is not there; 'make build' builds it, BUILD names another folder"


# Starting.


def default_signals():
    """As `prepare` of a command whose caller ignores or catches signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(command, log=None, append=False, cores=None, prepare=None, **options):
    """The process of a command; options are Popen's. With a log, both output streams go there and the input is empty. cores: those
    that it may use. prepare: is called in the process before the command begins."""

    def before():
        if prepare:
            prepare()
        if cores:
            os.sched_setaffinity(0, cores)

    with open(log, "ab" if append else "wb") if log else contextlib.nullcontext() as file:
        if log:
            options.update(stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        return subprocess.Popen(command, preexec_fn=before if prepare or cores else None, **options)


def run(command, together=False, **options):
    """A command from start to end, with an empty input: its returncode, stdout and stderr as texts, or both streams together as
    stdout. Options are subprocess.run's."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        **options,
    )


def exit_status(returncode):
    """As a shell has it: 128 + signal where one ended the process."""
    return 128 - returncode if returncode < 0 else returncode


# Files.


def content(path, last=None):
    """The bytes of a file, or its last ones; b"" without a file. A named pipe is not waited for."""
    try:
        if not os.path.isfile(path):
            return b""
        with open(path, "rb") as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read()
    except OSError:
        return b""


def json_lines(text):
    """The JSON objects among the lines of a text; other lines are for people, or cut off."""
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def read_json(path):
    """What a JSON file holds; None without one."""
    try:
        return json.loads(content(path))
    except ValueError:
        return None


def write_text(path, text):
    """A file that appears whole or not at all. A new one beside it is written first, never through a link: netlab runs as root."""
    part = f"{path}.part-{secrets.randbits(32)}"
    try:
        with open(part, "x", encoding="utf-8", errors="replace", newline="") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except BaseException:  # an interruption too
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def write_json(path, value, **options):
    write_text(path, json.dumps(value, **options) + "\n")


def log_of(folder):
    """The log of a run (train/metrics/metrics.h): a record per line."""
    return os.path.join(folder, "metrics.jsonl")


def records(folder, event=None, last=None):
    """The records of a run's log, those of one event if it is given; [] without a log. last: only of the log's last bytes."""
    found = json_lines(content(log_of(folder), last).decode("utf-8", "replace"))
    return [record for record in found if event in (None, record.get("event"))]


def first_record(folder):
    if os.path.isfile(log_of(folder)):
        with open(log_of(folder), encoding="utf-8", errors="replace") as file:
            return next(json_lines(file.readline()), None)
    return None


def last_record(folder):
    found = records(folder, last=LAST_BYTES)
    return found[-1] if found else None


def end_record(folder):
    """The last record, if it is the end of a run that came to its end; else None."""
    last = last_record(folder)
    return last if last and last.get("event") == "end" else None


def settings(text):
    """{key: (value, origin)} of a config.yaml as train and the peers write it; origin: what follows "  # ", or ""."""
    found, section = {}, ""
    for line in text.splitlines():
        given, _, origin = line.partition("  # ")
        name, _, value = given.strip().partition(":")
        if line.startswith("  "):
            name = f"{section}.{name}"
        elif not value:
            section = name
        if value:
            found[name] = value.strip(), origin
    return found


# Summing up.


def rotated(items, number):
    """The items from another one on in each round, so that none is always behind the same one."""
    turn = number % len(items) if items else 0
    return items[turn:] + items[:turn]


def ratios(ours, theirs):
    """By round."""
    return [a / b for a, b in zip(ours, theirs)]


def describe(values):
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "rounds": values}


def spread(values):
    """As a table has what describe() returns."""
    return f"{values['median']:.2f} ({values['lowest']:.2f} to {values['highest']:.2f})"


def row(cells):
    return "| " + " | ".join(cells) + " |"


def markdown(heads, rows, left=1):
    """A table; the first `left` columns are to the left, the others to the right."""
    return "\n".join([row(heads), "|" + "---|" * left + "---:|" * (len(heads) - left), *map(row, rows)])


def cpu_name():
    """The processor's name; "" where the system does not tell."""
    for line in content("/proc/cpuinfo").decode("utf-8", "replace").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return ""
