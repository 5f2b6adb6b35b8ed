"""What the hook, local steps and FSDP compression share: gradients in memory, settings, and the exchange of a round."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import operator
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import Compressor, Error, Round, State
from .._library import Type
from .._methods import Value
from .method import MethodCompressor, MethodRound, Own

_TYPES = {torch.float32: Type.FLOAT32, torch.bfloat16: Type.BFLOAT16, torch.float16: Type.FLOAT16}
Place = tuple[int, int]  # rank, ranks
Shapes = dict[str, tuple[int, ...]]
_SUMS = {Type.FLOAT32: torch.float32, Type.BFLOAT16: torch.bfloat16}
# Methods that send something of every entry, with its magnitude, in every step. The others end far behind dense training
# with Adam (lab/records/gpt_char.md). The library has no such table.
_FOR_ADAM = {"dense", "powersgd", "acpsgd", "qsgd", "terngrad"}


def check_has_values(tensor: torch.Tensor, what: str) -> None:
    if tensor.is_meta:
        raise Error(f"{what} is on the meta device and has no values; call the model's to_empty(device=...) and load it first")


def check_type(tensor: torch.Tensor, what: str) -> None:
    if tensor.layout != torch.strided:
        raise Error(f"{what} is sparse; compression is for dense gradients (nn.Embedding: sparse=False)")
    check_has_values(tensor, what)
    if tensor.dtype not in _TYPES:
        raise Error(f"{what} is {tensor.dtype}; float32, bfloat16 and float16 can be compressed")


def _view(address: int, size: int, device: str) -> torch.Tensor:
    """A view of the library's memory, which the library owns."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    interface = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


def wait_for(tensor: torch.Tensor) -> None:
    """Waits for PyTorch's current stream, since the library's streams do not."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def host_buffer(tensor: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Row-major CPU memory for a copy of the tensor, pinned if the tensor is on a GPU."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=tensor.is_cuda)


def in_place(gradients: torch.Tensor, device: str, pinned: dict[Any, torch.Tensor], key: Any) -> torch.Tensor:
    """The gradients, row-major, in memory of the device that compresses them: themselves, or a copy in pinned[key]."""
    if device != "cpu" or not gradients.is_cuda:
        return gradients.contiguous()
    here = pinned.get(key)
    if here is None or here.shape != gradients.shape or here.dtype != gradients.dtype:
        here = pinned[key] = host_buffer(gradients)
    return here.copy_(gradients)


# Gradients of a round, row-major, on the compressor's device, by the compressor's index of the parameter.
Slices = dict[int, torch.Tensor]


def _pointers(slices: Slices) -> tuple[list[int], Type]:
    return [s.data_ptr() for s in slices.values()], _TYPES[next(iter(slices.values())).dtype]


class LibraryRound:
    """A round of a method of the library."""

    def __init__(self, round_: Round) -> None:
        self._round, self.state, self.discard = round_, State.MORE, round_.discard
        self.bounded = round_.device != "cpu"  # on a GPU the density alone determines a block's length

    def message(self) -> tuple[torch.Tensor, bool]:
        """What this rank sends now, in the library's memory, and whether it is to be replaced by the ranks' sum."""
        message, device = self._round.message_pointers(), self._round.device
        if not message.sum_count:
            return _view(message.block, message.block_bytes, device), False
        type_ = _SUMS[message.sum_type]
        return _view(message.sum, message.sum_count * type_.itemsize, device).view(type_), True

    def scatters(self) -> bool:
        """Whether each rank needs only its piece of what is sent now. What is sent after it has one length on all ranks."""
        return self._round.pieces() > 0

    def decode(self, blocks: Optional[Sequence[torch.Tensor]] = None) -> State:
        """Takes every rank's block, or nothing after a sum."""
        if blocks is None:
            self.state = self._round.decode()
        else:
            self.state = self._round.decode_pointers([block.data_ptr() for block in blocks], [len(block) for block in blocks])
        return self.state

    def commit(self, slices: Slices, scale: float = 1.0) -> None:
        """Replaces the slices by the averages times `scale`."""
        self._round.commit_pointers(*_pointers(slices), scale)


class LibraryCompressor(Compressor):
    """A rank's compressor by a method of the library."""

    def encode_slices(self, slices: Slices, **step: Any) -> LibraryRound:
        return LibraryRound(self.encode_pointers([*slices], *_pointers(slices), **step))


AnyCompressor = Union[LibraryCompressor, MethodCompressor]
AnyRound = Union[LibraryRound, MethodRound]


def saved_state(compressor: AnyCompressor) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(compressor.save(), np.uint8).copy())


def plain_name(name: str) -> str:
    """The name without what torch.compile() adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {plain_name(name): p for name, p in module.named_parameters() if p.requires_grad}


def whole_number(what: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise Error(f"{what} must be a whole number, not {value!r}") from None
    if number < least:
        raise Error(f"{what} must be at least {least}, not {number}")
    return number


def check_settings(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuses a state that was saved with other settings. `device` and `threads` may differ."""
    before = saved.get("settings", own)  # earlier versions saved none
    names = sorted({*before, *own} - {"device", "threads"})
    if differ := [
        f"{name} ({before.get(name, 'not given')} in the state, {own.get(name, 'not given')} here)"
        for name in names
        if before.get(name) != own.get(name)
    ]:
        raise Error(f"the state was saved with another {', another '.join(differ)}; give what the state has")


def warn_of_adam(method: Union[str, Own], optimizer: Optional[torch.optim.Optimizer]) -> None:
    if (
        optimizer is not None
        and isinstance(method, str)
        and method not in _FOR_ADAM
        and {"betas", "eps"} <= {*optimizer.param_groups[0]}
    ):
        warnings.warn(
            f"'{method}' in every step ends far behind dense training with Adam or AdamW; exchange every few steps by "
            "topknot.torch.LocalSteps(model, 'sparseloco', every=10), or train with SGD and momentum"
        )


class Channel:
    """Exchanges messages over a process group. Its calls are collective, in the same order on all ranks."""

    def __init__(self, group: Union[dist.ProcessGroup, DeviceMesh, None]) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise Error("torch.distributed has no process group; call init_process_group() first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise Error(f"process_group is a DeviceMesh of {group.ndim} dimensions; give one of them, as mesh['name']")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup) and group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            raise Error(f"process_group must be a ProcessGroup or a 1-D DeviceMesh, not a {type(group).__name__}")
        self.group: Any = group if group is not None else dist.group.WORLD
        self._begin(dist.get_rank(self.group), dist.get_world_size(self.group), str(dist.get_backend(self.group)))
        if self.rank < 0:
            raise Error("this process is not in the process group")

    def _begin(self, rank: int, ranks: int, backend: str) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        self._take_place(rank, ranks)
        self.bytes_sent = self.bytes_received = 0  # payload; a sum counts once in each
        self.seconds = [0.0] * 4  # encoding; collectives with decoding; writing; the part of these that the training waits for
        self._room: dict[Any, int] = {}  # bytes that a message of this kind is expected to fit in

    def _take_place(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        # Ranks that train together, and whether this is the first: Islands makes them more than the group's.
        self.total, self.leads = ranks, rank == 0

    def compressor(
        self, method: Union[str, Own], shapes: Shapes, keys: dict[str, Value], place: Optional[Place] = None
    ) -> AnyCompressor:
        """A compressor for this rank, or for another place."""
        if isinstance(method, Own):
            return MethodCompressor(method if place is None else copy.deepcopy(method), shapes, self, keys)
        rank, ranks = place or (self.rank, self.ranks)
        return LibraryCompressor(method, shapes, rank=rank, ranks=ranks, keys=keys)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        flags = torch.tensor([float(flag)], device=self.device)
        self._all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item() > 0)

    def average(self, compressor: AnyCompressor, slices: Slices, step: int, kind: Any) -> bool:
        """Replaces the slices by the ranks' averages. False, and nothing has changed, if these are not finite."""
        round_, done = self.begin(compressor, slices, step, kind)
        return self.end(round_, slices, done)

    def begin(self, compressor: AnyCompressor, slices: Slices, step: int, kind: Any) -> tuple[AnyRound, bool]:
        """Exchanges without a change of anything here; whether the averages are finite."""
        with self.timed(0):
            round_ = compressor.encode_slices(slices, step=step)
        try:
            with self.timed(1):
                done = self.run(round_, kind) is State.DONE
        except BaseException:
            round_.discard()
            raise
        return round_, done

    def end(self, round_: AnyRound, slices: Slices, done: bool) -> bool:
        """Replaces the slices by the averages, or discards these."""
        with self.timed(2):
            try:
                if done:
                    round_.commit(slices)
            finally:
                round_.discard()  # nothing, after a commit
        return done

    @contextlib.contextmanager
    def timed(self, part: int) -> Iterator[None]:
        """Adds the time of a block to seconds[part]."""
        begin_s = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begin_s

    def run(self, round_: AnyRound, kind: Any) -> State:
        """Sends, receives and decodes until the round is done. Rounds of one `kind` have messages of about the same size;
        all ranks give the same."""
        state, turn, scattered = round_.state, 0, False
        while state is State.MORE:
            own, is_sum = round_.message()
            if is_sum:
                if own.numel():
                    self.sum(own)
                state = round_.decode()
            elif isinstance(round_, LibraryRound) and round_.scatters():
                state, scattered = round_.decode(self._scatter(own)), True
            else:
                equal = scattered or round_.bounded
                state = round_.decode(self._gather_equal(own) if equal else self._gather(own, (kind, turn)))
            turn += 1
        return state

    # What PyTorch's group does; all other collectives but broadcast() are made of these.
    def _all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        dist.all_reduce(values, op=op, group=self.group)

    def _all_gather(self, into: list[torch.Tensor], own: torch.Tensor) -> None:
        dist.all_gather(into, own, group=self.group)

    def _all_to_all(self, into: torch.Tensor, own: torch.Tensor) -> None:
        dist.all_to_all_single(into, own, group=self.group)

    def count(self, sent: int, received: int) -> None:
        self.bytes_sent, self.bytes_received = self.bytes_sent + sent, self.bytes_received + received

    def sum(self, values: torch.Tensor) -> None:
        """Replaces the values by the ranks' sum."""
        self.count(values.nbytes, values.nbytes)
        there = values.to(self.device)
        self._all_reduce(there)
        if there.data_ptr() != values.data_ptr():
            values.copy_(there)
        wait_for(values)

    def _scatter(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's piece for this one."""
        size = own.numel() // self.ranks
        self.count(own.numel() - size, own.numel() - size)
        there = torch.empty(own.numel(), dtype=torch.uint8, device=self.device)
        self._all_to_all(there, own.to(self.device))
        blocks = there.to(own.device)
        wait_for(blocks)
        return list(blocks.view(self.ranks, size).unbind())

    def _gather_equal(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's block, where all have one length."""
        self.count(own.numel(), (self.ranks - 1) * own.numel())
        there = torch.empty(self.ranks, own.numel(), dtype=torch.uint8, device=self.device)
        self._all_gather(list(there.unbind()), own.to(self.device))
        blocks = there.to(own.device)
        wait_for(blocks)
        return list(blocks.unbind())

    def _gather(self, own: torch.Tensor, kind: Any) -> list[torch.Tensor]:
        """Every rank's block. Blocks differ in length. The first call sends a block's length, then as much of the block as
        the longest of last time, with a margin; a second call sends the rest, if there is any."""
        size = own.numel()
        room = self._room.get(kind, 0)
        first = torch.zeros(8 + room, dtype=torch.uint8, device=own.device)
        first[:8] = torch.frombuffer(bytearray(size.to_bytes(8, "little")), dtype=torch.uint8)
        fits = min(size, room)
        first[8 : 8 + fits] = own[:fits]
        firsts = self.all_gather(first)
        sizes = [int.from_bytes(bytes(other[:8].tolist()), "little") for other in firsts]
        largest = max(sizes)
        self.count(size, sum(sizes) - size)
        self._room[kind] = largest + largest // 16 + 16
        blocks = [other[8 : 8 + min(bytes_, room)] for other, bytes_ in zip(firsts, sizes)]
        if largest <= room:
            return blocks
        rest = torch.zeros(largest - room, dtype=torch.uint8, device=own.device)
        rest[: size - fits] = own[fits:]
        rests = self.all_gather(rest)
        return [torch.cat([block, other[: bytes_ - len(block)]]) for block, other, bytes_ in zip(blocks, rests, sizes)]

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        there = own.to(self.device)
        all_ = [torch.empty_like(there) for _ in range(self.ranks)]
        self._all_gather(all_, there)
        return [other.to(own.device) for other in all_]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Of a rank of the group."""
        if tensor.numel() == 0 or (tensor.numel() > 1 and 0 in tensor.stride()):  # an expanded value
            return
        there = tensor.detach().to(self.device).contiguous()
        as_bytes = there.reshape(-1).view(torch.uint8)  # backends support different types
        dist.broadcast(as_bytes, src=dist.get_global_rank(self.group, source), group=self.group)
        tensor.copy_(there)

    def mean(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor by the mean over the ranks."""
        there = tensor.detach().to(self.device).double().contiguous() / self.ranks
        self._all_reduce(there)
        tensor.copy_(there)

    def named_state(self, **state: Any) -> dict[str, Any]:
        """A state_dict. Its key names the program's rank, so that torch.distributed.checkpoint keeps every rank's. Its value
        is a tuple, which that module stores as one value and can replace by one of another size."""
        rank, ranks = self._place_in_program()
        key = f"rank {rank} of {ranks}"
        return {key: ({**state, "rank": self.rank, "ranks": self.ranks},)}

    def _place_in_program(self) -> Place:
        return dist.get_rank(), dist.get_world_size()

    def own_state(self, state: dict[str, Any], advice: str = "") -> dict[str, Any]:
        """This rank's part of a state_dict; refuses one that lacks it, or that is of another number of ranks."""
        (key,) = self.named_state()
        parts = parts_of(state if key not in state else {key: state[key]})
        found = parts[0] if len(parts) == 1 else {}
        if (found.get("rank"), found.get("ranks")) != (self.rank, self.ranks):
            saved = [f"rank {part['rank']} of {part['ranks']}" for part in parts]
            raise Error(f"the state is of {', '.join(saved) or 'no rank'}, not of rank {self.rank} of {self.ranks}{advice}")
        return found


def parts_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks' parts of a state_dict. Earlier versions saved a part without a key."""
    return [state] if "rank" in state else [part for parts in state.values() for part in parts]


def all_parts(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of all ranks of a run, by rank; Error if one is absent or stands twice."""
    parts = sorted((part for state in states for part in parts_of(state)), key=lambda part: part["rank"])
    if not parts or [(p["rank"], p["ranks"]) for p in parts] != [(rank, len(parts)) for rank in range(len(parts))]:
        raise Error("the states must be those of all ranks, each once")
    return parts


def residuals_of(compressor: AnyCompressor) -> dict[str, np.ndarray]:
    return {name: found for name in compressor.names if (found := compressor.residual(name)) is not None}


def sum_of_residuals(ranks: Iterable[dict[str, np.ndarray]], factor: float) -> dict[str, torch.Tensor]:
    """By name, each times `factor` before it is added."""
    total: dict[str, torch.Tensor] = {}
    for residuals in ranks:
        for name, residual in residuals.items():
            scaled = torch.from_numpy(np.float32(factor) * residual)
            total[name] = total[name] + scaled if name in total else scaled
    return total


def device_for(method: Union[str, Own], keys: dict[str, Value], tensors: Iterable[torch.Tensor], channel: Channel) -> str:
    """The device that compresses gradients of these tensors. For device="auto", the default, it is their GPU if on all ranks
    the library has kernels for the method and a block's size is bounded, else the CPU. Collective."""
    places = {str(t.device) for t in tensors}
    place = [*places][0] if len(places) == 1 else "several devices"
    wanted = str(keys.get("device", "auto"))
    if wanted == "cpu":
        return wanted
    if isinstance(method, Own):
        return place if len(places) == 1 else "cpu"
    on_gpu = place.startswith("cuda:")
    if wanted != "auto" and not (on_gpu and wanted in ("cuda", place)):
        raise Error(f"device='{wanted}', and the parameters are on {place}; leave it out, or choose 'cpu'")
    # Without a capacity, a block on a GPU has room for all entries that a threshold may select.
    unbounded = not keys.get("capacity") and {"gaussiank", "threshold"} & {method, keys.get("select")}
    if on_gpu := on_gpu and not (wanted == "auto" and unbounded):
        trial: dict[str, Value] = {**keys, "dense_1d": False, "min_numel": 0, "scope": "tensor", "device": place}
        try:
            Compressor(method, {"all": (8, 8)}, keys=trial)
        except Error:
            if wanted != "auto":
                raise
            on_gpu = False
    # All ranks use the same kind of device, since blocks of a GPU and of the CPU do not mix.
    return "cpu" if channel.any(not on_gpu) else place
