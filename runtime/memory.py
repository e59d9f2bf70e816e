"""Memory of this process: the malloc policy under which freed bytes leave it, and how peaks are measured."""

from __future__ import annotations

import ctypes
from typing import Literal

from tensile.compiler.allocator import allocated_peak, profiler_is_active

__all__ = [
    "MemoryPolicy", "allocated_peak", "apply_memory_policy", "high_water_bytes", "profiler_is_active",
    "reset_high_water", "resident_bytes",
]  # fmt: skip

MemoryPolicy = Literal["tight", "loose", "none"]

# mallopt parameters of glibc and the thresholds of each policy in bytes: tight gives every freed tensor of 1 MiB and
# more back to the system at once, loose keeps some for speed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_POLICIES = {"tight": (2**20, 2**20), "loose": (2**20, 32 * 2**20)}


def apply_memory_policy(policy: MemoryPolicy) -> str | None:
    """Make resident memory follow the allocator. Returns why it could not be done, None when it was.

    The policy holds for the process and stays: glibc offers no way to read the values that were there before.
    """
    if policy == "none":
        return None
    try:
        libc = ctypes.CDLL(None)
        trim, mmap = _POLICIES[policy]
        done = libc.mallopt(_M_MMAP_THRESHOLD, mmap) and libc.mallopt(_M_TRIM_THRESHOLD, trim)
    except (OSError, AttributeError):
        return "this C library has no mallopt"
    return None if done else "mallopt refused the thresholds"


def high_water_bytes() -> int:
    """The most memory this process was resident with since `reset_high_water`, file pages included; 0 if unknown."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """Memory this process is resident with now; 0 if unknown."""
    return _status_bytes("VmRSS")


def reset_high_water() -> bool:
    """Begin a new high-water mark; False where the system does not offer that."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    try:
        with open("/proc/self/status") as file:
            line = next((line for line in file if line.startswith(key + ":")), None)
    except OSError:
        return 0
    return int(line.split()[1]) * 1024 if line else 0
