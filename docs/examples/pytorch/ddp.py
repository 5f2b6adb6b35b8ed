"""DistributedDataParallel with Top-k. torchrun --nproc-per-node 2 docs/examples/pytorch/ddp.py"""

import torch
import torch.distributed as dist

import topknot.torch

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
ddp = torch.nn.parallel.DistributedDataParallel(model)
hook = topknot.torch.CompressionHook(ddp, "topk", density=0.01)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

for step in range(20):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss = torch.nn.functional.cross_entropy(ddp(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dense = 4 * sum(p.numel() for p in model.parameters()) * hook.step
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}; sent {hook.bytes_sent} bytes, {dense / hook.bytes_sent:.1f} times less than dense")
    print(hook.times)
dist.destroy_process_group()
