"""Bytes per second of each selection against a device copy in the same run, and torch.topk. The figures come from gpu_timings,
which a lost GPU may take with it."""

import runs

from .machine import Clocks
from .programs import last_line, run
from .report import PASSED, SKIPPED, Result
from .stage import peer, stage


def size_text(n):
    return f"2^{n.bit_length() - 1}" if n & (n - 1) == 0 else f"{n / 1e6:.1f}M"


def torch_times(options, seconds, report):
    """By number of elements: milliseconds of torch.topk alone, and of a step of top-k with error feedback in PyTorch."""
    outcome = run([options.python, peer("topk_ef.py"), "--device", "cuda", "--smallest", str(options.smallest), "--largest", str(options.largest),
                   "--density", "0.001"], seconds)  # fmt: skip
    times, version = {}, ""
    for record in runs.json_lines(outcome.output):
        try:
            times[int(record["elements"])] = (float(record["topk_ms"]), float(record["step_ms"]))
        except (KeyError, TypeError, ValueError):
            continue
        version = record.get("torch", "?")
    result = Result("kernels", "torch.topk", PASSED, outcome.seconds)
    if times:
        result.note = f"PyTorch {version}, {len(times)} sizes"
        result.figures = {f"ms of {size_text(n)}": times[n][0] for n in sorted(times)}
    else:
        result.status, result.note = SKIPPED, f"no PyTorch figure: {outcome.reason(options.python)}"
    report.add(result)
    return times


def timing_result(record, torch):
    """One line of gpu_timings as a result."""
    n, what = int(record["elements"]), record["what"]
    result = Result("kernels", f"{what}, {size_text(n)}", figures=dict(record["figures"]), note=record["skipped"])
    if result.note:
        result.status = SKIPPED
    elif what == "topk" and n in torch:
        ms = result.figures["ms"]
        result.figures |= {"times torch.topk": torch[n][0] / ms, "times PyTorch's step": torch[n][1] / ms}
    return result


@stage("kernels", "gpu_timings")
def run_kernels(options, report, clock, program):
    torch = torch_times(options, 0.35 * clock.left(), report)
    seconds = clock.left()
    with Clocks(options) as clocks:
        outcome = run([program, "--seconds", f"{0.9 * seconds:f}", "--smallest", str(options.smallest),
                       "--largest", str(options.largest)], seconds)  # fmt: skip
    count = 0
    for record in runs.json_lines(outcome.output):
        try:
            result = timing_result(record, torch)
        except (KeyError, TypeError, ValueError):
            continue
        count += 1
        report.add(result)
    everything = Result("kernels", "all sizes measured", PASSED, outcome.seconds)
    if not outcome.ok():
        everything.failure(outcome, outcome.reason(program))
    elif count == 0:
        everything.failure(outcome, f"no figures came: {last_line(outcome.output)}")
    report.add(clocks.add_to(everything))
