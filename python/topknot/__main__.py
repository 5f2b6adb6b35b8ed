"""topknot COMMAND ..., also python -m topknot: the programs of this package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterable
from typing import Any

from .compare.comparison import did_you_mean

_HELP = """topknot COMMAND ...

  topknot compare RUN...   puts runs side by side: tables, a page, pictures; 'topknot compare --help' has more
  topknot methods [NAME]   which methods of compression there are: paper, bits per parameter and step, keys
  topknot doctor           what this machine has, and whether every method works here
  topknot train FILE...    trains in C++; needs the trainer, as demo does; 'topknot train --help' has more
  topknot demo             the same small network with four methods over a slow link, in about two minutes"""
_BITS = """
bits: per parameter and step (dense: 32), in the first step of a 256 x 256 matrix of normal numbers, with the defaults
(density 0.001; threshold 2.5). Methods that take what exceeds a bound have none yet in a first step."""
_COMMANDS = ("compare", "methods", "doctor", "train", "demo")
# By command: the program's place in the package topknot_trainer, and in these sources.
_TRAINER = {"train": ("bin/train", "build/bin/train"), "demo": ("bin/demo", "scripts/demo")}
_PAPERS = {
    "acpsgd": "Zhang et al. 2023", "chunk_topk": "Sarfi et al. 2025", "demo": "Peng et al. 2024", "dgc": "Lin et al. 2018",
    "gaussiank": "Shi et al. 2019", "gaussiank_calibrated": "after Shi et al. 2019", "gradient_dropping": "Aji and Heafield 2017",
    "lags": "Shi et al. 2020", "mstopk": "Shi et al. 2021", "powersgd": "Vogels et al. 2019", "qsgd": "Alistarh et al. 2017",
    "randk": "Stich et al. 2018", "redsync": "Fang et al. 2019", "regtopk": "Bereyhi et al. 2024", "sidco": "Abdelmoniem et al. 2021",
    "signsgd": "Karimireddy et al. 2019", "sparseloco": "Sarfi et al. 2025", "terngrad": "Wen et al. 2017", "threshold": "Strom 2015",
    "topk": "Stich et al. 2018", "trimmed_topk": "Fang et al. 2019",
}  # fmt: skip


def trainer(command: str) -> pathlib.Path | None:
    """The program of a command that needs the trainer: of the package topknot_trainer, or of a build in these sources."""
    packaged, built = _TRAINER[command]
    found = importlib.util.find_spec("topknot_trainer")
    sources = pathlib.Path(__file__).resolve().parents[2]
    places = [pathlib.Path(folder, packaged) for folder in (found and found.submodule_search_locations) or ()]
    if (sources / "build/bin/train").exists():
        places.append(sources / built)
    return next((place for place in places if os.access(place, os.X_OK)), None)


def _try(method: str) -> float:
    """A round of the method by two ranks with 256 x 256 gradients: the bits per parameter that a rank sends."""
    import numpy as np

    from . import Compressor, State, exchange, methods

    own = {option["name"] for option in methods()["methods"][method]["options"]}
    keys: dict[str, Any] = {"threshold": 2.5} if "threshold" in own else {}
    ranks = [Compressor(method, {"weight": (256, 256)}, rank=rank, ranks=2, keys=keys) for rank in range(2)]
    rounds = [
        compressor.encode({"weight": np.random.default_rng(rank).standard_normal((256, 256), np.float32)}, step=0)
        for rank, compressor in enumerate(ranks)
    ]
    sizes: list[int] = []
    state = exchange(rounds, lambda messages: sizes.extend(part.nbytes for part in messages[0][:2] if part is not None))
    averages = [round_.commit()["weight"] for round_ in rounds]
    if state is not State.DONE or not np.isfinite(averages[0]).all() or not np.array_equal(averages[0], averages[1]):
        raise RuntimeError("the ranks' averages differ or are not finite")
    return 8 * sum(sizes) / 256**2


def _unknown(program: str, kind: str, name: str, known: Iterable[str], otherwise: str) -> int:
    print(f"{program}: there is no {kind} '{name}'{did_you_mean(name, known, '; ' + otherwise)}", file=sys.stderr)
    return 2


def _methods(names: list[str]) -> int:
    from . import methods

    known = methods()
    for name in names:
        if name not in known["methods"]:
            return _unknown("topknot methods", "method", name, known["methods"], "'topknot methods' lists them")
        print(f"{name} ({_PAPERS.get(name, 'no compression')}): {known['methods'][name]['help']}\n")
        for option in (*known["methods"][name]["options"], *known["keys"]):
            setting = f"{option['name']}={option['default']}"
            print(f"  {setting:24} {option['help']}")
    if names:
        return 0
    title = "keys of its own; 'topknot methods NAME' explains them and those of all methods"
    print(f"{'method':21} {'paper':24} {'bits':>6}  {title}")
    for name, method in known["methods"].items():
        options = ", ".join(f"{option['name']}={option['default']}" for option in method["options"])
        print(f"{name:21} {_PAPERS.get(name, ''):24} {_try(name):6.2f}  {options}".rstrip() + f"\n{'':22}{method['help']}")
    print(_BITS)
    for name, recipe in known["recipes"].items():
        print(f"recipe {name}: {recipe['help']}")
    return 0


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _doctor(arguments: list[str]) -> int:
    if arguments:
        print(f"topknot doctor: takes no arguments, and there is '{arguments[0]}'", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, {', '.join(map(_version, ('numpy', 'torch')))}, ", end="")
    print(_version("matplotlib") + " (for the pictures of compare)")
    threads = os.environ.get("OMP_NUM_THREADS", "all cores")
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, OMP_NUM_THREADS: {threads}")
    print(f"trainer: {trainer('train') or 'none, needed by train and demo alone'}")
    try:
        from . import Compressor, Error, __version__, _library, methods
    except ImportError as error:
        print(f"libtopknot: {error}", file=sys.stderr)
        return 1
    print(f"libtopknot {__version__}: {_library.LIBRARY._name}")
    try:
        Compressor("topk", {"weight": (8, 8)}, keys={"device": "cuda:0"}).close()
        print("CUDA: gradients can be compressed on the GPU")
    except Error as error:
        print(f"CUDA: {error}")
    if importlib.util.find_spec("torch"):
        import torch

        have = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
        print(f"PyTorch's backends: {', '.join(have) or 'none'}; {torch.cuda.device_count()} GPUs")
    failed, begin_s = 0, time.perf_counter()
    for name in (names := list(methods()["methods"])):
        try:
            _try(name)
        except Exception as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
    taken = time.perf_counter() - begin_s
    print(f"{len(names) - failed} of {len(names)} methods average the gradients of 2 ranks, in {taken:.1f} s")
    return int(failed > 0)


def _run_trainer(command: str, arguments: list[str]) -> int:
    if program := trainer(command):
        os.environ["TOPKNOT_PYTHON"] = sys.executable  # for demo, which ends with compare
        os.execv(program, [str(program), *arguments])
    how = "install the package topknot-trainer, or run 'make build' in the root of Topknot's sources"
    print(f"topknot {command}: there is no trainer here; {how}", file=sys.stderr)
    return 1


def main() -> int:
    """Runs the command of the command line; returns its exit status."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("methods", "doctor") and arguments[:1] in (["-h"], ["--help"]):
        command = "--help"
    try:
        if command == "compare":
            from .compare.cli import main as compare

            return compare(arguments)
        if command in _TRAINER:
            return _run_trainer(command, arguments)
        if command in ("methods", "doctor"):
            return {"methods": _methods, "doctor": _doctor}[command](arguments)
        if command in ("-h", "--help", "--version"):
            print(_version("topknot") if command == "--version" else _HELP)
            return 0
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        print(f"topknot {command}: {error}", file=sys.stderr)
        return 1
    return _unknown("topknot", "command", command, _COMMANDS, "'topknot --help' shows what there is")


if __name__ == "__main__":
    sys.exit(main())
