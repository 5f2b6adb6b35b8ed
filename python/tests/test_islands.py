"""LocalSteps of islands and of fragments, on real processes of torch.distributed; see test_torch.py.

python3 python/tests/test_islands.py
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import time
import unittest
import warnings

import numpy as np
import test_torch
from test_torch import HAS_FSDP2, NO_FSDP2, Half, TopK, agree, batch, codes_of, expect, gathered, generated, network
from test_torch import on_each_rank, recorded, refused, same, shared_folder, step_of, warned, weights_of

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import topknot
from topknot.compare.read import read_config
from topknot.torch import LocalSteps, Run
from topknot.torch._islands import in_fragments


def two_islands():
    """Of two ranks each, as a mesh: between and inside."""
    return init_device_mesh(test_torch.device, (2, 2), mesh_dim_names=("between", "inside"))


def trained(make, seed, **options):
    """Weights after some steps of AdamW and an exchange."""

    def begin():
        model, sync = make()
        return model, sync, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, sync, _ = test_torch.trained(begin, seed, **options)
    sync.sync()
    return weights_of(model), sync


class Stateful(TopK):
    """Keeps momentum, which compress() changes, and counts."""

    def __init__(self):
        super().__init__()
        self.velocity, self.calls = {}, 0

    def compress(self, tensor, name):
        self.calls += 1
        self.velocity[name] = 0.5 * self.velocity.get(name, torch.zeros_like(tensor)) + tensor
        return super().compress(self.velocity[name], name)


METHODS = [("sparseloco", {"density": 0.1}), ("diloco", {}), (Stateful, {"memory": "none"}), ("qsgd", {})]
STREAMED = {"every": 4, "fragments": 2, "overlap": 1, "outer_alpha": 0.5}


def by(method, **more):
    def make(model, **group):
        return LocalSteps(model, method() if isinstance(method, type) else method, **{"every": 3, **more, **group})

    return make


def check_ddp_islands(rank, ranks):
    mesh = two_islands()
    inside, between = mesh["inside"].get_group(), mesh["between"].get_group()
    island, place = divmod(rank, 2)

    def ddp(make, **more):
        def both():
            model = DistributedDataParallel(network(), process_group=inside)
            return model, make(model, process_group=mesh, **more)

        return both

    # Of one batch in an island it learns what one rank of it would by itself, and sends its bytes once.
    for method, keys in METHODS:
        for streamed in ({}, STREAMED):
            name = f"{method}, {streamed}"
            make = by(method, **keys, **streamed)

            def alone():
                model = network()
                return model, make(model, process_group=between)

            expected, one = trained(alone, island)
            found, sync = trained(ddp(make), island)
            if method != "qsgd":  # what it draws depends on a tensor's place among those that a rank sends
                expect(all(map(same, expected, found)), name)
            agree(found, name)
            sent = torch.tensor([float(sync.bytes_sent)], device=test_torch.device)
            dist.all_reduce(sent, group=inside)
            once = 0.95 * one.bytes_sent < sent < 1.3 * one.bytes_sent + 200
            expect(0 < sync.bytes_sent and once, f"{name}: {one.bytes_sent} {sent}")
            # In the middle of a round, and while an exchange is on its way.
            for step in (4, 5, 6) if streamed else (4,):
                again, _ = trained(ddp(make), island, saved_at=step)
                expect(all(map(same, found, again)), f"{name}, resumed after step {step}")
    owned = [{*fragment.own} for fragment in sync._fragments]
    dist.all_gather_object(all_ := [None] * ranks, owned)
    expect(all(not a & b and len(a | b) == len(f.parameters) for a, b, f in zip(all_[0], all_[1], sync._fragments)), f"{all_}")

    # An island of one rank is a rank.
    single = [dist.new_group([r]) for r in range(ranks)][rank]
    expected, _ = trained(lambda: (model := network(), by("sparseloco")(model)), rank)
    found, _ = trained(lambda: (model := DistributedDataParallel(network(), process_group=single), by("sparseloco")(model)), rank)
    expect(all(map(same, expected, found)), "islands of one rank")

    # Of other batches, in bfloat16 with a GradScaler that skips a step, by the formula in float64. A compiled model too.
    model = torch.compile(DistributedDataParallel(network(), process_group=inside), backend="eager")
    sync = LocalSteps(model, "diloco", every=4, process_group=mesh)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(test_torch.device, init_scale=256.0)
    theta = [p.detach().double().clone() for p in model.parameters()]
    momentum = [torch.zeros_like(t) for t in theta]
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast(test_torch.device, dtype=torch.bfloat16):
            loss = model(batch(rank, step)).square().mean() * (float("inf") if (step, rank) == (5, 3) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        x = [p.detach().double().clone() for p in model.parameters()]
        expect(sync.step() == (step % 4 == 3))
        if step % 4 == 3:
            for i, p in enumerate(model.parameters()):
                change = theta[i] - x[i]
                dist.all_reduce(change)
                momentum[i] = 0.9 * momentum[i] + change / ranks
                theta[i] = theta[i] - 0.7 * (change / ranks + 0.9 * momentum[i])
                expect((p.detach().double() - theta[i]).abs().max() < 1e-6, f"the formula, parameter {i}")
            agree([p.detach() for p in model.parameters()], "after an exchange")
    expect((scaler.get_scale() == 128) == (island == 1), "the island of rank 3 has skipped a step")

    # Batch norm's statistics are the mean over all ranks.
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(24)).to(test_torch.device), process_group=inside)
    sync = LocalSteps(model, "diloco", every=1, process_group=mesh)
    model(batch(rank, 0)).square().mean().backward()
    mean = model.module[0].running_mean.clone()
    dist.all_reduce(mean)
    sync.step()
    expect((model.module[0].running_mean - mean / ranks).abs().max() < 1e-6, "statistics")
    agree([model.module[0].running_mean], "statistics")

    # An island's second rank may have nothing to send.
    for streamed in ({}, {"every": 2, "overlap": 1}):
        model = DistributedDataParallel(nn.Linear(24, 5, bias=False).to(test_torch.device), process_group=inside)
        sync = LocalSteps(model, "diloco", process_group=mesh, **{"every": 2, **streamed})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            step_of(model, optimizer, batch(rank, step))
            sync.step()
        sync.sync()
        agree(weights_of(model), "one parameter")
        expect((sync.bytes_sent > 0) == (place == 0) == (sync.bits_per_parameter_step > 0))

    # NaN in the weights of one rank alone, then, by its batch, of its island.
    for method, keys in METHODS:
        for streamed in ({}, STREAMED):
            model, sync = ddp(by(method, **keys, **streamed))()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            sync._optimizer = optimizer
            sync.sync()
            before, states = weights_of(model), [f.compressor.save() for f in sync._fragments]
            for bad in ("3", "2, 3"):
                step_of(model, optimizer, batch(rank, 0))
                if bad == "3" and rank == 3:
                    with torch.no_grad():
                        next(iter(sync._fragments[0].own.values())).view(-1)[0] = float("nan")
                elif bad == "2, 3":
                    step_of(model, optimizer, batch(rank, 0) * (float("nan") if rank == 3 else 1))
                with warned(f"weights of rank {bad} are"):
                    expect(not sync.sync(), bad)
                expect(bool(optimizer.state) == (island == 0), "the optimizers of the island begin anew")
                if not streamed:
                    expect(all(map(same, before, weights_of(model))), "back to the last exchange")
                    expect(states == [f.compressor.save() for f in sync._fragments], f"{method}: the state has changed")
                expect(all(bool(w.isfinite().all()) for w in weights_of(model)), "not finite")
            step_of(model, optimizer, batch(rank, 1))
            expect(sync.sync())

    # An average of one rank's part that is too large, which the others have not seen.
    for method, keys in (("diloco", {}), (Half, {"memory": "none"})):
        model, sync = ddp(by(method, **keys))()
        before = weights_of(model)
        with torch.no_grad():
            model.module[0].weight.fill_(-3e38)
            model.module[2].weight += 1
        expect(len({sync._fragments[0].owners[name] for name in ("0.weight", "2.weight")}) == 2, "one rank has both")
        with warned("a change of the weights is too large"):
            expect(not sync.sync(), f"{method}")
        expect(all(map(same, before, weights_of(model))), "back to the last exchange")

    check_run_of_islands(rank, mesh, inside)
    check_refusals_of_islands(rank, mesh, inside)


def check_run_of_islands(rank, mesh, inside):
    folder = shared_folder()
    model = DistributedDataParallel(network(), process_group=inside)
    sync = LocalSteps(model, "diloco", process_group=mesh, **STREAMED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(folder + "/run", sync)
    for step in range(8):
        step_of(model, optimizer, batch(rank, step))
        sync.step()
        run.step(1.0)
    run.close()
    dist.barrier()
    if rank == 0:
        lines, steps = recorded(folder + "/run", 4)
        expect([line["bytes_sent"] > 0 for line in steps] == [False, False, True, False, True, False, True, False], "arrivals")
        sent = sum(line["bytes_sent"] for line in steps)
        expect(sent == lines[-1]["bytes_sent"] == sync.bytes_sent, "bytes")
        expect(lines[-1]["bytes_dense"] == 8 * 4 * sync._numel, "dense bytes are of what the rank sends")
        expect(steps[1]["encode_s"] > 0 and steps[2]["communicate_s"] > 0, "times")
        config = read_config(folder + "/run/config.yaml")
        facts = {"dist.ranks": "4", "dist.ranks_per_island": "2", "exchange.fragments": "2", "exchange.overlap_steps": "1",
                 "exchange.outer.alpha": "0.5", "exchange.every": "4"}  # fmt: skip
        expect({key: config[key].text for key in facts} == facts, f"{config}")
        shutil.rmtree(folder)


def check_refusals_of_islands(rank, mesh, inside):
    groups = [dist.new_group(r) for r in ([0, 3], [1, 2], [2, 3])]
    crossed = groups[0] if rank in (0, 3) else groups[1]
    model = DistributedDataParallel(network(), process_group=inside)
    state = LocalSteps(model, every=2, process_group=mesh).state_dict()
    state[f"rank {rank} of 4"][0]["settings"]["place"] = "1 of 3"
    other = DistributedDataParallel(nn.Linear(4, 4 + rank // 2).to(test_torch.device), process_group=inside)
    one = "LocalSteps takes the model itself, or one whose DistributedDataParallel has the ranks of one island"
    wrapper = type("FullyShardedDataParallel", (nn.Linear,), {})
    for wrong, group, text in [
        (model, crossed, "process_group has the ranks of equal place"),
        (model, None, one),
        (DistributedDataParallel(network()), None, f"averages every gradient with rank {1 if rank == 0 else 0}, which is in process_group"),
        (DistributedDataParallel(network()), mesh, "whose second dimension has here ranks"),
        (wrapper(4, 4), None, "fully_shard(model, mesh=...) in place of FullyShardedDataParallel"),
        (other, mesh, "of other sizes than rank"),
    ]:  # fmt: skip
        with refused(text):
            LocalSteps(wrong, every=2, process_group=group)
    with refused(f"another place (1 of 3 in the state, {rank % 2} of 2 here)"):
        LocalSteps(model, every=2, process_group=mesh).load_state_dict(state)


def check_fsdp_islands(rank, ranks):
    from torch.distributed.fsdp import fully_shard

    mesh = two_islands()
    between = mesh["between"].get_group()
    island, place = divmod(rank, 2)

    def plain():
        return nn.Sequential(network(), nn.Tanh(), nn.Linear(5, 1).to(test_torch.device))  # rank 1's part of its bias is empty

    def sharded(method, **more):
        def both():
            model = plain()
            fully_shard(model[0], mesh=mesh["inside"])
            fully_shard(model, mesh=mesh["inside"])
            return model, by(method, **more)(model, process_group=mesh)

        return both

    # Of one batch in an island, and a method that looks at each entry by itself: what one rank would learn.
    for streamed in ({}, STREAMED):
        for method, keys in (("diloco", {}), (Half, {"memory": "none"})):
            expected, one = trained(
                lambda: (model := plain(), by(method, **keys, **streamed)(model, process_group=between)), island
            )
            found, sync = trained(sharded(method, **keys, **streamed), island)
            expect(all(map(same, expected, found)), f"{method}, {streamed}")
            expect(0 < sync.bytes_sent < 0.6 * one.bytes_sent, f"{sync.bytes_sent} of {one.bytes_sent}")

    # Of other batches: shards, compressed by the library's own compressors. The forward pass of an evaluation does no harm.
    model, sync = sharded("sparseloco", density=0.1)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shards = {name: p.to_local() for name, p in model.named_parameters() if p.to_local().numel()}
    theta = {name: shard.detach().cpu().clone() for name, shard in shards.items()}
    expect(("2.bias" in shards) == (place == 0), "an empty shard")
    shapes = {name: tuple(shard.shape) for name, shard in shards.items()}
    compressors = [topknot.Compressor("sparseloco", shapes, rank=r, ranks=2, density=0.1) for r in range(2)]
    for step in range(6):
        step_of(model, optimizer, batch(rank, step))
        changes = [{}, {}]
        for name, shard in shards.items():
            both = gathered(theta[name] - shard.detach().cpu(), between)
            for r in range(2):
                changes[r][name] = both[r].numpy()
        with torch.no_grad():
            model(batch(rank, step))
        expect(sync.step() == (step % 3 == 2))
        if step % 3 == 2:
            averages = topknot.average(compressors, changes, step=step // 3)
            for name, shard in shards.items():
                theta[name] -= torch.from_numpy(np.array(averages[name]))
                expect(same(theta[name], shard.detach()), name)
            with torch.no_grad():
                agree([model(torch.ones(3, 24, device=test_torch.device))], "outputs")
    agree(weights_of(model), "weights")

    # Saved in the middle of a round, or of an exchange.
    for streamed, saved_at in (({}, 4), (STREAMED, 5)):
        make = sharded("sparseloco", density=0.1, **streamed)
        a, b = trained(make, rank)[0], trained(make, rank, saved_at=saved_at)[0]
        expect(all(map(same, a, b)), f"resumed, {streamed}")

    # NaN in a shard.
    model, sync = sharded("sparseloco", density=0.1)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync._optimizer = optimizer
    before = weights_of(model)
    step_of(model, optimizer, batch(rank, 0))
    if rank == 3:
        with torch.no_grad():
            model[0][0].weight.to_local()[0, 0] = float("nan")
    with warned("weights of rank 3 are not finite"):
        expect(not sync.sync())
    expect(bool(optimizer.state) == (island == 0), "the optimizers of the island begin anew")
    expect(all(map(same, before, weights_of(model))), "back to the last exchange")

    part = plain()
    fully_shard(part[0], mesh=mesh["inside"])
    for wrong, group, text in [
        (fully_shard(network(), mesh=mesh), mesh, "parameter '0.weight' is on a mesh of 2 dimensions (HSDP), and PyTorch "
         "averages over the first in every step; give fully_shard()"),
        (part, mesh, "parameter '2.weight' is outside of fully_shard(), so that the island's ranks would not average its gradients"),
        (fully_shard(network(), mesh=init_device_mesh(test_torch.device, (4,))), None,
         "one whose fully_shard() has the ranks of one island"),
    ]:  # fmt: skip
        with refused(text):
            LocalSteps(wrong, every=2, process_group=group)


class Parts(nn.Module):
    """Weights as two parameters."""

    def __init__(self, values):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(values[:2].clone()), nn.Parameter(values[2:].clone())])

    def forward(self, matrix):
        return matrix @ torch.cat([*self.parts])


# The golden values of train's own test (tests/train/local_steps_test.cpp): after steps 3, 5, ... theta, and rank 0's weights.
HALF = [
    ([-0.1053822085, 0.6155191904, -0.5745420996, -0.07234797286, 9.194436039e-06],
     [-0.2149324004, 0.608500765, -0.5844540392, -0.09985378576, -0.01756078276]),
    ([-0.1053822085, 0.6155191904, -0.5640272153, -0.07808300669, -0.001841873414],
     [-0.4421519143, 0.6072812206, -0.5773134858, -0.09626072815, -0.01483223328]),
    ([-0.3815918459, 0.6217413002, -0.5640272153, -0.07808300669, -0.001841873414],
     [-0.5054556392, 0.6087887554, -0.5913162696, -0.1157371689, -0.03102504664]),
    ([-0.3815918459, 0.6217413002, -0.5681849947, -0.092939372, -0.01550061895],
     [-0.6823831201, 0.602423162, -0.5837812601, -0.1104903541, -0.02857136058]),
    ([-0.5946799953, 0.6142488113, -0.5681849947, -0.092939372, -0.01550061895],
     [-0.7114568233, 0.6012389015, -0.5978620609, -0.1265472087, -0.04374067516]),
    ([-0.5946799953, 0.6142488113, -0.5769687536, -0.1042457152, -0.03075757262],
     [-0.8531041067, 0.593141289, -0.5911742351, -0.119781166, -0.04185681496]),
]  # fmt: skip
E3M0 = [
    ([-0.1049199182, 0.6169408281, -0.5745420996, -0.07234797286, 9.194436039e-06],
     [-0.1049199182, 0.6169408281, -0.5844540392, -0.09985378576, -0.01756078276]),
    ([-0.1049199182, 0.6169408281, -0.5621369033, -0.07728340723, -0.00245852275],
     [-0.3511080078, 0.6183564095, -0.5621369033, -0.07728340723, -0.00245852275]),
    ([-0.3741791592, 0.6217687503, -0.5621369033, -0.07728340723, -0.00245852275],
     [-0.3741791592, 0.6217687503, -0.5829641205, -0.1051443061, -0.02506428267]),
    ([-0.3741791592, 0.6217687503, -0.5588475384, -0.09373482532, -0.02303243007],
     [-0.5731749709, 0.6141870655, -0.5588475384, -0.09373482532, -0.02303243007]),
    ([-0.629113092, 0.6153802565, -0.5588475384, -0.09373482532, -0.02303243007],
     [-0.629113092, 0.6153802565, -0.5796463487, -0.118275786, -0.04454903461]),
    ([-0.629113092, 0.6153802565, -0.5702180634, -0.110492135, -0.04757966699],
     [-0.7841099143, 0.6038019515, -0.5702180634, -0.110492135, -0.04757966699]),
]  # fmt: skip


def check_fragments(rank, ranks):
    matrix, target = generated(30, 3).view(6, 5), generated(6, 4 + rank)
    e3m0 = {"preset": "topk", "density": 1.0, "memory": "none", "values": "e3m0", "dense_1d": False}
    for keys, golden in [({"preset": "diloco", "outer_alpha": 0.5}, HALF), (e3m0, E3M0)]:
        model = Parts(generated(5, 23))
        sync = LocalSteps(model, every=4, fragments=2, overlap=1, **keys)
        optimizer, applied = torch.optim.SGD(model.parameters(), lr=0.05), 0
        for step in range(1, 14):
            optimizer.zero_grad()
            ((model(matrix) - target).square().sum() / 2).backward()
            optimizer.step()
            expect(sync.step() == (step > 1 and step % 2 == 1), f"step {step}")
            if step > 1 and step % 2:
                theta, own = (torch.tensor(values) for values in golden[applied])
                expect((torch.cat(sync._all("theta")) - theta).abs().max() < 2e-5, f"theta after step {step}")
                found = torch.cat([p.detach().cpu() for p in model.parts])
                expect(rank > 0 or (found - own).abs().max() < 2e-5, f"rank 0 after step {step}")
                applied += 1
        expect(applied == 6)

    # Every third layer; what is no block goes with its neighbor.
    names = ["wte", "wpe", *(f"h.{i}.{w}" for i in range(7) for w in ("attn.0.weight", "ln.weight")), "norm.weight", "head"]
    found = in_fragments(dict.fromkeys(names), 3)
    layers = [sorted({int(name.split(".")[1]) for name in part if name[:2] == "h."}) for part in found]
    expect(layers == [[0, 3, 6], [1, 4], [2, 5]] and all("head" in f or "wte" not in f for f in found), f"{layers}")
    expect({"wte", "wpe", "norm.weight", "head"} <= {*found[0]} and sum(map(len, found)) == len(names), f"{found}")
    expect([[*f] for f in in_fragments(dict.fromkeys(["a.w", "a.b", "b.w", "c.w"]), 2)] == [["a.w", "a.b", "c.w"], ["b.w"]])

    # Saved at any step, bit for bit; the last exchange makes all ranks equal.
    for method, keys in METHODS:
        make = by(method, **keys, every=6, fragments=2, overlap=2)
        expected, sync = trained(lambda: (model := network(), make(model)), rank)
        agree(expected, f"{method}")
        for step in range(2, 6):
            found, again = trained(lambda: (model := network(), make(model)), rank, saved_at=step)
            expect(all(map(same, expected, found)), f"{method}, resumed after step {step}")
            expect(again.bytes_sent == sync.bytes_sent, f"{method}, bytes, resumed after step {step}")
    if method == "qsgd":  # a state of an earlier version
        model = network()
        sync = LocalSteps(model, "sparseloco", every=3)
        ((part,),) = sync.state_dict().values()
        part = {**part, "state": part["states"][0], "syncs": 2}
        del part["states"], part["flight"]
        sync.load_state_dict(part)
        expect(sync._fragments[0].syncs == 2)

    # An object: each fragment counts its own exchanges.
    method, model = Stateful(), network()
    sync = LocalSteps(model, method, every=4, fragments=2, memory="none")
    for _ in range(8):
        sync.step()
    expect([method.calls, sync._fragments[1].compressor.own.method.calls] == [2 * len(f.own) for f in sync._fragments])

    # A quarter of the own weights stays, and sync() does not exchange again what step() has exchanged.
    method, model = Stateful(), network()
    sync = LocalSteps(model, method, every=4, fragments=2, memory="none", outer_alpha=0.25)
    with torch.no_grad():
        for p in model.parameters():
            p += 1 + rank
    for _ in range(2):
        sync.step()
    fragment = sync._fragments[0]
    for theta, p, begin in zip(fragment.theta, fragment.own.values(), network().get_submodule("0").parameters()):
        own = begin.detach().cpu() + 1 + rank
        expect((p.detach().cpu() - (0.25 * own + 0.75 * theta)).abs().max() < 1e-6 and not same(p.detach(), theta), "a quarter")
    sync.sync()
    expect(([f.syncs for f in sync._fragments], method.calls) == ([1, 1], len(fragment.own)), f"{method.calls}")
    agree(weights_of(model), "after the last exchange")

    # A rank that is late holds up nobody before the exchange is applied: here rank 1 waits for rank 0, which is ahead.
    sync, ahead = LocalSteps(network(), "diloco", every=6, overlap=3), torch.zeros(1, device=test_torch.device)
    for step in range(1, 10):
        if (step, rank) == (6, 1):
            dist.recv(ahead, src=0)
        expect(sync.step() == (step == 9))
        if (step, rank) == (8, 0):
            dist.send(ahead, dst=1)

    # NaN in one rank's weights: it goes back in all fragments, the other in the one.
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = LocalSteps(model, "diloco", optimizer=optimizer, every=4, fragments=2, overlap=1)
    discarded = []
    for step in range(1, 9):
        step_of(model, optimizer, batch(rank, step) * (float("nan") if (step, rank) == (2, 1) else 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            theta, before = sync._fragments[1].theta[0], [*sync._fragments[1].own.values()][0].detach().clone()
            sync.step()
        discarded += [step for w in caught if "weights of rank 1 are not finite" in str(w.message)]
        if step == 3:
            now = [*sync._fragments[1].own.values()][0].detach()
            expect(same(now, theta if rank else before), "the other fragment")
            expect(bool(optimizer.state) == (rank == 0), "the optimizer begins anew")
    expect(discarded == [3], f"{discarded}")
    expect(all(bool(p.isfinite().all()) for p in model.parameters()))

    # What comes after the changes were sent spoils statistics alone.
    model = nn.Sequential(nn.BatchNorm1d(24), network()).to(test_torch.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = LocalSteps(model, "diloco", optimizer=optimizer, every=4, overlap=2)
    for step in range(1, 13):
        with warnings.catch_warnings(record=True):
            step_of(model, optimizer, batch(rank, step) * (float("nan") if (step, rank) == (5, 1) else 1))
            sync.step()
    expect(bool(model[0].running_mean.isfinite().all()), "statistics of a step that was not finite")
    LocalSteps(copy.deepcopy(model), "diloco", every=4, overlap=2).load_state_dict(sync.state_dict())

    # A method that fails in the thread.
    class Fails(TopK):
        def compress(self, tensor, name):
            raise ValueError("no luck")

    sync = LocalSteps(network(), Fails(), every=4, overlap=1)
    for _ in range(4):
        sync.step()
    with refused(f"rank {rank}: the exchange that began after step 4 failed: parameter '0.weight', rank {rank}", RuntimeError):
        sync.step()

    # An error that a program survives is no exchange.
    method, model = Fails(), network()
    sync = LocalSteps(model, method, every=1)
    before = weights_of(model)
    with refused("no luck", RuntimeError):
        sync.step()
    method.compress = TopK().compress
    with torch.no_grad():
        model[0].weight += 1
    expect(sync.step() and sync._fragments[0].syncs == 1)
    agree(weights_of(model), "after an error")
    expect(sum(map(same, before, weights_of(model))) == len(before) - 1, "what has not changed")

    for keys, reason in [
        ({"every": 4, "fragments": 3}, "3 fragments take turns of equal length: every must be a multiple of them, not 4"),
        ({"every": 4, "fragments": 2, "overlap": 2}, "overlap=2: exchanges begin 2 steps apart; it must be less"),
        ({"every": 4, "fragments": 4}, "fragments=4, and the model has 3 layers that could take turns"),
        ({"every": 4, "fragments": 0}, "fragments must be at least 1"),
        ({"every": 4, "overlap": 0.5}, "overlap must be a whole number"),
        ({"every": 4, "outer_alpha": 1.5}, "outer_alpha must be from 0 to 1, not 1.5"),
    ]:
        with refused(reason):
            LocalSteps(network(), "diloco", **keys)
    state = LocalSteps(network(), "diloco", every=4, fragments=2).state_dict()
    with refused("another fragments (2 in the state, not given here)"):
        LocalSteps(network(), "diloco", every=4).load_state_dict(state)


def check_killed(rank, ranks):
    mesh = two_islands()
    model = DistributedDataParallel(network(), process_group=mesh["inside"].get_group())
    sync = LocalSteps(model, "sparseloco", process_group=mesh, **STREAMED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = time.perf_counter()
    try:
        for step in range(100):
            if rank == 3 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            step_of(model, optimizer, batch(rank, step))
            sync.step()
    except RuntimeError:
        os._exit(7 if time.perf_counter() - begin < 30 else 1)


class IslandsTest(unittest.TestCase):
    test_islands_of_ddp = on_each_rank(4, check_ddp_islands)
    test_islands_of_fsdp2 = unittest.skipUnless(HAS_FSDP2, NO_FSDP2)(on_each_rank(4, check_fsdp_islands))
    test_fragments_and_overlap = on_each_rank(2, check_fragments)

    def test_a_killed_rank_ends_the_others(self):
        self.assertEqual(codes_of(4, check_killed), [7, 7, 7, -signal.SIGKILL])


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class GpuTest(unittest.TestCase):
    """The same checks with models on a GPU that the processes share."""

    test_fragments_over_gloo = on_each_rank(2, check_fragments, backend="gloo", where="cuda")
    test_fragments_over_nccl = on_each_rank(2, check_fragments, backend="nccl", where="cuda")
    test_islands_over_gloo = on_each_rank(4, check_ddp_islands, check_fsdp_islands, backend="gloo", where="cuda")
    test_islands_over_nccl = on_each_rank(4, check_ddp_islands, check_fsdp_islands, backend="nccl", where="cuda")


if __name__ == "__main__":
    unittest.main(verbosity=2)
