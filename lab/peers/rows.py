#!/usr/bin/env python3
"""Peer of bench_rows: the same ops in PyTorch, forward and backward. rope as transformers writes it."""

import argparse

from peer import answer, both_passes, import_torch

torch = import_torch()
functional = torch.nn.functional

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()
torch.set_num_threads(options.threads)
kind = torch.bfloat16 if options.bf16 else torch.float32


def swiglu(x):
    a, b = x.chunk(2, 1)
    return functional.silu(a) * b


def half_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotary(rows, width):
    d = 32 if width < 768 else 64
    heads = width // 3 // d
    angles = torch.outer(torch.arange(rows).float(), 10000.0 ** (-torch.arange(0, d, 2).float() / d))
    angles = torch.cat((angles, angles), -1)[:, None]
    cosine, sine = angles.cos().to(kind), angles.sin().to(kind)

    def rope(x):
        q, k, _ = x.view(rows, 3, heads, d).unbind(1)
        return tuple(part * cosine + half_turned(part) * sine for part in (q, k))

    return rope


def passes(op, rows, width, count):
    x, branch = (torch.randn(rows, width).to(kind).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(width).to(kind).requires_grad_() for _ in range(2))
    inputs, function = (x,), {
        "copy": torch.clone, "gelu": functional.gelu, "swiglu": swiglu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "layer_norm": lambda x, w, b: functional.layer_norm(x, (width,), w, b),
        "rms_norm": lambda x, w: functional.rms_norm(x, (width,), w, 1e-5),
        "add_layer_norm": lambda x, w, b, other: functional.layer_norm(x + other, (width,), w, b)}.get(op)
    if op == "rope":
        function = rotary(rows, width)
    inputs += {"layer_norm": (weight, bias), "rms_norm": (weight,), "add_layer_norm": (weight, bias, branch)}.get(op, ())
    if options.compile:
        function = torch.compile(function)
    y = function(*inputs)
    dy = torch.randn_like(y) if torch.is_tensor(y) else tuple(map(torch.randn_like, y))
    results = [y]

    def forward():
        results[0] = function(*inputs)

    return both_passes(forward, lambda: torch.autograd.grad(results[0], inputs, dy), count)


answer(lambda op, *numbers: passes(op, *map(int, numbers)))
