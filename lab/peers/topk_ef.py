"""PyTorch peer: exact top-k with error feedback, in place, on a gradient stream that is new each step (making it is untimed)."""

import argparse

from peer import import_torch, serve, timed

torch = import_torch()


class Streams:
    """Gradient streams, each step's filled into one buffer: `normal` (independent normal), `layers` (20 layers whose
    scales span two decades), `laplace` (Laplace noise around a drift that stays)."""

    def __init__(self, name, numel):
        self.name, self.gradient = name, torch.empty(numel)
        if name == "layers":
            self.scales = torch.logspace(0, -2, 20)
        if name == "laplace":
            self.drift = torch.randn(numel).mul_(0.05)

    def fill(self):
        if self.name == "laplace":
            # A uniform u in [-1, 1) gives a Laplace number: -sign(u) * log(1 - |u|).
            u = self.gradient.uniform_(-1, 1)
            sign = torch.sign(u)
            u.abs_().neg_().log1p_().neg_().mul_(sign).add_(self.drift)
            return
        self.gradient.normal_()
        if self.name == "layers":
            for scale, layer in zip(self.scales, torch.tensor_split(self.gradient, len(self.scales))):
                layer.mul_(scale)


def main():
    parser = argparse.ArgumentParser(description="top-k with error feedback with PyTorch; see peer.py for the protocol")
    parser.add_argument("--numel", type=int, default=25_600_000)
    parser.add_argument("--k", type=int, default=25_600)
    parser.add_argument("--stream", choices=("normal", "layers", "laplace"), default="normal")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip", type=int, default=0, help="steps to run before `ready`, so that the residual settles")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    stream = Streams(options.stream, options.numel)
    residual, magnitude = torch.zeros(options.numel), torch.empty(options.numel)

    def step():
        residual.add_(stream.gradient)
        torch.abs(residual, out=magnitude)
        indices = torch.topk(magnitude, options.k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0
        return indices, values

    def run_steps(k):
        return [timed(step, stream.fill) for _ in range(k)]

    run_steps(options.skip)
    serve(options.numel, run_steps)


if __name__ == "__main__":
    main()
