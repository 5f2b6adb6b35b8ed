"""Runs, read from run directories and from tables of runs (runs.csv of lab/train-runs).

A file may be read while it is written: a last line without its end is left out. Times are seconds of training.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import random
import re
import stat
from collections.abc import Callable, Sequence
from typing import Any

ABSENT = math.nan
WARM_UP = 5
"""Steps whose times do not count: they pay for caches and memory."""
WHOLE = 1000
"""Step records up to which a run is read whole. A longer run is cut into so many windows, and one random record of each is read."""
PARTS = ("data", "forward", "backward", "encode", "exposed", "decode", "update")
"""The measured parts of a step, which together with `other` make its time."""
_MOST_SECONDS = 1e15


class UserError(Exception):
    """What the user asked for cannot be done; the text says why and what helps."""


def one_line(text: str) -> str:
    """The text with control characters and invalid bytes written as escapes."""
    signs = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return re.sub("[\0-\x1f\x7f-\x9f\ud800-\udfff]", lambda m: signs.get(m[0], f"\\x{ord(m[0]) & 255:02x}"), text)


def read_bytes(path: str, most: int | None = None) -> bytes:
    """A file's bytes. Raises UserError: no such file, no plain file, more than `most` bytes."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a named pipe" if stat.S_ISFIFO(mode) else "a folder" if stat.S_ISDIR(mode) else "a device"
            raise UserError(f"'{path}' is {kind}, not a file")
        with open(path, "rb") as file:
            data = file.read() if most is None else file.read(most + 1)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None
    if most is not None and len(data) > most:
        raise UserError(f"'{path}' is longer than {most} bytes, so it is not a file of a run")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _parse(text: bytes | str) -> Any:
    """Parses JSON. Raises ValueError for other text and for endless nesting."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None


def _number(record: dict[str, Any], key: str, default: float = 0.0) -> float:
    value = record.get(key, default)
    if type(value) is float:
        return value
    if value is None:
        return ABSENT
    if not isinstance(value, int):
        raise ValueError(f"{key} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{key} is too large") from None


def _whole(record: dict[str, Any], key: str) -> int:
    value = record.get(key, 0)
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ValueError(f"{key} is not an integer")
    return value


def _text(record: dict[str, Any], key: str, default: str = "") -> str:
    value = record.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} is not text")
    return value


@dataclasses.dataclass(frozen=True)
class Metric:
    """The figure that a run's evaluations measure. Of the unit `share` it is from 0 to 1 and shown as percent."""

    name: str
    unit: str
    higher_is_better: bool
    set: str = "test"

    def value(self, loss: float, accuracy: float) -> float:
        """The figure of an evaluation with this mean loss and accuracy."""
        if self.name == "perplexity":
            try:
                return math.exp(loss)
            except OverflowError:
                return math.inf
        return accuracy if self.name == "accuracy" else 1 - accuracy if self.name == "word error rate" else loss

    @property
    def second(self) -> str:
        """A second figure of the evaluations, such as "top-5 accuracy"; "" if there is none."""
        names = {"accuracy": "top-5 accuracy", "word error rate": "character error rate", "perplexity": "bits per byte"}
        return names.get(self.name, "")

    @property
    def long_title(self) -> str:
        """ "test accuracy", "validation perplexity"."""
        return f"{self.set} {self.name}"

    @property
    def title(self) -> str:
        """As tables have it: "accuracy", "test loss"."""
        return self.name if self.name == "accuracy" else self.long_title

    @property
    def rate_unit(self) -> str:
        """What is counted per second."""
        return {"perplexity": "tokens/s", "word error rate": "recordings/s"}.get(self.name, "images/s")

    def reaches(self, value: float, target: float) -> bool:
        """Whether the value is as good as the target or better."""
        return value >= target if self.higher_is_better else value <= target


ACCURACY = Metric("accuracy", "share", True)
SQUARED_ERROR = Metric("loss", "mean squared error", False)
PERPLEXITY = Metric("perplexity", "per token", False, "validation")
WORD_ERRORS = Metric("word error rate", "share", False)
METRICS = {metric.name: metric for metric in (ACCURACY, SQUARED_ERROR, PERPLEXITY, WORD_ERRORS)}


@dataclasses.dataclass
class Entry:
    """A key's value as config.yaml has it; `given` is false for a default."""

    text: str
    given: bool = True


def plain_text(text: str) -> str:
    """A value of config.yaml without its quotes."""
    if len(text) < 2 or text[0] != '"':
        return text
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text[1:-1], flags=re.S)


@dataclasses.dataclass
class Step:
    """A step record: running totals and rates at the end of that step."""

    step: int
    epoch: float
    time: float
    loss: float
    sent: float
    received: float
    dense: float
    rate: float
    parts: tuple[float, ...]
    communicate: float
    sent_so_far: float = 0.0


@dataclasses.dataclass
class Eval:
    """An evaluation: mean loss, accuracy (0 to 1) and second figures by metric; `value` is the metric's."""

    step: int
    epoch: float
    time: float
    loss: float
    accuracy: float
    seconds: dict[str, float]
    value: float = ABSENT


@dataclasses.dataclass
class End:
    """The last record of a run that came to its end."""

    steps: int = 0
    skipped_steps: int = 0
    failed: bool = False
    reason: str = ""
    checksum: str = ""
    eval_seconds: float = ABSENT
    startup_seconds: float = ABSENT
    step_p50_s: float = ABSENT
    step_p95_s: float = ABSENT


@dataclasses.dataclass
class Run:
    """A run. Bytes are totals so far, of one rank; `ABSENT` (NaN) stands for what is not known."""

    path: str
    config: dict[str, Entry]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    evals: list[Eval] = dataclasses.field(default_factory=list)
    distributions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    end: End | None = None
    truncated: bool = False
    task: str = ""
    metric: Metric = ACCURACY
    network: str = ""
    diverged: bool = False
    best: float = ABSENT
    last: float = ABSENT
    second: float = ABSENT
    held_out: float = ABSENT
    rate: float = ABSENT
    wall_seconds: float = ABSENT
    bytes_sent: float = 0.0
    bytes_dense: float = 0.0
    bytes_received: float = ABSENT
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    def text(self, key: str) -> str:
        """A key's value without quotes; "" if the run has none."""
        entry = self.config.get(key)
        return plain_text(entry.text) if entry else ""

    @property
    def last_step(self) -> int:
        """The steps that the run made."""
        return self.end.steps if self.end else self.steps[-1].step


def read_config(path: str) -> dict[str, Entry]:
    """config.yaml as keys with their sections. Raises UserError with path and line."""
    result: dict[str, Entry] = {}
    section = ""
    for number, line in enumerate(read_bytes(path, 1 << 20).decode(errors="surrogateescape").split("\n"), 1):
        text = line.strip(" \t\r")
        if not text or text[0] == "#":
            continue
        name, colon, value = text.partition(":")
        if not colon or not name:
            raise UserError(f"{path}:{number}: not 'key: value', as a run writes it")
        if line[0] != " ":
            section = ""
        value = value.lstrip(" ")
        if not value or value[0] == "#":
            section = name + "."
            continue
        quoted = re.match(r'"(?:[^"\\]|\\.)*"?', value)
        end = quoted.end() if quoted else value.find(" #") if " #" in value else len(value)
        key = (section if line[0] == " " else "") + name
        result.setdefault(key, Entry(value[:end].strip(), "#" in value[end:]))
    return result


def _read_environment(path: str) -> dict[str, str]:
    if not os.path.exists(path):
        return {}
    try:
        known = _parse(read_bytes(path, 16 << 20).decode(errors="replace"))
    except ValueError:
        # The file is not JSON as a whole: take the texts that can be found in it.
        return dict(re.findall(r'"(host|cpu|revision)":\s*"([^"\\]*)"', read_bytes(path).decode(errors="replace")))
    return {key: value for key, value in known.items() if isinstance(value, str)} if isinstance(known, dict) else {}


_STEP = b'{"event":"step"'


def _sampled(lines: list[bytes]) -> set[int]:
    """Numbers of the step lines of a long run that are read: the first and last ones, and one of each window."""
    steps = [i for i, line in enumerate(lines) if line.startswith(_STEP)]
    if len(steps) <= WHOLE:
        return set(steps)
    draw = random.Random(len(steps))  # not every n-th: the exchanges of local steps come at every n-th too
    bounds = [len(steps) * i // WHOLE for i in range(WHOLE + 1)]
    chosen = {steps[int(low + draw.random() * (high - low))] for low, high in zip(bounds, bounds[1:])}
    return chosen.union(steps[: 2 * WARM_UP], steps[-1:])


def _read_metrics(run: Run, path: str) -> dict[str, Any]:
    """Fills in the records, and returns the one of the end."""
    lines = read_bytes(path).split(b"\n")
    cut = lines.pop()  # "" behind the last newline
    kept = _sampled(lines)
    end: dict[str, Any] = {}
    for i, line in enumerate(lines + [cut] if cut else lines):
        if not line or (i not in kept and i < len(lines) and line.startswith(_STEP) and line.endswith(b"}")):
            continue
        try:
            record = _parse(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
            _add(run, record, end)
        except ValueError:  # of JSON and of Unicode too
            if i == len(lines):
                run.truncated = True
                break
            raise UserError(f"{path}:{i + 1}: damaged line, not a JSON object of a run; remove it or the run") from None
    return end


_FIGURES = "epoch time_s loss bytes_sent bytes_received bytes_dense images_per_second communicate_s".split()
_FIGURES += [part + "_s" for part in PARTS]


def _add(run: Run, record: dict[str, Any], end: dict[str, Any]) -> None:
    event = record.get("event")
    if event == "step":
        epoch, time, loss, sent, received, dense, rate, communicate, *parts = [_number(record, key) for key in _FIGURES]
        run.steps.append(Step(_whole(record, "step"), epoch, time, loss, sent, received, dense, rate, tuple(parts), communicate))
    elif event == "eval":
        epoch, time = _number(record, "epoch"), _number(record, "time_s")
        seconds = {"accuracy": "top5_accuracy", "perplexity": "bits_per_byte", "word error rate": "character_error_rate"}
        figures = {metric: _number(record, "test_" + key) for metric, key in seconds.items()}
        loss, accuracy = _number(record, "test_loss"), _number(record, "test_accuracy")
        run.evals.append(Eval(_whole(record, "step"), epoch, time, loss, accuracy, figures))
    elif event == "distribution":
        counts = record.get("histogram", [])
        if not isinstance(counts, list) or len(counts) > 10000 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in counts):
            raise ValueError("no distribution")
        if _whole(record, "size") <= 0:
            raise ValueError("no distribution")
        keys = ("mean", "deviation", "median", "laplace_scale", "contraction", "bound", "bell_bound")
        figures = {key: _number(record, key) for key in keys}
        run.distributions.append({"step": _whole(record, "step"), "size": record["size"], "histogram": counts, **figures})
    elif event == "start":
        for key in ("backend", "task", "metric", "metric_unit", "metric_set", "revision"):
            _text(record, key)
        run.starts.append(record)
    elif event == "end":
        run.end = End(
            _whole(record, "steps"), _whole(record, "skipped_steps"), bool(record.get("failed", False)), _text(record, "reason"),
            _text(record, "parameter_checksum"), *(_number(record, key) for key in ("eval_seconds", "startup_seconds", "step_p50_s", "step_p95_s")),
        )  # fmt: skip
        end.clear()
        for key in ("test_accuracy", "best_test_accuracy", "held_out_loss"):
            if key in record:
                end[key] = _number(record, key)
        for key in ("images_per_second", "wall_seconds", "bytes_sent", "bytes_dense", "bytes_received"):
            end[key] = _number(record, key)


def _find_task(run: Run) -> None:
    """Task, metric and network. Of files that do not record them, the data set tells: the values do not."""
    run.network = run.text("dist.backend")
    known = False
    for start in run.starts:
        run.network = start.get("backend") or run.network
        if start.get("metric"):
            known = True
            run.task = start.get("task", "")
            higher = bool(start.get("higher_is_better", True))
            run.metric = Metric(start["metric"], start.get("metric_unit", ""), higher, start.get("metric_set", "test"))
    if known and run.metric.name not in METRICS:
        raise UserError(
            f"{run.path}: its metric is '{run.metric.name}', and this version compares accuracy, loss, perplexity and word error rate "
            "only; use the compare of the version that trained it"
        )
    if known:
        return
    data = run.text("data.name")
    number: Callable[..., Any] = lambda key, standard: value if (value := run.text(key)) not in ("", "0") else standard
    size = number("data.image_size", "32")
    run.metric = SQUARED_ERROR if data == "synthetic_regression" else ACCURACY
    run.task = data + {
        "cifar10": ", 10 classes, samples [3, 32, 32]",
        "mnist": ", 10 classes, samples [1, 28, 28]",
        "synthetic_regression": ", 1 target, samples [64, 1, 1]",
        "synthetic_images": f", {number('data.classes', '10')} classes, samples [3, {size}, {size}]",
    }.get(data, "")


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values; ABSENT if there is none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else ABSENT


def _mean_times(steps: list[Step]) -> dict[str, float]:
    """Seconds of a step: the total is that of all steps, the parts those of the steps whose parts were measured."""
    first = WARM_UP if len(steps) > 2 * WARM_UP else 0
    seconds, count, rows, hidden = 0.0, 0, [], []
    for i in range(first, len(steps)):
        step, before = steps[i], steps[i - 1] if i else None
        taken = step.time - (before.time if before else 0)
        if abs(taken) < _MOST_SECONDS:
            seconds += max(0.0, taken)
            count += max(1, step.step - (before.step if before else 0))
        if abs(sum(step.parts)) < _MOST_SECONDS:
            rows.append(step.parts)
            hidden.append(max(0.0, step.communicate - step.parts[4]))
    total = seconds / count if count else ABSENT
    if not rows:
        return {**dict.fromkeys((*PARTS, "hidden"), ABSENT), "total": total, "other": total}
    times = {part: sum(column) / len(rows) for part, column in zip(PARTS, zip(*rows))}
    measured = sum(times.values())
    times["total"] = max(measured, total) if math.isfinite(total) else measured
    times["other"] = times["total"] - measured
    times["hidden"] = finite_mean(hidden)
    return times


def _derive(run: Run, end: dict[str, float]) -> None:
    for at in run.evals:
        at.value = run.metric.value(at.loss, at.accuracy)
        if not math.isfinite(at.value):
            run.last = ABSENT
            continue
        run.last = at.value
        if (second := at.seconds.get(run.metric.name, ABSENT)) > 0:
            run.second = second
        if math.isnan(run.best) or run.metric.reaches(at.value, run.best):
            run.best = at.value
    before, received = 0, 0.0
    for step in run.steps:
        count = max(1, step.step - before)
        before = step.step
        run.bytes_sent += count * step.sent
        run.bytes_dense += count * step.dense
        received += count * step.received
        step.sent_so_far = run.bytes_sent
    run.times = _mean_times(run.steps)
    rates = [step.rate for step in run.steps[WARM_UP if len(run.steps) > WARM_UP else 0 :]]
    slowness = finite_mean([1 / rate for rate in rates if math.isfinite(rate) and rate > 0])
    run.rate = 1 / slowness if slowness > 0 else ABSENT
    run.wall_seconds = run.steps[-1].time
    if run.end:
        if run.metric.name == "accuracy":
            run.last, run.best = end.get("test_accuracy", run.last), end.get("best_test_accuracy", run.best)
        if end.get("held_out_loss", 0) > 0:
            run.held_out = run.metric.value(end["held_out_loss"], 0)
        run.rate, run.wall_seconds = end["images_per_second"], end["wall_seconds"]
        run.bytes_sent, run.bytes_dense, received = end["bytes_sent"], end["bytes_dense"], end["bytes_received"]
    if received > 0 or run.text("dist.ranks") == "1":
        run.bytes_received = received
    run.diverged = bool(run.evals) and math.isnan(run.last)


def read_run(folder: str) -> Run:
    """The run of a directory. Raises UserError: no run, a damaged line, no step yet, an unknown metric."""
    for name, why in (
        ("metrics.jsonl", "so this is not a run directory"),
        ("config.yaml", "the configuration is needed to compare the run"),
    ):
        if not os.path.exists(os.path.join(folder, name)):
            raise UserError(f"{folder}: no {name} in it, {why}" if os.path.isdir(folder) else f"{folder}: no such run directory")
    run = Run(folder, read_config(folder + "/config.yaml"))
    if not run.text("compress.name"):
        raise UserError(f"{folder}/config.yaml: no compress.name in it, so it is not the configuration of a run")
    end = _read_metrics(run, folder + "/metrics.jsonl")
    if not run.steps:
        raise UserError(f"{folder}: the run has not finished a step yet; there is nothing to compare")
    run.environment = _read_environment(folder + "/environment.json")
    _find_task(run)
    _derive(run, end)
    return run


def _table_number(row: dict[str, str], place: str, column: str, most: float = 1e18) -> float:
    cell = row[column]
    try:
        if cell != cell.strip() or "_" in cell:
            raise ValueError
        value = float(cell)
        if value < 0 or (math.isfinite(value) and value > most):
            raise ValueError
    except ValueError:
        raise UserError(f"{place}: {column} is '{cell}', no number from 0 to {most:g}") from None
    return value if math.isfinite(value) else ABSENT


class _Row(dict[str, str]):
    """A table's row; a column that it lacks is refused."""

    place = ""

    def __missing__(self, column: str) -> str:
        raise UserError(f"{self.place}: no column '{column}', so this is not a runs.csv of lab/train-runs")


def _table_run(row: _Row, path: str) -> Run:
    place = row.place
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
    number: Callable[..., Any] = lambda column, most=1e18: _table_number(row, place, column, most)
    run.last = scale * number("value", 100 if run.metric is ACCURACY else 1e18)
    run.diverged = math.isnan(run.last)
    run.held_out = scale * number("held_out") if row["held_out"] else ABSENT
    run.wall_seconds = number("seconds")
    counts = [number(column) for column in ("steps", "skipped_steps")]
    if any(math.isnan(count) for count in counts):
        raise UserError(f"{place}: steps is not a number")
    run.end = End(int(counts[0]), int(counts[1]), checksum=row["checksum"])
    totals = (counts[0] * number(key + "_per_step") for key in ("sent", "received", "dense"))
    run.bytes_sent, run.bytes_received, run.bytes_dense = totals
    return run


def read_table(path: str) -> list[Run]:
    """The rows of a runs.csv as complete runs without steps. Raises UserError, with the line, for other text."""
    runs: list[Run] = []
    header: list[str] | None = None
    csv.field_size_limit(1 << 30)
    text = read_bytes(path).decode("utf-8-sig", errors="surrogateescape")
    for number, line in enumerate(text.replace("\r", "").split("\n"), 1):
        if not line:
            continue
        if line.count('"') % 2:
            raise UserError(f"{path}:{number}: the line ends inside quotes")
        try:
            cells = next(csv.reader([line]))
        except csv.Error as error:
            raise UserError(f"{path}:{number}: {error}") from None
        if header is None:
            header = cells
            continue
        if len(cells) != len(header):
            raise UserError(f"{path}:{number}: {len(cells)} cells, and the header has {len(header)}")
        row = _Row(zip(header, cells))
        row.place = f"{path}:{number}"
        runs.append(_table_run(row, path))
    if not runs:
        raise UserError(f"{path}: " + ("no run in it" if header else "is empty"))
    return runs


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Run directories, folders of them, or tables. Raises UserError if one is none of these."""
    tables = [a for a in arguments if a.endswith(".csv") and not os.path.isdir(a)]
    folders = [a for a in arguments if a not in tables]
    if tables and folders:
        raise UserError(
            f"a table of runs and a run directory ({folders[0]}) cannot stand side by side: a table does not have the whole "
            "configuration of its runs"
        )
    runs = [run for table in {os.path.realpath(t): t for t in reversed(tables)}.values() for run in read_table(table)]
    found: dict[str, str] = {}
    for folder in (folder.rstrip("/") or "/" for folder in folders):
        if not os.path.isdir(folder):
            raise UserError(
                f"{folder}: no such run directory; 'train' writes them, to output.dir or runs/, and topknot.torch.Run"
            )
        inside = [folder]
        if not os.path.exists(folder + "/metrics.jsonl"):
            try:
                inside = sorted(e.path for e in os.scandir(folder) if os.path.exists(e.path + "/metrics.jsonl"))
            except OSError as error:
                raise UserError(f"{folder}: {error.strerror}") from None
        if not inside:
            raise UserError(f"{folder}: no metrics.jsonl in it, so this is not a run directory (nor a folder of runs)")
        for path in inside:
            found.setdefault(os.path.realpath(path), path)
    return runs + [read_run(path) for path in found.values()]
