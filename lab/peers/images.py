#!/usr/bin/env python3
"""Peer of bench_images: torchvision's ImageFolder and the transforms of its ImageNet training, in one thread of one process."""

import os

from peer import import_torch, parse, parser_of, serve

torch = import_torch()
from torchvision import datasets, transforms  # noqa: E402

parser = parser_of(__doc__, ("evaluation",), batch=64, size=224)
parser.set_defaults(threads=1)
parser.add_argument("root")
options = parse(torch, parser)
crop = (
    [transforms.Resize(round(options.size * 256 / 224)), transforms.CenterCrop(options.size)]
    if options.evaluation
    else [transforms.RandomResizedCrop(options.size), transforms.RandomHorizontalFlip()]
)
data = datasets.ImageFolder(
    os.path.join(options.root, "val" if options.evaluation else "train"),
    transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]),
)


def batches():
    while True:
        yield from torch.utils.data.DataLoader(data, options.batch, shuffle=not options.evaluation, drop_last=True)


source = batches()
serve(options.batch, lambda: next(source))
