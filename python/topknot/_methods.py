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
    settings: dict[str, str]
    """What the method's paper or its authors' code says of keys of a run file, such as "compress.density"."""


class Recipe(TypedDict):
    """A published way to use a method with local steps."""

    help: str
    method: str
    settings: dict[str, str]


class Pieces(TypedDict):
    """Names that the keys of these names take, to build sparse methods from."""

    select: list[str]
    memory: list[str]
    codec: list[str]
    values: list[str]


class Methods(TypedDict):
    methods: dict[str, Method]
    recipes: dict[str, Recipe]
    keys: list[Option]
    """The keys that all methods share."""
    pieces: Pieces


def methods() -> Methods:
    """All methods with their keys, recipes of local steps, the keys that all methods share, and the pieces that sparse methods are made of.

    `list(methods()["methods"])` has the names; `methods()["methods"]["qsgd"]["options"]` one method's keys.
    """
    return cast(Methods, json.loads(LIBRARY.topknot_methods()))
