"""libtopknot through ctypes: the functions of include/topknot.h with their types, and its errors as exceptions."""

from __future__ import annotations

import ctypes
import enum
import os
import pathlib
import sys

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

address = ctypes.c_void_p


class Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_int64)), ("dimensions", ctypes.c_size_t)]


class Step(ctypes.Structure):
    _fields_ = [("step", ctypes.c_int64), ("density", ctypes.c_double), ("lr", ctypes.c_double)]


class Message(ctypes.Structure):
    _fields_ = [
        ("block", address),
        ("block_bytes", ctypes.c_size_t),
        ("sum", address),
        ("sum_count", ctypes.c_size_t),
        ("sum_type", ctypes.c_int),
    ]


class Sent(ctypes.Structure):
    _fields_ = [
        ("target", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("over_capacity", ctypes.c_size_t),
        ("threshold", ctypes.c_double),
        ("indices", address),
        ("values", address),
        ("entries", ctypes.c_size_t),
    ]


_FUNCTIONS = {  # name: (result, arguments)
    "version": (ctypes.c_char_p, []),
    "interface": (ctypes.c_int, []),
    "error": (ctypes.c_char_p, []),
    "methods": (ctypes.c_char_p, []),
    "create": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.POINTER(Tensor), ctypes.c_size_t,
         ctypes.c_int, ctypes.c_int, ctypes.POINTER(address)],
    ),
    "destroy": (None, [address]),
    "encode": (
        ctypes.c_int,
        [address, ctypes.POINTER(Step), ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t, ctypes.POINTER(address),
         ctypes.c_int, ctypes.c_double, ctypes.POINTER(address)],
    ),
    "set_weights": (ctypes.c_int, [address, ctypes.POINTER(ctypes.c_double)]),
    "message_of": (ctypes.c_int, [address, ctypes.POINTER(Message)]),
    "pieces_of": (ctypes.c_int, [address, ctypes.POINTER(ctypes.c_size_t)]),
    "decode": (ctypes.c_int, [address, ctypes.POINTER(address), ctypes.POINTER(ctypes.c_size_t)]),
    "sent_of": (ctypes.c_int, [address, ctypes.c_size_t, ctypes.POINTER(Sent)]),
    "commit": (ctypes.c_int, [address, ctypes.POINTER(address), ctypes.c_int, ctypes.c_double]),
    "discard": (None, [address]),
    "undo": (ctypes.c_int, [address, ctypes.c_int64]),
    "save": (ctypes.c_int, [address, address, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]),
    "load": (ctypes.c_int, [address, address, ctypes.c_size_t]),
    "residual": (ctypes.c_int, [address, ctypes.c_int32, address, ctypes.POINTER(ctypes.c_int)]),
    "set_residual": (ctypes.c_int, [address, ctypes.c_int32, address]),
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


def _open(path: pathlib.Path) -> ctypes.CDLL:
    """The library; its OpenMP's waiting threads spin briefly, so that they leave the cores to others."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return ctypes.CDLL(str(path))
    os.environ["GOMP_SPINCOUNT"] = "3000"  # read while libgomp is loaded; without effect if that has been
    try:
        return ctypes.CDLL(str(path))
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def _load() -> ctypes.CDLL:
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
