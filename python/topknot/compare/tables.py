"""The tables of a comparison, and its numbers as CSV, JSON and LaTeX. docs/compare.md has every column."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from .comparison import Comparison, Method, number_text, stat_of, value_text, with_deviation
from .read import Run, one_line

Table = tuple[list[str], list[list[str]]]
"""The head and the rows; cells are plain text."""
STEP_PARTS = {
    "step_s": ("step", "total"), "data_s": ("data", "data"), "forward_s": ("forward", "forward"), "backward_s": ("backward", "backward"),
    "encode_s": ("encode", "encode"), "exposed_s": ("exposed comm.", "exposed"), "decode_s": ("decode", "decode"),
    "update_s": ("update", "update"), "other_s": ("other", "other"), "hidden_s": ("hidden comm.", "hidden"),
}  # fmt: skip
"""By the name of a column: its head in a table, and the part of a step that it is."""
_RATIOS = {"bytes_ratio": "dense_ratio", "bits_per_parameter_step": "bits", **{k: k for k in ("speed_up", "target_speed_up")}}


def bytes_text(count: float) -> str:
    """ "40 B", "1.5 kB"; "-" if it is not finite."""
    if not math.isfinite(count):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.3g} {unit}"
        count /= 1000
    return "-"


def seconds_text(stat: Any) -> str:
    """A Stat of seconds."""
    return with_deviation(stat, "{:.2f}" if stat.mean < 10 else "{:.1f}", 1, " s")


def rate_pattern(value: float) -> str:
    """4 significant digits are more than any timing holds."""
    return "{:.2f}" if value < 10 else "{:.1f}" if value < 100 else "{:.0f}"


def _reached(m: Method, text: str) -> str:
    some = f" ({m.reached} of {len(m.counted)})" if m.reached < len(m.counted) else ""
    return text + some if m.reached else "not reached"


def complete_runs(m: Method) -> int:
    """The number of runs that came to their end."""
    return len(m.counted) if m.complete else 0


def _without_empty_columns(table: Table) -> Table:
    head, rows = table
    kept = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def result_table(c: Comparison) -> Table:
    """A row per method; with the networks if they differ."""
    metric, quality = c.metric, c.metric.title
    target = value_text(metric, stat_of([c.target]))
    columns: list[tuple[str, Any]] = [
        ("method", lambda m: m.name),
        ("runs", lambda m: f"{len(m.runs)}" + (f" ({n} incomplete)" if (n := len(m.runs) - complete_runs(m)) else "")),
        ("best " + quality, lambda m: value_text(metric, m.best)),
        ("final " + quality, lambda m: value_text(metric, m.last)),
    ]
    if c.has("second"):
        columns.append(("final " + metric.second, lambda m: value_text(metric, m.second)))
    if c.has("held_out"):
        columns.append(("test " + metric.name, lambda m: value_text(metric, m.held_out)))
    if math.isfinite(c.target):
        columns.append(("steps to " + target, lambda m: _reached(m, with_deviation(m.steps_to_target, "{:.0f}"))))
        columns.append(("time to " + target, lambda m: _reached(m, seconds_text(m.seconds_to_target))))
        columns.append(("speed-up to it", lambda m: number_text("{:.2f}×", m.target_speed_up)))
    columns += [
        ("training time", lambda m: seconds_text(m.wall_seconds)),
        (metric.rate_unit, lambda m: with_deviation(m.images_per_second, rate_pattern(m.images_per_second.mean))),
        ("speed-up", lambda m: number_text("{:.2f}×", m.speed_up)),
        ("sent per step", lambda m: bytes_text(m.bytes_sent.mean)),
        ("received", lambda m: bytes_text(m.bytes_received.mean)),
        ("compression", lambda m: number_text("{:.2f}×" if m.dense_ratio < 10 else "{:.0f}×", m.dense_ratio)),
    ]
    if not c.shared_network:
        columns.append(("network", lambda m: m.network or "-"))
    table = [name for name, _ in columns], [[cell(m) for _, cell in columns] for m in c.methods]
    return table if c.has_times else _without_empty_columns(table)


def time_table(c: Comparison) -> Table:
    """Milliseconds per step, by part."""
    text: Callable[..., Any] = lambda s: number_text("{:.2f}" if s < 0.0995 else "{:.1f}", 1000 * s)
    rows = [[m.name] + [text(m.times[part]) for _, part in STEP_PARTS.values()] for m in c.methods]
    return ["ms per step"] + [head for head, _ in STEP_PARTS.values()], rows


def difference_table(c: Comparison) -> Table:
    """The keys that differ, by method."""
    return ["key"] + [m.name for m in c.methods], [[key, *values] for key, values in c.differing]


def _run_row(c: Comparison, r: Run, m: Method) -> list[str]:
    end = r.end
    alone: Callable[..., Any] = lambda value: stat_of([value])
    p50, p95 = (1000 * end.step_p50_s, 1000 * end.step_p95_s) if end else (math.nan, math.nan)
    return [
        r.path, m.name, r.text("seed"), "incomplete" if not end else "failed" if end.failed else "complete", str(r.last_step),
        value_text(c.metric, alone(r.best)), value_text(c.metric, alone(r.last)), seconds_text(alone(r.wall_seconds)),
        seconds_text(alone(end.eval_seconds)) if end else "-", seconds_text(alone(end.startup_seconds)) if end else "-",
        number_text(rate_pattern(r.rate), r.rate), f"{p50:.1f} / {p95:.1f} ms" if math.isfinite(p50 + p95) else "-", end.checksum if end else "-",
    ]  # fmt: skip


def run_table(c: Comparison) -> Table:
    """Every run by itself."""
    quality = c.metric.title
    figures = ["best " + quality, "final " + quality, "training time", "evaluation", "start-up", c.metric.rate_unit]
    head = ["run", "method", "seed", "state", "steps", *figures, "step p50 / p95", "parameters"]
    table = head, [_run_row(c, c.runs[i], m) for m in c.methods for i in m.runs]
    return table if c.has_times else _without_empty_columns(table)


def table_text(table: Table) -> str:
    """The table, aligned for a terminal."""
    head, rows = table
    lines = [[one_line(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    padded = [[row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))] for row in lines]
    text = ["  ".join(row).rstrip() for row in padded]
    return "\n".join([text[0], "-" * (sum(widths) + 2 * len(widths) - 2), *text[1:]]) + "\n"


def comparison_text(c: Comparison) -> str:
    """What `compare` prints."""
    text = f"task: {one_line(c.task) or '-'}\n" + (f"network: {one_line(c.shared_network)}\n" if c.shared_network else "") + "\n"
    text += table_text(result_table(c))
    if math.isfinite(c.target):
        text += (
            f"\nTarget {c.metric.title} {value_text(c.metric, stat_of([c.target]))}: {c.target_reason}.\nTimes are of training alone; "
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


def _stat_columns(c: Comparison) -> dict[str, str]:
    name = c.metric.name.replace(" ", "_")
    columns = {"best_" + name: "best", "final_" + name: "last"}
    if c.has("second"):
        columns["final_" + c.metric.second.replace(" ", "_")] = "second"
    if c.metric.set != "test":
        columns["test_" + name] = "held_out"
    same = ("wall_seconds", "images_per_second", "seconds_to_target", "steps_to_target", "bytes_sent", "bytes_received")
    return {**columns, **{column: column for column in same}}


def _method_numbers(c: Comparison, m: Method) -> dict[str, float | None]:
    """The numbers of a method by their columns, None where one is not known."""
    row: dict[str, float] = {}
    for column, name in _stat_columns(c).items():
        stat = getattr(m, name)
        row[column], row[column + "_deviation"] = stat.mean, stat.deviation if stat.count > 1 else math.nan
    row.update({column: getattr(m, name) for column, name in _RATIOS.items()})
    row.update({column: m.times[part] for column, (_, part) in STEP_PARTS.items()})
    return {column: value if math.isfinite(value) else None for column, value in row.items()}


def comparison_csv(c: Comparison) -> str:
    """A row per method: seconds, bytes per step, shares from 0 to 1; empty where nothing is known."""
    quoted: Callable[..., Any] = lambda text: '"' + text.replace('"', '""') + '"'
    lines = [",".join(["method", "runs", "complete", *_method_numbers(c, c.methods[0]), "network", "task", "keys"])]
    for i, m in enumerate(c.methods):
        numbers = ["" if value is None else f"{value:.9g}" for value in _method_numbers(c, m).values()]
        keys = " ".join(f"{key}={values[i]}" for key, values in c.differing)
        counts = [str(len(m.runs)), str(complete_runs(m))]
        lines.append(",".join([quoted(m.name), *counts, *numbers, *map(quoted, (m.network, c.task, keys))]))
    return "\n".join(lines) + "\n"


def comparison_json(c: Comparison) -> str:
    """Everything that the page shows; null where nothing is known."""
    known: Callable[..., Any] = lambda value: value if math.isfinite(value) else None
    name = c.metric.name.replace(" ", "_")
    methods = [
        {"method": m.name, "compressor": m.compressor, "keys": {key: values[i] for key, values in c.differing}, "network": m.network,
         "runs": len(m.runs), "complete": complete_runs(m), "reached_target": m.reached,
         "baseline": None if m.baseline is None else c.methods[m.baseline].name, **_method_numbers(c, m)}
        for i, m in enumerate(c.methods)
    ]  # fmt: skip
    runs = [
        {"run": r.path, "method": m.name, "seed": r.text("seed"), "complete": r.end is not None, "failed": bool(r.end and r.end.failed),
         "steps": r.last_step, "best_" + name: known(r.best), "final_" + name: known(r.last), "wall_seconds": known(r.wall_seconds),
         "images_per_second": known(r.rate), "parameter_checksum": r.end.checksum if r.end else None}
        for m in c.methods for r in (c.runs[i] for i in m.runs)
    ]  # fmt: skip
    metric = {"name": c.metric.name, "unit": c.metric.unit, "higher_is_better": c.metric.higher_is_better}
    everything = {
        "task": c.task, "metric": metric, "target": known(c.target), "target_reason": c.target_reason, "methods": methods, "runs": runs,
        "warnings": c.warnings, "limits": c.limits,
    }  # fmt: skip
    return json.dumps(everything, indent=2, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode() + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "_": r"\_", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def latex(text: str) -> str:
    """The text for LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in one_line(text))


def comparison_tex(c: Comparison) -> str:
    """The result table for a paper, without what can be had from other columns."""
    head, rows = result_table(c)
    left_out = {"training time", "received", "network", c.metric.rate_unit}
    kept = [i for i, name in enumerate(head) if name not in left_out and any(row[i] != "-" for row in rows)]
    line: Callable[..., Any] = lambda cells: "  " + " & ".join(latex(cells[i]) for i in kept) + r" \\"
    note = "; ".join(c.limits)
    begin = ["% \\usepackage{booktabs}", r"\begin{tabular}{l" + "r" * (len(kept) - 1) + "}", r"  \toprule"]
    lines = [*begin, line(head), r"  \midrule", *map(line, rows), r"  \bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n" + (f"% What this does not show: {one_line(note)}.\n" if note else "")
