"""What every search over one problem starts from, computed once: memory of the plain order, and its idle intervals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tensile.compiler.expand import Facts
from tensile.compiler.occupancy import memory
from tensile.compiler.problem import Problem
from tensile.compiler.solution import Run

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Terrain:
    """Ops stand in planned order. A gap is (storage, op of the last touch before, op of the next touch after); one that
    crosses the end of the step counts on from there. Arrays are per gap or per op; nobody writes to them."""

    def __init__(self, problem: Problem) -> None:
        self.facts = facts = Facts(problem)
        self.problem = problem
        self.count = facts.count
        plain = memory(problem, [Run(op=op) for op in range(self.count)], ())
        self.level: Ints = np.array(plain, dtype=np.int64)
        self.time_ns: Floats = np.array([op.time_ns for op in problem.ops], dtype=np.float64)
        self.elapsed_ns: Floats = np.concatenate([[0.0], np.cumsum(np.tile(self.time_ns, 2))])  # over two steps
        # bytes each lane can carry in a nanosecond, and what a copy's latency is worth
        self.out_rate = 1000.0 / problem.out_ps_per_byte
        self.in_rate = 1000.0 / problem.in_ps_per_byte
        self.out_fixed = problem.out_latency_ns * self.out_rate
        self.in_fixed = problem.in_latency_ns * self.in_rate
        gaps = list(self._gaps())
        self.storage: Ints = np.array([gap[0] for gap in gaps], dtype=np.int64)
        self.last: Ints = np.array([gap[1] for gap in gaps], dtype=np.int64)
        self.next: Ints = np.array([gap[2] for gap in gaps], dtype=np.int64)
        self.size: Ints = np.array([facts.size[gap[0]] for gap in gaps], dtype=np.int64)
        self.can_swap: Flags = np.array([problem.storages[gap[0]].swappable for gap in gaps], dtype=bool)
        # what making a storage again takes alone, without its inputs; infinite where it cannot be made again
        self.remake_ns: Floats = np.array([self._remake_ns(*gap) for gap in gaps], dtype=np.float64)
        self.of_storage: dict[int, list[int]] = {}
        for index, gap in enumerate(gaps):
            self.of_storage.setdefault(gap[0], []).append(index)

    def _gaps(self) -> list[tuple[int, int, int]]:
        found = []
        for storage, touches in enumerate(self.facts.touches):
            facts = self.problem.storages[storage]
            pinned = facts.leaves and not facts.enters and not facts.swappable
            if self.facts.size[storage] < max(1, self.problem.smallest_bytes) or not touches or pinned:
                continue
            found += [(storage, a, b) for a, b in pairwise(touches) if b - a > 1]
            if facts.enters and facts.leaves and touches[0] + self.count - touches[-1] > 1:
                found.append((storage, touches[-1], touches[0] + self.count))
        return found

    def _remake_ns(self, storage: int, last: int, following: int) -> float:
        if following >= self.count or self.problem.storages[storage].enters:
            return float("inf")
        makers = self.facts.makers(storage, last)
        return float("inf") if makers is None else float(sum(self.problem.ops[m].again_ns for m in makers))
