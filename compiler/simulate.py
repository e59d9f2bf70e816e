"""Discrete events: when every run and copy of a solution happens, on one compute stream and two copy lanes.

A lane copies in chunks, the copy with the nearest deadline first: a later, more urgent one goes before what is left of
an earlier one. Compute waits where the plan frees what is still on
its way out, and where it needs what is still on its way in. No copy crosses the end of a step, so that one step is the
steady state.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tensile.compiler.occupancy import memory
from tensile.compiler.problem import Problem
from tensile.compiler.solution import Run, Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """`memory_bytes[k]` and `stall_ns[k]` (waiting before run k; the last entry is the end) are per run; `out_ns` and
    `in_ns` are (begin, end) of each swap's copies, in the order of the swaps given."""

    step_ns: int
    peak_bytes: int
    peak_run: int
    memory_bytes: tuple[int, ...]
    stall_ns: tuple[int, ...]
    out_ns: tuple[tuple[int, int], ...]
    in_ns: tuple[tuple[int, int], ...]


def run_ns(problem: Problem, run: Run) -> int:
    """How long one run takes, in nanoseconds."""
    op = problem.ops[run.op]
    return op.time_ns if run.restores is None else op.again_ns


def simulate(
    problem: Problem, runs: Sequence[Run], swaps: Sequence[Swap], memory_bytes: Sequence[int] | None = None
) -> Timeline:  # fmt: skip
    """The timeline of one steady-state step. `memory_bytes`: at every run, if it is known already."""
    lanes = _Lanes(problem.duplex_percent)
    at: dict[int, list[list[int]]] = defaultdict(lambda: [[], [], [], []])
    for index, swap in enumerate(swaps):
        at[swap.out_start][0].append(index)
        at[swap.out_free][1].append(index)
        at[swap.in_start][2].append(index)
        at[swap.in_need][3].append(index)
    size = [storage.size_bytes for storage in problem.storages]
    now = 0
    stalls = [0] * (len(runs) + 1)
    for k in range(len(runs) + 1):
        if k in at:
            starts, frees, fetches, needs = at[k]
            arrived = now
            for index in starts:
                work = problem.out_latency_ns * 1000 + size[swaps[index].storage] * problem.out_ps_per_byte
                lanes.put(0, swaps[index].out_free, index, work, now)
            for index in frees:
                now = lanes.finish(0, index, now)
            for index in fetches:
                work = problem.in_latency_ns * 1000 + size[swaps[index].storage] * problem.in_ps_per_byte
                lanes.put(1, swaps[index].in_need, index, work, now)
            for index in needs:
                now = lanes.finish(1, index, now)
            stalls[k] = now - arrived
        if k < len(runs):
            now += run_ns(problem, runs[k])
    levels = memory(problem, runs, swaps) if memory_bytes is None else memory_bytes
    peak = max(levels, default=0)
    return Timeline(
        step_ns=now, peak_bytes=peak, peak_run=levels.index(peak) if levels else 0, memory_bytes=tuple(levels),
        stall_ns=tuple(stalls), out_ns=tuple(lanes.span(0, i) for i in range(len(swaps))),
        in_ns=tuple(lanes.span(1, i) for i in range(len(swaps))),
    )  # fmt: skip


class _Lanes:
    """Two lanes, earliest deadline first. Work is in picoseconds of copying alone; while both copy, each goes at
    `duplex_percent` of its rate. Time is in nanoseconds."""

    def __init__(self, duplex_percent: int) -> None:
        self._duplex = duplex_percent
        # each lane's copies as a heap: [deadline, swap, work left]
        self._queue: tuple[list[list[int]], list[list[int]]] = ([], [])
        self._now = 0
        self._begin: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._end: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def put(self, lane: int, deadline: int, swap: int, work_ps: int, now: int) -> None:
        self._advance(now)
        heapq.heappush(self._queue[lane], [deadline, swap, work_ps])

    def finish(self, lane: int, swap: int, now: int) -> int:
        """When the copy has ended, `now` at the earliest."""
        self._advance(now)
        while swap not in self._end[lane]:
            self._advance(self._next_end())
        return max(now, self._end[lane][swap])

    def span(self, lane: int, swap: int) -> tuple[int, int]:
        return self._begin[lane][swap], self._end[lane][swap]

    def _rate_percent(self) -> int:
        return self._duplex if self._queue[0] and self._queue[1] else 100

    def _next_end(self) -> int:
        rate = self._rate_percent()
        return self._now + min(-(-queue[0][2] // (10 * rate)) for queue in self._queue if queue)

    def _advance(self, now: int) -> None:
        while self._now < now and (self._queue[0] or self._queue[1]):
            rate = self._rate_percent()
            until = min(now, self._next_end())
            for lane, queue in enumerate(self._queue):
                if queue:
                    self._begin[lane].setdefault(queue[0][1], self._now)
                    queue[0][2] -= (until - self._now) * 10 * rate
            self._now = until
            self._retire()
        self._now = max(self._now, now)
        self._retire()

    def _retire(self) -> None:
        for lane, queue in enumerate(self._queue):
            while queue and queue[0][2] <= 0:
                swap = heapq.heappop(queue)[1]
                self._begin[lane].setdefault(swap, self._now)
                self._end[lane][swap] = self._now
