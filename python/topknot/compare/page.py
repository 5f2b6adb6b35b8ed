"""The page of a comparison and of `lab/netlab compare`: one file, no network; page.js shows values where one points."""

from __future__ import annotations

import html
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from . import charts
from .charts import INSTALL, PART_COLOURS
from .comparison import Comparison, stat_of, value_text
from .read import UserError, one_line, read_bytes
from .tables import Table, bytes_text, difference_table, result_table, run_table, time_table

_STYLE, _SCRIPT = (pathlib.Path(__file__).with_name(name) for name in ("page.css", "page.js"))


def escape(text: str) -> str:
    """The text for HTML, control characters as escapes."""
    return html.escape(one_line(str(text)))


def html_page(title: str, body: str, script: bool = True) -> str:
    """A whole page; `title` is plain text, `body` HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    code = f"<script>\n{_SCRIPT.read_text(encoding='utf-8')}</script>" if script else ""
    style = _STYLE.read_text(encoding="utf-8")
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{style}</style></head><body><main>\n{body}</main>{code}</body></html>\n'


def table_html(table: Table, kind: str = "", colours: Sequence[str] = ()) -> str:
    """A table; `kind` is its CSS class, `colours` go before the first cells."""
    cells: Callable[..., Any] = lambda tag, row: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
    rows = [cells("td", row) for row in table[1]]
    if colours:
        rows = [f"<td>{_swatch(colour)}{row[len('<td>') :]}" for colour, row in zip(colours, rows)]
    attribute = f' class="{kind}"' if kind else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table{attribute}><thead><tr>{cells("th", table[0])}</tr></thead><tbody>{body}</tbody></table></div>\n'


def _css(colour: str) -> str:
    return "var(--ink)" if colour == charts.INK else colour


def _swatch(colour: str) -> str:
    return f'<i class="swatch" style="background:{_css(colour)}"></i>'


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.00995 else f"{1000 * seconds:.1f}"


def _ink_on(colour: str) -> str:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return "#111111" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.18 else "#ffffff"


def bars_html(bars: Sequence[dict[str, Any]]) -> str:
    """Steps on one scale, each with `name`, `parts` (name, colour, seconds), `total` seconds, and perhaps `mark` (HTML), `label` and
    `hidden` seconds of communication; "" if all are empty."""
    known = [v for bar in bars for v in (bar["total"], bar.get("hidden", 0)) if 0 < v < 1e12]
    if not known:
        return ""
    width: Callable[..., Any] = lambda seconds: f"width:{100 * seconds / max(known):.2f}%"
    text = '<div class="bars">'
    for bar in bars:
        name = escape(bar["name"])
        text += f'<b>{bar.get("mark", "")}{name}</b><div class="bar">'
        for part, colour, seconds in bar["parts"]:
            if 0 < seconds < 1e12:
                spent = _milliseconds(seconds)
                text += f'<i style="{width(seconds)};background:{colour};color:{_ink_on(colour)}" title="{name}: {escape(part)} {spent} ms">{spent}</i>'
        label = escape(bar.get("label") or (_milliseconds(bar["total"]) + " ms" if math.isfinite(bar["total"]) else "-"))
        text += f"<span>{label}</span></div>"
        hidden = bar.get("hidden", 0)
        if 0.002 * max(known) < hidden < 1e12:
            spent = _milliseconds(hidden)
            title = f"{name}: hidden communication {spent} ms"
            text += f'<div class="bar hidden"><i style="{width(hidden)};{_HATCHED}" title="{title}"></i><span>{spent} hidden</span></div>'
    return text + "</div>"


_HATCHED = "background:repeating-linear-gradient(45deg,#fff 0 2px,{0} 2px 4px);border-color:{0}".format(PART_COLOURS["exposed"])


def _parts_legend(parts: Sequence[tuple[str, str]], hidden: bool) -> str:
    text = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in parts)
    if hidden:
        text += f'<span><i style="{_HATCHED}"></i>hidden communication, beside the computation</span>'
    return f'<div class="legend">{text}</div>'


def _shared(c: Comparison, key: str) -> str:
    values = {run.text(key) for run in c.runs}
    return values.pop() if len(values) == 1 else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _subtitle(c: Comparison) -> str:
    counts = f"{_count(len(c.methods), 'method')}, {_count(len(c.runs), 'run')}"
    if not c.has_times:
        return f"{c.task} · {counts}"
    ranks, batch, network = _shared(c, "dist.ranks"), _shared(c, "data.batch_size"), c.shared_network or "several networks"
    cpu = c.runs[0].environment.get("cpu", "")
    several = f"several numbers of ranks ({network})"
    return " · ".join([
        f"{_shared(c, 'model.name') or 'several models'} on {c.task}", f"{ranks} rank{'' if ranks == '1' else 's'} ({network})" if ranks else several,
        f"batch {batch} per rank" if batch else "several batch sizes", counts, *([cpu] if cpu else []),
    ])  # fmt: skip


def _card(c: Comparison, i: int, colour: str) -> str:
    m, metric = c.methods[i], c.metric
    which = "best" if c.has("best") else "last"  # a table has the last value alone
    stat = getattr(m, which)
    lines = [("best " if which == "best" else "final ") + metric.long_title]
    base = c.methods[m.baseline] if m.baseline is not None else m
    if base is not m and metric.unit == "share" and math.isfinite(points := 100 * (stat.mean - getattr(base, which).mean)):
        lines[0] += f", {points:+.1f} points against {base.name}"
    if math.isfinite(c.target):
        target = value_text(metric, stat_of([c.target]))
        seconds, spread = m.seconds_to_target.mean, m.seconds_to_target.deviation
        digits = 2 if seconds < 10 else 1
        after = f"{target} after {seconds:.{digits}f}" + (f" ± {spread:.{digits}f}" if m.reached > 1 else "") + " s"
        lines.append(after if m.reached else f"{target} not reached")
        if 0 < m.reached < len(m.counted):
            lines[-1] += f" ({m.reached} of {len(m.counted)} runs)"
        if base is not m and math.isfinite(m.target_speed_up):
            lines[-1] += f", speed-up {m.target_speed_up:.2f}×"
    if math.isfinite(m.images_per_second.mean):
        lines.append(f"{m.images_per_second.mean:.{1 if m.images_per_second.mean < 100 else 0}f} {metric.rate_unit}")
        if any(o is not m and o.baseline == i for o in c.methods) and base is m:
            lines[-1] += ", the baseline"
        elif base is not m and math.isfinite(m.speed_up):
            lines[-1] += f", {m.speed_up:.2f}× {base.name}"
    lines.append(f"{bytes_text(m.bytes_sent.mean)} per step and rank")
    if not m.dense and m.dense_ratio >= 1.05:
        lines[-1] += f", {m.dense_ratio:.{1 if m.dense_ratio < 10 else 0}f}× less"
    if not m.complete:
        lines.append("incomplete")
    small = "".join(f"<small>{escape(line)}</small>" for line in lines)
    mean = value_text(metric, stat_of([stat.mean]))
    style = f"border-top-color:{_css(colour)}"
    return f'<div class="card" style="{style}"><b>{escape(m.name)}</b><strong>{mean}</strong>{small}</div>'


def _chart(title: str, note: str, svgs: Sequence[str], kind: str = "") -> str:
    drawn = [svg for svg in svgs if svg]
    if not drawn:
        return ""
    text = f'<h3>{title}</h3><p class="note">{note}</p>' if note else f"<h3>{title}</h3>"
    figures = "".join(f'<div class="chart {kind}">{svg}</div>' for svg in drawn)
    return f'{text}<div class="charts{" " + kind if kind else ""}">{figures}</div>\n'


def _distributions(c: Comparison) -> str:
    recorded = charts.recorded_methods(c)
    if not recorded or not charts.available():
        return ""
    text = (
        '<h2>The accumulated gradient</h2><p class="note">Of rank 0, gradient and residual together, before anything is taken out of it; the '
        "compressed part of the model as one vector. First, middle and last recorded step; densities logarithmic. Coloured: measured; long "
        "dashes: fitted normal distribution, 1 - k/d; short dashes: fitted Laplace distribution, (1 - k/d)².</p>"
    )
    for m in recorded:
        text += _chart(escape(c.methods[m].name), "", [charts.distribution_svg(c, m)], "wide")
    note = (
        "What is left of ‖u‖² without its k largest entries, and beside it the share that they hold. 1 - k/d bounds it for every u; "
        "(1 - k/d)² for bell-shaped u."
    )
    return text + _chart("Contraction of top-k, and captured energy", note, [charts.distribution_svg(c, None)], "wide")


def _tabs(c: Comparison) -> str:
    draw = charts.page_svg if charts.available() else lambda *_: ""
    link = c.emulated_link
    emulated = f" The times of communication are those of an emulation: {escape(link)}." if link else ""
    incomplete = " Thin, ending in ×: an incomplete run." if any(not run.end for run in c.runs) else ""
    spread = " Shaded: ± one standard deviation over seeds." if any(len(m.counted) > 1 for m in c.methods) else ""
    quality = ("Test " if c.metric.set == "test" else "Validation ") + c.metric.name
    ring = "A ring marks where the mean curve first meets the target." if math.isfinite(c.target) else ""
    loss = "Moving average over a fortieth of the run."
    named = [("exposed communication" if part == "exposed" else part, colour) for part, colour in PART_COLOURS.items()]
    bars = bars_html([
        {"name": m.name, "total": m.times["total"], "hidden": m.times["hidden"],
         "parts": [(name, colour, m.times[part]) for part, (name, colour) in zip(PART_COLOURS, named)]} for m in c.methods
    ])  # fmt: skip
    phases = (
        '<p class="note">Mean over steps, the first five left out. Exposed communication is what the computation had to wait for; hidden '
        f"communication ran beside it and costs no time.{emulated}</p>{_parts_legend(named, True)}{bars}{table_html(time_table(c))}"
    )
    tabs = {
        "Accuracy" if c.metric.name == "accuracy" else c.metric.name.capitalize():
            _chart(quality, spread + incomplete, [draw(c, "quality", "epochs"), draw(c, "quality", "steps")])
            + _chart("Train loss", loss, [draw(c, "loss", "epochs"), draw(c, "loss", "steps")]),
        "Time": _chart(quality + " over training time", ring + emulated, [draw(c, "quality", "time")])
            + _chart("Train loss over training time", loss, [draw(c, "loss", "time")]),
        "Bits": _chart(f"The last {c.metric.long_title} for the bits sent", "Bits that a rank sends per parameter and step, mean over the run, "
            "logarithmic; dense sends 32. A line joins methods that differ only in how much they send.", [draw(c, "bits")])
            + _chart("Bytes sent", "What one rank uploads, mean over ranks.", [draw(c, "bytes", "steps"), draw(c, "bytes", "time")]),
        "Phases": ("<h3>Where the time of a step goes</h3>" + phases if bars else "") + _distributions(c),
    }  # fmt: skip
    text = style = ""
    for i, (name, body) in enumerate(tabs.items()):
        nothing = "These runs have no records of this kind." if charts.available() else INSTALL[0].upper() + INSTALL[1:] + "."
        text += f'<input type="radio" name="tab" id="tab{i}"{" checked" if not i else ""}><label for="tab{i}">{name}</label>'
        style += f"#tab{i}:checked ~ #show{i}{{display:block}}"
        tabs[name] = f'<section id="show{i}">{body or f"<p>{nothing}</p>"}</section>'
    return f'<style>{style}</style><div class="tabs">{text}{"".join(tabs.values())}</div>\n'


def report_html(c: Comparison) -> str:
    """The whole page, self-contained. Without matplotlib it has no curves, and says how to install it."""
    colours = [style.colour for style in charts.styles(c)]
    text = f'<h1>Gradient compression compared</h1><p class="sub">{escape(_subtitle(c))}</p>\n'
    text += f'<div class="cards">{"".join(_card(c, i, colour) for i, colour in enumerate(colours))}</div>\n'
    if c.warnings or c.limits:
        lines = "".join(f"<li>{escape(warning)}.</li>" for warning in c.warnings)
        lines += f"<li><b>What this does not show:</b> {escape('; '.join(c.limits))}.</li>" if c.limits else ""
        text += f'<div class="warning"><b>Before you conclude</b><ul>{lines}</ul></div>\n'
    text += "<h2>Results</h2>" + table_html(result_table(c), "", colours) + '<p class="note">'
    if math.isfinite(c.target):
        target = value_text(c.metric, stat_of([c.target]))
        text += f"Target {c.metric.title} {target}: {escape(c.target_reason)}; the time is that of the first evaluation that reaches it. "
    if c.has_times:
        text += "Times are of training alone: evaluation and start-up are left out and stand in the table of runs. "
        text += f"Speed-ups are over {escape(c.base_name)}. "
    emulated = f" The times of communication are those of an emulation: {escape(c.emulated_link)}." if c.emulated_link else ""
    text += (
        "± is the standard deviation over seeds. <i>Compression</i>: four bytes per parameter and step, over the bytes that a rank really sent, "
        f"headers included; <i>received</i> is what came from the other ranks in a step.{emulated}</p>\n"
    )
    text += _tabs(c) + "<h2>What differs</h2>"
    text += table_html(difference_table(c), "plain") if c.differing else "<p>The runs differ in nothing but seed and folder.</p>"
    text += "<h2>Every run</h2>" + table_html(run_table(c), "runs")
    text += '<p class="note">Equal parameter checksums mean bit-identical weights.'
    if c.has_times:
        text += " p50 and p95: the median step and the one that 95 % of steps do not exceed; with local steps, of the means from an exchange to the next."
    return html_page(f"Topknot: comparison of {_count(len(c.runs), 'run')}", text + "</p>\n")


def _lab_parts(parts: Sequence[dict[str, Any]]) -> list[tuple[str, str, float]]:
    colours = {**PART_COLOURS, "exposed communication": PART_COLOURS["exposed"]}
    return [(part["name"], colours[part["colour_of"]], float(part.get("seconds") or 0.0)) for part in parts]


def _lab_page(page: dict[str, Any]) -> str:
    text = f'<h1>{escape(page["title"])}</h1><p class="sub">{escape(page["note"])}</p>\n'
    text += _parts_legend([part[:2] for part in _lab_parts(page["legend"])], False)
    for group in page["groups"]:
        bars = []
        for step in group["bars"]:
            total = float(step["seconds"] or 0.0)
            parts = [(name, colour, min(seconds, total)) for name, colour, seconds in _lab_parts(step["parts"])]
            bars.append({"name": step["name"], "label": step["label"], "total": total, "parts": parts})
        text += f"<h2>{escape(group['heading'])}</h2>{bars_html(bars)}{table_html((group['header'], group['rows']))}"
    if page["failed"]:
        text += "<h2>Failed</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in page["failed"]) + "</ul>"
    text += "<h2>Commands</h2>"
    for name, command in page["commands"]:
        text += f'<p class="note"><b>{escape(name)}</b>: <code>{escape(command)}</code></p>'
    return html_page(page["title"], text, script=False)


def lab_html(path: str) -> str:
    """The page of the results.json of `lab/netlab compare`. Raises UserError for other files."""
    data = read_bytes(path)
    try:
        return _lab_page(json.loads(data)["page"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path}: not a results.json of 'lab/netlab compare': {error!r}") from None
