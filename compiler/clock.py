"""What time means on a device: marks set while work goes on, read once it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """`mark()` now, `settle()` when the work has been handed out, then `ns(start, end)` between two marks."""

    @property
    def name(self) -> str:
        """What is counted, for a profile's source."""

    def mark(self) -> Any:
        """A point in the device's time; must not disturb the work around it."""

    def settle(self) -> None:
        """Wait until every mark is reached."""

    def ns(self, start: Any, end: Any) -> int:
        """Nanoseconds from one mark to another."""


def clock_of(device: str) -> Clock:
    """CPU: the calling thread's CPU time where torch computes with one thread, so that other programs on the machine do
    not count; wall time where it computes with several. Accelerators: timing events on the current stream."""
    if torch.device(device).type != "cpu":
        return _EventClock(name="device time", device=device)
    return _HostClock(name="CPU time" if torch.get_num_threads() == 1 else "wall time")


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostClock:
    name: str

    def mark(self) -> int:
        return time.thread_time_ns() if self.name == "CPU time" else time.perf_counter_ns()

    def settle(self) -> None:
        pass

    def ns(self, start: int, end: int) -> int:
        return end - start


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventClock:
    name: str
    device: str

    def mark(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        torch.accelerator.synchronize(self.device)

    def ns(self, start: torch.Event, end: torch.Event) -> int:
        return int(1e6 * start.elapsed_time(end))
