"""CIFAR-10 for a PyTorch peer that trains: the images prepared as ours are (data/cifar10.cpp, data/transforms.cpp), and the first weights,
learning rates and evaluations of lab/configs/netlab/accuracy.yaml. The images are in memory as bytes and a batch is one indexed read, so no
worker process takes the cores from the training."""

import math
import os

import torch

PIXELS = 3 * 32 * 32
PADDING = 4
MEAN = torch.tensor((0.4914, 0.4822, 0.4465)).view(1, 3, 1, 1)
DEVIATION = torch.tensor((0.2470, 0.2435, 0.2616)).view(1, 3, 1, 1)
WARM_UP = EVALUATE_EVERY = 0.25  # epochs
EVALUATED_AT_ONCE = 100


def read(folder, names):
    """(images as bytes, labels) of files of the binary version. Raises OSError, and ValueError for a file of another length."""
    records = []
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            content = bytearray(file.read())
        if len(content) != 10000 * (1 + PIXELS):
            raise ValueError(f"{path}: {len(content)} bytes; a file of CIFAR-10's binary version has {10000 * (1 + PIXELS)}")
        records.append(torch.frombuffer(content, dtype=torch.uint8).view(-1, 1 + PIXELS))
    records = torch.cat(records)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def normalised(images):
    return ((images.float() / 255 - MEAN) / DEVIATION).contiguous(memory_format=torch.channels_last)


IMAGES = 50000  # of the training set


def steps_of_epoch(options):
    return IMAGES // (options.batch * options.ranks)


class Cifar10:
    """Training on one rank's part of the set; options as lab_ddp.py parses them."""

    name = "cifar10, 10 classes, samples [3, 32, 32]"

    def __init__(self, options):
        self.options = options
        images, self.labels = read(options.data, [f"data_batch_{i}.bin" for i in range(1, 6)])
        self.padded = torch.nn.functional.pad(images, (PADDING,) * 4)
        self.test_images, self.test_labels = (
            part[options.rank :: options.ranks] for part in read(options.data, ["test_batch.bin"])
        )
        self.steps_per_epoch = steps_of_epoch(options)
        self.steps = options.epochs * self.steps_per_epoch
        evaluations = round(options.epochs / EVALUATE_EVERY)
        self.evaluated_after = {round(i * self.steps / evaluations) for i in range(1, evaluations + 1)}

    def draw_weights(self, model):
        """Of convolutions normal, of variance 2 / fan-in (nn/layers/layers.h). Linear layers have PyTorch's own, as ours."""
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)

    def learning_rate(self, step):
        """Of the step, counted from 1: a warm-up, then a cosine down to 0 (optim/schedule.cpp)."""
        done, warm_up = step - 1, round(WARM_UP * self.steps_per_epoch)
        if done < warm_up:
            return self.options.lr * (1 + (1 - 1 / warm_up) * done) / warm_up
        return self.options.lr * 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (self.steps - warm_up)))

    def batches(self):
        """(images, labels) without end: shuffled in each epoch, cropped from the padded image, mirrored or not, normalised."""
        generator = torch.Generator().manual_seed(self.options.seed)  # the same on every rank: each takes its part of the order
        side = torch.arange(32)
        while True:
            order = torch.randperm(len(self.labels), generator=generator)
            corners = torch.randint(0, 2 * PADDING + 1, (2, len(order), 1), generator=generator)
            mirrored = torch.randint(0, 2, (len(order), 1), generator=generator).bool()
            for step in range(self.steps_per_epoch):
                first = (step * self.options.ranks + self.options.rank) * self.options.batch
                part = slice(first, first + self.options.batch)
                rows, columns = corners[0, part] + side, corners[1, part] + torch.where(mirrored[part], side.flip(0), side)
                # [image, row, column, channel]
                pixels = self.padded[order[part].view(-1, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)]
                yield normalised(pixels.permute(0, 3, 1, 2)), self.labels[order[part]]

    def evaluate(self, model):
        """(mean loss, accuracy) over the whole test set, of which every rank evaluates its share; batch norm's statistics are first
        averaged over the ranks. A collective call."""
        for buffer in model.buffers():
            if buffer.is_floating_point():
                torch.distributed.all_reduce(buffer)
                buffer /= self.options.ranks
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for images, labels in zip(self.test_images.split(EVALUATED_AT_ONCE), self.test_labels.split(EVALUATED_AT_ONCE)):
                output = model(normalised(images))
                sums += torch.tensor(
                    [
                        torch.nn.functional.cross_entropy(output, labels, reduction="sum").item(),
                        (output.argmax(1) == labels).sum().item(),
                        len(labels),
                    ],
                    dtype=torch.float64,
                )
        model.train()
        torch.distributed.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()
