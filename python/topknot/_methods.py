"""Which methods and keys there are."""

from __future__ import annotations

import json
from typing import TypedDict, Union, cast

from ._library import LIBRARY

Value = Union[bool, int, float, str]


class _OptionAlways(TypedDict):
    name: str
    default: Value
    help: str


class Option(_OptionAlways, total=False):
    """A key. `least`, `greatest` and `choices` are there where the values have such limits."""

    least: float
    greatest: float
    choices: list[str]


class Method(TypedDict):
    help: str
    options: list[Option]
    """The method's own keys."""


class Pieces(TypedDict):
    """Names that the keys of these names take, to build sparse methods from."""

    select: list[str]
    memory: list[str]
    codec: list[str]
    values: list[str]


class Methods(TypedDict):
    methods: dict[str, Method]
    keys: list[Option]
    """The keys that all methods share."""
    pieces: Pieces


def methods() -> Methods:
    """All methods with their keys, the keys that all methods share, and the pieces that sparse methods are made of.

    `list(methods()["methods"])` has the names; `methods()["methods"]["qsgd"]["options"]` one method's keys.
    """
    return cast(Methods, json.loads(LIBRARY.topknot_methods()))
