"""The command line of scripts/gpu-check."""

import argparse
import os
import signal
import sys

from . import Interrupted, UserError
from .gpu_tests import run_tests
from .kernels import run_kernels
from .nccl import run_nccl
from .programs import on_stop_signal, records_of, run, stop
from .report import FAILED, PASSED, Report, Result
from .smoke import run_smoke
from .train import run_train

DESCRIPTION = """Checks the CUDA backend on this machine's GPU, stage by stage, each under three minutes. It starts programs
that are built already and needs nothing else but Python 3 and CUDA's libraries; what the machine lacks is
skipped by name. The results stand in OUT/gpu-check.txt and OUT/gpu-check.json, written anew with each one.

  smoke    a few steps of every model in every precision, eager and captured
  tests    every op and compressor against the CPU, and under compute-sanitizer
  nccl     collectives and training with 1, 2 and 4 processes on the one GPU
  kernels  bytes per second of the selections against a device copy and torch.topk
  train    images and tokens per second against PyTorch"""

EPILOG = """Exit codes: 0 all that ran passed, 1 something failed, 2 bad arguments, 3 nothing could be checked (no GPU,
or none of the programs), 128 + signal where a signal stopped it.

  gpu-check --out results             everything
  gpu-check --stage nccl --out nccl   one stage"""

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"

NOTHING_CHECKED = 3

STAGES = {"smoke": run_smoke, "tests": run_tests, "nccl": run_nccl, "kernels": run_kernels, "train": run_train}


def describe_gpu(options, report):
    """Card, driver and libraries into the report's heading; returns why there is none to check, or ""."""
    program = os.path.join(options.bin, "gpu_timings")
    outcome = run([program, "--describe"], 60)
    if not outcome.found:
        return f"{program}, which looks for the GPU, is not there"
    for record in records_of(outcome.output):
        if outcome.ok():
            report.about |= record.get("about", {})
            return record.get("problem", "")
    raise RuntimeError(f"{program}: {outcome.reason(program)}")


def check(options):
    if not os.path.isdir(options.bin):
        raise UserError(f"--bin: {options.bin} is no folder; name the one with train and gpu_tests")
    report = Report(options.out)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_stop_signal)
    problem, interrupted = describe_gpu(options, report), False
    if problem:
        print(f"gpu-check: {problem}", flush=True)
    for name, stage in STAGES.items():
        if options.stage and name not in options.stage:
            continue
        if problem or interrupted:
            report.skip_all(name, "stopped by a signal" if interrupted else problem)
            continue
        try:
            stage(options, report)
        except Interrupted as error:
            interrupted = True
            report.skip(name, "the rest of the stage", str(error))
        except Exception as error:  # one stage's failure does not keep the others from being run
            report.add(Result(name, "the stage", FAILED, note=str(error)))
    print(f"{options.out}/gpu-check.txt and .json have the results", flush=True)
    if interrupted:
        return 128 + stop["signal"]
    if report.any(FAILED):
        return 1
    return 0 if report.any(PASSED) else NOTHING_CHECKED


class Parser(argparse.ArgumentParser):
    def print_help(self, file=None):
        print(self.format_help(), end="", flush=True)  # argparse's own hides that the output cannot be written

    def error(self, message):
        raise UserError(f"{message}; gpu-check --help lists the options")


def power(text):
    if not text.isdecimal() or not 10 <= int(text) <= 30:
        raise argparse.ArgumentTypeError(f"value {text} not in range 10 to 30")
    return int(text)


def parse(arguments, folder):
    """`folder`: of the script."""
    if os.path.basename(folder) == "scripts":  # not the link that the build puts beside its programs
        folder = os.path.join(os.path.dirname(folder), "build", "bin")
    parser = Parser(prog="gpu-check", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--stage", action="append", choices=STAGES, metavar="STAGE",
                        help="only this stage: smoke, tests, nccl, kernels or train; may be repeated")  # fmt: skip
    parser.add_argument("--bin", default=folder, metavar="DIR",
                        help="folder of train, gpu_tests and gpu_timings (default: this program's own)")  # fmt: skip
    parser.add_argument("--out", default="gpu-check", metavar="DIR", help="folder of the results (default: gpu-check)")
    parser.add_argument("--python", default="python3", metavar="PROGRAM",
                        help="Python that has PyTorch, for comparison (default: python3)")  # fmt: skip
    parser.add_argument("--smallest", type=power, default=16, metavar="N", help="kernels: from 2^N elements (default: 16)")
    parser.add_argument("--largest", type=power, default=30, metavar="N", help="kernels: to 2^N elements (default: 30)")
    parser.set_defaults(seconds=165.0, sanitizer="compute-sanitizer")  # seconds of one stage
    options = parser.parse_args(arguments)
    if options.smallest > options.largest:
        raise UserError("--smallest is above --largest; exchange them")
    return options


def main(arguments, folder):
    try:
        try:
            code = check(parse(arguments, folder))
        except SystemExit as end:  # --help
            code = end.code
        sys.stdout.flush()
        return code
    except UserError as error:
        message, code = str(error), 2
    except OSError as error:  # of print(): files and programs have their own
        message, code = f"standard output cannot be written: {error.strerror}; is the disk full?", 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left would fail again at exit
    except Interrupted as error:
        message, code = str(error), 128 + stop["signal"]
    except RuntimeError as error:
        message, code = str(error), 1
    print(f"error: {message}", file=sys.stderr)
    return code
