"""python -m topknot COMMAND ...: the programs of this package. None of them needs libtopknot."""

from __future__ import annotations

import sys

_HELP = """topknot: programs on runs of `train`.

  topknot compare RUN...   puts runs side by side: tables, a page, pictures; 'topknot compare --help' has more
"""


def main() -> int:
    """Runs the command of the command line; returns its exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["compare"]:
        from .compare.cli import main as compare

        return compare(arguments[1:])
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f"topknot: there is no command '{arguments[0]}'; 'topknot --help' shows what there is", file=sys.stderr)
        return 2
    print(_HELP, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
