"""PyTorch peer: a language model of two LSTM layers, forward, backward and SGD; the state is carried from step to step."""

import argparse

from peer import import_torch, serve, timed

torch = import_torch()

VOCABULARY = 10_000


class LanguageModel(torch.nn.Module):
    """Zaremba, Sutskever, Vinyals (arXiv 1409.2329) without dropout. Tokens are [window, columns]; logits [window * columns, vocabulary]."""

    def __init__(self, width):
        super().__init__()
        self.encoder = torch.nn.Embedding(VOCABULARY, width)
        self.rnn = torch.nn.LSTM(width, width, num_layers=2)
        self.decoder = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens, state=None):
        output, state = self.rnn(self.encoder(tokens), state)
        return self.decoder(output.flatten(0, 1)), state


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("batch", 20), ("threads", 2), ("width", 200), ("window", 35)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true", help="by autocast")
    options = parser.parse_args()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = LanguageModel(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    items = options.batch * options.window
    tokens = (torch.arange(items) * 7919 + 13) % VOCABULARY
    labels = torch.arange(items) * 7919 % VOCABULARY
    tokens = tokens.view(options.window, options.batch)
    state = None

    def step():
        nonlocal state
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            logits, after = model(tokens, state)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        state = tuple(part.detach() for part in after)
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(items, lambda k: [timed(step) for _ in range(k)])


if __name__ == "__main__":
    main()
