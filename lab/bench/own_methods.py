#!/usr/bin/env python3
"""What a method of the library costs in a PyTorch step, beside the same one written in Python:

torchrun --nproc-per-node 2 lab/bench/own_methods.py [STEPS]

ResNet-20, 32 images a rank, one thread a rank, gloo. All contenders take their steps in turn, so that a busy machine slows
all; the figures are medians of rank 0, "CPU" of all its threads; "rest" is a step without the method's own calls, as a share
of DistributedDataParallel's step. PYTHONPATH=python TOPKNOT_LIBRARY=build/lib/libtopknot.so, if topknot is not installed.
"""

import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
import networks
import torch
import torch.distributed as dist

import topknot.torch


class TopK:
    """A hundredth of the entries."""

    def compress(self, tensor, name):
        flat = tensor.flatten()
        indices = flat.abs().topk(max(1, flat.numel() // 100)).indices
        return [flat[indices], indices.int()], tensor.shape

    def decompress(self, tensors, shape):
        values, indices = tensors
        return values.new_zeros(shape.numel()).index_put((indices.long(),), values).view(shape)


class Signs:
    """A byte an entry, and the mean magnitude."""

    def compress(self, tensor, name):
        return [tensor >= 0, tensor.abs().mean()], None

    def decompress(self, tensors, context):
        signs, magnitude = tensors
        return (signs * 2.0 - 1.0) * magnitude


class Half:
    """Two bytes an entry, summed."""

    sums = True

    def compress(self, tensor, name):
        return tensor.half(), None

    def decompress(self, tensor, context):
        return tensor.float()


def timed(method):
    """The object, with the seconds of its calls in `inside`."""
    method.inside = 0.0
    for name in ("compress", "decompress"):

        def run(*arguments, function=getattr(method, name)):
            begin = time.perf_counter()
            result = function(*arguments)
            method.inside += time.perf_counter() - begin
            return result

        setattr(method, name, run)
    return method


def contender(method, **keys):
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(networks.resnet20())
    hook = topknot.torch.CompressionHook(ddp, method, dense_steps=0, **keys) if method else None
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9), hook


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = {
        "DistributedDataParallel": contender(None),
        "topk, density 0.01": contender("topk", density=0.01),
        "the same in Python": contender(timed(TopK()), dense_1d=True),
        "signsgd": contender("signsgd"),
        "signs in Python": contender(timed(Signs()), dense_1d=True),
        "float16 sums in Python": contender(timed(Half()), memory="none"),
    }
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    figures = {name: [] for name in contenders}
    for turn in range(int(sys.argv[1]) // 2 + 2 if len(sys.argv) > 1 else 102):
        for name, (ddp, optimizer, hook) in contenders.items():
            method = getattr(getattr(hook, "_made", None), "method", None)
            clocks = time.perf_counter, time.process_time, lambda method=method: getattr(method, "inside", 0.0)
            for step in range(3):  # the first has the caches of another
                begin = [clock() for clock in clocks]
                torch.nn.functional.cross_entropy(ddp(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step and turn > 1:
                    figures[name].append([1000 * (clock() - before) for clock, before in zip(clocks, begin)])
    if dist.get_rank() == 0:
        print(f"{'ms a step':24}{'all':>7}{'rest':>8}{'CPU':>8}{'rest':>8}{'inside':>8}  KB sent")
        medians = {name: [statistics.median(each) for each in zip(*found)] for name, found in figures.items()}
        for name, (ddp, _, hook) in contenders.items():
            *spent, inside = medians[name]
            shares = ((each - inside) / dense for each, dense in zip(spent, medians["DistributedDataParallel"]))
            columns = "".join(f"{each:7.1f}{share:8.3f} " for each, share in zip(spent, shares))
            sent = hook.bytes_sent / hook.step if hook else 4 * sum(p.numel() for p in ddp.parameters())
            print(f"{name:24}{columns}{inside:7.1f}  {sent / 1000:.0f}")
        print(f"load of the machine: {', '.join(f'{each:.1f}' for each in os.getloadavg())}; {os.cpu_count()} cores")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # some PyTorch's gloo aborts as the interpreter ends


if __name__ == "__main__":
    main()
