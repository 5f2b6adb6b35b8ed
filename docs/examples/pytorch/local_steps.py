"""Local steps: the ranks exchange every tenth step. torchrun --nproc-per-node 2 docs/examples/pytorch/local_steps.py"""

import torch
import torch.distributed as dist

import topknot.torch

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))  # not wrapped
sync = topknot.torch.LocalSteps(model, "sparseloco", every=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(40):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sync.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}; {sync.bits_per_parameter_step:.4f} bits per parameter and step")
dist.destroy_process_group()
