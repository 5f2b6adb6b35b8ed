#!/usr/bin/env python3
"""PyTorch peer for lab/netlab: DistributedDataParallel over Gloo, one process per host.

It is started once per rank with the variables of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, where there is more than
one interface, GLOO_SOCKET_IFNAME. Rank 0 writes --out/config.yaml and --out/metrics.jsonl under the names that our own train uses, so
that `compare` reads both. With --steps it takes steps on one random batch; with --data it trains on CIFAR-10, with the schedule,
augmentation, initial weights, weight decay and evaluation of lab/configs/netlab/accuracy.yaml.

The peer is meant to be at its best. Dense: gradients live in the buckets (gradient_as_bucket_view), no buffers are broadcast
(broadcast_buffers=False), buckets of 25 MB with PyTorch's small first one, convolutions in channels_last, the fused optimizer
where this PyTorch has it, and an allocator that keeps large blocks (GLIBC_TUNABLES, set by starting the script anew). fp16 and
PowerSGD are PyTorch's own hooks; PowerSGD with warm start and error feedback, from the third step on, the first that it allows.
topknot is topknot.torch.CompressionHook, also from the third step on, and local topknot.torch.LocalSteps; both need the package
topknot (PYTHONPATH=python, TOPKNOT_LIBRARY=build/lib/libtopknot.so where it is not installed). off is the plain model in each
process, which exchanges nothing: what a step takes without a network.
Exit status: 0, 1 for a failure (one line on standard error), 2 for wrong arguments, 3 where PyTorch is missing.
"""

import argparse
import hashlib
import inspect
import itertools
import json
import os
import platform
import queue
import socket
import statistics
import sys
import threading
import time
import warnings
from datetime import timedelta

from peer import MALLOC_TUNABLES, import_torch

WARM_UP_STEPS = 5  # train/metrics/metrics.h
DEADLINE_S = 60  # of every wait for another rank
FAREWELL_S = 20  # of the one after the results
DEFAULT_BUCKET_MB = 25
LSTM_WIDTH = 200  # lab/configs/papers/ptb_small.yaml
GPT = {"layers": 4, "heads": 4, "width": 128, "window": 64, "tokens": 65}  # configs/gpt_char.yaml
WINDOWS = {"lstm_lm": 20, "gpt": GPT["window"]}  # tokens of a step and column, of the models of text
CLIPS = {"lstm_lm": 0.25, "gpt": 1.0}
HOOKS = {
    "none": "PyTorch DDP",
    "fp16": "PyTorch DDP fp16",
    "powersgd": "PyTorch DDP PowerSGD",
    "topknot": "PyTorch DDP topknot",
    "local": "PyTorch local steps",
    "off": "PyTorch without exchange",
}
METHODS = {"topknot": "topk", "local": "sparseloco"}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="PyTorch DDP over Gloo; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where this rank belongs"
    )
    parser.add_argument(
        "--model",
        choices=("mlp", "resnet20", "vgg16", *WINDOWS),
        required=True,
        help="lstm_lm: the language model of lab/configs/papers/ptb_small.yaml; gpt: that of configs/gpt_char.yaml",
    )
    parser.add_argument("--batch", type=int, required=True, help="images, or columns or windows of text, per rank and step")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="steps on one random batch")
    length.add_argument("--data", metavar="DIR", help="CIFAR-10's binary files, to train on")
    parser.add_argument("--epochs", type=int, default=3, help="with --data: where the learning rate comes to 0")
    parser.add_argument("--target", type=float, default=1, help="with --data: test accuracy that ends the run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hook", choices=tuple(HOOKS), default="none")
    parser.add_argument("--method", help="of topknot (topk), or preset of local (sparseloco)")
    parser.add_argument("--key", action="append", default=[], metavar="NAME=VALUE", help="of that method; may be repeated")
    parser.add_argument("--warmup", metavar="DENSITY,...", help="of topknot, with --data: densities of the first epochs")
    parser.add_argument("--every", type=int, default=30, help="of local: steps between two exchanges")
    parser.add_argument("--out", required=True, help="run folder, written by rank 0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-mb", type=float, default=DEFAULT_BUCKET_MB)
    parser.add_argument("--rank-powersgd", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01, help="with --data the highest")
    parser.add_argument("--malloc-default", action="store_true", help="leave GLIBC_TUNABLES as it is")
    options = parser.parse_args()
    for name in ("batch", "steps", "epochs", "threads", "bucket_mb", "rank_powersgd", "every"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if options.data and options.model not in ("resnet20", "vgg16"):
        parser.error("--data: resnet20 and vgg16 alone have its schedule")
    if options.data and options.hook in ("local", "off"):
        parser.error("--data: not with --hook local or off, whose ranks have weights of their own")
    if (options.method or options.key) and options.hook not in METHODS:
        parser.error(f"--method and --key go with --hook {' or '.join(METHODS)}")
    if options.warmup and not (options.data and options.hook == "topknot"):
        parser.error("--warmup goes with --data and --hook topknot")
    try:
        options.warmup = [float(density) for density in options.warmup.split(",")] if options.warmup else []
    except ValueError:
        parser.error("--warmup: densities separated by commas")
    options.method = options.method or METHODS.get(options.hook)
    if any("=" not in key for key in options.key):
        parser.error("--key must be NAME=VALUE")
    options.keys = {"threads": options.threads, **dict(key.split("=", 1) for key in options.key)}
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        parser.error(f"{', '.join(missing)} must be set, as torchrun does")
    try:
        options.rank, options.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        parser.error("RANK and WORLD_SIZE must be integers")
    return options


def start_anew_with_tunables():
    """glibc reads its tunables at the start of a process only."""
    if os.environ.get("GLIBC_TUNABLES") != MALLOC_TUNABLES:
        environment = {**os.environ, "GLIBC_TUNABLES": MALLOC_TUNABLES}
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *sys.argv[1:]], environment)


class OneBucketAtATime:
    """Runs a hook's buckets one after the other, on a thread of its own.

    PowerSGD's hook starts further sums from the callback of the one before and waits for them there. Over Gloo, which pairs
    sums by the order in which they were started and has two threads for callbacks too, two buckets under way can pair wrongly or wait
    for ever. In turn they cannot, and the backward pass still goes on beside them.
    """

    def __init__(self, torch, hook):
        self.torch, self.hook, self.work = torch, hook, queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, state, bucket):
        future = self.torch.futures.Future()
        self.work.put((state, bucket, future))
        return future

    def _run(self):
        while True:
            state, bucket, future = self.work.get()
            try:
                future.set_result(self.hook(state, bucket).wait())
            except Exception as error:
                future.set_exception(error)


class Bytes:
    """What one rank puts into sums so far, in bytes; an all-reduce counts its length once, as in our metrics. state: PowerSGD's,
    or topknot's object, which counts by itself."""

    def __init__(self, hook, parameters, state=None):
        self.hook, self.parameters, self.state, self.dense_steps = hook, parameters, state, 0

    def total(self, steps):
        if self.hook == "off":
            return 0
        if self.hook in METHODS:
            return self.state.bytes_sent
        if self.hook == "none":
            return 4 * self.parameters * steps
        if self.hook == "fp16":
            return 2 * self.parameters * steps
        dense = min(steps, self.state.start_powerSGD_iter)
        return 4 * (self.parameters * dense + self.state.total_numel_after_compression)


def network(name):
    """(builder, number of parameters)."""
    if name == "lstm_lm":
        from lstm import LanguageModel

        return lambda: LanguageModel(LSTM_WIDTH), 4_653_200
    if name == "gpt":
        from gpt import Gpt

        return lambda: Gpt(argparse.Namespace(**GPT), bias=False, gelu="none"), 804_096
    from networks import NETWORKS

    return NETWORKS[name][:2]


def wrapped(torch, model, options):
    """The model under DDP with its hook, and its byte count; of local and off the model itself."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.hook == "off":
        return model, Bytes(options.hook, parameters)
    if options.hook == "local":
        from topknot.torch import LocalSteps

        return model, Bytes(options.hook, parameters, LocalSteps(model, options.method, every=options.every, keys=options.keys))
    arguments = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    if options.bucket_mb != DEFAULT_BUCKET_MB:  # a size that is given also replaces the small first bucket, in newer versions
        arguments["bucket_cap_mb"] = options.bucket_mb
    with warnings.catch_warnings():  # newer versions have another name for broadcast_buffers, older ones only this
        warnings.simplefilter("ignore", FutureWarning)
        ddp = torch.nn.parallel.DistributedDataParallel(model, **arguments)
    state = None
    if options.hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.hook == "powersgd":
        import logging

        logging.getLogger("torch.distributed").setLevel(logging.WARNING)
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=options.rank_powersgd, start_powerSGD_iter=2)
        hook = OneBucketAtATime(torch, powerSGD_hook.powerSGD_hook)
        # A function, as DDP asks what it registers for its __qualname__.
        ddp.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    elif options.hook == "topknot":
        from cifar10 import steps_of_epoch
        from topknot.torch import CompressionHook

        epoch = steps_of_epoch(options) if options.data else 1
        state = CompressionHook(ddp, options.method, dense_steps=2, warmup=options.warmup, warmup_steps=epoch, keys=options.keys)
    return ddp, Bytes(options.hook, parameters, state)


def optimizer_of(torch, model, options):
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0},
    ]
    optimizer, arguments = torch.optim.SGD, {"lr": options.lr, "momentum": 0.9, "weight_decay": 1e-4}
    if options.model == "lstm_lm":
        arguments.update(momentum=0, weight_decay=0)
    if options.model == "gpt":
        optimizer, arguments = torch.optim.AdamW, {"lr": options.lr, "betas": (0.9, 0.99), "weight_decay": 0.1}
    if "fused" in inspect.signature(optimizer).parameters:
        try:
            return optimizer(groups, fused=True, **arguments), True
        except RuntimeError:  # fused on GPUs only
            pass
    return optimizer(groups, **arguments), False


def loss_of(torch, ddp, name, inputs, labels):
    if name == "gpt":
        return ddp(inputs, labels)
    output = ddp(inputs)
    return torch.nn.functional.cross_entropy(output[0] if name == "lstm_lm" else output, labels.flatten())


class RandomBatch:
    """Steps on one batch of images, or of tokens: [window, columns], of gpt [windows, window]. The members are those of
    cifar10.Cifar10."""

    steps_per_epoch = 0
    evaluated_after = ()

    def __init__(self, torch, options):
        self.steps, self.lr = options.steps, options.lr
        generator = torch.Generator().manual_seed(1000 + options.rank)
        if options.model == "lstm_lm":
            from lstm import VOCABULARY

            self.name = "random words"
            window = WINDOWS["lstm_lm"], options.batch
            self.batch = [torch.randint(0, VOCABULARY, window, generator=generator) for _ in range(2)]
            return
        if options.model == "gpt":
            self.name = "random characters"
            tokens = torch.randint(0, GPT["tokens"], (options.batch, GPT["window"] + 1), generator=generator)
            self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            return
        self.name = "random images"
        images = torch.randn(options.batch, 3, 32, 32, generator=generator)
        if options.model != "mlp":
            images = images.contiguous(memory_format=torch.channels_last)
        self.batch = images, torch.randint(0, 10, (options.batch,), generator=generator)

    def draw_weights(self, model):
        """Leaves them as PyTorch draws them."""

    def learning_rate(self, _step):
        return self.lr

    def batches(self):
        return itertools.repeat(self.batch)


def checksum(torch, model):
    """16 hexadecimal digits; ends with an error where the ranks' parameters differ in a bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()[:8]), dtype=torch.int64).clone()
    all_ranks = [torch.zeros_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(all_ranks, own)
    if any(int(other) != int(own) for other in all_ranks):
        raise RuntimeError("the ranks' parameters differ after the last step: the steps were not synchronised")
    return digest.hexdigest()[:16]


class Writer:
    """config.yaml (the seed, and sections of keys and values) and metrics.jsonl of rank 0; elsewhere nothing is written."""

    def __init__(self, options, configuration):
        self.file = None
        if options.rank == 0:
            if os.path.exists(os.path.join(options.out, "environment.json")):
                raise SystemExit(f"--out: {options.out} holds a run of Topknot; choose another folder")
            os.makedirs(options.out, exist_ok=True)
            with open(os.path.join(options.out, "config.yaml"), "w", encoding="utf-8") as file:
                print(f"seed: {options.seed}", file=file)
                for section, values in configuration.items():
                    print(f"{section}:", *(f"  {name}: {value}" for name, value in values.items()), sep="\n", file=file)
            self.file = open(os.path.join(options.out, "metrics.jsonl"), "w", encoding="utf-8")

    def write(self, record):
        if self.file:
            print(json.dumps(record), file=self.file, flush=True)


def leave(status):
    """Ends the process without taking the group down: that joins Gloo's threads, which may wait for the interpreter's lock in
    a hook's callback, or for a lost rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(torch, options, startup_begin):
    torch.set_num_threads(options.threads)
    torch.distributed.init_process_group(
        "gloo", init_method="env://", rank=options.rank, world_size=options.ranks, timeout=timedelta(seconds=DEADLINE_S)
    )
    torch.manual_seed(options.seed)
    build, expected = network(options.model)
    model = build().train()
    if options.data:
        from cifar10 import Cifar10

        task = Cifar10(options)
    else:
        task = RandomBatch(torch, options)
    task.draw_weights(model)
    # PowerSGD's hook views each gradient as a matrix, which a channels_last one does not allow; images alone then are.
    if options.model in ("resnet20", "vgg16") and options.hook != "powersgd":
        model = model.to(memory_format=torch.channels_last)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != expected:
        raise RuntimeError(f"{options.model} has {parameters} parameters, not {expected}")
    ddp, sent = wrapped(torch, model, options)
    optimizer, fused = optimizer_of(torch, model, options)
    local = sent.state if options.hook == "local" else None
    name = " ".join([HOOKS[options.hook], *([options.method] if options.method else [])])
    writer = Writer(
        options,
        {
            "model": {"name": options.model},
            "compress": {"name": name},
            **({"exchange": {"every": options.every}} if local else {}),
            "data": {"name": "cifar10" if options.data else "random", "batch_size": options.batch},
            "dist": {"backend": "gloo", "ranks": options.ranks},
            "optimizer": {"lr": options.lr},
            "train": {
                "epochs": options.epochs if options.data else 0,
                "threads": options.threads,
                "target_accuracy": options.target,
            },
            "peer": {
                "parameters": parameters,
                "rank_powersgd": options.rank_powersgd,
                "bucket_mb": options.bucket_mb,
                "fused_optimizer": fused,
                "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
                "torch": torch.__version__,
                "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
                "python": platform.python_version(),
                "host": socket.gethostname(),
            },
        },
    )
    text = options.model in WINDOWS
    metric, unit = ("perplexity", "per character" if options.model == "gpt" else "per word") if text else ("accuracy", "share")
    writer.write(
        {
            "event": "start",
            "step": 0,
            "total_steps": task.steps,
            "steps_per_epoch": task.steps_per_epoch,
            "backend": "gloo",
            "task": task.name,
            "metric": metric,
            "metric_unit": unit,
            "higher_is_better": not text,
            "metric_set": "test",
        }
    )
    torch.distributed.barrier()

    clock = time.perf_counter
    batches, batch_all, ends, sent_before, eval_seconds, best, result = (
        task.batches(),
        options.batch * options.ranks,
        [],
        0,
        0,
        0,
        {},
    )
    if text:
        batch_all *= WINDOWS[options.model]
    first = clock()
    startup_seconds = time.time() - startup_begin
    for step in range(1, task.steps + 1):
        begin = clock()
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        images, labels = next(batches)
        after_data = clock()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(torch, ddp, options.model, images, labels)
        after_forward = clock()
        loss.backward()  # ends when the averages are here
        if text:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPS[options.model])
        after_backward = clock()
        optimizer.step()
        if local:
            local.step()
        loss = loss.item()
        end = clock()
        ends.append(end - first - eval_seconds)
        sent_now = sent.total(step)
        writer.write(
            {
                "event": "step",
                "step": step,
                "time_s": ends[-1],
                "loss": loss,  # rank 0's own
                "images_per_second": batch_all / (end - begin),
                "data_s": after_data - begin,
                "forward_s": after_forward - after_data,
                "backward_s": after_backward - after_forward,
                "update_s": end - after_backward,
                "bytes_sent": sent_now - sent_before,
                "bytes_dense": 4 * parameters,
            }
        )
        sent_before = sent_now
        if step in task.evaluated_after:
            test_loss, accuracy = task.evaluate(model)
            best = max(best, accuracy)
            eval_seconds += clock() - end
            result = {"test_loss": test_loss, "test_accuracy": accuracy, "best_test_accuracy": best, "eval_seconds": eval_seconds}
            writer.write({"event": "eval", "step": step, "epoch": step / task.steps_per_epoch, "time_s": ends[-1], **result})
            if accuracy >= options.target:
                break

    steps = len(ends)
    if local and steps % options.every:
        local.sync()
    if options.hook != "off":
        result["parameter_checksum"] = checksum(torch, model)
    skip = WARM_UP_STEPS if steps > WARM_UP_STEPS else 0
    starts = [0.0, *ends]
    seconds = [b - a for a, b in zip(starts, ends)][skip:]
    writer.write(
        {
            "event": "end",
            "images_per_second": batch_all * len(seconds) / (ends[-1] - starts[skip]),
            "step_p50_s": statistics.median(seconds),
            "wall_seconds": ends[-1],
            "startup_seconds": startup_seconds,
            "steps": steps,
            "bytes_sent": sent_before,
            "bytes_dense": 4 * parameters * steps,
            **result,
        }
    )
    # The results are complete and checked. Rank 0 keeps the store until all are done, but not for ever.
    farewell = threading.Timer(FAREWELL_S, leave, (0,))
    farewell.daemon = True
    farewell.start()
    torch.distributed.barrier()
    leave(0)


def main():
    startup_begin = time.time()
    options = parse_arguments()
    if not options.malloc_default:
        start_anew_with_tunables()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    torch = import_torch()
    if not torch.distributed.is_available():
        print("This PyTorch was built without distributed training.", file=sys.stderr)
        sys.exit(3)
    try:
        run(torch, options, startup_begin)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"lab_ddp.py: rank {options.rank}: {reason}", file=sys.stderr)
        leave(1)


if __name__ == "__main__":
    main()
