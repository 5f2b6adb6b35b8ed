"""What the stages share. Each adds its results to the report, skips by name what the machine lacks, and ends within
options.seconds and the few seconds that killing takes."""

import os
import shutil
import time

import runs

from . import UserError
from .programs import is_program, run_all


def stage(name, program):
    """Of a function (options, report, its clock, the path of its program): the same as (options, report). Without the program it
    skips its checks."""

    def of_body(body):
        def run_stage(options, report):
            path = os.path.join(options.bin, program)
            if is_program(path):
                body(options, report, StageClock(options.seconds), path)
            else:
                report.skip_all(name, f"{path} is not there")

        return run_stage

    return of_body


class StageClock:
    """The time that a stage has left."""

    def __init__(self, seconds):
        self.begin, self.seconds = time.monotonic(), seconds

    def left(self):
        return self.seconds - (time.monotonic() - self.begin)

    def used_up(self):
        """Too little to begin anything."""
        return self.left() < 0.03 * self.seconds

    def part(self, share):
        """A clock of this share of what is left."""
        return StageClock(share * self.left())

    def run_all(self, commands, deadline):
        """As programs.run_all(). Whoever is killed before its own deadline of so many seconds is cut off."""
        left = self.left()
        outcomes = run_all(commands, min(deadline, left))
        for outcome in outcomes:
            outcome.cut_off = outcome.timed_out and left < deadline
        return outcomes

    def run(self, argv, deadline):
        return self.run_all([(argv, {})], deadline)[0]


def train_command(options, folder, *settings):
    """A run of `train` on the GPU. All runs share the file of algorithms that timing chose, so that one times for all."""
    return [os.path.join(options.bin, "train"), *settings, "train.device=cuda", f"output.dir={folder}", "output.overwrite=true",
            "train.algorithm_cache=" + os.path.join(options.out, "algorithms")]  # fmt: skip


def fresh_run_directory(options, name):
    """The folder of a run of `train` in the results, with no run of an earlier check in it."""
    folder = os.path.join(options.out, "runs", name)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"{folder} is of an earlier check and cannot be removed; remove it") from error
    return folder


def end_of_run(folder):
    """The last record of its metrics; empty if the run did not come to its end."""
    return (runs.records(folder, "end") or [{}])[-1]


def peer(name):
    """A script of lab/peers, next to this package."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "peers", name)
