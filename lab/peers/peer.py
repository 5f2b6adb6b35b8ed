"""What the peers share: the stepping protocol, PyTorch at its best on a GPU, and messages where PyTorch is missing.

On the CPU a peer is a process that stays alive so that a driver can step it in alternation with others. It prints `ready N` (N items
a step), then answers each line `k` on its standard input with one line of k numbers: the seconds of k steps. It ends with its
input. On a GPU (--device cuda) it prints one JSON line per setting that works here: setting, precision, per_second, torch.
Exit status: 0, 3 where PyTorch or a GPU is missing, 1 where no setting worked.
"""

import argparse
import gc
import json
import statistics
import sys
import time

# Large blocks stay with the allocator instead of going back to the kernel after each step: the honest baseline.
MALLOC_TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8000000000:"
    "glibc.malloc.trim_threshold=16000000000:glibc.malloc.top_pad=268435456"
)


def import_torch():
    """torch, or a polite end of the process (status 3, so that a driver can tell it from a failure)."""
    try:
        import torch
    except ImportError as error:
        print(
            f"PyTorch is not installed for {sys.executable} ({error}). "
            "Debian: apt-get install python3-torch; elsewhere: pip install torch in a virtual environment.",
            file=sys.stderr,
        )
        sys.exit(3)
    return torch


def parser_of(description, flags=("bf16", "compile"), **numbers):
    """With a whole number for each name and default."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in {**numbers, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser


def add_device(parser, steps):
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=steps, help="on a GPU: of one timing")
    parser.add_argument("--seconds", type=float, default=60, help="on a GPU: no further setting is begun after these")


def parse(torch, parser):
    """The options; ends the process where the device is a GPU and there is none."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("PyTorch finds no GPU")
        sys.exit(3)
    return options


def training_step(torch, optimizer, loss_of, autocast=False, device="cpu", clipped=None):
    """A step: forward, backward, with `clipped` parameters their norm clipped to 1, and update. autocast: in bf16."""

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of()
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()

    return step


# On the CPU.


def timed(step, prepare=None):
    """Seconds of one step(); prepare() runs before it, untimed."""
    if prepare is not None:
        prepare()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def answer(items, measure):
    """Speaks the protocol: measure(*words) returns the seconds for a line of words."""
    print(f"ready {items}", flush=True)
    for line in sys.stdin:
        if line.strip():
            print(" ".join(f"{seconds:.9f}" for seconds in measure(*line.split())), flush=True)


def serve(items, step, prepare=None):
    answer(items, lambda count: [timed(step, prepare) for _ in range(int(count))])


# On a GPU.


def allow_tf32(torch):
    """By the switches that this version has; the older ones are going away."""
    for switch in (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    ):
        try:
            switch()
        except (AttributeError, RuntimeError):
            pass


def recorded(torch, step):
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def gpu_rate(torch, step, steps, items):
    """Items per second, the median of three timings."""
    rates = []
    for count in (10, steps, steps, steps):
        torch.cuda.synchronize()
        seconds = timed(lambda: ([step() for _ in range(count)], torch.cuda.synchronize()))
        rates.append(count * items / seconds)
    return statistics.median(rates[1:])


def first_line(error):
    return (str(error).strip().splitlines() or [""])[0]


def best_on_gpu(torch, options, items, step_of, settings):
    """Prints the rate of each setting, "bf16 autocast, compile, CUDA graph" and its parts, of what step_of(bf16, compiled) steps.
    What does not work on this machine is left out with a line that says why."""
    torch.backends.cudnn.benchmark = True
    allow_tf32(torch)
    started, worked = time.monotonic(), 0
    for setting in settings:
        if time.monotonic() - started > options.seconds:
            print(f"{setting}: left out, the time is used up", flush=True)
            continue
        bf16 = setting.startswith("bf16")
        try:
            step = step_of(bf16, "compile" in setting)  # owns what the graph reads and writes
            replay = recorded(torch, step) if "graph" in setting else step
            rate = gpu_rate(torch, replay, options.steps, items)
            print(
                json.dumps(
                    {"setting": setting, "precision": "bf16" if bf16 else "tf32", "per_second": rate, "torch": torch.__version__}
                ),
                flush=True,
            )
            worked += 1
        except Exception as error:  # what a version or a machine cannot do
            print(f"{setting}: {type(error).__name__}: {first_line(error)}", flush=True)
        step = replay = None
        gc.collect()
        torch.cuda.empty_cache()
    sys.exit(0 if worked else 1)
