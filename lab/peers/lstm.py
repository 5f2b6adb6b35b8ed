"""PyTorch peer: a language model of two LSTM layers, forward, backward and SGD; the state is carried from step to step."""

from peer import import_torch, parse, parser_of, serve, training_step

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
    options = parse(torch, parser_of(__doc__, ("bf16",), batch=20, width=200, window=35))
    torch.manual_seed(1)
    model = LanguageModel(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    items, state = options.batch * options.window, None
    tokens = ((torch.arange(items) * 7919 + 13) % VOCABULARY).view(options.window, options.batch)
    labels = torch.arange(items) * 7919 % VOCABULARY

    def loss_of():
        nonlocal state
        logits, after = model(tokens, state)
        state = tuple(part.detach() for part in after)
        return torch.nn.functional.cross_entropy(logits, labels)

    serve(items, training_step(torch, optimizer, loss_of, options.bf16))


if __name__ == "__main__":
    main()
