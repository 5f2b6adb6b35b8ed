"""The colours of methods and of the parts of a step: those of tools/common/palette.def, which the C++ programs compile in."""

import os
import re

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "common", "palette.def")


def read(kind):
    """[(name, "#rrggbb")] of METHOD or PART, in the file's order."""
    with open(PATH, encoding="utf-8") as lines:
        return re.findall(rf'^{kind}\("([^"]*)", "(#[0-9a-f]{{6}})"\)$', lines.read(), re.MULTILINE)


def method_colour(name):
    """As tools/common/palette.cpp: a method that is not listed has a colour chosen by its name (FNV-1a)."""
    methods = read("METHOD")
    if name in dict(methods) and name:
        return dict(methods)[name]
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    others = [colour for known, colour in methods if not known]
    return others[value % len(others)]


def part_colour(name):
    return dict(read("PART"))[name]
