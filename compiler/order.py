"""A legal, memory-aware order of the ops: every optimizer op as soon as what it waits for is done."""

from __future__ import annotations

from dataclasses import replace

import networkx

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
    """List scheduling: an optimizer op as soon as what it waits for is done, everything else in captured order. One
    that waits for nothing belongs to no gradient and keeps its place among the others."""
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(len(problem.ops)))
    graph.add_edges_from((earlier, index) for index, op in enumerate(problem.ops) for earlier in op.after)

    def rank(index: int) -> tuple[bool, int]:
        op = problem.ops[index]
        return op.phase != _OPTIMIZER or not op.after, index

    return tuple(networkx.lexicographical_topological_sort(graph, key=rank))


def _peak_and_area(problem: Problem, order: tuple[int, ...]) -> tuple[int, int, bool]:
    levels = memory(problem, [Run(op=op) for op in order], ())
    return max(levels, default=0), sum(levels), order != tuple(range(len(order)))
