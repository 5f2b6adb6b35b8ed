"""PyTorch peer: a language model as GPT-2 (a transformer), forward, backward, clipping and AdamW on one fixed batch."""

import argparse

from peer import import_torch, serve, timed

torch = import_torch()
nn, functional = torch.nn, torch.nn.functional


class Block(nn.Module):
    """Radford et al. (2019): attention and two products, each behind a layer norm and added to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, window, width = x.shape
        q, k, v = (part.view(batch, window, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.qkv(self.norm_1(x)).split(width, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, window, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """tokens, labels: [batch, window]; the mean cross-entropy, by an output layer tied to the embedding."""

    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(options.tokens, options.width)
        self.positions = nn.Embedding(options.window, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("batch", 12), ("threads", 2), ("layers", 4), ("heads", 4), ("width", 128), ("window", 64),
                          ("tokens", 65)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true", help="by autocast")
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = Gpt(options)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if options.compile else model
    items = options.batch * options.window
    tokens = ((torch.arange(items) * 7919 + 13) % options.tokens).view(options.batch, options.window)
    labels = (torch.arange(items) * 7919 % options.tokens).view(options.batch, options.window)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            loss = forward(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    serve(items, lambda k: [timed(step) for _ in range(k)])


if __name__ == "__main__":
    main()
