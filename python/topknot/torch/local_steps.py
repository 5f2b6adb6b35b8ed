"""Local steps: ranks train by themselves and exchange changes of weights."""

from __future__ import annotations

import difflib
import math
import time
import warnings
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import Error
from .._methods import Value, methods
from ._channel import Channel, check_has_values, check_settings, check_type, host_buffer, saved_state, trainable, whole_number
from .method import Memory, PythonMethod, chosen


def _preset(name: str) -> tuple[str, dict[str, str]]:
    """A preset's method and outer optimizer, from the library's tables; without an entry there, DiLoCo's optimizer."""
    known = methods()
    if name not in (names := [*known["recipes"], *known["methods"]]):
        near = difflib.get_close_matches(str(name), names, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ";"
        recipes = ", ".join(known["recipes"])
        raise Error(f"there is no preset or method '{name}'{hint} presets: {recipes}; others: see topknot.methods()")
    recipe = known["recipes"].get(name)
    method = recipe["method"] if recipe else name
    outer = {**known["recipes"]["diloco"]["settings"], **(recipe or known["methods"][name])["settings"]}
    prefix = "exchange.outer."
    return method, {key[len(prefix) :]: value for key, value in outer.items() if key.startswith(prefix)}


class LocalSteps:
    """Exchanges changes of weights instead of gradients (DiLoCo and similar methods; docs/local_steps.md). After `every`
    steps of its own, each rank sends the compressed change of its weights, and an outer optimizer applies the average.

    model: any module that is not wrapped in DistributedDataParallel, with any optimizer. All ranks take rank 0's weights
        and buffers.
    preset: "diloco", "muloco" (for Muon as the optimizer), "sparseloco", or a method of `topknot.methods()` or an object
        (PythonMethod), by default with DiLoCo's outer optimizer.
    memory: as for CompressionHook.
    every: steps between two exchanges, counted by step().
    outer, outer_lr, outer_momentum: override the preset's outer optimizer, "nesterov" or "sgd".
    optimizer: if given, a rank whose weights are not finite clears the optimizer's state.
    keys: the method's keys (density=, codec=, scope="model", ...).

    Each exchange averages batch norm's running statistics. If an exchange is not finite, as with a NaN in a rank's
    weights, all ranks discard it and return to the weights and statistics of the last one, and a warning gives the reason.
    Ten such exchanges in a row raise RuntimeError. Without `optimizer`, an optimizer that keeps a NaN causes them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preset: Union[str, PythonMethod] = "sparseloco",
        *,
        every: int,
        memory: Union[str, Memory, None] = None,
        outer: Optional[str] = None,
        outer_lr: Optional[float] = None,
        outer_momentum: Optional[float] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        process_group: Union[dist.ProcessGroup, DeviceMesh, None] = None,
        keys: Optional[dict[str, Value]] = None,
        **more: Value,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise Error("LocalSteps takes the model itself: DistributedDataParallel would exchange every gradient")
        every = whole_number("every", every, 1)
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
        self.every = every
        if self.keys.get("lr_inside"):
            raise Error("lr_inside is of gradients; what is exchanged here is a change of weights")
        if self.keys.get("device", "cpu") != "cpu":
            raise Error("device: local steps keep their state in the CPU's memory, where changes are compressed; leave it out")
        self.module, self._optimizer = model, optimizer
        self._statistics = [
            getattr(module, name)
            for module in model.modules()
            if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.running_mean is not None
            for name in ("running_mean", "running_var")
        ]
        self._channel = Channel(process_group)
        self._parameters = trainable(model)
        for name, parameter in self._parameters.items():
            check_type(parameter, f"parameter '{name}'")
        for name, buffer in model.named_buffers():
            check_has_values(buffer, f"buffer '{name}'")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self._broadcast(tensor)
            self._theta = [host_buffer(p, torch.float32).copy_(p) for p in self._parameters.values()]
            # Pinned copies of weights on a GPU, made at each exchange.
            self._weights = [host_buffer(p, torch.float32) if p.is_cuda else None for p in self._parameters.values()]
            self._kept = [t.clone() for t in self._statistics]  # after the last exchange
        self._momentum = [torch.zeros_like(t) for t in self._theta]
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._compressor = self._channel.compressor(made, shapes, self.keys)
        self._step = self._syncs = self._discarded = 0

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent."""
        return self._channel.bytes_sent

    @property
    def bits_per_parameter_step(self) -> float:
        count = sum(t.numel() for t in self._theta)
        return 8 * self.bytes_sent / count / self._step if self._step else 0.0

    def step(self) -> bool:
        """Call after the optimizer's step. True if the ranks have exchanged and now have the same weights."""
        self._step += 1
        if self._step % self.every:
            return False
        self.sync()
        return True

    @torch.no_grad()
    def sync(self) -> bool:
        """Exchanges now, as after the last step of a training. False if the exchange was discarded. Collective."""
        begin_s = time.perf_counter()
        changes = {}
        for index, (theta, weights, parameter) in enumerate(zip(self._theta, self._weights, self._parameters.values())):
            here = parameter.detach().float().contiguous() if weights is None else weights.copy_(parameter)
            changes[index] = theta - here
        done = self._channel.average(self._compressor, changes, self._syncs, "sync")
        self._syncs += 1
        if done:
            for theta, momentum, change in zip(self._theta, self._momentum, changes.values()):
                self._outer_step(theta, momentum, change)
            for statistics in self._statistics:
                self._average(statistics)
            self._kept = [t.clone() for t in self._statistics]
        else:
            self._discard()
        for theta, parameter in zip(self._theta, self._parameters.values()):
            parameter.copy_(theta)
        self._channel.seconds[3] += time.perf_counter() - begin_s
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

    def _discard(self) -> None:
        sound = all(bool(p.isfinite().all()) for p in self._parameters.values())
        finite = [bool(other.item()) for other in self._channel.all_gather(torch.tensor([float(sound)]))]
        bad = ", ".join(str(rank) for rank, each in enumerate(finite) if not each)
        reason = f"weights of rank {bad} are not finite" if bad else "a change of the weights is too large"
        warnings.warn(f"exchange {self._syncs} is discarded: {reason}; all ranks go back to those of the last one")
        if not sound and self._optimizer is not None:
            self._optimizer.state.clear()
        for statistics, kept in zip(self._statistics, self._kept):
            statistics.copy_(kept)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0 or (tensor.numel() > 1 and 0 in tensor.stride()):  # an expanded value
            return
        there = tensor.detach().to(self._channel.device).contiguous()
        as_bytes = there.reshape(-1).view(torch.uint8)  # backends support different types
        dist.broadcast(as_bytes, src=dist.get_global_rank(self._channel.group, 0), group=self._channel.group)
        tensor.copy_(there)

    def _average(self, statistics: torch.Tensor) -> None:
        there = statistics.detach().to(self._channel.device).double().contiguous() / self._channel.ranks
        dist.all_reduce(there, group=self._channel.group)
        statistics.copy_(there)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, weights included, under a key that names the rank. Each rank saves its own, at any step,
        together with its optimizer's state and its buffers."""
        return self._channel.named_state(
            settings=self._settings(),
            step=self._step,
            syncs=self._syncs,
            bytes_sent=self._channel.bytes_sent,
            weights=[p.detach().clone() for p in self._parameters.values()],
            theta=[t.clone() for t in self._theta],
            momentum=[m.clone() for m in self._momentum],
            statistics=[t.clone() for t in self._kept],
            state=saved_state(self._compressor),
        )

    def _settings(self) -> dict[str, Any]:
        outer = {"outer": self.outer, "outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        return {"method": self.method, **self.keys, "every": self.every, **outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state_dict() of the same rank, number of ranks, method and settings, and sets the model's weights."""
        state = self._channel.own_state(state)
        check_settings(state, self._settings())
        if [t.shape for t in state["theta"]] != [t.shape for t in self._theta]:
            raise Error("the state is of a model of other parameters")
        # The weights themselves may be NaN or infinite: the next exchange discards them.
        for what in ("theta", "momentum", "statistics"):
            if not all(bool(t.isfinite().all()) for t in state[what]):
                raise Error(f"the state's {what} is not finite, so no exchange could work; load an earlier one")
        self._compressor.load(state["state"].numpy())
        own = [*self._parameters.values(), *self._theta, *self._momentum, *self._kept]
        with torch.no_grad():
            for to, from_ in zip(own, [*state["weights"], *state["theta"], *state["momentum"], *state["statistics"]]):
                to.copy_(from_)
        self._step, self._syncs, self._channel.bytes_sent = state["step"], state["syncs"], state["bytes_sent"]
