"""Every op and compressor against the CPU; the same again under compute-sanitizer."""

import os
import re

from .programs import is_program, last_line, run
from .report import CHECKS, FAILED, PASSED, SKIPPED, Result
from .stage import USED_UP, StageClock


def run_plain(program, seconds, report):
    outcome = run([program, "--durations", "no"], seconds)
    result = Result("tests", CHECKS["tests"][0], PASSED, outcome.seconds, note=last_line(outcome.output))
    # A status of 0 also comes from a program in which no test was chosen.
    if outcome.ok() and "All tests passed" in outcome.output:
        return report.add(result)
    report.add(result.failure(outcome, outcome.reason(program) if not outcome.ok() else
                              f"it does not say that all tests passed: {last_line(outcome.output)}"))
    # The failed assertions, so that the report suffices without the log.
    for place in re.findall(r"^(.*?): FAILED:", outcome.output, re.MULTILINE)[:20]:
        report.add(Result("tests", place[:200], FAILED))
    return None


def checked_result(name, outcome):
    output = outcome.output
    result = Result("tests", name, PASSED, outcome.seconds, note=last_line(output))
    clean = "ERROR SUMMARY: 0 errors" in output or "RACECHECK SUMMARY: 0 hazards" in output
    summed_up = "ERROR SUMMARY:" in output or "RACECHECK SUMMARY:" in output
    found_something = "========= Invalid" in output or "========= Error: " in output
    if outcome.ok() and clean and "All tests passed" in output:
        return result
    if found_something or (summed_up and not outcome.timed_out):
        return result.failure(outcome, outcome.reason("compute-sanitizer"))
    # Without a summary the tool did not work here: some machines forbid debugging interfaces, and it may be slow. That is no
    # result about our code.
    result.status, result.note = SKIPPED, outcome.reason("compute-sanitizer")
    return result


def own_kernels_only(sanitizer):
    """cuDNN's and cuBLAS's kernels synchronise in ways that these tools take for hazards, and take most of the time. The
    option that leaves them out has had two names."""
    help_text = run([sanitizer, "--help"], 20).output
    if "--kernel-name" in help_text:
        return ["--kernel-name", "kernel_substring=topknot"]
    return ["--kernel-regex", "kns=topknot"] if "--kernel-regex" in help_text else []


def run_tests(options, report):
    clock = StageClock(options.seconds)
    program = os.path.join(options.bin, "gpu_tests")
    if not is_program(program):
        return report.skip_all("tests", f"{program} is not there")
    run_plain(program, 0.5 * clock.left(), report)
    sanitizer = next(filter(is_program, [options.sanitizer, "/usr/local/cuda/bin/" + options.sanitizer]), None)
    share = 0.5
    for tool in ("memcheck", "racecheck", "synccheck"):
        name = f"the same under compute-sanitizer {tool}"
        if sanitizer is None or clock.used_up():
            report.skip("tests", name, USED_UP if sanitizer else "compute-sanitizer is not on the PATH")
            continue
        ours = own_kernels_only(sanitizer) if tool != "memcheck" else []
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *ours, program, "~[slow]"]
        report.add(checked_result(name, run(command, share * clock.left())))
        share = 0.6 if tool == "memcheck" else 1
    return None
