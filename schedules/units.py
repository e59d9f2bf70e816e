"""How bytes and times are read and written: the one place that knows the units."""

from __future__ import annotations

import re

from tensile.schedules.errors import TensileError

_BINARY = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """Bytes from "24GiB", "500MB" or "1048576"; KiB is 1024 bytes, KB is 1000.

    Raises TensileError for anything else.
    """
    match = _SIZE.match(text)
    unit = match.group(2).lower() if match else None
    scale = {"": 1, **_BINARY, **_DECIMAL}.get(unit) if unit is not None else None
    if match is None or scale is None:
        raise TensileError(f"not a size: {text!r}", hint="write it like 8GiB, 500MB or 1048576")
    return int(float(match.group(1)) * scale) if "." in match.group(1) else int(match.group(1)) * scale


def format_bytes(size_bytes: int) -> str:
    """Bytes for a person: 1536 -> "1.50 KiB"; four significant digits at most."""
    size = float(abs(size_bytes))
    sign = "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.{_digits(size)}f} {unit}"
        size /= 1024
    return f"{sign}{size:.{_digits(size)}f} TiB"


def format_us(time_us: float) -> str:
    """Microseconds for a person: 1300 -> "1.30 ms"."""
    if time_us < 1000:
        return f"{time_us:.{_digits(time_us)}f} us"
    if time_us < 1_000_000:
        return f"{time_us / 1000:.{_digits(time_us / 1000)}f} ms"
    return f"{time_us / 1_000_000:.{_digits(time_us / 1_000_000)}f} s"


def _digits(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0
