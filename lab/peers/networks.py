"""The networks of the comparison, as PyTorch modules, and their training step on one synthetic batch. A peer of bench_step:

  networks.py NETWORK [--batch N] [--threads T] [--bf16] [--compile]
"""

import sys

from peer import import_torch

torch = import_torch()
nn = torch.nn
functional = torch.nn.functional


def conv3x3(inputs, outputs, stride=1):
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """He et al. 2015, with the parameter-free shortcut (option A): subsample by two, pad the new channels with zeros."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        if self.stride != 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return functional.relu(y + x, inplace=True)


def resnet20():
    layers = [conv3x3(3, 16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
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
            layers += [conv3x3(width, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            width = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def mlp():
    """A wide one: nearly all of its 20 million parameters are in two layers. Ours: model.hidden=[4096,1792]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1792),
                         nn.ReLU(inplace=True), nn.Linear(1792, 10))


def of_torchvision(name):
    """torchvision's network for 224 x 224 images and 1,000 classes."""
    def build():
        try:
            from torchvision import models
        except ImportError:
            sys.exit(f"{name}: this interpreter has no torchvision")
        return getattr(models, name)()
    return build


# The builder, the parameters, the side of an image, the classes.
NETWORKS = {"resnet20": (resnet20, 269_722, 32, 10), "vgg16": (vgg16, 14_724_042, 32, 10), "mlp": (mlp, 19_946_762, 32, 10),
            "resnet50": (of_torchvision("resnet50"), 25_557_032, 224, 1000),
            "vgg16_imagenet": (of_torchvision("vgg16"), 138_357_544, 224, 1000)}


class Training:
    """One network in channels_last with SGD (momentum 0.9, weight decay 1e-4) on a batch that stays the same; fp32, or bf16
    by autocast."""

    def __init__(self, network, batch, seed=0, wrap=lambda model: model, bf16=False):
        torch.manual_seed(1)
        build, parameters, side, classes = NETWORKS[network]
        model = build().to(memory_format=torch.channels_last).train()
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == parameters, f"{network} has {count} parameters, not {parameters}"
        self.model = wrap(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        torch.manual_seed(1000 + seed)
        self.images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, classes, (batch,))
        self.last_loss = None
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.last_loss = loss.item()


def main():
    import argparse

    from peer import serve, timed

    parser = argparse.ArgumentParser(description="training steps with PyTorch; see peer.py for the protocol")
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wrap = torch.compile if options.compile else lambda model: model
    training = Training(options.network, options.batch, wrap=wrap, bf16=options.bf16)
    serve(options.batch, lambda k: [timed(training.step) for _ in range(k)])


if __name__ == "__main__":
    main()
