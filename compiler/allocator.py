"""What torch's CPU allocator hands out while a function runs, byte for byte."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

_T = TypeVar("_T")


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
