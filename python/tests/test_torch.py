"""topknot.torch on real processes of torch.distributed: over gloo; and, where there is a GPU, on it, over gloo and nccl.

    python3 python/tests/test_torch.py

Each test starts processes of its own; the checks run in all of them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp as fsdp
    import torch.multiprocessing as mp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    print("skipped: PyTorch is not installed")
    sys.exit(0)

import numpy as np

import topknot
import topknot.torch
from topknot import Compressor, Error
from topknot.compare.comparison import compare_runs
from topknot.compare.read import read_config, read_runs

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
HAS_FSDP2 = hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook")
NO_FSDP2 = "this PyTorch has no such FSDP2"

SUMS = {"dense", "powersgd", "acpsgd"}  # methods whose sums gloo makes in an order of its own


# Where the checks' models are. Processes of one GPU communicate by NCCL as hosts of their own do.
device = "cpu"
ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
           "NCCL_SHM_DISABLE": "1"}  # fmt: skip


def _process(rank, ranks, check, store, backend, where):
    global device
    device = where
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # else sums differ in their third digit
    warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
    try:
        if backend == "nccl":
            os.environ.update(ONE_GPU, NCCL_HOSTID=f"rank-{rank}")
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
        check(rank, ranks)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without Gloo's destructors, which may wait


def codes_of(ranks, check, backend="gloo", where="cpu"):
    """Runs check(rank, ranks) in as many processes; their exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        arguments = (ranks, check, os.path.join(folder, "store"), backend, where)
        processes = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        return codes


def on_ranks(ranks, check, backend="gloo", where="cpu"):
    codes = codes_of(ranks, check, backend, where)
    if codes != [0] * ranks:  # None: the process did not end
        raise AssertionError(f"processes ended with {codes}; their errors are above")


def on_each_rank(ranks, *checks, **place):
    """A test of these checks."""

    def test(self):
        for check in checks:
            with self.subTest(check.__name__):
                on_ranks(ranks, check, **place)

    return test


def expect(condition, text=""):
    if not condition:
        raise AssertionError(text)


@contextlib.contextmanager
def refused(part, kind=Error):
    try:
        yield
    except kind as error:
        expect(part in str(error), f"'{part}' is not in: {error}")
        return
    raise AssertionError(f"nothing was refused: {part}")


def same(a, b):
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gathered(tensor, group=None):
    """What every rank has."""
    all_ = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_, tensor.contiguous(), group=group)
    return all_


def agree(tensors, what):
    """All ranks have the same bits."""
    for tensor in tensors:
        expect(all(same(tensor, other) for other in gathered(tensor)), f"{what}: ranks differ")


@contextlib.contextmanager
def warned(part, really=True):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(w.message) for w in caught]
    expect(any(part in text for text in said) == really, f"'{part}': {said}")


def shared_folder():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    return folder[0]


def wrapped(model, **more):
    return DistributedDataParallel(model, **more)


def hooked(model, method="topk", more=None, **keys):
    """A model under DistributedDataParallel, which has more, and its hook."""
    ddp = wrapped(model, **(more or {}))
    return ddp, topknot.torch.CompressionHook(ddp, method, **keys)


def backward(model, inputs, **forward):
    model(inputs, **forward).square().mean().backward()


def weights_of(model):
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5, bias=False)).to(device)


def batch(rank, step, *shape):
    return torch.randn(*(shape or (8, 24)), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def own_gradients(model, inputs):
    """This rank's gradients, not averaged, by name."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    backward(twin, inputs)
    return {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}


def of_all_ranks(gradients, ranks):
    """[rank][name]"""
    all_ = [{} for _ in range(ranks)]
    for name, gradient in gradients.items():
        for each, part in zip(all_, gathered(gradient)):
            each[name] = part.cpu().numpy()
    return all_


def keys_of(method):
    own = {option["name"] for option in topknot.methods()["methods"][method]["options"]}
    keys = {"density": 0.05, "seed": 7}
    if "threshold" in own:
        keys["threshold"] = 0.01
    if "min_compression" in own:
        keys["min_compression"] = 1.0
    return keys


def saved(compressor):
    return torch.from_numpy(np.frombuffer(compressor.save(), np.uint8).copy())


def check_methods(rank, ranks):
    for method in topknot.methods()["methods"]:
        keys = keys_of(method)
        model = network()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        locals_ = [Compressor(method, shapes, rank=r, ranks=ranks, keys=keys) for r in range(ranks)]

        def fresh():
            return hooked(model, method, {"bucket_cap_mb": 0.003}, dense_steps=0, keys=keys)

        ddp, hook = fresh()
        for step in range(20):
            inputs = batch(rank, step)
            expected = topknot.average(locals_, of_all_ranks(own_gradients(model, inputs), ranks), step=step)
            ddp.zero_grad()
            backward(ddp, inputs)
            for name, parameter in model.named_parameters():
                average = torch.from_numpy(np.array(expected[name]))
                where = f"{method}, step {step}, {name}"
                if method in SUMS and ranks > 2:  # orthogonalisation magnifies what the order of a sum changes
                    error, norm = (parameter.grad.cpu() - average).norm(), average.norm()
                    expect(step >= 5 or error <= 1e-3 * norm, f"{where}: {error} of {norm}")
                    parameter.grad.copy_(average)
                else:
                    expect(same(parameter.grad, average), where)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            if step == 9:
                state = hook.state_dict()
                expect([*state] == [f"rank {rank} of {ranks}"] and hook.step == 10, method)
                ddp, hook = fresh()
                hook.load_state_dict(state)


def check_buckets(rank, ranks):
    """With scope="bucket" a bucket is one vector; after a change of buckets, residuals follow the parameters."""
    for method, keys in [
        ("topk", {"density": 0.05}),
        ("dgc", {"density": 0.05, "momentum": 0.9, "nesterov": False}),
        ("dense", {"values": "int8", "dense_1d": False}),  # which is its default
    ]:
        model = network()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        locals_ = {}  # by bucket: of all ranks

        def fresh(cap):
            own = {"values": keys["values"]} if method == "dense" else {"scope": "bucket", "keys": keys}
            return hooked(model, method, {"bucket_cap_mb": cap}, **own)

        def expected(names):
            if names not in locals_:
                part = {name: shapes[name] for name in names}
                locals_[names] = [
                    Compressor(method, part, rank=r, ranks=ranks, keys={**keys, "scope": "model"}) for r in range(ranks)
                ]
            return locals_[names]

        def compare(ddp, hook, steps, dense):
            for step in steps:
                inputs = batch(rank, step)
                gradients = of_all_ranks(own_gradients(model, inputs), ranks)
                ddp.zero_grad()
                before = hook.bytes_sent
                backward(ddp, inputs)
                if method == "dense":
                    hook._channel._gather = None  # all messages have one length
                if method == "dense" and step >= steps[0] + dense:  # a piece to each other rank, and the sum of its own
                    sent = 0
                    for names in hook._compressors._made:
                        with expected(names)[rank].encode({name: gradients[rank][name] for name in names}, step=step) as round_:
                            expect(round_.pieces() == ranks)
                            sent += round_.message.block.nbytes
                    expect(hook.bytes_sent - before == sent, f"{hook.bytes_sent - before} bytes, not {sent}")
                for names in [] if step < steps[0] + dense else hook._compressors._made:
                    mine = [{name: g[name] for name in names} for g in gradients]
                    averages = topknot.average(expected(names), mine, step=step)
                    for name in names:
                        where = f"{method}, step {step}, {name}"
                        expect(same(model.get_parameter(name).grad, torch.from_numpy(np.array(averages[name]))), where)
                        residual = expected(names)[rank].residual(name)
                        found = hook.residual(name)
                        expect(found is None if residual is None else np.array_equal(found.numpy(), residual), where)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad

        ddp, hook = fresh(0.003)
        compare(ddp, hook, range(6), dense=2)
        before = {*hook._compressors._made}
        expect(len(before) > 1, "one bucket")
        state = hook.state_dict()
        ddp, hook = fresh(0.003)
        hook.load_state_dict(state)
        compare(ddp, hook, range(6, 10), dense=2)
        expect({*hook._compressors._made} == before, "other buckets after a load")

        # In one bucket, and again in several from the states of all ranks.
        state = hook.state_dict()
        residuals = {name: hook.residual(name) for name in shapes if hook.residual(name) is not None}
        expect(len(residuals) == (5 if method == "dense" else 3), "matrices have residuals, vectors have none")
        ddp, hook = fresh(25)
        hook.load_state_dict(state)
        names = tuple(reversed(shapes))
        hook._compressors.of(names)
        expect(all(same(hook.residual(name), residuals[name]) for name in residuals), "another bucket has other residuals")
        expect([*hook._compressors._made] == [names], "a compressor is left over")
        states = [None] * ranks
        dist.all_gather_object(states, state)
        merged = hook.merge_state_dicts(states)
        ddp, hook = fresh(0.003)
        hook.load_state_dict(merged)
        expect(all(same(hook.residual(name), residuals[name]) for name in residuals), "merged states have other residuals")
        (part,), (own,) = hook.state_dict().values(), merged.values()
        expect(same(part[0]["state"]["owed"]["0.weight"], residuals["0.weight"]))
        with refused("there is no tensor"):
            hook.residual("1.weight")
        own[0]["state"]["owed"]["other"] = torch.ones(3)
        with refused("a parameter 'other'"):
            hook.load_state_dict(merged)


def step_of(ddp, optimizer, inputs, **forward):
    optimizer.zero_grad()
    backward(ddp, inputs, **forward)
    optimizer.step()


def check_layouts(rank, ranks):
    """Parameters in channels_last, in bfloat16, in half; a static graph; accumulation; the dense steps."""

    def conv(layout):
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).to(device, memory_format=layout)

    for method, keys in [("powersgd", {"rank": 2}), ("topk", {"density": 0.1}), ("demo", {"density": 0.1})]:
        ends, kept = [], []
        for layout in (torch.contiguous_format, torch.channels_last):
            model = conv(layout)
            ddp, hook = hooked(model, method, {"gradient_as_bucket_view": layout is torch.channels_last}, keys=keys)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(5):
                step_of(ddp, optimizer, batch(rank, step, 2, 4, 9, 9).to(memory_format=layout))
            ends.append(weights_of(model))
            kept.append(hook.residual("2.weight"))
            agree(ends[-1], f"{method} with {layout}")
        if method == "topk":  # the others see a matrix with its columns in another order
            for a, b in zip([*ends[0], kept[0]], [*ends[1], kept[1]]):
                expect(a.shape == b.shape and (a - b).abs().max() < 1e-4, "channels_last")

    # In bfloat16 the average is rounded once; with one entry in ten it is that of the float gradients' compressor.
    for dtype in (torch.bfloat16, torch.float16):
        model = network().to(dtype)
        ddp, _ = hooked(model, density=0.1, dense_steps=0)
        inputs = batch(rank, 0).to(dtype)
        gradients = of_all_ranks({n: g.float() for n, g in own_gradients(model, inputs).items()}, ranks)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        locals_ = [Compressor("topk", shapes, rank=r, ranks=ranks, density=0.1) for r in range(ranks)]
        expected = topknot.average(locals_, gradients, step=0)
        backward(ddp, inputs)
        for name, p in model.named_parameters():
            expect(same(p.grad, torch.from_numpy(np.array(expected[name])).to(dtype)), f"{dtype}, {name}")

    def trained(accumulate=False, **more):
        model = network()
        ddp, hook = hooked(model, more=more, density=0.1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            inputs = batch(rank, step)
            optimizer.zero_grad()
            if accumulate:
                with ddp.no_sync():
                    (ddp(inputs[:4]).square().mean() / 2).backward()
                (ddp(inputs[4:]).square().mean() / 2).backward()
            else:
                backward(ddp, inputs)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
            optimizer.step()
        expect(hook.step == 6)
        expect(hook.times.steps == 4 and min(hook.times[1:]) > 0, str(hook.times))
        return model

    plain, static, unused, summed = map(weights_of, (
        trained(), trained(static_graph=True), trained(find_unused_parameters=True), trained(accumulate=True)
    ))  # fmt: skip
    for a, b, c, d in zip(plain, static, unused, summed):
        expect(same(a, b) and same(a, c), "static_graph, find_unused_parameters")
        expect((a - d).abs().max() < 1e-5, "no_sync")
    agree(plain, "after six steps")

    # A parameter with gaps in memory, which a bucket has in rows.
    class Gaps(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.weight = nn.Parameter(torch.randn(6, 48)[:, ::2])

        def forward(self, x):
            return x @ self.weight.t()

    # Dense steps are DDP's own averages.
    for make, density, dense_steps, near in [(Gaps, 1.0, 0, 1e-6), (network, 0.01, 2, 1e-7)]:
        model, twin = make().to(device), make().to(device)
        ddp, other = hooked(model, density=density, dense_steps=dense_steps)[0], wrapped(twin)
        for step in range(3):
            for each in (ddp, other):
                each.zero_grad()
                backward(each, batch(rank, step))
            equal = all((a.grad - b.grad).abs().max() < near for a, b in zip(model.parameters(), twin.parameters()))
            expect(equal == (density == 1 or step < dense_steps), f"{make}, step {step}")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(24, 8), nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x, which="ab"):
        return sum(getattr(self, name)(x) for name in which)


def check_unused(rank, ranks):
    model = Branches().to(device)
    ddp, hook = hooked(model, more={"find_unused_parameters": True}, density=0.1, dense_steps=0)
    backward(ddp, batch(rank, 0), which="abc")
    kept = hook.residual("c.weight").clone()
    expect(kept.abs().max() > 0)
    ddp.zero_grad(set_to_none=True)
    backward(ddp, batch(rank, 1), which="ab" if rank == 0 else "a")  # c by nobody, b by rank 0 alone
    expect(model.c.weight.grad is None, "what no rank used has no gradient")
    expect(same(hook.residual("c.weight"), kept), "and keeps its residual")
    expect(model.b.weight.grad is not None and model.b.weight.grad.abs().max() > 0)
    agree([model.b.weight.grad], "what one rank used")


def check_scaler(rank, ranks):
    """A step that GradScaler skips, since one rank's gradients overflow, changes nothing, and residuals are unscaled."""
    ends = []
    for disturbed in (False, True):
        model = network()
        scale = {"init_scale": 256.0 if disturbed else 1024.0, "growth_interval": 2, "growth_factor": 8.0, "backoff_factor": 0.25}
        scaler = torch.amp.GradScaler(device, **scale)
        ddp, hook = hooked(model, more={"bucket_cap_mb": 0.003}, density=0.05, dense_steps=0, scaler=scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(-1 if disturbed else 0, 4):
            optimizer.zero_grad()
            loss = ddp(batch(rank, max(step, 0))).square().mean()
            overflow = None
            if step == -1 and rank == ranks - 1:
                overflow = model[0].weight.register_hook(lambda g: g * float("inf"))  # in the last bucket alone
            scaler.scale(loss).backward()
            if overflow is not None:
                overflow.remove()
            before = weights_of(model)
            scaler.step(optimizer)
            scaler.update()
            if step == -1:
                expect(all(map(same, before, weights_of(model))), "the step was not skipped")
                for name, _ in model.named_parameters():
                    residual = hook.residual(name)
                    expect(residual is None or residual.abs().max() == 0, f"a skipped step left a residual of {name}")
                expect(scaler.get_scale() == 64, f"scale {scaler.get_scale()}")
        ends.append([*weights_of(model), hook.residual("0.weight")])
    for a, b in zip(*ends):
        expect((a - b).abs().max() < 1e-6, "the skipped step left a trace")


def check_not_finite(rank, ranks):
    for more in ({}, {"find_unused_parameters": True}):
        model = network()
        ddp, hook = hooked(model, more=more, density=0.05, dense_steps=0)
        backward(ddp, batch(rank, 0))
        before = {name: hook.residual(name) for name, _ in model.named_parameters()}
        expect(before["0.weight"].abs().max() > 0)
        overflow = model[2].weight.register_hook(lambda g: g * float("inf")) if rank == 1 else None
        backward(ddp, batch(rank, 1))
        if overflow is not None:
            overflow.remove()
        expect(all(bool(p.grad.isnan().any()) for p in model.parameters()), "NaN of one rank must reach all")
        for name, residual in before.items():
            after = hook.residual(name)
            expect(after is None if residual is None else same(after, residual), f"the residual of {name} has changed")
        ddp.zero_grad()
        backward(ddp, batch(rank, 2))
        expect(all(bool(p.grad.isfinite().all()) for p in model.parameters()))


def check_error(rank, ranks):
    """An error of one rank's exchange ends all ranks' soon, and no gradient of another bucket arrives."""
    model = network()
    ddp, hook = hooked(model, more={"bucket_cap_mb": 0.003}, density=0.05, dense_steps=0)
    backward(ddp, batch(rank, 0))
    if rank == 0:

        def broken(*_, **__):
            raise MemoryError("boom")

        hook._compressors.of([*dict(model.named_parameters())]).encode_pointers = broken
    with refused("boom" if rank == 0 else "", RuntimeError):
        backward(ddp, batch(rank, 1))
    with refused("", RuntimeError):  # PyTorch's own by now
        backward(ddp, batch(rank, 2))
    with refused("exchanges nothing more", RuntimeError):
        hook._hook(None)
    os._exit(0)  # DistributedDataParallel's own group may have been left in the middle of a pass


def check_format(rank, ranks):
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(device)
    ddp, _ = hooked(model, dense_steps=0)
    model.to(memory_format=torch.channels_last)
    with refused("memory format", Exception):
        ddp(torch.ones(2, 4, 9, 9, device=device)).sum().backward()
    os._exit(0)  # as check_error()


def check_refusals(rank, ranks):
    def hook(method="topk", more=None, **keys):
        return hooked(network(), method, more, **keys)[1]

    def local(preset="sparseloco", every=2, model=None, **keys):
        return topknot.torch.LocalSteps(model or network(), preset, every=every, **keys)

    dynamo = importlib.import_module("torch._dynamo")

    def python_reducer():
        before, dynamo.config.optimize_ddp = dynamo.config.optimize_ddp, "python_reducer"
        try:
            hook()
        finally:
            dynamo.config.optimize_ddp = before

    buffered = nn.Linear(4, 4)
    buffered.register_buffer("mask", torch.ones(3, device="meta"))
    for call, text in [
        (lambda: topknot.torch.CompressionHook(network(), "topk"), "DistributedDataParallel"),
        (lambda: hook("topkk"), "did you mean 'topk'"),
        (lambda: hook(densty=0.1), "did you mean 'density'"),
        (lambda: hook(scope="model"), "'tensor' or 'bucket', not 'model'"),
        (lambda: hook(more={"find_unused_parameters": True}, scope="bucket"), "remove scope='bucket'"),
        (lambda: hooked(network().double()), "float64"),
        (lambda: hook(dense_steps=0.5), "dense_steps must be a whole number"),
        (python_reducer, "python_reducer"),
        (lambda: local(device="cuda"), "local steps keep their state in the CPU's memory"),
        (lambda: local(model=wrapped(network())), "LocalSteps takes the model itself"),
        (lambda: local(every=0), "at least 1, not 0"),
        (lambda: local(every=2.5), "every must be a whole number, not 2.5"),
        (lambda: local("sparselocco"), "no preset or method 'sparselocco'; did you mean 'sparseloco'? presets: diloco,"),
        (lambda: local(outer_lr="0.7"), "outer_lr"),
        (lambda: local(outer_lr=0), "outer_lr"),
        (lambda: local(outer_momentum=1), "below 1"),
        (lambda: local(model=nn.Linear(4, 4, device="meta")), "parameter 'weight' is on the meta device"),
        (lambda: local(model=buffered), "buffer 'mask' is on the meta device"),
        (lambda: local(process_group=init_device_mesh(device, (1, ranks))), "a DeviceMesh of 2 dimensions"),
        (lambda: local(process_group=[0, 1]), "not a list"),
        *([(lambda: hook(device="cuda"), "device='cuda', and the parameters are on cpu")] if device == "cpu" else []),
    ]:
        with refused(text):
            call()
    local(process_group=init_device_mesh(device, (ranks,)))
    for preset, outer in {"sparseloco": ("sgd", 1.0, 0.0), "diloco": ("nesterov", 0.7, 0.9),
                          "muloco": ("nesterov", 0.9, 0.8), "topk": ("nesterov", 0.7, 0.9)}.items():  # fmt: skip
        sync = local(preset)
        assert (sync.outer, sync.outer_lr, sync.outer_momentum) == outer, preset
    assert topknot.torch.LocalSteps(network(), every=2, outer_lr=0.5).outer_lr == 0.5
    ddp, _ = hooked(network())
    with refused("comm_hook", RuntimeError):
        topknot.torch.CompressionHook(ddp, "topk")
    ddp, _ = hooked(nn.Embedding(10, 4, sparse=True).to(device), dense_steps=0)
    with refused("sparse", Exception):
        ddp(torch.tensor([1, 2], device=device)).sum().backward()

    # A state of other settings.
    state = hook(density=0.1).state_dict()
    with refused("another density (0.1 in the state, 0.2 here)"):
        hook(density=0.2).load_state_dict(state)
    state = local("diloco").state_dict()
    with refused("another every (2 in the state, 3 here), another outer_lr (0.7 in the state, 0.5 here)"):
        local("diloco", every=3, outer_lr=0.5).load_state_dict(state)
    local("diloco", threads=1).load_state_dict(state)
    (part,) = next(iter(state.values()))
    for what in ("theta", "momentum"):
        part[what][0].view(-1)[0] = float("nan")
        with refused(f"the state's {what} is not finite"):
            local("diloco").load_state_dict(state)
        part[what][0].view(-1)[0] = 0
    part["weights"][0].view(-1)[0] = float("nan")  # what a live run goes on from
    local("diloco").load_state_dict(state)

    check_warning_of_adam(hooked)

    # A copy, which has no hook.
    ddp, _ = hooked(network())
    with warned("", really=False):
        copy.deepcopy(ddp.module)
    with warned("would train uncompressed"):
        copy.deepcopy(ddp)

    # Compiled or not, parameters have one name.
    ddp, compiled = hooked(torch.compile(network(), backend="eager"), density=0.1, dense_steps=0)
    backward(ddp, batch(rank, 0))
    plain = hook(density=0.1)
    plain.load_state_dict(compiled.state_dict())
    expect(same(plain.residual("0.weight"), compiled.residual("0.weight")), "a compiled model's residual")


def check_warning_of_adam(compress, model=None):
    """Sparse gradients under Adam are warned of."""
    for method, optimizer, really in (("topk", "AdamW", True), ("topk", "SGD", False), ("powersgd", "AdamW", False)):
        each = model or network()
        with warned("LocalSteps", really):
            compress(each, method, optimizer=getattr(torch.optim, optimizer)(each.parameters(), lr=0.1))


def check_part_of_the_ranks(rank, ranks):
    """A hook over two of three ranks, of which one is in two groups more."""
    more = [dist.new_group([0, 2], use_local_synchronization=True) for _ in range(2)]
    part = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp, hook = hooked(network(), more={"process_group": part}, density=1.0, dense_steps=0)
    expected = own_gradients(ddp.module, batch(rank, 0))
    backward(ddp, batch(rank, 0))
    for name, p in ddp.module.named_parameters():
        dist.all_reduce(expected[name], group=part)
        expect((p.grad - expected[name] / 2).abs().max() < 1e-6, name)
    expect(hook.step == 1 and (more[0] is None) == (rank == 1))
    expect(len(dist.distributed_c10d._world.pg_names) == (5 if rank == 0 else 3), "a group is left over")


def check_fewer_ranks(rank, ranks):
    """States of four ranks, for two: the average of the residuals stays the same."""
    shapes = {name: tuple(p.shape) for name, p in network().named_parameters()}
    states, average = [], 0
    for old in range(4):
        with Compressor("topk", shapes, rank=old, ranks=4, density=0.01) as compressor:
            residual = np.random.default_rng(old).normal(size=shapes["2.weight"]).astype(np.float32)
            compressor.set_residual("2.weight", residual)
            average = average + residual / 4
            states.append({"method": "topk", "keys": {}, "step": 7, "bytes_sent": 0, "rank": old, "ranks": 4,
                           "state": {"parts": [(tuple(shapes), saved(compressor))], "owed": {}}})  # fmt: skip
    hook = topknot.torch.CompressionHook(wrapped(network()), "topk", density=0.01)
    with refused("merge_state_dicts"):
        hook.load_state_dict(states[rank])
    with refused("each once"):
        hook.merge_state_dicts(states[:3])
    hook.load_state_dict(hook.merge_state_dicts(states[::-1]))
    expect(hook.step == 8)
    both = gathered(hook.residual("2.weight").to(device))
    expect(np.allclose(sum(both).cpu().numpy() / ranks, average, atol=1e-6))


def trained(begin, seed, steps=9, saved_at=None):
    """The model, LocalSteps and optimizer of begin() after some steps; saved and loaded into new ones after step saved_at."""
    made = begin()
    for step in range(steps):
        model, sync, optimizer = made
        step_of(model, optimizer, batch(seed, step))
        sync.step()
        if step == saved_at:
            states = copy.deepcopy([each.state_dict() for each in made])
            made = begin()
            for each, state in zip(made, states):
                each.load_state_dict(state)
    return made


def generated(n, seed):  # as tests/support/generated.h
    values = []
    for i in range(n):
        u = ((i * (7919 + 613 * seed) + 104729 * seed + 1) % 10007 - 5003.3) / 10007.0
        values.append(8.0 * u * u * u * (1.0 + 0.1 * (i % 7)))
    return torch.tensor(values, dtype=torch.float64).float().to(device)


def check_local_steps(rank, ranks):
    # H = 1, plain SGD inside and outside, nothing compressed: data-parallel SGD.
    model, twin = network(), network()
    sync = topknot.torch.LocalSteps(model, "dense", every=1, outer="sgd", outer_lr=1, outer_momentum=0)
    ddp = wrapped(twin)
    a, b = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        if step == 3:
            a.register_step_post_hook(sync.step)  # in place of the calls
        step_of(model, a, batch(rank, step))
        expect(step >= 3 or sync.step())
        step_of(ddp, b, batch(rank, step))
    for p, q in zip(model.parameters(), twin.parameters()):
        expect((p - q).abs().max() < 1e-6, "H = 1 is data-parallel SGD")

    # DiLoCo and MuLoCo by their formula in float64, over three exchanges, from rank 1's weights that rank 0 replaces.
    for preset, lr, beta in (("diloco", 0.7, 0.9), ("muloco", 0.9, 0.8)):
        model = network()
        if rank == 1:
            nn.init.zeros_(model[0].weight)
        sync = topknot.torch.LocalSteps(model, preset, every=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        theta = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        momentum = {n: torch.zeros_like(t) for n, t in theta.items()}
        for step in range(12):
            optimizer.zero_grad()
            backward(model, batch(rank, step))
            optimizer.step()
            local = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            expect(sync.step() == (step % 4 == 3))
            if step % 4 != 3:
                continue
            for name, p in model.named_parameters():
                change = theta[name] - local[name]
                dist.all_reduce(change)
                change /= ranks
                momentum[name] = beta * momentum[name] + change
                theta[name] = theta[name] - lr * (change + beta * momentum[name])
                expect((p.detach().double() - theta[name]).abs().max() < 1e-6, f"{preset}, {name}")
    expect(abs(sync.bits_per_parameter_step - 8) < 1e-9, "32 bits every 4 steps")

    # The golden values of train's own test (tests/train/local_steps_test.cpp): least squares, three exchanges.
    matrix, target = generated(30, 3).view(6, 5), generated(6, 4 + rank)
    cases = [
        (lambda p: torch.optim.SGD(p, lr=0.05), {"preset": "diloco"},
         [-0.8272243231, 0.6011158209, -0.5822575878, -0.1107606793, -0.04128304829]),
        (lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1), {"preset": "diloco"},
         [-0.09854100326, 1.008628844, -0.404401368, -0.3869737692, -0.2413733392]),
        (lambda p: torch.optim.SGD(p, lr=0.05), {"preset": "topk", "memory": "none", "values": "bf16", "density": 1.0, "dense_1d": False},
         [-0.8280841762, 0.6009324947, -0.5822393439, -0.1109017631, -0.041404923]),
    ]  # fmt: skip
    for optimizer_of, keys, golden in cases:
        model = nn.Linear(5, 1, bias=False).to(device)
        with torch.no_grad():
            model.weight.copy_(generated(5, 23))
        sync = topknot.torch.LocalSteps(model, every=4, **keys)
        optimizer = optimizer_of(model.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            ((model(matrix).flatten() - target).square().sum() / 2).backward()
            optimizer.step()
            sync.step()
        error = (model.weight.detach().flatten() - torch.tensor(golden, device=device)).abs().max()
        expect(error < 2e-5, f"golden values of {keys}: {error}")

    # SparseLoCo, saved in the middle of a round: the same bits. A rank that diverges starts anew.
    def begin():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, topknot.torch.LocalSteps(model, "sparseloco", every=3, density=0.1, optimizer=optimizer), optimizer

    model, sync, optimizer = trained(begin, rank, saved_at=3)
    expect(all(map(same, weights_of(trained(begin, rank)[0]), weights_of(model))), "resumed in the middle of a round")
    before = weights_of(model)
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] = float("inf")
        step_of(model, optimizer, batch(rank, 9))  # the optimizer has NaN in its moments now
    with warned("rank 1 are not finite"):
        expect(not sync.sync())
    expect(all(map(same, before, weights_of(model))), "back to the weights of the last exchange")
    for step in range(9, 12):
        step_of(model, optimizer, batch(rank, step))
        expect(sync.step() == (step == 11) or step < 11)
    expect(all(bool(p.isfinite().all()) for p in model.parameters()))
    expect(not all(map(same, before, weights_of(model))), "training goes on")

    # Another number of ranks: each alone, from the states of all.
    states = [None] * ranks
    dist.all_gather_object(states, sync.state_dict())
    mean = sum(gathered(torch.from_numpy(sync._fragments[0].compressor.residual("0.weight")))) / ranks
    other = network()
    alone = topknot.torch.LocalSteps(other, "sparseloco", every=3, density=0.1, process_group=dist.new_subgroups(1)[0])
    alone.load_state_dict(alone.merge_state_dicts(states[::-1]))
    expect(all(map(same, weights_of(model), weights_of(other))), "merged weights")
    residual = torch.from_numpy(alone._fragments[0].compressor.residual("0.weight"))
    expect((residual - mean).abs().max() <= 1e-7 * mean.abs().max() and bool(mean.any()), "the average residual")
    expect(alone.sync() and alone.bytes_sent >= 0)
    with refused("all ranks, each once"):
        alone.merge_state_dicts(states[:-1])
    with refused("of different runs"):
        first = states[0]["rank 0 of " + str(ranks)][0]
        wrong = {"rank 0": ({**first, "theta": [t + 1 for t in first["theta"]]},)}
        alone.merge_state_dicts([wrong, *states[1:]])

    # Batch norm's statistics are averaged, and go back where an exchange is discarded; other buffers stay.
    model = nn.Sequential(nn.BatchNorm1d(24))
    model.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
    model.register_buffer("count", torch.tensor([rank], dtype=torch.int16))
    model.to(device)
    sync = topknot.torch.LocalSteps(model, "diloco", every=1)
    expect(model.count.item() == 0, "rank 0's")
    model(batch(rank, 0))
    mean = sum(gathered(model[0].running_mean)) / ranks
    sync.step()
    expect((model[0].running_mean - mean).abs().max() < 1e-6)
    expect(bool((model.mask == torch.finfo(torch.float32).min).all()))
    if rank == 1:
        model[0].running_mean[0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in range(10):
            if rank == 1:
                with torch.no_grad():
                    model[0].weight[0] = float("nan")
            if attempt < 9:
                expect(not sync.sync())
            else:
                with refused("ten exchanges in a row", RuntimeError):
                    sync.sync()
            expect((model[0].running_mean - mean).abs().max() < 1e-6, "the statistics went back")


class TopK:
    """As a user writes it."""

    def __init__(self, count=7):
        self.count = count

    def compress(self, tensor, name):
        flat = tensor.flatten()
        indices = flat.abs().topk(min(self.count, flat.numel())).indices
        return [flat[indices], indices.to(torch.int32)], tensor.shape

    def decompress(self, tensors, shape):
        values, indices = tensors
        return torch.zeros(shape.numel(), device=values.device).index_put_((indices.long(),), values).view(shape)


class Half:
    """Summed, and scaled in place by decompress(), which gets copies."""

    sums = True

    def compress(self, tensor, name):
        return tensor.to(torch.float16), None

    def decompress(self, tensor, context):
        return tensor.float().mul_(1.0)


class Slotted:
    """Keeps its state in slots: sends what has not been sent yet, rounded, and counts."""

    __slots__ = ("rest", "__steps")

    def __init__(self):
        self.rest, self.__steps = {}, 0

    @property
    def steps(self):
        return self.__steps

    def compress(self, tensor, name):
        self.__steps += 1
        tensor += self.rest.get(name, 0)
        sent = tensor.to(torch.bfloat16)
        self.rest[name] = tensor - sent
        return sent, None

    def decompress(self, tensor, context):
        return tensor.float()


class Signs:
    """Sends more or fewer bytes on each rank, keeps momentum, and is decided by the majority."""

    average = False

    def __init__(self):
        self.momentum, self.steps = {}, 0

    def compress(self, tensor, name):
        self.steps += 1
        self.momentum[name] = tensor + 0.5 * self.momentum.get(name, 0)
        return (self.momentum[name] >= 0, torch.ones(dist.get_rank() + 1, 2, dtype=torch.int64)), tensor.shape

    def decompress(self, tensors, shape):
        return tensors[0].float().view(shape) * 2 - 1

    def aggregate(self, tensors):
        return (sum(tensors) >= 0) * 2.0 - 1.0


class Kept:
    """A memory as GRACE's."""

    def __init__(self):
        self.residuals = {}

    def compensate(self, tensor, name):
        return tensor + 0.5 * self.residuals.get(name, 0)

    def update(self, tensor, name, compressor, tensors, context):
        self.residuals[name] = tensor - compressor.decompress(tensors, context)


def check_own_methods(rank, ranks):
    """Averages, residuals and states of methods in Python, against a loop over all ranks' gradients."""

    def fresh(kind, memory):
        memory = memory() if isinstance(memory, type) else memory
        return hooked(network(), kind(), {"bucket_cap_mb": 0.003}, memory=memory, dense_steps=0)

    for kind, memory, decay in [(TopK, "residual", 1), (TopK, Kept, 0.5), (TopK, "none", 0), (Half, None, 1), (Signs, "none", 0)]:
        where = f"{kind.__name__}, {memory}"
        ddp, hook = fresh(kind, memory)
        model = ddp.module
        residuals = [{name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(ranks)]
        momenta = copy.deepcopy(residuals)
        for step in range(6):
            inputs = batch(rank, step)
            gradients = of_all_ranks(own_gradients(model, inputs), ranks)
            ddp.zero_grad()
            backward(ddp, inputs)
            for name, p in model.named_parameters():
                sent = []
                for r in range(ranks):
                    given = torch.from_numpy(gradients[r][name]).to(device) + decay * residuals[r][name]
                    if kind is Signs:
                        momenta[r][name] = given = given + 0.5 * momenta[r][name]
                        sent.append((given >= 0) * 2.0 - 1.0)
                        continue
                    method = kind()
                    sent.append(method.decompress(*method.compress(given, name)))
                    residuals[r][name] = given - sent[-1]
                expected = (sum(sent) >= 0) * 2.0 - 1.0 if kind is Signs else sum(sent) / ranks
                if kind is Half:
                    expect((p.grad - expected).abs().max() < 1e-2 * expected.abs().max(), f"{where}, {name}")
                    continue
                expect(same(p.grad, expected), f"{where}, step {step}, {name}")
                if memory is Kept:  # whose meaning is its own
                    expect(hook.residual(name) is None and same(hook._made.memory.residuals[name], residuals[rank][name]), where)
                elif memory == "residual":
                    expect(same(hook.residual(name), residuals[rank][name]), f"{where}: the residual of {name}")
            if step == 2:
                state = copy.deepcopy(hook.state_dict())
                twin, hook = fresh(kind, memory)
                hook.load_state_dict(state)
                twin.module.load_state_dict(model.state_dict())
                ddp, model = twin, twin.module
        agree([p.grad for p in model.parameters()], where)
        expect(hook.step == 6 and hook.times.steps == 3 and hook.bytes_sent > 0, where)
        states = [None] * ranks
        dist.all_gather_object(states, hook.state_dict())
        if memory is Kept:
            with refused("cannot be merged for the memory Kept"):
                hook.merge_state_dicts(states)
        if memory == "residual":  # in a run of other ranks
            merged = hook.merge_state_dicts(states)
            _, other = fresh(kind, memory)
            other.load_state_dict(merged)
            expect(same(other.residual("0.weight"), residuals[rank]["0.weight"]), "merged states")
            with refused("another memory (residual in the state, none here)"):
                fresh(kind, "none")[1].load_state_dict(states[rank])
            with refused("another method (TopK in the state, Signs here)"):
                fresh(Signs, "residual")[1].load_state_dict(states[rank])

    # Accumulation, unused parameters, and bfloat16.
    model = Branches().to(device)
    ddp, hook = hooked(model, TopK(), {"find_unused_parameters": True}, dense_steps=0)
    with ddp.no_sync():
        backward(ddp, batch(rank, 0), which="abc")
    backward(ddp, batch(rank, 0), which="abc")
    kept = hook.residual("c.weight").clone()
    ddp.zero_grad(set_to_none=True)
    backward(ddp, batch(rank, 1), which="ab" if rank == 0 else "a")
    expect(kept.abs().max() > 0 and same(hook.residual("c.weight"), kept) and hook.step == 2, "an unused parameter")
    ddp, _ = hooked(network().to(torch.bfloat16), TopK(10**6), memory="none", dense_steps=0)
    expected = own_gradients(ddp.module, batch(rank, 0).to(torch.bfloat16))
    backward(ddp, batch(rank, 0).to(torch.bfloat16))
    for name, p in ddp.module.named_parameters():
        mean = sum(each.float() for each in gathered(expected[name])) / ranks
        expect(same(p.grad, mean.bfloat16()), f"bfloat16, {name}")

    # A step with a NaN, or that the scaler skips, leaves residuals and the method's attributes as they were.
    for scaled in (False, True):
        scaler = torch.amp.GradScaler(device, init_scale=256.0) if scaled else None
        method = Signs()
        ddp, hook = hooked(network(), method, {"bucket_cap_mb": 0.003}, memory=Kept(), dense_steps=0, scaler=scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            overflow = None
            if step == 1:
                before = copy.deepcopy(vars(method)), copy.deepcopy(hook._made.memory.residuals)
                if rank == 1:
                    overflow = ddp.module[0].weight.register_hook(lambda g: g * float("inf"))  # in the last bucket alone
            (scaler.scale(loss) if scaled else loss).backward()
            if overflow is not None:
                overflow.remove()
            if step == 1:
                expect(bool(ddp.module[0].weight.grad.isnan().any()), "NaN on all ranks")
                for name in before[1] if scaled else ["0.weight"]:
                    expect(hook.residual(name) is None)  # after what the scaler skipped is undone
                    expect(same(hook._made.memory.residuals[name], before[1][name]), f"a bad step left a residual of {name}")
                    expect(same(method.momentum[name], before[0]["momentum"][name]), f"a bad step left momentum of {name}")
                expect(not scaled or method.steps == before[0]["steps"], "a skipped step counts")
            if scaled:
                scaler.step(optimizer)
                scaler.update()
        expect(all(bool(p.grad.isfinite().all()) for p in ddp.parameters()))

    # Attributes in slots are state.
    ddp, hook = fresh(Slotted, "none")
    backward(ddp, batch(rank, 0))
    twin, other = fresh(Slotted, "none")
    other.load_state_dict(hook.state_dict())
    loaded, method = other._made.method, hook._made.method
    expect(loaded.steps == method.steps == len(method.rest) > 0, "counted")
    expect(all(same(loaded.rest[name], rest) for name, rest in method.rest.items()), "what was not sent")

    # Local steps: plain averages of the weights, and a resumed run.
    model, twin = network(), network()
    sync = topknot.torch.LocalSteps(model, Half(), every=1, memory="none", outer="sgd", outer_lr=1, outer_momentum=0)
    expect((sync.method, sync.keys) == ("Half", {"memory": "none"}), "settings")
    ddp = wrapped(twin)
    a, b = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        step_of(model, a, batch(rank, step))
        expect(sync.step())
        step_of(ddp, b, batch(rank, step))
    expect(all((p - q).abs().max() < 1e-4 for p, q in zip(model.parameters(), twin.parameters())), "H = 1")

    def begin():
        model = network()
        return model, topknot.torch.LocalSteps(model, TopK(), every=2), torch.optim.SGD(model.parameters(), lr=0.1)

    once, resumed = (weights_of(trained(begin, rank, steps=6, saved_at=saved_at)[0]) for saved_at in (None, 2))
    expect(all(map(same, once, resumed)), "resumed local steps")


def check_own_dense_1d(rank, ranks):
    """With dense_1d=True biases are averaged whole, by every kind of method, and the residuals are of matrices alone."""

    class Sum(Half):
        average = False

        def compress(self, tensor, name):
            return tensor.round(), None

    for kind, each in itertools.product((TopK, Signs, Sum), (False, True)):
        ddp, hook = hooked(network(), kind(), {"find_unused_parameters": each}, dense_1d=True, dense_steps=0)
        inputs = batch(rank, 0)
        gradients = of_all_ranks(own_gradients(ddp.module, inputs), ranks)
        backward(ddp, inputs)
        for name, p in ddp.module.named_parameters():
            mean = sum(torch.from_numpy(gradients[r][name]).to(device) for r in range(ranks))
            expect(same(p.grad, mean / ranks) == (p.dim() < 2), f"{kind.__name__}: {name}")
            expect((hook.residual(name) is None) == (p.dim() < 2), f"{name} has a residual, or none")


class Careless:
    """Changes its tensor, sends it transposed, by itself on rank 0 and in a list elsewhere, and returns a view of its own buffer."""

    def __init__(self, sums, scale=0.5):
        self.sums, self.scale, self.out = sums, scale, {}

    def compress(self, tensor, name):
        sent = tensor.clamp_(-1e-3, 1e-3).t()
        return sent if self.sums or dist.get_rank() == 0 else [sent], name

    def decompress(self, tensors, name):
        sent = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        self.out.setdefault(name, torch.empty_like(sent)).copy_(sent).mul_(self.scale)
        return self.out[name].t()


def check_own_careless(rank, ranks):
    """Methods that do what the interface allows have right averages and residuals; a context that differs is refused."""
    for sums in (False, True):
        model = nn.Linear(6, 4, bias=False)
        ddp, hook = hooked(model, Careless(sums), dense_steps=0)
        gradient = own_gradients(model, batch(rank, 0, 8, 6))["weight"]
        gradients = of_all_ranks({"weight": gradient}, ranks)
        state = hook.state_dict()
        backward(ddp, batch(rank, 0, 8, 6))
        mean = sum(torch.from_numpy(g["weight"]).clamp(-1e-3, 1e-3) * 0.5 for g in gradients) / ranks
        expect((model.weight.grad.cpu() - mean).abs().max() < 1e-7, f"the average with sums = {sums}")
        expect(same(hook.residual("weight"), gradient - gradient.clamp(-1e-3, 1e-3) * 0.5), f"the residual with sums = {sums}")
        hook.load_state_dict(state)
        expect(hook.residual("weight") is None and not hook._made.method.out, "a state before the first step is empty")
    sync = topknot.torch.LocalSteps(nn.Linear(6, 4, bias=False), Careless(True, 0.5 + rank), every=1, memory="none")
    with torch.no_grad():
        sync.module.weight.add_(1)
    with refused(
        "rank 1: the average is another than rank 0's; decompress() must do the same" if rank else "the average is another"
    ):
        sync.sync()


def check_own_exit(rank, ranks):
    """What a method raises reaches backward() and ends the others' exchanges, though the process goes on."""
    for what, text in [(SystemExit, "SystemExit: enough"), (ValueError, "ValueError in ")]:
        one = dist.new_group([0])  # so that the ranks have different numbers of groups
        method = TopK()
        ddp, hook = hooked(nn.Linear(6, 4), method, dense_steps=0)
        backward(ddp, batch(rank, 0, 8, 6))

        def fail(*_):
            raise what("enough")

        if rank == 0:
            method.compress = fail
        with refused(text if rank == 0 else "", RuntimeError):
            backward(ddp, batch(rank, 1, 8, 6))
        del one, hook
    os._exit(0)  # as check_error()


def check_own_refusals(rank, ranks):
    """What a method in Python does wrong is one error, which names the parameter and the rank."""

    class Wrong(TopK):
        def __init__(self, sums=False, compress=None, decompress=None):
            super().__init__()
            self.sums = sums
            self.first, self.second = compress, decompress

        def compress(self, tensor, name):
            return self.first(tensor) if self.first else super().compress(tensor, name)

        def decompress(self, tensors, shape):
            return self.second(super().decompress(tensors, shape)) if self.second else super().decompress(tensors, shape)

    where = f"parameter 'weight', rank {rank}: "
    for kind, text in [
        (dict(compress=lambda t: [t]), where + "compress() gave list; return a pair, (tensors, context)"),
        (dict(compress=lambda t: ([1], None)), where + "compress() gave [1] as tensors; return a tensor or a list of tensors"),
        (dict(compress=lambda t: (t.to(torch.complex64), None)), where + "compress() gave torch.complex64; known: torch.float64"),
        (dict(compress=lambda t: t / "two"), where + f"compress() failed: TypeError in {__file__}, line "),
        (dict(decompress=lambda t: t[:1]), where + "decompress() gave torch.float32 of shape (1, 5); return torch.float32 of shape (6, 5)"),
        (dict(decompress=torch.Tensor.double), where + "decompress() gave torch.float64 of shape (6, 5); return torch.float32"),
        (dict(decompress=torch.Tensor.tolist), where + "decompress() gave list, not a tensor"),
        (dict(sums=True), where + "compress() gave torch.float32, torch.int32; what is summed is of one float type"),
        (dict(sums=True, compress=lambda t: (t.flatten()[: rank + 1], None)),
         "parameter 'weight', rank 1: compress() gave tensors of other sizes or types than rank 0's; leave out sums = True"),
    ]:  # fmt: skip
        sync = topknot.torch.LocalSteps(nn.Linear(5, 6, bias=False), Wrong(**kind), every=1, memory="none")
        with refused(text, (Error, RuntimeError)):
            sync.sync()
    for method, memory, text in [
        (TopK, None, "the method is the class TopK; give an object of it: TopK(...)"),
        (TopK(), Kept, "the memory is the class Kept; give an object of it: Kept(...)"),
        (7, None, "the method must be a name or an object with compress() and decompress(), not 7"),
        (TopK(), TopK(), "the memory must be a name or an object with compensate() and update()"),
        (TopK(), "dgc", "memory must be 'residual', 'none' or an object with compensate() and update(), not 'dgc'"),
        ("topk", Kept(), "'topk' has memories of its own"),
    ]:
        for make in (hooked, lambda model, method, **m: topknot.torch.LocalSteps(model, method, every=2, **m)):
            with refused(text):
                make(network(), method, memory=memory)
    method, memory = TopK(), Kept()
    _, hook = hooked(network(), method, memory=memory)
    for call, text in [
        (lambda: hooked(network(), TopK(), density=0.1),
         "'density' is a key of the library's methods; TopK takes its settings when it is made"),
        (lambda: hooked(network(), TopK(), warmup=[0.1]), "warmup has densities for the library's methods"),
        (lambda: topknot.torch.LocalSteps(network(), method, every=2),
         "a TopK is in use by another hook or LocalSteps; make an object for each"),
        (lambda: hooked(network(), TopK(), memory=memory), "a Kept is in use"),
    ]:  # fmt: skip
        with refused(text):
            call()
    expect(hook.step == 0)
    method = TopK()
    method.rule = lambda x: x
    with refused("state 'rule' of the method TopK cannot be in a checkpoint"):
        topknot.torch.LocalSteps(network(), method, every=2).state_dict()


def recorded(path, ranks):
    """The lines of a run, and those of its steps, whose parts and images fit the clock."""
    lines = [json.loads(line) for line in open(path + "/metrics.jsonl")]
    steps, before = [line for line in lines if line["event"] == "step"], 0
    for line in steps:
        taken = sum(line[part + "_s"] for part in ("data", "forward", "backward", "encode", "exposed", "decode", "update"))
        expect(0.5 * (line["time_s"] - before) < taken <= line["time_s"] - before + 1e-9, f"parts of a step: {line}")
        expect(abs(line["images_per_second"] * (line["time_s"] - before) - 8 * ranks) < 1e-6, "images of all ranks")
        before = line["time_s"]
    return lines, steps


def check_run(rank, ranks):
    """What a run directory records, against the hook's own figures and the clock."""
    folder = shared_folder()
    path = folder + "/mine"
    task = "synthetic_images, 10 classes, samples [3, 32, 32]"

    def train(path, make, steps=8, end=True, **more):
        model = network()
        trained, hook = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        run = topknot.torch.Run(path, hook, **more)
        begin = time.perf_counter()
        for step in range(steps):
            model.train()
            loss = trained(batch(rank, step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if isinstance(hook, topknot.torch.LocalSteps):
                hook.step()
            run.step(loss)
            if step % 4 == 3:
                model.eval()
                trained(batch(rank, step))
                time.sleep(0.2)
                run.evaluate(accuracy=0.5 + step / 64, loss=0.25)
        if end:
            run.close()
            run.close()
        return hook, run, time.perf_counter() - begin, trained

    def by(method, **keys):
        return lambda model: hooked(model, method, **keys)

    config = {"data.batch_size": 8, "optimizer.lr": 0.125}
    more = {"task": task, "steps_per_epoch": 4, "config": config, "tensorboard": HAS_TENSORBOARD}
    hook, run, wall, ddp = train(path, by("topk", density=0.05), **more)
    for name, make in [
        ("dense", by("dense")),
        ("own", by(TopK())),
        ("local", lambda model: (model, topknot.torch.LocalSteps(model, "sparseloco", every=4))),
    ]:
        train(f"{folder}/{name}", make)
    cut = train(folder + "/cut", by("topk", density=0.05), end=False)[1]
    dist.barrier()
    if rank == 0:
        lines, steps = recorded(path, ranks)
        expect([line["event"] for line in lines] == ["start", *["step"] * 4, "eval", *["step"] * 4, "eval", "end"], "events")
        end = lines[-1]
        parameters = sum(p.numel() for p in network().parameters())
        expect(sum(line["bytes_sent"] for line in steps) == end["bytes_sent"] == hook.bytes_sent, "bytes sent")
        expect(end["bytes_dense"] == 8 * 4 * parameters and steps[0]["bytes_sent"] == 4 * parameters, "dense bytes")
        expect(abs(end["bits_per_parameter_step"] - 8 * hook.bytes_sent / parameters / 8) < 1e-9, "bits")
        expect(0 < steps[-1]["bytes_received"] < 2 * steps[-1]["bytes_sent"], "bytes received")
        expect([line["epoch"] for line in steps[3::4]] == [1, 2] and steps[0]["lr"] == 0.125, "epoch, rate")
        expect(0.4 <= end["eval_seconds"] <= wall - end["wall_seconds"] and end["steps"] == 8, "evaluations are no training")
        for line in steps:
            timed = ("forward", "backward", "update", *(("communicate", "exposed") if line["step"] > 2 else ()))  # two are dense
            expect(min(line[part + "_s"] for part in timed) > 0, f"{line}")
        expect((end["best_test_accuracy"], end["test_loss"]) == (0.609375, 0.25), "evaluations")
        expect(0.2 < end["startup_seconds"] < 300, "the imports are start-up")
        for name, expected in [
            ("mine", {"compress.name": "topk", "compress.density": "0.05", "dist.ranks": f"{ranks}", "data.batch_size": "8",
                      "model.name": "Sequential"}),
            ("own", {"compress.count": "7"}),
            ("local", {"exchange.every": "4", "exchange.outer.name": "sgd"}),
        ]:  # fmt: skip
            config = read_config(f"{folder}/{name}/config.yaml")
            expect({key: config[key].text for key in expected} == expected, f"{config}")
            expect(name != "own" or "compress.memory" not in config, f"{config}")
        if HAS_TENSORBOARD:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            scalars = EventAccumulator(path).Reload()
            for tag, key in [("loss",) * 2, ("learning_rate", "lr"), ("bytes_sent",) * 2, ("images_per_second",) * 2]:
                found = [(event.step, event.value) for event in scalars.Scalars("train/" + tag)]
                expect(found == [(line["step"], np.float32(line[key])) for line in steps], tag)
            found = {tag: [event.value for event in scalars.Scalars("test/" + tag)] for tag in ("loss", "accuracy")}
            expect(found == {"loss": [0.25, 0.25], "accuracy": [0.546875, 0.609375]}, f"{found}")
        with refused("holds a run"):
            topknot.torch.Run(path, hook)
        # A disk that is full for a while takes a part of a line, which is taken back.
        file, limits = folder + "/cut/metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
        whole = os.path.getsize(file)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 100, limits[1]))
        with refused("cannot be written: File too large"):
            cut.step(1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        expect(os.path.getsize(file) == whole, "a part of a line stayed")
        cut.step(1.0)
        expect([json.loads(line)["event"] for line in open(file)][-2:] == ["eval", "step"], "a line after a full disk")

        # Beside runs of train, if it is built.
        trainer = pathlib.Path(topknot._library.LIBRARY._name).resolve().parents[1] / "bin" / "train"
        if trainer.exists():
            keys = "model.name=mlp model.hidden=[16] data.name=synthetic_images data.train_size=64 data.test_size=16 data.batch_size=4"
            for method in ("dense", "topk"):
                own = f"train.max_steps=8 train.epochs=0 train.threads=1 dist.ranks=2 compress.name={method} output.dir={folder}/train-{method}"
                subprocess.run([trainer, "-q", *keys.split(), *own.split()], check=True, stdout=subprocess.DEVNULL)
        found = compare_runs(read_runs([folder]))
        names = {os.path.basename(run.path) for run in found.runs}
        built = ["train-dense", "train-topk"] if trainer.exists() else []
        expect(names == {"mine", "dense", "own", "local", "cut", *built}, f"{names}")
        by_run = {os.path.basename(run.path): method for method in found.methods for run in method.runs}
        own, mine = by_run["own"], by_run["mine"]
        expect(own.speed_up > 0 and own.baseline is by_run["dense"], "the speed-up of a method in Python")
        expect(abs(mine.bits_per_parameter_step - end["bits_per_parameter_step"]) < 1e-9, "bits")
        expect(mine.last.mean == 0.609375, "accuracy")
        expect(any("cut is incomplete" in warning for warning in found.warnings), "a run without its end")
        expect(any("the task is not recorded" in warning for warning in found.warnings), "a run without a task")
        command = [sys.executable, "-m", "topknot", "compare", folder, "--out", folder + "/page.html"]
        made = subprocess.run(command, capture_output=True, text=True)
        expect(made.returncode == 0, made.stderr)
        train_again = topknot.torch.Run(path, hook, overwrite=True, metric="loss")
        for wrong, text in [
            ({"accuracy": 0.5}, "give evaluate() loss="),
            ({"loss": 1, "accuracy": 50}, "from 0 to 1, not 50"),
            ({"loss": 1, "speed": 3}, "no figure 'speed'"),
        ]:
            with refused(text):
                train_again.evaluate(**wrong)
        cut.close()
        train_again.close()
        shutil.rmtree(folder)
    with refused("there is no metric 'speed'; known: accuracy, loss"):
        topknot.torch.Run(path, hook, metric="speed")
    if not HAS_TENSORBOARD:
        with refused("tensorboard=True needs the package tensorboard"):
            topknot.torch.Run(path, hook, tensorboard=True)
    with refused("hook must be a CompressionHook, LocalSteps or FsdpCompression, not a Sequential"):
        topknot.torch.Run(path, network())


def check_distributed_checkpoint(rank, ranks):
    """torch.distributed.checkpoint keeps every rank's state, and loads it into a hook that has none yet."""
    import torch.distributed.checkpoint as dcp

    def begin():
        return *hooked(network(), density=0.05, dense_steps=0), topknot.torch.LocalSteps(network(), every=3)

    folder = shared_folder()
    ddp, hook, sync = begin()
    backward(ddp, batch(rank, 0))
    with torch.no_grad():
        sync._parameters["0.weight"] += rank + 1
    dcp.save({"hook": hook, "sync": sync}, checkpoint_id=folder)
    _, restored, steps = begin()
    dcp.load({"hook": restored, "sync": steps}, checkpoint_id=folder)
    expect(restored.step == 1 and same(restored.residual("0.weight"), hook.residual("0.weight")), "another residual")
    both = [None] * ranks
    dist.all_gather_object(both, restored.residual("0.weight"))
    expect(not same(*both), "ranks have the same residual")
    expect(same(steps._parameters["0.weight"], sync._parameters["0.weight"]), "another rank's weights")

    # All ranks' states in one program, as for another number of ranks.
    states = {f"rank {each} of {ranks}": () for each in range(ranks)}
    dcp.load({"hook": states}, checkpoint_id=folder)
    restored.load_state_dict(restored.merge_state_dicts([states]))
    expect(same(restored.residual("0.weight"), hook.residual("0.weight")), "merged states have other residuals")
    with refused(f"is of rank {1 - rank} of 2, not of rank {rank} of 2"):
        restored.load_state_dict({f"rank {1 - rank} of 2": states[f"rank {1 - rank} of 2"]})
    (old,) = states[f"rank {rank} of 2"]  # an earlier version's state, without ranks in keys
    restored.load_state_dict(old)
    with refused(f"is of rank {1 - rank} of 2"):
        restored.load_state_dict({**old, "rank": 1 - rank})
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def check_fsdp(rank, ranks):
    """Two hosts of two ranks: sharded inside, compressed between. With density 1 it is the mean over all ranks."""
    from torch.distributed.fsdp import fully_shard

    place = rank % 2
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("hosts", "shards"))["shards"]

    def compress(model, method="topk", **keys):
        return topknot.torch.FsdpCompression(model, method, process_group=between[place], **keys)

    def sharded(density):
        model = network()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, compress(model, density=density)

    model, _ = sharded(1.0)
    inputs = batch(rank, 0)
    expected = own_gradients(network(), inputs)
    backward(model, inputs)
    for name, parameter in model.named_parameters():
        mean = expected[name].clone()
        dist.all_reduce(mean)
        mean /= ranks
        expect((parameter.grad.full_tensor() - mean).abs().max() < 1e-6, f"the mean of {name}")

    model, four = network(), init_device_mesh(device, (4, 1), mesh_dim_names=("hosts", "shards"))
    fully_shard(model, mesh=four["shards"])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    compression = topknot.torch.FsdpCompression(model, "topk", process_group=four["hosts"], density=0.05)
    for step in range(2):
        backward(model, batch(rank, step))
    states, residual = [None] * ranks, torch.from_numpy(compression._compressors[""].residual(""))
    dist.all_gather_object(states, compression.state_dict())
    mean = sum(gathered(residual)) / ranks
    fewer = topknot.torch.FsdpCompression(model, "topk", process_group=pairs[rank // 2], density=0.05)
    fewer.load_state_dict(fewer.merge_state_dicts(states))
    expect((sum(gathered(torch.from_numpy(fewer._made("", len(residual)).residual("")))) / ranks - mean).abs().max() < 1e-6)
    with refused("the states must be those of all ranks"):
        fewer.merge_state_dicts(states[1:])

    ends = []
    for interrupted in (False, True):
        model, compression = sharded(0.05)
        for step in range(4):
            if interrupted and step == 2:
                state = compression.state_dict()
                compression = compress(model, density=0.05)
                compression.load_state_dict(state)
            model.zero_grad()
            backward(model, batch(rank, step))
        ends.append([p.grad.full_tensor() for p in model.parameters()])
        agree(ends[-1], "gradients")
    expect(all(map(same, *ends)), "a loaded state goes on with the same bits")
    expect(compression.bytes_sent > 0)

    folder = shared_folder()
    model, compression = sharded(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    run = topknot.torch.Run(folder, compression)
    for step in range(3):
        step_of(model, optimizer, batch(rank, step))
        run.step(0.5)
    run.close()
    if rank == 0:
        lines, steps = recorded(folder, 4)
        expect([line["event"] for line in lines] == ["start", *["step"] * 3, "end"], "one rank alone writes")
        for line in steps:
            expect(min(line[part + "_s"] for part in ("backward", "communicate", "exposed")) > 0, f"{line}")
        shard = sum(p.to_local().numel() for p in model.parameters())
        expect((lines[-1]["bytes_sent"], lines[-1]["bytes_dense"]) == (compression.bytes_sent, 3 * 4 * shard), "bytes")
        expect(read_config(folder + "/config.yaml")["dist.ranks"].text == "4", "ranks")
        shutil.rmtree(folder)

    hybrid = network()
    fully_shard(hybrid, mesh=init_device_mesh(device, (2, 2), mesh_dim_names=("hosts", "shards")))
    meta = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
    for call, text in [
        (lambda: compress(hybrid), "parameter '0.weight' is sharded over a 2-D mesh (HSDP)"),
        (lambda: compress(meta), "parameter 'weight' is on the meta device"),
        (lambda: compress(model, density=0.1).load_state_dict(state), "another density (0.05 in the state, 0.1 here)"),
        (lambda: compress(network()), "no module is sharded"),
        (lambda: compress(model, TopK()), "the method's name must be a text, not a TopK"),
        (lambda: compress(model, "topkk"), "did you mean 'topk'"),
    ]:
        with refused(text):
            call()
    check_warning_of_adam(compress, model)


PROGRAM = """
import sys, torch, topknot.torch
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store", rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
hook = topknot.torch.CompressionHook(ddp, "topk")
run = topknot.torch.Run(sys.argv[1] + "/run", hook)
for step in range(int(sys.argv[2])):
    run.step(0.5)
"""


class TorchTest(unittest.TestCase):
    def test_a_program_that_is_stopped_leaves_whole_lines(self):
        for steps in (20, 10**9):
            with tempfile.TemporaryDirectory() as folder:
                program = subprocess.Popen([sys.executable, "-c", PROGRAM, folder, str(steps)], stderr=subprocess.PIPE)
                lines = pathlib.Path(folder, "run", "metrics.jsonl")
                while steps > 20 and program.poll() is None and (not lines.exists() or lines.read_bytes().count(b"\n") < 50):
                    time.sleep(0.01)
                if steps > 20:
                    program.send_signal(signal.SIGINT)
                error = program.communicate(timeout=60)[1]
                events = [json.loads(line)["event"] for line in lines.read_text().splitlines()]
                self.assertEqual(events[-1], "step" if steps > 20 else "end", error)
                self.assertTrue(lines.read_bytes().endswith(b"}\n"))

    test_averages_have_the_bits_of_the_compressors_of_two_ranks = on_each_rank(2, check_methods)
    test_averages_have_the_bits_of_the_compressors_of_four_ranks = on_each_rank(4, check_methods)
    test_memory_formats_types_static_graphs_and_accumulation = on_each_rank(2, check_layouts)
    test_residuals_follow_parameters_into_other_buckets = on_each_rank(2, check_buckets)
    test_a_part_of_the_ranks_whose_members_are_in_different_numbers_of_groups = on_each_rank(3, check_part_of_the_ranks)
    test_what_no_rank_used_keeps_its_residual = on_each_rank(2, check_unused)
    test_a_step_that_the_scaler_skips_changes_nothing = on_each_rank(2, check_scaler)
    test_a_value_that_is_not_finite_reaches_all_ranks_and_no_residual = on_each_rank(2, check_not_finite)
    test_an_error_of_one_rank_ends_the_exchanges_of_all = on_each_rank(2, check_error, check_format)
    test_what_cannot_work_is_refused = on_each_rank(2, check_refusals)
    test_states_of_another_number_of_ranks_are_summed = on_each_rank(2, check_fewer_ranks)
    test_methods_in_python = on_each_rank(2, check_own_methods, check_own_careless)
    test_mistakes_of_methods_in_python_are_refused = on_each_rank(2, check_own_refusals, check_own_dense_1d, check_own_exit)
    test_run_directories = on_each_rank(2, check_run)
    test_distributed_checkpoints_have_every_rank = on_each_rank(2, check_distributed_checkpoint)
    test_local_steps = on_each_rank(2, check_local_steps)
    test_fsdp_between_hosts = unittest.skipUnless(HAS_FSDP2, NO_FSDP2)(on_each_rank(4, check_fsdp))


ON_GPU = [check_methods, check_layouts, check_unused, check_scaler, check_not_finite, check_refusals, check_fewer_ranks,
          check_local_steps, check_own_methods]  # fmt: skip


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class GpuTest(unittest.TestCase):
    """The same checks with models on a GPU that the processes share."""

    test_over_gloo = on_each_rank(2, *ON_GPU, check_error, check_format, backend="gloo", where="cuda")
    # After an error PyTorch's watchdog ends the other processes.
    test_over_nccl = on_each_rank(2, *ON_GPU, backend="nccl", where="cuda")
    test_fsdp_over_nccl = unittest.skipUnless(HAS_FSDP2, NO_FSDP2)(on_each_rank(4, check_fsdp, backend="nccl", where="cuda"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
