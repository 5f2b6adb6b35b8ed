#!/usr/bin/env python3
"""PyTorch on a GPU: torch.topk, and a whole step of top-k with error feedback, by number of elements.

One JSON line per size: elements, topk_ms (torch.topk of the magnitudes alone), step_ms (residual added, magnitudes, top-k, values
gathered, residual emptied there), medians by CUDA events. A size that does not work here is left out with a line that says why.
Exit status: 0, 3 where PyTorch or a GPU is missing.
"""

import argparse
import json
import statistics
import sys

WARM_UP, TIMED = 3, 7


def main():
    parser = argparse.ArgumentParser(description="torch.topk on a GPU; one JSON line per size")
    parser.add_argument("--smallest", type=int, default=16, help="least number of elements, a power of two")
    parser.add_argument("--largest", type=int, default=28)
    parser.add_argument("--density", type=float, default=0.001)
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"PyTorch is missing: {error}")
        return 3
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU")
        return 3
    torch.manual_seed(1)

    def timed(work, prepare=lambda: None):
        times = []
        for i in range(WARM_UP + TIMED):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            if i >= WARM_UP:
                times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def measure(n):
        k = max(1, int(options.density * n))
        gradient = torch.empty(n, device="cuda")
        residual = torch.zeros(n, device="cuda")
        magnitude = torch.empty(n, device="cuda")

        def step():
            residual.add_(gradient)
            torch.abs(residual, out=magnitude)
            indices = torch.topk(magnitude, k, sorted=False).indices
            values = residual[indices]
            residual.index_fill_(0, indices, 0.0)
            return indices, values

        gradient.normal_()
        torch.abs(gradient, out=magnitude)
        topk_ms = timed(lambda: torch.topk(magnitude, k, sorted=False))
        step_ms = timed(step, lambda: gradient.normal_())
        print(json.dumps({"elements": n, "k": k, "topk_ms": topk_ms, "step_ms": step_ms, "torch": torch.__version__}),
              flush=True)

    with torch.no_grad():
        sizes = [1 << power for power in range(options.smallest, options.largest + 1, 2)]
        if 1 << options.smallest <= 25_600_000 < 1 << options.largest:
            sizes.append(25_600_000)  # about ResNet-50's parameters
        for n in sorted(sizes):
            try:
                measure(n)
            except RuntimeError as error:  # too little memory, or too many elements for this version
                print(f"{n} elements: {str(error).strip().splitlines()[0]}", flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
