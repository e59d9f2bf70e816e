"""Which planner plans, and what to say when nothing fits."""

from __future__ import annotations

from dataclasses import replace

from tensile.compiler.greedy import greedy
from tensile.compiler.occupancy import memory
from tensile.compiler.order import memory_aware_order, reordered
from tensile.compiler.problem import Problem
from tensile.compiler.simulate import simulate
from tensile.compiler.solution import Run, Solution
from tensile.schedules.errors import InfeasibleBudget

# shares of the plan-free peak at which smaller budgets are tried as well: the greedy is a heuristic, and the plan of a
# smaller budget may be the faster one
_RUNGS = tuple(round(0.88**k, 4) for k in range(1, 14))
_STEP_SHARE = 400  # budgets are searched to 1/400 of the distance from the floor to the plan without swaps


def solve(problem: Problem) -> Solution:
    """The fastest plan found within `problem.budget_bytes`.

    Raises InfeasibleBudget with the smallest budget this planner can meet, the op that holds it up and its bytes.
    """
    order = memory_aware_order(problem)
    ordered = reordered(problem, order)
    solution = _planned(ordered)
    if solution is None:
        smallest = _smallest(ordered)
        floor = touched_bytes(ordered)
        op = max(range(len(floor)), key=lambda k: floor[k])
        raise InfeasibleBudget(
            "no plan fits the budget", smallest_bytes=smallest, op=order[op], op_bytes=floor[op],
            hint=f"the smallest feasible budget is {smallest} bytes",
        )  # fmt: skip
    return _in_captured_indices(solution, order)


def smallest_budget(problem: Problem) -> int:
    """The smallest budget in bytes this planner can meet."""
    return _smallest(reordered(problem, memory_aware_order(problem)))


def touched_bytes(problem: Problem) -> list[int]:
    """Bytes no plan can avoid at each op: what it touches, its workspace, and what may never be moved."""
    size = [storage.size_bytes for storage in problem.storages]
    pinned = {i for i, s in enumerate(problem.storages) if s.enters and not s.swappable}
    always = problem.fixed_bytes + sum(size[i] for i in pinned)
    return [
        always + op.workspace_bytes + sum(size[s] for s in {*op.reads, *op.writes, *op.creates} - pinned)
        for op in problem.ops
    ]


def _planned(ordered: Problem) -> Solution | None:
    """The plan without swaps where it fits, else the fastest of the greedy's at this budget and at fixed smaller ones,
    so that more budget is not slower than any rung below it."""
    runs = tuple(Run(op=op) for op in range(len(ordered.ops)))
    plain = simulate(ordered, runs, ())
    if plain.peak_bytes <= ordered.budget_bytes:
        return Solution(
            runs=runs, swaps=(), planner="order", step_ns=plain.step_ns, peak_bytes=plain.peak_bytes,
            peak_run=plain.peak_run,
        )  # fmt: skip
    best = greedy(ordered)
    for share in _RUNGS:
        rung = int(plain.peak_bytes * share)
        if rung >= ordered.budget_bytes:
            continue
        if best is None or rung < ordered.budget_bytes // 2 or best.step_ns <= plain.step_ns:
            break
        found = greedy(replace(ordered, budget_bytes=rung))
        if found is None:
            break
        best = min(best, found, key=lambda solution: (solution.step_ns, -solution.peak_bytes))
    return best


def _smallest(ordered: Problem) -> int:
    """Bisect between the physical floor and the peak of the plan without swaps; the result is met by a plan."""
    low = max(touched_bytes(ordered), default=0)
    high = max(memory(ordered, [Run(op=op) for op in range(len(ordered.ops))], ()), default=0)
    step = max(1, (high - low) // _STEP_SHARE)
    while high - low > step:
        middle = (low + high) // 2
        found = greedy(replace(ordered, budget_bytes=middle))
        if found is None:
            low = middle
        else:
            high = found.peak_bytes
    return high


def _in_captured_indices(solution: Solution, order: tuple[int, ...]) -> Solution:
    return replace(solution, runs=tuple(replace(run, op=order[run.op]) for run in solution.runs))
