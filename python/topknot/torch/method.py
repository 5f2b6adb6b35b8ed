"""Methods of compression in Python: what their objects have, and their rounds."""

from __future__ import annotations

import copy
import copyreg
import functools
import hashlib
import io
import itertools
import json
import math
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol, Union

import numpy as np
import torch

from .. import Error, State
from .._methods import Value

if TYPE_CHECKING:
    from ._channel import Channel, Shapes, Slices

_DTYPES = [
    torch.float64, torch.int64, torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.int8,
    torch.bool,
]  # fmt: skip


class PythonMethod(Protocol):
    """A method of compression. GRACE's compressors are such objects (Xu et al. 2021, github.com/sands-lab/grace).

    Three attributes are optional:
    sums: True if the ranks' tensors are summed, then decompressed once; they have equal sizes. Else every rank gets every
        rank's tensors, which may differ in size, and decompresses them in rank order.
    average: False if the result is not divided by the number of ranks.
    aggregate(tensors): combines the ranks' decompressed tensors; without it they are added.

    Checkpoints hold state_dict(), which load_state_dict() takes, or without these the object's attributes.
    """

    def compress(self, tensor: torch.Tensor, name: str, /) -> tuple[Union[torch.Tensor, Sequence[torch.Tensor]], Any]:
        """What is sent, and a context that stays on this rank: the same on all ranks, such as the shape.

        tensor: float32, contiguous, of the parameter's shape (its dimensions in memory order) and device, finite. The method
            owns it.
        name: the parameter's.
        """

    def decompress(self, tensors: Any, context: Any, /) -> torch.Tensor:
        """The inverse: float32 of the parameter's shape.

        tensors: a copy of what compress() gave on some rank, a list if it was a sequence; or the sum or average over ranks.
        context: what compress() gave on this rank.
        """


class Memory(Protocol):
    """Error feedback, as GRACE's memories have it; checkpoints as of a PythonMethod."""

    def compensate(self, tensor: torch.Tensor, name: str, /) -> torch.Tensor:
        """What compress() gets: float32, of the gradient's shape."""

    def update(self, tensor: torch.Tensor, name: str, compressor: Any, tensors: Any, context: Any, /) -> None:
        """Called after a finite exchange, with what compress() got and gave."""


class _Residual:
    """memory="residual": what was not sent is added to the next gradient (Seide et al. 2014)."""

    def __init__(self) -> None:
        self.residuals: dict[str, torch.Tensor] = {}

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor + self.residuals[name] if name in self.residuals else tensor

    def update(self, tensor: torch.Tensor, name: str, compressor: PythonMethod, tensors: Any, context: Any) -> None:
        self.residuals[name] = tensor - compressor.decompress(tensors, context)


class Own:
    """A user's method and memory."""

    def __init__(self, method: PythonMethod, memory: Union[str, Memory, None]) -> None:
        if isinstance(memory, str) and memory not in ("residual", "none"):
            raise Error(f"memory must be 'residual', 'none' or an object with compensate() and update(), not '{memory}'")
        self.method = method
        self.memory: Any = {"residual": _Residual(), "none": None}[memory] if isinstance(memory, str) else memory
        for what, each, *needed in ("method", method, "compress", "decompress"), ("memory", self.memory, "compensate", "update"):
            if isinstance(each, type):
                raise Error(f"the {what} is the class {each.__name__}; give an object of it: {each.__name__}(...)")
            if (each is not None or what == "method") and not all(callable(getattr(each, name, None)) for name in needed):
                raise Error(f"the {what} must be a name or an object with {'() and '.join(needed)}(), not {each!r}")

    def __str__(self) -> str:
        return type(self.method).__name__

    def check_merges(self) -> None:
        """Refuses states of a memory whose meaning is its own."""
        if not isinstance(self.memory, (_Residual, type(None))):
            raise Error(f"states of another number of ranks cannot be merged for the memory {type(self.memory).__name__}")


def chosen(
    method: Union[str, PythonMethod], memory: Union[str, Memory, None], keys: dict[str, Value]
) -> tuple[Union[str, Own], dict[str, Value]]:
    """The method, and its keys with the memory's name."""
    if isinstance(method, str):
        if memory is not None and not isinstance(memory, str):
            raise Error(f"'{method}' has memories of its own, named by memory=; an object goes with a method that is an object")
        return method, keys if memory is None else {**keys, "memory": memory}
    memory = "residual" if memory is None else memory
    own = Own(method, memory)
    if unknown := [key for key in keys if key != "dense_1d"]:
        raise Error(f"'{unknown[0]}' is a key of the library's methods; {own} takes its settings when it is made")
    named = memory if isinstance(memory, str) else type(memory).__name__
    return own, {"memory": named, **{key: bool(value) for key, value in keys.items()}}


def attributes_of(thing: Any) -> dict[str, Any]:
    slots = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]
    return {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else attributes_of(thing)


def _set_state(thing: Any, state: Any) -> None:
    if hasattr(thing, "load_state_dict"):
        thing.load_state_dict(state)
        return
    for name in attributes_of(thing):
        object.__delattr__(thing, name)
    for name, value in state.items():
        object.__setattr__(thing, name, value)


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor))


def _packed(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class _Layout:
    """A message's tensors in memory: by type in the order of _DTYPES, the widest first, so that all are aligned.

    text: in JSON, a parameter's list for each: whether compress() gave a tensor by itself, and the types and shapes.
    """

    def __init__(self, text: bytes) -> None:
        self.text, self._parameters = text, json.loads(text)
        types = [each for _, *own in self._parameters for each in own]
        self._shapes = [shape for _, *shape in types]
        by_type = [(dtype, [i for i, each in enumerate(types) if each[0] == code]) for code, dtype in enumerate(_DTYPES)]
        self._sections = [(dtype, section) for dtype, section in by_type if section]

    @staticmethod
    def of_parameter(tensors: Sequence[torch.Tensor], bare: bool) -> list[Any]:
        return [int(bare), *([_DTYPES.index(t.dtype), *t.shape] for t in tensors)]

    def joined(self, head: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of the tensors' bytes, after the head's."""
        sections = [torch.cat([tensors[index].reshape(-1) for index in section]) for _, section in self._sections]
        return torch.cat([head, *(section.view(torch.uint8) for section in sections)])

    def split(self, data: torch.Tensor) -> list[Any]:
        """The tensors of each parameter, views of a message's bytes."""
        tensors: list[Any] = [None] * len(self._shapes)
        for dtype, section in self._sections:
            sizes = [math.prod(self._shapes[index]) for index in section]
            part, data = data.tensor_split([dtype.itemsize * sum(sizes)])
            for index, tensor in zip(section, part.view(dtype).split_with_sizes(sizes)):
                tensors[index] = tensor.view(self._shapes[index])
        rest = iter(tensors)
        return [next(rest) if bare else [*itertools.islice(rest, len(own))] for bare, *own in self._parameters]


_layout = functools.lru_cache(64)(_Layout)  # most methods send the same in every step


_users: weakref.WeakValueDictionary[int, Own] = weakref.WeakValueDictionary()  # by the id of a method or memory


class MethodCompressor:
    """A rank's compressor by a method in Python, as LibraryCompressor is by one of the library's."""

    def __init__(self, own: Own, shapes: Shapes, channel: Channel, keys: dict[str, Value]) -> None:
        self.own, self.shapes, self.channel, self.names = own, shapes, channel, tuple(shapes)
        for each in (own.method, own.memory):
            if each is not None and _users.setdefault(id(each), own) is not own:
                raise Error(f"a {type(each).__name__} is in use by another hook or LocalSteps; make an object for each")
        self._undo, self._device = bool(keys.get("undo")), str(keys.get("device", "cpu"))
        self.whole = {name for name, shape in shapes.items() if keys.get("dense_1d") and len(shape) < 2}  # not compressed
        self._layouts: dict[tuple[str, ...], list[list[Any]]] = {}  # of sums, by the round's parameters
        self._compared: set[tuple[str, ...]] = set()  # rounds whose averages the ranks have compared
        self._before: tuple[int, Any] = (-1, None)  # a step and the state before it

    def index(self, name: str) -> int:
        return self.names.index(name)

    def encode_slices(self, slices: Slices, *, step: int, scale: float = 1.0, **_: float) -> MethodRound:
        """Compresses gradients times `scale`. Collective, because no rank compresses if a gradient is not finite on one."""
        if self._undo and self._before[0] != step:
            self._before = step, copy.deepcopy(self._states())
        order = sorted(slices, key=lambda index: self.names[index] in self.whole)
        given = torch.cat([slices[index].reshape(-1) for index in order]).float()
        if scale != 1:
            given *= scale
        finite = not self.channel.any(not _finite(given))
        return MethodRound(self, order, given if finite else None)

    def call(self, name: str, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result; its exceptions name the parameter and the rank."""
        try:
            return function(*arguments)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {where.filename}, line {where.lineno}"
            raise RuntimeError(f"{self.at(name)}: {what} failed: {place}: {error}") from error

    def at(self, name: str) -> str:
        return f"parameter '{name}', rank {self.channel.rank}"

    def check(self, name: str, what: str, tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise Error(f"{self.at(name)}: {what} gave {type(tensor).__name__}, not a tensor")
        if tensor.shape != self.shapes[name] or tensor.dtype != torch.float32:
            wanted = f"torch.float32 of shape {self.shapes[name]}"
            raise Error(f"{self.at(name)}: {what} gave {tensor.dtype} of shape {tuple(tensor.shape)}; return {wanted}")
        return tensor

    def _differs(self, names: tuple[str, ...], all_bytes: Sequence[bytes]) -> str:
        """A parameter whose bytes differ from rank 0's, and the rank, or nothing. Collective."""
        digests = bytearray(b"".join(hashlib.sha256(each).digest()[:8] for each in all_bytes))
        every = [each.view(-1, 8).tolist() for each in self.channel.all_gather(torch.frombuffer(digests, dtype=torch.uint8))]
        found = ((name, rank) for rank, own in enumerate(every) for name, a, b in zip(names, own, every[0]) if a != b)
        return next((f"parameter '{name}', rank {rank}" for name, rank in found), "")

    def agree_on_averages(self, averages: dict[str, torch.Tensor]) -> None:
        """Refuses averages whose bits differ between ranks; they are compared in a round's first step."""
        names = tuple(averages)
        if not names or names in self._compared:
            return
        self._compared.add(names)
        if where := self._differs(names, [t.cpu().numpy().tobytes() for t in averages.values()]):
            raise Error(
                f"{where}: the average is another than rank 0's; decompress() must do the same on all ranks, so the context that "
                "compress() gives must be the same: send what differs among the tensors"
            )

    def agree_on_sizes(self, names: tuple[str, ...], layouts: list[list[Any]]) -> None:
        """Refuses sums of tensors of other sizes or types than in the first round, in which the ranks compare theirs."""
        if names not in self._layouts:
            if where := self._differs(names, [json.dumps(each).encode() for each in layouts]):
                raise Error(f"{where}: compress() gave tensors of other sizes or types than rank 0's; leave out sums = True")
            self._layouts[names] = layouts
        if wrong := [name for name, a, b in zip(names, layouts, self._layouts[names]) if a != b]:
            where = self.at(wrong[0])
            raise Error(f"{where}: compress() gave tensors of other sizes than in the step before; leave out sums = True")

    def _states(self) -> dict[str, Any]:
        return {"method": _state_of(self.own.method), "memory": _state_of(self.own.memory)}

    def _set_states(self, states: dict[str, Any]) -> None:
        _set_state(self.own.method, states["method"])
        _set_state(self.own.memory, states["memory"])

    def undo(self, step: int) -> None:
        if self._before[0] == step:
            self._set_states(self._before[1])

    def save(self) -> bytes:
        for what, state in self._states().items():
            for name, value in (state if isinstance(state, dict) else {"state_dict()": state}).items():
                try:
                    torch.load(io.BytesIO(_packed(value)), weights_only=True)
                except Exception as error:
                    raise Error(
                        f"state '{name}' of the {what} {type(getattr(self.own, what)).__name__} cannot be in a checkpoint, which holds "
                        f"tensors, numbers, texts, lists and dicts: {error}. Give the object state_dict() and load_state_dict()"
                    ) from error
        return _packed(self._states())

    def load(self, state: Any) -> None:
        self._set_states(torch.load(io.BytesIO(bytes(state)), map_location=self._device, weights_only=True))

    def residual(self, name: str) -> Optional[np.ndarray]:
        found = self.own.memory.residuals.get(name) if isinstance(self.own.memory, _Residual) else None
        return None if found is None else found.cpu().numpy()

    def set_residual(self, name: str, residual: np.ndarray) -> None:
        self.own.memory.residuals[name] = torch.from_numpy(residual.copy()).to(self._device)


class MethodRound:
    """Gradients on their way, by a method in Python; as LibraryRound."""

    bounded = False

    def __init__(self, compressor: MethodCompressor, order: Sequence[int], given: Optional[torch.Tensor]) -> None:
        """order: indices of the parameters, those that are sent whole last; given: their gradients, None if not finite."""
        self._of, self._method, self._memory = compressor, compressor.own.method, compressor.own.memory
        self._order, names = order, [compressor.names[index] for index in order]
        self._names = [name for name in names if name not in compressor.whole]
        self.state = State.NOT_FINITE if given is None else State.MORE
        if given is not None:
            self._compress(given)

    def _parts(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The compressed parameters' parts of a vector."""
        shapes = [self._of.shapes[name] for name in self._names]
        parts = values.split_with_sizes([math.prod(shape) for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self._names, parts, shapes)}

    def _compress(self, given: torch.Tensor) -> None:
        of, sums = self._of, getattr(self._method, "sums", False)
        self._contexts: list[Any] = []
        self._averages = torch.zeros_like(given)
        self._end = sum(math.prod(of.shapes[name]) for name in self._names)
        whole = given[self._end :]
        self._given = self._parts(given[: self._end])
        types = dict.fromkeys([whole.dtype] if len(whole) else [])
        sent: list[torch.Tensor] = []
        layouts: list[list[Any]] = []
        for name in self._names:
            tensor = self._given[name]
            if self._memory is not None:
                tensor = of.check(name, "compensate()", of.call(name, "compensate()", self._memory.compensate, tensor, name))
                self._given[name] = tensor
                tensor = tensor.clone()  # update() gets the tensor too
            tensors = self._checked(name, of.call(name, "compress()", self._method.compress, tensor, name))
            layouts.append(_Layout.of_parameter(tensors, self._bare))
            sent += tensors
            types |= dict.fromkeys(t.dtype for t in tensors)
            if sums and (len(types) > 1 or not all(t.is_floating_point for t in types)):
                raise Error(f"{of.at(name)}: compress() gave {', '.join(map(str, types))}; what is summed is of one float type")
        if len(whole):
            layouts.append(_Layout.of_parameter([whole], True))
            sent.append(whole)
        text = json.dumps(layouts, separators=(",", ":")).encode()
        text += b" " * (-(4 + len(text)) % 8)
        self._layout, head = _layout(text), len(text).to_bytes(4, "little") + text
        self._message = self._layout.joined(torch.frombuffer(bytearray(head), dtype=torch.uint8).to(given.device), sent)
        self._data = self._message[len(head) :]
        if sums:
            of.agree_on_sizes(tuple(self._names), layouts)
            self._message = self._data.clone().view(*types or [torch.float32])
        self._sums = sums

    def _checked(self, name: str, result: Any) -> list[torch.Tensor]:
        where = f"{self._of.at(name)}: compress() gave"
        if not isinstance(result, tuple) or len(result) != 2:
            raise Error(f"{where} {type(result).__name__}; return a pair, (tensors, context)")
        tensors, context = result
        self._contexts.append(context)
        self._bare = isinstance(tensors, torch.Tensor)
        tensors = [tensors] if self._bare else tensors
        if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise Error(f"{where} {tensors!r:.60} as tensors; return a tensor or a list of tensors")
        if unknown := [str(t.dtype) for t in tensors if t.dtype not in _DTYPES]:
            raise Error(f"{where} {unknown[0]}; known: {', '.join(map(str, _DTYPES))}")
        if wrong := [str(t.layout) for t in tensors if t.layout != torch.strided]:
            raise Error(f"{where} a tensor of layout {wrong[0]}; send its indices and values")
        return [*tensors]

    def message(self) -> tuple[torch.Tensor, bool]:
        return self._message, self._sums

    def decode(self, blocks: Optional[Sequence[torch.Tensor]] = None) -> State:
        of, ranks, average = self._of, self._of.channel.ranks, getattr(self._method, "average", True)
        if blocks is None:
            messages = [self._layout.split((self._message / ranks if average else self._message).view(torch.uint8))]
        else:
            messages = []
            for block in blocks:
                end = 4 + int.from_bytes(bytes(block[:4].tolist()), "little")
                messages.append(_layout(bytes(block[4:end].tolist())).split(block[end:]))
        aggregate = getattr(self._method, "aggregate", None)
        averages, whole = self._parts(self._averages[: self._end]), self._averages[self._end :]
        for index, name in enumerate(self._names):
            # A result may be the method's own buffer, which its next call writes.
            results = (self._decompress(name, message[index], index) for message in messages)
            if blocks is None:
                averages[name].copy_(next(results))
            elif aggregate is None:
                for result in results:
                    averages[name] += result
            else:
                total = of.call(name, "aggregate()", aggregate, [result.clone() for result in results])
                averages[name].copy_(of.check(name, "aggregate()", total))
        if len(whole):
            whole.copy_(messages[0][-1])
            for message in messages[1:]:
                whole += message[-1]
        if blocks is not None or not average:  # else the sum has been divided
            (self._averages if average else whole).div_(ranks)
        of.agree_on_averages(averages)
        self.state = State.DONE if _finite(self._averages) else State.NOT_FINITE
        return self.state

    def _decompress(self, name: str, sent: Any, index: int) -> torch.Tensor:
        result = self._of.call(name, "decompress()", self._method.decompress, sent, self._contexts[index])
        return self._of.check(name, "decompress()", result)

    def commit(self, slices: Slices, scale: float = 1.0) -> None:
        """Replaces the slices by the averages times `scale`."""
        if self._memory is not None:
            for name, sent, context in zip(self._names, self._layout.split(self._data), self._contexts):
                self._of.call(name, "update()", self._memory.update, self._given[name], name, self._method, sent, context)
        if scale != 1:
            self._averages *= scale
        into = [slices[index] for index in self._order]
        parts = self._averages.split_with_sizes([s.numel() for s in into])
        torch._foreach_copy_(into, [part.view(s.shape) for part, s in zip(parts, into)])

    def discard(self) -> None:
        pass
