"""What `sparsify` and `experiment` share: the package topknot with a library that was built, refusals as exit codes, tables."""

import argparse
import difflib
import os
import pathlib
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


def run(name, body):
    """What the program exits with; one message on standard error where it fails."""
    try:
        try:
            body()
            code = 0
        except SystemExit as end:  # argparse's
            code = end.code
        sys.stdout.flush()
        return code
    except Interrupted as stop:
        return _fail(name, 128 + stop.args[0], "interrupted; no output was written")
    except KeyboardInterrupt:
        return _fail(name, 130, "interrupted")
    except (Refusal, topknot.Error) as error:
        return _fail(name, 2, error)
    except MemoryError:
        return _fail(name, 2, "out of memory")
    except OSError as error:  # files have messages of their own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of what is left in the buffer nobody hears again
        return _fail(name, 2, f"standard output cannot be written: {error.strerror}; is the disk full?")


def unknown(kind, name, known):
    meant = difflib.get_close_matches(name, known, 1)
    return Refusal(f"unknown {kind} '{name}'" + (f"; did you mean '{meant[0]}'?" if meant else ";") + f" known: {', '.join(known)}")


def open_npy(path):
    """The array of a .npy file, read where it is used: float32 or float64, in C order, little-endian."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise Refusal(f"{path}: is no whole .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype not in (np.dtype("<f4"), np.dtype("<f8")):
        raise Refusal(f"{path}: holds {getattr(array, 'dtype', 'several arrays')}; little-endian float32 and float64 are read: "
                      "numpy.save(file, x.astype('<f4'))")
    if not array.flags.c_contiguous:
        raise Refusal(f"{path}: is in Fortran (column) order; save it in C order: numpy.save(file, numpy.ascontiguousarray(x))")
    return array


def shape_text(shape):
    return f"[{', '.join(map(str, shape))}]"


def count_text(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"


def table(header, rows):
    """Columns, the first to the left, the others to the right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip() for row in cells]
    return "\n".join(lines)
