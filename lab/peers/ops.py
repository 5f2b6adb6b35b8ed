#!/usr/bin/env python3
"""Peer of bench_conv, bench_rows and bench_attention: the same ops in PyTorch. A question is a line of the op's sizes and how often."""

from peer import answer, import_torch, parse, parser_of, timed

torch = import_torch()
functional = torch.nn.functional


def both_passes(forward, inputs, dy, count, warm_up=3):
    """Seconds of `count` forward passes, then of the backward pass behind each."""
    results = [None]

    def keep():
        results[0] = forward()

    seconds = [(timed(keep), timed(lambda: torch.autograd.grad(results[0], inputs, dy))) for _ in range(count + warm_up)][
        warm_up:
    ]
    return [there for there, _ in seconds] + [back for _, back in seconds]


def conv(channels, outputs, height, width, kernel, stride, padding, groups, batch, count):
    """channels_last, forward and gradients together. Up to 3 channels are an image, which needs no gradient."""
    x = torch.rand(batch, channels, height, width).sub_(0.5).to(memory_format=torch.channels_last).requires_grad_(channels > 3)
    weight = (
        torch.rand(outputs, channels // groups, kernel, kernel).sub_(0.5).to(memory_format=torch.channels_last).requires_grad_()
    )

    def convolve():
        return functional.conv2d(x, weight, None, stride, padding, 1, groups)

    inputs = (x, weight) if channels > 3 else weight
    dy = torch.rand_like(convolve()).sub_(0.5)
    return [timed(lambda: torch.autograd.grad(convolve(), inputs, dy)) for _ in range(count + 2)][2:]


def attention(heads, kv_heads, batch, steps, width, causal, count):
    """scaled_dot_product_attention, from and to rows of queries, keys and values."""
    qkv = torch.randn(batch, steps, (heads + 2 * kv_heads) * width).to(kind).requires_grad_()
    dy = torch.randn(batch, steps, heads * width).to(kind)

    def forward():
        q, k, v = (
            part.unflatten(2, (-1, width)).transpose(1, 2)
            for part in qkv.split([heads * width, kv_heads * width, kv_heads * width], 2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=kv_heads < heads)
        return mixed.transpose(1, 2).flatten(2)

    return both_passes(forward, qkv, dy, count)


def swiglu(x):
    a, b = x.chunk(2, 1)
    return functional.silu(a) * b


def half_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotary(rows, width):
    """As transformers writes it."""
    d = 32 if width < 768 else 64
    heads = width // 3 // d
    angles = torch.outer(torch.arange(rows).float(), 10000.0 ** (-torch.arange(0, d, 2).float() / d))
    angles = torch.cat((angles, angles), -1)[:, None]
    cosine, sine = angles.cos().to(kind), angles.sin().to(kind)

    def rope(x):
        q, k, _ = x.view(rows, 3, heads, d).unbind(1)
        return tuple(part * cosine + half_turned(part) * sine for part in (q, k))

    return rope


def rows(op, rows, width, count):
    x, branch = (torch.randn(rows, width).to(kind).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(width).to(kind).requires_grad_() for _ in range(2))
    inputs, function = (
        (x,),
        {
            "copy": torch.clone,
            "gelu": functional.gelu,
            "swiglu": swiglu,
            "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
            "layer_norm": lambda x, w, b: functional.layer_norm(x, (width,), w, b),
            "rms_norm": lambda x, w: functional.rms_norm(x, (width,), w, 1e-5),
            "add_layer_norm": lambda x, w, b, other: functional.layer_norm(x + other, (width,), w, b),
        }.get(op),
    )
    if op == "rope":
        function = rotary(rows, width)
    inputs += {"layer_norm": (weight, bias), "rms_norm": (weight,), "add_layer_norm": (weight, bias, branch)}.get(op, ())
    if options.compile:
        function = torch.compile(function)
    y = function(*inputs)
    dy = torch.randn_like(y) if torch.is_tensor(y) else tuple(map(torch.randn_like, y))
    return both_passes(lambda: function(*inputs), inputs, dy, count)


OPS = {"conv": conv, "rows": rows, "attention": attention}
parser = parser_of(__doc__)
parser.add_argument("op", choices=OPS)
options = parse(torch, parser)
kind = torch.bfloat16 if options.bf16 else torch.float32
answer(1, lambda *words: OPS[options.op](*(int(word) if word.isdigit() else word for word in words)))
