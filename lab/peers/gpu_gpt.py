#!/usr/bin/env python3
"""PyTorch at its best on one GPU: tokens per second of training GPT-2 on one batch that stays in its memory.

Forward and backward with scaled_dot_product_attention, clipping and the fused AdamW; bf16 autocast and fp32 with TF32, plain and with
torch.compile. One JSON line each: setting, precision, per_second, torch. Exit status: 0, 3 where PyTorch or a GPU is missing,
1 where no setting worked.
"""

import argparse
import json
import sys
import time

from peer import import_torch

torch = import_torch()

from gpt import Gpt  # noqa: E402
from gpu_train import allow_tf32  # noqa: E402


def measure(options, autocast, compiled):
    torch.manual_seed(1)
    model = Gpt(options).cuda()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, options.tokens, (options.batch, options.window), device="cuda")
    labels = torch.randint(0, options.tokens, (options.batch, options.window), device="cuda")
    forward = torch.compile(model) if compiled else model

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = forward(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    rates = []
    for _ in range(4):  # the first warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(options.steps):
            step()
        torch.cuda.synchronize()
        rates.append(options.steps * options.batch * options.window / (time.perf_counter() - begin))
    return sorted(rates[1:])[1]


def main():
    parser = argparse.ArgumentParser(description="GPT-2 in PyTorch on one GPU; one JSON line per setting")
    for name, default in (("batch", 16), ("layers", 12), ("heads", 12), ("width", 768), ("window", 1024),
                          ("tokens", 50257), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=60, help="no further setting is begun after these")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU")
        return 3
    allow_tf32(torch)
    started, worked = time.monotonic(), 0
    for setting, autocast, compiled in (("bf16 autocast", True, False), ("bf16 autocast, compile", True, True),
                                        ("tf32", False, False), ("tf32, compile", False, True)):
        if time.monotonic() - started > options.seconds:
            print(f"{setting}: left out, the time is used up", flush=True)
            continue
        try:
            rate = measure(options, autocast, compiled)
        except Exception as error:  # what a version or a machine cannot do
            text = str(error).strip()
            print(f"{setting}: {type(error).__name__}: {text.splitlines()[0] if text else ''}", flush=True)
            continue
        worked += 1
        print(json.dumps({"setting": setting, "precision": "bf16" if autocast else "tf32", "per_second": rate,
                          "torch": torch.__version__}), flush=True)
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
