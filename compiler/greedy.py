"""The greedy hybrid: while the peak is above the budget, the cheapest way to take something off it.

Memory is an exact integer per op. At the worst op every idle interval that spans it is a candidate: swapped behind
other ops at no cost while a lane has room, recomputed for the time of its chain, or swapped with a stall. A price per
swapped byte keeps what is cheap to recompute off the lanes; several prices are tried and simulated, and the fastest
plan wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tensile.compiler.expand import CannotExpand, Decisions, Facts, Window, expand
from tensile.compiler.occupancy import memory
from tensile.compiler.problem import Problem
from tensile.compiler.simulate import simulate
from tensile.compiler.solution import Run, Solution, Swap

PRICES = (0.0, 0.1, 0.4, 1.0)  # of a swapped byte, as a share of the time its copy back takes
_ROUNDS = 6  # of planning for less, when what recomputes need on the way does not fit
_LONGEST_CHAIN = 60

_Ints = NDArray[np.int64]


def greedy(problem: Problem) -> Solution | None:
    """The fastest plan found within the budget, or None. Ops must stand in planned order. Deterministic."""
    facts = Facts(problem)
    best: Solution | None = None
    for price in PRICES:
        found = _within(facts, price)
        if found is not None and (best is None or found.step_ns < best.step_ns):
            best = found
        if found is not None and not found.swaps and all(run.restores is None for run in found.runs):
            break  # nothing had to be done
    # recomputes can lead into a corner that swaps alone do not
    return best or _within(facts, PRICES[0], recompute=False)


def _within(facts: Facts, price: float, *, recompute: bool = True) -> Solution | None:
    """Plan at one price; aim lower as long as the exact plan is above the budget."""
    budget = target = facts.problem.budget_bytes
    for _ in range(_ROUNDS):
        search = _Search(facts, target, price, recompute=recompute)
        reached = search.run()
        try:
            runs, swaps = expand(facts, search.decisions)
        except CannotExpand:
            return None
        peak = max(memory(facts.problem, runs, swaps), default=0)
        if peak <= budget:
            return _solution(facts.problem, runs, swaps)
        if not reached:
            return None
        target -= peak - budget
    return None


def _solution(problem: Problem, runs: tuple[Run, ...], swaps: tuple[Swap, ...]) -> Solution:
    timeline = simulate(problem, runs, swaps)
    return Solution(
        runs=runs, swaps=swaps, planner="greedy", step_ns=timeline.step_ns, peak_bytes=timeline.peak_bytes,
        peak_run=timeline.peak_run,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chain:
    """What making a storage again costs: time, bytes gained, and the storages it drags along."""

    time_ns: int
    gain_bytes: int
    moved: tuple[int, ...]  # recomputed storages needed earlier than planned
    needed: tuple[int, ...]  # live storages that must be resident
    extended: tuple[int, ...]  # dead storages kept alive until then


class _Search:
    """One greedy pass. Positions are op indices; an interval that crosses the end counts on from there."""

    def __init__(self, facts: Facts, target: int, price: float, *, recompute: bool) -> None:
        problem = facts.problem
        self.facts, self.problem, self.target, self.price = facts, problem, target, price
        self.decisions = Decisions()
        self.count = facts.count
        self.level: _Ints = np.array(memory(problem, [Run(op=i) for i in range(self.count)], ()), dtype=np.int64)
        self.time: _Ints = np.array([op.time_ns for op in problem.ops], dtype=np.int64)
        self.elapsed = np.concatenate([[0], np.cumsum(np.tile(self.time, 2))])
        # bytes each lane can still carry during each op
        self.out_room = self.time * 1000.0 / problem.out_ps_per_byte
        self.in_room = self.time * 1000.0 / problem.in_ps_per_byte
        self.out_fixed = problem.out_latency_ns * 1000 // problem.out_ps_per_byte  # latency, in bytes
        self.in_fixed = problem.in_latency_ns * 1000 // problem.in_ps_per_byte
        gaps = list(self._gaps())
        self.storage: _Ints = np.array([g[0] for g in gaps], dtype=np.int64)
        self.last: _Ints = np.array([g[1] for g in gaps], dtype=np.int64)
        self.next: _Ints = np.array([g[2] for g in gaps], dtype=np.int64)
        self.bytes: _Ints = np.array([facts.size[g[0]] for g in gaps], dtype=np.int64)
        self.open = np.ones(len(gaps), dtype=bool)
        self.can_swap = np.array([problem.storages[g[0]].swappable for g in gaps], dtype=bool)
        # inf: not to be made again
        self.remake_ns = np.array([self._first_guess(*g) if recompute else np.inf for g in gaps], dtype=float)
        self.of_storage: dict[int, list[int]] = {}
        for index, gap in enumerate(gaps):
            self.of_storage.setdefault(gap[0], []).append(index)
        self.kept: dict[int, int] = {}  # dead storages, and the op until which chains keep them
        self.widened = 0

    def run(self) -> bool:
        """Decide until the level is at most the target everywhere; False when nothing more can be done."""
        for _ in range(4 * len(self.storage) + 100):
            if self.count == 0 or int(self.level.max()) <= self.target:
                return True
            if not self._improve(int(self.level.argmax())):
                return False
        return False

    def _gaps(self) -> list[tuple[int, int, int]]:
        """(storage, last touch before, next touch after) of every interval worth a decision."""
        found = []
        for storage, touches in enumerate(self.facts.touches):
            facts = self.problem.storages[storage]
            pinned = facts.leaves and not facts.enters and not facts.swappable
            if self.facts.size[storage] < self.problem.smallest_bytes or not touches or pinned:
                continue
            found += [(storage, a, b) for a, b in pairwise(touches) if b - a > 1]
            if facts.enters and facts.leaves and touches[0] + self.count - touches[-1] > 1:
                found.append((storage, touches[-1], touches[0] + self.count))
        return found

    def _first_guess(self, storage: int, last: int, following: int) -> float:
        if following >= self.count or self.problem.storages[storage].enters:
            return float("inf")
        makers = self.facts.makers(storage, last)
        return float("inf") if makers is None else float(sum(self.problem.ops[m].time_ns for m in makers))

    # ---- one decision

    def _improve(self, peak: int) -> bool:
        spans = ((self.last < peak) & (peak < self.next)) | (
            (self.last < peak + self.count) & (peak + self.count < self.next)
        )
        candidates = np.nonzero(spans & self.open)[0]
        at = np.where(self.last[candidates] < peak, peak, peak + self.count)
        if self._swap_hidden(candidates, at):
            return True
        remake = self._cheapest_chain(candidates)
        stall = self._cheapest_stall(candidates, at)
        if remake is not None and (stall is None or remake[0] <= stall[0]):
            _, index, found = remake
            return self._recompute(index, found)
        if stall is not None:
            return self._swap_with_stall(stall[1], stall[2])
        return self._widen(peak)

    def _swap_hidden(self, candidates: _Ints, at: _Ints) -> bool:
        """The swap, among those some lanes can hide, that takes most off the ops above the target."""
        price_ns = self.price * self.problem.in_ps_per_byte / 1000
        eligible = self.can_swap[candidates] & (self.remake_ns[candidates] > price_ns * self.bytes[candidates])
        candidates, at = candidates[eligible], at[eligible]
        if not len(candidates):
            return False
        free, fetch = self._windows(candidates)
        hidden = (free <= at) & (at < fetch)
        if not hidden.any():
            return False
        over = np.concatenate([[0], np.cumsum(np.tile(self.level > self.target, 2))])
        covered = over[np.clip(fetch, 0, 2 * self.count)] - over[np.clip(free, 0, 2 * self.count)]
        benefit = np.where(hidden, covered * self.bytes[candidates], -1)
        chosen = int(benefit.argmax())
        self._swap(int(candidates[chosen]), int(free[chosen]), int(fetch[chosen]))
        return True

    def _windows(self, gaps: _Ints) -> tuple[_Ints, _Ints]:
        """Earliest boundary at which each copy out has ended, latest at which its copy back may start."""
        out = np.concatenate([[0.0], np.cumsum(np.tile(self.out_room, 2))])
        back = np.concatenate([[0.0], np.cumsum(np.tile(self.in_room, 2))])
        after, following, size = self.last[gaps] + 1, self.next[gaps], self.bytes[gaps]
        free = np.searchsorted(out, out[after] + size + self.out_fixed, side="left")
        shift = np.where(following < self.count, self.count, 0)  # look back from the second period
        fetch = np.searchsorted(back, back[following + shift] - size - self.in_fixed, side="right") - 1 - shift
        wraps = following >= self.count
        # nothing is in flight between two steps
        free = np.where(wraps & (free > self.count), 3 * self.count, free)
        fetch = np.where(wraps & (fetch < self.count), -1, fetch)
        return free.astype(np.int64), fetch.astype(np.int64)

    def _swap(self, gap: int, free: int, fetch: int) -> None:
        storage, last, following = int(self.storage[gap]), int(self.last[gap]), int(self.next[gap])
        size = int(self.bytes[gap])
        self._take(self.out_room, last + 1, free, size + self.out_fixed)
        self._take(self.in_room, following - 1, fetch - 1, size + self.in_fixed)
        self._add(free, fetch, -size)
        self.decisions.swaps[storage, last] = Window(free, fetch, following)
        self.open[gap] = False

    def _take(self, room: NDArray[np.float64], start: int, stop: int, need: float) -> None:
        """Use a lane's room op by op from `start` towards `stop`; what does not fit is a stall and uses none."""
        step = 1 if stop >= start else -1
        for position in range(start, stop, step):
            used = min(need, room[position % self.count])
            room[position % self.count] -= used
            need -= used
            if need <= 0:
                return

    def _add(self, first: int, end: int, size: int) -> None:
        """Add bytes to the level over [first, end), counted on over the end of the step."""
        if end <= first:
            return
        if first >= self.count:
            self.level[first - self.count : end - self.count] += size
        elif end <= self.count:
            self.level[first:end] += size
        else:
            self.level[first:] += size
            self.level[: end - self.count] += size

    def _cheapest_stall(self, candidates: _Ints, at: _Ints) -> tuple[float, int, int] | None:
        """The swap that waits least per byte: (ns per byte, gap, op to cover)."""
        usable = self.can_swap[candidates]
        candidates, at = candidates[usable], at[usable]
        if not len(candidates):
            return None
        out = np.concatenate([[0.0], np.cumsum(np.tile(self.out_room, 2))])
        back = np.concatenate([[0.0], np.cumsum(np.tile(self.in_room, 2))])
        size = self.bytes[candidates]
        limit = np.where(self.next[candidates] >= self.count, np.minimum(at, self.count), at)
        start = np.where(self.next[candidates] >= self.count, np.maximum(at + 1, self.count), at + 1)
        out_missing = np.maximum(0.0, size + self.out_fixed - (out[limit] - out[self.last[candidates] + 1]))
        in_missing = np.maximum(0.0, size + self.in_fixed - (back[self.next[candidates]] - back[start]))
        wait_ns = (out_missing * self.problem.out_ps_per_byte + in_missing * self.problem.in_ps_per_byte) / 1000
        cost = wait_ns / size + self.price * self.problem.in_ps_per_byte / 1000
        chosen = int(np.lexsort((-size, cost))[0])
        return float(cost[chosen]), int(candidates[chosen]), int(at[chosen])

    def _swap_with_stall(self, gap: int, at: int) -> bool:
        one = np.array([gap])
        free, fetch = (int(values[0]) for values in self._windows(one))
        wraps = self.next[gap] >= self.count
        free, fetch = min(free, at), max(fetch, at + 1)
        if wraps:
            free, fetch = min(free, self.count), max(fetch, self.count)
        self._swap(gap, max(free, int(self.last[gap]) + 1), min(fetch, int(self.next[gap])))
        return True

    def _widen(self, peak: int) -> bool:
        """Free earlier or fetch later what is swapped already, so that it is away at the peak too."""
        best: tuple[float, tuple[int, int], int] | None = None
        for (storage, last), window in self.decisions.swaps.items():
            at = peak if last < peak else peak + self.count
            if not last < at < window.need or window.free <= at < window.fetch:
                continue
            rate = self.problem.out_ps_per_byte if at < window.free else self.problem.in_ps_per_byte
            room = self._time_between(last + 1, at) if at < window.free else self._time_between(at + 1, window.need)
            cost = max(0.0, self.facts.size[storage] * rate / 1000 - room) / self.facts.size[storage]
            if best is None or (cost, (storage, last)) < best[:2]:
                best = cost, (storage, last), at
        self.widened += 1
        if best is None or self.widened > 4000:
            return False
        _, key, at = best
        window = self.decisions.swaps[key]
        size = self.facts.size[key[0]]
        wider = Window(min(window.free, at), max(window.fetch, at + 1), window.need)
        if window.need >= self.count and window.fetch >= self.count:
            wider = Window(min(wider.free, self.count), max(wider.fetch, self.count), window.need)
        self._add(wider.free, window.free, -size)
        self._add(window.fetch, wider.fetch, -size)
        self.decisions.swaps[key] = wider
        return True

    def _time_between(self, first: int, end: int) -> float:
        return float(self.elapsed[end] - self.elapsed[first])

    # ---- recompute

    def _cheapest_chain(self, candidates: _Ints) -> tuple[float, int, _Chain] | None:
        """The recompute with the least time per byte gained: (ns per byte, gap, chain)."""
        candidates = candidates[np.isfinite(self.remake_ns[candidates])]
        density = self.remake_ns[candidates] / self.bytes[candidates]
        best: tuple[float, int, _Chain] | None = None
        for place in np.lexsort((-self.bytes[candidates], density)):
            gap = int(candidates[place])
            if best is not None and density[place] >= best[0]:
                break  # guesses only grow
            found = self._chain(gap)
            if found is None:
                self.remake_ns[gap] = np.inf
                continue
            cost = found.time_ns / found.gain_bytes
            self.remake_ns[gap] = max(self.remake_ns[gap], cost * self.bytes[gap])
            if best is None or cost < best[0]:
                best = cost, gap, found
        return best

    def _chain(self, gap: int) -> _Chain | None:
        """Both ways to come by dead inputs, made again or kept, and the better of them."""
        ways = [way for keep in (False, True) if (way := self._one_chain(gap, keep)) is not None and way.gain_bytes > 0]
        return min(ways, key=lambda way: way.time_ns / way.gain_bytes, default=None)

    def _one_chain(self, gap: int, keep: bool) -> _Chain | None:
        facts, decisions = self.facts, self.decisions
        position = int(self.next[gap])
        size, ops = facts.size, self.problem.ops
        time_ns, longer = 0, 0
        moved: list[int] = []
        needed: list[int] = []
        extended: list[int] = []
        seen: set[int] = set()
        pending = [(int(self.storage[gap]), int(self.last[gap]))]
        seen.add(pending[0][0])
        steps = 0
        while pending:
            storage, last = pending.pop()
            makers = facts.makers(storage, last)
            steps += 1
            if makers is None or steps > _LONGEST_CHAIN:
                return None
            for maker in makers:
                time_ns += ops[maker].time_ns
                for source in ops[maker].again_reads:
                    if source in seen:
                        continue
                    if not facts.unchanged(source, maker, position):
                        return None
                    seen.add(source)
                    evicted = decisions.recomputes.get(source)
                    if evicted is not None and evicted[0] < position <= evicted[1]:
                        if decisions.at[source] > position:
                            moved.append(source)
                            pending.append((source, evicted[0]))
                        continue
                    if position <= facts.dies(source):
                        needed.append(source)
                    elif (
                        source in decisions.extended
                        or keep
                        or facts.makers(source, facts.touches[source][-1]) is None
                        or size[source] <= 4096
                    ):
                        extended.append(source)
                        longer += self._longer(source, position)
                    else:
                        pending.append((source, facts.touches[source][-1]))
        for source in needed:
            if not self._can_need(source, position):
                return None
        return _Chain(
            time_ns=max(1, time_ns), gain_bytes=int(self.bytes[gap]) - longer, moved=tuple(moved), needed=tuple(needed),
            extended=tuple(extended),
        )  # fmt: skip

    def _longer(self, source: int, position: int) -> int:
        """Bytes that keeping a dead storage until `position` adds, 0 where another chain keeps it as long already."""
        return self.facts.size[source] if position > self._kept_until(source) else 0

    def _kept_until(self, source: int) -> int:
        return self.kept.get(source, self.facts.touches[source][-1])

    def _can_need(self, source: int, position: int) -> bool:
        """Whether a storage can be resident before op `position`; not when it is away there until the next step."""
        for gap in self.of_storage.get(source, ()):
            window = self.decisions.swaps.get((source, int(self.last[gap])))
            gone = window is not None and window.need >= self.count and window.free < position < self.count
            if gone and int(self.last[gap]) < position:
                return False
        return True

    def _recompute(self, gap: int, found: _Chain) -> bool:
        storage, last, following = int(self.storage[gap]), int(self.last[gap]), int(self.next[gap])
        position = int(self.next[gap])
        for source in found.moved:
            self._add(position, self.decisions.at[source], self.facts.size[source])
            self.decisions.at[source] = position
        for source in found.extended:
            until = self._kept_until(source)
            if position > until:
                self._add(until + 1, position, self.facts.size[source])
                self.kept[source] = position
            self.decisions.extended.add(source)
        for source in (*found.needed, *found.moved):
            self._need_by(source, position)
        self._add(last + 1, position, -int(self.bytes[gap]))
        self.decisions.recomputes[storage] = (last, following)
        self.decisions.at[storage] = position
        self.open[gap] = False
        for other in self.of_storage.get(storage, ()):
            self.remake_ns[other] = np.inf  # one recompute a storage
        return True

    def _need_by(self, source: int, position: int) -> None:
        """A storage must be resident before op `position`: intervals that span it end there."""
        for gap in self.of_storage.get(source, ()):
            last, following = int(self.last[gap]), int(self.next[gap])
            at = position if last < position else position + self.count
            window = self.decisions.swaps.get((source, last))
            if not last < at < following or (window is not None and at <= window.free):
                continue
            self.next[gap] = at
            if window is not None and at < window.need:
                fetch = min(window.fetch, at)
                self._add(fetch, window.fetch, self.facts.size[source])
                self.decisions.swaps[source, last] = Window(window.free, fetch, at)
