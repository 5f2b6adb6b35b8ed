"""The page of a comparison and of `lab/netlab compare`: one file, no network; page.js shows values where one points."""

import html
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .comparison import Comparison, Method, only, text_of, value_text
from .read import MOST, UserError, one_line, read_bytes
from .style import DARK, INK, INSTALL, PART_COLOURS, AVAILABLE, part_label, styles
from .tables import Table, bytes_text, difference_table, rate_text, ratio_text, result_table, run_table, seconds_text, time_table

_HATCHED = "background:repeating-linear-gradient(45deg,#fff 0 2px,{0} 2px 4px);border-color:{0}".format(PART_COLOURS["exposed"])


def escape(text: str) -> str:
    """The text for HTML, control characters as escapes."""
    return html.escape(one_line(str(text)))


def html_page(title: str, body: str, script: bool = True) -> str:
    """A whole page; `title` is plain text, `body` HTML."""
    style, code = (pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>\n{body}</main>"
        + (f"<script>\n{code}</script>" if script else "") + "</body></html>\n"
    )  # fmt: skip


def table_html(table: Table, kind: str = "", colours: Sequence[str] = ()) -> str:
    """A table; `kind` is its CSS class, `colours` go before the first cells."""
    cells: Callable[[str, Iterable[str]], str] = lambda tag, row: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
    marks = [f'<i class="swatch" style="background:{colour}"></i>' for colour in colours] or [""] * len(table[1])
    body = "".join(f"<tr><td>{mark}{cells('td', row)[4:]}</tr>" for mark, row in zip(marks, table[1]))
    attribute = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{attribute}><thead><tr>{cells("th", table[0])}</tr></thead><tbody>{body}</tbody></table></div>\n'


def _milliseconds(seconds: float) -> str:
    return text_of(seconds, "{:.2f}" if seconds < 0.00995 else "{:.1f}", 1000)


def bars_html(bars: Sequence[dict[str, Any]]) -> str:
    """Steps on one scale, each with `name`, `parts` (name, colour, seconds), `total` seconds, and perhaps `label` and `hidden` seconds
    of communication; "" if all are empty."""
    longest = max((v for bar in bars for v in (bar["total"], bar.get("hidden", 0)) if 0 < v < MOST), default=0)
    width: Callable[[float], str] = lambda seconds: f"width:{100 * seconds / longest:.2f}%"
    text = ""
    for bar in bars if longest else ():
        name, hidden = escape(bar["name"]), bar.get("hidden", 0)
        text += f'<b>{name}</b><div class="bar">'
        for part, colour, seconds in bar["parts"]:
            if 0 < seconds < MOST:
                spent, ink = _milliseconds(seconds), "#ffffff" if colour in DARK else "#111111"
                look = f"{width(seconds)};background:{colour};color:{ink}"
                text += f'<i style="{look}" title="{name}: {escape(part)} {spent} ms">{spent}</i>'
        label = bar.get("label") or (_milliseconds(bar["total"]) + " ms" if math.isfinite(bar["total"]) else "-")
        text += f"<span>{escape(label)}</span></div>"
        if 0.002 * longest < hidden < MOST:
            spent, look = _milliseconds(hidden), f"{width(hidden)};{_HATCHED}"
            title = f"{name}: hidden communication {spent} ms"
            text += f'<div class="bar hidden"><i style="{look}" title="{title}"></i><span>{spent} hidden</span></div>'
    return f'<div class="bars">{text}</div>' if text else ""


def _parts_legend(parts: Iterable[tuple[str, str]]) -> str:
    """`parts`: names and styles."""
    text = "".join(f'<span><i style="{style}"></i>{escape(name)}</span>' for name, style in parts)
    return f'<div class="legend">{text}</div>'


def _count(number: int | str, what: str) -> str:
    return f"{number} {what}" + ("" if str(number) == "1" else "s")


def _subtitle(c: Comparison) -> str:
    counts = f"{_count(len(c.methods), 'method')}, {_count(len(c.runs), 'run')}"
    if not c.has_times:
        return f"{c.task} · {counts}"
    shared: Callable[[str], str] = lambda key: only((run.text(key) for run in c.runs), "")
    ranks, batch = shared("dist.ranks"), shared("data.batch_size")
    facts = [
        f"{shared('model.name') or 'several models'} on {c.task}",
        (_count(ranks, "rank") if ranks else "several numbers of ranks") + f" ({c.shared_network or 'several networks'})",
        f"batch {batch} per rank" if batch else "several batch sizes",
        counts,
        c.runs[0].environment.get("cpu", ""),
    ]
    return " · ".join(filter(None, facts))


def _card(c: Comparison, m: Method, colour: str) -> str:
    metric, base = c.metric, m.baseline or m
    which, quality = ("best", "best") if c.has("best") else ("last", "final")  # a table has the last value alone
    points = 100 * (getattr(m, which).mean - getattr(base, which).mean)
    lines = [f"{quality} {metric.long_title}"]
    if base is not m and metric.unit == "share" and math.isfinite(points):
        lines[0] += f", {points:+.1f} points against {base.name}"
    if math.isfinite(c.target):
        after = " after " if m.seconds_to_target.count else " "
        speed_up = f", speed-up {m.target_speed_up:.2f}×" if base is not m and math.isfinite(m.target_speed_up) else ""
        lines.append(value_text(metric, c.target) + after + seconds_text(m.seconds_to_target) + speed_up)
    if math.isfinite(m.images_per_second.mean):
        relation = f", {m.speed_up:.2f}× {base.name}" if base is not m and math.isfinite(m.speed_up) else ""
        is_base = base is m and any(o.baseline is m for o in c.methods if o is not m)
        lines.append(f"{rate_text(m.images_per_second.mean)} {metric.rate_unit}" + (", the baseline" if is_base else relation))
    less = f", {ratio_text(m.bytes_ratio)} less" if not m.dense and m.bytes_ratio >= 1.05 else ""
    lines.append(f"{bytes_text(m.bytes_sent)} per step and rank{less}")
    lines += [] if m.complete else ["incomplete"]
    small = "".join(f"<small>{escape(line)}</small>" for line in lines)
    mean = value_text(metric, getattr(m, which).mean)
    return f'<div class="card" style="border-top-color:{colour}"><b>{escape(m.name)}</b><strong>{mean}</strong>{small}</div>'


def _chart(title: str, note: str, svgs: Sequence[str], kind: str = "") -> str:
    figures = "".join(f'<div class="chart {kind}">{svg}</div>' for svg in svgs if svg)
    text = f"<h3>{title}</h3>" + (f'<p class="note">{note}</p>' if note else "")
    return f'{text}<div class="charts{" " + kind if kind else ""}">{figures}</div>\n' if figures else ""


def _draw(c: Comparison, what: str, axes: str) -> list[str]:
    from . import charts

    return [charts.page_svg(c, what, axis) for axis in axes.split() or [""]]


def _distributions(c: Comparison) -> str:
    from . import charts

    recorded = charts.recorded_methods(c)
    text = (
        '<h2>The accumulated gradient</h2><p class="note">Of rank 0, gradient and residual together, before anything is taken out of it; the '
        "compressed part of the model as one vector. First, middle and last recorded step; densities logarithmic. Coloured: measured; long "
        "dashes: fitted normal distribution, 1 - k/d; short dashes: fitted Laplace distribution, (1 - k/d)².</p>"
    )
    text += "".join(_chart(escape(m.name), "", [charts.distribution_svg(c, m)], "wide") for m in recorded)
    note = (
        "What is left of ‖u‖² without its k largest entries, and beside it the share that they hold. 1 - k/d bounds it for every u; "
        "(1 - k/d)² for bell-shaped u."
    )
    text += _chart("Contraction of top-k, and captured energy", note, [charts.contraction_svg(c)], "wide")
    return text if recorded else ""


def _emulated(c: Comparison) -> str:
    return f" The times of communication are those of an emulation: {escape(c.emulated_link)}." if c.emulated_link else ""


def _steps(c: Comparison) -> str:
    """Where the time of a step goes, as bars and as a table; "" for the rows of a table of runs."""
    named = {part: (part_label(part), colour) for part, colour in PART_COLOURS.items()}
    bars = bars_html([
        {"name": m.name, "total": m.times["step"], "hidden": m.times["hidden"],
         "parts": [(*look, m.times[part]) for part, look in named.items()]} for m in c.methods
    ])  # fmt: skip
    looks = [(name, "background:" + colour) for name, colour in named.values()]
    looks.append(("hidden communication, beside the computation", _HATCHED))
    note = (
        '<h3>Where the time of a step goes</h3><p class="note">Mean over steps, the first five left out. Exposed communication is what the '
        f"computation had to wait for; hidden communication ran beside it and costs no time.{_emulated(c)}</p>"
    )
    return f"{note}{_parts_legend(looks)}{bars}{table_html(time_table(c))}" if bars else ""


def _tabs(c: Comparison) -> str:
    quality = c.metric.long_title.capitalize()
    incomplete = " Thin, ending in ×: an incomplete run." if any(not run.end for run in c.runs) else ""
    spread = " Shaded: ± one standard deviation over seeds." if any(len(m.counted) > 1 for m in c.methods) else ""
    ring = "A ring marks where the mean curve first meets the target." if math.isfinite(c.target) else ""
    loss = "Moving average over a fortieth of the run."
    bits = (
        "Bits that a rank sends per parameter and step, mean over the run, logarithmic; dense sends 32. A line joins methods that differ "
        "only in how much they send."
    )
    # By tab its charts: title, note, and what is drawn over which axes.
    tabs = {
        c.metric.name.capitalize(): [(quality, spread + incomplete, "quality", "epochs steps"), ("Train loss", loss, "loss", "epochs steps")],
        "Time": [(quality + " over training time", ring + _emulated(c), "quality", "time"),
                 ("Train loss over training time", loss, "loss", "time")],
        "Bits": [(f"The last {c.metric.long_title} for the bits sent", bits, "bits", ""),
                 ("Bytes sent", "What one rank uploads, mean over ranks.", "bytes", "steps time")],
        "Phases": [],
    }  # fmt: skip
    nothing = "These runs have no records of this kind." if AVAILABLE else INSTALL[0].upper() + INSTALL[1:] + "."
    text = style = sections = ""
    for i, (name, drawn) in enumerate(tabs.items()):
        body = "" if drawn else _steps(c)
        if AVAILABLE:
            body += "".join(_chart(title, note, _draw(c, what, axes)) for title, note, what, axes in drawn)
            body += "" if drawn else _distributions(c)
        text += f'<input type="radio" name="tab" id="tab{i}"{" checked" if not i else ""}><label for="tab{i}">{name}</label>'
        style += f"#tab{i}:checked ~ #show{i}{{display:block}}"
        sections += f'<section id="show{i}">{body or f"<p>{nothing}</p>"}</section>'
    return f'<style>{style}</style><div class="tabs">{text}{sections}</div>\n'


def report_html(c: Comparison) -> str:
    """The whole page, self-contained. Without matplotlib it has no curves, and says how to install it."""
    colours = {m: style.colour.replace(INK, "var(--ink)") for m, style in styles(c).items()}
    text = f'<h1>Gradient compression compared</h1><p class="sub">{escape(_subtitle(c))}</p>\n'
    if c.warnings or c.limits:
        lines = "".join(f"<li>{escape(warning)}.</li>" for warning in c.warnings)
        lines += f"<li><b>What this does not show:</b> {escape('; '.join(c.limits))}.</li>" if c.limits else ""
        text += f'<div class="warning"><b>Before you conclude</b><ul>{lines}</ul></div>\n'
    text += f'<div class="cards">{"".join(_card(c, m, colours[m]) for m in c.methods)}</div>\n'
    text += "<h2>Results</h2>" + table_html(result_table(c), "", [colours[m] for m in c.methods]) + '<p class="note">'
    if math.isfinite(c.target):
        target = value_text(c.metric, c.target)
        text += f"Target {c.metric.title} {target}: {escape(c.target_reason)}; the time is that of the first evaluation that reaches it. "
    if c.has_times:
        text += "Times are of training alone: evaluation and start-up are left out and stand in the table of runs. "
        text += f"Speed-ups are over {escape(c.base_name)}. "
    text += (
        "± is the standard deviation over seeds. <i>Compression</i>: four bytes per parameter and step, over the bytes that a rank really sent, "
        f"headers included; <i>received</i> is what came from the other ranks in a step.{_emulated(c)}</p>\n"
    )
    text += _tabs(c) + "<h2>What differs</h2>"
    text += table_html(difference_table(c), "plain") if c.differing else "<p>The runs differ in nothing but seed and folder.</p>"
    text += "<h2>Every run</h2>" + table_html(run_table(c), "runs")
    text += '<p class="note">Equal parameter checksums mean bit-identical weights.'
    if c.has_times:
        text += " p50 and p95: the median step and the one that 95 % of steps do not exceed; with local steps, of the means from an exchange to the next."
    return html_page(f"Topknot: comparison of {_count(len(c.runs), 'run')}", text + "</p>\n")


def lab_html(path: str) -> str:
    """The page of the results.json of `lab/netlab compare`. Raises UserError for other files."""
    data = read_bytes(path)
    try:
        return _lab_page(json.loads(data)["page"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path}: not a results.json of 'lab/netlab compare': {error!r}") from None


def _lab_page(page: dict[str, Any]) -> str:
    colours = {part_label(part): colour for part, colour in PART_COLOURS.items()} | PART_COLOURS
    text = f'<h1>{escape(page["title"])}</h1><p class="sub">{escape(page["note"])}</p>\n'
    text += _parts_legend((part["name"], "background:" + colours[part["colour_of"]]) for part in page["legend"])
    for group in page["groups"]:
        bars = []
        for step in group["bars"]:
            total = float(step["seconds"] or 0.0)
            parts = [(p["name"], colours[p["colour_of"]], min(float(p.get("seconds") or 0.0), total)) for p in step["parts"]]
            bars.append({"name": step["name"], "label": step["label"], "total": total, "parts": parts})
        text += f"<h2>{escape(group['heading'])}</h2>{bars_html(bars)}{table_html((group['header'], group['rows']))}"
    if page["failed"]:
        text += "<h2>Failed</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in page["failed"]) + "</ul>"
    text += "<h2>Commands</h2>"
    for name, command in page["commands"]:
        text += f'<p class="note"><b>{escape(name)}</b>: <code>{escape(command)}</code></p>'
    return html_page(page["title"], text, script=False)
