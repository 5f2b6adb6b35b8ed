#!/usr/bin/env python3
"""Peer of bench_attention: scaled_dot_product_attention, forward and backward, from and to rows of queries, keys and values."""

import argparse

from peer import answer, both_passes, import_torch

torch = import_torch()

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()
torch.set_num_threads(options.threads)
kind = torch.bfloat16 if options.bf16 else torch.float32


def passes(heads, kv_heads, batch, steps, width, causal, count):
    qkv = torch.randn(batch, steps, (heads + 2 * kv_heads) * width).to(kind).requires_grad_()
    dy = torch.randn(batch, steps, heads * width).to(kind)
    results = [None]

    def forward():
        q, k, v = (part.unflatten(2, (-1, width)).transpose(1, 2)
                   for part in qkv.split([heads * width, kv_heads * width, kv_heads * width], 2))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=kv_heads < heads)
        results[0] = mixed.transpose(1, 2).flatten(2)

    return both_passes(forward, lambda: torch.autograd.grad(results[0], qkv, dy), count)


answer(lambda *numbers: passes(*map(int, numbers)))
