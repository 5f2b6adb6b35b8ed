"""Files that appear whole or not at all, and what they may take the place of."""

from __future__ import annotations

import os
import pathlib
import re
import secrets

from .read import UserError

_RUN_NAMES = re.compile(
    r"((config\.yaml|(choices|auto_profiles|environment|bench|layer_density|exchange_profile)\.json|metrics\.(jsonl|csv)|"
    r"gradients\.(safetensors|npy)|trace_rank[0-9]+\.json)(\.part-[0-9]+)?|checkpoints|run\.lock|events\.out\.tfevents\..*)"
)
_NO_REPORTS = (".safetensors", ".npy", ".npz", ".pth", ".pt")


def _in_checkpoints(folder: pathlib.Path) -> bool:
    of_run = all((folder.parent / name).exists() for name in ("environment.json", "config.yaml"))
    return folder.name.startswith("step-") and (folder / "manifest.json").exists() or folder.name == "checkpoints" and of_run


def check_output(path: str) -> None:
    """Raises UserError if the file would lie in the checkpoints of a run or take the place of a file of a run, a configuration, a
    model or an array, by whatever links and relative names."""
    absolute = pathlib.Path(os.path.abspath(path))
    places = (absolute.resolve(), absolute.parent.resolve() / absolute.name)
    if any(_in_checkpoints(folder) for place in places for folder in place.parents):
        raise UserError(f"{path}: lies in the checkpoints of a run, which only the run writes; choose another place")
    if absolute.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file")
    if absolute.is_file() and any(_RUN_NAMES.fullmatch(p.name) and (p.parent / "config.yaml").exists() for p in places):
        raise UserError(f"{path}: is a configuration or a file of a run; choose another place")
    if absolute.is_file() and places[0].suffix in _NO_REPORTS:
        raise UserError(f"{path}: exists already; choose another name")


def write_file(path: str, data: bytes) -> None:
    """Writes a file that appears under its name when it is whole; an earlier one stays until then. Pipes and devices are
    written in place. Raises UserError if it cannot be written."""
    target = pathlib.Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part-{secrets.randbits(32)}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; free space or choose another place") from None
