"""Where on the host each swapped storage has its place: offsets planned once, before the first step."""

from __future__ import annotations

from collections.abc import Mapping

ALIGNMENT = 4096  # bytes; satisfies direct I/O on every common file system


def spill_slots(size_bytes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Offset of every storage in the spill file, and the file's size. One slot a storage, in order of index."""
    offsets: dict[int, int] = {}
    end = 0
    for storage in sorted(size_bytes):
        offsets[storage] = end
        end += -(-size_bytes[storage] // ALIGNMENT) * ALIGNMENT
    return offsets, end
