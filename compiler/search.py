"""One constructive search: while the peak is above the target, the cheapest way to take something off it.

Memory is an exact integer per op. At the worst op every idle interval that spans it is a candidate: swapped behind
other ops at no cost while a lane has room, recomputed for the time of its chain, or swapped with a stall. Lanes are
filled op by op, as copies in chunks fill them; recomputes and stalls lengthen the step and so give the lanes room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tensile.compiler.expand import Decisions, Window
from tensile.compiler.terrain import Floats, Ints, Terrain

_LONGEST_CHAIN = 120  # runs
_MOST_WIDENINGS = 4000
_KEPT_ANYWAY_BYTES = 2**16  # dead inputs up to this size are kept for a recompute, not made again


class _CannotRemake(Exception):
    """A chain would need contents that are gone or changed."""


@dataclass(slots=True)
class _Chain:
    """What making a storage again before op `position` costs, and what it drags along."""

    position: int
    time_ns: float = 0.0
    longer_bytes: float = 0.0
    moved: list[int] = field(default_factory=list)  # recomputed storages needed earlier than planned
    needed: list[int] = field(default_factory=list)  # live storages that must be resident
    extended: list[int] = field(default_factory=list)  # dead storages kept alive until then
    steps: int = 0


@dataclass(slots=True)
class _Booking:
    """The room one swap takes in the lanes: ops and bytes, each way."""

    out_ops: Ints
    out_bytes: Floats
    in_ops: Ints
    in_bytes: Floats


class Search:
    """Mutable state of one pass. Positions are op indices; an interval that crosses the end counts on from there."""

    def __init__(self, terrain: Terrain, target: int, price: float, reserve: Ints | None = None) -> None:
        """`reserve`: bytes to keep free at every op for what recomputes take there on the way."""
        self.terrain, self.facts, self.problem, self.count = terrain, terrain.facts, terrain.problem, terrain.count
        self.target, self.price = target, price
        self.reserve = np.zeros_like(terrain.level) if reserve is None else reserve
        self.level = terrain.level + self.reserve
        self.out_room, self.in_room = terrain.time_ns * terrain.out_rate, terrain.time_ns * terrain.in_rate
        self.storage, self.last, self.size = terrain.storage, terrain.last, terrain.size
        self.next = terrain.next.copy()
        self.open = np.ones(len(terrain.storage), dtype=bool)
        self.can_swap = terrain.can_swap
        self.final_next = terrain.next
        self.remake_ns = terrain.remake_ns.copy()
        self.bias = np.ones(len(terrain.storage))  # a search that tries something else multiplies costs by it
        self.free = np.zeros(len(terrain.storage), dtype=np.int64)
        self.fetch = np.zeros(len(terrain.storage), dtype=np.int64)
        self.swapped = np.zeros(len(terrain.storage), dtype=bool)
        self.busy_until = terrain.last + 1  # recomputes may need a storage longer before it may leave
        self.bookings: dict[int, _Booking] = {}
        self.recomputes: dict[int, int] = {}  # storage -> gap
        self.at: dict[int, int] = {}  # recomputed storage -> op before which it is made again
        self.kept: dict[int, int] = {}  # dead storages, and the op until which chains keep them
        self.kept_gap: dict[int, int] = {}  # their idle interval before the first chain that reads them
        self.prefer_kept: set[int] = set()  # dead storages to keep rather than make again
        self.added_ns = 0.0
        self.widened = 0
        self.marginal = 0.0  # of the last recompute: ns per byte
        self.chains: dict[int, _Chain | None] = {}  # per gap, as long as no recompute is decided

    def forbid_recomputes(self) -> None:
        """Swaps alone."""
        self.remake_ns[:] = np.inf

    def recompute(self, gap: int) -> bool:
        """Decide to make the storage of a gap again, if that can be; dead inputs as `prefer_kept` says."""
        if not (self.open[gap] and np.isfinite(self.remake_ns[gap])):
            return False
        chain = self._chain_at(gap, float("inf"))
        return chain is not None and self._recompute(gap, chain)

    def swap(self, storage: int, last: int, at: int) -> bool:
        """Decide to swap a storage after op `last` so that it is away at op `at`, if the lanes can hide it."""
        for gap in self._gaps_of(storage):
            if self.last[gap] == last and self.open[gap] and self.can_swap[gap]:
                free, fetch = (int(values[0]) for values in self._windows(np.array([gap])))
                if free <= at < fetch:
                    self._swap(gap, free, fetch)
                    return True
        return False

    def run(self) -> bool:
        """Decide until the level is at most the target everywhere; False when nothing more can be done."""
        if self.count == 0:
            return True
        for _ in range(4 * len(self.storage) + 100):
            peak = int(self.level.argmax())
            if int(self.level[peak]) <= self.target:
                return True
            if not self._improve(peak):
                return False
        return False

    def decisions(self) -> Decisions:
        """What was decided, for `expand`."""
        made = Decisions()
        for gap in map(int, np.nonzero(self.swapped)[0]):
            window = Window(int(self.free[gap]), int(self.fetch[gap]), int(self.next[gap]))
            if window.free < window.fetch:
                made.swaps[int(self.storage[gap]), int(self.last[gap])] = window
        for storage, gap in self.recomputes.items():
            made.recomputes[storage] = (int(self.last[gap]), int(self.final_next[gap]))
        made.at = dict(self.at)
        made.extended = set(self.kept)
        return made

    def undo(self) -> None:
        """Take back what the target does not need: the dearest recomputes first, then the largest swaps."""
        for storage, gap in sorted(self.recomputes.items(), key=lambda item: -self.remake_ns[item[1]]):
            first, end, size = int(self.last[gap]) + 1, self.at[storage], int(self.size[gap])
            if first < end and self.level[first:end].max() + size <= self.target:
                self.level[first:end] += size
                self.open[gap] = True
                del self.recomputes[storage], self.at[storage]
        for gap in sorted(map(int, np.nonzero(self.swapped)[0]), key=lambda gap: -self.size[gap]):
            spans = list(self._spans(int(self.free[gap]), int(self.fetch[gap])))
            if all(self.level[a:b].max(initial=0) + self.size[gap] <= self.target for a, b in spans):
                self._unswap(gap)
                self.open[gap] = True

    # ---- one decision

    def _improve(self, peak: int) -> bool:
        spans = ((self.last < peak) & (peak < self.next)) | (
            (self.last < peak + self.count) & (peak + self.count < self.next)
        )
        candidates = np.nonzero(spans & self.open)[0]
        at = np.where(self.last[candidates] < peak, peak, peak + self.count)
        if self._swap_hidden(candidates, at):
            return True
        stall = self._cheapest_stall(candidates, at)
        limit = float("inf") if stall is None else stall[0]
        remake = self._cheapest_chain(candidates[self.last[candidates] < peak], peak, limit)
        while remake is not None:
            if self._recompute(*remake):
                return True
            self.remake_ns[remake[0]] = np.inf
            remake = self._cheapest_chain(candidates[self.last[candidates] < peak], peak, limit)
        if stall is not None and self._swap_with_stall(stall[1], stall[2]):
            return True
        return self._widen(peak)

    def _swap_hidden(self, candidates: Ints, at: Ints) -> bool:
        """The swap, among those the lanes can hide, that takes most off the ops above the target."""
        floor = self.price / self.terrain.in_rate
        eligible = self.can_swap[candidates] & (self.remake_ns[candidates] > floor * self.size[candidates])
        candidates, at = candidates[eligible], at[eligible]
        if not len(candidates):
            return False
        free, fetch = self._windows(candidates)
        hidden = (free <= at) & (at < fetch)
        if not hidden.any():
            return False
        candidates, free, fetch = candidates[hidden], free[hidden], fetch[hidden]
        over = _before((self.level > self.target).astype(np.float64))
        over = np.concatenate([over, over[-1] + over[1:]])
        gain = self.size[candidates] * (over[fetch] - over[free])
        chosen = int(gain.argmax())
        self._swap(int(candidates[chosen]), int(free[chosen]), int(fetch[chosen]))
        return True

    def _cheapest_stall(self, candidates: Ints, at: Ints) -> tuple[float, int, int] | None:
        """The swap that waits least per byte: (ns per byte, gap, op to cover)."""
        usable = self.can_swap[candidates]
        candidates, at = candidates[usable], at[usable]
        if not len(candidates):
            return None
        out, back = self._missing(candidates, at, at + 1)
        size = self.size[candidates]
        cost = (out / self.terrain.out_rate + back / self.terrain.in_rate) / size + self.price / self.terrain.in_rate
        chosen = int(np.lexsort((-size, cost))[0])
        return float(cost[chosen]), int(candidates[chosen]), int(at[chosen])

    def _swap_with_stall(self, gap: int, at: int) -> bool:
        """Wait as long as the copies need to be out before op `at` and back after it, and swap."""
        return self._swap_waiting(gap, at, at + 1)

    def _widen(self, peak: int) -> bool:
        """Free earlier or fetch later what is swapped already, so that it is away at the peak too."""
        gaps = np.nonzero(self.swapped)[0]
        at = np.where(self.last[gaps] < peak, peak, peak + self.count)
        useful = (
            (self.busy_until[gaps] <= at)
            & (at < self.next[gaps])
            & ~((self.free[gaps] <= at) & (at < self.fetch[gaps]))
        )
        gaps, at = gaps[useful], at[useful]
        self.widened += 1
        if not len(gaps) or self.widened > _MOST_WIDENINGS:
            return False
        size = self.size[gaps]
        early = at < self.free[gaps]
        elapsed = self.terrain.elapsed_ns
        room = np.where(early, elapsed[at] - elapsed[self.last[gaps] + 1], elapsed[self.next[gaps]] - elapsed[at + 1])
        rate = np.where(early, self.terrain.out_rate, self.terrain.in_rate)
        cost = np.maximum(0.0, size / rate - room) / size
        chosen = int(np.lexsort((-size, cost))[0])
        gap, where = int(gaps[chosen]), int(at[chosen])
        free, fetch = min(int(self.free[gap]), where), max(int(self.fetch[gap]), where + 1)
        self._unswap(gap)
        return self._swap_waiting(gap, free, fetch)

    # ---- swaps and lanes

    def _windows(self, gaps: Ints) -> tuple[Ints, Ints]:
        """Earliest boundary at which each copy out has ended, latest at which its copy back may start. Nothing is in
        flight between two steps. Windows that cannot be are empty."""
        out, back = _before(self.out_room), _before(self.in_room)
        last, following, size = self.last[gaps], self.next[gaps], self.size[gaps]
        shift = np.where(following >= self.count, self.count, 0)
        free = np.searchsorted(out, out[last + 1] + size + self.terrain.out_fixed, side="left")
        free = np.maximum(free, self.busy_until[gaps])
        fetch = np.searchsorted(back, back[following - shift] - size - self.terrain.in_fixed, side="right") - 1
        possible = (free <= self.count) & (fetch >= 0) & (free < fetch + shift)
        return np.where(possible, free, 0), np.where(possible, fetch + shift, 0)

    def _missing(self, gaps: Ints, free: Ints, fetch: Ints) -> tuple[Floats, Floats]:
        """Bytes of room each way that are missing for copies that end by `free` and start at `fetch`."""
        out, back = _before(self.out_room), _before(self.in_room)
        shift = np.where(self.next[gaps] >= self.count, self.count, 0)
        has_out = out[np.minimum(free, self.count)] - out[self.last[gaps] + 1]
        following = self.next[gaps] - shift
        has_in = back[following] - back[np.clip(fetch - shift, 0, following)]
        need_out, need_in = self.size[gaps] + self.terrain.out_fixed, self.size[gaps] + self.terrain.in_fixed
        return np.maximum(0.0, need_out - has_out), np.maximum(0.0, need_in - has_in)

    def _swap_waiting(self, gap: int, free: int, fetch: int) -> bool:
        """Swap so that the copy out has ended by `free` and the copy back starts at `fetch`, waiting where needed."""
        following = int(self.next[gap])
        if following >= self.count:
            free, fetch = min(free, self.count), max(fetch, self.count)
        free, fetch = max(free, int(self.busy_until[gap])), min(fetch, following)
        if free >= fetch:
            return False
        one = np.array([gap])
        out, back = (float(missing[0]) for missing in self._missing(one, np.array([free]), np.array([fetch])))
        # a stall gives both lanes time
        self._stretch((free - 1) % self.count, out / self.terrain.out_rate)
        self._stretch((following - 1) % self.count, back / self.terrain.in_rate)
        self._swap(gap, free, fetch)
        return True

    def _stretch(self, op: int, extra_ns: float) -> None:
        """The step waits or works longer at an op: room for both lanes."""
        if extra_ns > 0:
            self.added_ns += extra_ns
            self.out_room[op] += extra_ns * self.terrain.out_rate * 1.0001
            self.in_room[op] += extra_ns * self.terrain.in_rate * 1.0001

    def _swap(self, gap: int, free: int, fetch: int) -> None:
        last, following, size = int(self.last[gap]), int(self.next[gap]), int(self.size[gap])
        out_ops = np.arange(last + 1, max(free, last + 1)) % self.count
        in_ops = np.arange(following - 1, min(fetch, following) - 1, -1) % self.count
        self.bookings[gap] = _Booking(
            out_ops, _take(self.out_room, out_ops, size + self.terrain.out_fixed),
            in_ops, _take(self.in_room, in_ops, size + self.terrain.in_fixed),
        )  # fmt: skip
        self._add(free, fetch, -size)
        self.free[gap], self.fetch[gap], self.swapped[gap], self.open[gap] = free, fetch, True, False

    def _unswap(self, gap: int) -> None:
        booking = self.bookings.pop(gap)
        self.out_room[booking.out_ops] += booking.out_bytes
        self.in_room[booking.in_ops] += booking.in_bytes
        self._add(int(self.free[gap]), int(self.fetch[gap]), int(self.size[gap]))
        self.swapped[gap] = False

    def _spans(self, first: int, end: int) -> Iterable[tuple[int, int]]:
        """[first, end), counted on over the end of the step, as one or two ranges of ops."""
        if first >= self.count:
            yield first - self.count, end - self.count
        elif end <= self.count:
            yield first, end
        else:
            yield first, self.count
            yield 0, end - self.count

    def _add(self, first: int, end: int, size: int) -> None:
        if first < end:
            for a, b in self._spans(first, end):
                self.level[a:b] += size

    # ---- recompute

    def _cheapest_chain(self, candidates: Ints, peak: int, limit: float) -> tuple[int, _Chain] | None:
        """The recompute with the least time per byte gained, cheaper than `limit`. Guesses only grow, so the search
        ends at the first guess above the best found."""
        candidates = candidates[np.isfinite(self.remake_ns[candidates])]
        density = self.bias[candidates] * self.remake_ns[candidates] / self.size[candidates]
        best: tuple[int, _Chain] | None = None
        for place in np.lexsort((-self.size[candidates], density)):
            gap = int(candidates[place])
            if density[place] >= limit:
                break
            found = self._chain(gap)
            if found is None:
                self.remake_ns[gap] = np.inf
                continue
            cost = found.time_ns / (self.size[gap] - found.longer_bytes)
            self.remake_ns[gap] = max(self.remake_ns[gap], cost * self.size[gap])
            if cost * self.bias[gap] < limit:
                limit, best = cost * self.bias[gap], (gap, found)
        return best

    def _chain(self, gap: int) -> _Chain | None:
        if gap not in self.chains:
            self.chains[gap] = self._best_chain(gap)
        return self.chains[gap]

    def _best_chain(self, gap: int) -> _Chain | None:
        """The best of three ways to come by dead inputs: made again, kept, or whichever is cheaper at today's price."""
        best, best_cost = None, float("inf")
        prices = (0.0, float("inf")) if self.marginal == 0 else (0.0, self.marginal, float("inf"))
        for price in prices:
            chain = self._chain_at(gap, price)
            gain = 0.0 if chain is None else self.size[gap] - chain.longer_bytes
            if chain is not None and gain > 0 and chain.time_ns / gain < best_cost:
                best, best_cost = chain, chain.time_ns / gain
        return best

    def _chain_at(self, gap: int, price: float) -> _Chain | None:
        chain = _Chain(position=int(self.next[gap]))
        try:
            self._make(int(self.storage[gap]), int(self.last[gap]), chain, {int(self.storage[gap])}, price)
        except _CannotRemake:
            return None
        return chain

    def _make(
        self, storage: int, last: int, chain: _Chain, seen: set[int], price: float, *, again: bool = True
    ) -> None:
        """Add the runs that make a storage's contents after op `last`; `again` is False when they are paid already."""
        makers = self.facts.makers(storage, last)
        if makers is None:
            raise _CannotRemake
        chain.steps += len(makers)
        if chain.steps > _LONGEST_CHAIN:
            raise _CannotRemake
        for maker in makers:
            if again:
                chain.time_ns += self.problem.ops[maker].again_ns
            for source in self.problem.ops[maker].again_reads:
                if not self.facts.unchanged(source, maker, chain.position):
                    raise _CannotRemake
                if source not in seen:
                    seen.add(source)
                    self._come_by(source, chain, seen, price)

    def _come_by(self, source: int, chain: _Chain, seen: set[int], price: float) -> None:
        """Have an input resident before the chain's position."""
        position = chain.position
        gap = self.recomputes.get(source)
        if gap is not None and self.last[gap] < position <= self.final_next[gap]:
            if self.at[source] > position:
                chain.moved.append(source)
                self._make(source, int(self.last[gap]), chain, seen, price, again=False)
            return
        if position <= self.facts.dies(source):
            if not self._can_need(source, position):
                raise _CannotRemake
            chain.needed.append(source)
            return
        longer = self.facts.size[source] if position > self._kept_until(source) else 0
        last = self.facts.touches[source][-1]
        if longer == 0 or self.facts.size[source] <= _KEPT_ANYWAY_BYTES or self.facts.makers(source, last) is None:
            chain.extended.append(source)
            chain.longer_bytes += longer
            return
        if price == 0 or source in self.prefer_kept:
            chain.extended.append(source)
            chain.longer_bytes += longer
            return
        before = (chain.time_ns, chain.longer_bytes, len(chain.moved), len(chain.needed), len(chain.extended))
        seen_before = set(seen) if price < float("inf") else seen
        try:
            self._make(source, last, chain, seen, price)
            extra = chain.time_ns - before[0] + price * (chain.longer_bytes - before[1]) if price < float("inf") else 0
        except _CannotRemake:
            if price == float("inf"):
                raise
            extra = float("inf")
        if price < float("inf") and extra > price * longer:
            chain.time_ns, chain.longer_bytes = before[0], before[1] + longer
            del chain.moved[before[2] :], chain.needed[before[3] :], chain.extended[before[4] :]
            seen.intersection_update(seen_before)
            chain.extended.append(source)

    def _gaps_of(self, storage: int) -> list[int]:
        known = self.terrain.of_storage.get(storage, [])
        return [*known, self.kept_gap[storage]] if storage in self.kept_gap else known

    def _open_kept(self, source: int, position: int) -> None:
        """A dead storage kept for a chain may be swapped until the chain needs it."""
        last = self.facts.touches[source][-1]
        swappable = self.problem.storages[source].swappable
        if source in self.kept_gap or not swappable or position - last <= 1:
            return
        self.kept_gap[source] = len(self.storage)
        size = self.facts.size[source]
        self.storage, self.last = np.append(self.storage, source), np.append(self.last, last)
        self.next, self.final_next = np.append(self.next, position), np.append(self.final_next, position)
        self.size, self.open = np.append(self.size, size), np.append(self.open, True)
        self.can_swap, self.remake_ns = np.append(self.can_swap, True), np.append(self.remake_ns, np.inf)
        self.bias = np.append(self.bias, 1.0)
        self.free, self.fetch = np.append(self.free, 0), np.append(self.fetch, 0)
        self.busy_until = np.append(self.busy_until, last + 1)
        self.swapped = np.append(self.swapped, False)

    def _kept_until(self, source: int) -> int:
        return self.kept.get(source, self.facts.touches[source][-1])

    def _can_need(self, source: int, position: int) -> bool:
        """Whether a storage can be resident before op `position`; not when it is away there until the next step."""
        for gap in self._gaps_of(source):
            gone = self.swapped[gap] and self.next[gap] >= self.count and self.free[gap] < position < self.count
            if gone and self.last[gap] < position:
                return False
        return True

    def _recompute(self, gap: int, chain: _Chain) -> bool:
        """Apply a chain; False, and nothing changed, when a swapped input cannot be back in time."""
        position, storage = chain.position, int(self.storage[gap])
        self.chains.clear()
        if not self._all_back((*chain.needed, *chain.extended, *chain.moved), position):
            return False
        for source in chain.moved:
            self._add(position, self.at[source], self.facts.size[source])
            self.at[source] = position
        for source in chain.extended:
            until = self._kept_until(source)
            if position > until:
                self._add(until + 1, position, self.facts.size[source])
                self.kept[source] = position
            self._open_kept(source, position)
        self._add(int(self.last[gap]) + 1, position, -int(self.size[gap]))
        self.recomputes[storage], self.at[storage] = gap, position
        self.open[gap] = False
        for other in self._gaps_of(storage):
            self.remake_ns[other] = np.inf if other != gap else self.remake_ns[gap]  # one recompute a storage
        self.marginal = chain.time_ns / max(1.0, self.size[gap] - chain.longer_bytes)
        self._stretch((position - 1) % self.count, chain.time_ns)
        return True

    def _all_back(self, sources: Iterable[int], position: int) -> bool:
        """See to it that the sources are resident before op `position`: intervals that span it end there."""
        earlier: list[tuple[int, int]] = []
        for source in sources:
            for gap in self._gaps_of(source):
                last = int(self.last[gap])
                at = position if last < position else position + self.count
                if not last < at < self.next[gap]:
                    continue
                if self.swapped[gap] and at <= self.free[gap] < self.count:
                    self.busy_until[gap] = max(int(self.busy_until[gap]), at)
                else:
                    earlier.append((gap, at))
        for gap, at in earlier:
            if self.swapped[gap] and not self._back_by(gap, at):
                return False
            self.next[gap] = at
        return True

    def _back_by(self, gap: int, at: int) -> bool:
        """Book a swap's copy back again, to be done by op `at`."""
        before = int(self.next[gap])
        free, fetch = int(self.free[gap]), int(self.fetch[gap])
        self._unswap(gap)
        self.next[gap] = at
        _, latest = self._windows(np.array([gap]))
        start = min(int(latest[0]), at)
        if start <= free:
            self.next[gap] = before
            self._swap(gap, free, fetch)
            return False
        self._swap(gap, free, start)
        return True


def _before(room: Floats) -> Floats:
    """Bytes a lane can carry before each boundary of the step."""
    total = np.empty(len(room) + 1)
    total[0] = 0.0
    np.cumsum(room, out=total[1:])
    return total


def _take(room: Floats, ops: Ints, need: float) -> Floats:
    """Use a lane's room op by op in the order given; what does not fit uses none. Bytes used at each op."""
    has = room[ops]
    used = np.minimum(has, np.maximum(0.0, need - (np.cumsum(has) - has)))
    room[ops] -= used
    return used
