"""Runs side by side: methods with means over seeds, a target, a baseline, and what makes the comparison unfair."""

import contextlib
import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .read import ABSENT, MOST, PARTS, Metric, Run, Stat, UserError, plain_text, stat_of

LONGEST_KEYS, LONGEST_NAME = 32, 40
"""Characters of keys, and of a folder's name, that a method's name may have."""
STEP_PARTS = ("step", *PARTS, "other", "hidden")
"""What a step's time is shown as: the whole, its parts, and the communication beside them."""
_MEANS = ("best", "last", "second", "held_out", "wall_seconds", "images_per_second", "bytes_sent", "bytes_received")
# What tells runs of one method apart: where things lie and where ranks meet.
_APART = {"seed", "data.root", "train.algorithm_cache", "dist.master", "dist.token"}
# What makes no other baseline: the method, and what is recorded or shown beside the training.
_METHOD = ("compress.", "exchange.")
_RECORDED = "train.distribution_every train.record_gradients train.profile_steps train.log_every".split()
_UNFAIR = (
    "model.name data.name data.batch_size data.train_size data.test_size data.noise dist.ranks dist.backend dist.link.rate "
    "dist.link.latency train.threads train.epochs"
).split()
_UNEQUAL = 1.3  # forward and backward of a method over the baseline's
_AMOUNTS = {"compress.density", "compress.warmup", "compress.threshold", "compress.rank", "compress.levels"}
# How keys read in a name, in this order; then come other keys before their values, and switches alone.
_WORDS = dict(zip(("exchange.every", "compress.density", "compress.chunk", "compress.values"),
                  ("every {}", "density {}", "chunks of {}", "{} values")))  # fmt: skip
_WAY = (operator.attrgetter("time_s"), operator.attrgetter("step"))
_BITS = {"centroid1": "1 bit", "centroid2": "2 bits", "e3m0": "4 bits"}


def text_of(value: Stat | float, pattern: str | Callable[[float], str], factor: float = 1, unit: str = "") -> str:
    """The value times `factor`, with its deviation if there is one and how many runs reached a target if not all did; "-" if it is not
    finite. A pattern may depend on the value."""
    stat = value if isinstance(value, Stat) else Stat(value)
    if not math.isfinite(factor * stat.mean):
        return "not reached" if stat.runs else "-"
    form = pattern if isinstance(pattern, str) else pattern(stat.mean)
    spread = " ± " + text_of(stat.deviation, form, factor) if stat.count > 1 else ""
    return form.format(factor * stat.mean) + spread + unit + (f" ({stat.count} of {stat.runs})" if stat.count < stat.runs else "")


def value_text(metric: Metric, value: Stat | float) -> str:
    """ "87.4 ± 1.2 %", "0.05"; "-" if absent."""
    return text_of(value, "{:.1f}", 100, " %") if metric.unit == "share" else text_of(value, "{:.4g}")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint at the known word that is nearest."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean '{close[0]}'?" if close else otherwise


def only(texts: Iterable[str], otherwise: str) -> str:
    """The text that all of them are."""
    different = {*texts}
    return different.pop() if len(different) == 1 else otherwise


@dataclass(eq=False)
class Method:
    """Runs of one configuration, and their means; bytes are of a step. `config`: a value for every key of any run."""

    compressor: str
    network: str
    config: dict[str, str]
    name: str = ""
    runs: list[Run] = field(default_factory=list)
    baseline: "Method | None" = None
    times: dict[str, float] = field(default_factory=dict)
    best = last = second = held_out = wall_seconds = images_per_second = Stat()
    seconds_to_target = steps_to_target = bytes_sent = bytes_received = Stat()
    bytes_ratio = bits_per_parameter_step = speed_up = target_speed_up = ABSENT

    @property
    def dense(self) -> bool:
        return self.runs[0].dense

    @property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if run.end]

    @property
    def counted(self) -> list[Run]:
        """The runs that means are over: the complete ones, or all of them if none is."""
        return self.complete or self.runs


@dataclass(eq=False)
class Comparison:
    """Runs of one task and metric; the methods with dense ones first. `differing`: the keys in which methods differ."""

    runs: list[Run]
    left_out: list[Run]
    methods: list[Method]
    task: str
    metric: Metric
    differing: list[str]
    target: float = ABSENT
    target_reason: str = ""
    warnings: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def has(self, stat: str) -> bool:
        """Whether some method has this figure."""
        return any(getattr(method, stat).count for method in self.methods)

    @property
    def has_times(self) -> bool:
        """Whether step times are known: rows of a table have none."""
        return any(method.times["step"] > 0 for method in self.methods)

    @property
    def shared_network(self) -> str:
        """The network of all methods; "" if they differ in it."""
        return only((m.network for m in self.methods), "")

    @property
    def emulated_link(self) -> str:
        """The link of all methods if it is emulated, in few words if they differ in it; else ""."""
        links = ["".join(m.network.partition("emulated link")[1:]) for m in self.methods]
        return only(links, "emulated links" if all(links) else "partly emulated links")

    @property
    def base_name(self) -> str:
        """What speed-ups are over: a method, or words for several."""
        return only((m.baseline.name for m in self.methods if m.baseline), "the dense run of the same configuration")

    def telling(self, compressor: str) -> list[str]:
        """The keys in which the methods of a compressor differ."""
        own = [m for m in self.methods if m.compressor == compressor]
        return [key for key in self.differing if any(m.config[key] != own[0].config[key] for m in own)]


def in_words(key: str, value: str) -> str:
    """ "density 0.01", "1 bit", "no nesterov"; "" for a value that is absent or the method's own choice."""
    name = key.rpartition(".")[2].replace("_", " ")
    same = {'""': "", "-": "", "true": name, "false": "no " + name}
    same |= {"0": ""} if key == "exchange.every" else _BITS if key == "compress.values" else {}
    return same[value] if value in same else _WORDS.get(key, name + " {}").replace("{}", plain_text(value))


def method_name(method: Method, keys: Iterable[str]) -> str:
    """ "sparseloco every 10, 64 of 4,096, 1 bit". With the density a chunk is k of its length."""
    places = {key: place for place, key in enumerate(_WORDS)}
    words = {key: in_words(key, method.config[key]) for key in sorted(keys, key=lambda key: places.get(key, len(places)))}
    if "compress.density" in words:
        with contextlib.suppress(ValueError, OverflowError):  # no chunk, or no number
            chunk = int(method.runs[0].text("compress.chunk"))
            k = max(1, round(float(method.config["compress.density"]) * chunk))
            words |= {"compress.density": f"{k:,} of {chunk:,}", "compress.chunk": ""}
    return f"{method.compressor} {', '.join(filter(None, words.values()))}".rstrip()


def _group(runs: list[Run], keys: list[str]) -> tuple[list[Method], list[str]]:
    """The methods, and the keys in which they differ."""
    methods: dict[tuple[str, ...], Method] = {}
    defaults = {key: next((e.text for run in runs if (e := run.config.get(key)) and not e.given), "-") for key in keys}
    of_compressed = {key for key in keys if key.startswith("compress.") and key != "compress.name"}
    for run in runs:
        name = run.text("compress.name")
        known = {key: entry.text for key, entry in run.config.items()}
        unused = of_compressed - {"compress.values"} if run.dense else set()
        config = {key: "-" if key in unused else known.get(key, defaults[key]) for key in keys}
        methods.setdefault(tuple(config.values()), Method(name, run.network, config)).runs.append(run)
    differing = []
    for key in keys:
        values = {method.config[key] for method in methods.values()}
        if len(values) > 1 and not (key in of_compressed and values <= {"-", defaults[key]}):
            differing.append(key)
    return sorted(methods.values(), key=lambda method: not method.dense), differing


def _folder_name(method: Method) -> str:
    """The name that the runs' folders share but for the seed: "dgc_slow" of dgc_slow-s1 and dgc_slow-s2; else ""."""
    name = only((re.sub(r"-s[0-9]+$", "", os.path.basename(os.path.normpath(run.path))) for run in method.runs), "")
    return name if len(name) <= LONGEST_NAME and method.compressor in name else ""


def _name(c: Comparison) -> None:
    """Names each method by its compressor and the keys that tell it from others of it. Where they are many, by the runs'
    folders, or by as few keys as make the names differ."""
    keys = {method.compressor: c.telling(method.compressor) for method in c.methods}
    for own in keys.values():
        own += ["compress.density"] if "compress.chunk" in own and "compress.density" not in own else []
    for m in c.methods:
        m.name = method_name(m, keys[m.compressor])
    long = {m.compressor for m in c.methods if len(m.name) - len(m.compressor) - 1 > LONGEST_KEYS}
    folders = [_folder_name(method) for method in c.methods]
    by_folder = all(f and folders.count(f) == 1 for f, m in zip(folders, c.methods) if m.compressor in long)
    seen: dict[str, int] = {}
    for m, folder in zip(c.methods, folders):
        if m.compressor in long:
            m.name = folder if by_folder else method_name(m, _fewest(c, m.compressor, keys[m.compressor]))
        seen[m.name] = seen.get(m.name, 0) + 1  # two values that a name does not show, such as "-" and ""
        m.name += f" ({seen[m.name]})" if seen[m.name] > 1 else ""


def _fewest(c: Comparison, compressor: str, keys: list[str]) -> list[str]:
    """Few keys that tell the compressor's methods apart, those of the method itself before others."""
    names: Callable[[list[str]], int] = lambda some: len({method_name(m, some) for m in c.methods if m.compressor == compressor})
    own_first = sorted(keys, key=lambda key: not key.startswith(_METHOD))
    chosen: list[str] = []
    while names(chosen) < names(keys):
        chosen.append(max((key for key in own_first if key not in chosen), key=lambda key: names([*chosen, key])))
    return [key for key in keys if key in chosen]


def families_of(c: Comparison) -> dict[str, list[Method]]:
    """Methods that differ only in how much they send, by name and by the bits that they send; the complete ones alone."""
    families: dict[str, list[Method]] = {}
    for m in c.methods:
        if m.complete and abs(m.last.mean) < MOST and 1 / MOST < m.bits_per_parameter_step < MOST:
            keys = [key for key in c.telling(m.compressor) if key not in _AMOUNTS and not key.startswith("train.distribution")]
            families.setdefault(method_name(m, keys), []).append(m)
    return {name: sorted(members, key=lambda m: m.bits_per_parameter_step) for name, members in families.items()}


def _choose_baselines(c: Comparison, name: str | None) -> None:
    """Of each method the dense one that differs in nothing but keys of the method, or the one that was asked for."""
    by_name = {method.name: method for method in c.methods}
    if name is not None and name not in by_name:
        hint = did_you_mean(name, by_name, "; there are " + ", ".join(by_name))
        raise UserError(f"--baseline: there is no method '{name}'{hint}")
    keys = [key for key in c.differing if key not in _RECORDED and not key.startswith(_METHOD)]
    for m in c.methods:
        alike = (other for other in c.methods if other.dense and all(other.config[key] == m.config[key] for key in keys))
        m.baseline = by_name[name] if name is not None else m if m.dense else next(alike, None)


def _sum_up(methods: list[Method]) -> None:
    for m in methods:
        for name in _MEANS:
            setattr(m, name, stat_of(getattr(run, name) for run in m.counted))
        if any(run.diverged for run in m.counted):  # a mean of the others would hide it
            m.last = m.held_out = Stat()
        m.bytes_ratio = stat_of(run.bytes_ratio for run in m.counted).mean
        m.bits_per_parameter_step = 32 / m.bytes_ratio if m.bytes_ratio > 0 else ABSENT
        m.times = {part: stat_of(run.times.get(part, ABSENT) for run in m.counted).mean for part in STEP_PARTS}


def _choose_target(c: Comparison, target: float | None) -> None:
    if target is not None:
        if not any(run.evals for run in c.runs):
            raise UserError("--target: these runs have no evaluations that could reach it")
        c.target, c.target_reason = target, "as asked for"
    elif c.metric.name != "loss":
        best, worst, percent, which = (max, min, 95, "lowest") if c.metric.higher_is_better else (min, max, 105, "greatest")
        known = [m for m in c.methods if math.isfinite(m.best.mean)]
        dense = [m.best.mean for m in known if m.dense]
        if dense and best(dense) > 0:  # a run whose metric stays 0 has reached it from the start
            c.target = percent / 100 * best(dense)
            c.target_reason = f"{percent} % of the best dense {c.metric.title}, {value_text(c.metric, best(dense))}"
        elif not dense and known and (value := worst(m.best.mean for m in known)) > 0:
            c.target, c.target_reason = value, f"the {which} of the methods' best values, as there is no dense run"
    for m in c.methods if math.isfinite(c.target) else ():
        at = [next((e for e in run.evals if c.metric.reaches(e.value, c.target)), None) for run in m.counted]
        m.seconds_to_target, m.steps_to_target = (stat_of((get(e) for e in at if e), len(at)) for get in _WAY)


def _measure_speed_ups(methods: list[Method]) -> None:
    for m, base in ((m, m.baseline) for m in methods if m.baseline):
        if base.images_per_second.mean > 0:
            m.speed_up = m.images_per_second.mean / base.images_per_second.mean
        # Only if every run reached the target; otherwise the mean would be of the fastest ones.
        if all(o.seconds_to_target.count == len(o.counted) for o in (m, base)) and m.seconds_to_target.mean > 0:
            m.target_speed_up = base.seconds_to_target.mean / m.seconds_to_target.mean


def _check_one_task(runs: list[Run]) -> None:
    by: Callable[[Metric], str] = lambda metric: f"by {metric.name}" + (f" ({metric.unit})" if metric.unit else "")
    described: Callable[[Run], str] = lambda run: f"{run.path} has {run.task or 'an unnamed task'} {by(run.metric)}"
    first = next((run for run in runs if run.task), runs[0])  # a run that names no task is compared with any
    if other := next((run for run in runs if run.task not in ("", first.task) or run.metric != first.metric), None):
        both = f"{described(first)}; {described(other)}"
        raise UserError(f"these runs have different tasks: {both}. Compare the runs of each task by themselves")


def _warn_of_run(c: Comparison, run: Run) -> Iterable[str]:
    networks = [start.backend for start in run.starts]
    if other := next((network for network in networks if network != networks[0]), None):
        yield f"{run.path} went on over another network ({networks[0]}, then {other}), and its times are of both"
    if run.diverged:
        yield f"the last {c.metric.title} of {run.path} is not finite: its method has no final value, and other means leave it out"
    if not run.end:
        at = f"step {run.last_step}" + (", in the middle of a line" if run.truncated else "")
        yield f"{run.path} is incomplete: it stopped after {at}; its curve is thin, and means leave it out where they can"
    elif run.end.failed:
        yield f"{run.path} has failed: {run.end.reason}"
    elif run.end.skipped_steps > 0:
        yield f"{run.path} skipped {run.end.skipped_steps} steps that were not finite"


def _warn(c: Comparison) -> Iterable[str]:
    for run in c.left_out:
        yield f"{run.path} has not finished a step yet and is left out"
    for run in c.runs:
        yield from _warn_of_run(c, run)
    if any(len({run.environment[key] for run in c.runs if key in run.environment}) > 1 for key in ("cpu", "host")):
        yield "the runs come from different machines: times and speed-ups do not compare the methods alone"
    if c.task and (unnamed := [run.path for run in c.runs if not run.task]):
        yield f"{', '.join(unnamed)}: the task is not recorded; it is taken for that of the others, {c.task}"
    revisions = {run.environment["revision"] for run in c.runs if "revision" in run.environment}
    revisions |= {start.revision for run in c.runs for start in run.starts if start.revision}
    if len(revisions) > 1:
        yield f"the runs are of different commits ({', '.join(sorted(revisions))}), so more than the methods is compared"
    for m in c.methods:
        seeds = [run.text("seed") for run in m.counted]
        for i, run in enumerate(m.counted):
            if seeds[i] in seeds[:i]:
                yield f"{m.name} has seed {seeds[i]} more than once ({run.path}): its deviation is not that of seeds"
    for key in c.differing:
        if key in _UNFAIR:
            yield f"{key} differs between the methods, so more than the compression is compared"
    for m in c.methods:
        base = m.baseline or m
        here, there = (o.times["forward"] + o.times["backward"] for o in (m, base))
        if here > 0 and there > 0 and max(here / there, there / here) >= _UNEQUAL:
            took = f"{1e3 * here:.3g} ms under {m.name} and {1e3 * there:.3g} ms under {base.name}"
            why = "the machine was not equally free, communication took its cores, or the programs differ"
            yield f"forward and backward of a step took {took}: {why}, so times do not compare the methods alone"
    if c.has_times and not any(m.dense for m in c.methods):
        yield "there is no dense run, so there is no speed-up over it"
    elif c.has_times:
        for m in (m for m in c.methods if not m.baseline):
            yield f"{m.name}: no dense run differs from it in nothing but the method, so there is no speed-up; --baseline NAME chooses one"


def _limits(c: Comparison) -> Iterable[str]:
    if single := [m.name for m in c.methods if len(m.counted) == 1]:
        who = "all methods" if len(single) == len(c.methods) else ", ".join(single)
        yield f"whether a difference is more than chance: {who} {'has' if who == single[0] else 'have'} one seed"
    if c.has_times and c.shared_network == "threads":
        yield "the gain on a network: the ranks are threads of one machine without a link between them"


def compare_runs(runs: list[Run], target: float | None = None, baseline: str | None = None) -> Comparison:
    """Compares runs of one task. `target` is a value of the metric, `baseline` a method's name. Raises UserError if tasks or
    metrics differ, if there is no such method, for a target of runs without evaluations, and if no run made a step."""
    left_out, runs = ([run for run in runs if run.begun == begun] for begun in (False, True))
    if not runs:
        raise UserError(f"{left_out[0].path}: the run has not finished a step yet; there is nothing to compare")
    _check_one_task(runs)
    keys = list(dict.fromkeys(key for run in runs for key in run.config if key not in _APART and not key.startswith("output.")))
    methods, differing = _group(runs, keys)
    c = Comparison(runs, left_out, methods, next((run.task for run in runs if run.task), ""), runs[0].metric, differing)
    _name(c)
    _choose_baselines(c, baseline)
    _sum_up(methods)
    _choose_target(c, target)
    _measure_speed_ups(methods)
    c.warnings, c.limits = list(_warn(c)), list(_limits(c))
    return c
