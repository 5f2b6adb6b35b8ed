"""The networks of the comparison, as PyTorch modules, and their training step on one synthetic batch. A peer of bench_step:

networks.py NETWORK [--batch N] [--threads T] [--bf16] [--compile]
networks.py NETWORK --ranks N                                         DistributedDataParallel over Gloo, N processes
networks.py NETWORK --device cuda [--steps N] [--seconds S]           images per second at its best on one GPU
"""

import os
import subprocess
import sys
import tempfile

from peer import add_device, answer, best_on_gpu, import_torch, parse, parser_of, serve, timed, training_step

torch = import_torch()
nn = torch.nn
functional = torch.nn.functional


def conv(inputs, outputs, kernel=3, stride=1):
    """Convolution and batch norm."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)


class BasicBlock(nn.Module):
    """He et al. 2015, with the parameter-free shortcut (option A): subsample by two, pad the new channels with zeros."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride)
        self.conv2, self.bn2 = conv(outputs, outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        if self.stride != 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return functional.relu(y + x, inplace=True)


def resnet20():
    layers = [*conv(3, 16), nn.ReLU(inplace=True)]
    width = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            layers.append(BasicBlock(width, outputs, stride if block == 0 else 1))
            width = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def vgg16():
    """Simonyan and Zisserman's configuration D for 32 x 32 images, with batch norm and one linear layer."""
    layers, width = [], 3
    for outputs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if outputs == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [*conv(width, outputs), nn.ReLU(inplace=True)]
            width = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def mlp():
    """A wide one: nearly all of its 20 million parameters are in two layers. Ours: model.hidden=[4096,1792]."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 1792),
        nn.ReLU(inplace=True),
        nn.Linear(1792, 10),
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            *conv(inputs, width, 1),
            nn.ReLU(inplace=True),
            *conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *conv(width, 4 * width, 1),
        )
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = nn.Sequential(*conv(inputs, 4 * width, 1, stride)) if changes else nn.Identity()

    def forward(self, x):
        y = self.body(x)
        y += self.shortcut(x)
        return functional.relu(y, inplace=True)


def resnet50():
    """As torchvision's, for 224 x 224 images and 1,000 classes."""
    layers, inputs = [*conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def vgg16_imagenet():
    """torchvision's, for 224 x 224 images and 1,000 classes."""
    try:
        from torchvision import models
    except ImportError:
        sys.exit("vgg16_imagenet: this interpreter has no torchvision")
    return models.vgg16()


# The builder, the parameters, the side of an image, the classes.
NETWORKS = {
    "resnet20": (resnet20, 269_722, 32, 10),
    "vgg16": (vgg16, 14_724_042, 32, 10),
    "mlp": (mlp, 19_946_762, 32, 10),
    "resnet50": (resnet50, 25_557_032, 224, 1000),
    "vgg16_imagenet": (vgg16_imagenet, 138_357_544, 224, 1000),
}


def training_of(options, bf16=False, compiled=False, rank=None):
    """A training step in channels_last with SGD (momentum 0.9, weight decay 1e-4) on a batch that stays the same; with a rank under
    DistributedDataParallel."""
    torch.manual_seed(1)
    build, parameters, side, classes = NETWORKS[options.network]
    model = build().to(options.device, memory_format=torch.channels_last).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == parameters, f"{options.network} has {count} parameters, not {parameters}"
    network = torch.compile(model) if compiled else model if rank is None else nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1000 + (rank or 0))
    images = torch.randn(options.batch, 3, side, side, device=options.device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (options.batch,), device=options.device)
    return training_step(
        torch,
        sgd(list(model.parameters()), options.device),
        lambda: functional.cross_entropy(network(images), labels),
        bf16,
        options.device,
    )


def sgd(parameters, device):
    """On a GPU the fastest that this version has."""
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    if device == "cpu":
        return torch.optim.SGD(parameters, **settings)
    try:
        return torch.optim.SGD(parameters, fused=True, **settings)  # PyTorch 2.3 and later
    except (TypeError, RuntimeError):
        return torch.optim.SGD(parameters, foreach=True, **settings)


# Ranks on this host: the process that is started is rank 0 and speaks the protocol; it starts the others and passes each request on.
# The seconds are rank 0's: the all-reduce keeps the ranks in step.


def joined(options, rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{options.store}", rank=rank, world_size=options.ranks)
    return training_of(options, rank=rank)


def follow(options):
    step = joined(options, options.rank)
    for line in sys.stdin:
        for _ in range(int(line)):
            step()


def lead(options):
    if not torch.distributed.is_available():
        print("This PyTorch was built without distributed training.", file=sys.stderr)
        sys.exit(3)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        options.store, followers = os.path.join(folder, "store"), []
        try:
            for rank in range(1, options.ranks):
                command = [sys.executable, *sys.argv, "--rank", str(rank), "--store", options.store]
                followers.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
            step = joined(options, 0)

            def measure(count):
                for follower in followers:
                    print(count, file=follower.stdin, flush=True)
                return [timed(step) for _ in range(int(count))]

            answer(options.batch * options.ranks, measure)
        finally:
            for follower in followers:
                follower.stdin.close()
            for follower in followers:
                try:
                    follower.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    follower.kill()


def main():
    parser = parser_of("training steps with PyTorch; see peer.py for the protocol", batch=32, ranks=1, rank=None)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--store", help="where the ranks meet; rank 0 gives it to the others")
    add_device(parser, 100)
    options = parse(torch, parser)
    if options.rank is not None:
        follow(options)
    elif options.ranks > 1:
        lead(options)
    elif options.device == "cuda":
        # The quickest to try first: the time may end before those that compile.
        best_on_gpu(
            torch,
            options,
            options.batch,
            lambda bf16, compiled: training_of(options, bf16, compiled),
            (
                "bf16 autocast, CUDA graph",
                "tf32, CUDA graph",
                "bf16 autocast, compile, CUDA graph",
                "tf32, compile, CUDA graph",
                "bf16 autocast, compile",
                "bf16 autocast",
                "tf32",
            ),
        )
    else:
        serve(options.batch, training_of(options, options.bf16, options.compile))


if __name__ == "__main__":
    main()
