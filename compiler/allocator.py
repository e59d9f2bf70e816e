"""What a device's allocator hands out while a function runs, byte for byte."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_SPAN = "tensile span "

Span = Callable[[int], contextlib.AbstractContextManager[None]]
"""`with span(7):` marks what runs inside under the number 7."""


def allocated_peak(function: Callable[[], _T], device: str = "cpu") -> tuple[int, _T]:
    """Run a function; bytes allocated on the device at the worst moment above the level at entry, and its result.

    Counts what torch's allocator hands out, exactly, workspaces included. The CPU's allocator knows the size of a block
    it frees only if it was allocated under a profiler: where a function frees blocks that an earlier call of it left,
    run it here twice in a row and take the second peak. Raises RuntimeError when a profiler is already running.
    """
    if device != "cpu":
        before = _reset_peak(device)
        result = function()
        return _peak(device) - before, result
    with _recorded() as record:
        result = function()
    return _highest([size for _, size in record.changes]), result


def allocated_within(function: Callable[[Span], object], device: str = "cpu") -> dict[int, int]:
    """Run a function that marks parts of itself as spans: by span number, bytes allocated at the span's worst moment
    above the level at its entry. Spans must not nest. Raises as `allocated_peak`."""
    peaks: dict[int, int] = {}
    if device != "cpu":

        @contextlib.contextmanager
        def counted(number: int) -> Iterator[None]:
            before = _reset_peak(device)
            yield
            peaks[number] = max(peaks.get(number, 0), _peak(device) - before)

        function(counted)
        return peaks

    @contextlib.contextmanager
    def span(number: int) -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"{_SPAN}{number}"):
            yield

    with _recorded() as record:
        function(span)
    position = 0
    for number, start_ns, end_ns in sorted(record.spans, key=lambda span: span[1]):
        while position < len(record.changes) and record.changes[position][0] < start_ns:
            position += 1
        inside = []
        while position < len(record.changes) and record.changes[position][0] <= end_ns:
            inside.append(record.changes[position][1])
            position += 1
        peaks[number] = max(peaks.get(number, 0), _highest(inside))
    return peaks


def profiler_is_active() -> bool:
    """Whether some profiler runs in this process, ours or the user's."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


class _Record:
    """What the profiler saw: (time, bytes) of every change in order, and (number, start, end) of every span."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = []
        self.spans: list[tuple[int, int, int]] = []

    def read(self, profile: Any) -> None:
        from torch._C._profiler import _EventType

        pending = list(profile.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            if event.typed[0] == _EventType.Allocation:
                if event.typed[1].device.type == "cpu":
                    self.changes.append((event.start_time_ns, event.typed[1].alloc_size))
            elif event.name.startswith(_SPAN):
                self.spans.append((int(event.name.removeprefix(_SPAN)), event.start_time_ns, event.end_time_ns))
        self.changes.sort(key=lambda change: change[0])


@contextlib.contextmanager
def _recorded() -> Iterator[_Record]:
    """Everything the CPU's allocator does inside; the record is filled when the context ends."""
    if profiler_is_active():
        raise RuntimeError("a profiler is already running")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    record = _Record()
    with _unknown_blocks_unsaid(), torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        yield record
    record.read(profile)


def _highest(changes: list[int]) -> int:
    level = peak = 0
    for size in changes:
        level += size
        peak = max(peak, level)
    return peak


def _reset_peak(device: str) -> int:
    torch.accelerator.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: str) -> int:
    torch.accelerator.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


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
