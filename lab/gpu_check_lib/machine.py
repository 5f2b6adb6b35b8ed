"""What nvidia-smi says of the card: in the heading of the results, and its clocks while something is timed."""

import contextlib
import os
import statistics
import subprocess

import runs

from .programs import KILL_GRACE, Child, last_line, run

HEADING = {"driver_version": "driver", "power.limit": "power limit", "compute_mode": "compute mode",
           "clocks.sm": "SM clock at the start", "clocks.mem": "memory clock at the start",
           "clocks.max.sm": "greatest SM clock"}  # fmt: skip
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # since driver 535, before
IDLE = 0x1
SLOWED = {0x4: "power cap", 0x8: "hardware", 0x20: "heat", 0x40: "heat, by hardware", 0x80: "power brake"}  # NVML's bits
SAMPLE_MS = 500


def query(options, fields, *more):
    return [options.smi, *([f"--id={options.bus}"] if options.bus else []), "--query-gpu=" + ",".join(fields),
            "--format=csv,noheader" + (",nounits" if more else ""), *more]  # fmt: skip


def describe_gpu(options, report):
    """Card, driver, libraries and the programs' revision into the report's heading; options.bus and .reasons are the card's.
    Returns why there is none to check, or ""."""
    program, train = (os.path.join(options.bin, name) for name in ("gpu_timings", "train"))
    outcome = run([program, "--describe"], 60)
    if not outcome.found:
        return f"{program}, which looks for the GPU, is not there"
    record = next(runs.json_lines(outcome.output), None)
    if record is None or not outcome.ok():
        raise RuntimeError(f"{program}: {outcome.reason(program)}")
    report.about |= record.get("about", {})
    if record.get("problem"):
        return record["problem"]
    options.bus = report.about.get("PCI bus", "")
    options.reasons = next((name for name in REASONS if run(query(options, [name]), 20).ok()), REASONS[0])
    card = run(query(options, HEADING), 20)
    values = last_line(card.output).split(", ")
    if card.ok() and len(values) == len(HEADING):
        report.about |= dict(zip(HEADING.values(), values))
    else:
        report.about["nvidia-smi"] = card.reason(options.smi)
    revision = run([train, "--version"], 20)
    report.about["program"] = last_line(revision.output) if revision.ok() else revision.reason(train)
    return ""


class Clocks:
    """The card's clocks within a `with`; none where nvidia-smi does not tell."""

    def __init__(self, options):
        fields = ("clocks.sm", "clocks.mem", options.reasons)
        self.command, self.rows = query(options, fields, f"--loop-ms={SAMPLE_MS}"), []

    def __enter__(self):
        self.child = Child(self.command, {})
        return self

    def __exit__(self, *_):
        if not self.child.process:
            return
        self.child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver
            self.child.process.wait(KILL_GRACE)
        self.child.drain()
        for line in self.child.output.decode(errors="replace").split("\n"):
            try:
                sm, memory, reasons = line.split(", ")
                self.rows.append((float(sm), float(memory), int(reasons, 16)))
            except ValueError:  # "[N/A]", or a line that was cut off
                continue

    def add_to(self, result):
        """Medians, as figures, of when the card was not idle, and what slowed it down."""
        busy = [row for row in self.rows if not row[2] & IDLE]
        if not busy:
            return result
        result.figures |= {"MHz": statistics.median(row[0] for row in busy),
                           "MHz of memory": statistics.median(row[1] for row in busy)}  # fmt: skip
        causes = [cause for bit, cause in SLOWED.items() if any(row[2] & bit for row in busy)]
        if causes:
            result.note = "; ".join(filter(None, [result.note, "slowed down by " + ", ".join(causes)]))
        return result
