#!/usr/bin/env python3
"""Dense sums in 8 bits beside PyTorch's sums of bfloat16, over a network:

lab/netlab --hosts 2 --rate 1gbit -- python3 lab/bench/dense_sums.py [NETWORK [STEPS]]

python3 lab/bench/dense_sums.py coding [ENTRIES]: what coding alone takes, processor time of one thread, without a network.

NETWORK: a function of lab/peers/networks.py, resnet20 or vgg16. 32 images a rank, one thread a rank, gloo. All contenders
take their steps in turn; milliseconds are medians of rank 0. PYTHONPATH=python TOPKNOT_LIBRARY=build/lib/libtopknot.so, if
topknot is not installed.
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import topknot.torch


def contender(network, values):
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(getattr(networks, network)())
    hook = topknot.torch.CompressionHook(ddp, "dense", dense_steps=2, values=values) if values in ("int8", "fp8") else None
    if values == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9), hook


def coding(entries):
    """Two ranks in this process: milliseconds a rank, medians of steps 4 to 9."""
    gradients = [torch.randn(entries // 2, 2, generator=torch.Generator().manual_seed(rank)).numpy() for rank in range(2)]
    for values in ("int8", "fp8"):
        made = [topknot.Compressor("dense", {"w": gradients[0].shape}, rank=r, ranks=2, values=values) for r in range(2)]
        averages = [gradient.copy() for gradient in gradients]
        times = {"encode": [], "sum": [], "second sum": [], "write": []}

        def timed(what, call):
            begin = time.thread_time()
            result = call()
            times[what].append(1000 * (time.thread_time() - begin))
            return result

        for step in range(10):
            rounds = [timed("encode", lambda: c.encode({"w": g}, step=step)) for c, g in zip(made, gradients)]
            for what in ("sum", "second sum"):
                messages = [each.message for each in rounds]
                for each in rounds:
                    timed(what, lambda: each.decode([message.block for message in messages]))
            for each, average in zip(rounds, averages):
                timed("write", lambda: each.commit({"w": average}))
        medians = {what: statistics.median(found[8:]) for what, found in times.items()}
        print(f"{values}: {sum(medians.values()):.0f} ms a rank:", ", ".join(f"{k} {v:.0f}" for k, v in medians.items()))


def main():
    if sys.argv[1:2] == ["coding"]:
        return coding(int(sys.argv[2]) if len(sys.argv) > 2 else 14_724_042)
    network, steps = sys.argv[1] if len(sys.argv) > 1 else "resnet20", int(sys.argv[2]) if len(sys.argv) > 2 else 30
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = {name: contender(network, name) for name in ("no exchange", "fp32", "bf16", "int8", "fp8")}
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    figures = {name: [] for name in contenders}
    for turn in range(steps + 3):
        for name, (ddp, optimizer, _) in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            ddp.require_backward_grad_sync = name != "no exchange"
            torch.nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn > 2:
                figures[name].append(1000 * (time.perf_counter() - begin))
    if dist.get_rank() == 0:
        medians = {name: statistics.median(found) for name, found in figures.items()}
        for name, median in medians.items():
            hook = contenders[name][2]
            times = f"   {hook.times}" if hook else ""
            print(f"{network} {name:12} {median:8.1f} ms a step, {median / medians['bf16']:.3f} of bf16{times}")
        print(f"load of the machine: {', '.join(f'{each:.1f}' for each in os.getloadavg())}; {os.cpu_count()} cores")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # some PyTorch's gloo aborts as the interpreter ends


if __name__ == "__main__":
    main()
