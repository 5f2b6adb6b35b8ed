"""Replicas of torchft, which may die and come. torchrun --nproc-per-node 2 docs/examples/pytorch/replicas.py"""

import os

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

import topknot.torch

rank = int(os.environ["RANK"])
if rank == 0:  # for a cluster: the program torchft_lighthouse, on a machine that stays
    lighthouse = LighthouseServer("[::]:29510", min_replicas=2)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this replica alone
manager = torchft.Manager(
    torchft.ProcessGroupGloo(),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    use_async_quorum=False,
    replica_id=f"replica{rank}",
    lighthouse_addr=os.environ.get("TORCHFT_LIGHTHOUSE", "http://localhost:29510"),
    **{"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port},
)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sync = topknot.torch.LocalSteps(model, "sparseloco", every=10, manager=manager)

step = 0
while manager.current_step() < 4:  # exchanges
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sync.step()
    step += 1

if rank == 0:
    print(f"loss {loss.item():.3f}; {sync.bits_per_parameter_step:.4f} bits per parameter and step")
manager.shutdown()
