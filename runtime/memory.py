"""Memory of this process: the malloc policy under which freed bytes leave it, and how peaks are measured."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import torch

MemoryPolicy = Literal["tight", "loose", "none"]
_T = TypeVar("_T")

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


def allocated_peak(function: Callable[[], _T]) -> tuple[int, _T]:
    """Run a function; bytes allocated on the CPU at the worst moment above the level at entry, and its result.

    Counts what torch's CPU allocator hands out, exactly, workspaces included. The allocator knows the size of a block
    it frees only if it was allocated under a profiler: where a function frees blocks that an earlier call of it left,
    run it here twice in a row and take the second peak. Raises RuntimeError when a profiler is already running.
    """
    if profiler_is_active():
        raise RuntimeError("a profiler is already running")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch._C._profiler import _EventType

    with _unknown_blocks_unsaid(), torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        result = function()
    assert profile.kineto_results is not None
    pending = list(profile.kineto_results.experimental_event_tree())
    changes = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    changes.sort(key=lambda change: change[0])
    level = peak = 0
    for _, size in changes:
        level += size
        peak = max(peak, level)
    return peak, result


@contextlib.contextmanager
def _unknown_blocks_unsaid() -> Iterator[None]:
    """Leave out the allocator's one remark about blocks of unknown size; every other line of stderr passes."""
    try:
        saved = os.dup(2)
    except OSError:
        yield
        return
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            held.seek(0)
            for line in held:
                if b"Memory block of unknown size" not in line:
                    os.write(saved, line)
            os.close(saved)


def profiler_is_active() -> bool:
    """Whether some profiler runs in this process, ours or the user's."""
    return bool(torch.autograd._profiler_enabled())


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
