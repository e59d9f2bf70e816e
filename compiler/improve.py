"""Local search: take part of a plan back, decide it anew, keep what is faster; and plans from a relaxation's fractions.

Ruin and recreate: Schrimpf et al., J. Computational Physics 159 (2000). Deterministic for a seed and a number of
rounds; a time limit stops it wherever it is.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tensile.compiler.bound import Bound
from tensile.compiler.greedy import Found, realise
from tensile.compiler.search import Search
from tensile.compiler.solution import Solution
from tensile.compiler.terrain import Floats, Ints, Terrain

_PRICES = (0.0, 0.03, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
_THRESHOLDS = (0.02, 0.3, 0.5, 0.8)  # fractions from which on a relaxed decision is taken
_BACK_TO_BEST = 40  # rounds
_TRIES = 3
_SHARE_RELAXED = 0.1  # of the rounds begin with the relaxation instead of a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seed:
    """Decisions to start from: gaps to recompute, (storage, last touch, op to be away at) to swap, dead storages to
    keep; and gaps not to recompute or swap."""

    recomputes: tuple[int, ...]
    swaps: tuple[tuple[int, int, int], ...]
    kept: frozenset[int]
    no_recompute: frozenset[int] = frozenset()
    no_swap: frozenset[int] = frozenset()


def rounded(terrain: Terrain, budget_bytes: int, relaxed: Bound) -> Found | None:
    """The fastest plan made of a relaxation's larger fractions and completed by the search, or None."""
    best: Found | None = None
    for threshold in _THRESHOLDS:
        seed = _taken(terrain, relaxed, partial(operator.le, threshold))
        for price in (0.0, 0.1):
            found = _rebuilt(terrain, budget_bytes, None, price, seed, None, "relaxation")
            if found is not None and (best is None or found.solution.step_ns < best.solution.step_ns):
                best = found
    return best


def improve(
    terrain: Terrain, budget_bytes: int, start: Found, *, relaxed: Bound | None, goal_ns: float, seconds: float,
    rounds: int, patience: int, seed: int, watch: Callable[[Solution], None] = lambda solution: None,
) -> tuple[Found, str]:  # fmt: skip
    """The fastest plan seen, `start` at worst, and what ended the search: "rounds", "seconds", "bound" when a plan
    takes `goal_ns`, which none beats, "interrupted" by the user, or rounds that found nothing. `watch` hears of every
    better plan."""
    random = np.random.default_rng(seed)
    best = current = start
    until = time.monotonic() + seconds
    fastest = sum(op.time_ns for op in terrain.problem.ops)
    waited = 0  # rounds since the last better plan
    for number in range(rounds):
        if waited == patience:
            return best, f"{patience} rounds without a better plan"
        waited += 1
        if best.solution.step_ns <= goal_ns * (1 + 1e-6):
            return best, "bound"
        if time.monotonic() > until:
            return best, "seconds"
        if number % _BACK_TO_BEST == 0:
            current = best
        if relaxed is not None and random.random() < _SHARE_RELAXED:
            part = _drawn(terrain, relaxed, random)
        else:
            part = _ruined(terrain, current.search, random)
        noise = np.exp(random.normal(0, random.uniform(0, 0.3), len(terrain.storage)))
        price = float(random.choice([current.search.price, *_PRICES]))
        try:
            reserve = None if random.random() < 0.3 else current.search.reserve
            found = _rebuilt(terrain, budget_bytes, reserve, price, part, noise, "local search")
        except KeyboardInterrupt:
            return best, "interrupted"
        if found is None:
            continue
        loss = (found.solution.step_ns - current.solution.step_ns) / max(1, fastest)
        spare = 0.001 + 0.01 * (current.solution.step_ns / max(1, fastest) - 1)
        if loss <= 0 or random.random() < 0.3 * math.exp(-loss / spare):
            current = found
        if found.solution.step_ns < best.solution.step_ns:
            best, waited = found, 0
            watch(best.solution)
    return best, "rounds"


def _drawn(terrain: Terrain, relaxed: Bound, random: np.random.Generator) -> _Seed:
    """A relaxation's decisions, each taken with its fraction as the chance, or a bit more or less."""
    shift = random.uniform(-0.3, 0.3)
    return _taken(terrain, relaxed, lambda value: bool(random.random() < value + shift * (1 - value)))


def _taken(terrain: Terrain, relaxed: Bound, take: Callable[[float], bool]) -> _Seed:
    return _Seed(
        recomputes=tuple(g for g, value in relaxed.again.items() if take(value)),
        swaps=tuple(
            (int(terrain.storage[g]), int(terrain.last[g]), (first + end) // 2)
            for g, (value, first, end) in relaxed.away.items() if take(value)
        ),
        kept=frozenset(s for s, value in relaxed.kept.items() if take(value)),
    )  # fmt: skip


def _ruined(terrain: Terrain, search: Search, random: np.random.Generator) -> _Seed:
    """The decisions of a search without some of them."""
    recomputes = list(search.recomputes.values())
    swaps = [
        (gap, (int(search.free[gap]) + int(search.fetch[gap]) - 1) // 2)
        for gap in map(int, np.nonzero(search.swapped)[0])
    ]
    no_recompute: set[int] = set()
    no_swap: set[int] = set()
    match int(random.integers(0, 5)):
        case 0:  # what begins or ends in one part of the step
            first = int(random.integers(0, max(1, terrain.count)))
            end = first + int(terrain.count * random.uniform(0.03, 0.25))

            def outside(gap: int) -> bool:
                return not (first <= search.last[gap] < end or first <= search.next[gap] % terrain.count < end)

            recomputes = [gap for gap in recomputes if outside(gap)]
            swaps = [swap for swap in swaps if outside(swap[0])]
        case 1:  # some of everything
            share = random.uniform(0.05, 0.5)
            recomputes = [gap for gap in recomputes if random.random() > share]
            swaps = [swap for swap in swaps if random.random() > share]
        case 2:  # every swap
            share = random.uniform(0, 0.3)
            recomputes = [gap for gap in recomputes if random.random() > share]
            swaps = []
        case 3:  # other recomputes
            share = random.uniform(0.02, 0.2)
            no_recompute = {gap for gap in recomputes if random.random() < share}
            recomputes = [gap for gap in recomputes if gap not in no_recompute]
            swaps = [swap for swap in swaps if random.random() > 0.3]
        case _:  # other swaps
            share = random.uniform(0.02, 0.2)
            no_swap = {swap[0] for swap in swaps if random.random() < share and swap[0] < len(terrain.storage)}
            swaps = [swap for swap in swaps if swap[0] not in no_swap]
            recomputes = [gap for gap in recomputes if random.random() > 0.2]
    if random.random() < 0.5:
        swaps = [swaps[k] for k in random.permutation(len(swaps))]
    else:
        swaps.sort(key=lambda swap: -int(search.size[swap[0]]))
    if random.random() < 0.5:
        recomputes.sort(key=lambda gap: int(search.final_next[gap]))
    return _Seed(
        recomputes=tuple(recomputes),
        swaps=tuple((int(search.storage[gap]), int(search.last[gap]), at) for gap, at in swaps),
        kept=frozenset(search.kept), no_recompute=frozenset(no_recompute), no_swap=frozenset(no_swap),
    )  # fmt: skip


def _rebuilt(
    terrain: Terrain, budget: int, reserve: Ints | None, price: float, seed: _Seed, noise: Floats | None, planner: str
) -> Found | None:  # fmt: skip
    """The plan that a search makes of a seed, within the budget; tried again with more kept free where it does not
    fit."""
    for _ in range(_TRIES):
        search = Search(terrain, budget, price, reserve)
        search.prefer_kept = set(seed.kept)
        search.remake_ns[list(seed.no_recompute)] = np.inf
        if seed.no_swap:
            search.can_swap = terrain.can_swap.copy()
            search.can_swap[list(seed.no_swap)] = False
        for gap in seed.recomputes:
            search.recompute(gap)
        for storage, last, at in seed.swaps:
            search.swap(storage, last, at)
        if noise is not None:
            search.bias[: len(noise)] = noise
        if not search.run():
            return None
        search.undo()
        exact = realise(search, budget, planner)
        if isinstance(exact, Solution):
            return Found(replace(exact, planner=planner), search)
        if exact is None:
            return None
        reserve = search.reserve + exact
    return None
