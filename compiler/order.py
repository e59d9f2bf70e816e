"""A legal, memory-aware order of the ops: every optimizer op as soon as what it waits for is done."""

from __future__ import annotations

import heapq
from dataclasses import replace

from tensile.compiler.occupancy import memory
from tensile.compiler.problem import Problem
from tensile.compiler.solution import Run

_OPTIMIZER = 2


def memory_aware_order(problem: Problem) -> tuple[int, ...]:
    """Indices of the ops in a legal order whose peak is never above the captured order's.

    Optimizer ops move up to right behind the last op they must follow, so that a gradient dies with its update; the
    others keep their order. Source: "TENSILE", arXiv 2105.13336, moves optimizer ops behind their gradient's last use.
    """
    captured = tuple(range(len(problem.ops)))
    moved = _eager_updates(problem)
    return min((captured, moved), key=lambda order: _peak_and_area(problem, order))


def reordered(problem: Problem, order: tuple[int, ...]) -> Problem:
    """The same problem with op `order[k]` at place k."""
    place = {op: k for k, op in enumerate(order)}
    ops = tuple(replace(problem.ops[op], after=tuple(sorted(place[a] for a in problem.ops[op].after))) for op in order)
    return replace(problem, ops=ops)


def _eager_updates(problem: Problem) -> tuple[int, ...]:
    """List scheduling: an optimizer op as soon as it is ready, everything else in captured order."""
    waiting = [len(op.after) for op in problem.ops]
    followers: list[list[int]] = [[] for _ in problem.ops]
    for index, op in enumerate(problem.ops):
        for earlier in op.after:
            followers[earlier].append(index)
    ready: list[tuple[bool, int]] = [
        (op.phase != _OPTIMIZER, index) for index, op in enumerate(problem.ops) if not waiting[index] and op.after == ()
    ]
    # an optimizer op that waits for nothing belongs to no gradient: it keeps its place among the others
    ready = [(True, index) for _, index in ready]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (problem.ops[follower].phase != _OPTIMIZER, follower))
    assert len(order) == len(problem.ops), "the ops wait for each other in a circle"
    return tuple(order)


def _peak_and_area(problem: Problem, order: tuple[int, ...]) -> tuple[int, int, bool]:
    levels = memory(problem, [Run(op=op) for op in order], ())
    return max(levels, default=0), sum(levels), order != tuple(range(len(order)))
