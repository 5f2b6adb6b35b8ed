"""Files that appear whole or not at all, and what they may take the place of."""

from __future__ import annotations

import os
import re
import secrets

from .read import UserError

_RUN_NAMES = re.compile(
    r"(config\.yaml|(choices|auto_profiles)\.json|environment\.json|bench\.json|metrics\.(jsonl|csv)|gradients\.(safetensors|npy)|"
    r"trace_rank[0-9]+\.json)(\.part-[0-9]+)?|checkpoints|(layer_density|exchange_profile)\.json(\.part-[0-9]+)?|run\.lock|"
    r"events\.out\.tfevents\..*"
)
_NO_REPORTS = (".safetensors", ".npy", ".npz", ".pth", ".pt")


def _in_checkpoints(path: str) -> bool:
    folder = os.path.dirname(path)
    while True:
        name, parent = os.path.basename(folder), os.path.dirname(folder)
        if name.startswith("step-") and os.path.exists(os.path.join(folder, "manifest.json")):
            return True
        if name == "checkpoints" and all(
            os.path.exists(os.path.join(parent, own)) for own in ("environment.json", "config.yaml")
        ):
            return True
        if parent == folder:
            return False
        folder = parent


def check_output(path: str) -> None:
    """Raises UserError if the file would lie in the checkpoints of a run or take the place of a file of a run, a configuration, a
    model or an array, by whatever links and relative names."""
    plain = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
    places = {os.path.realpath(path), plain}
    if any(map(_in_checkpoints, places)):
        raise UserError(f"{path}: lies in the checkpoints of a run, which only the run writes; choose another place")
    if os.path.isdir(path):
        raise UserError(f"{path}: is a folder; give the name of a file")
    if not os.path.isfile(path):
        return
    for place in places:
        if _RUN_NAMES.fullmatch(os.path.basename(place)) and os.path.exists(os.path.join(os.path.dirname(place), "config.yaml")):
            raise UserError(f"{path}: is a configuration or a file of a run; choose another place")
    if os.path.realpath(path).endswith(_NO_REPORTS):
        raise UserError(f"{path}: exists already; choose another name")


def write_file(path: str, data: bytes) -> None:
    """Writes a file that appears under its name when it is whole; an earlier one stays until then. Pipes and devices are
    written in place. Raises UserError if it cannot be written."""
    target = os.path.realpath(path)
    part = f"{target}.part-{secrets.randbits(32)}"
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "wb") as file:
                file.write(data)
            return
        if os.path.exists(target) and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            if os.path.exists(part):
                os.unlink(part)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; free space or choose another place") from None
