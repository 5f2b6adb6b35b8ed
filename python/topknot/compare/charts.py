"""The pictures, drawn by matplotlib.

A picture is for a paper (PDF, SVG, PNG) or a page: there text and grid take the page's colours, and the values that pointing at
it shows go along as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import json
import math
import operator
import re
import textwrap
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .comparison import MOST, Comparison, Method, families_of, value_text
from .read import Record, Run, UserError, one_line
from .style import FAINT, GRID, INK, PART_COLOURS, Style, part_label, styles
from .tables import bytes_text

_HATCHES = {"encode": "////", "exposed": "xxxx", "decode": "\\\\\\\\", "update": "...."}
_LEAST_PANEL = 2.1  # inches
_POINTS = 260
_FIELDS = {"quality": "value", "loss": "loss", "bytes": "sent_so_far"}
AXES = {"time": "training time", "epochs": "epoch", "steps": "step"}

matplotlib.rcParams.update({
    "font.size": 8, "axes.edgecolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "grid.color": GRID, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "svg.fonttype": "none", "pdf.fonttype": 42, "axes.formatter.useoffset": False, "text.parse_math": False,
    "font.family": ["DejaVu Sans"], "hatch.linewidth": 0.5, **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
})  # fmt: skip


@dataclasses.dataclass
class Curve:
    """A quantity of a run or of a method's mean. A row: the positions on AXES, the value and its deviation."""

    method: Method
    rows: Any
    incomplete: bool

    def axis(self, name: str) -> Any:
        """The positions on an axis of AXES."""
        return self.rows[:, list(AXES).index(name)]


Panel = tuple[Any, dict[str, Any]]
"""The axes, and what pointing at them shows: the name of x, the unit of y, and lines of name, colour, x and y."""
Drawing = tuple[Any, list[Panel]]
"""A figure with its panels."""


def smooth(values: Any, window: int) -> Any:
    """The centred moving mean of the finite values, narrower at the ends."""
    at, known = np.arange(len(values)), np.isfinite(values)
    low, high = np.maximum(0, at - window // 2), np.minimum(len(values), at + (window + 1) // 2)
    counts, sums = (np.concatenate([[0], np.cumsum(summands)]) for summands in (known, np.where(known, values, 0)))
    with np.errstate(invalid="ignore"):
        return values if window <= 1 else (sums[high] - sums[low]) / (counts[high] - counts[low])


def _run_rows(run: Run, what: str) -> Any:
    get = operator.attrgetter("time_s", "epoch", "step", _FIELDS[what])
    rows = np.array(list(map(get, run.evals if what == "quality" else run.steps)), float).reshape(-1, 4)
    rows = np.column_stack([rows, np.zeros(len(rows))])
    # Without the steps of an epoch, epochs are not known.
    inside = (rows[:, :3] >= 0) & (rows[:, :3] < MOST) | np.isnan(rows[:, :3]) & [False, True, False]
    rows = rows[inside.all(axis=1)]
    rows[~(abs(rows[:, 3]) < MOST), 3] = math.nan
    if what == "loss":
        rows[:, 3] = smooth(rows[:, 3], max(1, len(rows) // 40))
    return rows


def _thinned(rows: Any) -> Any:
    """At most about _POINTS of the rows, the last one among them."""
    return np.concatenate([rows[: -1 : max(1, len(rows) // _POINTS)], rows[-1:]])


def _mean_rows(runs: list[Any]) -> Any:
    """The mean over runs at the steps that all of them have; absent where one is not finite, which a mean would hide."""
    if len(runs) == 1:
        return runs[0]
    by_step = [{row[2]: row for row in rows} for rows in runs]
    steps = _thinned([step for step in by_step[0] if all(step in own for own in by_step)])
    same = np.array([[own[step] for step in steps] for own in by_step]).reshape(len(runs), -1, 5)
    rows = same.mean(axis=0)
    rows[:, 4] = same[:, :, 3].std(axis=0, ddof=1)
    return rows


@functools.cache
def curves_of(c: Comparison, what: str) -> list[Curve]:
    """By method the mean of the complete runs, and each incomplete run by itself. `what`: quality, loss or bytes."""
    curves = []
    for m in c.methods:
        curves += [Curve(m, _run_rows(run, what), True) for run in m.runs if not run.end]
        curves += [Curve(m, _mean_rows([_run_rows(run, what) for run in m.complete]), False)] if m.complete else []
    known = [curve for curve in curves if np.isfinite(curve.rows[:, 3]).any()]
    return [dataclasses.replace(curve, rows=_thinned(curve.rows)) for curve in known]


def _figure(size: tuple[float, float], panels: int = 1, sharey: bool = True) -> tuple[Any, list[Any]]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=sharey)[0])


def _scale(axis: Any, values: Any, unit: str) -> None:
    """A logarithmic scale if the values are far apart; ticks in percent or bytes."""
    low, high = float(min(values)), float(max(values))
    texts: dict[str, Callable[[float], str]] = {"bytes": bytes_text, "percent": lambda v: f"{100 * v:.10g} %"}
    text = texts.get(unit, _short)
    if unit != "percent" and low > 0 and high / low > 60:
        _logarithmic(axis, (1.0, 3.0) if high / low < 1000 else (1.0,), text)
    elif unit or high >= 1e4:
        axis.set_major_formatter(FuncFormatter(lambda v, _: text(v)))


def _logarithmic(axis: Any, ticks: tuple[float, ...], text: Callable[[float], str]) -> None:
    """A logarithmic axis with ticks at these multiples of powers of ten."""
    axis.axes.set_yscale("log") if axis.axis_name == "y" else axis.axes.set_xscale("log")
    axis.set_major_locator(LogLocator(10, subs=ticks, numticks=12))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda v, _: text(v)))


def _short(value: float) -> str:
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0, 1, ""))
    return next(f"{value / unit:.4g}{letter}" for least, unit, letter in units if abs(value) >= least)


def _wrapped(name: str, width: int) -> str:
    return textwrap.fill(one_line(name), width, break_on_hyphens=False)


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> bool:
    """Names lines right of a panel, at their ends' heights; False if there is no room. `ends`: height, name, colour."""
    figure = axes.figure
    figure.draw_without_rendering()
    line = 9.6 / (axes.get_position().height * figure.get_figheight() * 72)
    to_axes = axes.transData - axes.transAxes
    heights = [float(to_axes.transform((axes.get_xlim()[0], y))[1]) for y, _, _ in ends]
    labels = [(heights[i], _wrapped(ends[i][1], 18), ends[i][2]) for i in sorted(range(len(ends)), key=heights.__getitem__)]
    places, halves = [label[0] for label in labels], [(label[1].count("\n") + 1) * line / 2 for label in labels]
    if sum(halves) > 0.5 or figure.get_figwidth() / len(figure.axes) < 2.5:
        return False
    for _ in range(200):  # push neighbours apart, and all of them into the panel
        for i in range(len(places) - 1):
            short = max(0.0, halves[i] + halves[i + 1] - (places[i + 1] - places[i]))
            places[i : i + 2] = places[i] - short / 2, places[i + 1] + short / 2
        places = [min(max(place, half), 1 - half) for place, half in zip(places, halves)]
    for place, (_, text, colour) in zip(places, labels):
        axes.text(1.025, place, text, color=colour, transform=axes.transAxes, va="center", ha="left", linespacing=1.0)
    return True


def _legend(figure: Any, entries: tuple[list[Any], list[str]], fixed: bool) -> None:
    """A legend above the panels, in as many columns as fit. A long one makes a figure higher whose height is not fixed."""
    handles, names = entries
    width, height = 72 * figure.get_size_inches()
    columns = max(1, min(len(names), int(width / (4.6 * min(max(map(len, names)), 48) + 42))))
    wrapped = [_wrapped(name, 48) for name in names]
    figure.legend(handles, wrapped, loc="upper left", ncol=columns, frameon=False, handlelength=2.6)
    room = 12.5 * (-(-len(names) // columns) + sum(name.count("\n") for name in wrapped)) + 8
    height = height if fixed else max(height, room + height * 2 / 3)
    figure.set_figheight(height / 72)
    figure.get_layout_engine().set(rect=(0, 0, 1, max(0.3, 1 - room / height)))  # which a layout does since matplotlib 3.7 alone


def _line_up(c: Comparison, what: str, names: list[str], size: tuple[float, float], fixed: bool = False) -> Drawing | None:
    """The curves over some axes side by side; None if there are none."""
    curves, look = curves_of(c, what), styles(c)
    said = {"quality": "percent" if c.metric.unit == "share" else "", "loss": "", "bytes": "bytes"}[what]
    target = c.target if what == "quality" and abs(c.target) < MOST else math.nan
    values = np.concatenate([[]] + [curve.rows[:, 3] + side * curve.rows[:, 4] for curve in curves for side in (-1, 1)])
    values = values[values > 0 if what == "bytes" else np.isfinite(values)]
    if not len(values):
        return None  # of bytes: one rank sends nothing
    figure, all_axes = _figure(size, len(names))
    panels: list[Panel] = []
    handles: dict[Method, Any] = {}
    for axes, name in zip(all_axes, names):
        here = [curve for curve in curves if math.isfinite(curve.axis(name)[-1])]
        longest = max((curve.axis(name)[-1] for curve in here), default=0.0)
        divisor, unit = (1, " (s)") if longest < 240 else (60, " (min)") if longest < 14400 else (3600, " (h)")
        divisor, unit = (divisor, unit) if name == "time" else (1, "")
        shown = []
        for curve in here:
            style, m = look[curve.method], curve.method
            x, value, deviation = curve.axis(name) / divisor, curve.rows[:, 3], curve.rows[:, 4]
            dots = {"marker": style.marker, "markersize": 3, "markevery": max(1, len(x) // 12)} if what == "quality" else {}
            width = 0.8 if curve.incomplete else 1.5
            handles[m] = axes.plot(x, value, color=style.colour, linestyle=style.dash, linewidth=width, **dots)[0]
            if curve.incomplete:
                axes.plot(x[-1:], value[-1:], color=style.colour, marker="x", markersize=6)
            if any(deviation > 0) and what != "bytes":
                axes.fill_between(x, value - deviation, value + deviation, color=style.colour, alpha=0.15, linewidth=0)
            first = next((i for i, v in enumerate(value) if c.metric.reaches(v, target)), None)
            if first is not None and not curve.incomplete and name == names[0]:
                axes.plot(x[first], value[first], "o", markersize=8, fillstyle="none", color=style.colour, markeredgewidth=1)
            shown.append([m.name + (" (incomplete)" if curve.incomplete else ""), style.colour, x, value])
        if math.isfinite(target):
            axes.axhline(target, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xlabel(AXES[name] + unit + (f"\n{c.emulated_link}" if name == "time" and c.emulated_link else ""))
        axes.set_xlim(0, max(longest / divisor, 1e-9) * 1.02)
        panels.append((axes, {"x": AXES[name] + unit, "unit": said, "lines": shown}))
    first_panel = all_axes[0]
    if math.isfinite(target):
        values = np.append(values, target)
        side, at = (-2, "top") if c.metric.higher_is_better else (2, "bottom")  # at the right curves are beyond the target
        first_panel.annotate("target " + value_text(c.metric, target), (0.99, target), xycoords=first_panel.get_yaxis_transform(),
                             xytext=(0, side), textcoords="offset points", ha="right", va=at, fontsize=6.5, color=FAINT)  # fmt: skip
    _scale(first_panel.yaxis, values, said)
    first_panel.set_ylabel({"quality": _metric_label(c), "loss": "train loss", "bytes": "sent by a rank"}[what])
    if said == "percent":
        low, high = first_panel.get_ylim()
        bottom = max(low, min(0.0, *values)) if low < 0 else 0 if low < 0.3 * high else low
        first_panel.set_ylim(bottom, min(high, 1.02) if max(values) <= 1 else high)
    last = {curve.method: curve.rows[np.isfinite(curve.rows[:, 3]), 3][-1] for curve in curves}  # a mean comes after its runs
    if not _label_ends(all_axes[-1], [(value, m.name, look[m].colour) for m, value in last.items()]):
        _legend(figure, (list(handles.values()), [m.name for m in handles]), fixed)
    return figure, panels


def _metric_label(c: Comparison) -> str:
    return c.metric.long_title + ("" if c.metric.unit in ("", "share") else f" ({c.metric.unit})")


def _bits(c: Comparison, size: tuple[float, float], fixed: bool = False) -> Drawing | None:
    families = sorted(families_of(c).items(), key=lambda item: -item[1][-1].bits_per_parameter_step)
    if not families:
        return None
    figure, (axes,) = _figure(size)
    look, shown, unit = styles(c), [], "percent" if c.metric.unit == "share" else ""
    for name, members in families:
        style = look[min(members, key=lambda m: m.bits_per_parameter_step)]  # as in the other pictures
        x, y = [m.bits_per_parameter_step for m in members], [m.last.mean for m in members]
        bars = [m.last.deviation for m in members]
        axes.errorbar(x, y, bars if any(bars) else None, color=style.colour, linestyle=style.dash, marker=style.marker, markersize=4.5,
                      linewidth=1.4, elinewidth=0.8, capsize=2, label=_wrapped(name, 24))  # fmt: skip
        shown.append([name, style.colour, x, y])
    _scale(axes.yaxis, [y for line in shown for y in line[3]], unit)
    _logarithmic(axes.xaxis, (1.0, 3.0), _short)
    axes.set_xlabel("bits sent per parameter and step")
    axes.set_ylabel("last " + _metric_label(c))
    if size[0] >= 4:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, handlelength=2.6)
    else:
        _legend(figure, axes.get_legend_handles_labels(), fixed)
    return figure, [(axes, {"x": "bits", "unit": unit, "lines": shown})]


def _phases(c: Comparison, size: tuple[float, float]) -> Drawing | None:
    methods = [m for m in c.methods if 0 < m.times["step"] < MOST]
    if not methods:
        return None
    figure, (axes,) = _figure(size)
    rows, left = np.arange(len(methods))[::-1], np.zeros(len(methods))
    for part, colour in PART_COLOURS.items():
        widths = np.array([1000 * value if (value := m.times[part]) > 0 else 0.0 for m in methods])
        if any(widths):
            look = {"color": colour, "hatch": _HATCHES.get(part), "label": part_label(part)}
            axes.barh(rows, widths, 0.7, left, edgecolor="#444444", linewidth=0.4, **look)
        left = left + widths
    for row, end in zip(rows, left):
        axes.annotate(f"{end:.3g} ms", (end, row), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [_wrapped(m.name, 22) for m in methods])
    axes.grid(False, axis="y")
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds per step" + (f"\n{c.emulated_link}" if c.emulated_link else ""))
    _legend(figure, axes.get_legend_handles_labels(), fixed=True)
    return figure, []


def picture(c: Comparison, what: str, kind: str, size: tuple[float, float | None]) -> bytes:
    """A picture for a paper: `what` is one of style.PICTURES, or "" for the metric; `kind` pdf, svg or png; `size` in inches.
    Raises UserError if there is nothing to draw."""
    width, height = size
    fixed, height = (
        height is not None,
        height or (max(1.6, 0.34 * len(c.methods) + 1.3) if what == "phases" else min(0.68 * width, 3.2)),
    )
    if what == "phases":
        drawing = _phases(c, (width, height))
    elif what == "bits":
        drawing = _bits(c, (width, height), fixed)
    else:
        names = ["steps"] if what == "loss" else [what] if what else list(AXES)[: max(1, min(3, int(width / _LEAST_PANEL)))]
        drawing = _line_up(c, "loss" if what == "loss" else "quality", names, (width, height), fixed)
    if drawing is None:
        if what == "bits":
            raise UserError("--out: no complete run was evaluated and sent something, so there is nothing to draw")
        raise UserError("--out: no run was evaluated, so there is nothing to draw" if c.has_times else
                        "--out: a table has no records on the way to draw; .bits." + kind + " draws it")  # fmt: skip
    data = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    drawing[0].savefig(data, format=kind, dpi=300, metadata=metadata)
    return data.getvalue()


def page_svg(c: Comparison, what: str, axis: str = "") -> str:
    """A picture for a page, as an <svg> with the values to point at; "" if there is nothing to draw. `what`: quality, loss, bytes
    (each over an axis of AXES) or bits."""
    size = (5.6, 3.1)
    drawing = _bits(c, size) if what == "bits" else _line_up(c, what, [axis], size)
    return _inline(*drawing, f"{what}{axis}") if drawing else ""


def _inline(figure: Any, panels: list[Panel], salt: str) -> str:
    data = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):  # ids differ between the drawings of a page
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", data.getvalue(), flags=re.S)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis)[\w.]*"', "", svg)
    svg = re.sub(r' (width|height)="[^"]*"', "", svg, count=2)
    (width, height), plots = 72 * figure.get_size_inches(), []
    short: Callable[[Any], list[float | None]] = lambda values: [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]
    for axes, shown in panels:
        box = axes.get_position()
        lines = [[one_line(name), colour, short(x), short(y)] for name, colour, x, y in shown["lines"]]
        plots.append({
            "box": [box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height], "xlim": axes.get_xlim(),
            "ylim": axes.get_ylim(), "log": [axes.get_xscale() == "log", axes.get_yscale() == "log"], **shown, "lines": lines,
        })  # fmt: skip
    svg = svg.replace("<svg", f"<svg data-plot='{html.escape(json.dumps(plots), quote=True)}'", 1)
    for colour, name in ((INK, "--ink"), (GRID, "--grid"), (FAINT, "--faint")):
        svg = svg.replace(colour, f"var({name})")
    return svg


def recorded_methods(c: Comparison) -> dict[Method, list[Record]]:
    """By method the records of the accumulated gradient of its first run that has some."""
    first = {m: next((run.distributions for run in m.runs if run.distributions), []) for m in c.methods}
    return {m: records for m, records in first.items() if records}


def distribution_svg(c: Comparison, method: Method) -> str:
    """A method's histograms of the accumulated gradient at its first, middle and last record."""
    records = recorded_methods(c)[method]
    chosen = [records[i] for i in sorted({0, len(records) // 2, len(records) - 1})]
    figure, panels = _figure((9.6, 3.0), len(chosen))
    for axes, record in zip(panels, chosen):
        _histogram(axes, record, styles(c)[method])
    panels[0].set_ylabel("density")
    return _inline(figure, [], f"distribution{c.methods.index(method)}")


def contraction_svg(c: Comparison) -> str:
    """The contraction of top-k of all methods, and the energy captured, over steps; "" if nothing was recorded."""
    figure, panels = _figure((9.6, 3.0), 2, sharey=False)
    look = styles(c)
    for axes, captured in zip(panels, (False, True)):
        axes.set_ylabel("1 - contraction: energy captured" if captured else "contraction")
        axes.set_xlabel("step")
        for m, records in recorded_methods(c).items():
            for key, dash in (("bound", (0, (7, 4))), ("bell_bound", (0, (2, 3))), ("contraction", "-")):
                rows = [(r.step, abs(captured - getattr(r, key))) for r in records if 0 <= getattr(r, key) <= 1]
                rows = [row for row in rows if row[1] > 0 or not captured]
                dots = {"marker": look[m].marker, "markersize": 3} if key == "contraction" else {}
                if rows:
                    axes.plot(*zip(*rows), color=look[m].colour, linestyle=dash, linewidth=1.5 if dots else 1.0, **dots)
    if panels[1].lines:
        _logarithmic(panels[1].yaxis, (1.0, 2.0, 5.0), lambda v: f"{v:g}")
    return _inline(figure, [], "contraction") if panels[0].lines else ""


def _histogram(axes: Any, record: Record, style: Style) -> None:
    reach, counts = 8.0, record.histogram
    width = 2 * reach / max(1, len(counts))
    grid = np.arange(-160, 161) * 0.05
    axes.plot(grid, np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi), color=INK, linewidth=1, linestyle=(0, (7, 4)))
    deviation, scale = record.deviation, record.laplace_scale
    if 0 < deviation < MOST and 0 < scale < MOST:
        shift, b = (record.median - record.mean) / deviation, scale / deviation
        if abs(shift) < MOST and b > 1e-9:
            laplace = np.maximum(np.exp(-np.minimum(700, abs(grid - shift) / b)) / (2 * b), 1e-300)
            axes.plot(grid, laplace, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    x = [-reach + width * (i + 0.5) for i in range(len(counts))]
    y = [count / record.size / width if count else math.nan for count in counts]
    axes.plot(x, y, color=style.colour, linewidth=1.5)
    _logarithmic(axes.yaxis, (1.0,), lambda v: f"{v:g}")
    known = [v for v in y if v > 0]
    axes.set_ylim(min([1e-6, *(v / 2 for v in known)]), max([2.0, *(1.5 * v for v in known)]))
    each = f", of {deviation:.3g} each" if 0 < deviation < MOST else ""
    axes.set_xlabel(f"step {record.step}: standard deviations{each}")
