"""Local steps: ranks train by themselves and exchange changes of weights."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import Error
from .._methods import Value, methods
from ..compare.comparison import did_you_mean
from ._channel import (
    AnyCompressor, AnyRound, Channel, Slices, all_parts, check_has_values, check_settings, check_type, host_buffer,
    residuals_of, saved_state, sum_of_residuals, trainable, whole_number,
)  # fmt: skip
from ._islands import Islands, in_fragments, local, reshard
from ._replicas import ManagedChannel, Replicas
from ._worker import Worker, twin_of
from .method import Memory, Own, PythonMethod, chosen


def _preset(name: str) -> tuple[str, dict[str, str]]:
    """A preset's method and outer optimizer, from the library's tables; without an entry there, DiLoCo's optimizer."""
    known = methods()
    if name not in (names := [*known["recipes"], *known["methods"]]):
        hint, recipes = did_you_mean(str(name), names, ";"), ", ".join(known["recipes"])
        raise Error(f"there is no preset or method '{name}'{hint} presets: {recipes}; others: see topknot.methods()")
    recipe = known["recipes"].get(name)
    method = recipe["method"] if recipe else name
    outer = {**known["recipes"]["diloco"]["settings"], **(recipe or known["methods"][name])["settings"]}
    prefix = "exchange.outer."
    return method, {key[len(prefix) :]: value for key, value in outer.items() if key.startswith(prefix)}


class _Fragment:
    """Parameters that are exchanged together, and of those that this rank exchanges, what it keeps."""

    def __init__(self, index: int, parameters: dict[str, torch.nn.Parameter], islands: Islands) -> None:
        self.index, self.parameters, self.owners = index, parameters, islands.owners(parameters)
        self.own = {name: p for name, p in parameters.items() if self.owners[name] == islands.place}
        self.theta = [host_buffer(local(p), torch.float32).copy_(local(p)) for p in self.own.values()]
        # Pinned copies of weights on a GPU, made at each exchange.
        self._weights = [host_buffer(local(p), torch.float32) if p.is_cuda else None for p in self.own.values()]
        self.momentum = [torch.zeros_like(t) for t in self.theta]
        self.compressor: Optional[AnyCompressor] = None  # None if this rank exchanges nothing
        self.syncs = 0

    def weights(self) -> list[torch.Tensor]:
        """This rank's, in float on the CPU."""
        pairs = zip(self._weights, self.own.values())
        return [local(p).float().contiguous() if here is None else here.copy_(local(p)) for here, p in pairs]

    def write(self, islands: Islands, alpha: float = 0.0) -> None:
        """Sets the model's weights to theta, or with alpha to a mean of both, on all ranks of the island."""
        for theta, x, parameter in zip(self.theta, self.weights() if alpha else self.theta, self.own.values()):
            local(parameter).copy_(theta - theta * alpha + x * alpha if alpha else theta)
        for name, parameter in self.parameters.items():
            islands.share(parameter, self.owners[name])


@dataclasses.dataclass
class Flight:
    """An exchange of a fragment that has begun."""

    fragment: _Fragment
    step: int  # after which it began
    changes: Slices
    before: Optional[torch.Tensor] = None  # the compressor's state, if the exchange is in the background
    round: Optional[AnyRound] = None
    finite: bool = True
    error: Optional[BaseException] = None


class LocalSteps:
    """Exchanges changes of weights instead of gradients (DiLoCo and similar methods; docs/local_steps.md). After `every`
    steps of its own, each rank sends the compressed change of its weights, and an outer optimizer applies the average.

    model: any module, with any optimizer. All ranks take rank 0's weights and buffers. DistributedDataParallel, or FSDP2's
        fully_shard(), over a group of ranks makes these an island, which steps together.
    preset: "diloco", "muloco" (for Muon as the optimizer), "sparseloco", or a method of `topknot.methods()` or an object
        (PythonMethod), by default with DiLoCo's outer optimizer.
    memory: as for CompressionHook.
    every: steps between two exchanges, counted by step().
    fragments: parts of the model that take turns, each once in `every` steps (Streaming DiLoCo): layers f, f + fragments, ...
    overlap: steps between an exchange's begin and its effect. It runs meanwhile in a thread, with a process group of its own.
    outer, outer_lr, outer_momentum: override the preset's outer optimizer, "nesterov" or "sgd".
    outer_alpha: the share of a rank's own weights in those that replace them; 0 takes the exchanged ones.
    optimizer: if given, a rank whose weights are not finite clears the optimizer's state.
    process_group: all ranks by default; of islands the ranks of equal place, or a 2-D mesh of (islands, ranks of an island).
    manager: a torchft.Manager in place of a process group: ranks are its replicas, which may die and come during the training.
    keys: the method's keys (density=, codec=, scope="model", ...).

    In an island each rank sends the changes of its shards. Parameters that all its ranks have are shared out among them, and
    one rank sends the changes of each.

    Each exchange averages batch norm's running statistics. If an exchange is not finite, as with a NaN in a rank's
    weights, all ranks discard it and return to the weights and statistics of the last one, and a warning gives the reason.
    With fragments, a rank whose weights are finite returns in that fragment only. Ten such exchanges in a row raise RuntimeError.
    Without `optimizer`, an optimizer that keeps a NaN causes them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preset: Union[str, PythonMethod] = "sparseloco",
        *,
        every: int,
        fragments: int = 1,
        overlap: int = 0,
        memory: Union[str, Memory, None] = None,
        outer: Optional[str] = None,
        outer_lr: Optional[float] = None,
        outer_momentum: Optional[float] = None,
        outer_alpha: float = 0.0,
        optimizer: Optional[torch.optim.Optimizer] = None,
        process_group: Union[dist.ProcessGroup, DeviceMesh, None] = None,
        manager: Any = None,
        keys: Optional[dict[str, Value]] = None,
        **more: Value,
    ) -> None:
        self.every = every = whole_number("every", every, 1)
        self.fragments, self.overlap = whole_number("fragments", fragments, 1), whole_number("overlap", overlap, 0)
        if every % fragments:
            raise Error(f"{fragments} fragments take turns of equal length: every must be a multiple of them, not {every}")
        if overlap >= every // fragments and overlap:
            raise Error(f"overlap={overlap}: exchanges begin {every // fragments} steps apart; it must be less")
        made, self.keys = chosen(preset, memory, {**(keys or {}), **more})
        method, own = _preset(preset if isinstance(preset, str) else "dense")
        made = method if isinstance(made, str) else made
        self.method, self._made = str(made), made
        self.outer = own["name"] if outer is None else outer
        self.outer_lr = float(own["lr"]) if outer_lr is None else outer_lr
        self.outer_momentum = float(own["momentum"]) if outer_momentum is None else outer_momentum
        if self.outer not in ("nesterov", "sgd"):
            raise Error(f"outer must be 'nesterov' or 'sgd', not '{self.outer}'")
        if not (isinstance(self.outer_lr, (int, float)) and 0 < self.outer_lr < math.inf):
            raise Error(f"outer_lr must be a number above 0, not {self.outer_lr!r}")
        if not (isinstance(self.outer_momentum, (int, float)) and 0 <= self.outer_momentum < 1):
            raise Error(f"outer_momentum must be at least 0, below 1, not {self.outer_momentum!r}")
        if not (isinstance(outer_alpha, (int, float)) and 0 <= outer_alpha <= 1):
            raise Error(f"outer_alpha must be from 0 to 1, not {outer_alpha!r}")
        self.outer_alpha = outer_alpha
        if self.keys.get("lr_inside"):
            raise Error("lr_inside is of gradients; what is exchanged here is a change of weights")
        if self.keys.get("device", "cpu") != "cpu":
            raise Error("device: local steps keep their state in the CPU's memory, where changes are compressed; leave it out")
        if manager is not None:
            for name, given in ("process_group", process_group), ("fragments", fragments > 1), ("overlap", overlap):
                if given:
                    raise Error(f"{name} does not go with manager, whose replicas exchange the whole model at once")
            if isinstance(made, Own):
                raise Error("a method in Python does not go with manager: its state could not follow the number of replicas")
        self.module, self._optimizer, self.manager = model, optimizer, manager
        channel = ManagedChannel(manager) if manager is not None else None
        self._islands = Islands(model, process_group, channel)
        module: torch.nn.Module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self._channel = self._islands.channel
        self._statistics = [
            getattr(part, name)
            for part in module.modules()
            if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.running_mean is not None
            for name in ("running_mean", "running_var")
        ]
        self._parameters = trainable(module)
        for name, parameter in self._parameters.items():
            check_type(parameter, f"parameter '{name}'")
        for name, buffer in module.named_buffers():
            check_has_values(buffer, f"buffer '{name}'")
        with torch.no_grad():
            for tensor in [] if channel else [*module.parameters(), *module.buffers()]:
                self._islands.take_first(tensor)
            parts = in_fragments(self._parameters, fragments) if fragments > 1 else [self._parameters]
            self._fragments = [_Fragment(index, part, self._islands) for index, part in enumerate(parts)]
            self._kept = [t.clone() for t in self._statistics]  # after the last exchange
        # What exchanges: with overlap a thread, with a group and a stream of its own.
        self._wire, self._worker, self._stream = self._channel, None, None
        if overlap:
            self._wire = Channel(twin_of(self._channel.group))
            self._worker = Worker(next(iter(self._parameters.values())).device)
            on_gpu = self._wire.device.type == "cuda"
            self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
            weakref.finalize(self, self._worker.tasks.put, None)
        for fragment in self._fragments:
            # Each fragment but the first has a copy of a method in Python, which counts its own exchanges.
            place = (self._wire.rank, self._wire.ranks) if fragment.index else None
            shapes = {name: tuple(theta.shape) for name, theta in zip(fragment.own, fragment.theta)}
            if shapes and not channel:
                fragment.compressor = self._wire.compressor(made, shapes, self.keys, place)
        self._numel = sum(theta.numel() for theta in self._all("theta"))
        self._flight: Optional[Flight] = None
        self._step = self._discarded = 0
        self._replicas = Replicas(self, channel) if channel else None

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent to other islands."""
        return self._channel.bytes_sent

    @property
    def bits_per_parameter_step(self) -> float:
        """Of the parameters whose changes this rank sends."""
        return 8 * self.bytes_sent / self._numel / self._step if self._step and self._numel else 0.0

    def _all(self, what: str) -> list[torch.Tensor]:
        return [tensor for fragment in self._fragments for tensor in getattr(fragment, what)]

    def _due(self) -> Optional[_Fragment]:
        """The fragment that is sent after this step."""
        turn, rest = divmod(self._step, self.every // self.fragments)
        return self._fragments[(turn - 1) % self.fragments] if turn and not rest else None

    def step(self, *_: Any) -> bool:
        """Call after the optimizer's step, or once give it to optimizer.register_step_post_hook(). True if an exchange has ended:
        the ranks now have the same weights, but for those of other fragments and of outer_alpha."""
        self._step += 1
        ended = self._flight is not None and self._step >= self._flight.step + self.overlap
        if ended:
            self._receive()
        if fragment := self._due():
            if self.overlap:
                self._send(fragment)
            else:
                self._exchange_now(fragment)
                ended = True
        return ended

    @torch.no_grad()
    def _exchange_now(self, fragment: _Fragment) -> bool:
        if self._replicas:
            return self._replicas.exchange()
        self._send(fragment)
        return self._receive()

    @torch.no_grad()
    def sync(self) -> bool:
        """Exchanges all fragments now, as after the last step of a training: all ranks then have the same weights. False if an
        exchange was discarded. Collective."""
        done = self._receive() if self._flight else True
        turns = self._due() if self.fragments > 1 or self.overlap else None  # which step() has exchanged
        for fragment in self._fragments:
            if fragment is not turns:
                done &= self._exchange_now(fragment)
        for fragment in self._fragments if self.outer_alpha else []:
            fragment.write(self._islands)
        reshard(self.module)
        return done

    @torch.no_grad()
    def _send(self, fragment: _Fragment) -> None:
        self._begin(self._flight_of(fragment))

    def _flight_of(self, fragment: _Fragment) -> Flight:
        begin_s = time.perf_counter()
        changes = {i: theta - here for i, (theta, here) in enumerate(zip(fragment.theta, fragment.weights()))}
        if self._islands.inside and self._islands.any(not all(bool(c.isfinite().all()) for c in changes.values())):
            for change in changes.values():  # no rank's method sees a part of what is discarded
                change.fill_(math.nan)
        taken_s = time.perf_counter() - begin_s
        self._channel.seconds[0] += taken_s
        self._channel.seconds[3] += taken_s
        return Flight(fragment, self._step, changes)

    def _begin(self, flight: Flight) -> None:
        if self._worker is None:
            begin_s = time.perf_counter()
            self._exchange(flight)
            self._channel.seconds[3] += time.perf_counter() - begin_s
            self._flight = flight
            return

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream):
                    if flight.fragment.compressor:
                        flight.before = saved_state(flight.fragment.compressor)
                    self._exchange(flight)
            except BaseException as error:
                flight.error = error
                # Without the group, the other ranks end with an error too.
                group, self._wire.group = self._wire.group, None
                dist.destroy_process_group(group)

        self._flight = flight
        self._worker.add(run)

    def _exchange(self, flight: Flight) -> None:
        fragment = flight.fragment
        if fragment.compressor:
            flight.round, flight.finite = self._wire.begin(fragment.compressor, flight.changes, fragment.syncs, fragment.index)

    def _landed(self) -> Optional[Flight]:
        """What is on its way, when the ranks have exchanged it."""
        if self._worker and self._flight:
            self._worker.wait()
            if self._flight.error:
                raise RuntimeError(
                    f"rank {dist.get_rank()}: the exchange that began after step {self._flight.step} failed: {self._flight.error}; if a "
                    "rank has ended, start all again from their last states"
                ) from self._flight.error
        return self._flight

    @torch.no_grad()
    def _receive(self) -> bool:
        begin_s = time.perf_counter()
        flight = self._landed()
        assert flight is not None
        self._flight = None
        done = self._finish(flight, *self._agree(flight))
        self._channel.seconds[3] += time.perf_counter() - begin_s
        if self._wire is not self._channel:
            self._channel.count(self._wire.bytes_sent, self._wire.bytes_received)
            self._channel.seconds[:3] = [a + b for a, b in zip(self._channel.seconds, self._wire.seconds[:3])]
            self._wire.bytes_sent = self._wire.bytes_received = 0
            self._wire.seconds = [0.0] * 4
        return done

    def _agree(self, flight: Flight) -> tuple[list[torch.Tensor], list[int]]:
        """The rest of an exchange, after which a rank needs no other: the statistics' averages and, if it is to be discarded, the
        ranks whose weights are not finite. Nothing has changed here. Collective."""
        if self._islands.any(not flight.finite):
            flight.finite = False
            return [], self._islands.without_flag(all(bool(local(p).isfinite().all()) for p in self._parameters.values()))
        # A step that a GradScaler skips, or that came after the changes were sent, may have spoiled them.
        spoiled = self._islands.any(not all(bool(t.isfinite().all()) for t in self._statistics)) if self._statistics else False
        sound = self._kept if self._statistics and self._channel.any(spoiled) else self._statistics
        averages = [t.clone() for t in sound]
        for average in averages:
            self._islands.average(average)
        return averages, []

    def _finish(self, flight: Flight, averages: list[torch.Tensor], bad: list[int]) -> bool:
        """Takes what was exchanged, or discards it."""
        fragment, done = flight.fragment, flight.finite
        if flight.round:
            self._wire.end(flight.round, flight.changes, done)
        fragment.syncs += 1
        if done:
            for theta, momentum, change in zip(fragment.theta, fragment.momentum, flight.changes.values()):
                self._outer_step(theta, momentum, change)
            self._kept = averages
            for statistics, kept in zip(self._statistics, self._kept):
                statistics.copy_(kept)
            fragment.write(self._islands, self.outer_alpha)
        else:
            self._discard(fragment, bad)
        reshard(self.module)
        self._discarded = 0 if done else self._discarded + 1
        if self._discarded >= 10:
            raise RuntimeError(
                "ten exchanges in a row were discarded, since weights were not finite; the warnings name the ranks"
            )
        return done

    def _outer_step(self, theta: torch.Tensor, momentum: torch.Tensor, change: torch.Tensor) -> None:
        # Each product and sum is rounded, as in train; add_(x, alpha=...) may fuse them.
        if self.outer_momentum == 0:
            theta -= change * self.outer_lr
            return
        momentum *= self.outer_momentum
        momentum += change
        if self.outer == "nesterov":
            theta -= (change + momentum * self.outer_momentum) * self.outer_lr
        else:
            theta -= momentum * self.outer_lr

    def _discard(self, fragment: _Fragment, bad: list[int]) -> None:
        finite = all(bool(local(p).isfinite().all()) for p in self._parameters.values())
        reason = f"weights of rank {', '.join(map(str, bad))} are not finite" if bad else "a change of the weights is too large"
        number = sum(each.syncs for each in self._fragments)
        warnings.warn(f"exchange {number} is discarded: {reason}; all ranks go back to those of the last one")
        unsound = self._islands.any(not finite)
        if unsound and self._optimizer is not None:
            self._optimizer.state.clear()
        for each in self._fragments if unsound else [fragment]:
            each.write(self._islands)
        for statistics, kept in zip(self._statistics, self._kept):
            statistics.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, weights included, under a key that names the rank. Each rank saves its own, at any step,
        together with its optimizer's state and its buffers. What is on its way is in it too, and is sent anew after a load."""
        flight = self._landed()
        states = [
            saved_state(f.compressor) if f.compressor and not (flight and f is flight.fragment) else None for f in self._fragments
        ]
        if flight:
            states[flight.fragment.index] = flight.before
        return self._channel.named_state(
            settings=self._settings(),
            step=self._step,
            syncs=[fragment.syncs for fragment in self._fragments],
            bytes_sent=self._channel.bytes_sent,
            weights=[local(p).clone() for p in self._parameters.values()],
            theta=[t.clone() for t in self._all("theta")],
            momentum=[m.clone() for m in self._all("momentum")],
            statistics=[t.clone() for t in self._kept],
            states=states,
            flight=(flight.fragment.index, flight.step, [c.clone() for c in flight.changes.values()]) if flight else None,
        )

    def _settings(self) -> dict[str, Any]:
        outer = {"outer": self.outer, "outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        # What earlier versions did not have is left out where it is as in these.
        new: list[tuple[str, Any, Any]] = [
            ("fragments", self.fragments, 1),
            ("overlap", self.overlap, 0),
            ("outer_alpha", self.outer_alpha, 0),
        ]
        new.append(("place", f"{self._islands.place} of {self._islands.count}", "0 of 1"))
        more = {name: value for name, value, before in new if value != before}
        return {"method": self.method, **self.keys, "every": self.every, **outer, **more}

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Makes this rank's state from the states of all ranks of a run with another number of ranks, without islands and with
        nothing on its way. Rank r has the weights of rank r, or of r modulo their number, and of the residuals the sum of those of
        ranks r, r + ranks, ..., scaled so that all ranks' have the same average. Other state of a method starts anew."""
        parts = all_parts(states)
        before, first = len(parts), parts[self._channel.rank % len(parts)]
        check_settings(first, self._settings())
        if self._islands.count > 1 or any(part.get("flight") for part in parts):
            raise Error("states of islands, or of exchanges on their way, are of as many ranks as there were")
        if not all(torch.equal(a, b) for part in parts for a, b in zip(part["theta"], first["theta"])):
            raise Error("the states are of different steps, or of different runs: the weights of the last exchange differ")
        if isinstance(self._made, Own):
            self._made.check_merges()
        merged = []
        for fragment in self._fragments:
            shapes = {name: tuple(theta.shape) for name, theta in zip(fragment.own, fragment.theta)}
            old = []  # residuals, by rank
            for rank in range(self._channel.rank, before, self._channel.ranks):
                saved = parts[rank]["states"] if "states" in parts[rank] else [parts[rank]["state"]]
                compressor = self._wire.compressor(self._made, shapes, self.keys, (rank, before))
                compressor.load(saved[fragment.index].numpy())
                old.append(residuals_of(compressor))
            made = self._wire.compressor(self._made, shapes, self.keys, (self._wire.rank, self._wire.ranks))
            for name, residual in sum_of_residuals(old, self._channel.ranks / before).items():
                made.set_residual(name, residual.numpy())
            merged.append(saved_state(made))
        return self._channel.named_state(**{**first, "states": merged})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state_dict() of the same rank, number of ranks, method and settings, and sets the model's weights. If an
        exchange was on its way, all ranks must load."""
        state = self._channel.own_state(state)
        check_settings(state, self._settings())
        theta, momentum = self._all("theta"), self._all("momentum")
        if [t.shape for t in state["theta"]] != [t.shape for t in theta]:
            raise Error("the state is of a model of other parameters")
        # The weights themselves may be NaN or infinite: the next exchange discards them.
        for what in ("theta", "momentum", "statistics"):
            if not all(bool(t.isfinite().all()) for t in state[what]):
                raise Error(f"the state's {what} is not finite, so no exchange could work; load an earlier one")
        if (flight := self._landed()) and flight.round:
            flight.round.discard()
        self._flight = None
        if self._wire is not self._channel:
            self._wire.bytes_sent = self._wire.bytes_received = 0
        # Earlier versions had one compressor.
        for fragment, saved in zip(self._fragments, state["states"] if "states" in state else [state["state"]]):
            if fragment.compressor:
                fragment.compressor.load(saved.numpy())
        own = [*map(local, self._parameters.values()), *theta, *momentum, *self._kept]
        with torch.no_grad():
            for to, from_ in zip(own, [*state["weights"], *state["theta"], *state["momentum"], *state["statistics"]]):
                to.copy_(from_)
        reshard(self.module)
        self._step, self._channel.bytes_sent = state["step"], state["bytes_sent"]
        for fragment, syncs in zip(self._fragments, state["syncs"] if "states" in state else [state["syncs"]]):
            fragment.syncs = syncs
        if self._replicas:
            self._replicas.check_equal()
        if saved := state.get("flight"):
            index, step, changes = saved
            self._begin(Flight(self._fragments[index], step, {i: change.clone() for i, change in enumerate(changes)}))
