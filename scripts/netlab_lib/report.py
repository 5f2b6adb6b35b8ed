"""The table of a comparison, as Markdown, CSV, JSON and a self-contained HTML page."""

import csv
import html
import os
import platform

from .cli import write_json
from .figures import parts
from .rate import show_bits

COLUMNS = ("hosts", "rate", "method", "rounds", "step_s", "step_lowest_s", "step_highest_s", "images_per_second",
           "communicate_s", "exposed_s", "encode_s", "decode_s", "bytes_sent", "bytes_received", "speedup", "measured_bits",
           "nominal_bits", "cpu_bound")
HEADS = ("method", "step ms (range)", "images/s", "communicate ms", "exposed ms", "encode ms", "decode ms", "sent per step",
         "speed-up over {}")
COLOURS = {"compute": "#4c72b0", "encode and decode": "#dd8452", "exposed communication": "#c44e52", "step": "#8c8c8c"}
NOTE = ("Medians over the rounds of a run's median step, first five steps left out; range: lowest to highest round. Speed-up: "
        "median of the ratios within a round. Sent: upload of one rank per step. All hosts share this machine's cores.")


def ms(value, digits=1):
    return "-" if value is None else f"{value * 1000:.{digits}f}"


def size(value):
    if value is None:
        return "-"
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def row_cells(row):
    """The row's cells as texts, in the order of HEADS."""
    if row["step_s"] is None:
        return [row["method"], "failed" if row["failed"] else "-"] + ["-"] * (len(HEADS) - 2)
    step = ms(row["step_s"])
    if row["rounds"] > 1:
        step += f" ({ms(row['step_lowest_s'])} to {ms(row['step_highest_s'])})"
    speed = "-" if row["images_per_second"] is None else f"{row['images_per_second']:,.0f}"
    return [row["method"], step, speed, ms(row["communicate_s"]), ms(row["exposed_s"]), ms(row["encode_s"], 2),
            ms(row["decode_s"], 2), size(row["bytes_sent"]), "-" if row["speedup"] is None else f"{row['speedup']:.2f}"]


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
        group[0] = f"{first['hosts']} hosts, {links}, measured TCP rate " + (
            show_bits(first["measured_bits"]) if first["measured_bits"] else "-") + (
            " (CPU-bound: below 80 % of nominal)" if first["cpu_bound"] else "")
    return result


def failures(rows):
    return [f"{row['hosts']} hosts, {row['rate']}, {row['method']}: {problem}" for row in rows for problem in row["failed"]]


def markdown(spec, rows):
    heads = [head.format(spec["baseline"]) for head in HEADS]
    lines = [f"**{spec['title']}**", ""] if spec.get("title") else []
    for heading, group in groups(rows):
        lines += [heading + ":", "", "| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row_cells(row)) + " |" for row in group] + [""]
    lines += [NOTE]
    lines += [""] + [f"- Failed: {line}" for line in failures(rows)] if failures(rows) else []
    return "\n".join(lines) + "\n"


def bars(group):
    """One bar per method; the bars of a group have one scale."""
    longest = max((row["step_s"] for row in group if row["step_s"]), default=None)
    if not longest:
        return ""
    left = 16 + int(7.5 * min(26, max(len(row["method"]) for row in group)))  # the longest name, in this font
    width, height = 560, 24
    lines = [f'<svg viewBox="0 0 {left + width + 110} {height * len(group) + 6}" role="img" aria-label="time of a step">']
    for index, row in enumerate(group):
        y = index * height + 4
        name = row["method"] if len(row["method"]) <= 26 else row["method"][:25] + "…"
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>')
        if not row["step_s"]:
            lines.append(f'<text x="{left}" y="{y + 14}">failed</text>')
            continue
        x = float(left)
        for part, value in parts(row) or [("step", row["step_s"])]:
            wide = width * min(value, row["step_s"]) / longest
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height - 6}" fill="{COLOURS[part]}">'
                         f"<title>{html.escape(row['method'])}, {part}: {value * 1000:.2f} ms</title></rect>")
            x += wide
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{ms(row["step_s"])} ms</text>')
    return "\n".join(lines + ["</svg>"])


def page(spec, rows):
    title = html.escape(spec.get("title") or "netlab: methods compared")
    heads = "".join(f"<th>{html.escape(head.format(spec['baseline']))}</th>" for head in HEADS)
    legend = "".join(f'<span><i style="background:{colour}"></i>{name if name != "step" else "whole step (parts not recorded)"}'
                     "</span>" for name, colour in COLOURS.items())
    body = []
    for heading, group in groups(rows):
        table = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row_cells(row)) + "</tr>" for row in group)
        body.append(f"<h2>{html.escape(heading)}</h2>\n{bars(group)}\n"
                    f"<table><thead><tr>{heads}</tr></thead><tbody>{table}</tbody></table>")
    failed = "".join(f"<li>{html.escape(line)}</li>" for line in failures(rows))
    commands = "".join(f"<dt>{html.escape(name)}</dt><dd><code>{html.escape(' '.join(command))}</code></dd>"
                       for name, command in spec["methods"].items())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.5em; }} h2 {{ font-size: 1.1em; margin-top: 2em; }}
svg {{ width: 100%; font-size: 13px; }} svg text {{ fill: #222; }}
table {{ border-collapse: collapse; font-size: 13px; width: 100%; }} td {{ white-space: nowrap; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 3px 8px; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
.legend span {{ margin-right: 1.5em; }} .legend i {{ display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; }}
code {{ font-size: 12px; overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
<p>{html.escape(NOTE)} {html.escape(machine())}</p>
<p class="legend">{legend}</p>
{"".join(body)}
{"<h2>Failed</h2><ul>" + failed + "</ul>" if failed else ""}
<h2>Commands</h2><dl>{commands}</dl>
</html>
"""


def machine():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            name = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or "unknown processor"
    return f"{name}, {len(os.sched_getaffinity(0))} cores."


def write_text(path, text):
    with open(path + ".part", "w", encoding="utf-8") as out:
        out.write(text)
    os.replace(path + ".part", path)


def write_reports(out, spec, cells, rows):
    """Writes table.md, table.csv, results.json and report.html; returns the Markdown table."""
    table = markdown(spec, rows)
    write_text(os.path.join(out, "table.md"), table)
    write_text(os.path.join(out, "report.html"), page(spec, rows))
    with open(os.path.join(out, "table.csv.part"), "w", encoding="utf-8", newline="") as file:
        sheet = csv.writer(file, lineterminator="\n")
        sheet.writerow(COLUMNS)
        for row in rows:
            sheet.writerow(["" if row[name] is None else row[name] for name in COLUMNS])
    os.replace(os.path.join(out, "table.csv.part"), os.path.join(out, "table.csv"))
    write_json(os.path.join(out, "results.json"), {"machine": machine(), "spec": spec, "rows": rows, "runs": cells})
    return table
