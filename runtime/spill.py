"""A private file that tensors are written to and read from: no name, no page cache, no silent short transfer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tensile.runtime.pool import ALIGNMENT
from tensile.schedules.errors import LaneError
from tensile.schedules.units import format_bytes

_MEMORY_ALIGNMENT = 512  # bytes; what direct I/O asks of addresses in memory
_BOUNCE_BYTES = 2**20


class SpillFile:
    """One unnamed file of a fixed size, reserved when it is made, so that a full disk is met before the first step.

    A killed process leaves nothing behind: the file never has a name. `direct` says whether it bypasses the page
    cache; `bounced` counts transfers through a buffer because their memory was not aligned.
    """

    def __init__(self, directory: Path | None, size_bytes: int) -> None:
        folder = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        if not folder.is_dir():
            raise LaneError(f"the spill folder {folder} does not exist", hint="create it, or choose another spill_dir")
        self.bounced = 0
        self._fd, self.direct = _open_unnamed(folder)
        self._buffers: dict[str, mmap.mmap] = {}
        if size_bytes:
            try:
                os.posix_fallocate(self._fd, 0, size_bytes)
            except OSError as error:
                os.close(self._fd)
                free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
                if error.errno != errno.ENOSPC:
                    raise LaneError(f"the spill file cannot be made: {error.strerror}", where=str(folder)) from error
                raise LaneError(
                    f"the plan swaps out {format_bytes(size_bytes)}, the disk has {format_bytes(free)} free",
                    where=str(folder), hint="free some space, choose another spill_dir, or plan for a larger budget",
                ) from error  # fmt: skip

    def write(self, address: int, size_bytes: int, offset: int) -> None:
        """Write memory to the file at `offset`. `offset` is a multiple of `pool.ALIGNMENT`, and so is the room kept
        behind it. One thread at a time. Raises LaneError on any failure."""
        self._transfer(os.pwritev, address, size_bytes, offset, "write")

    def read(self, address: int, size_bytes: int, offset: int) -> None:
        """Read from the file at `offset` into memory. One thread at a time. Raises LaneError on any failure."""
        self._transfer(os.preadv, address, size_bytes, offset, "read")

    def close(self) -> None:
        """Give the space back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _transfer(self, call: Callable[..., int], address: int, size_bytes: int, offset: int, verb: str) -> None:
        aligned = not self.direct or address % _MEMORY_ALIGNMENT == 0
        # what is left over goes through the buffer in whole blocks, which must not reach into the next slot
        whole = size_bytes // ALIGNMENT * ALIGNMENT if self.direct else size_bytes
        done = 0
        if aligned and whole:
            self._all(call, address, whole, offset, verb)
            done = whole
        else:
            self.bounced += size_bytes > 0
        while done < size_bytes:
            part = min(_BOUNCE_BYTES, size_bytes - done)
            self._bounce(call, address + done, part, offset + done, verb)
            done += part

    def _bounce(self, call: Callable[..., int], address: int, size_bytes: int, offset: int, verb: str) -> None:
        buffer = self._buffers.setdefault(verb, mmap.mmap(-1, _BOUNCE_BYTES))
        place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        padded = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        if verb == "write":
            ctypes.memmove(place, address, size_bytes)
        self._all(call, place, padded, offset, verb)
        if verb == "read":
            ctypes.memmove(address, place, size_bytes)

    def _all(self, call: Callable[..., int], address: int, size_bytes: int, offset: int, verb: str) -> None:
        """Repeat the call until every byte has moved."""
        done = 0
        while done < size_bytes:
            memory = (ctypes.c_char * (size_bytes - done)).from_address(address + done)
            try:
                moved = call(self._fd, [memory], offset + done)
            except OSError as error:
                raise LaneError(f"the spill file cannot be {_PAST[verb]}: {error.strerror}") from error
            if moved <= 0:
                raise LaneError(f"the spill file ended early: {done} of {size_bytes} bytes {_PAST[verb]}")
            done += moved


_PAST = {"write": "written", "read": "read"}


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """A new unnamed file in `folder`: its descriptor, and whether it bypasses the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    unnamed = getattr(os, "O_TMPFILE", 0)
    for flags in dict.fromkeys((direct, 0)):
        if unnamed:
            try:
                return os.open(folder, os.O_RDWR | unnamed | flags, 0o600), bool(flags)
            except OSError:
                pass
        try:
            # a file system without O_TMPFILE: the name goes at once, inside a folder nobody else can read
            with tempfile.TemporaryDirectory(prefix="tensile-", dir=folder) as private:
                return os.open(Path(private) / "spill", os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600), bool(flags)
        except OSError as error:
            failure = error
    raise LaneError(
        f"no spill file can be made: {failure.strerror}", where=str(folder), hint="choose another spill_dir"
    )
