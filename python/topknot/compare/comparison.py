"""Runs side by side: methods with means over seeds, a target, a baseline, and what makes the comparison unfair."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from .read import ABSENT, PARTS, Eval, Metric, Run, UserError, finite_mean, plain_text

LONGEST_KEYS, LONGEST_NAME = 32, 40
"""Characters of keys, and of a folder's name, that a method's name may have."""
# What tells runs of one method apart: where things lie and where ranks meet.
_APART = {"seed", "data.root", "train.algorithm_cache", "dist.master", "dist.token"}
# What is recorded or shown beside the training: it makes no other baseline.
_RECORDS = (
    "compress.",
    "exchange.",
    *(f"train.{k}" for k in "distribution_every record_gradients profile_steps log_every".split()),
)
_UNFAIR = (
    "model.name data.name data.batch_size data.train_size data.test_size data.noise dist.ranks dist.backend dist.link.rate "
    "dist.link.latency train.threads train.epochs"
).split()
_UNEQUAL = 1.3  # forward and backward of a method over the baseline's


@dataclasses.dataclass
class Stat:
    """A mean with the sample deviation (0 of one value) and the number of values; without values the mean is ABSENT."""

    mean: float = ABSENT
    deviation: float = 0.0
    count: int = 0


def stat_of(values: Iterable[float]) -> Stat:
    """The mean and deviation of the finite values."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return Stat()
    mean = sum(known) / len(known)
    squares = sum((value - mean) * (value - mean) for value in known)
    return Stat(mean, math.sqrt(squares / (len(known) - 1)) if len(known) > 1 else 0.0, len(known))


@dataclasses.dataclass
class Method:
    """Runs of one configuration. `counted` are the complete ones, or all of them where none is."""

    compressor: str
    network: str
    config: dict[str, str]
    name: str = ""
    runs: list[int] = dataclasses.field(default_factory=list)
    counted: list[int] = dataclasses.field(default_factory=list)
    complete: bool = False
    baseline: int | None = None
    best: Stat = dataclasses.field(default_factory=Stat)
    last: Stat = dataclasses.field(default_factory=Stat)
    second: Stat = dataclasses.field(default_factory=Stat)
    held_out: Stat = dataclasses.field(default_factory=Stat)
    images_per_second: Stat = dataclasses.field(default_factory=Stat)
    wall_seconds: Stat = dataclasses.field(default_factory=Stat)
    bytes_sent: Stat = dataclasses.field(default_factory=Stat)
    bytes_received: Stat = dataclasses.field(default_factory=Stat)
    seconds_to_target: Stat = dataclasses.field(default_factory=Stat)
    steps_to_target: Stat = dataclasses.field(default_factory=Stat)
    reached: int = 0
    dense_ratio: float = ABSENT
    bits: float = ABSENT
    speed_up: float = ABSENT
    target_speed_up: float = ABSENT
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Whether nothing is compressed."""
        return self.compressor == "dense"


@dataclasses.dataclass
class Comparison:
    """Runs of one task and metric; the methods with dense ones first. `differing`: keys, with a value by method."""

    runs: list[Run]
    methods: list[Method]
    task: str
    metric: Metric
    differing: list[tuple[str, list[str]]]
    target: float = ABSENT
    target_reason: str = ""
    warnings: list[str] = dataclasses.field(default_factory=list)
    limits: list[str] = dataclasses.field(default_factory=list)
    curves: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """What charts.curves_of has found, by quantity."""

    def has(self, stat: str) -> bool:
        """Whether some method has this figure."""
        return any(getattr(method, stat).count for method in self.methods)

    @property
    def has_times(self) -> bool:
        """Whether step times are known: rows of a table have none."""
        return any(method.times.get("total", 0) > 0 for method in self.methods)

    @property
    def shared_network(self) -> str:
        """The network of all methods; "" if they differ in it."""
        networks = {method.network for method in self.methods}
        return networks.pop() if len(networks) == 1 else ""

    @property
    def emulated_link(self) -> str:
        """The link of all methods if it is emulated, in few words if they differ in it; else ""."""
        links = {m.network[m.network.find("emulated link") :] if "emulated link" in m.network else "" for m in self.methods}
        return links.pop() if len(links) == 1 else "partly emulated links" if "" in links else "emulated links"

    @property
    def base_name(self) -> str:
        """What speed-ups are over: a method, or words for several."""
        names = {self.methods[m.baseline].name for m in self.methods if m.baseline is not None}
        return names.pop() if len(names) == 1 else "the dense run of the same configuration"

    def tells_apart(self, values: list[str], method: int) -> bool:
        """Whether a differing key tells this method from another one of its compressor."""
        same = self.methods[method].compressor
        return any(m.compressor == same and value != values[method] for m, value in zip(self.methods, values))


# How keys read in a name; other keys stand before their value, and switches alone.
_WORDS = {"compress.chunk": "chunks of {}", "compress.values": "{} values", "exchange.every": "every {}"}


def in_words(key: str, value: str) -> str:
    """ "density 0.01", "int8 values", "no nesterov"; "" for a value that is absent or the method's own choice."""
    if value in ('""', "-"):
        return ""
    name = key.rpartition(".")[2].replace("_", " ")
    if value in ("true", "false"):
        return name if value == "true" else "no " + name
    return _WORDS.get(key, name + " {}").format(plain_text(value))


def method_name(compressor: str, words: Iterable[str]) -> str:
    """ "dgc int8 values, every 10"."""
    return " ".join(part for part in (compressor, ", ".join(filter(None, words))) if part)


def _of_compressed(key: str) -> bool:
    return key.startswith("compress.") and key != "compress.name"


def _default(runs: list[Run], key: str) -> str:
    return next((entry.text for run in runs if (entry := run.config.get(key)) and not entry.given), "-")


def _group(runs: list[Run], keys: list[str]) -> list[Method]:
    methods: dict[tuple[str, ...], Method] = {}
    defaults = {key: _default(runs, key) for key in keys}
    for i, run in enumerate(runs):
        name = run.text("compress.name")
        known = {key: entry.text for key, entry in run.config.items()}
        config = {key: "-" if name == "dense" and _of_compressed(key) else known.get(key, defaults[key]) for key in keys}
        methods.setdefault(tuple(config.values()), Method(name, run.network, config)).runs.append(i)
    ordered = sorted(methods.values(), key=lambda method: not method.dense)
    for method in ordered:
        method.counted = [i for i in method.runs if runs[i].end]
        method.complete = bool(method.counted)
        method.counted = method.counted or method.runs
    return ordered


def _differing(runs: list[Run], methods: list[Method], keys: list[str]) -> list[tuple[str, list[str]]]:
    result = []
    for key in keys:
        values = [method.config[key] for method in methods]
        plain = _of_compressed(key) and set(values) <= {"-", _default(runs, key)}
        if len(set(values)) > 1 and not plain:
            result.append((key, values))
    return result


def _folder_name(runs: list[Run], method: Method) -> str:
    """The name that the runs' folders share but for the seed: "dgc_slow" of dgc_slow-s1 and dgc_slow-s2; else ""."""
    names = {re.sub(r"-s[0-9]+$", "", os.path.basename(os.path.normpath(runs[i].path))) for i in method.runs}
    name = names.pop()
    return name if not names and len(name) <= LONGEST_NAME and method.compressor in name else ""


def _name(c: Comparison) -> None:
    """Names each method by its compressor and the keys that tell it from others of it. Where they are many, by the runs'
    folders, or by as few keys as make the names differ."""
    rows = [[(k, in_words(k, v[i])) for k, v in c.differing if c.tells_apart(v, i)] for i in range(len(c.methods))]
    long = {m.compressor for m, row in zip(c.methods, rows) if len(method_name("", (text for _, text in row))) > LONGEST_KEYS}
    folders = [_folder_name(c.runs, method) for method in c.methods]
    by_folder = all(f and folders.count(f) == 1 for f, m in zip(folders, c.methods) if m.compressor in long)
    for compressor in {method.compressor for method in c.methods}:
        own = [i for i, method in enumerate(c.methods) if method.compressor == compressor]
        keys = [key for key, values in c.differing if c.tells_apart(values, own[0])]
        if compressor in long and not by_folder:
            keys = _fewest(c, own, keys)
        for i in own:
            c.methods[i].name = method_name(compressor, (text for key, text in rows[i] if key in keys))
            if compressor in long and by_folder:
                c.methods[i].name = folders[i]
    seen: dict[str, int] = {}
    for method in c.methods:  # two values that a name does not show, such as "-" and ""
        seen[method.name] = seen.get(method.name, 0) + 1
        if seen[method.name] > 1:
            method.name += f" ({seen[method.name]})"


def _fewest(c: Comparison, own: list[int], keys: list[str]) -> list[str]:
    """Few keys that tell the methods apart, those of the method itself before others."""
    values = dict(c.differing)
    chosen: list[str] = []
    names: Callable[..., Any] = lambda some: len({tuple(in_words(key, values[key][i]) for key in some) for i in own})
    keys = sorted(keys, key=lambda key: not key.startswith(("compress.", "exchange.")))
    while keys and names(chosen) < names(keys):
        chosen.append(max((key for key in keys if key not in chosen), key=lambda key: names([*chosen, key])))
    return [key for key in keys if key in chosen]


def _choose_baselines(c: Comparison, name: str | None) -> None:
    """Of each method the dense one that differs in nothing but keys of the method, or the one that was asked for."""
    if name is not None:
        names = [method.name for method in c.methods]
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean '{close[0]}'?" if close else "there are " + ", ".join(names)
            raise UserError(f"--baseline: there is no method '{name}'; {hint}")
        for method in c.methods:
            method.baseline = names.index(name)
        return
    rows = [values for key, values in c.differing if not key.startswith(_RECORDS)]
    for i, method in enumerate(c.methods):
        nearest = (j for j, other in enumerate(c.methods) if other.dense and all(v[i] == v[j] for v in rows))
        method.baseline = i if method.dense else next(nearest, None)


def _sum_up(runs: list[Run], m: Method) -> None:
    own = [runs[i] for i in m.counted]
    over: Callable[..., Any] = lambda get: stat_of(get(run) for run in own)
    m.best, m.last, m.second, m.held_out = (over(lambda r, k=k: getattr(r, k)) for k in ("best", "last", "second", "held_out"))
    if any(run.diverged for run in own):  # a mean of the others would hide it
        m.last, m.held_out = Stat(), Stat()
    m.images_per_second, m.wall_seconds = over(lambda r: r.rate), over(lambda r: r.wall_seconds)
    per_step: Callable[[Run, float], float] = lambda r, total: total / r.last_step if r.last_step > 0 else ABSENT
    m.bytes_sent = over(lambda r: per_step(r, r.bytes_sent))
    m.bytes_received = over(lambda r: per_step(r, r.bytes_received))
    m.dense_ratio = over(lambda r: r.bytes_dense / r.bytes_sent if r.bytes_sent >= 0.5 else ABSENT).mean
    m.bits = 32 / m.dense_ratio if m.dense_ratio > 0 else ABSENT
    m.times = {part: finite_mean([r.times.get(part, ABSENT) for r in own]) for part in ("total", *PARTS, "other", "hidden")}


def reaching(run: Run, target: float) -> Eval | None:
    """The first evaluation that reaches the target."""
    return next((e for e in run.evals if run.metric.reaches(e.value, target)), None)


def value_text(metric: Metric, stat: Stat) -> str:
    """ "87.4 ± 1.2 %", "0.05"; "-" if absent."""
    if metric.unit == "share":
        return with_deviation(stat, "{:.1f}", 100, " %")
    return with_deviation(stat, "{:.4g}")


def number_text(pattern: str, value: float) -> str:
    """The number by the pattern; "-" if it is not finite."""
    return pattern.format(value) if math.isfinite(value) else "-"


def with_deviation(stat: Stat, pattern: str, factor: float = 1, unit: str = "") -> str:
    """The mean with its deviation, times `factor`; "-" if absent."""
    if not stat.count or not math.isfinite(factor * stat.mean):
        return "-"
    spread = " ± " + number_text(pattern, factor * stat.deviation) if stat.count > 1 else ""
    return pattern.format(factor * stat.mean) + spread + unit


def _choose_target(c: Comparison, target: float | None) -> None:
    if target is not None:
        if not any(run.evals for run in c.runs):
            raise UserError("--target: these runs have no evaluations that could reach it")
        c.target, c.target_reason = target, "as asked for"
    elif c.metric.name != "loss":
        best = max if c.metric.higher_is_better else min
        worst = min if c.metric.higher_is_better else max
        known = [m for m in c.methods if math.isfinite(m.best.mean)]
        dense = [m.best.mean for m in known if m.dense]
        percent = 95 if c.metric.higher_is_better else 105
        if dense and best(dense) > 0:  # a run whose metric stays 0 has reached it from the start
            c.target = percent / 100 * best(dense)
            c.target_reason = f"{percent} % of the best dense {c.metric.title}, {value_text(c.metric, stat_of([best(dense)]))}"
        elif not dense and known and worst(m.best.mean for m in known) > 0:
            c.target = worst(m.best.mean for m in known)
            which = "lowest" if c.metric.higher_is_better else "greatest"
            c.target_reason = f"the {which} of the methods' best values, as there is no dense run"
    if math.isnan(c.target):
        return
    for m in c.methods:
        at = [e for i in m.counted if (e := reaching(c.runs[i], c.target))]
        m.seconds_to_target, m.steps_to_target = stat_of(e.time for e in at), stat_of(e.step for e in at)
        m.reached = m.seconds_to_target.count


def _measure_speed_ups(methods: list[Method]) -> None:
    for m in methods:
        if m.baseline is None:
            continue
        base = methods[m.baseline]
        if base.images_per_second.mean > 0:
            m.speed_up = m.images_per_second.mean / base.images_per_second.mean
        # Only if every run reached the target; otherwise the mean would be of the fastest ones.
        if m.reached == len(m.counted) and base.reached == len(base.counted) and m.seconds_to_target.mean > 0:
            m.target_speed_up = base.seconds_to_target.mean / m.seconds_to_target.mean


def _check_one_task(runs: list[Run]) -> None:
    by: Callable[..., Any] = lambda metric: f"by {metric.name}" + (f" ({metric.unit})" if metric.unit else "")
    described: Callable[..., Any] = lambda run: f"{run.path} has {run.task or 'an unnamed task'} {by(run.metric)}"
    first = next((run for run in runs if run.task), runs[0])  # a run that names no task is compared with any
    for run in runs:
        if run.task not in ("", first.task) or run.metric != first.metric:
            raise UserError(
                f"these runs have different tasks, so their results cannot be compared: {described(first)}; {described(run)}. Compare "
                "the runs of each task by themselves"
            )


def _warn_of_run(c: Comparison, run: Run) -> Iterable[str]:
    networks = [start.get("backend", "") for start in run.starts]
    if other := next((network for network in networks if network != networks[0]), None):
        yield f"{run.path} went on over another network ({networks[0]}, then {other}), and its times are of both"
    if run.diverged:
        yield (
            f"the last {c.metric.title} of {run.path} is not finite: its method has no final value, and the other means are of the "
            "evaluations that were finite"
        )
    if not run.end:
        cut = ", in the middle of a line" if run.truncated else ""
        yield (
            f"{run.path} is incomplete: it stopped after step {run.last_step}{cut}. Its curve is thin and ends where the run did; "
            "means leave it out where they can"
        )
    elif run.end.failed:
        yield f"{run.path} has failed: {run.end.reason}"
    elif run.end.skipped_steps > 0:
        yield f"{run.path} skipped {run.end.skipped_steps} steps that were not finite"


def _warn(c: Comparison) -> Iterable[str]:
    for run in c.runs:
        yield from _warn_of_run(c, run)
    places = [{run.environment[key] for run in c.runs if key in run.environment} for key in ("cpu", "host")]
    if any(len(place) > 1 for place in places):
        yield "the runs come from different machines: times and speed-ups do not compare the methods alone"
    if c.task and (unnamed := [run.path for run in c.runs if not run.task]):
        yield f"{', '.join(unnamed)}: the task is not recorded; it is taken for that of the others, {c.task}"
    revisions = {run.environment["revision"] for run in c.runs if "revision" in run.environment}
    revisions |= {start["revision"] for run in c.runs for start in run.starts if start.get("revision")}
    if len(revisions) > 1:
        yield f"the runs are of different commits ({', '.join(sorted(revisions))}), so more than the methods is compared"
    for m in c.methods:
        seeds: set[str] = set()
        for run in (c.runs[i] for i in m.counted):
            if run.text("seed") in seeds:
                yield f"{m.name} has seed {run.text('seed')} more than once ({run.path}): its deviation is not that of seeds"
            seeds.add(run.text("seed"))
    for key, _ in c.differing:
        if key in _UNFAIR:
            yield f"{key} differs between the methods, so more than the compression is compared"
    for m in c.methods:
        base = c.methods[m.baseline] if m.baseline is not None else m
        here, there = (o.times["forward"] + o.times["backward"] for o in (m, base))
        if here > 0 and there > 0 and max(here / there, there / here) >= _UNEQUAL:
            yield (
                f"forward and backward of a step took {1e3 * here:.3g} ms under {m.name} and {1e3 * there:.3g} ms under {base.name}: the "
                "machine was not equally free, communication took its cores, or the programs differ, so times do not compare the "
                "methods alone"
            )
    if c.has_times and not any(m.dense for m in c.methods):
        yield "there is no dense run, so there is no speed-up over it"
    elif c.has_times:
        for m in (m for m in c.methods if m.baseline is None):
            yield f"{m.name}: no dense run differs from it in nothing but the method, so there is no speed-up; --baseline NAME chooses one"


def _limits(c: Comparison) -> Iterable[str]:
    single = [m.name for m in c.methods if len(m.counted) == 1]
    if single:
        some = len(single) < len(c.methods)
        who = (", ".join(single) if some else "all methods") + (" has" if some and len(single) == 1 else " have")
        yield f"whether a difference is more than chance: {who} one seed"
    if c.has_times and c.shared_network == "threads":
        yield "the gain on a network: the ranks are threads of one machine without a link between them"


def compare_runs(runs: list[Run], target: float | None = None, baseline: str | None = None) -> Comparison:
    """Compares runs of one task. `target` is a value of the metric, `baseline` a method's name. Raises UserError if tasks or
    metrics differ, if there is no such method, and for a target of runs without evaluations."""
    _check_one_task(runs)
    keys = list(dict.fromkeys(key for run in runs for key in run.config if key not in _APART and not key.startswith("output.")))
    methods = _group(runs, keys)
    task = next((run.task for run in runs if run.task), "")
    c = Comparison(runs, methods, task, runs[0].metric, _differing(runs, methods, keys))
    _name(c)
    _choose_baselines(c, baseline)
    for method in methods:
        _sum_up(runs, method)
    _choose_target(c, target)
    _measure_speed_ups(methods)
    c.warnings, c.limits = list(_warn(c)), list(_limits(c))
    return c
