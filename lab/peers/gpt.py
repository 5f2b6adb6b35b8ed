"""PyTorch peer: a language model as GPT-2 (a transformer), forward, backward, clipping and fused AdamW on one fixed batch.

With --text FILE it is no peer but an experiment: it trains with configs/gpt_char.yaml's settings on the characters of FILE
and prints the loss on the last tenth, over the fixed windows that `train` evaluates.
"""

import math
import time

from peer import add_device, best_on_gpu, import_torch, parse, parser_of, serve, training_step

torch = import_torch()
nn, functional = torch.nn, torch.nn.functional


class Block(nn.Module):
    """Radford et al. (2019): attention and two products, each behind a layer norm and added to its input."""

    def __init__(self, width, heads, bias, gelu):
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.merge = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        batch, window, width = x.shape
        q, k, v = (
            part.view(batch, window, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, window, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate=self.gelu))


class Gpt(nn.Module):
    """tokens, labels: [batch, window]; the mean cross-entropy, by an output layer tied to the embedding."""

    def __init__(self, options, bias=True, gelu="tanh"):
        super().__init__()
        self.tokens = nn.Embedding(options.tokens, options.width)
        self.positions = nn.Embedding(options.window, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads, bias, gelu) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width, bias=bias)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and bias:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.merge, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * options.layers))

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train(options):
    """Karpathy's nanoGPT, train.py: AdamW, warm-up of 100 steps, cosine to a tenth, clipping to 1, windows at random."""
    with open(options.text, encoding="utf-8", newline="") as file:
        text = file.read()
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text])
    cut, window = int(0.9 * len(tokens)), options.window
    training, validation = tokens[:cut], tokens[cut:]
    options.tokens = len(ids)
    model = Gpt(options, bias=False, gelu="none")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    lr, warmup, steps = 1e-3, 100, options.steps
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.99),
        fused=True,
    )
    begin = time.perf_counter()
    for step in range(steps):
        part = max(0.0, (step - warmup) / max(1, steps - warmup))
        rate = lr * (step + 1) / (warmup + 1) if step < warmup else lr * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(training) - window, (options.batch, 1))
        rows = training[starts + torch.arange(window + 1)]
        optimizer.zero_grad(set_to_none=True)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = time.perf_counter() - begin
    total, count = 0.0, len(validation) - 1
    with torch.no_grad():
        for at in range(0, count, 256 * window):
            whole = min(256, (count - at) // window)  # every token but the first is predicted once
            rows = [validation[i : i + window + 1] for i in range(at, at + whole * window, window)]
            if rows:
                total += whole * window * model(torch.stack(rows)[:, :-1], torch.stack(rows)[:, 1:]).item()
            rest = min(count - at, 256 * window) - whole * window
            if rest > 0:
                row = validation[None, at + whole * window : at + whole * window + rest + 1]
                total += rest * model(row[:, :-1], row[:, 1:]).item()
    print(f"seed {options.seed}: validation loss {total / count:.4f} after {steps} steps, {seconds:.1f} s")


def main():
    parser = parser_of(__doc__, batch=12, layers=4, heads=4, width=128, window=64, tokens=65, seed=1)
    add_device(parser, 2000)
    parser.add_argument("--text", help="train on this file's characters instead, --steps steps")
    options = parse(torch, parser)
    torch.manual_seed(options.seed)
    if options.text:
        train(options)
        return
    items = options.batch * options.window
    numbers = torch.arange(items, device=options.device).view(options.batch, options.window) * 7919
    tokens, labels = (numbers + 13) % options.tokens, numbers % options.tokens
    settings = {"lr": 1e-4, "betas": (0.9, 0.95)} if options.device == "cuda" else {"lr": 1e-3, "betas": (0.9, 0.99)}

    def step_of(bf16, compiled):
        torch.manual_seed(options.seed)
        model = Gpt(options).to(options.device)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, fused=True, **settings)
        forward = torch.compile(model) if compiled else model
        return training_step(torch, optimizer, lambda: forward(tokens, labels), bf16, options.device, clipped=parameters)

    if options.device == "cuda":
        best_on_gpu(torch, options, items, step_of, ("bf16 autocast", "bf16 autocast, compile", "tf32", "tf32, compile"))
    serve(items, step_of(options.bf16, options.compile))


if __name__ == "__main__":
    main()
