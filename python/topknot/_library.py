"""libtopknot through ctypes: the functions of include/topknot.h with their types, and its errors as exceptions."""

from __future__ import annotations

import enum
import os
import pathlib
import sys
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p

INTERFACE = 1  # TOPKNOT_INTERFACE of the header that this file was written after


class Error(ValueError):
    """A wrong argument, key, value or call, or a damaged message or state. Nothing has changed then."""


class NotFinite(Error):
    """There is a NaN or an infinity in some rank's gradients. Nothing has changed then."""


class State(enum.IntEnum):
    """What a round waits for, as `Round.decode()` says it."""

    MORE = 1
    """There is another message to exchange: `Round.message`, then `Round.decode()` again."""
    DONE = 2
    """The average is there: `Round.commit()` or `Round.discard()`."""
    NOT_FINITE = 3
    """Some rank's gradients have a NaN or an infinity, which all ranks find alike: `Round.discard()`."""


class Type(enum.IntEnum):
    """The type of the numbers behind a pointer."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


_INVALID = 4  # topknot_result; every other value that is not a State is a failure of the library

address = c_void_p


class Tensor(Structure):
    _fields_ = [("name", c_char_p), ("shape", POINTER(c_int64)), ("dimensions", c_size_t)]


class Step(Structure):
    _fields_ = [("step", c_int64), ("density", c_double), ("lr", c_double)]


class Message(Structure):
    _fields_ = [("block", address), ("block_bytes", c_size_t), ("sum", address), ("sum_count", c_size_t), ("sum_type", c_int)]


class Sent(Structure):
    _fields_ = [
        *((name, c_size_t) for name in ("target", "count", "over_capacity")),
        ("threshold", c_double), ("indices", address), ("values", address), ("entries", c_size_t),
    ]  # fmt: skip


_FUNCTIONS = {  # name: (result, arguments)
    "version": (c_char_p, []),
    "interface": (c_int, []),
    "error": (c_char_p, []),
    "methods": (c_char_p, []),
    "create": (c_int, [c_char_p, POINTER(c_char_p), c_size_t, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(address)]),
    "destroy": (None, [address]),
    "encode": (c_int, [address, POINTER(Step), POINTER(c_int32), c_size_t, POINTER(address), c_int, c_double, POINTER(address)]),
    "set_weights": (c_int, [address, POINTER(c_double)]),
    "message_of": (c_int, [address, POINTER(Message)]),
    "pieces_of": (c_int, [address, POINTER(c_size_t)]),
    "decode": (c_int, [address, POINTER(address), POINTER(c_size_t)]),
    "sent_of": (c_int, [address, c_size_t, POINTER(Sent)]),
    "commit": (c_int, [address, POINTER(address), c_int, c_double]),
    "discard": (None, [address]),
    "undo": (c_int, [address, c_int64]),
    "save": (c_int, [address, address, c_size_t, POINTER(c_size_t)]),
    "load": (c_int, [address, address, c_size_t]),
    "residual": (c_int, [address, c_int32, address, POINTER(c_int)]),
    "set_residual": (c_int, [address, c_int32, address]),
}  # fmt: skip


def _path() -> pathlib.Path:
    """Of the library: what TOPKNOT_LIBRARY says, or the file beside the package."""
    if chosen := os.environ.get("TOPKNOT_LIBRARY"):
        return pathlib.Path(chosen)
    package = sys.modules[__package__] if __package__ else None
    for folder in getattr(package, "__path__", []):  # an editable install has two
        if (path := pathlib.Path(folder, "libtopknot.so")).exists():
            return path
    raise ImportError(
        "topknot: there is no libtopknot.so in the package. Install it with pip (in the root of Topknot's sources: "
        "pip install .), or set TOPKNOT_LIBRARY to the library's path"
    )


def _open(path: pathlib.Path) -> CDLL:
    """The library; its OpenMP's waiting threads spin briefly, so that they leave the cores to others."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return CDLL(str(path))
    os.environ["GOMP_SPINCOUNT"] = "3000"  # read while libgomp is loaded; without effect if that has been
    try:
        return CDLL(str(path))
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def _load() -> CDLL:
    path = _path()
    try:
        library = _open(path)
        interface = library.topknot_interface()
    except (OSError, AttributeError) as error:
        raise ImportError(f"topknot: {path} cannot be loaded: {error}") from error
    if interface != INTERFACE:
        raise ImportError(f"topknot: {path} has interface {interface}, and this package needs {INTERFACE}; install both anew")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, "topknot_" + name)
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = _load()


def check(result: int) -> int:
    """The result of a call; an exception where it is an error."""
    if result < _INVALID:
        return result
    text: str = LIBRARY.topknot_error().decode(errors="replace")
    raise Error(text) if result == _INVALID else RuntimeError("topknot: " + text)
