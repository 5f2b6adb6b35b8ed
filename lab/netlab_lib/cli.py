"""The command line of lab/netlab."""

import argparse
import json
import os
import shutil
import signal
import tempfile

import runs

from . import Interrupted, LabError, sweep
from .lab import MOST_HOSTS, Lab, check_system, parse_rate, show_bits
from .runner import Run, find_program, log_line
from .speed import measure

DAY_S = 86400.0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise LabError(f"{message} (see --help)")


def seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 30 * DAY_S:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds")
    return value


def limit(text):
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("it must be above 0 seconds")
    return value


def whole(least, most):
    def parse(text):
        if not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} to {most}")
        return int(text)

    return parse


def run_parser():
    parser = Parser(
        prog="netlab",
        usage="netlab --hosts N --rate RATE [options] -- COMMAND...\n"
        "       netlab --hosts N --rate RATE --measure\n       netlab compare SPEC.json --out DIR ...",
        description="Runs COMMAND once per host of an emulated cluster, with the variables that torchrun sets. "
        "Needs root. See lab/netlab.md and 'netlab compare --help'.",
    )
    parser.add_argument("--hosts", type=whole(1, MOST_HOSTS), required=True)
    parser.add_argument("--rate", required=True, help="link rate in each direction: 100mbit, 1gbit, ..., or none")
    parser.add_argument("--ranks-per-host", type=whole(1, 64), default=1, metavar="N")
    parser.add_argument(
        "--log",
        metavar="DIR",
        help="directory of netlab.json and the outputs of hosts 1 and up; by default temporary, kept only if something fails",
    )
    parser.add_argument("--timeout", type=limit, default=DAY_S, metavar="S", help="limit of the command; a day by default")
    parser.add_argument(
        "--grace",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long the other ranks may continue after the first failure; 60 by default",
    )
    parser.add_argument("--cut", type=whole(0, MOST_HOSTS - 1), metavar="HOST", help="sever the link of this host, --after S")
    parser.add_argument("--after", type=seconds, metavar="S", help="time of --cut after the command's start")
    parser.add_argument("--pin", action="store_true", help="bind each rank to its share of the cores")
    parser.add_argument("--measure", action="store_true", help="only measure the links")
    parser.add_argument("--no-measure", action="store_true", help="do not measure the links before the command")
    return parser


def describe(lab, rate, measured):
    lines = [f"{lab.hosts} hosts, links of {rate if lab.bits else 'no limit'}"]
    if measured:
        lines[0] += (
            f"; TCP with all sending: lowest {show_bits(measured['lowest_bits'])}, mean {show_bits(measured['mean_bits'])}"
        )
        if lab.bits:
            lines[0] += f" ({100 * measured['lowest_bits'] / lab.bits:.0f} % of nominal)"
        if measured.get("round_trip_s"):
            lines[0] += f"; 8-byte round trip {measured['round_trip_s'] * 1e6:.0f} us"
        if measured["cpu_bound"]:
            lines.append("CPU-bound: below 80 % of nominal, so this machine, not the link, limits the rate")
    return lines


def link_record(lab, rate, measured, options=None):
    """The lab's entry in netlab.json and cell.json."""
    return {
        "hosts": lab.hosts,
        "rate": rate,
        "nominal_bits": lab.bits,
        "burst_bytes": lab.burst,
        "measured": measured or None,
        "cpu_bound": bool(measured and measured["cpu_bound"]),
        "cores": len(os.sched_getaffinity(0)),
        **({"ranks_per_host": options.ranks_per_host, "pin": options.pin} if options else {}),
    }


def variables(lab, rate, measured):
    """NETLAB_* variables of the command. NETLAB_MEASURED_BITS is the lowest host's rate in bits per second."""
    result = {"NETLAB_HOSTS": str(lab.hosts), "NETLAB_RATE": rate}
    if measured:
        result["NETLAB_MEASURED_BITS"] = f"{measured['lowest_bits']:.0f}"
    return result


def check(options, command):
    bits = parse_rate(options.rate)
    if (options.cut is None) != (options.after is None):
        raise LabError("--cut HOST and --after S go together")
    if options.cut is not None and options.cut >= options.hosts:
        raise LabError(f"--cut {options.cut}: there are only the hosts 0 to {options.hosts - 1}")
    if options.measure:
        if command or options.no_measure or options.cut is not None:
            raise LabError("--measure takes no command, no --no-measure and no --cut")
        if options.hosts < 2:
            raise LabError("--measure needs two hosts or more")
    elif not command:
        raise LabError("no command: write it after --, as in: netlab --hosts 2 --rate 1gbit -- build/bin/train FILE ...")
    else:
        find_program(command)
    return bits


def run(arguments, command):
    options = run_parser().parse_args(arguments)
    bits = check(options, command)
    check_system()
    stale = sweep.remove_stale()
    if stale:
        log_line(f"removed the namespaces of {stale} killed {'lab' if stale == 1 else 'labs'}")
    folder = options.log or tempfile.mkdtemp(prefix="netlab-")
    code = 1
    try:
        os.makedirs(folder, exist_ok=True)
        with Lab(options.hosts, bits) as lab:
            measured = {} if options.no_measure else measure(lab)
            for line in describe(lab, options.rate, measured):
                log_line(line)
            if options.hosts > 1 and not options.no_measure and not measured:
                log_line("the links could not be measured")
            runs.write_json(os.path.join(folder, "netlab.json"), link_record(lab, options.rate, measured, options), indent=1)
            if options.measure:
                code = 0 if measured else 1
                if not measured:
                    return code
                print(json.dumps(link_record(lab, options.rate, measured)))
                return code
            processes = Run(lab, command, folder, options.ranks_per_host, variables(lab, options.rate, measured), pin=options.pin)
            code = processes.wait(options.timeout, options.grace, None if options.cut is None else (options.cut, options.after))
            processes.show_failures()
        return code
    finally:
        if not options.log and code == 0:
            shutil.rmtree(folder, ignore_errors=True)
        elif not options.log and os.path.isdir(folder):
            log_line(f"the outputs are in {folder}")


def main(arguments):
    def stop(number, _):
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # once; the clean-up has its own deadlines
        raise Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # The directories of ip and tc, which are not on every PATH.
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    try:
        if arguments[:1] == ["compare"]:
            from .compare import compare  # pylint: disable=import-outside-toplevel

            return compare(arguments[1:])
        split = arguments.index("--") if "--" in arguments else len(arguments)
        return run(arguments[:split], arguments[split + 1 :])
    except LabError as problem:
        log_line(problem)
        return problem.status
    except OSError as problem:
        log_line(problem)
        return 1
    except Interrupted as interrupted:
        log_line(f"{signal.Signals(interrupted.number).name}: stopped")
        return 128 + interrupted.number
