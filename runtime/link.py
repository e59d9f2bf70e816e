"""The link a lane copies over: its bandwidth and latency each way, measured once a folder's disk and kept."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch

from tensile.compiler.profile import Link
from tensile.runtime.spill import SpillFile
from tensile.schedules.errors import LaneError

_VERSION = 1


def link_of(device: str, directory: Path | None, cache_dir: Path | None) -> Link:
    """The link between a device and the disk of `directory`: the one kept in `cache_dir`, or measured and kept there.

    A kept file that cannot be read is measured anew. Raises LaneError where there is no lane, or no spill file.
    """
    kept = None if cache_dir is None else cache_dir / f"link-{_key(device, directory)}.json"
    if kept is not None and (known := _read(kept)) is not None:
        return known
    link = measure_link(device, directory)
    if kept is not None:
        _write(kept, link)
    return link


def _key(device: str, directory: Path | None) -> str:
    folder = Path(directory) if directory is not None else Path(tempfile.gettempdir())
    disk = os.stat(folder).st_dev if folder.is_dir() else 0
    return hashlib.sha256(f"{_VERSION} {device} {disk}".encode()).hexdigest()[:16]


def _read(path: Path) -> Link | None:
    try:
        data = json.loads(path.read_text())
        known = {field.name: data[field.name] for field in fields(Link)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Link(**known) if all(type(value) is int and value >= 0 for value in known.values()) else None


def _write(path: Path, link: Link) -> None:
    """Whole or not at all; a folder that cannot be written costs the next compile a measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(link), file)
        os.replace(name, path)
    except OSError:
        return


def measure_link(device: str, directory: Path | None, *, copies: int = 16, size_bytes: int = 16 * 2**20) -> Link:
    """Bandwidth and latency of the lane's own copies, each way alone and both at once: medians over `copies`."""
    if torch.device(device).type != "cpu":
        raise LaneError(f"there is no copy lane for {device} yet", hint="plan and train on the CPU")
    small = 256 * 2**10
    file = SpillFile(directory, 2 * copies * size_bytes)
    memory = torch.zeros(2 * size_bytes // 8, dtype=torch.float64)
    out_at, in_at = memory.data_ptr(), memory.data_ptr() + size_bytes
    try:
        spots = [i * size_bytes for i in range(copies)]

        def times(move: Callable[[int, int, int], None], address: int, size: int, first: int = 0) -> list[float]:
            found = []
            for spot in spots:
                started = time.perf_counter()
                move(address, size, first + spot)
                found.append(time.perf_counter() - started)
            return found

        out_s, in_s = times(file.write, out_at, size_bytes), times(file.read, in_at, size_bytes)
        small_out_s, small_in_s = times(file.write, out_at, small), times(file.read, in_at, small)
        both_s: list[float] = []
        writer = threading.Thread(
            target=lambda: both_s.extend(times(file.write, out_at, size_bytes, copies * size_bytes))
        )
        writer.start()
        both_in_s = times(file.read, in_at, size_bytes)
        writer.join()
    finally:
        file.close()
    out_median, in_median = statistics.median(out_s), statistics.median(in_s)
    duplex = 100 * min(out_median / statistics.median(both_s), in_median / statistics.median(both_in_s))
    return Link(
        out_bytes_per_s=int(size_bytes / out_median), in_bytes_per_s=int(size_bytes / in_median),
        out_latency_us=_latency_us(small_out_s, small, out_median / size_bytes),
        in_latency_us=_latency_us(small_in_s, small, in_median / size_bytes),
        duplex_percent=max(1, min(100, int(duplex))),
    )  # fmt: skip


def _latency_us(seconds: list[float], size_bytes: int, seconds_per_byte: float) -> int:
    return max(0, int(1e6 * (statistics.median(seconds) - size_bytes * seconds_per_byte)))
