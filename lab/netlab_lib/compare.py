"""netlab compare: runs methods in alternation and writes one table and one report. Every finished run writes its cell.json, so
an interrupted comparison continues with the missing runs."""

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil

import runs

from . import LabError, sweep
from .cli import DAY_S, Parser, describe, link_record, limit, variables, whole
from .figures import figures, summarise
from .lab import MOST_HOSTS, Lab, check_system, parse_rate
from .report import write_reports
from .runner import Run, find_program, log_line, tail
from .speed import measure


def is_whole(value, least, most):
    return type(value) is int and least <= value <= most


def is_word_list(value):
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) and word for word in value)


# Keys of a SPEC: default, what a value should be, whether it is.
OPTIONAL = {
    "title": ("", "a text", lambda value: isinstance(value, str)),
    "baseline": ("dense", "a text", lambda value: isinstance(value, str)),
    "hosts": (
        [2],
        f"a list of numbers from 2 to {MOST_HOSTS}",
        lambda value: isinstance(value, list) and all(is_whole(count, 2, MOST_HOSTS) for count in value),
    ),
    "rates": (["1gbit"], 'a list such as ["100mbit", "1gbit", "none"]', is_word_list),
    "rounds": (3, "a number from 1 to 1000", lambda value: is_whole(value, 1, 1000)),
    "timeout_s": (
        3600,
        "a number of seconds, a day at most",
        lambda value: isinstance(value, (int, float)) and 0 < value <= DAY_S,
    ),
    "environment": (
        {},
        "an object of texts",
        lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    ),
}
KEYS = {*OPTIONAL, "methods", "pin"}


def training_steps(text):
    """(method or None for all, [steps, how many of them take the baseline's time])."""
    method, equals, numbers = text.rpartition("=")
    words = numbers.split(",")
    counts = [int(word) for word in words if word.isdigit()]
    if len(counts) != len(words) or len(counts) > 2 or counts[0] == 0 or sum(counts[1:]) > counts[0]:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not N, N,M, METHOD=N or METHOD=N,M with whole numbers and M no more than N"
        )
    return method if equals else None, [counts[0], sum(counts[1:])]


def compare_parser():
    parser = Parser(
        prog="netlab compare",
        description="Runs every method of SPEC once per round, in rotated order, for all "
        "hosts and rates, and writes table.md, table.csv, results.json and report.html.",
    )
    parser.add_argument("spec", metavar="SPEC.json")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--hosts", type=whole(2, MOST_HOSTS), action="append", help="instead of the SPEC's; may be repeated")
    parser.add_argument("--rate", action="append", help="instead of the SPEC's; may be repeated")
    parser.add_argument("--rounds", type=whole(1, 1000))
    parser.add_argument("--data", metavar="DIR", help="what {data} in the commands stands for")
    parser.add_argument("--only", action="append", metavar="METHOD", help="of the SPEC's methods; may be repeated")
    parser.add_argument(
        "--steps",
        type=training_steps,
        action="append",
        metavar="[METHOD=]N[,M]",
        help="adds the time of a training "
        "of N steps to the tables, of which M take the baseline's step time, such as the denser steps of a "
        "warm-up; of all methods or of METHOD alone; may be repeated, the last one counts",
    )
    parser.add_argument("--timeout", type=limit, metavar="S", help="limit of one run; an hour by default")
    parser.add_argument("--fresh", action="store_true", help="run finished methods again")
    return parser


def read_spec(options):
    """The SPEC with the command line's overrides. Raises LabError for any mistake, before anything runs."""
    path = options.spec
    try:
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
    except OSError as problem:
        raise LabError(f"{path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise LabError(f"{path} is no JSON: {problem}") from problem
    if not isinstance(spec, dict):
        raise LabError(f'{path}: an object with "methods" is expected')
    for name in spec.keys() - KEYS:
        raise LabError(f'{path}: unknown key "{name}"; there are {", ".join(sorted(KEYS))}')
    methods = spec.get("methods")
    if not isinstance(methods, dict) or not methods or not all(is_word_list(command) for command in methods.values()):
        raise LabError(f'{path}: "methods" should be an object of commands: {{"dense": ["build/bin/train", ...], ...}}')
    for name in options.only or []:
        if name not in methods:
            raise LabError(f"--only: {path} has no method '{name}'; there are {', '.join(methods)}")
    spec["methods"] = {name: command for name, command in methods.items() if not options.only or name in options.only}
    spec["steps"] = {}
    for name, steps in options.steps or []:
        if name is not None and name not in spec["methods"]:
            raise LabError(f"--steps: there is no method '{name}'; there are {', '.join(spec['methods'])}")
        spec["steps"].update({name: steps} if name is not None else dict.fromkeys(spec["methods"], steps))
    for name, given in (
        ("hosts", options.hosts),
        ("rates", options.rate),
        ("rounds", options.rounds),
        ("timeout_s", options.timeout),
    ):
        spec[name] = given or spec.get(name, OPTIONAL[name][0])
    for name, (default, what, fits) in OPTIONAL.items():
        if not fits(spec.setdefault(name, default)):
            raise LabError(f'{path}: "{name}" should be {what}')
    spec["pin"] = bool(spec.get("pin", False))
    if any(as_baseline for _, as_baseline in spec["steps"].values()) and spec["baseline"] not in spec["methods"]:
        raise LabError(
            f"--steps N,M: M steps take the time of the baseline '{spec['baseline']}', which is not among the methods "
            f"({', '.join(spec['methods'])})"
        )
    for rate in spec["rates"]:
        parse_rate(rate)
    if options.data and not os.path.isdir(options.data):
        raise LabError(f"--data: there is no folder '{options.data}'")
    by_name = {}
    for name, command in spec["methods"].items():
        if by_name.setdefault(slug(name), name) != name:
            raise LabError(f"{path}: '{name}' and '{by_name[slug(name)]}' would share a folder; choose other names")
        find_program(command)
        if not options.data and any("{data}" in word for word in command):
            raise LabError(f"{path}: '{name}' trains on data: --data DIR says where they are")
    return spec


def slug(name):
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("_.") or "method"


def filled(command, values):
    """The command with every placeholder {name} replaced by its value."""
    for name, value in values.items():
        command = [word.replace(f"{{{name}}}", str(value)) for word in command]
    return command


def fingerprint(command):
    """A hash of the files that a command names: program, script, configuration."""
    digest = hashlib.sha256()
    for word in [shutil.which(command[0]) or command[0], *command[1:]]:
        if os.path.isfile(word):
            with open(word, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


def finished(path, wanted):
    """The cell of a finished run whose settings equal `wanted`; else None."""
    cell = runs.read_json(path) or {}
    return cell if cell.get("figures") and all(cell.get(key) == value for key, value in wanted.items()) else None


def first_error(folder, run):
    """The last output line of the first failed rank, for the table."""
    failed = sorted((rank for rank in run.ranks if rank.code), key=lambda rank: (rank.stop_requested, rank.ended))
    for rank in failed:
        lines = [line for line in tail(rank.log, 20) if line.strip()]
        if lines:
            return f"{run.name(rank)}: {lines[-1].strip()[:200]}"
    return f"no message; the outputs are in {folder}"


def run_cell(lab, link, cell, spec, folder):
    """Runs one method once; sets the cell's figures or its problem, and writes cell.json."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    extra = dict(spec["environment"], **variables(lab, cell["rate"], link["measured"]))
    run = Run(lab, cell["command"], folder, extra=extra, quiet=True, pin=spec["pin"])
    code = run.wait(spec["timeout_s"], 60)
    cell.update({"lab": link, "exit_code": code})
    if code:
        cell["problem"] = f"exit code {code}; {first_error(folder, run)}"
    else:
        try:
            cell["figures"] = figures(os.path.join(folder, "run"))
        except (OSError, ValueError) as problem:
            cell["problem"] = f"exit code 0, but no figures: {problem}"
    runs.write_json(os.path.join(folder, "cell.json"), cell, indent=1)


def cells_of(spec, out, options):
    """All runs in order: rounds are outermost, so that drift of the machine affects all hosts, rates and methods equally."""
    names = list(spec["methods"])
    files = {name: fingerprint(command) for name, command in spec["methods"].items()}
    for number, hosts, rate in itertools.product(range(spec["rounds"]), spec["hosts"], spec["rates"]):
        group = []
        for name in runs.rotated(names, number):
            folder = os.path.join(out, "runs", f"hosts{hosts}-{rate}", f"round{number + 1}", slug(name))
            command = filled(
                spec["methods"][name],
                {
                    "out": os.path.join(folder, "run"),
                    "hosts": hosts,
                    "rate": rate,
                    "round": number + 1,
                    "data": os.path.abspath(options.data or ""),
                },
            )
            wanted = {
                "hosts": hosts,
                "rate": rate,
                "round": number + 1,
                "method": name,
                "command": command,
                "files": files[name],
                "environment": spec["environment"],
                "pin": spec["pin"],
            }
            done = None if options.fresh else finished(os.path.join(folder, "cell.json"), wanted)
            group.append((folder, done or wanted))
        yield hosts, rate, group


def compare(arguments):
    options = compare_parser().parse_args(arguments)
    spec = read_spec(options)
    check_system()
    sweep.remove_stale()
    out = os.path.abspath(options.out)
    os.makedirs(out, exist_ok=True)
    total = spec["rounds"] * len(spec["hosts"]) * len(spec["rates"]) * len(spec["methods"])
    cells, count = [], 0
    for hosts, rate, group in cells_of(spec, out, options):
        if all(cell.get("figures") for _, cell in group):
            count += len(group)
            cells += [cell for _, cell in group]
            continue
        with Lab(hosts, parse_rate(rate)) as lab:
            measured = measure(lab)
            for line in describe(lab, rate, measured):
                log_line(line)
            for folder, cell in group:
                count += 1
                place = f"[{count}/{total}] {hosts} hosts, {rate}, round {cell['round']}, {cell['method']}"
                if not cell.get("figures"):
                    run_cell(lab, link_record(lab, rate, measured), cell, spec, folder)
                    log_line(
                        f"{place}: "
                        + (f"{cell['figures']['step_s'] * 1000:.1f} ms per step" if cell.get("figures") else cell["problem"])
                    )
                cells.append(cell)
        # After each group, so that an interrupted comparison has the reports of its finished runs.
        write_reports(out, spec, cells, summarise(cells, spec))
    rows = summarise(cells, spec)
    table, files = write_reports(out, spec, cells, rows)
    print(table, end="", flush=True)
    log_line(f"written: {files} in {out}")
    return 1 if any(row["failed"] for row in rows) else 0
