"""The table of a comparison, as Markdown, CSV, JSON and a self-contained HTML page."""

import csv
import html
import io
import os
import platform
import re

from .cli import write_json
from .figures import parts
from .files import write_text
from .palette import method_colour, page_style, part_colour
from .rate import show_bits

COLUMNS = ("hosts", "rate", "method", "rounds", "step_s", "step_lowest_s", "step_highest_s", "images_per_second",
           "communicate_s", "exposed_s", "encode_s", "decode_s", "bytes_sent", "bytes_received", "speedup", "training_s",
           "measured_bits", "nominal_bits", "cpu_bound")
HEADS = ("method", "step ms (range)", "items/s", "communicate ms", "exposed ms", "encode ms", "decode ms", "sent per step",
         "speed-up over {}")
COLOURS = {"compute": part_colour("forward"), "encode and decode": part_colour("encode"),
           "exposed communication": part_colour("exposed communication"), "step": part_colour("data")}
NOTE = ("Medians over the rounds of a run's median step, first five steps left out; range: lowest to highest round. Speed-up: "
        "median of the ratios within a round. Items: images, or tokens of a text, of all ranks. Measured rate: the lowest of the rounds. Sent: upload of one rank per step. "
        "All hosts share this machine's cores.")


def ms(value, digits=1):
    return "-" if value is None else f"{value * 1000:.{digits}f}"


def size(value):
    if value is None:
        return "-"
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def heads_of(spec):
    return [head.format(spec["baseline"]) for head in HEADS] + (["training s"] if spec.get("steps") else [])


def row_cells(spec, row):
    """The row's cells as texts, in the order of heads_of."""
    if row["step_s"] is None:
        return [row["method"], "failed" if row["failed"] else "-"] + ["-"] * (len(heads_of(spec)) - 2)
    step = ms(row["step_s"])
    if row["rounds"] > 1:
        step += f" ({ms(row['step_lowest_s'])} to {ms(row['step_highest_s'])})"
    speed = "-" if row["images_per_second"] is None else f"{row['images_per_second']:,.0f}"
    return [row["method"], step, speed, ms(row["communicate_s"]), ms(row["exposed_s"]), ms(row["encode_s"], 2),
            ms(row["decode_s"], 2), size(row["bytes_sent"]), "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            *(["-" if row["training_s"] is None else f"{row['training_s']:,.0f}"] if spec.get("steps") else [])]


def groups(rows):
    """[(heading, rows)], one per hosts x rate."""
    result = []
    for row in rows:
        if not result or (result[-1][1][0]["hosts"], result[-1][1][0]["rate"]) != (row["hosts"], row["rate"]):
            result.append(["", []])
        result[-1][1].append(row)
    for group in result:
        first = group[1][0]
        links = "unshaped links" if first["rate"] == "none" else f"links of {first['rate']}"
        measured = [row["measured_bits"] for row in group[1] if row["measured_bits"]]
        group[0] = f"{first['hosts']} hosts, {links}, measured TCP rate " + (show_bits(min(measured)) if measured else "-") + (
            " (CPU-bound: below 80 % of nominal)" if any(row["cpu_bound"] for row in group[1]) else "")
    return result


def note(spec):
    """What the columns mean."""
    if not spec.get("steps"):
        return NOTE
    steps = (f"{name} {every:,}" + (f" ({as_baseline:,} at the step time of {spec['baseline']})" if as_baseline else "")
             for name, (every, as_baseline) in spec["steps"].items())
    return f"{NOTE} Training: step time times steps, as --steps has them: {', '.join(steps)}."


def failures(rows):
    return [f"{row['hosts']} hosts, {row['rate']}, {row['method']}: {problem}" for row in rows for problem in row["failed"]]


def markdown(spec, rows):
    heads = heads_of(spec)
    lines = [f"**{spec['title']}**", ""] if spec.get("title") else []
    for heading, group in groups(rows):
        lines += [heading + ":", "", "| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row_cells(spec, row)) + " |" for row in group] + [""]
    lines += [note(spec)]
    lines += [""] + [f"- Failed: {line}" for line in failures(rows)] if failures(rows) else []
    return "\n".join(lines) + "\n"


def compressor(name, command):
    """The method that a command of the SPEC trains with: its compress.name, else the first word of its name."""
    given = [word.partition("=")[2] for word in command if word.startswith("compress.name=")]
    return given[-1] if given else re.split(r"[^A-Za-z_]", name)[0]


def bars(spec, group):
    """One bar per method; the bars of a group have one scale."""
    longest = max((row["step_s"] for row in group if row["step_s"]), default=None)
    if not longest:
        return ""
    lines = ['<div class="bars">']
    for row in group:
        name = html.escape(row["method"])
        colour = method_colour(compressor(row["method"], spec["methods"][row["method"]]))
        lines.append(f'<b><i class="swatch" style="background:{colour}"></i>{name}</b><div class="bar">')
        for part, value in (parts(row) or [("step", row["step_s"])]) if row["step_s"] else []:
            wide = 100 * min(value, row["step_s"]) / longest
            lines.append(f'<i style="width:{wide:.2f}%;background:{COLOURS[part]}" title="{name}, {part}: {value * 1000:.2f} ms"></i>')
        lines.append(f'<span>{ms(row["step_s"]) + " ms" if row["step_s"] else "failed"}</span></div>')
    return "\n".join(lines + ["</div>"])


def page(spec, rows):
    title = html.escape(spec.get("title") or "netlab: methods compared")
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in heads_of(spec))
    legend = "".join(f'<span><i style="background:{colour}"></i>{name if name != "step" else "whole step (parts not recorded)"}'
                     "</span>" for name, colour in COLOURS.items())
    body = []
    for heading, group in groups(rows):
        table = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row_cells(spec, row)) + "</tr>" for row in group)
        body.append(f"<h2>{html.escape(heading)}</h2>\n{bars(spec, group)}\n"
                    f"<div class=\"scroll\"><table><thead><tr>{heads}</tr></thead><tbody>{table}</tbody></table></div>")
    failed = "".join(f"<li>{html.escape(line)}</li>" for line in failures(rows))
    commands = "".join(f"<p class=\"note\"><b>{html.escape(name)}</b>: <code>{html.escape(' '.join(command))}</code></p>"
                       for name, command in spec["methods"].items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{page_style()}</style></head><body><main>
<h1>{title}</h1>
<p class="sub">{html.escape(note(spec))} {html.escape(machine())}</p>
<div class="legend">{legend}</div>
{"".join(body)}
{"<h2>Failed</h2><ul>" + failed + "</ul>" if failed else ""}
<h2>Commands</h2>{commands}
</main></body></html>
"""


def machine():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            name = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or "unknown processor"
    return f"{name}, {len(os.sched_getaffinity(0))} cores."


def write_reports(out, spec, cells, rows):
    """Writes table.md, table.csv, results.json and report.html; returns the Markdown table."""
    table = markdown(spec, rows)
    write_text(os.path.join(out, "table.md"), table)
    write_text(os.path.join(out, "report.html"), page(spec, rows))
    text = io.StringIO()
    sheet = csv.writer(text, lineterminator="\n")
    sheet.writerow(COLUMNS)
    for row in rows:
        sheet.writerow(["" if row[name] is None else row[name] for name in COLUMNS])
    write_text(os.path.join(out, "table.csv"), text.getvalue())
    write_json(os.path.join(out, "results.json"), {"machine": machine(), "spec": spec, "rows": rows, "runs": cells})
    return table
