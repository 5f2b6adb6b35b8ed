"""Between NumPy's arrays and addresses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Optional, Union

import numpy as np
import numpy.typing as npt

from ._library import Error, Type

Array = npt.NDArray[Any]
Buffer = Union[bytes, bytearray, memoryview, Array]

if sys.byteorder != "little":
    raise ImportError("topknot: numbers are little-endian")

DTYPES: dict[Type, npt.DTypeLike] = {Type.FLOAT32: np.float32, Type.BFLOAT16: np.uint16, Type.FLOAT16: np.float16}
_TYPES = {"float32": Type.FLOAT32, "bfloat16": Type.BFLOAT16, "float16": Type.FLOAT16}


def named_type(name: str) -> Type:
    if name not in _TYPES:
        raise Error(f"there is no type '{name}'; known: {', '.join(_TYPES)}")
    return _TYPES[name]


def address_of(what: str, array: Any, shape: tuple[int, ...], type: Type, *, writable: bool = False) -> int:
    """The address of an array's memory. Error where it is not what the library takes: `what` names it then."""
    if not isinstance(array, np.ndarray):
        raise Error(f"{what} is a {array.__class__.__name__}, not a NumPy array")
    if array.shape != shape:
        raise Error(f"{what} has shape {array.shape}, not {shape}")
    wanted = "uint16" if type == Type.BFLOAT16 else type.name.lower()
    if array.dtype.name not in (wanted, type.name.lower()) or not array.dtype.isnative:
        known = " (bfloat16 comes as uint16, with type='bfloat16')" if array.dtype.name == "uint16" else ""
        raise Error(f"{what} has numbers of type {array.dtype}, not {wanted}{known}")
    if not array.flags.c_contiguous:
        raise Error(f"{what} is not C-contiguous; numpy.ascontiguousarray() makes it so")
    if not array.flags.aligned:
        raise Error(f"{what} is not aligned; its copy() is")
    if writable and not array.flags.writeable:
        raise Error(f"{what} cannot be written to")
    return int(array.ctypes.data)


def type_of(array: Any, name: Optional[str]) -> Type:
    """The type by its name, or else by the array."""
    if name is not None:
        return named_type(name)
    dtype = getattr(array, "dtype", None)
    return _TYPES.get(getattr(dtype, "name", ""), Type.FLOAT32)  # which address_of() then asks for


class _Memory:
    """Memory of a round as an array, which keeps the round alive."""

    def __init__(self, owner: object, address: int, count: int, dtype: npt.DTypeLike, writable: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": np.dtype(dtype).str,
            "data": (address, not writable),
        }


def view(owner: object, address: Optional[int], count: int, dtype: npt.DTypeLike, *, writable: bool) -> Array:
    if not address or not count:
        return np.empty(0, dtype)
    return np.asarray(_Memory(owner, address, count, dtype, writable))


def bytes_of(what: str, buffer: Any) -> Array:
    """The buffer as an array of bytes, over the same memory."""
    try:
        array: Array = np.frombuffer(buffer, np.uint8)
        return array
    except (TypeError, ValueError, BufferError) as error:
        raise Error(f"{what} is not a contiguous buffer of bytes: {error}") from None


def sum_of(ranks: Sequence[Array], type: Type) -> Array:
    """The sum in rank order; of bfloat16 in float32, rounded once."""
    narrow = type == Type.BFLOAT16
    wide = [(numbers.astype(np.uint32) << 16).view(np.float32) if narrow else numbers for numbers in ranks]
    total: Array = wide[0].copy()
    for other in wide[1:]:
        total += other
    if not narrow:
        return total
    bits: Array = total.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # to nearest, ties to even
    return (np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded) >> 16).astype(np.uint16)
