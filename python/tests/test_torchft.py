"""LocalSteps among torchft's replicas: processes that die, fail and come at given places, with exact results.

python3 python/tests/test_torchft.py
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import queue
import re
import signal
import sys
import time
import traceback
import unittest
import urllib.request
import warnings
from collections import namedtuple
from datetime import timedelta

os.environ.setdefault("RUST_LOG", "error")  # of torchft, which tells of each message

try:
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
except ImportError as error:
    print(f"skipped: {error.name} is not installed")
    sys.exit(0)

from test_torch import TopK, expect, refused

from topknot.torch import LocalSteps, Run

fork = multiprocessing.get_context("fork")
TARGETS = torch.tensor([[96.0, 72, 48, 60], [48, 24, 96, 48], [12, 0, 36, 72], [72, 48, 96, 60]])
TOP_1 = dict(preset="topk", density=0.25, dense_1d=False, every=1, outer="sgd", outer_lr=0.5, outer_momentum=0.0)
DENSE = dict(preset="dense", every=2, outer="sgd", outer_lr=1.0, outer_momentum=0.0)


class Weights(torch.nn.Module):
    """Of w, with the gradient w - target; and a frozen parameter and statistics, which replicas take from each other."""

    def __init__(self, number, norm):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4,), float(number)))  # the first replica's zeros are to come to all
        self.frozen = torch.nn.Parameter(torch.full((2,), float(number)), requires_grad=False)
        if norm:
            self.norm = torch.nn.BatchNorm1d(1, affine=False)


class Replica:
    """Replica `number` of a scenario. What it tells goes to a queue: (number, what, values)."""

    def __init__(self, number, place, lr=1.0, norm=True, **settings):
        self.number, self.told, self.lr = number, place.told, lr
        self.model = Weights(number, norm)
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(timeout=timedelta(seconds=30))
        self.manager = Manager(
            self.group, None, None, 1, use_async_quorum=False, rank=0, world_size=1, store_addr="localhost",
            store_port=self.store.port, lighthouse_addr=place.lighthouse, replica_id=f"r{number}", hostname="localhost",
            timeout=timedelta(seconds=30), quorum_timeout=timedelta(seconds=60),
        )  # fmt: skip
        self.settings = settings

    def tell(self, what):
        values = self.model.w.tolist()
        residual = self.sync._fragments[0].compressor.residual("w")
        self.told.put(
            (self.number, what, values, [0.0] * 4 if residual is None else residual.tolist(), [self.sync.bytes_sent > 0])
        )

    def begin(self):
        self.sync = LocalSteps(self.model, manager=self.manager, **self.settings)
        self.tell("begins")

    def step(self):
        with torch.no_grad():
            self.model.w -= self.lr * (self.model.w - TARGETS[self.number])
            for buffer in self.model.buffers():
                buffer.fill_(self.number)
        if self.sync.step():
            self.tell(self.sync._fragments[0].syncs)

    def at_exchange(self, number, before=None, after=None):
        """Calls these around the collectives of exchange `number`, counted from 1."""
        flight_of, agree = self.sync._flight_of, self.sync._agree

        def begin(fragment):
            if before and fragment.syncs + 1 == number:
                before()
            return flight_of(fragment)

        def end(flight):
            agreed = agree(flight)
            if after and flight.fragment.syncs + 1 == number:
                after()
            return agreed

        self.sync._flight_of, self.sync._agree = begin, end

    def die(self):
        self.told.close()
        self.told.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)


Place = namedtuple("Place", "lighthouse told met met_again called")


def fail():
    raise RuntimeError("a planted failure")


def _process(play, number, *place):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    place = Place(*place)
    try:
        play(number, place)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    place.told.close()
    place.told.join_thread()
    os._exit(0)


def _lighthouse(address):
    server = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=20000, quorum_tick_ms=20, heartbeat_timeout_ms=2000)
    address.send(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    address.recv()  # until it is killed


class Scenario:
    """Processes that play(number, place), so many of them together from the beginning, of which so many are there at the end. What
    they told, by number and what, and their exit codes."""

    def __init__(self, play, count, together=None, at_end=None):
        ours, theirs = fork.Pipe()
        lighthouse = fork.Process(target=_lighthouse, args=(theirs,))
        lighthouse.start()
        together = together or count
        place = Place(ours.recv(), fork.Queue(), fork.Barrier(together), fork.Barrier(at_end or together), fork.Event())
        processes = [fork.Process(target=_process, args=(play, number, *place)) for number in range(count)]
        for process in processes:
            process.start()
        self.values, end = {}, time.monotonic() + 150
        while time.monotonic() < end and (any(process.is_alive() for process in processes) or not place.told.empty()):
            with contextlib.suppress(queue.Empty):
                number, what, *values = place.told.get(timeout=0.1)
                self.values[number, what] = values
        self.codes = [process.exitcode for process in processes]
        for process in [*processes, lighthouse]:
            process.kill()
            process.join()


def begun(number, place, **settings):
    """One of those that begin together."""
    replica = Replica(number, place, **settings)
    place.met.wait(60)  # the first quorum waits for all whose managers beat
    replica.begin()
    return replica


def call_another(number, place):
    """Lets another begin, and waits until it asks for a quorum. Called by all that are there."""
    place.met_again.wait(60)
    if number == 0:
        place.called.set()
        waiting = r"\[[1-9]\d*/"  # participants of the next quorum
        while not re.search(waiting, urllib.request.urlopen(f"{place.lighthouse}/status").read().decode()):
            time.sleep(0.02)
    place.met_again.wait(60)


def called(number, place, **settings):
    expect(place.called.wait(60))
    return Replica(number, place, **settings)


def train(replica, steps=3):
    for _ in range(steps):
        replica.step()


def undisturbed(number, place):
    train(begun(number, place, **TOP_1))


def killed(numbers, exchange, number, place):
    replica = begun(number, place, **TOP_1)
    if number in numbers:
        replica.at_exchange(exchange, before=replica.die)
    train(replica)


def one_has_all(replica, place, amid=False):
    """In exchange 2 replica 0 receives everything, but then 1 and 3 die, and 2 fails, when it has sent everything or after it."""

    def end():
        if replica.number == 0:
            place.called.set()
        else:
            expect(place.called.wait(60))
            fail() if replica.number == 2 else replica.die()

    if amid and replica.number == 2:
        channel = replica.sync._replicas._channel
        gather = channel._all_gather

        def gather_and_end(into, own):
            gather(into, own)
            channel._all_gather = gather
            end()

        replica.at_exchange(2, before=lambda: setattr(channel, "_all_gather", gather_and_end))
    else:
        replica.at_exchange(2, after=end)


def one_commits(lr, amid, number, place):
    """One has all, and with lr = NaN these are replica 1's."""
    replica = begun(number, place, norm=not amid, **TOP_1)
    train(replica, 1)
    if number == 1:
        replica.lr = lr
    one_has_all(replica, place, amid)
    train(replica, 2)


def joins(failures, number, place):
    """Replica 3 before exchange 3; so often it fails to get the others' state."""
    if number < 3:
        replica = begun(number, place, **TOP_1)
        replica.at_exchange(2, after=lambda: call_another(number, place))
        train(replica)
        return
    replica = called(number, place, **TOP_1)
    transport = replica.manager._checkpoint_transport
    receive, outcomes = transport.recv_checkpoint, iter([fail] * failures)
    transport.recv_checkpoint = lambda **more: next(outcomes, lambda: receive(**more))()
    replica.begin()
    expect(replica.model.frozen.tolist() == [0, 0] and replica.model.norm.running_mean.tolist() == [1])
    train(replica, 1)


def returns(early, number, place):
    """Replica 1 dies before exchange 2, and is there again before the third, or before the others exchange again."""
    if number == 3:
        replica = called(1, place, **TOP_1)
        replica.begin()
        train(replica, 1)
        return
    replica = begun(number, place, **TOP_1)
    if number == 1:
        replica.at_exchange(2, before=replica.die)
    elif early:
        channel = replica.sync._replicas._channel
        give_up = channel.give_up
        channel.give_up = lambda error: (give_up(error), call_another(number, place))[0]
    else:
        replica.at_exchange(2, after=lambda: call_another(number, place))
    train(replica)


def dense_killed(after, number, place):
    replica = begun(number, place, lr=0.5, **DENSE)
    if after:
        one_has_all(replica, place)
    elif number in (1, 3):
        replica.at_exchange(2, before=replica.die)
    train(replica, 4)


def saved_and_loaded(number, place):
    replica = begun(number, place, **TOP_1)
    train(replica, 1)
    state = replica.sync.state_dict()
    train(replica, 1)
    replica.sync.load_state_dict(state)
    train(replica, 2)
    if number == 0:
        replica.sync._fragments[0].theta[0] += 1
    with refused("the replicas differ in weights or settings"):
        replica.sync.load_state_dict(replica.sync.state_dict())


def refusals(number, place):
    replica = begun(number, place, **TOP_1)
    with refused("the manager has a LocalSteps already"):
        LocalSteps(replica.model, manager=replica.manager, **TOP_1)
    with refused("use_async_quorum=False"):
        replica.manager._use_async_quorum = True
        LocalSteps(replica.model, manager=replica.manager, **TOP_1)
    replica.manager._use_async_quorum = False
    for more in dict(every=2, fragments=2), dict(every=2, overlap=1), dict(every=1, process_group=replica.group):
        with refused("does not go with manager"):
            LocalSteps(replica.model, "topk", manager=replica.manager, **more)
    with refused("a method in Python does not go with manager"):
        LocalSteps(replica.model, TopK(), manager=replica.manager, every=1)
    with refused("a manager's replicas come and go"):
        Run("runs", replica.sync)


class ScenarioTest(unittest.TestCase):
    """Weights after exchanges 1, 2, ..., and residuals, by replica."""

    def check(self, scenario, codes, expected):
        self.assertEqual(scenario.codes, codes)
        for (number, what), each in expected.items():
            for found, values in zip(scenario.values[number, what], each):
                for a, b in zip(found, values):
                    self.assertAlmostEqual(
                        a, b, delta=2e-6 * max(1, abs(b)), msg=f"replica {number}, {what}: {found}, not {values}"
                    )

    W1, W2, W3 = (16, 0, 16, 12), (16, 24, 16, 36), (128 / 3, 24, 166 / 3, 36)
    ALONE2, ALONE3 = (16, 30, 16, 27), (56, 30, 32, 27)  # of replicas 0 and 2 without 1

    def test_0_undisturbed(self):
        e1 = [(0, -72, -48, -60), (-48, -24, 0, -48), (-12, 0, -36, 0)]
        e2 = [(-80, 0, -80, -108), (-80, -48, -80, 0), (-8, 0, -56, 0)]
        expected = {(r, 1): (self.W1, e1[r]) for r in range(3)}
        expected |= {(r, 2): (self.W2, e2[r]) for r in range(3)}
        self.check(Scenario(undisturbed, 3), [0, 0, 0], expected | {(r, 3): (self.W3,) for r in range(3)})

    def test_1_killed_before_an_exchange(self):
        scenario = Scenario(functools.partial(killed, [1], 2), 3)
        self.check(scenario, [0, -9, 0], {(r, 2 + i): (w,) for r in (0, 2) for i, w in enumerate((self.ALONE2, self.ALONE3))})

    def test_2_one_commits_and_the_other_fails(self):
        for amid in False, True:
            scenario = Scenario(functools.partial(one_commits, 1.0, amid), 3)
            self.check(
                scenario,
                [0, -9, 0],
                {(r, 2): (self.W2,) for r in (0, 2)} | {(r, 3): ((148 / 3, 24, 91 / 3, 36),) for r in (0, 2)},
            )

    def test_4_killed_after_an_exchange(self):
        scenario = Scenario(functools.partial(killed, [1], 3), 3)
        self.check(scenario, [0, -9, 0], {(r, 3): ((148 / 3, 24, 91 / 3, 36),) for r in (0, 2)})

    def test_5_one_joins(self):
        for failures in 0, 1:
            scenario = Scenario(functools.partial(joins, failures), 4, together=3)
            expected = {(r, 3): ((118 / 3, 24, 367 / 6, 36),) for r in range(4)}
            self.check(scenario, [0] * 4, expected | {(3, "begins"): (self.W2, (0, 0, 0, 0))})

    def test_6_one_is_killed_and_returns(self):
        e2 = {0: (-120, 0, -96, -132), 2: (-6, 0, -66, 0)}  # times 2/3 in exchange 2, and 3/2 in the third
        e3 = [(0, -42, -128, -165), (-32, 6, 0, -21), (-2, 30, 0, -45)]
        expected = {(r, 2): (self.ALONE2, e2[r]) for r in e2}
        expected |= {(r, 3): ((148 / 3, 30, 131 / 3, 27), e3[r]) for r in range(3)}
        for early in False, True:
            scenario = Scenario(functools.partial(returns, early), 4, together=3, at_end=2)
            before = {(1, "begins"): (self.ALONE2, (0, 0, 0, 0), [early])}
            self.check(scenario, [0, -9, 0, 0], expected | before)

    def test_7_two_of_four_are_killed(self):
        scenario = Scenario(functools.partial(killed, [1, 3], 2), 4)
        expected = {(r, 1): ((12, 0, 24, 9),) for r in range(4)} | {(r, 2): ((12, 27, 24, 99 / 4),) for r in (0, 2)}
        self.check(scenario, [0, -9, 0, -9], expected | {(r, 3): ((54, 27, 24, 585 / 16),) for r in (0, 2)})

    def test_10_not_finite_and_one_commits(self):
        scenario = Scenario(functools.partial(one_commits, math.nan, False), 3)
        self.check(scenario, [0, -9, 0], {(r, 2): (self.W1,) for r in (0, 2)} | {(r, 3): (self.ALONE2,) for r in (0, 2)})

    def test_11_dense_local_steps(self):
        theta1 = (42.75, 27, 51.75, 45)
        for after, theta2 in (False, (51.1875, 33.75, 44.4375, 60.75)), (True, (53.4375, 33.75, 64.6875, 56.25)):
            scenario = Scenario(functools.partial(dense_killed, after), 4)
            self.check(scenario, [0, -9, 0, -9], {(r, 1): (theta1,) for r in range(4)} | {(r, 2): (theta2,) for r in (0, 2)})

    def test_saved_and_loaded(self):
        expected = {(r, 2): (self.W2,) for r in range(3)} | {(r, 3): (self.W3,) for r in range(3)}
        self.check(Scenario(saved_and_loaded, 3), [0, 0, 0], expected)

    def test_refused(self):
        self.check(Scenario(refusals, 1), [0], {})


if __name__ == "__main__":
    unittest.main(verbosity=2)
