"""Trains a character-level GPT on a text, in plain PyTorch. It knows nothing of Topknot.

torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr HOST0 --master-port 29500 docs/examples/gpt.py TEXT
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("text", help="a text file; its last tenth validates")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch", type=int, default=12, help="windows a rank and step")
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--rate", type=float, default=1e-3)
parser.add_argument("--evaluate-every", type=int, default=50)
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters, context, width, layers, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # smaller in what is added to the residual stream
                residual = name.endswith(("projection.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

with open(options.text, encoding="utf-8") as file:
    text = file.read()
characters = sorted(set(text))
code = {character: i for i, character in enumerate(characters)}
data = torch.tensor([code[character] for character in text])
training, validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

torch.manual_seed(1)
model = GPT(len(characters), options.context, options.width, options.layers, options.heads).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
model = DistributedDataParallel(model)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * step / options.steps))
)


def loss_of(source, starts):
    windows = torch.stack([source[start : start + options.context + 1] for start in starts]).to(device)
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate():
    """The mean loss of 40 batches of the validation text, shared out among the ranks."""
    starts = torch.linspace(0, len(validation) - options.context - 1, 40 * options.batch).long()
    losses = [loss_of(validation, part) for part in starts.split(options.batch)[rank::ranks]]
    total = torch.stack([torch.stack(losses).sum(), torch.tensor(float(len(losses)), device=device)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


generator = torch.Generator().manual_seed(1000 + rank)
seconds, begin = 0.0, time.perf_counter()
for step in range(1, options.steps + 1):
    loss = loss_of(training, torch.randint(len(training) - options.context, (options.batch,), generator=generator))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % options.evaluate_every == 0 or step == options.steps:
        seconds += time.perf_counter() - begin  # evaluations do not count
        value = evaluate()
        if rank == 0:
            print(f"step {step}, {seconds:.1f} s, validation loss {value:.4f}", flush=True)
        begin = time.perf_counter()
dist.destroy_process_group()
