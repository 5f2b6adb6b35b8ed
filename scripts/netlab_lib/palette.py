"""The look of the pages: the colours of tools/common/palette.def and the style of tools/common/page.cpp, as in the C++ programs."""

import os
import re

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "common")


def source(name):
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        return file.read()


def read(kind):
    """[(name, "#rrggbb")] of METHOD or PART, in the file's order."""
    return re.findall(rf'^{kind}\("([^"]*)", "(#[0-9a-f]{{6}})"\)$', source("palette.def"), re.MULTILINE)


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


def page_style():
    """The CSS of html_page()."""
    return re.search(r'kPageStyle = R"\((.*?)\)";', source("page.cpp"), re.DOTALL).group(1)
