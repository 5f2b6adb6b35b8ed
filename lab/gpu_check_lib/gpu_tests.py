"""Every op and compressor against the CPU; some again under compute-sanitizer. Each file of tests by itself, so that one that
hangs or is cut off takes no other's result with it."""

import re

from .programs import USED_UP, is_program, last_line, run
from .report import CHECKS, FAILED, PASSED, SKIPPED, Result
from .stage import stage

TOGETHER = 4  # processes on the GPU
DEADLINE = 100  # seconds of a file, of which several run
# Files of tests/cuda and tests/nn/ops: those with kernels of our own, the newest first; shared memory, for the other two tools.
RACES = ("gpu_select_test", "gaussiank_test", "norm_test", "attention_test")
SANITIZED = {
    "memcheck": ("direct_conv_test", *RACES, "device_code_test", "batch_norm_test", "device_compressor_test",
                 "linear_cross_entropy_test", "lstm_test", "ctc_loss_test"),
    "racecheck": RACES,
    "synccheck": RACES,
}  # fmt: skip


def plain_result(name, outcome):
    result = Result("tests", name, PASSED, outcome.seconds, note=last_line(outcome.output))
    # A status of 0 also comes from a program in which no test was chosen.
    if outcome.ok() and "All tests passed" in outcome.output:
        return result
    result.failure(outcome, outcome.reason("gpu_tests") if not outcome.ok() else
                   f"it does not say that all tests passed: {last_line(outcome.output)}")  # fmt: skip
    # The failed assertions, so that the table suffices without the log; also of one that was cut off later.
    if places := re.findall(r"^(.*?): FAILED:", outcome.output, re.MULTILINE):
        result.status, result.note = FAILED, "failed: " + ", ".join(places[:5])
    return result


def checked_result(name, outcome):
    output = outcome.output
    result = Result("tests", name, PASSED, outcome.seconds, note=last_line(output))
    clean = "ERROR SUMMARY: 0 errors" in output or "RACECHECK SUMMARY: 0 hazards" in output
    summed_up = "ERROR SUMMARY:" in output or "RACECHECK SUMMARY:" in output
    found_something = "========= Invalid" in output or "========= Error: " in output
    if outcome.ok() and clean and "All tests passed" in output:
        return result
    if found_something or (summed_up and not outcome.timed_out):
        result.failure(outcome, outcome.reason("compute-sanitizer")).status = FAILED  # also if it was cut off later
        return result
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


def run_files(clock, files, kind, command, judge, report):
    for begin in range(0, len(files), TOGETHER):
        part = files[begin : begin + TOGETHER]
        if clock.used_up():
            for file in part:
                report.skip("tests", f"{file} {kind}", USED_UP)
            continue
        outcomes = clock.run_all([([*command, "-#", f"[#{file}]"], {}) for file in part], DEADLINE)
        for file, outcome in zip(part, outcomes):
            report.add(judge(f"{file} {kind}", outcome))


@stage("tests", "gpu_tests")
def run_tests(options, report, clock, program):
    sanitizer = next(filter(is_program, [options.sanitizer, "/usr/local/cuda/bin/" + options.sanitizer]), None)
    listed = clock.run([program, "-#", "--list-tags"], 60)
    files = re.findall(r"\[#(\w+)\]", listed.output)
    if files:
        own = clock.part(0.6 if sanitizer else 1)
        run_files(own, files, "against the CPU", [program, "--durations", "no"], plain_result, report)
    else:
        report.add(Result("tests", CHECKS["tests"][0]).failure(listed, f"no files of tests: {listed.reason(program)}"))
    for tool, chosen in SANITIZED.items():
        if sanitizer is None:
            report.skip("tests", f"some under {tool}", "compute-sanitizer is not on the PATH")
            continue
        ours = own_kernels_only(sanitizer) if tool != "memcheck" else []
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *ours, program]
        share = {"memcheck": 0.5, "racecheck": 0.6}.get(tool, 1)
        run_files(clock.part(share), chosen, f"under {tool}", command, checked_result, report)
