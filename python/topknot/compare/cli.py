"""The command line of compare."""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from . import charts, output, page, tables
from .comparison import Comparison, compare_runs
from .read import Metric, UserError, one_line, read_runs

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


class _Arguments:
    def __init__(self, words: list[str]) -> None:
        self.runs: list[str] = []
        self.values: dict[str, list[str]] = {"--out": [], "--target": [], "--baseline": [], "--size": []}
        self.help = False
        rest = iter(words)
        for word in rest:
            name, sign, value = word.partition("=")
            if word == "--":
                self.runs += rest
            elif word in ("-h", "--help"):
                self.help = True
            elif name in self.values:
                given = value if sign else next(rest, None)
                if given is None:
                    raise _misuse(f"{name} needs a value")
                self.values[name].append(given)
            elif word.startswith("-") and len(word) > 1:
                close = difflib.get_close_matches(name, [*self.values, "--help"], 1)
                raise _misuse(f"there is no option '{name}'" + (f"; did you mean '{close[0]}'?" if close else ""))
            else:
                self.runs.append(word)
        for name, given_values in self.values.items():
            if name != "--out" and len(given_values) > 1:
                raise _misuse(f"{name} is given more than once")

    def last(self, name: str) -> str | None:
        return self.values[name][0] if self.values[name] else None


def _misuse(text: str) -> UserError:
    return UserError(text + "; 'compare --help' shows how it is used")


def _drawn(path: str) -> str | None:
    """What a picture of this name draws: "" for the metric, "bits", ...; None if it is not a picture."""
    stem, ending = os.path.splitext(os.path.basename(path))
    if ending not in _PICTURES:
        return None
    word = os.path.splitext(stem)[1][1:]
    return word if word in charts.PICTURES else ""


def _check_outputs(files: list[str], runs: list[str]) -> None:
    for file in files:  # before any work
        if not file.endswith((*_TEXTS, *_PICTURES)):
            raise UserError(f"--out: the ending of '{file}' says what to write; there are {', '.join((*_TEXTS, *_PICTURES))}")
        output.check_output(file)
        if file.endswith(_PICTURES):
            charts.need_matplotlib()
        for run in runs:
            if os.path.exists(file) and os.path.exists(run) and os.path.samefile(file, run):
                raise UserError(f"--out: {file} is an input; choose another name")


def _run(words: list[str]) -> str:
    """Does the work; returns what is printed."""
    arguments = _Arguments(words)
    if arguments.help:
        return help_text(shutil.get_terminal_size().columns)
    if not arguments.runs:
        raise _misuse("no run given")
    files = arguments.values["--out"] or ["report.html"]
    text = ""
    size = parse_size(arguments.last("--size") or "7in")
    _check_outputs(files, arguments.runs)
    target, baseline = arguments.last("--target"), arguments.last("--baseline")
    if any(run.endswith(".json") and not os.path.isdir(run) for run in arguments.runs):
        if len(arguments.runs) > 1 or target or baseline or not all(file.endswith(".html") for file in files):
            raise _misuse("the results.json of netlab stands alone, and its page (.html) is all that is written")
        html = page.lab_html(arguments.runs[0])
        for file in files:
            output.write_file(file, html.encode("utf-8", "replace"))
    else:
        runs = read_runs(arguments.runs)
        c = compare_runs(runs, parse_target(target, runs[0].metric) if target else None, baseline)
        for file in files:
            _write(file, c, size)
        text = tables.comparison_text(c) + "\n"
    return text + "".join(f"Report: {one_line(file)}\n" for file in files)


def _write(file: str, c: Comparison, size: tuple[float, float | None]) -> None:
    if file.endswith(_PICTURES):
        data = charts.picture(c, _drawn(file) or "", os.path.splitext(file)[1][1:], size)
    else:
        data = _TEXTS[os.path.splitext(file)[1]](c).encode("utf-8", "replace")
        if file.endswith(".html") and not charts.available():
            print(f"compare: {file} has no curves: {charts.INSTALL}", file=sys.stderr)
    output.write_file(file, data)


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
    except (UserError, MemoryError) as error:
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
