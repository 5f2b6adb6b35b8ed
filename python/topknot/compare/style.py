"""The colours, dashes and markers of pictures and page, for which matplotlib is not needed."""

import importlib.util
from typing import Any, NamedTuple

from .comparison import Comparison, Method

AVAILABLE = importlib.util.find_spec("matplotlib") is not None
"""Whether matplotlib is installed."""
INSTALL = "pictures need matplotlib: install python3-matplotlib (Debian) or pip install matplotlib"
PICTURES = ("time", "epochs", "steps", "loss", "bits", "phases")
PART_COLOURS = {
    "data": "#bbbbbb", "forward": "#4477aa", "backward": "#9ad2ee", "encode": "#228833", "exposed": "#ee6677", "decode": "#aa3377",
    "update": "#ddcc55", "other": "#e4e4e4",
}  # fmt: skip
DARK = {PART_COLOURS["forward"], PART_COLOURS["decode"]}
"""Colours on which text is white."""
INK = "#010203"
"""The colour of text and of dense runs; on a page its own colours stand for this one and the next two."""
GRID, FAINT = "#d9dcd1", "#5a6368"
# Dark and light in turn, so that neighbours differ in grey too; dashes and markers tell them apart as well.
_COLOURS = ("#0b5fa5", "#e07b00", "#7a1fa2", "#2f9e6e", "#b3123f", "#6f8fd6", "#5b4a00", "#d264b0", "#006d77", "#a98a00")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)))
_MARKERS = "osD^vPX*<>"


class Style(NamedTuple):
    """A line's look."""

    colour: str
    dash: Any
    marker: str


def styles(c: Comparison) -> dict[Method, Style]:
    """By method: dense is black, each other one has a colour of its own while there are some, and a dash and a marker."""
    result = {}
    for dense in (True, False):
        for i, m in enumerate(m for m in c.methods if m.dense == dense):
            colour, turn = (INK, 0) if dense else (_COLOURS[i % len(_COLOURS)], 1)
            dash = _DASHES[(i + turn * (i // len(_COLOURS))) % len(_DASHES)]
            result[m] = Style(colour, dash, _MARKERS[(i + turn) % len(_MARKERS)])
    return result


def part_label(part: str) -> str:
    """How a legend names a part of a step."""
    return "exposed communication" if part == "exposed" else part
