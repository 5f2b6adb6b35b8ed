"""The pictures, drawn by matplotlib, which is imported only when something is drawn.

A picture is for a paper (PDF, SVG, PNG) or a page: there text and grid take the page's colours, and the values that pointing at
it shows go along as JSON.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable
from typing import Any

from .comparison import Comparison, Method, in_words, method_name, stat_of, value_text
from .read import Run, UserError, finite_mean, one_line
from .tables import bytes_text

INSTALL = "pictures need matplotlib: install python3-matplotlib (Debian) or pip install matplotlib"
PICTURES = ("time", "epochs", "steps", "loss", "bits", "phases")
PART_COLOURS = {
    "data": "#bbbbbb", "forward": "#4477aa", "backward": "#9ad2ee", "encode": "#228833", "exposed": "#ee6677", "decode": "#aa3377",
    "update": "#ddcc55", "other": "#e4e4e4",
}  # fmt: skip
_HATCHES = {"encode": "////", "exposed": "xxxx", "decode": "\\\\\\\\", "update": "...."}
# Dark and light in turn, so that neighbours differ in grey too; dashes and markers tell them apart as well.
_COLOURS = ("#0b5fa5", "#e07b00", "#7a1fa2", "#2f9e6e", "#b3123f", "#6f8fd6", "#5b4a00", "#d264b0", "#006d77", "#a98a00")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)))
_MARKERS = "osD^vPX*<>"
INK = "#010203"
"""The colour of text and of dense runs; on a page its own colours stand for this one and the next two."""
_GRID, _FAINT = "#d9dcd1", "#5a6368"
_LEAST_PANEL = 2.1  # inches
_POINTS = 260
_MOST = 1e12  # a value beyond is not drawn
_AMOUNTS = {"compress.density", "compress.warmup", "compress.threshold", "compress.rank", "compress.levels"}
AXES = {"time": "training time", "epochs": "epoch", "steps": "step"}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def need_matplotlib() -> None:
    """Raises UserError, which says how to install it, if matplotlib is missing."""
    if not available():
        raise UserError(INSTALL)


@dataclasses.dataclass(frozen=True)
class Style:
    """A line's look."""

    colour: str
    dash: Any = "-"
    marker: str = "o"


def styles(c: Comparison) -> list[Style]:
    """By method: dense is black, each other one has a colour of its own while there are some, and a dash and a marker."""
    result, dense, other = [], 0, 0
    for method in c.methods:
        if method.dense:
            result.append(Style(INK, _DASHES[dense % len(_DASHES)], _MARKERS[dense % len(_MARKERS)]))
            dense += 1
        else:
            at = other
            dash = _DASHES[(at + at // len(_COLOURS)) % len(_DASHES)]
            result.append(Style(_COLOURS[at % len(_COLOURS)], dash, _MARKERS[(at + 1) % len(_MARKERS)]))
            other += 1
    return result


@dataclasses.dataclass
class Curve:
    """A quantity by time, epoch and step, of a run or of a method's mean."""

    at: list[tuple[float, float, float]]
    value: list[float]
    deviation: list[float]
    method: int = 0
    incomplete: bool = False

    def axis(self, name: str) -> list[float]:
        """The positions on an axis of AXES."""
        place = list(AXES).index(name)
        return [point[place] for point in self.at]


def smooth(values: list[float], window: int) -> list[float]:
    """The centred moving mean of the finite values, narrower at the ends."""
    if window <= 1:
        return values
    known = [math.isfinite(value) for value in values]
    counts = [0, *itertools.accumulate(known)]
    sums = [0.0, *itertools.accumulate(value if is_known else 0.0 for value, is_known in zip(values, known))]
    bounds = ((max(0, i - window // 2), min(len(values), i + (window + 1) // 2)) for i in range(len(values)))
    return [
        (sums[high] - sums[low]) / (counts[high] - counts[low]) if counts[high] > counts[low] else math.nan
        for low, high in bounds
    ]


def _run_curve(run: Run, what: str) -> Curve:
    if what == "quality":
        rows = [((e.time, e.epoch, float(e.step)), e.value) for e in run.evals]
    else:
        rows = [((s.time, s.epoch, float(s.step)), s.loss if what == "loss" else s.sent_so_far) for s in run.steps]
    # Without the steps of an epoch, epochs are not known.
    rows = [(at, v) for at, v in rows if 0 <= at[0] < _MOST and 0 <= at[2] < _MOST and (math.isnan(at[1]) or 0 <= at[1] < _MOST)]
    values = [value if abs(value) < _MOST else math.nan for _, value in rows]
    if what == "loss":
        values = smooth(values, max(1, len(values) // 40))
    return Curve([at for at, _ in rows], values, [0.0] * len(rows))


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean over runs at the steps that all of them have; absent where one is not finite, which a mean would hide."""
    if len(curves) == 1:
        return curves[0]
    places = [{at[2]: i for i, at in enumerate(curve.at)} for curve in curves]
    mean = Curve([], [], [])
    for step in _thinned([step for step in places[0] if all(step in place for place in places)]):
        here = [(curve.at[place[step]], curve.value[place[step]]) for curve, place in zip(curves, places)]
        stat = stat_of(value for _, value in here)
        mean.at.append((finite_mean([at[0] for at, _ in here]), finite_mean([at[1] for at, _ in here]), step))
        mean.value.append(stat.mean if stat.count == len(here) else math.nan)
        mean.deviation.append(stat.deviation)
    return mean


def curves_of(c: Comparison, what: str) -> list[Curve]:
    """By method the mean of the complete runs, and each incomplete run by itself. `what`: quality, loss or bytes."""
    if what in c.curves:
        return c.curves[what]
    result = []
    for m, method in enumerate(c.methods):
        complete = [_run_curve(c.runs[i], what) for i in method.runs if c.runs[i].end]
        cut = [dataclasses.replace(_run_curve(c.runs[i], what), incomplete=True) for i in method.runs if not c.runs[i].end]
        result += [dataclasses.replace(curve, method=m) for curve in cut + ([mean_curve(complete)] if complete else [])]
    return c.curves.setdefault(what, [thin(curve) for curve in result if any(map(math.isfinite, curve.value))])


def _thinned(values: list[Any]) -> list[Any]:
    """At most about _POINTS of the values, the last one among them."""
    every = max(1, len(values) // _POINTS)
    return values if every == 1 else values[:-1:every] + values[-1:]


def thin(curve: Curve) -> Curve:
    """At most about _POINTS points, the last one among them."""
    return dataclasses.replace(curve, at=_thinned(curve.at), value=_thinned(curve.value), deviation=_thinned(curve.deviation))


def families_of(c: Comparison) -> dict[str, list[Method]]:
    """Methods that differ only in how much they send, by name and by the bits that they send; the complete ones alone."""
    families: dict[str, list[Method]] = {}
    for i, m in enumerate(c.methods):
        if m.complete and abs(m.last.mean) < _MOST and 1 / _MOST < m.bits < _MOST:
            words = [
                in_words(key, values[i])
                for key, values in c.differing
                if key not in _AMOUNTS and not key.startswith("train.distribution") and c.tells_apart(values, i)
            ]
            families.setdefault(method_name(m.compressor, words), []).append(m)
    return {name: sorted(members, key=lambda m: m.bits) for name, members in families.items()}


@dataclasses.dataclass
class Drawing:
    """A figure and what pointing at its panels shows: by panel the names of x and y, and lines of name, colour, x and y."""

    figure: Any
    panels: list[tuple[Any, dict[str, Any]]] = dataclasses.field(default_factory=list)


def _figure(width: float, height: float, panels: int, sharey: bool = True) -> tuple[Any, list[Any]]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink = {key: INK for key in ("text.color", "axes.labelcolor", "axes.titlecolor")}
    matplotlib.rcParams.update({
        "font.size": 8, "axes.edgecolor": _FAINT, "xtick.color": _FAINT, "ytick.color": _FAINT, "xtick.labelcolor": INK,
        "ytick.labelcolor": INK, "grid.color": _GRID, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "pdf.fonttype": 42, "axes.formatter.useoffset": False,
        "text.parse_math": False, "font.family": ["DejaVu Sans"], "hatch.linewidth": 0.5, **ink,
    })  # fmt: skip
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=sharey)[0])


def _scale(axis: Any, values: list[float], percent: bool = False, unit: str = "") -> None:
    """A logarithmic scale if the values are far apart; ticks in percent or bytes."""
    from matplotlib.ticker import FuncFormatter

    low, high = min(values), max(values)
    wide = low > 0 and high / low > 60 and not percent
    plain = (
        bytes_text if unit == "bytes" else (lambda v: f"{100 * v:.10g} %") if percent else _short if wide or high >= 1e4 else None
    )
    if wide:
        _logarithmic(axis, (1.0, 3.0) if high / low < 1000 else (1.0,), plain or _short)
    elif plain:
        axis.set_major_formatter(FuncFormatter(lambda v, _: plain(v)))


def _logarithmic(axis: Any, ticks: tuple[float, ...], text: Callable[[float], str]) -> None:
    """A logarithmic axis with ticks at these multiples of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set_yscale("log") if axis.axis_name == "y" else axis.axes.set_xscale("log")
    axis.set_major_locator(LogLocator(10, subs=ticks, numticks=12))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda v, _: text(v)))


def _short(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor or (letter != "k" and abs(value) >= factor):
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> bool:
    """Names lines right of a panel, at their ends' heights; False if there is no room. `ends`: height, name, colour."""
    figure = axes.figure
    names = [textwrap.fill(one_line(name), 18, break_on_hyphens=False) for _, name, _ in ends]
    figure.draw_without_rendering()
    height = axes.get_position().height * figure.get_figheight() * 72
    lines = [name.count("\n") + 1 for name in names]
    need = 9.6 / height
    if sum(lines) * need > 1 or figure.get_figwidth() / len(figure.axes) < 2.5:
        return False
    to_axes: Callable[..., Any] = lambda y: axes.transAxes.inverted().transform(
        axes.transData.transform((axes.get_xlim()[0], y))
    )[1]
    order = sorted(range(len(ends)), key=lambda i: to_axes(ends[i][0]))
    places = {i: float(to_axes(ends[i][0])) for i in order}
    for _ in range(200):  # push neighbours apart, and all of them into the panel
        for below, above in zip(order, order[1:]):
            gap = (lines[below] + lines[above]) / 2 * need
            if (short := gap - (places[above] - places[below])) > 0:
                places[below] -= short / 2
                places[above] += short / 2
        for i in order:
            places[i] = min(max(places[i], lines[i] * need / 2), 1 - lines[i] * need / 2)
    for i in order:
        axes.text(1.025, places[i], names[i], color=ends[i][2], transform=axes.transAxes, va="center", ha="left", linespacing=1.0)
    return True


def _legend(drawing: Drawing, handles: list[Any], names: list[str]) -> None:
    """A legend above the panels, in as many columns as fit."""
    longest = max(map(len, names))
    columns = max(1, min(len(names), int(drawing.figure.get_figwidth() * 72 / (4.6 * min(longest, 40) + 42))))
    wrapped = [textwrap.fill(one_line(name), 40) for name in names]
    drawing.figure.legend(
        handles, wrapped, loc="outside upper left" if _outside() else "upper left", ncol=columns, frameon=False, handlelength=2.6
    )
    if not _outside():  # before matplotlib 3.7 a layout leaves no room for it
        rows = -(-len(names) // columns) + sum(name.count("\n") for name in wrapped)
        engine = drawing.figure.get_layout_engine()
        engine.set(rect=(0, 0, 1, max(0.3, 1 - (rows * 12.5 + 8) / (drawing.figure.get_figheight() * 72))))


def _outside() -> bool:
    import matplotlib

    return tuple(map(int, matplotlib.__version__.split(".")[:2])) >= (3, 7)


def _line_up(c: Comparison, what: str, names: list[str], size: tuple[float, float]) -> Drawing | None:
    """The curves over some axes side by side; None if there are none."""
    curves = curves_of(c, what)
    if not curves:
        return None
    figure, panels = _figure(*size, len(names))
    drawing, look = Drawing(figure), styles(c)
    share = what == "quality" and c.metric.unit == "share"
    target = c.target if what == "quality" and abs(c.target) < _MOST else math.nan
    values = [v + s * d for curve in curves for v, d in zip(curve.value, curve.deviation) for s in (-1, 1) if math.isfinite(v)]
    if what == "bytes":
        values = [v for v in values if v > 0]
        if not values:
            return None  # one rank sends nothing
    values += [target] if math.isfinite(target) else []
    unit = f" ({c.metric.unit})" if c.metric.unit not in ("", "share") else ""
    title = {"quality": c.metric.long_title + unit, "loss": "train loss", "bytes": "sent by a rank"}[what]
    handles: dict[int, Any] = {}
    for axes, name in zip(panels, names):
        here = [curve for curve in curves if math.isfinite(curve.axis(name)[-1])]
        longest = max((curve.axis(name)[-1] for curve in here), default=0.0)
        divisor, suffix = (1, " (s)") if longest < 240 else (60, " (min)") if longest < 14400 else (3600, " (h)")
        divisor, suffix = (divisor, suffix) if name == "time" else (1, "")
        shown = []
        for curve in here:
            style, method = look[curve.method], c.methods[curve.method]
            x = [v / divisor for v in curve.axis(name)]
            dots = {"marker": style.marker, "markersize": 3, "markevery": max(1, len(x) // 12)} if what == "quality" else {}
            (line,) = axes.plot(
                x, curve.value, color=style.colour, linestyle=style.dash, linewidth=0.8 if curve.incomplete else 1.5, **dots
            )
            if not curve.incomplete or curve.method not in handles:
                handles[curve.method] = line
            if curve.incomplete:
                axes.plot(x[-1:], curve.value[-1:], color=style.colour, marker="x", markersize=6)
            if any(d > 0 for d in curve.deviation) and what != "bytes":
                bounds = ([v + s * d for v, d in zip(curve.value, curve.deviation)] for s in (-1, 1))
                axes.fill_between(x, *bounds, color=style.colour, alpha=0.15, linewidth=0)
            if math.isfinite(target) and not curve.incomplete:
                first = next((i for i, v in enumerate(curve.value) if c.metric.reaches(v, target)), None)
                if first is not None and name == names[0]:
                    axes.plot(
                        x[first], curve.value[first], "o", markersize=8, fillstyle="none", color=style.colour, markeredgewidth=1
                    )
            shown.append([method.name + (" (incomplete)" if curve.incomplete else ""), style.colour, x, curve.value])
        if math.isfinite(target):
            axes.axhline(target, color=_FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xlabel(AXES[name] + suffix + (f"\n{c.emulated_link}" if name == "time" and c.emulated_link else ""))
        axes.set_xlim(0, max(longest / divisor, 1e-9) * 1.02)
        drawing.panels.append(
            (axes, {"x": AXES[name] + suffix, "unit": "percent" if share else "bytes" if what == "bytes" else "", "lines": shown})
        )
    _scale(panels[0].yaxis, values, share, "bytes" if what == "bytes" else "")
    panels[0].set_ylabel(title)
    if math.isfinite(target):
        text = "target " + value_text(c.metric, stat_of([target]))
        below = c.metric.higher_is_better  # at the right curves are beyond the target
        panels[0].annotate(text, (0.99, target), xycoords=panels[0].get_yaxis_transform(), xytext=(0, -2 if below else 2),
                           textcoords="offset points", ha="right", va="top" if below else "bottom", fontsize=6.5, color=_FAINT)  # fmt: skip
    if share:
        low, high = panels[0].get_ylim()
        bottom = max(low, min(0.0, *values)) if low < 0 else 0 if low < 0.3 * high else low
        panels[0].set_ylim(bottom, min(high, 1.02) if max(values) <= 1 else high)
    whole = {curve.method for curve in curves if not curve.incomplete}
    last = {curve.method: curve.value for curve in curves if not curve.incomplete or curve.method not in whole}
    final = {m: next(v for v in reversed(values) if math.isfinite(v)) for m, values in last.items()}
    ends = [(value, c.methods[m].name, look[m].colour) for m, value in final.items()]
    if not _label_ends(panels[-1], ends):
        _legend(drawing, list(handles.values()), [c.methods[m].name for m in handles])
    return drawing


def _bits(c: Comparison, size: tuple[float, float]) -> Drawing | None:
    families = families_of(c)
    if not families:
        return None
    figure, (axes,) = _figure(*size, 1)
    shown: list[list[Any]] = []
    drawing, look = Drawing(figure), styles(c)
    for name, members in sorted(families.items(), key=lambda item: -item[1][-1].bits):
        style = look[next(i for i, m in enumerate(c.methods) if m is members[0])]  # as in the other pictures
        x, y = [m.bits for m in members], [m.last.mean for m in members]
        bars = [m.last.deviation for m in members]
        axes.errorbar(x, y, bars if any(bars) else None, color=style.colour, linestyle=style.dash, marker=style.marker, markersize=4.5, linewidth=1.4,
                      elinewidth=0.8, capsize=2, label=textwrap.fill(one_line(name), 24, break_on_hyphens=False))  # fmt: skip
        shown.append([name, style.colour, x, y])
    share = c.metric.unit == "share"
    _scale(axes.yaxis, [y for line in shown for y in line[3]], share)
    _logarithmic(axes.xaxis, (1.0, 3.0), _short)
    axes.set_xlabel("bits sent per parameter and step")
    axes.set_ylabel(f"last {c.metric.long_title}" + ("" if share or not c.metric.unit else f" ({c.metric.unit})"))
    if size[0] >= 4:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, handlelength=2.6)
    else:
        handles, names = axes.get_legend_handles_labels()
        _legend(drawing, handles, names)
    drawing.panels.append((axes, {"x": "bits", "unit": "percent" if share else "", "lines": shown}))
    return drawing


def _phases(c: Comparison, size: tuple[float, float]) -> Drawing | None:
    methods = [m for m in c.methods if 0 < m.times["total"] < _MOST]
    if not methods:
        return None
    figure, (axes,) = _figure(*size, 1)
    left = [0.0] * len(methods)
    rows = list(range(len(methods)))[::-1]
    for part, colour in PART_COLOURS.items():
        widths = [1000 * value if (value := m.times[part]) > 0 else 0.0 for m in methods]
        if any(widths):
            look = {"color": colour, "hatch": _HATCHES.get(part), "label": "exposed communication" if part == "exposed" else part}
            axes.barh(rows, widths, 0.7, left, edgecolor="#444444", linewidth=0.4, **look)
        left = [a + b for a, b in zip(left, widths)]
    for row, end in zip(rows, left):
        axes.annotate(f"{end:.3g} ms", (end, row), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [textwrap.fill(one_line(m.name), 22, break_on_hyphens=False) for m in methods])
    axes.grid(False, axis="y")
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds per step" + (f"\n{c.emulated_link}" if c.emulated_link else ""))
    drawing = Drawing(figure)
    _legend(drawing, *axes.get_legend_handles_labels())
    return drawing


def _draw(c: Comparison, what: str, size: tuple[float, float | None]) -> Drawing | None:
    width, height = size
    full = (width, height or (max(1.6, 0.34 * len(c.methods) + 1.3) if what == "phases" else min(0.68 * width, 3.2)))
    if what == "bits":
        return _bits(c, full)
    if what == "phases":
        return _phases(c, full)
    if what in ("loss", "bytes"):
        return _line_up(c, what, ["steps"], full)
    names = [what] if what else list(AXES)[: max(1, min(3, int(width / _LEAST_PANEL)))]
    return _line_up(c, "quality", names, full)


def picture(c: Comparison, what: str, kind: str, size: tuple[float, float | None]) -> bytes:
    """A picture for a paper: `what` is one of PICTURES, or "" for the metric; `kind` pdf, svg or png; `size` in inches. Raises
    UserError if there is nothing to draw."""
    need_matplotlib()
    drawing = _draw(c, what, size)
    if drawing is None:
        if what == "bits":
            raise UserError("--out: no complete run was evaluated and sent something, so there is nothing to draw")
        raise UserError("--out: no run was evaluated, so there is nothing to draw" if c.has_times else
                        "--out: a table has no records on the way to draw; .bits." + kind + " draws it")  # fmt: skip
    data = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    drawing.figure.savefig(data, format=kind, dpi=300, metadata=metadata)
    return data.getvalue()


def page_svg(c: Comparison, what: str, axis: str = "") -> str:
    """A picture for a page, as an <svg> with the values to point at; "" if there is nothing to draw. `what`: quality, loss, bytes
    (each over an axis of AXES) or bits."""
    size = (5.6, 3.1)
    drawing = _bits(c, size) if what == "bits" else _line_up(c, what, [axis], size)
    return _inline(drawing, f"{what}{axis}") if drawing else ""


def _inline(drawing: Drawing, salt: str) -> str:
    import matplotlib

    data = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):  # ids differ between the drawings of a page
        drawing.figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", data.getvalue(), flags=re.S)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis)[\w.]*"', "", svg)
    svg = re.sub(r'(<svg)([^>]*?) width="[^"]*"', r"\1\2", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for colour, name in ((INK, "--ink"), (_GRID, "--grid"), (_FAINT, "--faint")):
        svg = svg.replace(colour, f"var({name})")
    return svg.replace("<svg", f"<svg data-plot='{html.escape(json.dumps(_values(drawing)), quote=True)}'", 1)


def _values(drawing: Drawing) -> list[dict[str, Any]]:
    width, height = drawing.figure.get_figwidth() * 72, drawing.figure.get_figheight() * 72
    plots = []
    for axes, shown in drawing.panels:
        box = axes.get_position()
        short: Callable[..., Any] = lambda values: [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]
        lines = [[one_line(n), colour.replace(INK, "var(--ink)"), short(x), short(y)] for n, colour, x, y in shown["lines"]]
        plots.append({
            "box": [box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height], "xlim": axes.get_xlim(), "ylim": axes.get_ylim(),
            "log": [axes.get_xscale() == "log", axes.get_yscale() == "log"], **shown, "lines": lines,
        })  # fmt: skip
    return plots


def distribution_svg(c: Comparison, method: int | None) -> str:
    """A method's histograms of the accumulated gradient at its first, middle and last record; with None the contraction of
    top-k of all methods, and the energy captured, over steps. "" if nothing was recorded."""
    recorded = recorded_methods(c)
    look = styles(c)
    if method is not None:
        records = recorded[method]
        chosen = [records[i] for i in sorted({0, len(records) // 2, len(records) - 1})]
        figure, panels = _figure(9.6, 3.0, len(chosen))
        for axes, record in zip(panels, chosen):
            _histogram(axes, record, look[method])
        panels[0].set_ylabel("density")
        return _inline(Drawing(figure), f"distribution{method}")
    figure, panels = _figure(9.6, 3.0, 2, sharey=False)
    drawn = False
    for axes, captured in zip(panels, (False, True)):
        axes.set_ylabel("1 - contraction: energy captured" if captured else "contraction")
        axes.set_xlabel("step")
        for m, records in recorded.items():
            for key, dash in (("bound", (0, (7, 4))), ("bell_bound", (0, (2, 3))), ("contraction", "-")):
                rows = [(r["step"], 1 - r[key] if captured else r[key]) for r in records if 0 <= r[key] <= 1]
                rows = [row for row in rows if row[1] > 0 or not captured]
                drawn = drawn or bool(rows)
                dots = {"marker": look[m].marker, "markersize": 3} if key == "contraction" else {}
                if rows:
                    axes.plot(*zip(*rows), color=look[m].colour, linestyle=dash, linewidth=1.5 if dots else 1.0, **dots)
        if captured and drawn and axes.lines:
            _logarithmic(axes.yaxis, (1.0, 2.0, 5.0), lambda v: f"{v:g}")
    return _inline(Drawing(figure), "contraction") if drawn else ""


def recorded_methods(c: Comparison) -> dict[int, list[dict[str, Any]]]:
    """By method the records of the accumulated gradient of its first run that has some."""
    recorded: Callable[..., Any] = lambda method: (c.runs[i].distributions for i in method.runs if c.runs[i].distributions)
    first: dict[int, list[dict[str, Any]]] = {m: next(recorded(method), []) for m, method in enumerate(c.methods)}
    return {m: records for m, records in first.items() if records}


def _histogram(axes: Any, record: dict[str, Any], style: Style) -> None:
    reach, counts = 8.0, record["histogram"]
    width = 2 * reach / max(1, len(counts))
    grid = [-reach + 0.05 * i for i in range(int(2 * reach / 0.05) + 1)]
    axes.plot(grid, [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in grid], color=INK, linewidth=1, linestyle=(0, (7, 4)))
    deviation, scale = record["deviation"], record["laplace_scale"]
    if 0 < deviation < _MOST and 0 < scale < _MOST:
        shift, b = (record["median"] - record["mean"]) / deviation, scale / deviation
        if abs(shift) < _MOST and b > 1e-9:
            laplace = [max(math.exp(-min(700, abs(x - shift) / b)) / (2 * b), 1e-300) for x in grid]
            axes.plot(grid, laplace, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    x = [-reach + width * (i + 0.5) for i in range(len(counts))]
    y = [count / record["size"] / width if count else math.nan for count in counts]
    axes.plot(x, y, color=style.colour, linewidth=1.5)
    _logarithmic(axes.yaxis, (1.0,), lambda v: f"{v:g}")
    known = [v for v in y if v > 0]
    axes.set_ylim(min([1e-6, *(v / 2 for v in known)]), max([2.0, *(1.5 * v for v in known)]))
    each = f", of {deviation:.3g} each" if 0 < deviation < _MOST else ""
    axes.set_xlabel(f"step {record['step']}: standard deviations{each}")
