"""PyTorch peer: exact top-k with error feedback, in place, on a gradient stream that is new each step (making it is untimed).

On a GPU (--device cuda) it prints one JSON line for each number of elements, 2^smallest, 2^(smallest + 2), ... 2^largest: elements, k, topk_ms
(torch.topk of the magnitudes alone), step_ms (a whole step), torch. A size that does not work here is left out with a line that says
why. --skip: steps before `ready`, so that the residual settles."""

import json
import statistics

from peer import first_line, import_torch, parse, parser_of, serve

torch = import_torch()

WARM_UP, TIMED = 3, 7


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


class Memory:
    """Top-k with error feedback of `gradient`; the residual of the last step is added."""

    def __init__(self, gradient, k):
        self.gradient, self.k, self.residual, self.magnitude = gradient, k, torch.zeros_like(gradient), torch.empty_like(gradient)

    def select(self):
        return torch.topk(self.magnitude, self.k, sorted=False).indices

    def step(self):
        self.residual.add_(self.gradient)
        torch.abs(self.residual, out=self.magnitude)
        indices = self.select()
        values = self.residual[indices]
        self.residual.index_fill_(0, indices, 0.0)
        return indices, values


def gpu_ms(work, prepare=lambda: None):
    """Median milliseconds by CUDA events."""
    times = []
    for _ in range(WARM_UP + TIMED):
        prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARM_UP:])


def on_gpu(options):
    sizes = [1 << power for power in range(options.smallest, options.largest + 1, 2)]
    if 1 << options.smallest <= 25_600_000 < 1 << options.largest:
        sizes.append(25_600_000)  # about ResNet-50's parameters
    for n in sorted(sizes):
        try:
            memory = Memory(torch.randn(n, device="cuda"), max(1, int(options.density * n)))
            torch.abs(memory.gradient, out=memory.magnitude)
            figures = {"topk_ms": gpu_ms(memory.select), "step_ms": gpu_ms(memory.step, memory.gradient.normal_)}
            print(json.dumps({"elements": n, "k": memory.k, **figures, "torch": torch.__version__}), flush=True)
        except RuntimeError as error:  # too little memory, or too many elements for this version
            print(f"{n} elements: {first_line(error)}", flush=True)
        memory = None
        torch.cuda.empty_cache()


def main():
    parser = parser_of(__doc__, (), numel=25_600_000, k=25_600, skip=0, smallest=16, largest=28)
    parser.add_argument("--stream", choices=("normal", "layers", "laplace"), default="normal")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--density", type=float, default=0.001, help="on a GPU")
    options = parse(torch, parser)
    torch.manual_seed(1)
    if options.device == "cuda":
        with torch.no_grad():
            return on_gpu(options)
    stream = Streams(options.stream, options.numel)
    memory = Memory(stream.gradient, options.k)
    for _ in range(options.skip):
        stream.fill()
        memory.step()
    return serve(options.numel, memory.step, stream.fill)


if __name__ == "__main__":
    main()
