"""The command line of compare."""

from __future__ import annotations

import getopt
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from . import output, page, tables
from .comparison import Comparison, compare_runs, did_you_mean
from .read import Metric, UserError, one_line, read_runs
from .style import INSTALL, PICTURES, AVAILABLE

_PARAGRAPHS = (
    "compare: puts runs of `train` and of topknot.torch.Run side by side.",
    "  compare RUN... [--out FILE]... [--target VALUE] [--baseline NAME] [--size SIZE]",
    "RUN is a run directory, a folder of run directories, or a table of runs that lab/train-runs wrote (.csv). The results.json of "
    "`lab/netlab compare` stands alone; its page is drawn.",
    "A table is printed, and a self-contained page written. Runs that differ in seed alone are one method: mean and spread. Speed-ups "
    "are over the dense run that differs in nothing but the method. Runs of different tasks are refused.",
)
_OPTIONS = {
    "--out FILE": "what to write, by its ending: .html the page (default: report.html), .csv one row per method, .json everything, .tex a "
    "table for LaTeX; .pdf, .svg or .png the metric over time, epoch and step, as many of them as the width holds. Before these three "
    "endings a word draws one picture: .time, .epochs, .steps, .loss, .bits (the last value against the bits sent), .phases (of a step), "
    "as in fig.bits.pdf. May be given several times",
    "--target VALUE": "what to measure the time to: an accuracy, 0.7 or 70%, or a loss (default: 95 % of the best dense accuracy)",
    "--baseline NAME": "the method that speed-ups are over",
    "--size SIZE": "of pictures: the width or WIDTHxHEIGHT, in in, cm or mm: 3.3in, 84mmx60mm (default: 7in)",
    "--help": "this text",
}
_EXAMPLES = (
    "compare runs/*",
    "compare runs/dense runs/topk --target 70% --out topk.html --out topk.csv",
    "compare runs/* --out fig.bits.pdf --size 3.3in",
)
_TEXTS: dict[str, Callable[[Comparison], str]] = {
    ".html": page.report_html, ".csv": tables.comparison_csv, ".json": tables.comparison_json, ".tex": tables.comparison_tex,
}  # fmt: skip
_PICTURES = (".pdf", ".svg", ".png")
_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}


def help_text(columns: int) -> str:
    """The text of --help for a terminal of so many columns."""
    whole: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    wrap: Callable[..., Any] = lambda text, indent: textwrap.fill(text, columns, subsequent_indent=indent, **whole)
    parts = [text if text.startswith("  ") else wrap(text, "") for text in _PARAGRAPHS]
    parts.append("\n".join(wrap(f"  {name:17}{text}", " " * 19) for name, text in _OPTIONS.items()))
    return "\n\n".join([*parts, "Examples:\n" + "\n".join("  " + example for example in _EXAMPLES)]) + "\n"


def parse_target(text: str, metric: Metric) -> float:
    """The target as a value of the metric, of a share from 0 to 1. Raises UserError for other text."""
    share = metric.unit == "share"
    percent = share and text.endswith("%")
    try:
        value = float(text[:-1] if percent else text)
    except ValueError:
        value = math.nan
    if percent or (share and value > 1):
        value /= 100
    if not 0 < value < math.inf or (share and value > 1):
        form = "0.7 or 70%" if share else "a number above 0"
        raise UserError(f"--target: '{text}' is not a target for {metric.name}; write {form}")
    return value


def parse_size(text: str) -> tuple[float, float | None]:
    """Width and, if it is given, height in inches. Raises UserError if the text is no size."""
    number = r"([0-9]*\.?[0-9]+)(in|cm|mm)"
    match = re.fullmatch(f"{number}(?:x{number})?", text)
    sizes = [float(match[i]) * _UNITS[match[i + 1]] for i in (1, 3) if match[i]] if match else []
    if not sizes or not all(1 <= size <= 60 for size in sizes):
        raise UserError(f"--size: '{text}' is not a size from 1in to 60in; write 3.3in, 84mm or 3.3inx2.5in")
    return sizes[0], sizes[1] if len(sizes) > 1 else None


def _misuse(text: str) -> UserError:
    return UserError(text + "; 'compare --help' shows how it is used")


def _arguments(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The runs, and the values given of each option."""
    names = ["--" + name.strip("-").partition(" ")[0] for name in _OPTIONS]
    try:
        pairs, runs = getopt.gnu_getopt(words, "h", [name[2:] + ("" if name == "--help" else "=") for name in names])
    except getopt.GetoptError as error:
        raise _misuse(error.msg + did_you_mean("--" + error.opt, names)) from None
    values: dict[str, list[str]] = {name: [value for option, value in pairs if option == name] for name in (*names, "-h")}
    for name, given in values.items():
        if len(given) > 1 and name not in ("--out", "--help"):
            raise _misuse(f"{name} is given more than once")
    return runs, values


def _check_output(file: str, runs: list[str]) -> None:
    if not file.endswith((*_TEXTS, *_PICTURES)):
        raise UserError(f"--out: the ending of '{file}' says what to write; there are {', '.join((*_TEXTS, *_PICTURES))}")
    output.check_output(file)
    if file.endswith(_PICTURES) and not AVAILABLE:
        raise UserError(INSTALL)
    if any(os.path.exists(file) and os.path.exists(run) and os.path.samefile(file, run) for run in runs):
        raise UserError(f"--out: {file} is an input; choose another name")


def _run(words: list[str]) -> str:
    """Does the work; returns what is printed."""
    runs, values = _arguments(words)
    if values["--help"] or values["-h"]:
        return help_text(shutil.get_terminal_size().columns)
    if not runs:
        raise _misuse("no run given")
    files = values["--out"] or ["report.html"]
    size, target, baseline = (next(iter(values[name]), None) for name in ("--size", "--target", "--baseline"))
    inches = parse_size(size or "7in")
    for file in files:  # before any work
        _check_output(file, runs)
    text = ""
    if any(run.endswith(".json") and not os.path.isdir(run) for run in runs):
        if len(runs) > 1 or target or baseline or not all(file.endswith(".html") for file in files):
            raise _misuse("the results.json of netlab stands alone, and its page (.html) is all that is written")
        html = page.lab_html(runs[0])
        for file in files:
            output.write_file(file, html.encode("utf-8", "replace"))
    else:
        found = read_runs(runs)
        metric = next((run for run in found if run.begun), found[0]).metric
        c = compare_runs(found, parse_target(target, metric) if target else None, baseline)
        for file in files:
            output.write_file(file, _contents(file, c, inches))
        text = tables.comparison_text(c) + "\n"
    return text + "".join(f"Report: {one_line(file)}\n" for file in files)


def _contents(file: str, c: Comparison, size: tuple[float, float | None]) -> bytes:
    stem, ending = os.path.splitext(os.path.basename(file))
    if ending in _PICTURES:
        from . import charts

        what = os.path.splitext(stem)[1][1:]
        return charts.picture(c, what if what in PICTURES else "", ending[1:], size)
    if ending == ".html" and not AVAILABLE:
        print(f"compare: {file} has no curves: {INSTALL}", file=sys.stderr)
    return _TEXTS[ending](c).encode("utf-8", "replace")


def _report(message: str) -> None:
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print("\033[1;31mcompare:\033[0m" if coloured else "compare:", one_line(message), file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    """Runs compare; returns its exit status: 0, 2 for what the user can mend, 130 if interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        text = _run(sys.argv[1:] if words is None else words)
    except (UserError, OSError, MemoryError) as error:
        _report(str(error) or "the memory of this machine does not hold these runs")
        return 2
    except KeyboardInterrupt:
        _report("interrupted")
        return 130
    try:
        print(text, end="", flush=True)
    except OSError as error:
        _report(f"standard output cannot be written: {error.strerror}; is the disk full?")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
        return 2
    return 0
