"""A method of one's own, here Top-k. torchrun --nproc-per-node 2 docs/examples/pytorch/own_method.py"""

import torch
import torch.distributed as dist

import topknot.torch


class TopK:
    def __init__(self, density):
        self.density = density

    def compress(self, tensor, name):
        flat = tensor.flatten()
        indices = flat.abs().topk(max(1, int(self.density * flat.numel()))).indices
        return [flat[indices], indices.int()], tensor.shape

    def decompress(self, tensors, shape):
        values, indices = tensors
        return values.new_zeros(shape.numel()).index_put((indices.long(),), values).view(shape)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
ddp = torch.nn.parallel.DistributedDataParallel(model)
hook = topknot.torch.CompressionHook(ddp, TopK(0.01))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
run = topknot.torch.Run("runs/own_method", hook, task="random images", overwrite=True)

for step in range(20):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss = torch.nn.functional.cross_entropy(ddp(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss)

accuracy = (ddp(images).argmax(1) == labels).float().mean()
run.evaluate(accuracy=accuracy, loss=loss)
run.close()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}; sent {hook.bytes_sent} bytes in {hook.step} steps; {hook.times}")
dist.destroy_process_group()
