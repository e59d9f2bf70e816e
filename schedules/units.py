"""How bytes and times are read and written: the one place that knows the units."""

from __future__ import annotations

import re

from tensile.schedules.errors import TensileError

_BINARY = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


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
    """Bytes for a person, to three digits: 1536 -> "1.50 KiB"; below 1 KiB exact."""
    sign, size = ("-" if size_bytes < 0 else ""), abs(size_bytes)
    if size < 1024:
        return f"{sign}{size} B"
    return sign + _scaled(size / 1024, ("KiB", "MiB", "GiB", "TiB"), 1024)


def format_us(time_us: float) -> str:
    """Microseconds for a person, to three digits: 1300 -> "1.30 ms"."""
    return _scaled(time_us, ("us", "ms", "s"), 1000)


def _scaled(value: float, units: tuple[str, ...], step: int) -> str:
    for unit in units[:-1]:
        if round(value) < step:
            return f"{_three_digits(value)} {unit}"
        value /= step
    return f"{_three_digits(value)} {units[-1]}"


def _three_digits(value: float) -> str:
    if round(value, 2) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if round(value, 1) < 100 else f"{value:.0f}"
