"""The command line of scripts/gpu-check."""

import argparse
import os
import re
import signal
import sys

from . import Interrupted, UserError
from .gpu_tests import run_tests
from .kernels import run_kernels
from .machine import describe_gpu
from .nccl import run_nccl
from .programs import KILL_GRACE, on_stop_signal, stop
from .report import FAILED, PASSED, Report, Result
from .smoke import run_smoke
from .stage import StageClock
from .train import run_train

DESCRIPTION = """Checks the CUDA backend on this machine's GPU, stage by stage, in 25 minutes or --minutes. It starts
programs that are built already and needs nothing else but Python 3 and CUDA's libraries; what the machine
lacks, or has no time left, is skipped by name. The results stand in OUT/gpu-check.txt and
OUT/gpu-check.json, written anew with each one.

  smoke    a few steps of every model in every precision, eager and captured
  tests    every op and compressor against the CPU, some under compute-sanitizer
  nccl     collectives and training with 1, 2 and 4 processes on the one GPU
  kernels  bytes per second of the selections against a device copy and torch.topk
  train    images and tokens per second against PyTorch"""

EPILOG = """Exit codes: 0 all that ran passed, 1 something failed, 2 bad arguments, 3 nothing could be checked (no GPU,
or none of the programs), 128 + signal where a signal stopped it.

  gpu-check --out results             everything
  gpu-check --minutes 10              the same in a shorter time
  gpu-check --stage nccl --out nccl   one stage"""

NOTHING_CHECKED = 3

STAGES = {"smoke": run_smoke, "tests": run_tests, "nccl": run_nccl, "kernels": run_kernels, "train": run_train}
# Seconds of each stage in 25 minutes; what one does not need is for the later ones.
BUDGETS = {"smoke": 100, "tests": 420, "nccl": 160, "kernels": 160, "train": 600}


def check(options):
    if not os.path.isdir(options.bin):
        raise UserError(f"--bin: {options.bin} is no folder; name the one with train and gpu_tests")
    clock, report = StageClock(60 * options.minutes), Report(options.out)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_stop_signal)
    problem, interrupted = describe_gpu(options, report), False
    if problem:
        print(f"gpu-check: {problem}", flush=True)
    chosen = [name for name in STAGES if not options.stage or name in options.stage]
    for at, name in enumerate(chosen):
        if problem or interrupted or clock.used_up():
            report.skip_all(name, "stopped by a signal" if interrupted else problem or "no time is left")
            continue
        try:
            share = BUDGETS[name] / sum(BUDGETS[later] for later in chosen[at:])
            options.seconds = share * (clock.left() - KILL_GRACE)
            STAGES[name](options, report)
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


def minutes(text):
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not 1 <= float(text) <= 600:
        raise argparse.ArgumentTypeError(f"value {text} not in range 1 to 600")
    return float(text)


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
    parser.add_argument("--minutes", type=minutes, default=25, metavar="M",
                        help="end about then; the stages share the time (default: 25)")  # fmt: skip
    parser.add_argument("--bin", default=folder, metavar="DIR",
                        help="folder of train, gpu_tests and gpu_timings (default: this program's own)")  # fmt: skip
    parser.add_argument("--out", default="gpu-check", metavar="DIR", help="folder of the results (default: gpu-check)")
    parser.add_argument("--python", default="python3", metavar="PROGRAM",
                        help="Python that has PyTorch, for comparison (default: python3)")  # fmt: skip
    parser.add_argument("--smallest", type=power, default=16, metavar="N", help="kernels: from 2^N elements (default: 16)")
    parser.add_argument("--largest", type=power, default=30, metavar="N", help="kernels: to 2^N elements (default: 30)")
    parser.set_defaults(sanitizer="compute-sanitizer", smi="nvidia-smi", bus="", reasons="")
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
