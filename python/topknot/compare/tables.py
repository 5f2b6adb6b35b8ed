"""The tables of a comparison, and its numbers as CSV, JSON and LaTeX. docs/compare.md has every column."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from .comparison import STEP_PARTS, Comparison, Method, text_of, value_text
from .read import Run, Stat, one_line

Table = tuple[list[str], list[list[str]]]
"""The head and the rows; cells are plain text."""
TIMES = "{:.2f}×"
"""The pattern of a speed-up."""


def rate_pattern(value: float) -> str:
    """4 significant digits are more than any timing holds."""
    return "{:.2f}" if value < 10 else "{:.1f}" if value < 100 else "{:.0f}"


def ratio_pattern(ratio: float) -> str:
    """The pattern of a compression."""
    return TIMES if ratio < 10 else "{:.0f}×"


def seconds_text(value: Stat | float) -> str:
    """Seconds, with their deviation."""
    return text_of(value, lambda mean: "{:.2f}" if mean < 10 else "{:.1f}", 1, " s")


def bytes_text(count: float) -> str:
    """ "40 B", "1.5 kB"; "-" if it is not finite."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return text_of(count, ("{:.0f} " if unit == "B" or count >= 99.95 else "{:.3g} ") + unit)
        count /= 1000
    return text_of(count, "{:.0f} GB" if count >= 99.95 else "{:.3g} GB")


def reached_text(m: Method, text: str) -> str:
    """The text if some run reached the target, with how many did."""
    reached, counted = m.seconds_to_target.count, len(m.counted)
    return "not reached" if not reached else text if reached == counted else f"{text} ({reached} of {counted})"


def _table(c: Comparison, head: list[str], rows: list[list[str]]) -> Table:
    """Without the columns that are empty, if the comparison is of a table's rows."""
    kept = [i for i in range(len(head)) if c.has_times or any(row[i] != "-" for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def result_table(c: Comparison) -> Table:
    """A row per method; with the networks if they differ."""
    metric, target = c.metric, value_text(c.metric, c.target)
    incomplete: Callable[[Method], str] = lambda m: f" ({n} incomplete)" if (n := len(m.runs) - len(m.complete)) else ""
    columns: dict[str, Callable[[Method], str]] = {
        "method": lambda m: m.name,
        "runs": lambda m: f"{len(m.runs)}{incomplete(m)}",
        "best " + metric.title: lambda m: value_text(metric, m.best),
        "final " + metric.title: lambda m: value_text(metric, m.last),
    }
    if c.has("second"):
        columns["final " + metric.second] = lambda m: value_text(metric, m.second)
    if c.has("held_out"):
        columns["test " + metric.name] = lambda m: value_text(metric, m.held_out)
    if math.isfinite(c.target):
        columns["steps to " + target] = lambda m: reached_text(m, text_of(m.steps_to_target, "{:.0f}"))
        columns["time to " + target] = lambda m: reached_text(m, seconds_text(m.seconds_to_target))
        columns["speed-up to it"] = lambda m: text_of(m.target_speed_up, TIMES)
    columns |= {
        "training time": lambda m: seconds_text(m.wall_seconds),
        metric.rate_unit: lambda m: text_of(m.images_per_second, rate_pattern),
        "speed-up": lambda m: text_of(m.speed_up, TIMES),
        "sent per step": lambda m: bytes_text(m.bytes_sent.mean),
        "received": lambda m: bytes_text(m.bytes_received.mean),
        "compression": lambda m: text_of(m.bytes_ratio, ratio_pattern),
    }
    if not c.shared_network:
        columns["network"] = lambda m: m.network or "-"
    return _table(c, list(columns), [[cell(m) for cell in columns.values()] for m in c.methods])


def time_table(c: Comparison) -> Table:
    """Milliseconds per step, by part."""
    text: Callable[[float], str] = lambda seconds: text_of(seconds, "{:.2f}" if seconds < 0.0995 else "{:.1f}", 1000)
    heads = [part + " comm." if part in ("exposed", "hidden") else part for part in STEP_PARTS]
    return ["ms per step", *heads], [[m.name, *(text(m.times[part]) for part in STEP_PARTS)] for m in c.methods]


def difference_table(c: Comparison) -> Table:
    """The keys that differ, by method."""
    return ["key"] + [m.name for m in c.methods], [[key, *(m.config[key] for m in c.methods)] for key in c.differing]


def run_table(c: Comparison) -> Table:
    """Every run by itself."""
    columns: dict[str, Callable[[Method, Run], str]] = {
        "run": lambda m, r: r.path,
        "method": lambda m, r: m.name,
        "seed": lambda m, r: r.text("seed"),
        "state": lambda m, r: "incomplete" if not r.end else "failed" if r.end.failed else "complete",
        "steps": lambda m, r: str(r.last_step),
        "best " + c.metric.title: lambda m, r: value_text(c.metric, r.best),
        "final " + c.metric.title: lambda m, r: value_text(c.metric, r.last),
        "training time": lambda m, r: seconds_text(r.wall_seconds),
        "evaluation": lambda m, r: seconds_text(r.end.eval_seconds) if r.end else "-",
        "start-up": lambda m, r: seconds_text(r.end.startup_seconds) if r.end else "-",
        c.metric.rate_unit: lambda m, r: text_of(r.images_per_second, rate_pattern),
        "step p50 / p95": lambda m, r: (
            f"{1000 * r.end.step_p50_s:.1f} / {1000 * r.end.step_p95_s:.1f} ms"
            if r.end and math.isfinite(1000 * (r.end.step_p50_s + r.end.step_p95_s))
            else "-"
        ),
        "parameters": lambda m, r: r.end.parameter_checksum if r.end else "-",
    }
    return _table(c, list(columns), [[cell(m, r) for cell in columns.values()] for m in c.methods for r in m.runs])


def table_text(table: Table) -> str:
    """The table, aligned for a terminal."""
    lines = [[one_line(cell) for cell in row] for row in (table[0], *table[1])]
    first, *widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in lines]
    return "\n".join([text[0], "-" * (first + sum(widths) + 2 * len(widths)), *text[1:]]) + "\n"


def comparison_text(c: Comparison) -> str:
    """What `compare` prints."""
    text = f"task: {one_line(c.task) or '-'}\n" + (f"network: {one_line(c.shared_network)}\n" if c.shared_network else "") + "\n"
    text += table_text(result_table(c))
    if math.isfinite(c.target):
        text += (
            f"\nTarget {c.metric.title} {value_text(c.metric, c.target)}: {c.target_reason}.\nTimes are of training alone; "
            f"evaluation and start-up are left out. Speed-ups are over {one_line(c.base_name)}.\n"
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


def _method_numbers(c: Comparison, m: Method) -> dict[str, float | None]:
    """The numbers of a method by their columns, None where one is not known."""
    name = c.metric.name.replace(" ", "_")
    stats = {"best_" + name: m.best, "final_" + name: m.last}
    if c.has("second"):
        stats["final_" + c.metric.second.replace(" ", "_")] = m.second
    if c.metric.set != "test":
        stats["test_" + name] = m.held_out
    same = ("wall_seconds", "images_per_second", "seconds_to_target", "steps_to_target", "bytes_sent", "bytes_received")
    stats |= {column: getattr(m, column) for column in same}
    row: dict[str, float] = {}
    for column, stat in stats.items():
        row |= {column: stat.mean, column + "_deviation": stat.deviation if stat.count > 1 else math.nan}
    row |= {column: getattr(m, column) for column in ("bytes_ratio", "bits_per_parameter_step", "speed_up", "target_speed_up")}
    row |= {part + "_s": m.times[part] for part in STEP_PARTS}
    return {column: _known(value) for column, value in row.items()}


def comparison_csv(c: Comparison) -> str:
    """A row per method: seconds, bytes per step, shares from 0 to 1; empty where nothing is known."""
    quoted: Callable[[str], str] = lambda text: '"' + text.replace('"', '""') + '"'
    lines = [["method", "runs", "complete", *_method_numbers(c, c.methods[0]), "network", "task", "keys"]]
    for m in c.methods:
        numbers = ["" if value is None else f"{value:.9g}" for value in _method_numbers(c, m).values()]
        keys = " ".join(f"{key}={m.config[key]}" for key in c.differing)
        counts = [str(len(m.runs)), str(len(m.complete))]
        lines.append([quoted(m.name), *counts, *numbers, *map(quoted, (m.network, c.task, keys))])
    return "".join(",".join(line) + "\n" for line in lines)


def comparison_json(c: Comparison) -> str:
    """Everything that the page shows; null where nothing is known."""
    name = c.metric.name.replace(" ", "_")
    methods = [
        {"method": m.name, "compressor": m.compressor, "keys": {key: m.config[key] for key in c.differing}, "network": m.network,
         "runs": len(m.runs), "complete": len(m.complete), "reached_target": m.seconds_to_target.count,
         "baseline": m.baseline.name if m.baseline else None, **_method_numbers(c, m)}
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
    left_out = {"training time", "received", "network", c.metric.rate_unit}
    kept = [i for i, name in enumerate(head) if name not in left_out and any(row[i] != "-" for row in rows)]
    line: Callable[[list[str]], str] = lambda cells: (
        "  " + " & ".join(one_line(cells[i]).translate(_LATEX) for i in kept) + r" \\"
    )
    begin = ["% \\usepackage{booktabs}", r"\begin{tabular}{l" + "r" * (len(kept) - 1) + "}", r"  \toprule"]
    lines = [*begin, line(head), r"  \midrule", *map(line, rows), r"  \bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n" + (f"% What this does not show: {one_line('; '.join(c.limits))}.\n" if c.limits else "")
