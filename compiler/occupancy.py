"""How many bytes are resident at every run of a solution: the truth all planners plan by.

A storage is created by its op's run, created again where a later run restores it, and freed right after its last touch
before it is created again, or for good unless it leaves the step. What enters is there from the start. Swaps take it
away for one interval. What a second run creates and does not restore counts at that run only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tensile.compiler.problem import Problem
from tensile.compiler.solution import Run, Swap


def touched(problem: Problem, run: Run) -> set[int]:
    """Storages that must be resident while a run executes, those it creates or restores included."""
    op = problem.ops[run.op]
    if run.restores is None:
        return {*op.reads, *op.writes, *op.creates}
    return {*op.again_reads, *op.again_writes, *run.restores}


def residences(problem: Problem, runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(storage, first run, end boundary) of every stay in memory, before swaps; ends are exclusive."""
    count = len(runs)
    begin: dict[int, int] = {}
    last: dict[int, int] = {}
    stays: list[tuple[int, int, int]] = []
    for storage, facts in enumerate(problem.storages):
        if facts.enters:
            begin[storage], last[storage] = 0, -1
    for k, run in enumerate(runs):
        op = problem.ops[run.op]
        for storage in op.creates if run.restores is None else run.restores:
            if storage in begin:
                stays.append((storage, begin[storage], last[storage] + 1))
            begin[storage] = k
        for storage in touched(problem, run):
            last[storage] = k
    for storage, first in begin.items():
        stays.append((storage, first, count if problem.storages[storage].leaves or problem.storages[storage].enters
                      else last[storage] + 1))  # fmt: skip
    return stays


def memory(
    problem: Problem, runs: Sequence[Run], swaps: Sequence[Swap], stays: Sequence[tuple[int, int, int]] | None = None
) -> list[int]:  # fmt: skip
    """Bytes resident at every run: fixed, storages, what the run creates, its workspace. `stays`: the runs' residences,
    if they are known already."""
    count = len(runs)
    size = [storage.size_bytes for storage in problem.storages]
    change = [0] * (count + 1)
    for storage, first, end in residences(problem, runs) if stays is None else stays:
        change[first] += size[storage]
        change[end] -= size[storage]
    for swap in swaps:
        change[swap.out_free] -= size[swap.storage]
        if swap.wraps:
            change[0] -= size[swap.storage]
            change[swap.in_start] += size[swap.storage]
        else:
            change[swap.in_start] += size[swap.storage]
    levels = list(accumulate(change[:count]))
    for k, run in enumerate(runs):
        op = problem.ops[run.op]
        extra = op.workspace_bytes
        if run.restores is not None:
            extra += sum(size[s] for s in op.creates if s not in run.restores)
        levels[k] += extra + problem.fixed_bytes
    return levels
