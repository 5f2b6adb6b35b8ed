"""Local steps among the replicas of torchft, which come and go (torchft 0.2; docs/pytorch.md)."""

from __future__ import annotations

import secrets
import zlib
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from .. import Error, State
from ._channel import AnyRound, Channel, LibraryRound, Place, Slices, check_settings, residuals_of

if TYPE_CHECKING:
    from .local_steps import Flight, LocalSteps

_TRIES = 4  # of a meeting, and of an exchange
# The residual of these depends on what the other ranks sent.
_MUTUAL = {"powersgd", "acpsgd"}


class ManagedChannel(Channel):
    """Exchanges over the process group of a torchft.Manager, among the replicas of its last quorum."""

    def __init__(self, manager: Any) -> None:
        if manager._use_async_quorum:
            raise Error("the manager's quorum changes the weights while a step is computed; make it with use_async_quorum=False")
        if manager._group_world_size != 1:
            raise Error(f"a replica of LocalSteps is one process, and the manager's has {manager._group_world_size}")
        if manager._replica_world_size_mode.name != "DYNAMIC":
            raise Error("LocalSteps has no spares; make the manager with world_size_mode=WorldSizeMode.DYNAMIC")
        self.manager, self.group = manager, manager._pg
        self._begin(0, 1, self.group.getBackendName())
        self.contributors, self.idle = 1, False  # replicas that have something to exchange; whether this one has nothing

    def take_place(self) -> None:
        """In the quorum that has begun."""
        self._take_place(self.manager.participating_rank(), self.manager.num_participants())

    def expect_anew(self) -> None:
        """Forgets how long messages were, of which replicas that failed or came may know other lengths."""
        self._room.clear()

    def end(self, round_: AnyRound, slices: Slices, done: bool) -> bool:
        done = super().end(round_, slices, done)
        for average in slices.values() if done and self.contributors < self.ranks else []:
            average *= self.ranks / self.contributors
        return done

    def mean(self, tensor: torch.Tensor) -> None:
        sum_ = tensor.detach().to(self.device).double() * (0 if self.idle else 1)
        self._all_reduce(sum_)
        tensor.copy_(sum_ / self.contributors)

    def give_up(self, error: Exception) -> bool:
        """Ends an attempt here and, since the connections close, with the neighbours. False: it is not committed."""
        self.manager.report_error(error)
        self.group.abort()
        committed: bool = self.manager.should_commit()
        return committed

    def _place_in_program(self) -> Place:
        return self.rank, self.ranks

    def _all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.group.allreduce([values], options).wait()

    def _all_gather(self, into: list[torch.Tensor], own: torch.Tensor) -> None:
        self.group.allgather([into], [own], AllgatherOptions()).wait()

    def _all_to_all(self, into: torch.Tensor, own: torch.Tensor) -> None:
        self.group.alltoall_base(into, own, [], [], dist.AllToAllOptions()).wait()


class Replicas:
    """A LocalSteps among replicas.

    A round begins with a meeting: a quorum of torchft, in which a replica that is behind takes another's state, and a gather
    of headers, by which all know that all have it. The round's exchange counts for a replica where its manager commits. If
    some commit and others fail, the next meeting brings these the state of the former. If none does, all exchange again,
    without those that are gone; a replica that has come meanwhile has nothing to send and does not count in the averages.
    Residuals are scaled with the number of those that count, so that their mean stays; a replica that comes has none, and what
    a lost one had not sent is lost.
    """

    def __init__(self, local: LocalSteps, channel: ManagedChannel) -> None:
        self._local, self._channel, self._fragment = local, channel, local._fragments[0]
        self._place = (0, 0, 0)  # of the compressor: rank, ranks, and how many of them counted
        self._meeting = self._committed = 0  # of the last meeting; of that whose exchange was the last to be committed
        self._finite = True  # that exchange
        self._pending: Optional[Flight] = None  # encoded at the last meeting and not committed
        self._renew = True  # since this replica's compressor is not as that of one who took part in all
        self._clear = True  # and its residual is of changes that were lost
        module = local.module
        own = {id(p) for p in local._parameters.values()}
        self._rest = [t.detach() for t in [*module.parameters(), *module.buffers()] if id(t) not in own]
        try:
            channel.manager.register_state_dict_fn("topknot", self._load, self._state)
        except AssertionError:
            raise Error("the manager has a LocalSteps already") from None
        if self.meet():
            self.exchange()

    def _state(self) -> dict[str, Any]:
        """As of the last committed exchange. Copies, since torchft sends it while the training goes on."""
        shared = {"theta": self._fragment.theta, "momentum": self._fragment.momentum}
        tensors = {**shared, "statistics": self._local._kept, "rest": self._rest}
        return {
            **{name: [t.clone() for t in each] for name, each in tensors.items()},
            "settings": self._local._settings(), "step": self._local._step, "syncs": self._fragment.syncs,
            "meeting": self._committed, "finite": self._finite,
        }  # fmt: skip

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        """Takes another replica's state, of which torchft says that it is ahead; at step 0 it says so of all but one."""
        fragment, local = self._fragment, self._local
        check_settings(state, local._settings())
        into = {"theta": fragment.theta, "momentum": fragment.momentum, "rest": self._rest, "statistics": local._statistics}
        for name, tensors in into.items():
            if [t.shape for t in state[name]] != [t.shape for t in tensors]:
                raise Error(f"the replica that gives its state has another model: its {name} differs in shapes")
        same = all(torch.equal(a, b) for a, b in zip(state["theta"], fragment.theta))
        if self._place[1] and same and state["syncs"] == fragment.syncs:
            return
        pending, self._pending = self._pending, None
        took_part = pending is not None and state["meeting"] == self._meeting and state["syncs"] == fragment.syncs + 1
        if pending and pending.round:
            if took_part and state["finite"]:
                took_part = self._settle(pending.round)
            pending.round.discard()
        self._clear |= not took_part
        self._renew = True
        for name, tensors in into.items():
            for to, from_ in zip(tensors, state[name]):
                to.copy_(from_)
        local._kept = [t.clone() for t in state["statistics"]]
        fragment.write(local._islands)
        fragment.syncs, local._step = state["syncs"], state["step"]
        self._committed, self._finite = state["meeting"], state["finite"]

    def _settle(self, round_: AnyRound) -> bool:
        """Takes from the residual what this replica sent in an exchange that others have committed. Of the averages, which
        come with their state, nothing is needed: the own message stands in for all. False if the residual cannot be had so."""
        assert isinstance(round_, LibraryRound)
        while round_.state is State.MORE and self._local.method not in _MUTUAL and not round_.scatters():
            own, is_sum = round_.message()
            round_.decode(None if is_sum else [own] * self._place[1])
        if done := round_.state is State.DONE:
            round_.commit({i: torch.empty_like(theta) for i, theta in enumerate(self._fragment.theta)})
        return done

    def meet(self) -> bool:
        """Begins a round. True if the last one's exchange is open."""
        channel, last = self._channel, None
        for _ in range(_TRIES):
            channel.manager.start_quorum()
            try:
                if last := channel.manager.errored():
                    last = last.original_exception
                channel.take_place()
                own = [last is not None, self._pending is not None, self._renew, *self._place, secrets.randbits(62)]
                headers = [header.tolist() for header in channel.all_gather(torch.tensor([int(value) for value in own]))]
                if not any(failed for failed, *_ in headers):
                    return self._begin(headers)
                last = last or RuntimeError("another replica could not take the state that it needs")
            except Error:
                raise
            except Exception as error:
                last = error
            channel.give_up(last)
        raise RuntimeError(f"{_TRIES} quorums in a row ended before all replicas had met: {last}") from last

    def _begin(self, headers: list[list[int]]) -> bool:
        channel, fragment = self._channel, self._fragment
        pending = [bool(header[1]) for header in headers]
        open_ = any(pending)
        channel.contributors = sum(pending) if open_ else channel.ranks
        channel.idle = open_ and not pending[channel.rank]
        places = [(rank, channel.ranks, channel.contributors) for rank in range(channel.ranks)]
        renew = any(header[2] or (*header[3:6],) != place for header, place in zip(headers, places))
        if renew:
            self.check_equal()
        if self._pending and self._pending.round:
            self._pending.round.discard()
        self._pending = None
        if renew:
            kept = residuals_of(fragment.compressor) if fragment.compressor and not (self._clear or channel.idle) else {}
            shapes = {name: tuple(theta.shape) for name, theta in zip(fragment.own, fragment.theta)}
            fragment.compressor = channel.compressor(self._local._made, shapes, self._local.keys) if shapes else None
            for name, residual in kept.items():
                assert fragment.compressor
                fragment.compressor.set_residual(name, residual * (channel.contributors / self._place[2]))
            self._place, self._renew, self._clear = places[channel.rank], False, False
        if renew or open_:
            channel.expect_anew()
        self._meeting = headers[0][-1]
        return open_

    def check_equal(self) -> None:
        """Collective."""
        check = zlib.crc32(repr((self._fragment.syncs, self._local._settings())).encode())
        for theta in self._fragment.theta:
            check = zlib.crc32(theta.numpy().data, check)
        if len({int(each) for each in self._channel.all_gather(torch.tensor([check]))}) > 1:
            raise Error(
                "the replicas differ in weights or settings: give all the same model and keys, leave the manager's "
                "init_sync=True, and load states of the same exchange on all replicas, or on none"
            )

    def exchange(self) -> bool:
        """Exchanges, as often as needed, and begins the next round. False if what was committed is an exchange that is not finite."""
        done, local, channel = True, self._local, self._channel
        for _ in range(_TRIES):
            flight = local._flight_of(self._fragment)
            try:
                if self._fragment.compressor:
                    with channel.timed(0):
                        flight.round = self._fragment.compressor.encode_slices(flight.changes, step=self._fragment.syncs)
                    with channel.timed(1):
                        flight.finite = channel.run(flight.round, 0) is State.DONE
                agreed = local._agree(flight)
            except Error:
                raise
            except Exception as error:
                last, committed = error, channel.give_up(error)
            else:
                last, committed = channel.manager.errored(), channel.manager.should_commit()
            if committed:
                done = local._finish(flight, *agreed)
                self._committed, self._finite = self._meeting, done
            else:
                self._pending = flight
            if not self.meet():
                return done
        raise RuntimeError(f"{_TRIES} exchanges in a row failed: {last or 'the quorum has too few replicas'}") from last
