"""Files that appear whole or not at all."""

import json
import os
import secrets


def write_text(path, text):
    """Writes a new file beside it first, never through a link: netlab runs as root."""
    part = f"{path}.part-{secrets.randbits(32)}"
    with open(part, "x", encoding="utf-8", newline="") as out:
        out.write(text)
    os.replace(part, path)


def write_json(path, content):
    write_text(path, json.dumps(content, indent=1) + "\n")
