#!/usr/bin/env python3
"""PyTorch at its best on one GPU: images per second of training on one batch that stays in its memory.

Tried one after the other, each in channels_last with the fused SGD and cuDNN's algorithms chosen by timing: fp32 with TF32 and
bf16 autocast, plain, with torch.compile, and in a CUDA graph. One JSON line each: setting, precision, per_second, torch. What
does not work on this machine is left out with a line that says why. Exit status: 0, 3 where PyTorch or a GPU is missing, 1 where no
setting worked.
"""

import argparse
import gc
import json
import sys
import time


def networks(torch, classes):
    nn, functional = torch.nn, torch.nn.functional

    def conv(inputs, outputs, kernel=3, stride=1):
        return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)

    class Basic(nn.Module):
        """With the parameter-free shortcut (option A of He et al. 2015)."""

        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
            self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
            self.stride, self.more = stride, (outputs - inputs) // 2

        def forward(self, x):
            y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)), inplace=True)))
            if self.stride != 1:
                x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more, self.more))
            return functional.relu(y + x, inplace=True)

    class Bottleneck(nn.Module):
        def __init__(self, inputs, width, stride):
            super().__init__()
            outputs = 4 * width
            self.body = nn.Sequential(conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                                      conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                                      conv(width, outputs, 1), nn.BatchNorm2d(outputs))
            self.shortcut = nn.Identity()
            if stride != 1 or inputs != outputs:
                self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

        def forward(self, x):
            return functional.relu(self.body(x) + self.shortcut(x), inplace=True)

    def resnet20():
        layers, width = [conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)], 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for block in range(3):
                layers.append(Basic(width, outputs, stride if block == 0 else 1))
                width = outputs
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    def vgg16():
        layers, width = [], 3
        for outputs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            if outputs == 0:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [conv(width, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                width = outputs
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, classes))

    def resnet50():
        layers = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                inputs = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))

    return {"resnet20": resnet20, "vgg16": vgg16, "resnet50": resnet50}


def allow_tf32(torch):
    """By the switches that this version has; the older ones are going away."""
    for switch in (lambda: torch.set_float32_matmul_precision("high"),
                   lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
                   lambda: setattr(torch.backends.cudnn, "allow_tf32", True)):
        try:
            switch()
        except (AttributeError, RuntimeError):
            pass


def make_optimizer(torch, parameters):
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    try:
        return torch.optim.SGD(parameters, fused=True, **options)  # PyTorch 2.3 and later
    except (TypeError, RuntimeError):
        return torch.optim.SGD(parameters, foreach=True, **options)


def main():
    parser = argparse.ArgumentParser(description="PyTorch training on one GPU; one JSON line per setting")
    parser.add_argument("--model", choices=("resnet20", "vgg16", "resnet50"), required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="of an image's side")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60, help="no further setting is begun after these")
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"PyTorch is missing: {error}")
        return 3
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU")
        return 3
    torch.backends.cudnn.benchmark = True
    allow_tf32(torch)
    started = time.monotonic()
    worked = 0

    def measure(setting, autocast, compiled, graph):
        torch.manual_seed(1)
        model = networks(torch, options.classes)[options.model]().cuda().to(memory_format=torch.channels_last).train()
        optimizer = make_optimizer(torch, list(model.parameters()))
        images = torch.randn(options.batch, 3, options.size, options.size, device="cuda")
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, options.classes, (options.batch,), device="cuda")
        network = torch.compile(model) if compiled else model

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = torch.nn.functional.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()

        run = step
        if graph:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(5):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                step()
            run = recorded.replay
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        rates = []
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(options.steps):
                run()
            torch.cuda.synchronize()
            rates.append(options.steps * options.batch / (time.perf_counter() - begin))
        precision = "bf16" if autocast else "tf32"
        print(json.dumps({"setting": setting, "precision": precision, "per_second": sorted(rates)[1],
                          "torch": torch.__version__}), flush=True)

    # The quickest to try first: the time may end before those that compile.
    for setting in (("bf16 autocast, CUDA graph", True, False, True), ("tf32, CUDA graph", False, False, True),
                    ("bf16 autocast, compile, CUDA graph", True, True, True),
                    ("tf32, compile, CUDA graph", False, True, True),
                    ("bf16 autocast, compile", True, True, False), ("bf16 autocast", True, False, False),
                    ("tf32", False, False, False)):
        if time.monotonic() - started > options.seconds:
            print(f"{setting[0]}: left out, the time is used up", flush=True)
            continue
        try:
            measure(*setting)
            worked += 1
        except Exception as error:  # what a version or a machine cannot do
            text = str(error).strip()
            print(f"{setting[0]}: {type(error).__name__}: {text.splitlines()[0] if text else ''}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
