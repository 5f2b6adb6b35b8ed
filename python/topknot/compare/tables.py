"""The tables of a comparison, and its numbers as CSV, JSON and LaTeX. docs/compare.md has every column."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from .comparison import STEP_PARTS, Comparison, Method, text_of, value_text
from .read import ABSENT, NO_END, Stat, one_line

Table = tuple[list[str], list[list[str]]]
"""The head and the rows; cells are plain text."""


def rate_text(value: Stat | float) -> str:
    """4 significant digits are more than any timing holds."""
    return text_of(value, lambda rate: "{:.2f}" if rate < 10 else "{:.1f}" if rate < 100 else "{:.0f}")


def ratio_text(value: float) -> str:
    return text_of(value, "{:.2f}×" if value < 10 else "{:.0f}×")


def seconds_text(value: Stat | float) -> str:
    return text_of(value, lambda mean: "{:.2f}" if mean < 10 else "{:.1f}", 1, " s")


def bytes_text(value: Stat | float) -> str:
    """The mean as "40 B", "1.5 kB"; "-" if it is not finite."""
    count = value.mean if isinstance(value, Stat) else value
    power = next((power for power in range(3) if count < 999.5 * 1000**power), 3)
    count /= 1000**power
    return text_of(count, "{:.0f} " if not power or count >= 99.95 else "{:.3g} ", 1, ("B", "kB", "MB", "GB")[power])


def columns_of(c: Comparison) -> list[tuple[str, str, str, Callable[[Any], str]]]:
    """The figures that these runs have, in the order of the files: the column of a file, the figure of Method, its head on the page
    ("" if it is not there), and its text there."""
    metric, name, value = c.metric, c.metric.name.replace(" ", "_"), functools.partial(value_text, c.metric)
    target = value(c.target)
    speed_up: Callable[[Any], str] = lambda ratio: text_of(ratio, "{:.2f}×")
    columns: list[tuple[str, str, str, Callable[[Any], str]]] = [
        ("best_" + name, "best", "best " + metric.title, value),
        ("final_" + name, "last", "final " + metric.title, value),
        ("final_" + metric.second.replace(" ", "_"), "second", "final " + metric.second, value),
        ("test_" + name, "held_out", "test " + metric.name, value),
        ("wall_seconds", "wall_seconds", "training time", seconds_text),
        ("images_per_second", "images_per_second", metric.rate_unit, rate_text),
        ("seconds_to_target", "seconds_to_target", "time to " + target, seconds_text),
        ("steps_to_target", "steps_to_target", "steps to " + target, lambda steps: text_of(steps, "{:.0f}")),
        ("bytes_sent", "bytes_sent", "sent per step", bytes_text),
        ("bytes_received", "bytes_received", "received", bytes_text),
        ("bytes_ratio", "bytes_ratio", "compression", ratio_text),
        ("bits_per_parameter_step", "bits_per_parameter_step", "", str),
        ("speed_up", "speed_up", "speed-up", speed_up),
        ("target_speed_up", "target_speed_up", "speed-up to " + target, speed_up),
    ]
    there = {"second": c.has("second"), "held_out": metric.set != "test" or c.has("held_out")}
    return [column for column in columns if there.get(column[1], True)]


def _table(rows: list[dict[str, str]]) -> Table:
    """Without the columns that are empty."""
    kept = [head for head in rows[0] if any(row[head] != "-" for row in rows)]
    return kept, [[row[head] for head in kept] for row in rows]


def result_table(c: Comparison) -> Table:
    """A row per method; with the networks if they differ."""
    incomplete: Callable[[Method], str] = lambda m: f" ({n} incomplete)" if (n := len(m.runs) - len(m.complete)) else ""
    columns = [column for column in columns_of(c) if column[2]]
    return _table([
        {"method": m.name, "runs": f"{len(m.runs)}{incomplete(m)}",
         **{head: text(getattr(m, figure)) for _, figure, head, text in columns},
         "network": "-" if c.shared_network else m.network or "-"}
        for m in c.methods
    ])  # fmt: skip


def time_table(c: Comparison) -> Table:
    """Milliseconds per step, by part."""
    text: Callable[[float], str] = lambda seconds: text_of(seconds, "{:.2f}" if seconds < 0.0995 else "{:.1f}", 1000)
    heads = [part + " comm." if part in ("exposed", "hidden") else part for part in STEP_PARTS]
    return ["ms per step", *heads], [[m.name, *(text(m.times[part]) for part in STEP_PARTS)] for m in c.methods]


def difference_table(c: Comparison) -> Table:
    return ["key"] + [m.name for m in c.methods], [[key, *(m.config[key] for m in c.methods)] for key in c.differing]


def run_table(c: Comparison) -> Table:
    value = functools.partial(value_text, c.metric)
    return _table([
        {"run": r.path, "method": m.name, "seed": r.text("seed"),
         "state": "incomplete" if not r.end else "failed" if end.failed else "complete", "steps": str(r.last_step),
         "best " + c.metric.title: value(r.best), "final " + c.metric.title: value(r.last),
         "training time": seconds_text(r.wall_seconds), "evaluation": seconds_text(end.eval_seconds),
         "start-up": seconds_text(end.startup_seconds), c.metric.rate_unit: rate_text(r.images_per_second),
         "step p50 / p95": text_of(end.step_p50_s, "{:.1f}", 1000, text_of(end.step_p95_s, " / {:.1f}", 1000, " ms")),
         "parameters": end.parameter_checksum if r.end else "-"}
        for m in c.methods for r in m.runs for end in [r.end or NO_END]
    ])  # fmt: skip


def table_text(table: Table) -> str:
    """The table, aligned for a terminal."""
    lines = [[one_line(cell) for cell in row] for row in (table[0], *table[1])]
    first, *widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in lines]
    return "\n".join([text[0], "-" * (first + sum(widths) + 2 * len(widths)), *text[1:]]) + "\n"


def comparison_text(c: Comparison) -> str:
    text = f"task: {one_line(c.task) or '-'}\n" + (f"network: {one_line(c.shared_network)}\n" if c.shared_network else "") + "\n"
    text += table_text(result_table(c))
    if math.isfinite(c.target):
        text += f"\nTarget {c.metric.title} {value_text(c.metric, c.target)}: {c.target_reason}.\n"
        text += (
            f"Times are of training alone; evaluation and start-up are left out. Speed-ups are over {one_line(c.base_name)}.\n"
        )
    if c.has_times:
        text += "\n" + table_text(time_table(c))
    if c.differing:
        text += "\nKeys that differ:\n" + table_text(difference_table(c))
    text += "".join(f"\nNote: {one_line(warning)}." for warning in c.warnings)
    if c.limits:
        text += "\nWhat this does not show: " + one_line("; ".join(c.limits)) + "."
    return text + ("\n" if c.warnings or c.limits else "")


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(c: Comparison, m: Method) -> dict[str, float | None]:
    """The numbers of a method by their columns, None where one is not known."""
    row: dict[str, float] = {}
    for key, name, *_ in columns_of(c):
        if isinstance(figure := getattr(m, name), Stat):
            row |= {key: figure.mean, key + "_deviation": figure.deviation if figure.count > 1 else ABSENT}
        else:
            row[key] = figure
    row |= {part + "_s": m.times[part] for part in STEP_PARTS}
    return {key: _known(value) for key, value in row.items()}


def comparison_csv(c: Comparison) -> str:
    """A row per method: seconds, bytes per step, shares from 0 to 1; empty where nothing is known."""
    quoted: Callable[[str], str] = lambda text: '"' + text.replace('"', '""') + '"'
    text = ",".join(["method,runs,complete", *_numbers(c, c.methods[0]), "network,task,keys\n"])
    for m in c.methods:
        numbers = ["" if value is None else f"{value:.9g}" for value in _numbers(c, m).values()]
        keys = " ".join(f"{key}={m.config[key]}" for key in c.differing)
        cells = [quoted(m.name), str(len(m.runs)), str(len(m.complete)), *numbers, *map(quoted, (m.network, c.task, keys))]
        text += ",".join(cells) + "\n"
    return text


def comparison_json(c: Comparison) -> str:
    """Everything that the page shows; null where nothing is known."""
    name = c.metric.name.replace(" ", "_")
    methods = [
        {"method": m.name, "compressor": m.compressor, "keys": {key: m.config[key] for key in c.differing}, "network": m.network,
         "runs": len(m.runs), "complete": len(m.complete), "reached_target": m.seconds_to_target.count,
         "baseline": m.baseline.name if m.baseline else None, **_numbers(c, m)}
        for m in c.methods
    ]  # fmt: skip
    runs = [
        {"run": r.path, "method": m.name, "seed": r.text("seed"), "complete": r.end is not None, "failed": bool(r.end and r.end.failed),
         "steps": r.last_step, "best_" + name: _known(r.best), "final_" + name: _known(r.last), "wall_seconds": _known(r.wall_seconds),
         "images_per_second": _known(r.images_per_second), "parameter_checksum": r.end.parameter_checksum if r.end else None}
        for m in c.methods for r in m.runs
    ]  # fmt: skip
    everything: dict[str, Any] = {
        "task": c.task,
        "metric": {"name": c.metric.name, "unit": c.metric.unit, "higher_is_better": c.metric.higher_is_better},
        "target": _known(c.target), "target_reason": c.target_reason, "methods": methods, "runs": runs,
        "warnings": c.warnings, "limits": c.limits,
    }  # fmt: skip
    return json.dumps(everything, indent=2, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode() + "\n"


_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "×": r"$\times$", **{sign: "\\" + sign for sign in "{}%&#$_"},
})  # fmt: skip


def comparison_tex(c: Comparison) -> str:
    """The result table for a paper, without what can be had from other columns."""
    head, rows = result_table(c)
    kept = [i for i, name in enumerate(head) if name not in ("training time", "received", "network", c.metric.rate_unit)]
    lines = ["  " + " & ".join(one_line(row[i]).translate(_LATEX) for i in kept) + r" \\" for row in (head, *rows)]
    begin = ["% \\usepackage{booktabs}", r"\begin{tabular}{l" + "r" * (len(kept) - 1) + "}", r"  \toprule"]
    text = "\n".join([*begin, lines[0], r"  \midrule", *lines[1:], r"  \bottomrule", r"\end{tabular}"]) + "\n"
    return text + (f"% What this does not show: {one_line('; '.join(c.limits))}.\n" if c.limits else "")
