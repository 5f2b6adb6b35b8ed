"""Hugging Face Accelerate. torchrun --nproc-per-node 2 docs/examples/pytorch/use_accelerate.py"""

import torch
from accelerate import Accelerator

import topknot.torch

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
hook = topknot.torch.CompressionHook(model, "topk", density=0.01, optimizer=optimizer)  # what prepare() wrapped

for step in range(10):
    generator = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()

accelerator.print(f"loss {loss.item():.3f}; sent {hook.bytes_sent} bytes in {hook.step} steps")
accelerator.end_training()
