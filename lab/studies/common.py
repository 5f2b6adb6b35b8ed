"""What `sparsify` and `experiment` share: the package topknot with a library that was built, messages, tables."""

import argparse
import difflib
import functools
import json
import math
import os
import pathlib
import re
import sys

PROGRAM = pathlib.Path(sys.argv[0])
PYTHON = "/usr/bin/python3"  # the distribution's, which has NumPy where another one comes first and has it not

try:
    import numpy as np
except ImportError:
    if sys.executable != PYTHON and os.access(PYTHON, os.X_OK):
        os.execv(PYTHON, [PYTHON, *sys.argv])
    print(f"{PROGRAM.name}: NumPy is missing: apt-get install python3-numpy", file=sys.stderr)
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def _library():
    """The build's: the programs in BUILD/bin are links to the scripts."""
    link = PROGRAM.absolute()
    while True:
        if (path := link.parent.parent / "lib" / "libtopknot.so").exists():
            return path
        if not link.is_symlink():
            return ROOT / "build" / "lib" / "libtopknot.so"
        link = link.parent / os.readlink(link)


if "TOPKNOT_LIBRARY" not in os.environ and (path := _library()).exists():
    os.environ["TOPKNOT_LIBRARY"] = str(path)
sys.path.insert(0, str(ROOT / "python"))
try:
    import topknot

    topknot.methods  # loads libtopknot
except ImportError as error:
    print(f"{PROGRAM.name}: {error}", file=sys.stderr)
    sys.exit(2)


class Refusal(Exception):
    """A user's mistake, with what to do about it: exit code 2."""


class Interrupted(Exception):
    """A signal asked for an end; its number is the argument."""


class Parser(argparse.ArgumentParser):
    """Its description is broken into lines as wide as the terminal, the examples behind it stay as they are."""

    def __init__(self, name, usage, description, examples):
        super().__init__(name, usage, description, examples, allow_abbrev=False)

    def format_help(self):
        epilog, self.epilog = self.epilog, None
        text, self.epilog = super().format_help(), epilog
        return f"{text}\n{epilog}\n"

    def error(self, message):
        raise Refusal(f"{message}; '{self.prog} --help' shows how it is used")


def _fail(name, code, text):
    print(f"{name}: {text}", file=sys.stderr)
    return code


def _code(name, body):
    try:
        body()
        return 0
    except SystemExit as end:  # argparse's
        return end.code
    except Interrupted as stop:
        return _fail(name, 128 + stop.args[0], "interrupted; no output was written")
    except KeyboardInterrupt:
        return _fail(name, 130, "interrupted")
    except (Refusal, topknot.Error) as error:
        return _fail(name, 2, error)
    except MemoryError:
        return _fail(name, 2, "out of memory")


def run(name, body):
    """What the program exits with; one message on standard error where it fails."""
    code = 0
    try:
        code = _code(name, body)
        sys.stdout.flush()
    except OSError as error:  # files have messages of their own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer fails once
        code = code or _fail(name, 2, f"standard output cannot be written: {error.strerror}; is the disk full?")
    return code


def unknown(kind, name, known):
    meant = difflib.get_close_matches(name, known, 1)
    return Refusal(
        f"unknown {kind} '{name}'" + (f"; did you mean '{meant[0]}'?" if meant else ";") + f" known: {', '.join(known)}"
    )


def open_gradients(path):
    """What a run recorded (gradients.safetensors), or the array of a .npy file: float32 or float64, in C order,
    little-endian. Read where it is used."""
    try:
        if path.endswith(".safetensors"):
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                tensor = json.loads(file.read(min(length, 1 << 20)))["gradients"]
            array = np.memmap(path, {"F32": "<f4"}[tensor["dtype"]], "r", 8 + length).reshape(tensor["shape"])
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror or error}") from None
    except KeyError as error:
        raise Refusal(f"{path}: holds no recorded gradients: {error} is missing or unknown") from None
    except (ValueError, EOFError, TypeError, OverflowError) as error:
        raise Refusal(f"{path}: is no whole .npy or .safetensors file of numbers: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype not in (np.dtype("<f4"), np.dtype("<f8")):
        raise Refusal(
            f"{path}: holds {getattr(array, 'dtype', 'several arrays')}; little-endian float32 and float64 are read: "
            "numpy.save(file, x.astype('<f4'))"
        )
    if not array.flags.c_contiguous:
        raise Refusal(f"{path}: is in Fortran (column) order; save it in C order: numpy.save(file, numpy.ascontiguousarray(x))")
    return array


def shape_text(shape):
    return f"[{', '.join(map(str, shape))}]"


def count_text(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"


def table(rows):
    """Rows of cells, the first row the header; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def json_line(row):
    """What is not finite is null."""
    return json.dumps(
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}, separators=(",", ":")
    )


def short(value):
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Arguments:
    """The values of an experiment's keys, defaults or given as "key=value"."""

    def __init__(self, experiment, keys, given):
        self.experiment, self.values = experiment, {name: value for name, value, _ in keys}
        seen = set()
        for text in given:
            name, equals, value = text.partition("=")
            if not equals:
                raise Refusal(f"'{text}' is not key=value; 'experiment {experiment} --help' lists the keys")
            if name not in self.values:
                raise unknown(f"key of {experiment}", name, list(self.values))
            if name in seen:
                raise Refusal(f"'{name}' is given twice; give it once")
            seen.add(name)
            self.values[name] = value

    def __getitem__(self, key):
        return self.values[key]

    def _parsed(self, key, texts, kind, least, greatest, needs, example=""):
        try:
            values = [kind(text) for text in texts if re.fullmatch(r"[-+.\w]+", text, re.ASCII)]
        except ValueError:
            values = []
        if len(values) != len(texts) or not all(least <= value <= greatest for value in values):
            raise Refusal(
                f"{key} of experiment {self.experiment} needs {needs} from {least:g} to {greatest:g}{example}, not '{self[key]}'"
            )
        return values

    def whole(self, key, least, greatest):
        return self._parsed(key, [self[key]], int, least, greatest, "a whole number")[0]

    def numbers(self, key, least, greatest, kind=float):
        """One or more, as in 1,4,10."""
        needs = "whole numbers" if kind is int else "numbers"
        return self._parsed(key, self[key].split(","), kind, least, greatest, needs, ", as in 1,2")

    def folder(self):
        """Where the results go; it is made."""
        try:
            os.makedirs(self["out"], exist_ok=True)
        except OSError as error:
            raise Refusal(f"out: cannot create the folder '{self['out']}': {error.strerror}") from None
        return pathlib.Path(self["out"])


class Results:
    """An experiment's files in its folder."""

    def __init__(self, folder):
        self.folder, self.names = folder, []

    def write(self, name, content):
        """`content`: a text, or a figure of matplotlib."""
        try:
            if isinstance(content, str):
                (self.folder / name).write_text(content, encoding="utf-8")
            else:
                content.savefig(self.folder / name, bbox_inches="tight", metadata={"Date": None})
        except OSError as error:
            raise Refusal(f"{self.folder / name}: cannot be written: {error.strerror}") from None
        self.names += [name] if name not in self.names else []

    def rows(self, stem, rows):
        """As CSV, numbers with six digits, and as JSON lines."""
        lines = [",".join(rows[0]), *(",".join(map(short, row.values())) for row in rows)]
        self.write(stem + ".csv", "\n".join(lines) + "\n")
        self.write(stem + ".jsonl", "".join(json_line(row) + "\n" for row in rows))

    def done(self):
        if self.names:
            print(f"\nWritten: {', '.join(self.names)} in {self.folder}")
        if not pyplot():
            print("Plots need matplotlib: apt-get install python3-matplotlib")


@functools.cache
def pyplot():
    """matplotlib.pyplot, or None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "topknot", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3,
                                "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})  # fmt: skip
    from matplotlib import pyplot as module

    return module
