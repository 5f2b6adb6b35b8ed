"""Two islands of two: DDP inside, local steps between. torchrun --nproc-per-node 4 docs/examples/pytorch/islands.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import topknot.torch

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("between", "inside"))
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
# Or FSDP2: torch.distributed.fsdp.fully_shard(model, mesh=mesh["inside"])
model = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["inside"].get_group())
sync = topknot.torch.LocalSteps(model, "sparseloco", every=10, fragments=2, overlap=2, process_group=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(40):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sync.step()
sync.sync()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}; {sync.bits_per_parameter_step:.4f} bits per parameter and step between the islands")
dist.destroy_process_group()
