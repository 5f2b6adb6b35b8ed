#!/usr/bin/env python3
"""Peer of bench_conv: the same convolutions in PyTorch, channels_last, forward and gradients."""

import argparse
import sys

from peer import import_torch, timed

torch = import_torch()

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
options = parser.parse_args()
torch.set_num_threads(options.threads)


def passes(channels, outputs, height, width, kernel, stride, padding, groups, batch, count):
    x = torch.rand(batch, channels, height, width).sub_(0.5).to(memory_format=torch.channels_last).requires_grad_(channels > 3)
    weight = torch.rand(outputs, channels // groups, kernel, kernel).sub_(0.5).to(memory_format=torch.channels_last).requires_grad_()

    def convolve():
        return torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)

    inputs = (x, weight) if channels > 3 else weight
    dy = torch.rand_like(convolve()).sub_(0.5)
    seconds = [timed(lambda: torch.autograd.grad(convolve(), inputs, dy)) for _ in range(count + 2)]
    return seconds[2:]


print("ready 1", flush=True)
for line in sys.stdin:
    print(" ".join(f"{seconds:.9f}" for seconds in passes(*map(int, line.split()))), flush=True)
