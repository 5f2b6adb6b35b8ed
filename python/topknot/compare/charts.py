"""The pictures, drawn by matplotlib: for a paper (PDF, SVG, PNG) or a page. There text and grid take the page's colours, and the
values that pointing at it shows go along as JSON."""

import functools
import html
import io
import json
import math
import operator
import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from .comparison import Comparison, Method, families_of, value_text
from .read import MOST, Record, Run, UserError, one_line
from .style import FAINT, GRID, INK, PART_COLOURS, Style, part_label, styles
from .tables import bytes_text

_HATCHES = {"encode": "////", "exposed": "xxxx", "decode": "\\\\\\\\", "update": "...."}
_LEAST_PANEL = 2.1  # inches
_POINTS = 260
_LONG, _SHORT = (0, (7, 4)), (0, (2, 3))  # dashes
_FIELDS = {"quality": "value", "loss": "loss", "bytes": "sent_so_far"}
AXES = {"time": "training time", "epochs": "epoch", "steps": "step"}

matplotlib.rcParams.update({
    "font.size": 8, "axes.edgecolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "grid.color": GRID, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "svg.fonttype": "none", "pdf.fonttype": 42, "axes.formatter.useoffset": False, "text.parse_math": False,
    "font.family": ["DejaVu Sans"], "hatch.linewidth": 0.5, **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
})  # fmt: skip


class Curve(NamedTuple):
    """A quantity of a run or of a method's mean. A row: the positions on AXES, the value and its deviation."""

    method: Method
    rows: Any
    incomplete: bool


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
    return np.column_stack([same.mean(axis=0)[:, :4], same[:, :, 3].std(axis=0, ddof=1)])


@functools.cache
def curves_of(c: Comparison, what: str) -> list[Curve]:
    """By method each incomplete run by itself, then the mean of the complete ones. `what`: quality, loss or bytes."""
    curves = []
    for m in c.methods:
        curves += [Curve(m, _run_rows(run, what), True) for run in m.runs if not run.end]
        curves += [Curve(m, _mean_rows([_run_rows(run, what) for run in m.complete]), False)] if m.complete else []
    known = [curve for curve in curves if np.isfinite(curve.rows[:, 3]).any()]
    return [curve._replace(rows=_thinned(curve.rows)) for curve in known]


def _figure(size: tuple[float, float], panels: int = 1, sharey: bool = True) -> tuple[Any, list[Any]]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=sharey)[0])


def _scale(axis: Any, values: Any, unit: str) -> None:
    """A logarithmic scale if the values are far apart; ticks in percent or bytes."""
    low, high = float(min(values)), float(max(values))
    texts: dict[str, Callable[[float], str]] = {"bytes": bytes_text, "percent": lambda v: f"{100 * v:.10g} %"}
    text = texts.get(unit, _short)
    if unit != "percent" and low > 0 and high / low > 60:
        _logarithmic(axis, (1.0, 3.0) if high / low < 1000 else (1.0,), text)
    elif unit or high >= 1e4:
        axis.set_major_formatter(lambda v, _: text(v))


def _logarithmic(axis: Any, ticks: tuple[float, ...], text: Callable[[float], str]) -> None:
    """A logarithmic axis with ticks at these multiples of powers of ten."""
    axis.axes.set(**{axis.axis_name + "scale": "log"})
    axis.set_major_locator(ticker.LogLocator(10, subs=ticks, numticks=12))
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_major_formatter(lambda v, _: text(v))


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
    to_axes, left = axes.transData - axes.transAxes, axes.get_xlim()[0]
    labels = [(float(to_axes.transform((left, y))[1]), _wrapped(name, 18), colour) for y, name, colour in ends]
    labels.sort(key=operator.itemgetter(0))
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
    width, height = 72 * figure.get_size_inches()
    columns = max(1, min(len(entries[1]), int(width / (4.6 * min(max(map(len, entries[1])), 48) + 42))))
    names = [_wrapped(name, 48) for name in entries[1]]
    figure.legend(entries[0], names, loc="upper left", ncol=columns, frameon=False, handlelength=2.6)
    room = 12.5 * (-(-len(names) // columns) + sum(name.count("\n") for name in names)) + 8
    height = height if fixed else max(height, room + height * 2 / 3)
    figure.set_figheight(height / 72)
    figure.get_layout_engine().set(rect=(0, 0, 1, max(0.3, 1 - room / height)))  # which a layout does since matplotlib 3.7 alone


def _line_up(c: Comparison, what: str, names: list[str], size: tuple[float, float], fixed: bool = False) -> Drawing | None:
    """The curves over some axes side by side; None if there are none."""
    curves, look = curves_of(c, what), styles(c)
    label, said = {"quality": _metric_label(c), "loss": ("train loss", ""), "bytes": ("sent by a rank", "bytes")}[what]
    target = c.target if what == "quality" and abs(c.target) < MOST else math.nan
    values = np.concatenate([[]] + [curve.rows[:, 3] + side * curve.rows[:, 4] for curve in curves for side in (-1, 1)])
    values = values[values > 0 if what == "bytes" else np.isfinite(values)]
    if not len(values):
        return None  # of bytes: one rank sends nothing
    figure, all_axes = _figure(size, len(names))
    panels: list[Panel] = []
    handles: dict[Method, Any] = {}
    for axes, name in zip(all_axes, names):
        place = list(AXES).index(name)
        here = [curve for curve in curves if math.isfinite(curve.rows[-1, place])]
        longest = max((curve.rows[-1, place] for curve in here), default=0.0)
        divisor, unit = (1, " (s)") if longest < 240 else (60, " (min)") if longest < 14400 else (3600, " (h)")
        divisor, unit = (divisor, unit) if name == "time" else (1, "")
        shown = []
        for m, rows, incomplete in here:
            colour, dash, marker = look[m]
            x, value, deviation = rows[:, place] / divisor, rows[:, 3], rows[:, 4]
            dots = {"marker": marker, "markersize": 3, "markevery": max(1, len(x) // 12)} if what == "quality" else {}
            handles[m] = axes.plot(x, value, color=colour, linestyle=dash, linewidth=0.8 if incomplete else 1.5, **dots)[0]
            if incomplete:
                axes.plot(x[-1:], value[-1:], color=colour, marker="x", markersize=6)
            if any(deviation > 0) and what != "bytes":
                axes.fill_between(x, value - deviation, value + deviation, color=colour, alpha=0.15, linewidth=0)
            first = next((i for i, v in enumerate(value) if c.metric.reaches(v, target)), None)
            if first is not None and not incomplete and name == names[0]:
                axes.plot(x[first], value[first], "o", markersize=8, fillstyle="none", color=colour, markeredgewidth=1)
            shown.append([m.name + (" (incomplete)" if incomplete else ""), colour, x, value])
        if math.isfinite(target):
            axes.axhline(target, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xlabel(AXES[name] + unit + (f"\n{c.emulated_link}" if name == "time" and c.emulated_link else ""))
        axes.set_xlim(0, max(longest / divisor, 1e-9) * 1.02)
        panels.append((axes, {"x": AXES[name] + unit, "unit": said, "lines": shown}))
    axes = all_axes[0]
    if math.isfinite(target):
        values = np.append(values, target)
        side, at = (-2, "top") if c.metric.higher_is_better else (2, "bottom")  # at the right curves are beyond the target
        axes.annotate("target " + value_text(c.metric, target), (0.99, target), xycoords=axes.get_yaxis_transform(), xytext=(0, side),
                      textcoords="offset points", ha="right", va=at, fontsize=6.5, color=FAINT)  # fmt: skip
    _scale(axes.yaxis, values, said)
    axes.set_ylabel(label)
    if said == "percent":
        low, high = axes.get_ylim()
        bottom = max(low, min(0.0, *values)) if low < 0 else 0 if low < 0.3 * high else low
        axes.set_ylim(bottom, min(high, 1.02) if max(values) <= 1 else high)
    last = {m: rows[np.isfinite(rows[:, 3]), 3][-1] for m, rows, _ in curves}  # a mean comes after its runs
    if not _label_ends(all_axes[-1], [(value, m.name, look[m].colour) for m, value in last.items()]):
        _legend(figure, (list(handles.values()), [m.name for m in handles]), fixed)
    return figure, panels


def _metric_label(c: Comparison) -> tuple[str, str]:
    """The label of an axis, and its unit for _scale()."""
    unit = c.metric.unit
    return c.metric.long_title + ("" if unit in ("", "share") else f" ({unit})"), "percent" if unit == "share" else ""


def _bits(c: Comparison, size: tuple[float, float], fixed: bool = False) -> Drawing | None:
    families = sorted(families_of(c).items(), key=lambda item: -item[1][-1].bits_per_parameter_step)
    if not families:
        return None
    figure, (axes,) = _figure(size)
    look, shown, (label, unit) = styles(c), [], _metric_label(c)
    for name, members in families:
        colour, dash, marker = look[members[0]]  # as in the other pictures
        x, y, bars = zip(*((m.bits_per_parameter_step, m.last.mean, m.last.deviation) for m in members))
        axes.errorbar(x, y, bars if any(bars) else None, color=colour, linestyle=dash, marker=marker, markersize=4.5,
                      linewidth=1.4, elinewidth=0.8, capsize=2, label=_wrapped(name, 24))  # fmt: skip
        shown.append([name, colour, x, y])
    _scale(axes.yaxis, [y for line in shown for y in line[3]], unit)
    _logarithmic(axes.xaxis, (1.0, 3.0), _short)
    axes.set(xlabel="bits sent per parameter and step", ylabel="last " + label)
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
        widths = 1000 * np.array([max(0.0, np.nan_to_num(m.times[part])) for m in methods])
        if any(widths):
            look = {"color": colour, "hatch": _HATCHES.get(part), "label": part_label(part)}
            axes.barh(rows, widths, 0.7, left, edgecolor="#444444", linewidth=0.4, **look)
        left = left + widths
    for row, end in zip(rows, left):
        axes.annotate(f"{end:.3g} ms", (end, row), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [_wrapped(m.name, 22) for m in methods])
    axes.grid(False, axis="y")
    axes.margins(x=0.16)
    axes.set(xlim=(0, None), xlabel="milliseconds per step" + (f"\n{c.emulated_link}" if c.emulated_link else ""))
    _legend(figure, axes.get_legend_handles_labels(), fixed=True)
    return figure, []


def picture(c: Comparison, what: str, kind: str, size: tuple[float, float | None]) -> bytes:
    """A picture for a paper: `what` is one of style.PICTURES, or "" for the metric; `kind` pdf, svg or png; `size` in inches.
    Raises UserError if there is nothing to draw."""
    width, fixed = size[0], size[1] is not None
    height = size[1] or (max(1.6, 0.34 * len(c.methods) + 1.3) if what == "phases" else min(0.68 * width, 3.2))
    if what == "phases":
        drawing = _phases(c, (width, height))
    elif what == "bits":
        drawing = _bits(c, (width, height), fixed)
    else:
        names = ["steps"] if what == "loss" else [what] if what else list(AXES)[: max(1, min(3, int(width / _LEAST_PANEL)))]
        drawing = _line_up(c, "loss" if what == "loss" else "quality", names, (width, height), fixed)
    if drawing is None:
        why = "no complete run was evaluated and sent something" if what == "bits" else "no run was evaluated"
        if what == "bits" or c.has_times:
            raise UserError(f"--out: {why}, so there is nothing to draw")
        raise UserError(f"--out: a table has no records on the way to draw; .bits.{kind} draws it")
    data = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    drawing[0].savefig(data, format=kind, dpi=300, metadata=metadata)
    return data.getvalue()


def page_svg(c: Comparison, what: str, axis: str = "") -> str:
    """A picture for a page, as an <svg> with the values to point at; "" if there is nothing to draw. `what`: quality, loss, bytes
    (each over an axis of AXES) or bits."""
    drawing = _bits(c, (5.6, 3.1)) if what == "bits" else _line_up(c, what, [axis], (5.6, 3.1))
    return _inline(*drawing, what + axis) if drawing else ""


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
        axes.set(ylabel="1 - contraction: energy captured" if captured else "contraction", xlabel="step")
        for m, records in recorded_methods(c).items():
            for key, dash in (("bound", _LONG), ("bell_bound", _SHORT), ("contraction", "-")):
                rows = [(r.step, abs(captured - getattr(r, key))) for r in records if 0 <= getattr(r, key) <= 1]
                rows = [row for row in rows if row[1] > 0 or not captured]
                dots = {"marker": look[m].marker, "markersize": 3} if key == "contraction" else {}
                if rows:
                    axes.plot(*zip(*rows), color=look[m].colour, linestyle=dash, linewidth=1.5 if dots else 1.0, **dots)
    if panels[1].lines:
        _logarithmic(panels[1].yaxis, (1.0, 2.0, 5.0), "{:g}".format)
    return _inline(figure, [], "contraction") if panels[0].lines else ""


def _histogram(axes: Any, record: Record, style: Style) -> None:
    reach, counts, deviation = 8.0, record.histogram, record.deviation
    width, known = 2 * reach / max(1, len(counts)), 0 < deviation < MOST
    grid = np.arange(-160, 161) * 0.05
    axes.plot(grid, np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi), color=INK, linewidth=1, linestyle=_LONG)
    if known and 0 < record.laplace_scale < MOST:
        shift, b = (record.median - record.mean) / deviation, record.laplace_scale / deviation
        if abs(shift) < MOST and b > 1e-9:
            laplace = np.maximum(np.exp(-np.minimum(700, abs(grid - shift) / b)) / (2 * b), 1e-300)
            axes.plot(grid, laplace, color=INK, linewidth=1, linestyle=_SHORT)
    x = [-reach + width * (i + 0.5) for i in range(len(counts))]
    y = [count / record.size / width if count else math.nan for count in counts]
    axes.plot(x, y, color=style.colour, linewidth=1.5)
    _logarithmic(axes.yaxis, (1.0,), "{:g}".format)
    axes.set_ylim(min([1e-6, *(v / 2 for v in y if v > 0)]), max([2.0, *(1.5 * v for v in y if v > 0)]))
    axes.set_xlabel(f"step {record.step}: standard deviations" + (f", of {deviation:.3g} each" if known else ""))
