"""The greedy hybrid: one constructive search at several prices of a swapped byte, the fastest plan wins.

The price keeps what is cheap to recompute off the lanes. A search works on a model of memory and lanes; its decisions
are expanded into exact runs and swaps, and only those count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensile.compiler.expand import CannotExpand, Expanded, expand
from tensile.compiler.search import Search
from tensile.compiler.simulate import simulate
from tensile.compiler.solution import Solution
from tensile.compiler.terrain import Ints, Terrain

PRICES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)  # of a swapped byte, as a share of the time its copy back takes
_ROUNDS = 6  # of planning again, when what recomputes need on the way does not fit


@dataclass(frozen=True, slots=True)
class Found:
    """An exact plan within the budget, and the search whose decisions it stands for. Ops are in planned order."""

    solution: Solution
    search: Search


def construct(terrain: Terrain, budget_bytes: int) -> Found | None:
    """The fastest plan over all prices, or None; `budget_bytes` may differ from the problem's. Deterministic."""
    best: Found | None = None
    fastest = sum(op.time_ns for op in terrain.problem.ops)
    for price in PRICES:
        found = _within(terrain, budget_bytes, price)
        if found is not None and (best is None or found.solution.step_ns < best.solution.step_ns):
            best = found
        if best is not None and best.solution.step_ns <= fastest:
            break  # nothing is faster than the ops alone
    # recomputes can lead into a corner that swaps alone do not
    return best or _within(terrain, budget_bytes, PRICES[0], recompute=False)


def realise(search: Search, budget_bytes: int, planner: str) -> Solution | Ints | None:
    """The exact plan of a search's decisions; the bytes it is above the budget at every op if it does not fit; None
    when the decisions contradict each other."""
    problem = search.problem
    try:
        exact = expand(search.facts, search.decisions())
    except CannotExpand:
        return None
    if max(exact.memory_bytes, default=0) > budget_bytes:
        return _excess(exact, budget_bytes, search.count)
    timeline = simulate(problem, exact.runs, exact.swaps, exact.memory_bytes)
    return Solution(
        runs=exact.runs, swaps=exact.swaps, planner=planner, step_ns=timeline.step_ns,
        peak_bytes=timeline.peak_bytes, peak_run=timeline.peak_run,
    )  # fmt: skip


def _within(terrain: Terrain, budget: int, price: float, *, recompute: bool = True) -> Found | None:
    """Plan at one price; keep more free where the exact plan is above the budget."""
    reserve = None
    for _ in range(_ROUNDS):
        search = Search(terrain, budget, price, reserve)
        if not recompute:
            search.forbid_recomputes()
        reached = search.run()
        if reached:
            search.undo()
        decided = bool(search.recomputes) or bool(search.swapped.any())
        exact = realise(search, budget, "greedy" if decided else "order")
        if isinstance(exact, Solution):
            return Found(exact, search)
        if exact is None or not reached:
            return None
        reserve = search.reserve + exact
    return None


def _excess(exact: Expanded, budget_bytes: int, count: int) -> Ints:
    """Bytes above the budget at every op, or at a run that is put before it."""
    above = np.zeros(count, dtype=np.int64)
    position = count - 1
    for run, level in zip(reversed(exact.runs), reversed(exact.memory_bytes), strict=True):
        if run.restores is None:
            position = run.op
        above[position] = max(int(above[position]), level - budget_bytes)
    return above
