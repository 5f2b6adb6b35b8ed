"""Runs, read from run directories and from tables of runs (runs.csv of lab/train-runs).

A file may be read while it is written: a last line without its end is left out. Times are seconds of training.
"""

import csv
import functools
import glob
import json
import math
import multiprocessing
import operator
import os
import random
import re
import signal
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

ABSENT, MOST = math.nan, 1e12
"""What is not known, and the greatest value that is drawn."""
Record = SimpleNamespace
"""A line of metrics.jsonl, with the fields of _FIELDS."""
WARM_UP = 5
"""Steps whose times do not count: they pay for caches and memory."""
WHOLE = 1000
"""Steps up to which a run is read whole. A longer run is cut into so many windows, and one random record of each is read."""
PARTS = ("data", "forward", "backward", "encode", "exposed", "decode", "update")
"""The measured parts of a step, which together with `other` make its time."""
_MANY = 16
"""Runs from which on all cores read."""
_MOST_SECONDS = 1e15
_STEP = b'{"event":"step"'
# By event the fields that are read, with what an absent one is. A value has the type of its default; a number may be null.
_FIELDS: dict[str, dict[str, Any]] = {
    "start": {**dict.fromkeys(("backend", "task", "metric", "metric_unit", "revision"), ""), "metric_set": "test", "higher_is_better": True},
    "step": {"step": 0, **dict.fromkeys("epoch time_s loss bytes_sent bytes_received bytes_dense images_per_second communicate_s".split(), 0.0),
             **{part + "_s": 0.0 for part in PARTS}},
    "eval": {"step": 0, **dict.fromkeys("epoch time_s test_loss test_accuracy".split(), 0.0),
             **dict.fromkeys("test_top5_accuracy test_bits_per_byte test_character_error_rate".split(), 0.0)},
    "distribution": {"step": 0, "size": 0, "histogram": [],
                     **dict.fromkeys("mean deviation median laplace_scale contraction bound bell_bound".split(), 0.0)},
    "end": {"steps": 0, "skipped_steps": 0, "failed": False, "reason": "", "parameter_checksum": "",
            **dict.fromkeys("held_out_loss images_per_second wall_seconds bytes_sent bytes_dense bytes_received".split(), 0.0),
            **dict.fromkeys("eval_seconds startup_seconds step_p50_s step_p95_s".split(), ABSENT)},
}  # fmt: skip
NO_END = Record(**_FIELDS["end"])
"""Stands for the end of an incomplete run."""
_COLUMNS = "run seed commit metric value held_out checksum steps sent_per_step received_per_step dense_per_step seconds skipped_steps config keys"


class UserError(Exception):
    """What the user asked for cannot be done; the text says why and what helps."""


def one_line(text: str) -> str:
    """The text with control characters and invalid bytes written as escapes."""
    signs = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return re.sub("[\0-\x1f\x7f-\x9f\ud800-\udfff]", lambda m: signs.get(m[0], f"\\x{ord(m[0]) & 255:02x}"), text)


def read_bytes(path: str) -> bytes:
    """A file's bytes. Raises UserError: no such file, no plain file."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind != stat.S_IFREG:
            name = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder"}.get(kind, "a device")
            raise UserError(f"'{path}' is {name}, not a file")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Stat:
    """A mean with the sample deviation (0 of one value) and the number of values; without values the mean is ABSENT."""

    mean: float = ABSENT
    deviation: float = 0.0
    count: int = 0
    runs: int = 0
    """For a way to the target: how many runs there are, of which `count` reached it."""


def stat_of(values: Iterable[float], runs: int = 0) -> Stat:
    """The mean and deviation of the finite values."""
    known = [value for value in values if math.isfinite(value)]
    mean = sum(known) / len(known) if known else ABSENT
    squares = sum((value - mean) * (value - mean) for value in known)
    return Stat(mean, math.sqrt(squares / max(1, len(known) - 1)), len(known), runs)


@dataclass(frozen=True)
class Metric:
    """The figure that evaluations measure, of the unit `share` from 0 to 1 and shown as percent; `second` is another one of them."""

    name: str
    unit: str
    higher_is_better: bool
    set: str = "test"
    rate_unit: str = "images/s"
    second: str = ""

    def value(self, loss: float, accuracy: float) -> float:
        if self.name == "perplexity":
            return math.inf if loss > 709 else math.exp(loss)
        return accuracy if self.name == "accuracy" else 1 - accuracy if self.name == "word error rate" else loss

    @property
    def long_title(self) -> str:
        """ "test accuracy", "validation perplexity"."""
        return f"{self.set} {self.name}"

    @property
    def title(self) -> str:
        """As tables have it: "accuracy", "test loss"."""
        return self.name if self.name == "accuracy" else self.long_title

    def reaches(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target


ACCURACY = Metric("accuracy", "share", True, second="top-5 accuracy")
SQUARED_ERROR = Metric("loss", "mean squared error", False)
PERPLEXITY = Metric("perplexity", "per token", False, "validation", "tokens/s", "bits per byte")
WORD_ERRORS = Metric("word error rate", "share", False, "test", "recordings/s", "character error rate")
METRICS = {metric.name: metric for metric in (ACCURACY, SQUARED_ERROR, PERPLEXITY, WORD_ERRORS)}


class Entry(NamedTuple):
    """A key's value as config.yaml has it; `given` is false for a default."""

    text: str
    given: bool = True


def plain_text(text: str) -> str:
    """A value of config.yaml without its quotes."""
    if len(text) < 2 or text[0] != '"':
        return text
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text[1:-1], flags=re.S)


@dataclass(eq=False)
class Run:
    """A run, its records and what follows from them. A table's row has no records but the end."""

    path: str
    config: dict[str, Entry]
    environment: dict[str, str] = field(default_factory=dict)
    starts: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    distributions: list[Record] = field(default_factory=list)
    end: Record | None = None
    truncated: bool = False
    begun: bool = True
    """Whether it made a step; one that did not has no figures."""
    task: str = ""
    metric: Metric = ACCURACY
    network: str = ""
    times: dict[str, float] = field(default_factory=dict)
    # Figures; bytes are of a step. ABSENT stands for what is not known.
    best = last = second = held_out = images_per_second = wall_seconds = ABSENT
    bytes_sent = bytes_received = bytes_ratio = ABSENT

    def text(self, key: str) -> str:
        """A key's value without quotes; "" if the run has none."""
        return plain_text(self.config[key].text) if key in self.config else ""

    @property
    def dense(self) -> bool:
        """Whether nothing is compressed."""
        return self.text("compress.name") == "dense" and self.text("compress.values") in ("", "-", "fp32")

    @property
    def last_step(self) -> int:
        return int(self.end.steps if self.end else self.steps[-1].step if self.steps else 0)

    @property
    def diverged(self) -> bool:
        """Whether the last evaluation was not finite."""
        return math.isnan(self.last) and (bool(self.evals) or not self.steps)

    def set_bytes(self, sent: float, received: float, dense: float) -> None:
        """Sets the bytes of a step from totals."""
        if self.last_step > 0:
            self.bytes_sent, self.bytes_received = sent / self.last_step, received / self.last_step
        self.bytes_ratio = dense / sent if sent >= 0.5 else ABSENT


def read_config(path: str) -> dict[str, Entry]:
    """config.yaml as keys with their sections. Raises UserError with path and line."""
    result: dict[str, Entry] = {}
    section = ""
    for number, line in enumerate(read_bytes(path).decode(errors="surrogateescape").split("\n"), 1):
        if not line.strip() or line.lstrip()[0] == "#":
            continue
        found = re.fullmatch(r'( *)([^:]+):\s*("(?:[^"\\]|\\.)*"|(?!#).*?)(\s+#.*|\s*)', line)
        if not found:
            raise UserError(f"{path}:{number}: not 'key: value', as a run writes it")
        indent, name, value, comment = found.groups()
        section = section if indent and value else "" if value else name + "."
        if value:
            result.setdefault(section + name, Entry(value, "#" in comment))
    return result


def _checked(value: Any, standard: Any) -> Any:
    if type(standard) is float and (value is None or type(value) is int):
        return ABSENT if value is None else float(value)
    if type(value) is not type(standard) or (type(value) is int and not -1 << 63 <= value < 1 << 63):
        raise ValueError("a value of another type")
    if type(value) is list and (len(value) > 10000 or any(type(count) is not int or not 0 <= count < 1 << 63 for count in value)):
        raise ValueError("no counts")
    return value


def _read_records(path: str) -> tuple[dict[str, list[Record]], bool]:
    """By event the records, and whether the last line has no end. Of a long run's steps the first and last ones, and one of each
    window."""
    lines = read_bytes(path).split(b"\n")
    steps = [i for i, line in enumerate(lines[:-1]) if line.startswith(_STEP)]
    kept = set(range(len(lines)))
    if len(steps) > WHOLE:
        draw = random.Random(len(steps))  # not every n-th: the exchanges of local steps come at every n-th too
        bounds = [len(steps) * i // WHOLE for i in range(WHOLE + 1)]
        chosen = {steps[int(low + draw.random() * (high - low))] for low, high in zip(bounds, bounds[1:])}
        chosen |= {*steps[: 2 * WARM_UP], steps[-1]}
        kept -= {i for i in steps if i not in chosen and lines[i].endswith(b"}")}
    found: dict[str, list[Record]] = {event: [] for event in _FIELDS}
    for i in sorted(i for i in kept if lines[i]):
        try:
            values = json.loads(lines[i])
            if fields := _FIELDS.get(values.get("event", "")):
                record = Record(**{
                    key: value if type(value := values.get(key, standard)) is type(standard) is float else _checked(value, standard)
                    for key, standard in fields.items()
                })  # fmt: skip
                if values["event"] == "distribution" and record.size <= 0:
                    raise ValueError("no distribution")
                found[values["event"]].append(record)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            if i == len(lines) - 1:
                return found, True
            raise UserError(f"{path}:{i + 1}: damaged line, not a JSON object of a run; remove it or the run") from None
    return found, False


def _find_task(run: Run) -> None:
    """Task, metric and network. Of files that do not record them, the data set tells: the values do not."""
    run.network = next((start.backend for start in reversed(run.starts) if start.backend), run.text("dist.backend"))
    if start := next((start for start in reversed(run.starts) if start.metric), None):
        if start.metric not in METRICS:
            known = ", ".join(METRICS)
            raise UserError(f"{run.path}: its metric is '{start.metric}', not one of {known}; use the version that trained it")
        recorded = {"unit": start.metric_unit, "higher_is_better": start.higher_is_better, "set": start.metric_set}
        run.task, run.metric = start.task, replace(METRICS[start.metric], **recorded)
        return
    data, size, classes = (run.text("data." + key).lstrip("0") for key in ("name", "image_size", "classes"))
    size = size or "32"
    run.metric = SQUARED_ERROR if data == "synthetic_regression" else ACCURACY
    run.task = data + {
        "cifar10": ", 10 classes, samples [3, 32, 32]",
        "mnist": ", 10 classes, samples [1, 28, 28]",
        "synthetic_regression": ", 1 target, samples [64, 1, 1]",
        "synthetic_images": f", {classes or 10} classes, samples [3, {size}, {size}]",
    }.get(data, "")


def _mean_times(steps: list[Record]) -> dict[str, float]:
    """Seconds of a step: the total is that of all steps, the parts those of the steps whose parts were measured."""
    first = WARM_UP if len(steps) > 2 * WARM_UP else 0
    pairs = list(zip([Record(time_s=0.0, step=0), *steps], steps))[first:]
    taken = [(s, now.step - before.step) for before, now in pairs if abs(s := now.time_s - before.time_s) < _MOST_SECONDS]
    total = sum(max(0.0, seconds) for seconds, _ in taken) / sum(max(1, count) for _, count in taken) if taken else ABSENT
    parts = operator.attrgetter(*(part + "_s" for part in PARTS), "communicate_s")
    rows = [row for row in map(parts, steps[first:]) if abs(sum(row[:-1])) < _MOST_SECONDS]
    if not rows:
        return {**dict.fromkeys((*PARTS, "hidden"), ABSENT), "step": total, "other": total}
    times = {part: sum(column) / len(rows) for part, column in zip(PARTS, zip(*rows))}
    measured = sum(times.values())
    whole = max(measured, total) if math.isfinite(total) else measured
    hidden = stat_of(max(0.0, row[-1] - row[PARTS.index("exposed")]) for row in rows).mean
    return {**times, "step": whole, "other": whole - measured, "hidden": hidden}


def _derive(run: Run) -> None:
    for at in run.evals:
        at.value = run.metric.value(at.test_loss, at.test_accuracy)
        at.second = getattr(at, "test_" + run.metric.second.replace("-", "").replace(" ", "_"), ABSENT)
    finite = [at for at in run.evals if math.isfinite(at.value)]
    run.best = (max if run.metric.higher_is_better else min)((at.value for at in finite), default=ABSENT)
    run.last = finite[-1].value if finite and finite[-1] is run.evals[-1] else ABSENT
    run.second = next((at.second for at in reversed(finite) if at.second > 0), ABSENT)
    run.times = _mean_times(run.steps)
    sent = received = dense = 0.0
    before = 0
    for step in run.steps:  # those that were not read are like the next one
        count = max(1, step.step - before)
        sent += count * step.bytes_sent
        received += count * step.bytes_received
        dense += count * step.bytes_dense
        before, step.sent_so_far = step.step, sent
    if end := run.end:
        if end.held_out_loss > 0:
            run.held_out = run.metric.value(end.held_out_loss, 0)
        run.images_per_second, run.wall_seconds = end.images_per_second, end.wall_seconds
        sent, received, dense = end.bytes_sent, end.bytes_received, end.bytes_dense
    else:
        rates = [step.images_per_second for step in run.steps[WARM_UP if len(run.steps) > WARM_UP else 0 :]]
        slowness = stat_of(1 / rate for rate in rates if math.isfinite(rate) and rate > 0).mean
        run.images_per_second, run.wall_seconds = 1 / slowness if slowness > 0 else ABSENT, run.steps[-1].time_s
    run.set_bytes(sent, received if received > 0 or run.text("dist.ranks") == "1" else ABSENT, dense)


def read_run(folder: str) -> Run:
    """The run of a directory. Raises UserError: no run, a damaged line, an unknown metric."""
    run = Run(folder, read_config(folder + "/config.yaml"))
    if not run.text("compress.name"):
        raise UserError(f"{folder}/config.yaml: no compress.name in it, so it is not the configuration of a run")
    records, run.truncated = _read_records(folder + "/metrics.jsonl")
    run.starts, run.steps, run.evals, run.distributions, ends = records.values()
    run.end, run.begun = ends[-1] if ends else None, bool(run.steps)
    if os.path.exists(folder + "/environment.json"):
        string = r'"(?:[^"\\\0-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
        text = read_bytes(folder + "/environment.json").decode(errors="replace")  # which may be deep, or cut off
        run.environment = {key: json.loads(word) for key, word in re.findall(rf'"(host|cpu|revision)":\s*({string})', text)}
    _find_task(run)
    if run.begun:
        _derive(run)
    return run


def _table_run(row: dict[str, str], place: str, path: str) -> Run:
    def number(column: str, most: float = 1e18) -> float:
        cell = row[column]
        try:
            value = -1 if cell != cell.strip() or "_" in cell else float(cell)
        except ValueError:
            value = -1
        if value < 0 or most < value < math.inf:
            raise UserError(f"{place}: {column} is '{cell}', no number from 0 to {most:g}")
        return value if math.isfinite(value) else ABSENT

    run = Run(f"{path}/{row['run']}-s{row['seed']}", {}, {"revision": row["commit"]}, task=row["config"])
    if row["metric"] not in METRICS:
        raise UserError(f"{place}: the metric '{row['metric']}' is not known")
    for word in re.findall(r"(?:\[[^\]]*\]?|[^ \[])+", row["keys"]):  # spaces within brackets do not part words
        key, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"{place}: keys: expected KEY=VALUE, not '{word}'")
        run.config[key] = Entry(value)
    run.config["seed"] = Entry(row["seed"])
    if not run.text("compress.name"):
        raise UserError(f"{place}: no compress.name among the keys, which names the method")
    run.metric = METRICS[row["metric"]]
    scale = 0.01 if run.metric.unit == "share" else 1
    run.last = scale * number("value", 100 if run.metric is ACCURACY else 1e18)
    run.held_out = scale * number("held_out") if row["held_out"] else ABSENT
    run.wall_seconds = number("seconds")
    steps, skipped = number("steps"), number("skipped_steps")
    if math.isnan(steps + skipped):
        raise UserError(f"{place}: steps is not a number")
    counts = {"steps": int(steps), "skipped_steps": int(skipped), "parameter_checksum": row["checksum"]}
    run.end = Record(**{**_FIELDS["end"], **counts})
    run.set_bytes(*(steps * number(key + "_per_step") for key in ("sent", "received", "dense")))
    return run


def read_table(path: str) -> list[Run]:
    """The rows of a runs.csv as complete runs without steps. Raises UserError, with the line, for other text."""
    csv.field_size_limit(1 << 30)
    lines = read_bytes(path).decode("utf-8-sig", errors="surrogateescape").replace("\r", "").split("\n")
    if odd := next((number for number, line in enumerate(lines, 1) if line.count('"') % 2), 0):
        raise UserError(f"{path}:{odd}: the line ends inside quotes")
    table = [(f"{path}:{number}", cells) for number, cells in enumerate(csv.reader(lines), 1) if cells]
    if len(table) < 2:
        raise UserError(f"{path}: " + ("no run in it" if table else "is empty"))
    (place, header), *rows = table
    if missing := [column for column in _COLUMNS.split() if column not in header]:
        raise UserError(f"{place}: no column '{missing[0]}', so this is not a runs.csv of lab/train-runs")
    for place, cells in rows:
        if len(cells) != len(header):
            raise UserError(f"{place}: {len(cells)} cells, and the header has {len(header)}")
    return [_table_run(dict(zip(header, cells)), place, path) for place, cells in rows]


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Run directories, folders of them, or tables. Raises UserError if one is none of these."""
    paths = [a for a in arguments if a.endswith(".csv") and not os.path.isdir(a)]
    folders = [a.rstrip("/") or "/" for a in arguments if a not in paths]
    read: Callable[[str], list[Run]] = read_table if paths else lambda path: [read_run(path)]
    if paths and folders:
        lacks = "a table does not have the whole configuration of its runs"
        raise UserError(f"a table of runs and a run directory ({folders[0]}) cannot stand side by side: {lacks}")
    for folder in folders:
        if not os.path.isdir(folder):
            hint = "'train' writes them, to output.dir or runs/, and topknot.torch.Run"
            raise UserError(f"{folder}: no such run directory; {hint}")
        name = glob.escape(folder)
        inside = glob.glob(name + "/metrics.jsonl") or glob.glob(name + "/*/metrics.jsonl")
        if not inside:
            raise UserError(f"{folder}: no metrics.jsonl in it, so this is not a run directory (nor a folder of runs)")
        paths += sorted(map(os.path.dirname, inside))
    once: dict[str, str] = {}
    for path in paths:
        once.setdefault(os.path.realpath(path), path)
    if folders and len(once) >= _MANY and "fork" in multiprocessing.get_all_start_methods():
        return _read_by_all_cores([*once.values()])
    return [run for path in once.values() for run in read(path)]


def _read_by_all_cores(folders: list[str]) -> list[Run]:
    leave_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    pool = ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork"), initializer=leave_interrupts)
    try:
        return list(pool.map(read_run, folders, chunksize=4))
    except BrokenExecutor:
        raise MemoryError from None  # what ends a process that reads
    finally:
        pool.shutdown(cancel_futures=True)
