#!/usr/bin/env python3
"""PyTorch peer for scripts/netlab: DistributedDataParallel over Gloo, one process per host.

It is started once per rank with the variables of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, where there is more than
one interface, GLOO_SOCKET_IFNAME. Rank 0 writes --out/config.json and --out/metrics.jsonl under the names that our own train uses.

The peer is meant to be at its best. Dense: gradients live in the buckets (gradient_as_bucket_view), no buffers are broadcast
(broadcast_buffers=False), buckets of 25 MB with PyTorch's small first one, convolutions in channels_last, the fused SGD where this
PyTorch has it, and an allocator that keeps large blocks (GLIBC_TUNABLES, set by starting the script anew). fp16 and PowerSGD are
PyTorch's own hooks; PowerSGD with warm start and error feedback, from the third step on, the first that it allows.
Exit status: 0, 1 for a failure (one line on standard error), 2 for wrong arguments, 3 where PyTorch is missing.
"""

import argparse
import hashlib
import inspect
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

from contenders import MALLOC_TUNABLES

WARM_UP_STEPS = 5  # train/metrics/metrics.h
DEADLINE_S = 60    # of every wait for another rank
FAREWELL_S = 20    # of the one after the results
DEFAULT_BUCKET_MB = 25


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="PyTorch DDP over Gloo; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where this rank belongs")
    parser.add_argument("--model", choices=("mlp", "resnet20", "vgg16"), required=True)
    parser.add_argument("--batch", type=int, required=True, help="images per rank and step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    parser.add_argument("--out", required=True, help="run folder, written by rank 0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-mb", type=float, default=DEFAULT_BUCKET_MB)
    parser.add_argument("--rank-powersgd", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--malloc-default", action="store_true", help="leave GLIBC_TUNABLES as it is")
    options = parser.parse_args()
    for name in ("batch", "steps", "threads", "bucket_mb", "rank_powersgd"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
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
    """What one rank puts into sums so far, in bytes; an all-reduce counts its length once, as in our metrics."""

    def __init__(self, hook, parameters, state=None):
        self.hook, self.parameters, self.state, self.dense_steps = hook, parameters, state, 0

    def total(self, steps):
        if self.hook == "none":
            return 4 * self.parameters * steps
        if self.hook == "fp16":
            return 2 * self.parameters * steps
        dense = min(steps, self.state.start_powerSGD_iter)
        return 4 * (self.parameters * dense + self.state.total_numel_after_compression)


def wrapped(torch, model, options):
    """The model under DDP with its hook, and its byte count."""
    arguments = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    if options.bucket_mb != DEFAULT_BUCKET_MB:  # a size that is given also replaces the small first bucket, in newer versions
        arguments["bucket_cap_mb"] = options.bucket_mb
    parameters = sum(parameter.numel() for parameter in model.parameters())
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
    return ddp, Bytes(options.hook, parameters, state)


def optimizer_of(torch, model, options):
    arguments = {"lr": options.lr, "momentum": 0.9, "weight_decay": 1e-4}
    if "fused" in inspect.signature(torch.optim.SGD).parameters:
        try:
            return torch.optim.SGD(model.parameters(), fused=True, **arguments), True
        except RuntimeError:  # fused on GPUs only
            pass
    return torch.optim.SGD(model.parameters(), **arguments), False


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
    """metrics.jsonl of rank 0; elsewhere nothing is written."""

    def __init__(self, options, configuration):
        self.file = None
        if options.rank == 0:
            os.makedirs(options.out, exist_ok=True)
            with open(os.path.join(options.out, "config.json"), "w", encoding="utf-8") as file:
                json.dump(configuration, file, indent=2)
                file.write("\n")
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
    from networks import NETWORKS
    torch.set_num_threads(options.threads)
    torch.distributed.init_process_group("gloo", init_method="env://", rank=options.rank, world_size=options.ranks,
                                         timeout=timedelta(seconds=DEADLINE_S))
    torch.manual_seed(1)
    build, expected, *_ = NETWORKS[options.model]
    model = build().train()
    # PowerSGD's hook views each gradient as a matrix, which a channels_last one does not allow; images alone then are.
    images_last = options.model != "mlp"
    if images_last and options.hook != "powersgd":
        model = model.to(memory_format=torch.channels_last)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != expected:
        raise RuntimeError(f"{options.model} has {parameters} parameters, not {expected}")
    torch.manual_seed(1000 + options.rank)
    images, labels = torch.randn(options.batch, 3, 32, 32), torch.randint(0, 10, (options.batch,))
    if images_last:
        images = images.contiguous(memory_format=torch.channels_last)
    ddp, sent = wrapped(torch, model, options)
    optimizer, fused = optimizer_of(torch, model, options)
    writer = Writer(options, {
        "peer": "PyTorch DistributedDataParallel", "backend": "gloo", "model": options.model, "parameters": parameters,
        "batch": options.batch, "ranks": options.ranks, "steps": options.steps, "hook": options.hook,
        "rank_powersgd": options.rank_powersgd if options.hook == "powersgd" else None, "threads": options.threads,
        "bucket_mb": options.bucket_mb, "lr": options.lr, "fused_sgd": fused,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""), "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "torch": torch.__version__, "python": platform.python_version(), "host": socket.gethostname(),
    })
    torch.distributed.barrier()

    clock = time.perf_counter
    batch_all, ends, sent_before = options.batch * options.ranks, [], 0
    first = clock()
    startup_seconds = time.time() - startup_begin
    for step in range(1, options.steps + 1):
        begin = clock()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        after_forward = clock()
        loss.backward()  # ends when the averages are here
        after_backward = clock()
        optimizer.step()
        loss = loss.item()
        end = clock()
        ends.append(end - first)
        sent_now = sent.total(step)
        writer.write({
            "event": "step", "step": step, "time_s": end - first, "loss": loss,  # rank 0's own
            "images_per_second": batch_all / (end - begin), "forward_s": after_forward - begin,
            "backward_s": after_backward - after_forward, "update_s": end - after_backward,
            "bytes_sent": sent_now - sent_before, "bytes_dense": 4 * parameters,
        })
        sent_before = sent_now

    parameter_checksum = checksum(torch, model)
    skip = WARM_UP_STEPS if options.steps > WARM_UP_STEPS else 0
    starts = [0.0, *ends]
    seconds = [b - a for a, b in zip(starts, ends)][skip:]
    writer.write({
        "event": "end", "images_per_second": batch_all * len(seconds) / (ends[-1] - starts[skip]),
        "step_p50_s": statistics.median(seconds), "wall_seconds": ends[-1], "startup_seconds": startup_seconds,
        "steps": options.steps, "bytes_sent": sent_before, "bytes_dense": 4 * parameters * options.steps,
        "parameter_checksum": parameter_checksum,
    })
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
    from peer import import_torch
    torch = import_torch()
    if not torch.distributed.is_available():
        print("This PyTorch was built without distributed training.", file=sys.stderr)
        sys.exit(3)
    try:
        run(torch, options, startup_begin)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"lab_ddp.py: rank {options.rank}: {reason}", file=sys.stderr)
        leave(1)


if __name__ == "__main__":
    main()
