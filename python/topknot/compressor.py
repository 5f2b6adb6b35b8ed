"""A rank's compressor and its rounds; all ranks in one process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import numbers
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from . import _library
from ._arrays import DTYPES, Array, Buffer, address_of, bytes_of, named_type, sum_of, type_of, view
from ._library import LIBRARY, Error, NotFinite, State, Type, check
from ._methods import Value


def _whole(what: str, value: Any, bits: int) -> int:
    """The value as an integer that fits: ctypes would cut it off."""
    number = operator.index(value)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise Error(f"{what} must fit {bits} bits, not {number}")
    return number


def _text(what: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise Error(f"{what} must be a text, not a {type(text).__name__}")
    if "\0" in text:
        raise Error(f"{what} has a zero byte in it")
    return text.encode()


def _key(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        text = value
    elif isinstance(value, (bool, np.bool_)):
        text = "true" if value else "false"
    elif isinstance(value, numbers.Integral):
        text = repr(int(value))
    elif isinstance(value, numbers.Real):
        text = repr(float(value))
    else:
        raise Error(f"key '{name}' must be a number, a bool or a str, not a {type(value).__name__}")
    return _text(f"key '{name}'", f"{name}={text}")


class Message(NamedTuple):
    """What this rank sends: a block, or numbers. The arrays are the round's memory, valid until its next call."""

    block: Optional[Array]
    """Bytes (uint8) of any length, that every rank gets from every rank; or None."""
    sum: Optional[Array]
    """Numbers of one length on all ranks, to be replaced by their sum over the ranks; or None. float32, or bfloat16 as
    uint16."""
    sum_type: str
    """"float32" or "bfloat16"."""


class Sent(NamedTuple):
    """What this rank sends of a tensor; with scope="model", of the vector of all that are compressed."""

    target: int
    """Entries that the density asks for; 0: the method sends no entries."""
    entries: int
    """Entries sent, or the numbers that the method sends in their place."""
    over_capacity: int
    """Entries that key capacity kept back."""
    threshold: float
    """What magnitudes were compared with; 0: nothing."""
    indices: Optional[Array]
    """The positions of `values` (uint32), or None: all. The arrays are the round's memory, valid until its next call."""
    values: Optional[Array]
    """What the rank contributes, before its weight, as all ranks decode it; None before decode() says DONE, and of methods
    that do not know it (dense, and the low-rank ones)."""


class MessagePointers(NamedTuple):
    """A message as addresses, for those who have no use for NumPy's arrays. A block where `sum_count` is 0."""

    block: int
    block_bytes: int
    sum: int
    sum_count: int
    sum_type: Type


class _Handle:
    """A compressor's memory in the library, which its rounds share; the lock keeps calls and close() apart."""

    def __init__(self) -> None:
        self.value: Optional[int] = None
        self.lock = threading.RLock()


class Round:
    """Gradients on their way, from `Compressor.encode()`: exchange, decode, commit.

        with compressor.encode(gradients, step=step) as round:
            state = State.MORE
            while state is State.MORE:
                message = round.message
                if message.block is not None:
                    state = round.decode(gather_from_all_ranks(message.block))
                else:
                    message.sum[:] = sum_over_all_ranks(message.sum)
                    state = round.decode()
            if state is State.DONE:
                averages = round.commit()

    A round that is not committed when the `with` ends, or when the object is collected, is discarded. All ranks must
    commit, or all discard.
    """

    def __init__(self, compressor: Compressor, handle: int, indices: tuple[int, ...], type: Type) -> None:
        self._compressor = compressor
        self._owner = compressor._owner
        self._discard = LIBRARY.topknot_discard  # which __del__() needs where the module is gone
        self._handle: Optional[int] = handle
        self._indices = indices
        self._type = type

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors, in its order."""
        return tuple(self._compressor.names[i] for i in self._indices)

    @property
    def device(self) -> str:
        """Where its messages lie: the compressor's key."""
        return self._compressor.device

    @property
    def open(self) -> bool:
        """Whether it is neither committed nor discarded."""
        return self._handle is not None and self._owner.value is not None

    def _open(self) -> int:
        if self._handle is None or self._owner.value is None:
            raise Error("the round has ended")
        return self._handle

    @property
    def message(self) -> Message:
        """What is to be sent now."""
        pointers = self.message_pointers()
        self._compressor._require_host("message_pointers()")
        if not pointers.sum_count:
            return Message(view(self, pointers.block, pointers.block_bytes, np.uint8, writable=False), None, "float32")
        numbers_ = view(self, pointers.sum, pointers.sum_count, DTYPES[pointers.sum_type], writable=True)
        return Message(None, numbers_, pointers.sum_type.name.lower())

    def message_pointers(self) -> MessagePointers:
        """What is to be sent now, as addresses."""
        message = _library.Message()
        with self._owner.lock:
            check(LIBRARY.topknot_message_of(self._open(), ctypes.byref(message)))
        return MessagePointers(
            message.block or 0, message.block_bytes, message.sum or 0, message.sum_count, Type(message.sum_type)
        )

    def pieces(self) -> int:
        """Above 0: the message is so many pieces of one length, by rank, and decode() takes the ranks' pieces for this one
        in place of whole blocks."""
        pieces = ctypes.c_size_t()
        with self._owner.lock:
            check(LIBRARY.topknot_pieces_of(self._open(), ctypes.byref(pieces)))
        return pieces.value

    def decode(self, blocks: Optional[Sequence[Buffer]] = None) -> State:
        """Takes what the exchange brought: every rank's block, own included, in rank order; or nothing, where the
        message was a sum, which is then in the message's memory.

        After an Error, as for a damaged block, the round can only be discarded.
        """
        if blocks is None:
            return self._decode(None, None)
        self._compressor._require_host("decode_pointers()")
        arrays = [bytes_of(f"rank {rank}'s block", block) for rank, block in enumerate(blocks)]
        return self.decode_pointers([array.ctypes.data for array in arrays], [array.size for array in arrays])

    def decode_pointers(self, addresses: Sequence[int], sizes: Sequence[int]) -> State:
        """decode() of blocks at these addresses, by rank, of so many bytes."""
        ranks = self._compressor.ranks
        if len(addresses) != ranks or len(sizes) != ranks:
            raise Error(f"there are {ranks} ranks, and {len(addresses)} blocks")
        return self._decode((ctypes.c_void_p * ranks)(*addresses), (ctypes.c_size_t * ranks)(*sizes))

    def _decode(self, blocks: Any, sizes: Any) -> State:
        with self._owner.lock:
            return State(check(LIBRARY.topknot_decode(self._open(), blocks, sizes)))

    def sent(self, name: str) -> Sent:
        """What this rank sends of a tensor of the round. For studies."""
        index = self._compressor.index(name)
        if index not in self._indices:
            raise Error(f"there is no tensor '{name}' in the round")
        sent = _library.Sent()
        with self._owner.lock:
            check(LIBRARY.topknot_sent_of(self._open(), self._indices.index(index), ctypes.byref(sent)))
        known, n = sent.values is not None, sent.entries
        indices = view(self, sent.indices, n, np.uint32, writable=False) if sent.indices else None
        values = view(self, sent.values, n, np.float32, writable=False) if known else None
        return Sent(sent.target, sent.count, sent.over_capacity, sent.threshold, indices, values)

    def commit(
        self, out: Optional[Mapping[str, Array]] = None, *, scale: float = 1.0, type: Optional[str] = None
    ) -> dict[str, Array]:
        """Ends the round: keeps what was not sent, and returns the averages over the ranks times `scale`, by name.

        They are written to the arrays of `out`, which may be the gradients and may leave tensors out; without `out`
        they are new arrays. They have the gradients' type, or `type`: "float32", "float16", or "bfloat16" (as uint16).
        """
        self._compressor._require_host("commit_pointers()")
        with self._owner.lock:
            self._open()
            names, shapes = self.names, self._compressor.shapes
            if out is None:
                kind = self._type if type is None else named_type(type)
                out = {name: np.empty(shapes[name], DTYPES[kind]) for name in names}
            else:
                first = next(iter(out.values()), None)
                same = type is None and self._type == Type.BFLOAT16 and getattr(first, "dtype", None) == np.uint16
                kind = self._type if same or first is None else type_of(first, type)
                if unknown := [name for name in out if name not in names]:
                    raise Error(f"there is no tensor '{unknown[0]}' in the round")
            addresses = [
                address_of(f"out['{name}']", out[name], shapes[name], kind, writable=True) if name in out else None
                for name in names
            ]
            self.commit_pointers(addresses, kind, scale)
        return dict(out)

    def commit_pointers(self, addresses: Sequence[Optional[int]], type: Type, scale: float = 1.0) -> None:
        """commit() to these addresses, in the order of the round's tensors; None or 0: not wanted."""
        count = len(self._indices)
        if len(addresses) != count:
            raise Error(f"the round has {count} tensors, and there are {len(addresses)} addresses")
        to, kind = (ctypes.c_void_p * count)(*addresses), Type(type)
        with self._owner.lock:
            handle, self._handle = self._open(), None
            check(LIBRARY.topknot_commit(handle, to, kind, scale))

    def discard(self) -> None:
        """Ends the round and forgets the step: everything is as before encode(). Of a round that has ended: nothing."""
        with self._owner.lock:
            handle, self._handle = self._handle, None
            if handle is not None and self._owner.value is not None:  # a compressor takes its rounds with it
                self._discard(handle)

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.discard()


class Compressor:
    """One rank's compressor of some tensors.

    `method` is a name and `keys` are options from `methods()`, such as density=0.01 or codec="rice"; a key that is also
    a parameter here (PowerSGD's rank) goes into the mapping: Compressor("powersgd", shapes, rank=r, ranks=4,
    keys={"rank": 2}). With device="cuda:0" gradients, messages and averages lie in that GPU's memory; addresses then stand for
    NumPy's arrays (encode_pointers(), ...). `shapes` has each tensor's name and shape; names, their order, shapes, `ranks`, method and keys
    are the same on all ranks.

    Methods, and the rounds' too, may be called from several threads; they wait for each other, without Python's global
    lock. Key `threads` limits a call's own threads. In a process that was forked after a call, OpenMP does not work:
    make processes by "spawn" or "forkserver".
    """

    def __init__(
        self,
        method: str,
        shapes: Mapping[str, Sequence[int]],
        *,
        rank: int = 0,
        ranks: int = 1,
        keys: Optional[Mapping[str, Value]] = None,
        **more: Value,
    ) -> None:
        self._owner = _Handle()
        self._destroy = LIBRARY.topknot_destroy  # which __del__() needs where the module is gone
        self.method = method
        self.rank, self.ranks = _whole("rank", rank, 32), _whole("ranks", ranks, 32)
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(_whole(f"the shape of '{name}'", n, 64) for n in shape) for name, shape in shapes.items()
        }
        self.names: tuple[str, ...] = tuple(self.shapes)
        self._index = {name: i for i, name in enumerate(self.names)}

        pairs = [*(keys or {}).items(), *more.items()]
        self.device = str(dict(pairs).get("device", "cpu"))
        texts = (ctypes.c_char_p * len(pairs))(*(_key(*pair) for pair in pairs))
        tensors = (_library.Tensor * len(self.shapes))()
        for tensor, (name, shape) in zip(tensors, self.shapes.items()):
            tensor.name = _text("a tensor's name", name)
            tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
            tensor.dimensions = len(shape)
        made = ctypes.c_void_p()
        check(
            LIBRARY.topknot_create(
                _text("the method's name", method), texts, len(pairs), tensors, len(tensors), self.rank, self.ranks,
                ctypes.byref(made),
            )
        )  # fmt: skip
        self._owner.value = made.value

    def _open(self) -> int:
        if self._owner.value is None:
            raise Error("the compressor is closed")
        return self._owner.value

    def _require_host(self, instead: str) -> None:
        if self.device != "cpu":
            raise Error(f"with device='{self.device}' there are no arrays of NumPy's; use {instead}")

    def index(self, name: str) -> int:
        """The tensor's place in `shapes`."""
        if name not in self._index:
            raise Error(f"there is no tensor '{name}'")
        return self._index[name]

    def encode(
        self,
        gradients: Mapping[str, Array],
        *,
        step: int,
        density: float = 0.0,
        lr: float = 1.0,
        scale: float = 1.0,
        order: Optional[Sequence[str]] = None,
        type: Optional[str] = None,
    ) -> Round:
        """Compresses gradients times `scale`, of all tensors or some. They are read before this returns.

        gradients: by name, C-contiguous, each of its tensor's shape, all float32 or all float16; or bfloat16 as uint16,
            with type="bfloat16". Tensors of a round that has not ended are refused.
        step: counts from 0, the same on all ranks; part of what random methods draw from.
        density: of this step, in (0, 1]; 0: key density.
        lr: the learning rate, for key lr_inside.
        order: of the tensors in the message, the same on all ranks; as in `shapes` without it.
        """
        self._require_host("encode_pointers()")
        if order is None:
            for name in gradients:
                self.index(name)
            order = [name for name in self.names if name in gradients]
        elif sorted(order) != sorted(gradients):
            raise Error("order must have the gradients' names, each once")
        indices = [self.index(name) for name in order]
        # What NumPy computes from arrays without dimensions are scalars.
        arrays = [np.asarray(g) if isinstance(g, np.generic) else g for g in (gradients[name] for name in order)]
        kind = type_of(arrays[0], type) if arrays else Type.FLOAT32
        addresses = [address_of(f"gradient '{name}'", array, self.shapes[name], kind) for name, array in zip(order, arrays)]
        return self.encode_pointers(indices, addresses, kind, step=step, density=density, lr=lr, scale=scale)

    def encode_pointers(
        self,
        indices: Sequence[int],
        addresses: Sequence[int],
        type: Type,
        *,
        step: int,
        density: float = 0.0,
        lr: float = 1.0,
        scale: float = 1.0,
    ) -> Round:
        """encode() of the gradients at these addresses, of the tensors of these indices (their places in `shapes`)."""
        count = len(indices)
        if len(addresses) != count:
            raise Error(f"there are {count} indices and {len(addresses)} addresses")
        context = _library.Step(_whole("step", step, 64), density, lr)
        made = ctypes.c_void_p()
        with self._owner.lock:
            check(
                LIBRARY.topknot_encode(
                    self._open(), ctypes.byref(context), (ctypes.c_int32 * count)(*indices), count,
                    (ctypes.c_void_p * count)(*addresses), Type(type), scale, ctypes.byref(made),
                )
            )  # fmt: skip
            assert made.value is not None
            return Round(self, made.value, tuple(indices), type)

    def set_weights(self, weights: Optional[Sequence[float]]) -> None:
        """Weights of the ranks in the average, such as the sizes of their shards: above 0, by rank, the same on all ranks;
        only their ratios matter. For rounds that begin later; None: equal, as in the beginning. save() has them not."""
        if weights is not None and len(weights) != self.ranks:
            raise Error(f"there are {self.ranks} ranks, and {len(weights)} weights")
        with self._owner.lock:
            given = None if weights is None else (ctypes.c_double * self.ranks)(*weights)
            check(LIBRARY.topknot_set_weights(self._open(), given))

    def undo(self, step: int) -> None:
        """Takes back the last commit of every tensor whose step was `step`; needs key undo=True. For steps that are found
        to be of no use after they were committed, by all ranks alike."""
        with self._owner.lock:
            check(LIBRARY.topknot_undo(self._open(), _whole("step", step, 64)))

    def save(self) -> bytes:
        """Residuals and what the method carries, of this rank, for load(). Between rounds only."""
        size = ctypes.c_size_t()
        with self._owner.lock:
            check(LIBRARY.topknot_save(self._open(), None, 0, ctypes.byref(size)))
            state = np.empty(size.value, np.uint8)
            check(LIBRARY.topknot_save(self._open(), state.ctypes.data, state.size, ctypes.byref(size)))
        return state.tobytes()

    def load(self, state: Buffer) -> None:
        """Takes what save() gave, of a compressor of the same method, keys, names, shapes and `ranks`. Between rounds only;
        after an Error nothing has changed."""
        array = bytes_of("the state", state)
        with self._owner.lock:
            check(LIBRARY.topknot_load(self._open(), array.ctypes.data, array.size))

    def residual(self, name: str) -> Optional[Array]:
        """What is added to the tensor's next gradient, float32 of its shape: what was not sent, times feedback_decay (with
        transform="block" in the order of blocks, with "dct" their coefficients). None where the method keeps nothing.
        Between rounds only."""
        array = np.empty(self.shapes[self.names[self.index(name)]], np.float32)
        has = ctypes.c_int()
        with self._owner.lock:
            check(LIBRARY.topknot_residual(self._open(), self.index(name), array.ctypes.data, ctypes.byref(has)))
        return array if has.value else None

    def set_residual(self, name: str, residual: Array) -> None:
        """Replaces what residual() returns; Error if a number is not finite."""
        address = address_of("the residual", residual, self.shapes[self.names[self.index(name)]], Type.FLOAT32)
        with self._owner.lock:
            check(LIBRARY.topknot_set_residual(self._open(), self.index(name), address))

    def close(self) -> None:
        """Frees everything, of rounds that have not ended too. A second time it does nothing."""
        with self._owner.lock:
            handle, self._owner.value = self._owner.value, None
            if handle is not None:
                self._destroy(handle)

    def __enter__(self) -> Compressor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_destroy"):
            self.close()

    def __repr__(self) -> str:
        count = sum(math.prod(shape) for shape in self.shapes.values())
        return (
            f"<topknot.Compressor {self.method}, rank {self.rank} of {self.ranks}, "
            f"{len(self.names)} tensors of {count} elements{'' if self._owner.value else ', closed'}>"
        )


def exchange(rounds: Sequence[Round], observe: Optional[Callable[[list[Message]], None]] = None) -> State:
    """The exchange within this process, of all ranks' rounds in order, sums in rank order, until they are decoded: DONE or
    NOT_FINITE. `observe` gets the ranks' messages before each is exchanged. For studies and tests."""
    for own in rounds:
        own._compressor._require_host("an exchange of your own")
    state = State.MORE
    while state is State.MORE:
        if observe:
            observe([round.message for round in rounds])
        messages = [round.message_pointers() for round in rounds]
        if messages[0].sum_count:
            sums = [view(r, m.sum, m.sum_count, DTYPES[m.sum_type], writable=True) for r, m in zip(rounds, messages)]
            total = sum_of(sums, messages[0].sum_type)
            for own_sum in sums:
                own_sum[:] = total
            states = {round.decode() for round in rounds}
        else:
            blocks, sizes = [m.block for m in messages], [m.block_bytes for m in messages]
            states = {round.decode_pointers(blocks, sizes) for round in rounds}
        if len(states) != 1:
            raise RuntimeError("topknot: the ranks do not agree about the step")
        state = states.pop()
    return state


def average(
    compressors: Sequence[Compressor],
    gradients: Sequence[Mapping[str, Array]],
    *,
    step: int,
    density: float = 0.0,
    lr: float = 1.0,
    scale: float = 1.0,
    order: Optional[Sequence[str]] = None,
    type: Optional[str] = None,
) -> dict[str, Array]:
    """The average of `gradients`, one mapping for each rank, by compressors that are all ranks, 0 to P - 1, in order:
    encode(), exchange within the process, sums in rank order, decode(), commit(). For studies and tests.

    The other arguments are encode()'s; `scale` is of the gradients. Raises NotFinite where a gradient has a NaN or an
    infinity. After an exception nothing has changed.
    """
    ranks = len(compressors)
    if len(gradients) != ranks or [(c.rank, c.ranks) for c in compressors] != [(r, ranks) for r in range(ranks)]:
        raise Error(f"there must be a compressor and gradients for each of {ranks} ranks, in order")
    with contextlib.ExitStack() as stack:
        rounds = [
            stack.enter_context(compressor.encode(own, step=step, density=density, lr=lr, scale=scale, order=order, type=type))
            for compressor, own in zip(compressors, gradients)
        ]
        if exchange(rounds) is State.NOT_FINITE:
            raise NotFinite("there is a NaN or an infinity in the gradients")
        averages = rounds[0].commit()
        for round in rounds[1:]:
            round.commit({})
    return averages
