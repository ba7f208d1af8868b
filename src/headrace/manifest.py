"""manifest.json of a checkpoint: the size and SHA-256 of each of its files, written last, so that damage is found before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "manifest.json"
SCHEMA = 1


def write_manifest(directory: Path) -> None:
    """Of all other files that are there, subdirectories included. Raises OSError."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / MANIFEST]
    files = {str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in paths}
    (directory / MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1), encoding="utf-8")


def find_damage(directory: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with the first file that is not as it was written; None when all are. Files that were put there later do not matter.

    `sizes_only` looks for torn and missing files and leaves their contents unread.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            return f"{MANIFEST} has schema {manifest['schema']}, this headrace reads {SCHEMA}"
        for name, written in manifest["files"].items():
            path = directory / name
            size = path.stat().st_size
            if size != written["bytes"]:
                return f"{name} is damaged ({size} bytes instead of {written['bytes']})"
            if not sizes_only and _digest(path) != written["sha256"]:
                return f"{name} is damaged (its contents are not what was written)"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).relative_to(directory)} is missing"
    except OSError as error:
        return f"{Path(str(error.filename or directory)).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged: {error}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
