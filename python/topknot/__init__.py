"""Gradient compression for distributed training: the methods of Topknot, for programs that communicate by themselves.

A `Compressor` is one rank's: it compresses gradients into messages, and makes the ranks' average from all of them. What
carries the messages is the caller's: MPI, torch.distributed, pipes. One process can be all ranks as well:

    import numpy, topknot

    shapes = {"layer.weight": (256, 128), "layer.bias": (256,)}
    ranks = [topknot.Compressor("topk", shapes, rank=r, ranks=4, density=0.01) for r in range(4)]
    gradients = [{name: numpy.random.randn(*shape).astype("float32") for name, shape in shapes.items()} for _ in ranks]
    average = topknot.average(ranks, gradients, step=0)  # {"layer.weight": array, "layer.bias": array}

What a step did not send waits in the compressor (error feedback) and goes with the next steps' gradients.
`topknot.methods()` says which methods and keys there are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._arrays import Array, Buffer
    from ._library import Error, NotFinite, State, Type
    from ._methods import Method, Methods, Option, Recipe, methods
    from .compressor import Compressor, Message, MessagePointers, Round, Sent, average, exchange

    __version__: str

__all__ = [
    "Array",
    "Buffer",
    "Compressor",
    "Error",
    "Message",
    "MessagePointers",
    "Method",
    "Methods",
    "NotFinite",
    "Option",
    "Recipe",
    "Round",
    "Sent",
    "State",
    "Type",
    "average",
    "exchange",
    "methods",
]


def __getattr__(name: str) -> Any:
    """Loads libtopknot with the first name that needs it: `topknot compare` does without."""
    if name == "__version__":
        return __getattr__("LIBRARY").topknot_version().decode()
    for module in ("_methods", "compressor") if name in (*__all__, "LIBRARY") else ():
        if hasattr(found := importlib.import_module(f".{module}", __name__), name):
            value = globals()[name] = getattr(found, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
