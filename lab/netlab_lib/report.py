"""The table of a comparison, as Markdown, CSV and JSON, and its page, which the program `compare` draws from the JSON."""

import csv
import functools
import io
import os
import platform
import re
import secrets
import shutil

import runs

from .figures import parts
from .lab import show_bits
from .runner import log_line

COLUMNS = (
    "hosts",
    "rate",
    "method",
    "rounds",
    "step_s",
    "step_lowest_s",
    "step_highest_s",
    "images_per_second",
    "communicate_s",
    "exposed_s",
    "encode_s",
    "decode_s",
    "bytes_sent",
    "bytes_received",
    "speedup",
    "training_s",
    "measured_bits",
    "nominal_bits",
    "cpu_bound",
)
HEADS = (
    "method",
    "step ms (range)",
    "items/s",
    "communicate ms",
    "exposed ms",
    "encode ms",
    "decode ms",
    "sent per step",
    "speed-up over {}",
)
# The parts of a bar, each with the part of python/topknot/compare/style.py whose colour it has.
COLOURS = {"compute": "forward", "encode and decode": "encode", "exposed communication": "exposed communication", "step": "data"}
NOTE = (
    "Medians over the rounds of a run's median step, first five steps left out; range: lowest to highest round. Of local "
    "steps: the median over the times from a sync to the next, by their steps. Speed-up: median of the ratios within a "
    "round. Items: images, or tokens of a text, of all ranks. Measured rate: the lowest of the rounds. Sent: upload of one "
    "rank per step. All hosts share this machine's cores."
)


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
    return [
        row["method"],
        step,
        speed,
        ms(row["communicate_s"]),
        ms(row["exposed_s"]),
        ms(row["encode_s"], 2),
        ms(row["decode_s"], 2),
        size(row["bytes_sent"]),
        "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
        *(["-" if row["training_s"] is None else f"{row['training_s']:,.0f}"] if spec.get("steps") else []),
    ]


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
        group[0] = (
            f"{first['hosts']} hosts, {links}, measured TCP rate "
            + (show_bits(min(measured)) if measured else "-")
            + (" (CPU-bound: below 80 % of nominal)" if any(row["cpu_bound"] for row in group[1]) else "")
        )
    return result


def note(spec):
    """What the columns mean."""
    if not spec.get("steps"):
        return NOTE
    steps = (
        f"{name} {every:,}" + (f" ({as_baseline:,} at the step time of {spec['baseline']})" if as_baseline else "")
        for name, (every, as_baseline) in spec["steps"].items()
    )
    return f"{NOTE} Training: step time times steps, as --steps has them: {', '.join(steps)}."


def failures(rows):
    return [f"{row['hosts']} hosts, {row['rate']}, {row['method']}: {problem}" for row in rows for problem in row["failed"]]


def markdown(spec, rows):
    heads = heads_of(spec)
    lines = [f"**{spec['title']}**", ""] if spec.get("title") else []
    for heading, group in groups(rows):
        cells = ([cell.replace("|", "\\|") for cell in row_cells(spec, row)] for row in group)
        lines += [heading + ":", "", runs.markdown(heads, cells), ""]
    lines += [note(spec)]
    lines += [""] + [f"- Failed: {line}" for line in failures(rows)] if failures(rows) else []
    return "\n".join(lines) + "\n"


def compressor(name, command):
    """The method that a command of the SPEC trains with: its compress.name, else the first word of its name."""
    given = [word.partition("=")[2] for word in command if word.startswith("compress.name=")]
    return given[-1] if given else re.split(r"[^A-Za-z_]", name)[0]


def bar(spec, row):
    """A method's step, in seconds by part."""
    steps = (parts(row) or [("step", row["step_s"])]) if row["step_s"] else []
    return {
        "name": row["method"],
        "method": compressor(row["method"], spec["methods"][row["method"]]),
        "seconds": row["step_s"],
        "label": ms(row["step_s"]) + " ms" if row["step_s"] else "failed",
        "parts": [{"name": part, "colour_of": COLOURS[part], "seconds": value} for part, value in steps],
    }


def page(spec, rows):
    """What the page shows, as python/topknot/compare/page.py reads it."""
    return {
        "title": spec.get("title") or "netlab: methods compared",
        "note": f"{note(spec)} {machine()}",
        "legend": [
            {"name": name if name != "step" else "whole step (parts not recorded)", "colour_of": part}
            for name, part in COLOURS.items()
        ],
        "groups": [
            {
                "heading": heading,
                "bars": [bar(spec, row) for row in group],
                "header": heads_of(spec),
                "rows": [row_cells(spec, row) for row in group],
            }
            for heading, group in groups(rows)
        ],
        "failed": failures(rows),
        "commands": [[name, " ".join(command)] for name, command in spec["methods"].items()],
    }


def find_compare(spec):
    """The program `compare` beside a `train` that the SPEC's commands name, else in build/bin; None if neither is there. Not on
    PATH, where ImageMagick has a program of that name."""
    trains = [shutil.which(word) for command in spec["methods"].values() for word in command if os.path.basename(word) == "train"]
    for folder in [os.path.dirname(train) for train in trains if train] + [os.path.join(runs.ROOT, "build", "bin")]:
        if os.access(os.path.join(folder, "compare"), os.X_OK):
            return os.path.join(folder, "compare")
    return None


@functools.cache
def say_once(text):
    """Logs the text, which a comparison would else repeat after each of its groups."""
    log_line(text)


def draw(out, spec):
    """Draws report.html from results.json; False, with a message, if that cannot be done."""
    results, report = os.path.join(out, "results.json"), os.path.join(out, "report.html")
    part = os.path.join(out, f"report.part-{secrets.randbits(32)}.html")  # as runs.write_text(): never through a link
    try:
        os.unlink(report)  # of earlier results
    except FileNotFoundError:
        pass
    program = find_compare(spec)
    if not program:
        say_once(f"no program compare beside train or in build/bin; 'compare {results} --out {report}' draws the page")
        return False
    try:
        drawn = runs.run([program, results, "--out", part])
        if drawn.returncode:
            log_line(f"the page is not drawn: {drawn.stderr.strip()}")
            return False
        os.replace(part, report)
        return True
    finally:
        if os.path.exists(part):
            os.unlink(part)


def machine():
    return f"{runs.cpu_name() or platform.processor() or 'unknown processor'}, {len(os.sched_getaffinity(0))} cores."


def write_reports(out, spec, cells, rows):
    """Writes table.md, table.csv, results.json and report.html; returns the Markdown table and the names of the files."""
    table = markdown(spec, rows)
    runs.write_text(os.path.join(out, "table.md"), table)
    text = io.StringIO()
    sheet = csv.writer(text, lineterminator="\n")
    sheet.writerow(COLUMNS)
    for row in rows:
        sheet.writerow(["" if row[name] is None else row[name] for name in COLUMNS])
    runs.write_text(os.path.join(out, "table.csv"), text.getvalue())
    runs.write_json(
        os.path.join(out, "results.json"),
        {"machine": machine(), "spec": spec, "rows": rows, "runs": cells, "page": page(spec, rows)},
        indent=1,
    )
    return table, "table.md, table.csv, results.json and report.html" if draw(
        out, spec
    ) else "table.md, table.csv and results.json"
