"""From decisions about idle intervals to the exact runs and swaps they mean.

Decisions speak of ops in planned order. A recompute puts runs right before the op that needs the storage again; what
those runs need and nobody holds any more is kept alive longer, or computed again on the way.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tensile.compiler.occupancy import memory, residences, touched
from tensile.compiler.problem import Problem
from tensile.compiler.solution import Run, Swap


class CannotExpand(Exception):
    """The decisions contradict each other, or ask for a run that would see other contents."""


@dataclass(frozen=True, slots=True)
class Window:
    """One swap in op positions: memory is given back before op `free`, taken again before op `fetch`, needed by op
    `need`. For an interval that crosses the end of the step, `fetch` and `need` count on from the number of ops."""

    free: int
    fetch: int
    need: int


@dataclass(slots=True)
class Decisions:
    """What a planner has decided. Keys are (storage, op of the last touch before the interval)."""

    swaps: dict[tuple[int, int], Window] = field(default_factory=dict)
    recomputes: dict[int, tuple[int, int]] = field(default_factory=dict)  # storage -> (last touch, next touch)
    at: dict[int, int] = field(default_factory=dict)  # recomputed storage -> op before which it is made again
    extended: set[int] = field(default_factory=set)  # dead storages kept alive for recomputes instead of made again


class Facts:
    """What every planner asks about a problem whose ops stand in planned order, computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.ops)
        self.size = [storage.size_bytes for storage in problem.storages]
        self.touches: list[list[int]] = [[] for _ in problem.storages]
        self.writers: list[list[int]] = [[] for _ in problem.storages]
        self.creator: list[int | None] = [None] * len(problem.storages)
        for position, op in enumerate(problem.ops):
            for storage in {*op.reads, *op.writes, *op.creates}:
                self.touches[storage].append(position)
            for storage in op.writes:
                self.writers[storage].append(position)
            for storage in op.creates:
                self.creator[storage] = position

    def makers(self, storage: int, last: int) -> tuple[int, ...] | None:
        """The runs that make a storage's contents as they are after op `last`: its creator, then its writers in order.
        None when one of them may not run again, or would change another storage too."""
        creator = self.creator[storage]
        if creator is None:
            return None
        makers = (creator, *(w for w in self.writers[storage] if creator < w <= last))
        for place, maker in enumerate(makers):
            op = self.problem.ops[maker]
            others = set(op.again_writes) - ({storage} if place else set())
            if not op.again_ok or others or (place and op.creates):
                return None
        return makers

    def unchanged(self, storage: int, since: int, until: int) -> bool:
        """Whether nothing writes the storage in an op after `since` and before `until`."""
        return not any(since < writer < until for writer in self.writers[storage])

    def dies(self, storage: int) -> int:
        """The op after which a storage is gone for good; the number of ops if it stays."""
        facts = self.problem.storages[storage]
        if facts.enters or facts.leaves:
            return self.count
        return self.touches[storage][-1] if self.touches[storage] else -1


def chain(facts: Facts, decisions: Decisions, targets: list[int], position: int) -> list[Run]:
    """Runs right before op `position` that make the targets again, in order, shared inputs once."""
    runs: list[Run] = []
    made: set[int] = set()
    wanted = set(targets)

    def make(storage: int, last: int, depth: int) -> None:
        if storage in made:
            return
        if depth > 200:
            raise CannotExpand("the chain of recomputes is too long")
        makers = facts.makers(storage, last)
        if makers is None:
            raise CannotExpand(f"storage {storage} cannot be made again")
        made.add(storage)
        creator = makers[0]
        for maker in makers:
            for source in facts.problem.ops[maker].again_reads:
                if source != storage:
                    require(source, maker, depth)
            if maker == creator:
                brothers = [s for s in facts.problem.ops[creator].creates if s in wanted and s not in made]
                restored = {s for s in brothers if facts.makers(s, decisions.recomputes[s][0]) == (creator,)} | {
                    storage
                }
                made.update(restored)
                runs.append(Run(op=maker, restores=tuple(sorted(restored))))
            else:
                runs.append(Run(op=maker, restores=()))

    def require(source: int, maker: int, depth: int) -> None:
        if not facts.unchanged(source, maker, position):
            raise CannotExpand(f"storage {source} has other contents by then")
        if source in made:
            return
        gap = decisions.recomputes.get(source)
        if gap is not None and gap[0] < position and decisions.at[source] == position and position <= gap[1]:
            make(source, gap[0], depth + 1)
            return
        if gap is not None and gap[0] < position < decisions.at[source]:
            raise CannotExpand(f"storage {source} is made again too late")
        if position <= facts.dies(source) or source in decisions.extended:
            return
        make(source, facts.touches[source][-1], depth + 1)

    for target in targets:
        make(target, decisions.recomputes[target][0], 0)
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """What decisions mean exactly: runs, swaps, and the bytes resident at every run. Ops are in planned order."""

    runs: tuple[Run, ...]
    swaps: tuple[Swap, ...]
    memory_bytes: tuple[int, ...]


def expand(facts: Facts, decisions: Decisions) -> Expanded:
    """The exact runs and swaps of decisions. Raises CannotExpand."""
    wanted: dict[int, list[int]] = defaultdict(list)
    for storage in sorted(decisions.recomputes):
        wanted[decisions.at[storage]].append(storage)
    runs: list[Run] = []
    place = [0] * (facts.count + 1)  # of each op's first run
    before = [0] * (facts.count + 1)  # of the first run put before each op
    for position in range(facts.count):
        before[position] = len(runs)
        if position in wanted:
            runs.extend(chain(facts, decisions, wanted[position], position))
        place[position] = len(runs)
        runs.append(Run(op=position))
    place[facts.count] = before[facts.count] = len(runs)
    swaps = [
        _swap(facts, runs, place, before, storage, last, window)
        for (storage, last), window in sorted(decisions.swaps.items())
    ]
    stays = residences(facts.problem, runs)
    spans = defaultdict(list)
    for storage, first, end in stays:
        spans[storage].append((first, end))
    # what no run needs any more after all is freed, not swapped
    swaps = [s for s in swaps if s.wraps or any(a <= s.out_start and s.in_need < b for a, b in spans[s.storage])]
    swaps.sort(key=lambda s: (s.out_start, s.out_free, s.storage))
    return Expanded(runs=tuple(runs), swaps=tuple(swaps), memory_bytes=tuple(memory(facts.problem, runs, swaps, stays)))


def _swap(
    facts: Facts, runs: list[Run], place: list[int], before: list[int], storage: int, last: int, window: Window
) -> Swap:  # fmt: skip
    wraps = window.need >= facts.count
    cycle = facts.count if wraps else 0
    # what is made again before the op that ends or begins the interval may touch the storage too
    need = before[window.need - cycle]
    fetch = min(before[window.fetch - cycle], need)
    free = max(before[window.free], place[last] + 1)
    free = max([free, *(k + 1 for k in range(free, place[window.free]) if storage in touched(facts.problem, runs[k]))])
    return Swap(
        storage=storage, out_start=place[last] + 1, out_free=free,
        in_start=fetch if wraps else max(fetch, free), in_need=need, wraps=wraps,
    )  # fmt: skip
