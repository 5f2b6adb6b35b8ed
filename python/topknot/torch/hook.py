"""Compression of what a PyTorch training exchanges."""

from __future__ import annotations

import atexit
import ctypes
import difflib
import functools
import math
import operator
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import Compressor, Error, Round, State
from .._library import Type
from .._methods import Value, methods

_TYPES = {torch.float32: Type.FLOAT32, torch.bfloat16: Type.BFLOAT16, torch.float16: Type.FLOAT16}
# What gives Adam something of every entry in every step, with its size. Others end far behind dense with it
# (lab/records/gpt_char.md).
_FOR_ADAM = {"dense", "powersgd", "acpsgd", "qsgd", "terngrad"}
_SUMS = {Type.FLOAT32: torch.float32, Type.BFLOAT16: torch.bfloat16}


def _has_values(tensor: torch.Tensor, what: str) -> None:
    if tensor.is_meta:
        raise Error(f"{what} is on the meta device and has no values; call the model's to_empty(device=...) and load it first")


def _type_of(tensor: torch.Tensor, what: str) -> Type:
    if tensor.layout != torch.strided:
        raise Error(f"{what} is sparse; compression is for dense gradients (nn.Embedding: sparse=False)")
    _has_values(tensor, what)
    if tensor.dtype not in _TYPES:
        raise Error(f"{what} is {tensor.dtype}; float32, bfloat16 and float16 can be compressed")
    return _TYPES[tensor.dtype]


class _GpuMemory:
    """Of the library, as PyTorch takes it over."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


def _memory(address: int, size: int, device: str) -> torch.Tensor:
    """Bytes of the library's, which keeps them."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_GpuMemory(address, size), device=device)


def _wait_for(tensor: torch.Tensor) -> None:
    """What PyTorch has put on the current stream is done: the library's streams do not wait for it."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _device_for(method: str, keys: dict[str, Value], tensors: Iterable[torch.Tensor], channel: "_Channel") -> str:
    """Where gradients beside these tensors are compressed: key device, or, where it is "auto" or not given, where they lie
    if on all ranks the library has kernels for the method, and its blocks a bound there. Collective."""
    places = {str(t.device) for t in tensors}
    place = places.pop() if len(places) == 1 else "several devices"
    wanted = str(keys.get("device", "auto"))
    if wanted == "cpu":
        return wanted
    on_gpu = place.startswith("cuda:")
    if wanted != "auto" and not (on_gpu and wanted in ("cuda", place)):
        raise Error(f"device='{wanted}', and the parameters are on {place}; leave it out, or choose 'cpu'")
    # A GPU's block has room for whatever a threshold lets through.
    unbounded = not keys.get("capacity") and {"gaussiank", "threshold"} & {method, keys.get("select")}
    if on_gpu and not (wanted == "auto" and unbounded):
        trial: dict[str, Value] = {**keys, "dense_1d": False, "min_numel": 0, "scope": "tensor", "device": place}
        try:
            Compressor(method, {"all": (8, 8)}, keys=trial).close()
        except Error:
            if wanted != "auto":
                raise
            on_gpu = False
    else:
        on_gpu = False
    # Blocks of a GPU and of the CPU do not mix.
    found = torch.cat(channel.all_gather(torch.tensor([float(on_gpu)])))
    return place if bool(found.min() > 0) else "cpu"


class _Channel:
    """Exchanges a round's messages over a process group. Its calls are collective, in the same order on all ranks."""

    def __init__(self, group: Union[dist.ProcessGroup, DeviceMesh, None]) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise Error("torch.distributed has no process group; call init_process_group() first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise Error(f"process_group is a DeviceMesh of {group.ndim} dimensions; give one of them, as mesh['name']")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup) and group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            raise Error(f"process_group must be a ProcessGroup or a 1-D DeviceMesh, not a {type(group).__name__}")
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise Error("this process is not in the process group")
        nccl = "nccl" in str(dist.get_backend(self.group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.bytes_sent = 0  # payload
        self._room: dict[Any, int] = {}  # bytes that a message of this kind is expected to fit in

    def run(self, round_: Round, kind: Any) -> State:
        """Sends, receives and decodes until the round is done. `kind` tells rounds apart whose messages differ in size; the
        same on all ranks."""
        state, turn = State.MORE, 0
        while state is State.MORE:
            message = round_.message_pointers()
            if message.sum_count:
                type_ = _SUMS[message.sum_type]
                self._sum(_memory(message.sum, message.sum_count * type_.itemsize, round_.device).view(type_))
                state = round_.decode()
            else:
                own = _memory(message.block, message.block_bytes, round_.device)
                blocks = self._gather(own, (kind, turn)) if round_.device == "cpu" else self._gather_equal(own)
                state = round_.decode_pointers([block.data_ptr() for block in blocks], [len(block) for block in blocks])
            turn += 1
        return state

    def _sum(self, values: torch.Tensor) -> None:
        self.bytes_sent += values.numel() * values.element_size()
        there = values.to(self.device)
        dist.all_reduce(there, group=self.group)
        if there.data_ptr() != values.data_ptr():
            values.copy_(there)
        _wait_for(values)

    def _gather_equal(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's block, of a GPU, where the density alone says how long they are."""
        self.bytes_sent += own.numel()
        there = torch.empty(self.ranks * own.numel(), dtype=torch.uint8, device=self.device)
        dist.all_gather(list(there.split(own.numel())), own.to(self.device), group=self.group)
        blocks = there.to(own.device)
        _wait_for(blocks)
        return list(blocks.split(own.numel()))

    def _gather(self, own: torch.Tensor, kind: Any) -> list[torch.Tensor]:
        """Every rank's block. Blocks have lengths of their own, so each goes, behind its length, in a buffer that fitted
        all of them the last time; what does not fit follows in a second call."""
        size = own.numel()
        self.bytes_sent += size
        room = self._room.get(kind, 0)
        first = torch.zeros(8 + room, dtype=torch.uint8)
        first[:8] = torch.frombuffer(bytearray(size.to_bytes(8, "little")), dtype=torch.uint8)
        fits = min(size, room)
        first[8 : 8 + fits] = own[:fits]
        firsts = self.all_gather(first)
        sizes = [int.from_bytes(bytes(other[:8].tolist()), "little") for other in firsts]
        largest = max(sizes)
        self._room[kind] = largest + largest // 16 + 16
        blocks = [other[8 : 8 + min(bytes_, room)] for other, bytes_ in zip(firsts, sizes)]
        if largest <= room:
            return blocks
        rest = torch.zeros(largest - room, dtype=torch.uint8)
        rest[: size - fits] = own[fits:]
        return [
            torch.cat([block, other[: bytes_ - len(block)]])
            for block, other, bytes_ in zip(blocks, self.all_gather(rest), sizes)
        ]

    def named_state(self, **state: Any) -> dict[str, Any]:
        """A state_dict whose key names the program's rank, so that torch.distributed.checkpoint keeps every rank's. It
        stores a tuple as one value, which may have another size than the one that it is loaded into."""
        key = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        return {key: ({**state, "rank": self.rank, "ranks": self.ranks},)}

    def own_state(self, state: dict[str, Any], advice: str = "") -> dict[str, Any]:
        """Refuses a state without this rank's, or of another number of ranks."""
        (key,) = self.named_state()
        parts = _parts(state if key not in state else {key: state[key]})
        found = parts[0] if len(parts) == 1 else {}
        if (found.get("rank"), found.get("ranks")) != (self.rank, self.ranks):
            saved = [f"rank {part['rank']} of {part['ranks']}" for part in parts]
            raise Error(f"the state is of {', '.join(saved) or 'no rank'}, not of rank {self.rank} of {self.ranks}{advice}")
        return found

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        there = own.to(self.device)
        all_ = [torch.empty_like(there) for _ in range(self.ranks)]
        dist.all_gather(all_, there, group=self.group)
        return [other.cpu() for other in all_]


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks' parts of a state_dict. Earlier versions saved a part without a key."""
    return [state] if "rank" in state else [part for parts in state.values() for part in parts]


class _Slice(NamedTuple):
    """A parameter's gradient as the compressor sees it: row-major, in memory of the compressor's device."""

    index: int
    there: torch.Tensor  # where the gradient lies
    here: torch.Tensor  # the same memory, or a copy


def _has_own_order(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory without gaps and overlaps, in any order of its dimensions; DistributedDataParallel's buckets
    then have its order, else rows."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions from the outermost to the innermost, as its gradient has them in a bucket: of channels_last 0, 2, 3, 1."""
    if tensor.is_contiguous() or not _has_own_order(tensor):
        return list(range(tensor.dim()))
    return sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))


class _Compressors:
    """A hook's: with scope "tensor" one, of all parameters; with "bucket" one for each bucket, as one vector, made where the
    bucket first comes. Buckets of other parameters than before, as after a load, take over what these owe, by name."""

    def __init__(self, method: str, shapes: dict[str, tuple[int, ...]], channel: _Channel, keys: dict[str, Value]) -> None:
        self._buckets = keys.get("scope") == "bucket"
        self._method, self._shapes, self._channel = method, shapes, channel
        self._keys = {**keys, "scope": "model"} if self._buckets else keys
        self._made: dict[tuple[str, ...], Compressor] = {}
        self._owed: dict[str, np.ndarray] = {}  # of parameters that are in no compressor yet
        self._new(tuple(shapes)).close()  # says now what is wrong with the keys

    def _new(self, names: tuple[str, ...], rank: Optional[int] = None, ranks: Optional[int] = None) -> Compressor:
        return Compressor(
            self._method, {name: self._shapes[name] for name in names}, rank=self._channel.rank if rank is None else rank,
            ranks=ranks or self._channel.ranks, keys=self._keys,
        )  # fmt: skip

    def of(self, names: Sequence[str]) -> Compressor:
        """For a round of these parameters, in this order."""
        key = tuple(names) if self._buckets else tuple(self._shapes)
        if key not in self._made:
            for other in [other for other in self._made if set(other) & set(key)]:
                with self._made.pop(other) as compressor:
                    self._owed.update(_residuals(compressor))
            made = self._new(key)
            for name in set(key) & set(self._owed):
                made.set_residual(name, self._owed.pop(name))
            self._made[key] = made
        return self._made[key]

    def residual(self, name: str) -> Optional[np.ndarray]:
        """None where the method keeps nothing, or, by buckets, nothing yet."""
        if name not in self._shapes:
            raise Error(f"there is no tensor '{name}'")
        compressor = next((c for key, c in self._made.items() if name in key), None)
        return compressor.residual(name) if compressor is not None else self._owed.get(name)

    def undo(self, step: int) -> None:
        for compressor in self._made.values():
            compressor.undo(step)

    def save(self) -> dict[str, Any]:
        return {
            "parts": [(key, _saved(compressor)) for key, compressor in self._made.items()],
            "owed": {name: torch.from_numpy(owed.copy()) for name, owed in self._owed.items()},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """After an Error nothing has changed."""
        made, owed = {}, {name: tensor.numpy().copy() for name, tensor in saved["owed"].items()}
        for names, state in saved["parts"]:
            made[tuple(names)] = self._loaded(names, state)
        self._unknown([*owed])
        for compressor in self._made.values():
            compressor.close()
        self._made, self._owed = made, owed

    def sum_of(self, states: Sequence[tuple[int, dict[str, Any]]], before: int) -> dict[str, Any]:
        """As save(), from save()s of some of `before` ranks: their residuals times ranks over before."""
        owed: dict[str, torch.Tensor] = {}
        factor = np.float32(self._channel.ranks / before)
        for rank, saved in states:
            residuals = {name: tensor.numpy() for name, tensor in saved["owed"].items()}
            for names, state in saved["parts"]:
                with self._loaded(names, state, rank, before) as compressor:
                    residuals.update(_residuals(compressor))
            for name, residual in residuals.items():
                scaled = torch.from_numpy(factor * residual)
                owed[name] = owed[name] + scaled if name in owed else scaled
        return {"parts": [], "owed": owed}

    def _loaded(self, names: Sequence[str], state: torch.Tensor, rank: Optional[int] = None, ranks: Optional[int] = None) -> Compressor:
        self._unknown(names)
        compressor = self._new(tuple(names), rank, ranks)
        compressor.load(state.numpy())
        return compressor

    def _unknown(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in self._shapes]:
            raise Error(f"the state has a parameter '{unknown[0]}', which the model has not")


def _residuals(compressor: Compressor) -> dict[str, np.ndarray]:
    found = {name: compressor.residual(name) for name in compressor.names}
    return {name: residual for name, residual in found.items() if residual is not None}


def _saved(compressor: Compressor) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(compressor.save(), np.uint8).copy())


def _unpacked(future: "torch.futures.Future[Any]") -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value


def _timeout_of(group: dist.ProcessGroup) -> Optional[timedelta]:
    """The group's own, which PyTorch has no public way to ask for; None: PyTorch's default."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None


def _beside(tensor: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Row-major memory of the CPU for a copy of it, which a GPU reaches if it lies there."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=tensor.is_cuda)


def _encode(compressor: Compressor, slices: Sequence[_Slice], **step: Any) -> Round:
    return compressor.encode_pointers(
        [s.index for s in slices], [s.here.data_ptr() for s in slices], _TYPES[slices[0].here.dtype], **step
    )


def _commit(round_: Round, slices: Sequence[_Slice], scale: float = 1.0) -> None:
    round_.commit_pointers([s.here.data_ptr() for s in slices], _TYPES[slices[0].here.dtype], scale)
    for s in slices:
        if s.here.data_ptr() != s.there.data_ptr():
            s.there.copy_(s.here)


def _plain(name: str) -> str:
    """Without what torch.compile() puts into the names of a model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {_plain(name): p for name, p in module.named_parameters() if p.requires_grad}


def _count(what: str, value: Any, least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise Error(f"{what} must be a whole number, not {value!r}") from None
    if count < least:
        raise Error(f"{what} must be at least {least}, not {count}")
    return count


def _check_settings(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuses a state that was saved with other settings. Where and in how many threads they are computed may change."""
    before = saved.get("settings", own)  # earlier versions saved none
    names = sorted({*before, *own} - {"device", "threads"})
    if differ := [
        f"{name} ({before.get(name, 'not given')} in the state, {own.get(name, 'not given')} here)"
        for name in names
        if before.get(name) != own.get(name)
    ]:
        raise Error(f"the state was saved with another {', another '.join(differ)}; give what the state has")


def _warn_of_adam(method: str, optimizer: Optional[torch.optim.Optimizer]) -> None:
    if optimizer is not None and method not in _FOR_ADAM and {"betas", "eps"} <= {*optimizer.param_groups[0]}:
        warnings.warn(
            f"'{method}' in every step ends far behind dense training with Adam or AdamW; exchange every few steps by "
            "topknot.torch.LocalSteps(model, 'sparseloco', every=10), or train with SGD and momentum"
        )


class _Uncopied:
    """DistributedDataParallel's state of the hook. It copies this with the model, but registers no hook for the copy."""

    def __deepcopy__(self, _: dict[int, Any]) -> _Uncopied:
        warnings.warn(
            "a copy of this DistributedDataParallel would train uncompressed; give the copy a CompressionHook of its own, or "
            "copy ddp.module"
        )
        return self


def _compressor(method: str, shapes: dict[str, tuple[int, ...]], channel: _Channel, keys: dict[str, Value]) -> Compressor:
    return Compressor(method, shapes, rank=channel.rank, ranks=channel.ranks, keys=keys)


class _Bucket(NamedTuple):
    step: int
    index: int
    last: bool
    buffer: torch.Tensor
    parameters: list[torch.nn.Parameter]
    ready: Any  # of a GPU: the event behind which the gradients are there
    future: Any


class Times(NamedTuple):
    """Where a step's time went, in seconds, the mean of the compressed steps."""

    steps: int
    encode_s: float
    """Selecting and coding, copies of the gradients included."""
    exchange_s: float
    """In the collectives, waiting for slower ranks and decoding included."""
    write_s: float
    """Writing averages and residuals."""
    exposed_s: float
    """Of all this, what the backward pass had to wait for after its last gradient."""

    def __str__(self) -> str:
        parts = (f"{name[:-2]} {1000 * value:.1f} ms" for name, value in self._asdict().items() if name != "steps")
        return f"a step of {self.steps}: {', '.join(parts)}"


class _Worker:
    """A thread that runs what it is given, one after the other."""

    threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        # Its put() may be called while another one is under way in the same thread, as the garbage collector may do.
        self.tasks: "queue.SimpleQueue[Optional[Callable[[], None]]]" = queue.SimpleQueue()
        self._last = threading.Event()  # behind the task that was added last
        self._last.set()
        thread = threading.Thread(target=self._run, args=(self.tasks, device), name="topknot", daemon=True)
        self.threads.add(thread)
        thread.start()

    def add(self, task: Callable[[], None]) -> None:
        done = threading.Event()
        self._last = done

        def run() -> None:
            try:
                task()
            finally:
                done.set()

        self.tasks.put(run)

    def wait(self) -> None:
        self._last.wait()

    @staticmethod
    def _run(tasks: "queue.SimpleQueue[Optional[Callable[[], None]]]", device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (task := tasks.get()) is not None:
            task()
            del task


@atexit.register
def _join_workers() -> None:
    """A thread that the interpreter stops inside PyTorch takes the process down. The hooks' finalizers, which run before,
    have told them to end."""
    for thread in list(_Worker.threads):
        thread.join(10)


class CompressionHook:
    """Compresses the gradients of a DistributedDataParallel model; it registers itself as the model's communication hook.

    ddp: the model, before its first backward pass and without another hook.
    method, keys: as in `topknot.methods()`: "topk" with density=0.001, "powersgd" with rank=4, ... Key scope: "tensor", the
        default, each parameter is compressed for itself; "bucket", each of DistributedDataParallel's buckets as one vector,
        so that entries of a small layer compete with those of a large one; the first dense_steps steps after a
        load_state_dict(), two at most, then are dense too. What was not sent is kept by the parameter's name. Key device:
        "cpu", or the parameters' GPU; "auto", the default, is their GPU where the library has CUDA and the method kernels
        (attribute `device` has the choice).
    warmup, warmup_steps: densities of the first steps, each for warmup_steps of them, after the dense ones.
    dense_steps: so many first steps are averaged uncompressed. After two DistributedDataParallel has put its buckets into
        the order in which gradients come; before that, nothing overlaps.
    scaler: the GradScaler, if there is one. Residuals then are of unscaled gradients, and a step that it skips changes
        nothing; a step has one backward pass with an exchange (accumulate under no_sync()). Needs once or, during a
        step, twice more what the method keeps.
    optimizer: gives the learning rate for key lr_inside; a warning says if the method does not go with it.

    A gradient that is not finite on some rank arrives as NaN on all, with those of its bucket, whose residuals stay as they
    were. An error on one rank ends the exchanges of all.

    Works with no_sync(), static_graph, find_unused_parameters (a parameter that no rank used, or whose gradients are zeros,
    keeps its residual), clipping between backward() and step(), parameters of any memory format.
    """

    def __init__(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        method: str = "topk",
        *,
        warmup: Sequence[float] = (),
        warmup_steps: int = 1,
        dense_steps: int = 2,
        scaler: Optional["torch.amp.GradScaler"] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        keys: Optional[dict[str, Value]] = None,
        **more: Value,
    ) -> None:
        if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            raise Error(f"the model must be a DistributedDataParallel, not a {type(ddp).__name__}")
        reducer = getattr(getattr(torch, "_dynamo", None), "config", None)
        if reducer is not None and getattr(reducer, "optimize_ddp", None) == "python_reducer":
            raise Error(
                "with torch._dynamo.config.optimize_ddp = 'python_reducer' PyTorch ignores what a hook returns; use True or False"
            )
        self.method, self.keys = method, {**(keys or {}), **more}
        scope = self.keys.get("scope", "tensor")
        if scope not in ("tensor", "bucket"):
            raise Error(f"scope: buckets come one by one, so it is 'tensor' or 'bucket', not '{scope}'")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            self.keys["undo"] = True
        dense_steps, warmup_steps = _count("dense_steps", dense_steps, 0), _count("warmup_steps", warmup_steps, 1)
        if any(not 0 < density <= 1 for density in warmup):
            raise Error("warmup: a density must be above 0, at most 1")
        self.warmup, self.warmup_steps, self.dense_steps = tuple(warmup), warmup_steps, dense_steps
        self._dense_until = dense_steps
        if self.keys.get("lr_inside") and optimizer is None:
            raise Error("lr_inside: the learning rate is the optimizer's; give optimizer=")
        self.optimizer = optimizer
        _warn_of_adam(method, optimizer)
        self._each = bool(getattr(ddp, "find_unused_parameters", False))  # a round for each parameter
        if self._each and scope == "bucket":
            raise Error("scope: with find_unused_parameters each parameter has a message of its own; remove scope='bucket'")
        parameters = _parameters(ddp.module)
        for name, parameter in parameters.items():
            _type_of(parameter, f"parameter '{name}'")
        self._names = {id(p): name for name, p in parameters.items()}
        # Gradients are compressed as they lie in buckets: to bring channels_last into rows and back takes longer than to
        # compress.
        self._layouts = {name: (p.stride(), _memory_order(p)) for name, p in parameters.items()}
        shapes = {name: tuple(p.shape[d] for d in self._layouts[name][1]) for name, p in parameters.items()}
        group = ddp.process_group
        self.device = _device_for(method, self.keys, parameters.values(), _Channel(group))
        self._compressors = _Compressors(method, shapes, _Channel(group), {**self.keys, "device": self.device})
        self._step = -1
        self._skipped: set[int] = set()  # steps with a bucket that was not finite
        self._scale = 1.0
        self._seconds = [0.0, 0.0, 0.0, 0.0]  # of Times
        self._timed_steps = 0
        self._last_call = 0.0
        self._error: Optional[Exception] = None  # after which this rank exchanges nothing more
        # Without annotations, which are texts here and which PyTorch compares with its classes.
        ddp.register_comm_hook(_Uncopied(), lambda state, bucket: self._hook(bucket))
        # A group of its own: DistributedDataParallel and the program use theirs meanwhile, from another thread.
        self._channel = _Channel(
            dist.new_group(
                dist.get_process_group_ranks(group), backend=dist.get_backend(group), timeout=_timeout_of(group),
                use_local_synchronization=True,
            )
        )  # fmt: skip
        self._pinned: dict[int, torch.Tensor] = {}  # by bucket: where a GPU's gradients are copied to
        self._worker = _Worker(next(iter(parameters.values())).device)
        weakref.finalize(self, self._worker.tasks.put, None)

    @property
    def step(self) -> int:
        """Backward passes with an exchange so far."""
        return self._step + 1

    @property
    def bytes_sent(self) -> int:
        """Payload of this rank's messages so far, those of the dense steps included."""
        return self._channel.bytes_sent

    @property
    def times(self) -> Times:
        """Of the steps that this process has made."""
        self._settle()
        return Times(self._timed_steps, *(seconds / max(1, self._timed_steps) for seconds in self._seconds))

    def residual(self, name: str) -> Optional[torch.Tensor]:
        """What is added to the parameter's next gradient on this rank: what it has not sent, times feedback_decay. None where
        the method keeps nothing."""
        self._settle()
        found = self._compressors.residual(name)
        if found is None:
            return None
        _, order = self._layouts[name]
        return torch.from_numpy(found).permute([order.index(d) for d in range(len(order))])

    def state_dict(self) -> dict[str, Any]:
        """This rank's, under a key that names it; each rank saves its own. Between backward passes."""
        self._settle()
        return self._channel.named_state(
            settings=self._settings(), step=self._step, bytes_sent=self._channel.bytes_sent, state=self._compressors.save()
        )  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        return {"method": self.method, **self.keys, "warmup": [*self.warmup], "warmup_steps": self.warmup_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict() gave, of the same rank of as many ranks, method and keys; of another number of ranks see
        merge_state_dicts()."""
        self._settle()
        state = self._channel.own_state(state, "; of another number of ranks give merge_state_dicts() all states")
        _check_settings(state, self._settings())
        self._compressors.load(state["state"])
        self._step, self._channel.bytes_sent = state["step"], state["bytes_sent"]
        if self.keys.get("scope") == "bucket":  # until DistributedDataParallel has made the buckets of before
            self._dense_until = self._step + 1 + min(2, self.dense_steps)

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """From the states of all ranks of another number of them, one for this rank: it has the residuals
        of ranks rank, rank + ranks, ..., scaled so that what all ranks still owe the average is the same. What a method
        carries beside residuals (velocities, thresholds) begins anew."""
        self._settle()
        parts = sorted((part for state in states for part in _parts(state)), key=lambda part: part["rank"])
        before = len(parts)
        if not parts or [(p["rank"], p["ranks"]) for p in parts] != [(rank, before) for rank in range(before)]:
            raise Error("the states must be those of all ranks, each once")
        mine = [(index, parts[index]["state"]) for index in range(self._channel.rank, before, self._channel.ranks)]
        return self._channel.named_state(**{**parts[0], "state": self._compressors.sum_of(mine, before)})

    # The hook runs in the thread of the backward pass; compression and exchange in one of their own, a bucket after the
    # other, in the same order on all ranks, while the backward pass goes on.

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(f"an exchange of this rank failed: {self._error}; it exchanges nothing more") from self._error
        if not isinstance(bucket, dist.GradBucket):
            raise Error("this reducer gives hooks no buckets (torch._dynamo.config.optimize_ddp); use DDP's own")
        buffer = bucket.buffer()
        _type_of(buffer, "a bucket of gradients")
        parameters = list(bucket.parameters())
        if buffer.dim() != 1 or not buffer.is_contiguous() or sum(p.numel() for p in parameters) != buffer.numel():
            raise Error("a bucket is not one row of its parameters' gradients")
        if bucket.index() == 0:
            self._settle()
            self._step += 1
            if self.scaler is not None:
                self._scale = float(self.scaler.get_scale())
        ready = None
        devices = None
        if buffer.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
            devices = [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
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
                    self._dense(bucket.buffer)
                else:
                    self._compressed(bucket)
                    if bucket.last:
                        self._seconds[3] += time.perf_counter() - self._last_call
                        self._timed_steps += 1
            bucket.future.set_result(bucket.buffer)
        except Exception as error:
            # Its next message would meet another one of the other ranks. Without the group these end with an error too.
            self._error = error
            bucket.future.set_result(error)  # reaches backward() as a RuntimeError with its text
            dist.destroy_process_group(self._channel.group)

    def _dense(self, buffer: torch.Tensor) -> None:
        buffer.div_(self._channel.ranks)
        self._channel.bytes_sent += buffer.numel() * buffer.element_size()
        there = buffer if buffer.is_cuda or self._channel.device.type == "cpu" else buffer.to(self._channel.device)
        dist.all_reduce(there, group=self._channel.group)
        if there is not buffer:
            buffer.copy_(there)

    def _in_place(self, bucket: _Bucket) -> torch.Tensor:
        """The gradients where they are compressed: themselves if they lie there, else a copy in memory of the CPU that a GPU
        reaches."""
        gradients = bucket.buffer
        if self.device != "cpu" or not gradients.is_cuda:
            return gradients
        here = self._pinned.get(bucket.index)
        if here is None or here.shape != gradients.shape or here.dtype != gradients.dtype:
            here = self._pinned[bucket.index] = _beside(gradients)
        return here.copy_(gradients)

    def _density(self, step: int) -> float:
        turn = (step - self.dense_steps) // self.warmup_steps
        return self.warmup[turn] if turn < len(self.warmup) else 0.0

    def _compressed(self, bucket: _Bucket) -> None:
        begin_s = time.perf_counter()
        here = self._in_place(bucket)
        names = [self._names[id(parameter)] for parameter in bucket.parameters]
        compressor = self._compressors.of(names)
        slices, begin = [], 0
        for name, parameter in zip(names, bucket.parameters):
            end = begin + parameter.numel()
            strides, order = self._layouts[name]
            if parameter.stride() != strides and _memory_order(parameter) != order:
                raise Error("a parameter's memory format has changed; choose it before the hook is made")
            slices.append(_Slice(compressor.index(name), here[begin:end], here[begin:end]))
            begin = end
        self._seconds[0] += time.perf_counter() - begin_s
        step: dict[str, Any] = {"step": bucket.step, "density": self._density(bucket.step), "scale": 1 / self._scale}
        if self.optimizer is not None and self.keys.get("lr_inside"):
            step["lr"] = float(self.optimizer.param_groups[0]["lr"])
        parts = [[s] for s in slices] if self._each else [slices]
        rounds: list[tuple[Round, list[_Slice]]] = []
        finite = True
        for part in parts:
            begin_s = time.perf_counter()
            if self._each and not self._used(part[0]):
                continue
            encode_s = time.perf_counter()
            round_ = _encode(compressor, part, **step)
            rounds.append((round_, part))
            exchange_s = time.perf_counter()
            finite &= self._channel.run(round_, (bucket.index, len(slices), part[0].index)) is State.DONE
            self._seconds[0] += exchange_s - encode_s
            self._seconds[1] += encode_s - begin_s + time.perf_counter() - exchange_s
        begin_s = time.perf_counter()
        for round_, part in rounds:
            if finite:
                _commit(round_, part, self._scale)
            else:
                round_.discard()
        if finite and here is not bucket.buffer:
            bucket.buffer.copy_(here)
        self._seconds[2] += time.perf_counter() - begin_s
        if finite and self.scaler is not None and bucket.buffer.dtype == torch.float16:
            finite = bool(here.isfinite().all())  # an average times the scale may be too large
        if not finite:
            bucket.buffer.fill_(float("nan"))
            self._skipped.add(bucket.step)

    def _used(self, part: _Slice) -> bool:
        """Whether some rank has a gradient of it other than zeros. If no rank used it, PyTorch leaves .grad alone, and what
        would be sent is lost."""
        some = torch.tensor([float(part.here.count_nonzero() > 0)], device=self._channel.device)
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=self._channel.group)
        return bool(some.item() > 0)

    def _settle(self) -> None:
        """Waits for the buckets that are under way, and takes back the steps that the scaler has skipped."""
        self._worker.wait()
        if self.scaler is not None:
            for step in self._skipped:
                self._compressors.undo(step)
        self._skipped.clear()


def _preset(name: str) -> tuple[str, dict[str, str]]:
    """The method of a preset, and what the library's tables say of its outer optimizer; else DiLoCo's."""
    known = methods()
    names = [*known["recipes"], *known["methods"]]
    if name not in names:
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
    """Trains without exchanging gradients: each rank makes `every` steps of its own, then the ranks exchange how far their
    weights have gone, compressed, and an outer optimizer applies the average (DiLoCo and its kin; docs/local_steps.md).

    model: any module, not wrapped in DistributedDataParallel, with any optimizer. The ranks' weights and buffers become
        rank 0's.
    preset: "diloco", "muloco" (with Muon inside), "sparseloco", or a method of `topknot.methods()`, with the outer optimizer of DiLoCo.
    every: steps between two exchanges, counted by step().
    outer, outer_lr, outer_momentum: "nesterov" or "sgd"; in place of the preset's.
    optimizer: where it is given, a rank whose weights are not finite begins anew with the optimizer's state.
    keys: the method's (density=, codec=, scope="model", ...).

    Batch norm's running statistics are averaged at each exchange. An exchange that some rank's weights make not finite is
    discarded: every rank goes back to the weights and statistics after the last one, and a warning names the rank. After
    ten of them in a row RuntimeError is raised: without `optimizer` a rank whose optimizer keeps a NaN makes all of them
    so.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preset: str = "sparseloco",
        *,
        every: int,
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
        every = _count("every", every, 1)
        self.method, own = _preset(preset)
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
        self.keys: dict[str, Value] = {**(keys or {}), **more}
        if self.keys.get("lr_inside"):
            raise Error("lr_inside is of gradients; what is exchanged here is a change of weights")
        if self.keys.get("device", "cpu") != "cpu":
            raise Error("device: local steps keep their state in the CPU's memory, where changes are compressed; leave it out")
        self._optimizer = optimizer
        self._statistics = [
            getattr(module, name)
            for module in model.modules()
            if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.running_mean is not None
            for name in ("running_mean", "running_var")
        ]
        self._channel = _Channel(process_group)
        self._parameters = _parameters(model)
        for name, parameter in self._parameters.items():
            _type_of(parameter, f"parameter '{name}'")
        for name, buffer in model.named_buffers():
            _has_values(buffer, f"buffer '{name}'")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self._broadcast(tensor)
            self._theta = [_beside(p, torch.float32).copy_(p) for p in self._parameters.values()]
            # Of a GPU, as they are at an exchange.
            self._weights = [_beside(p, torch.float32) if p.is_cuda else None for p in self._parameters.values()]
            self._kept = [t.clone() for t in self._statistics]  # of the last exchange
        self._momentum = [torch.zeros_like(t) for t in self._theta]
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._compressor = _compressor(self.method, shapes, self._channel, self.keys)
        self._step = self._syncs = self._discarded = 0

    @property
    def bytes_sent(self) -> int:
        """Payload of this rank's messages so far."""
        return self._channel.bytes_sent

    @property
    def bits_per_parameter_step(self) -> float:
        count = sum(t.numel() for t in self._theta)
        return 8 * self.bytes_sent / count / self._step if self._step else 0.0

    def step(self) -> bool:
        """After the optimizer's step. True if the ranks have exchanged; their weights are then the same."""
        self._step += 1
        if self._step % self.every:
            return False
        self.sync()
        return True

    def sync(self) -> bool:
        """The exchange, at once: after a training's last step. False if it was discarded. Collective."""
        with torch.no_grad():
            return self._sync()

    def _sync(self) -> bool:
        slices = []
        for index, (theta, weights, parameter) in enumerate(zip(self._theta, self._weights, self._parameters.values())):
            here = parameter.detach().float().contiguous() if weights is None else weights.copy_(parameter)
            change = theta - here
            slices.append(_Slice(index, change, change))
        with _encode(self._compressor, slices, step=self._syncs) as round_:
            done = self._channel.run(round_, "sync") is State.DONE
            if done:
                _commit(round_, slices)
        self._syncs += 1
        if done:
            for s, theta, momentum in zip(slices, self._theta, self._momentum):
                self._outer_step(theta, momentum, s.here)
            for statistics in self._statistics:
                self._average(statistics)
            self._kept = [t.clone() for t in self._statistics]
        else:
            self._discard()
        for theta, parameter in zip(self._theta, self._parameters.values()):
            parameter.copy_(theta)
        self._discarded = 0 if done else self._discarded + 1
        if self._discarded >= 10:
            raise RuntimeError("ten exchanges in a row were discarded, since weights were not finite; the warnings name the ranks")
        return done

    def _outer_step(self, theta: torch.Tensor, momentum: torch.Tensor, change: torch.Tensor) -> None:
        # Each product and sum is rounded, as train's are: no add_(x, alpha=...), which may fuse them.
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
        if tensor.numel() == 0 or (tensor.numel() > 1 and 0 in tensor.stride()):  # one value under many places
            return
        there = tensor.detach().to(self._channel.device).contiguous()
        as_bytes = there.reshape(-1).view(torch.uint8)  # backends differ in the types that they know
        dist.broadcast(as_bytes, src=dist.get_global_rank(self._channel.group, 0), group=self._channel.group)
        tensor.copy_(there)

    def _average(self, statistics: torch.Tensor) -> None:
        there = statistics.detach().to(self._channel.device).double().contiguous() / self._channel.ranks
        dist.all_reduce(there, group=self._channel.group)
        statistics.copy_(there)

    def state_dict(self) -> dict[str, Any]:
        """This rank's, at any step, its weights too, under a key that names it; each rank saves its own, beside its own
        optimizer's and buffers'."""
        return self._channel.named_state(
            settings=self._settings(),
            step=self._step,
            syncs=self._syncs,
            bytes_sent=self._channel.bytes_sent,
            weights=[p.detach().clone() for p in self._parameters.values()],
            theta=[t.clone() for t in self._theta],
            momentum=[m.clone() for m in self._momentum],
            statistics=[t.clone() for t in self._kept],
            state=_saved(self._compressor),
        )

    def _settings(self) -> dict[str, Any]:
        outer = {"outer": self.outer, "outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        return {"method": self.method, **self.keys, "every": self.every, **outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict() gave, of the same rank of as many ranks, method and settings. It sets the model's weights too."""
        state = self._channel.own_state(state)
        _check_settings(state, self._settings())
        if [t.shape for t in state["theta"]] != [t.shape for t in self._theta]:
            raise Error("the state is of a model of other parameters")
        # A rank's own weights may be: the next exchange discards them.
        for what in ("theta", "momentum", "statistics"):
            if not all(bool(t.isfinite().all()) for t in state[what]):
                raise Error(f"the state's {what} is not finite, so no exchange could work; load an earlier one")
        self._compressor.load(state["state"].numpy())
        own = [*self._parameters.values(), *self._theta, *self._momentum, *self._kept]
        with torch.no_grad():
            for to, from_ in zip(own, [*state["weights"], *state["theta"], *state["momentum"], *state["statistics"]]):
                to.copy_(from_)
        self._step, self._syncs, self._channel.bytes_sent = state["step"], state["syncs"], state["bytes_sent"]


class FsdpCompression:
    """Compresses what FSDP2 exchanges between hosts: each host shards the model inside (`fully_shard` over a mesh of its own
    ranks), and this averages the shards' gradients over `process_group`, the ranks of equal place on all hosts.

    model: after fully_shard(); every module that was given to it is compressed for itself, as one vector by its name.
    method, keys: as CompressionHook's; methods that see matrices (powersgd) see one column.
    optimizer: a warning says if the method does not go with it.

    A gradient that is not finite on some host becomes NaN on all. With a GradScaler residuals are of scaled gradients, and
    what a skipped step has sent is lost.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: str = "topk",
        *,
        process_group: Union[dist.ProcessGroup, DeviceMesh],
        optimizer: Optional[torch.optim.Optimizer] = None,
        keys: Optional[dict[str, Value]] = None,
        **more: Value,
    ) -> None:
        try:
            from torch.distributed.fsdp import FSDPModule
            from torch.distributed.tensor import Replicate
        except ImportError as error:
            raise Error("this PyTorch has no FSDP2 (torch.distributed.fsdp.fully_shard); 2.10 has") from error
        modules = {_plain(name): module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not modules:
            raise Error("no module is sharded; call torch.distributed.fsdp.fully_shard() first")
        for name, parameter in _parameters(model).items():
            _has_values(parameter, f"parameter '{name}'")
            # fully_shard() puts the replicas first. Its own sum over them has no switch that leaves the hook on.
            if next(iter(getattr(parameter, "placements", ())), None) == Replicate():
                raise Error(
                    f"parameter '{name}' is sharded over a 2-D mesh (HSDP): FSDP2 averages over its replicas uncompressed before "
                    "the hook; give fully_shard() the mesh's second dimension alone, and process_group= that of the first"
                )
        self.method, self.keys = method, {"dense_1d": False, **(keys or {}), **more}
        if self.keys.get("lr_inside"):
            raise Error("lr_inside needs a learning rate, which FSDP2's hook does not know")
        _warn_of_adam(method, optimizer)
        self._channel = _Channel(process_group)
        self._compressors: dict[str, Compressor] = {}
        self._pinned: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._steps: dict[str, int] = {}
        self.device = _device_for(method, self.keys, model.parameters(), self._channel)
        self._keys = {**self.keys, "device": self.device}
        _compressor(method, {"all": (64,)}, self._channel, self._keys).close()  # says now what is wrong with the keys
        for name, module in modules.items():
            if not hasattr(module, "set_all_reduce_hook"):
                raise Error("this PyTorch's FSDP2 has no set_all_reduce_hook(); that of 2.10 has")
            module.set_all_reduce_hook(functools.partial(self._hook, name))

    @property
    def bytes_sent(self) -> int:
        """Payload of this rank's messages between hosts so far."""
        return self._channel.bytes_sent

    def _hook(self, name: str, shard: torch.Tensor) -> None:
        _type_of(shard, "a shard's gradient")
        with torch.no_grad():
            if name not in self._compressors:
                self._compressors[name] = _compressor(self.method, {name: (shard.numel(),)}, self._channel, self._keys)
                if name in self._loaded:
                    self._compressors[name].load(self._loaded.pop(name).numpy())
            step = self._steps.get(name, 0)
            self._steps[name] = step + 1
            if self.device != "cpu" or not shard.is_cuda:
                here = shard.contiguous()
                _wait_for(here)
            else:
                if name not in self._pinned:
                    self._pinned[name] = _beside(shard)
                here = self._pinned[name].copy_(shard)
            slices = [_Slice(0, shard, here)]
            with _encode(self._compressors[name], slices, step=step) as round_:
                if self._channel.run(round_, name) is State.DONE:
                    _commit(round_, slices)
                else:
                    shard.fill_(float("nan"))

    def state_dict(self) -> dict[str, Any]:
        """This rank's, under a key that names it; each rank saves its own. Between backward passes."""
        states = {**self._loaded, **{name: _saved(compressor) for name, compressor in self._compressors.items()}}
        settings = {"method": self.method, **self.keys}
        return self._channel.named_state(settings=settings, steps=dict(self._steps), states=states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict() gave, of the same rank of as many, method and keys."""
        state = self._channel.own_state(state)
        _check_settings(state, {"method": self.method, **self.keys})
        self._steps = dict(state["steps"])
        # A shard's length is known when its first gradient comes; the compressors are made anew then.
        self._loaded = dict(state["states"])
        self._compressors.clear()
