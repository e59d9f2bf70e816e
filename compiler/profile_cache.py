"""Measured op times on disk, so that a second compile of a similar model measures only what is new.

One JSON file per device, torch version and thread count; keys are digests of Op.key. A file that cannot be read is
measured again and said so, never trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One op alone: its time, and what it allocates above inputs and outputs while it runs."""

    time_ns: int
    workspace_bytes: int


def default_cache_dir() -> Path:
    """The user's cache folder for tensile."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tensile"


class ProfileCache:
    """What is known of one device. `note` says why an existing file was not used, None when all is well."""

    def __init__(self, folder: Path | None, device: str) -> None:
        self.note: str | None = None
        self._entries: dict[str, Measured] = {}
        self._path: Path | None = None
        if folder is not None:
            self._path = folder / f"profile-{hashlib.sha256(device.encode()).hexdigest()[:16]}.json"
            self._entries = self._read(device)
        self._device = device

    def get(self, key: str) -> Measured | None:
        return self._entries.get(_digest(key))

    def __getitem__(self, key: str) -> Measured:
        return self._entries[_digest(key)]

    def put(self, key: str, measured: Measured) -> None:
        self._entries[_digest(key)] = measured

    def save(self) -> None:
        """Write everything, atomically; what another compile wrote meanwhile is kept."""
        if self._path is None:
            return
        entries = self._read(self._device) | self._entries
        data = {
            "version": _VERSION, "device": self._device,
            "ops": {key: [m.time_ns, m.workspace_bytes] for key, m in sorted(entries.items())},
        }  # fmt: skip
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.stem)
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=0)
            os.replace(name, self._path)
        except OSError as error:
            self.note = f"op times could not be kept: {error.strerror}"

    def _read(self, device: str) -> dict[str, Measured]:
        assert self._path is not None
        try:
            data = json.loads(self._path.read_text())
            if data["version"] != _VERSION or data["device"] != device:
                raise ValueError("another version or device")
            return {key: Measured(time_ns=int(t), workspace_bytes=int(w)) for key, (t, w) in data["ops"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.note = f"kept op times could not be used ({error}); measured anew"
            return {}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]
