"""Measured op times on disk, so that a second compile of a similar model measures only what is new.

One JSON file per device setting; keys are digests of Op.key. A file that cannot be read is measured again and said so,
never trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VERSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One op: its time, and what it allocates above inputs and outputs while it runs. `in_step`: timed inside a step,
    which is nearer the truth than alone. `excess_bytes`: what each storage the op creates takes above its layout (the
    mean of aten.mse_loss keeps the storage of the unreduced loss)."""

    time_ns: int
    workspace_bytes: int
    in_step: bool
    excess_bytes: tuple[int, ...] = ()


def default_cache_dir() -> Path:
    """The user's cache folder for tensile."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tensile"


class ProfileCache:
    """What is known of one device setting. `note` says why a file was not used or not written, None when all is well.

    `folder=None` keeps nothing. Compiles that run at the same time never see half a file; what one adds while another
    is saving may be lost, which costs a measurement.
    """

    def __init__(self, folder: Path | None, device: str) -> None:
        self.note: str | None = None
        self._device = device
        self._path: Path | None = None
        self._entries: dict[str, Measured] = {}
        self._new: dict[str, Measured] = {}
        if folder is not None:
            self._path = folder / f"profile-{hashlib.sha256(device.encode()).hexdigest()[:16]}.json"
            self._entries = self._read(self._path)

    def get(self, key: str) -> Measured | None:
        return self._entries.get(_digest(key))

    def __getitem__(self, key: str) -> Measured:
        return self._entries[_digest(key)]

    def put(self, key: str, measured: Measured) -> None:
        self._entries[_digest(key)] = self._new[_digest(key)] = measured

    def assume(self, key: str, estimated: Measured) -> None:
        """Use a value in this compile only."""
        self._entries[_digest(key)] = estimated

    def save(self) -> None:
        """Write what was put, atomically, beside what other compiles wrote meanwhile."""
        if self._path is None or not self._new:
            return
        entries = self._read(self._path) | self._new
        data = {
            "version": _VERSION, "device": self._device,
            "ops": {
                key: [m.time_ns, m.workspace_bytes, m.in_step, m.excess_bytes] for key, m in sorted(entries.items())
            },
        }  # fmt: skip
        written: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, written = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.stem)
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=0)
            os.replace(written, self._path)
        except OSError as error:
            self.note = f"op times could not be kept: {error.strerror}"
            if written is not None:
                Path(written).unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Measured]:
        try:
            data = json.loads(path.read_text())
            if data["version"] != _VERSION or data["device"] != self._device:
                raise ValueError("another version or device")
            return {str(key): _entry(fields) for key, fields in data["ops"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.note = f"kept op times could not be used ({error}); measured anew"
            return {}


def _entry(fields: Any) -> Measured:
    time_ns, workspace_bytes, in_step, excess_bytes = fields
    if not isinstance(excess_bytes, list):
        raise ValueError("an entry's last field is not a list")
    numbers = (time_ns, workspace_bytes, *excess_bytes)
    if any(type(number) is not int for number in numbers) or type(in_step) is not bool:
        raise ValueError("an entry is not made of integers and a truth value")
    if min(numbers) < 0:
        raise ValueError("an entry is negative")
    return Measured(time_ns=time_ns, workspace_bytes=workspace_bytes, in_step=in_step,
                    excess_bytes=tuple(excess_bytes))  # fmt: skip


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]
