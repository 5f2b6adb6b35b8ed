"""The command line of compare: its options, and the files that it writes, which appear whole or not at all."""

import getopt
import math
import os
import pathlib
import re
import secrets
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from . import page, tables
from .comparison import Comparison, compare_runs, did_you_mean
from .read import Metric, UserError, one_line, read_runs
from .style import AVAILABLE, INSTALL, PICTURES

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
_DRAWN = (".pdf", ".svg", ".png")
_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
_RUN_NAMES = re.compile(
    r"((config\.yaml|(choices|auto_profiles|environment|bench|layer_density|exchange_profile)\.json|metrics\.(jsonl|csv)|"
    r"gradients\.(safetensors|npy)|trace_rank[0-9]+\.json)(\.part-[0-9]+)?|checkpoints|run\.lock|events\.out\.tfevents\..*)"
)
_NO_REPORTS = (".safetensors", ".npy", ".npz", ".pth", ".pt")


def help_text(columns: int) -> str:
    """The text of --help for a terminal of so many columns."""
    whole: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    wrap: Callable[..., str] = lambda text, indent="": textwrap.fill(text, columns, subsequent_indent=indent, **whole)
    parts = [text if text.startswith("  ") else wrap(text) for text in _PARAGRAPHS]
    parts.append("\n".join(wrap(f"  {name:17}{text}", " " * 19) for name, text in _OPTIONS.items()))
    return "\n\n".join([*parts, "\n  ".join(["Examples:", *_EXAMPLES])]) + "\n"


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
    if not 0 < value <= (1 if share else sys.float_info.max):
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
    names = [name.split()[0] for name in _OPTIONS]
    try:
        pairs, runs = getopt.gnu_getopt(words, "h", [name[2:] + ("" if name == "--help" else "=") for name in names])
    except getopt.GetoptError as error:
        raise _misuse(error.msg + did_you_mean("--" + error.opt, names)) from None
    values = {name: [value for option, value in pairs if option == name] for name in (*names, "-h")}
    for name, given in values.items():
        if len(given) > 1 and name not in ("--out", "--help"):
            raise _misuse(f"{name} is given more than once")
    return runs, values


def _in_checkpoints(folder: pathlib.Path) -> bool:
    of_run = all((folder.parent / name).exists() for name in ("environment.json", "config.yaml"))
    return folder.name.startswith("step-") and (folder / "manifest.json").exists() or folder.name == "checkpoints" and of_run


def _check_output(path: str, runs: list[str]) -> None:
    """Raises UserError if the file cannot be made, would lie in the checkpoints of a run or take the place of a file of a run, a
    configuration, a model or an array, by whatever links and relative names."""
    if not path.endswith((*_TEXTS, *_DRAWN)):
        raise UserError(f"--out: the ending of '{path}' says what to write; there are {', '.join((*_TEXTS, *_DRAWN))}")
    absolute = pathlib.Path(os.path.abspath(path))
    places = (absolute.resolve(), absolute.parent.resolve() / absolute.name)
    if any(_in_checkpoints(folder) for place in places for folder in place.parents):
        raise UserError(f"{path}: lies in the checkpoints of a run, which only the run writes; choose another place")
    if absolute.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file")
    if absolute.is_file() and any(_RUN_NAMES.fullmatch(p.name) and (p.parent / "config.yaml").exists() for p in places):
        raise UserError(f"{path}: is a configuration or a file of a run; choose another place")
    if absolute.is_file() and places[0].suffix in _NO_REPORTS:
        raise UserError(f"{path}: exists already; choose another name")
    if path.endswith(_DRAWN) and not AVAILABLE:
        raise UserError(INSTALL)
    if any(os.path.exists(path) and os.path.exists(run) and os.path.samefile(path, run) for run in runs):
        raise UserError(f"--out: {path} is an input; choose another name")


def _write_file(path: str, data: bytes) -> None:
    """Writes a file that appears under its name when it is whole; an earlier one stays until then. Pipes and devices are
    written in place. Raises UserError if it cannot be written."""
    target = pathlib.Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part-{secrets.randbits(32)}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; free space or choose another place") from None


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
        html = page.lab_html(runs[0]).encode("utf-8", "replace")
        for file in files:
            _write_file(file, html)
    else:
        found = read_runs(runs)
        metric = next((run for run in found if run.begun), found[0]).metric
        c = compare_runs(found, parse_target(target, metric) if target else None, baseline)
        for file in files:
            _write_file(file, _contents(file, c, inches))
        text = tables.comparison_text(c) + "\n"
    return text + "".join(f"Report: {one_line(file)}\n" for file in files)


def _contents(file: str, c: Comparison, size: tuple[float, float | None]) -> bytes:
    stem, ending = os.path.splitext(os.path.basename(file))
    if ending in _DRAWN:
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
