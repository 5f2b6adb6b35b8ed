"""A communication hook that compresses the gradients of DistributedDataParallel."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from .. import Error, State
from .._methods import Value
from ._channel import (
    AnyCompressor, AnyRound, Channel, Place, Shapes, Slices, all_parts, check_settings, check_type, device_for, in_place,
    residuals_of, saved_state, sum_of_residuals, trainable, warn_of_adam, whole_number,
)  # fmt: skip
from ._worker import Worker, twin_of
from .method import Memory, Own, PythonMethod, chosen


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of its gradient in a bucket, outermost first: 0, 2, 3, 1 for channels_last. The bucket has the order of
    the tensor in memory if that has neither gaps nor overlaps, else it is row-major."""
    rows, strides = [*range(tensor.dim())], tensor.stride()
    order = sorted(rows, key=lambda d: -strides[d])
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else rows


class _Compressors:
    """The hook's compressors. Scope "tensor" has one for all parameters, scope "bucket" one for each bucket as a vector, made
    when the bucket first comes. If buckets change, as after a load, residuals follow the parameters' names."""

    def __init__(self, method: Union[str, Own], shapes: Shapes, channel: Channel, keys: dict[str, Value]) -> None:
        self._buckets = keys.get("scope") == "bucket"
        self._method, self._shapes, self.channel = method, shapes, channel
        self._keys = {**keys, "scope": "model"} if self._buckets else keys
        self._made: dict[tuple[str, ...], AnyCompressor] = {}
        self._residuals: dict[str, np.ndarray] = {}  # of parameters that are in no compressor yet
        self._new(tuple(shapes))  # refuses wrong keys now

    def _new(self, names: Sequence[str], state: Optional[torch.Tensor] = None, place: Optional[Place] = None) -> AnyCompressor:
        self._refuse_unknown(names)
        made = self.channel.compressor(self._method, {name: self._shapes[name] for name in names}, self._keys, place)
        if state is not None:
            made.load(state.numpy())
        return made

    def of(self, names: Sequence[str]) -> AnyCompressor:
        """The compressor for a round of these parameters, in this order."""
        key = tuple(names) if self._buckets else tuple(self._shapes)
        if key not in self._made:
            for other in [other for other in self._made if set(other) & set(key)]:
                self._residuals.update(residuals_of(self._made.pop(other)))
            made = self._new(key)
            for name in set(key) & set(self._residuals):
                made.set_residual(name, self._residuals.pop(name))
            self._made[key] = made
        return self._made[key]

    def residual(self, name: str) -> Optional[np.ndarray]:
        """None if the method has no residual, or if the parameter's bucket has not come yet."""
        if name not in self._shapes:
            raise Error(f"there is no tensor '{name}'")
        compressor = next((c for key, c in self._made.items() if name in key), None)
        return compressor.residual(name) if compressor is not None else self._residuals.get(name)

    def undo(self, step: int) -> None:
        for compressor in self._made.values():
            compressor.undo(step)

    def save(self) -> dict[str, Any]:
        if not self._made and isinstance(self._method, Own):  # its state before the first compressed step
            self.of(tuple(self._shapes))
        return {
            "parts": [(key, saved_state(compressor)) for key, compressor in self._made.items()],
            "owed": {name: torch.from_numpy(residual.copy()) for name, residual in self._residuals.items()},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Changes nothing if it raises Error."""
        residuals = {name: tensor.numpy().copy() for name, tensor in saved["owed"].items()}
        made = {tuple(names): self._new(names, state) for names, state in saved["parts"]}
        self._refuse_unknown([*residuals])
        self._made, self._residuals = made, residuals

    def sum_of(self, states: Sequence[tuple[int, dict[str, Any]]], before: int) -> dict[str, Any]:
        """Merges what save() gave on some of `before` ranks: the sum of their residuals, times ranks / before."""
        if isinstance(self._method, Own):
            self._method.check_merges()
        ranks = []
        for rank, saved in states:
            ranks.append({name: tensor.numpy() for name, tensor in saved["owed"].items()})
            for names, state in saved["parts"]:
                ranks[-1].update(residuals_of(self._new(names, state, place=(rank, before))))
        return {"parts": [], "owed": sum_of_residuals(ranks, self.channel.ranks / before)}

    def _refuse_unknown(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in self._shapes]:
            raise Error(f"the state has a parameter '{unknown[0]}', which the model has not")


def _unpacked(future: "torch.futures.Future[Any]") -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value


class _Uncopied:
    """The hook's state in DistributedDataParallel, which copies it with the model but registers no hook for the copy."""

    def __deepcopy__(self, _: dict[int, Any]) -> _Uncopied:
        warnings.warn(
            "a copy of this DistributedDataParallel would train uncompressed; give the copy a CompressionHook of its own, or "
            "copy ddp.module"
        )
        return self


class _Bucket(NamedTuple):
    step: int
    number: int
    last: bool
    buffer: torch.Tensor
    parameters: list[torch.Tensor]
    ready: Optional[torch.cuda.Event]  # on a GPU, comes after the gradients are computed
    future: torch.futures.Future[Any]


class Times(NamedTuple):
    """Mean times of the compressed steps, in seconds."""

    steps: int
    encode_s: float  # selection and coding, with copies of the gradients
    exchange_s: float  # collectives and decoding, with waiting for slower ranks
    write_s: float  # writing of averages and residuals
    exposed_s: float  # the part of these that the backward pass waits for after its last gradient

    def __str__(self) -> str:
        parts = (f"{name[:-2]} {1000 * value:.1f} ms" for name, value in self._asdict().items() if name != "steps")
        return f"a step, the mean of {self.steps}: {', '.join(parts)}"


class CompressionHook:
    """Compresses the gradients of a DistributedDataParallel model; it registers itself as the model's communication hook.

    ddp: the model, before its first backward pass and without another hook.
    method, keys: as in `topknot.methods()`: "topk" with density=0.001, "powersgd" with rank=4, ... Or, without keys, an
        object with compress() and decompress() (PythonMethod). Two keys differ here:
        scope: "tensor", the default, compresses each parameter by itself; "bucket", the default of "dense" with values="int8" or
            another coding, each bucket as one vector, so that entries of small and large layers compete. With "bucket" the first dense_steps steps after a load_state_dict(), two at
            most, are dense again, and residuals follow the parameters' names.
        device: "cpu", the parameters' GPU, or "auto", the default: the GPU if the library has CUDA and kernels for the
            method. Attribute `device` has the choice.
    memory: the library's key; beside an object "residual", the default, "none", or a Memory.
    warmup, warmup_steps: densities of the first compressed steps, each for warmup_steps steps.
    dense_steps: number of first steps that are averaged uncompressed. DistributedDataParallel needs two to put its buckets
        into the order of the gradients; before that, nothing overlaps.
    scaler: the GradScaler, if any. Residuals are then of unscaled gradients, and a step that it skips changes nothing. A
        step has one backward pass with an exchange (accumulate under no_sync()). The method's state takes twice its memory,
        three times during a step.
    optimizer: gives the learning rate for key lr_inside. A warning tells if the method does not suit the optimizer.

    If a gradient is not finite on one rank, its whole bucket becomes NaN on all ranks, and the bucket's residuals stay as
    they were. An error on one rank ends the exchanges of all.

    Works with no_sync(), static_graph, find_unused_parameters (a parameter that no rank used, or whose gradients are zeros,
    keeps its residual), clipping between backward() and step(), parameters of any memory format.
    """

    def __init__(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        method: Union[str, PythonMethod] = "topk",
        *,
        memory: Union[str, Memory, None] = None,
        warmup: Sequence[float] = (),
        warmup_steps: int = 1,
        dense_steps: int = 2,
        scaler: Optional[GradScaler] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        keys: Optional[dict[str, Value]] = None,
        **more: Value,
    ) -> None:
        if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            raise Error(f"the model must be a DistributedDataParallel, not a {type(ddp).__name__}")
        dynamo = getattr(getattr(torch, "_dynamo", None), "config", None)
        if getattr(dynamo, "optimize_ddp", None) == "python_reducer":
            raise Error(
                "with torch._dynamo.config.optimize_ddp = 'python_reducer' PyTorch ignores what a hook returns; use True or False"
            )
        made, self.keys = chosen(method, memory, {**(keys or {}), **more})
        self.method, self._made = str(made), made
        self._each = bool(getattr(ddp, "find_unused_parameters", False))  # a round for each parameter
        if made == "dense" and str(self.keys.get("values", "fp32")) not in ("fp32", "bf16") and not self._each:
            self.keys = {"scope": "bucket", "dense_1d": False, **self.keys}  # all of a bucket as one vector
        if warmup and isinstance(made, Own):
            raise Error("warmup has densities for the library's methods; an object counts its steps itself")
        scope = self.keys.get("scope", "tensor")
        if scope not in ("tensor", "bucket"):
            raise Error(f"scope: buckets come one by one, so it is 'tensor' or 'bucket', not '{scope}'")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            self.keys["undo"] = True
        self._dense_until = self.dense_steps = whole_number("dense_steps", dense_steps, 0)
        self.warmup, self.warmup_steps = tuple(warmup), whole_number("warmup_steps", warmup_steps, 1)
        if any(not 0 < density <= 1 for density in warmup):
            raise Error("warmup: a density must be above 0, at most 1")
        if self.keys.get("lr_inside") and optimizer is None:
            raise Error("lr_inside: the learning rate is the optimizer's; give optimizer=")
        self.optimizer = optimizer
        warn_of_adam(made, optimizer)
        if self._each and scope == "bucket":
            raise Error("scope: with find_unused_parameters each parameter has a message of its own; remove scope='bucket'")
        parameters = trainable(ddp.module)
        for name, parameter in parameters.items():
            check_type(parameter, f"parameter '{name}'")
        self._names = {id(p): name for name, p in parameters.items()}
        # Gradients keep their order in the buckets: a copy of channels_last to rows and back takes longer than compression.
        self._layouts = {name: (p.stride(), _memory_order(p)) for name, p in parameters.items()}
        shapes = {name: tuple(p.shape[d] for d in self._layouts[name][1]) for name, p in parameters.items()}
        group = ddp.process_group
        self.device = device_for(made, self.keys, parameters.values(), Channel(group))
        self._compressors = _Compressors(made, shapes, Channel(group), {**self.keys, "device": self.device})
        self._step = -1
        self._skipped: set[int] = set()  # steps with a bucket that was not finite
        self._scale = 1.0
        self.skipped_steps = 0
        """Steps whose averages were not finite."""
        self._ddp = weakref.ref(ddp)
        self._timed_steps, self._last_call = 0, 0.0
        self._error: Optional[Exception] = None  # after which this rank exchanges nothing more
        # PyTorch checks a hook's annotations against its classes, but here annotations are strings; a lambda has none.
        ddp.register_comm_hook(_Uncopied(), lambda state, bucket: self._hook(bucket))
        # The hook's thread has its own group, since other threads use the model's at the same time.
        self._channel = self._compressors.channel = Channel(twin_of(group))
        self._pinned: dict[int, torch.Tensor] = {}  # by bucket: copies of gradients on a GPU
        self._worker = Worker(next(iter(parameters.values())).device)
        weakref.finalize(self, self._worker.tasks.put, None)

    @property
    def module(self) -> torch.nn.Module:
        """The DistributedDataParallel model."""
        ddp = self._ddp()
        if ddp is None:
            raise Error("the DistributedDataParallel model is gone; keep a reference to it")
        return ddp

    @property
    def step(self) -> int:
        """Number of backward passes with an exchange."""
        return self._step + 1

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent, dense steps included."""
        return self._channel.bytes_sent

    @property
    def times(self) -> Times:
        """Times of this process's steps."""
        self._settle()
        return Times(self._timed_steps, *(seconds / max(1, self._timed_steps) for seconds in self._channel.seconds))

    def residual(self, name: str) -> Optional[torch.Tensor]:
        """What this rank adds to the parameter's next gradient: what it has not sent, times feedback_decay. None if the
        method has no residual."""
        self._settle()
        found = self._compressors.residual(name)
        if found is None:
            return None
        _, order = self._layouts[name]
        return torch.from_numpy(found).permute([order.index(d) for d in range(len(order))])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under a key that names the rank. Each rank saves its own, between backward passes."""
        self._settle()
        state, sent = self._compressors.save(), self._channel.bytes_sent
        return self._channel.named_state(settings=self._settings(), step=self._step, bytes_sent=sent, state=state)

    def _settings(self) -> dict[str, Any]:
        return {"method": self.method, **self.keys, "warmup": [*self.warmup], "warmup_steps": self.warmup_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state_dict() of the same rank, number of ranks, method and keys. merge_state_dicts() makes one from the
        states of another number of ranks."""
        self._settle()
        state = self._channel.own_state(state, "; of another number of ranks give merge_state_dicts() all states")
        check_settings(state, self._settings())
        self._compressors.load(state["state"])
        self._step, self._channel.bytes_sent = state["step"], state["bytes_sent"]
        if self.keys.get("scope") == "bucket":  # until DistributedDataParallel has its final buckets again
            self._dense_until = self._step + 1 + min(2, self.dense_steps)

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Makes this rank's state from the states of all ranks of a run with another number of ranks. It has the sum of the
        residuals of ranks rank, rank + ranks, ..., scaled so that the residuals of all ranks have the same average. Other
        state of a method (velocities, thresholds) starts anew."""
        self._settle()
        parts = all_parts(states)
        before = len(parts)
        mine = [(index, parts[index]["state"]) for index in range(self._channel.rank, before, self._channel.ranks)]
        return self._channel.named_state(**{**parts[0], "state": self._compressors.sum_of(mine, before)})

    # _hook() runs in the thread of the backward pass, _exchange() in the worker's thread, at the same time. Buckets are
    # exchanged one after the other, in the same order on all ranks.

    def _hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(f"an exchange of this rank failed: {self._error}; it exchanges nothing more") from self._error
        if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
            raise Error("this reducer gives hooks no buckets (torch._dynamo.config.optimize_ddp); use DDP's own")
        buffer = bucket.buffer()
        check_type(buffer, "a bucket of gradients")
        parameters = list(bucket.parameters())
        if buffer.dim() != 1 or not buffer.is_contiguous() or sum(p.numel() for p in parameters) != buffer.numel():
            raise Error("a bucket is not one row of its parameters' gradients")
        if bucket.index() == 0:
            self._settle()
            self._step += 1
            if self.scaler is not None:
                self._scale = float(self.scaler.get_scale())
        ready = torch.cuda.current_stream().record_event() if buffer.is_cuda else None  # type: ignore[no-untyped-call]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        task = _Bucket(self._step, bucket.index(), bucket.is_last(), buffer, parameters, ready, future)
        self._last_call = time.perf_counter()
        self._worker.add(lambda: self._exchange(task))
        return future.then(_unpacked)

    def _exchange(self, bucket: _Bucket) -> None:
        if self._error is not None:
            bucket.future.set_result(self._error)
            return
        try:
            if bucket.ready is not None:
                bucket.ready.synchronize()
            with torch.no_grad():
                if bucket.step < self._dense_until:
                    self._channel.sum(bucket.buffer.div_(self._channel.ranks))
                else:
                    self._compressed(bucket)
                    if bucket.last:
                        self._channel.seconds[3] += time.perf_counter() - self._last_call
                        self._timed_steps += 1
            bucket.future.set_result(bucket.buffer)
        except BaseException as raised:
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            # Another message would meet one of another bucket. Without the group, the other ranks end with an error too.
            self._error = error
            bucket.future.set_result(error)  # backward() raises a RuntimeError with its text
            group, self._channel.group = self._channel.group, None
            dist.destroy_process_group(group)
            del group

    def _density(self, step: int) -> float:
        turn = (step - self.dense_steps) // self.warmup_steps
        return self.warmup[turn] if turn < len(self.warmup) else 0.0

    def _compressed(self, bucket: _Bucket) -> None:
        channel = self._channel
        with channel.timed(0):
            here = in_place(bucket.buffer, self.device, self._pinned, bucket.number)
            names = [self._names[id(parameter)] for parameter in bucket.parameters]
            compressor = self._compressors.of(names)
            slices: Slices = {}
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for name, parameter, gradient in zip(names, bucket.parameters, here.split_with_sizes(sizes)):
                strides, order = self._layouts[name]
                if parameter.stride() != strides and _memory_order(parameter) != order:
                    raise Error("a parameter's memory format has changed; choose it before the hook is made")
                slices[compressor.index(name)] = gradient
        step: dict[str, Any] = {"step": bucket.step, "density": self._density(bucket.step), "scale": 1 / self._scale}
        if self.optimizer is not None and self.keys.get("lr_inside"):
            step["lr"] = float(self.optimizer.param_groups[0]["lr"])
        parts = [{index: gradient} for index, gradient in slices.items()] if self._each else [slices]
        rounds: list[tuple[AnyRound, Slices]] = []
        finite = True
        for part in parts:
            index, gradient = next(iter(part.items()))
            with channel.timed(1):
                if self._each and not channel.any(bool(gradient.count_nonzero() > 0)):
                    continue
            with channel.timed(0):
                round_ = compressor.encode_slices(part, **step)
            rounds.append((round_, part))
            with channel.timed(1):
                finite &= channel.run(round_, (bucket.number, len(slices), index)) is State.DONE
        with channel.timed(2):
            for round_, part in rounds:
                if finite:
                    round_.commit(part, self._scale)
                else:
                    round_.discard()
            if finite and here is not bucket.buffer:
                bucket.buffer.copy_(here)
        if finite and self.scaler is not None and bucket.buffer.dtype == torch.float16:
            finite = bool(here.isfinite().all())  # the scaled average may overflow
        if not finite:
            bucket.buffer.fill_(float("nan"))
            self.skipped_steps += bucket.step not in self._skipped
            self._skipped.add(bucket.step)

    def _settle(self) -> None:
        """Waits for the queued buckets, and undoes the steps that the scaler has skipped."""
        self._worker.wait()
        if self.scaler is not None:
            for step in self._skipped:
                self._compressors.undo(step)
        self._skipped.clear()
