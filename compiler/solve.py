"""From a problem to an answer: greedy, relaxation, local search, and what to say when nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from tensile.compiler.bound import bound
from tensile.compiler.greedy import Found, construct
from tensile.compiler.improve import improve, rounded
from tensile.compiler.order import memory_aware_order, reordered
from tensile.compiler.problem import Problem
from tensile.compiler.solution import Answer, Solution
from tensile.compiler.terrain import Terrain
from tensile.schedules.errors import InfeasibleBudget

# shares of the plan-free peak at which smaller budgets are tried as well: the greedy is a heuristic, and the plan of a
# smaller budget may be the faster one
_RUNGS = tuple(round(0.88**k, 4) for k in range(1, 14))
_FAR = 1.02
_STEP_SHARE = 400  # budgets are searched to 1/400 of the distance from the floor to the plan without swaps
_BOUND_SECONDS = 60.0
_COARSE_STEPS, _FINE_STEPS = 10, 4  # bisections for the least peak within an overhead
_LOOK_BELOW = 0.9  # of what the greedy reached there


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search. The same seed and `rounds` give the same answer as long as `seconds` is not what ends it.
    No seconds: the greedy alone."""

    seconds: float = 10.0  # of the local search
    rounds: int = 300
    patience: int = 50  # rounds without a better plan
    seed: int = 0


GREEDY = Effort(seconds=0.0)


def solve(
    problem: Problem, effort: Effort = GREEDY, watch: Callable[[str, int, float], None] = lambda name, step, least: None
) -> Answer:  # fmt: skip
    """The fastest plan found within `problem.budget_bytes`. `watch` hears of every better plan: planner, step and
    bound in ns.

    Raises InfeasibleBudget with the smallest budget this planner can meet, the op that holds it up and its bytes.
    """
    order = memory_aware_order(problem)
    terrain = Terrain(reordered(problem, order))
    plain_ns = sum(op.time_ns for op in problem.ops)
    found = _ladder(terrain, plain_ns)
    if found is None:
        # the greedy may miss at one budget what it finds at a smaller one
        found = _least(terrain)
        if found.solution.peak_bytes > problem.budget_bytes:
            raise _infeasible(terrain, order, found.solution.peak_bytes)
    reached = [("greedy", found.solution.step_ns)]
    least, ended = float(plain_ns), ""
    if effort.seconds > 0 and found.solution.step_ns > plain_ns:
        watch("greedy", found.solution.step_ns, least)
        relaxed = bound(terrain, problem.budget_bytes, seconds=_BOUND_SECONDS)
        if relaxed is not None:
            least = relaxed.step_ns
            assert least < inf, "the relaxation forbids a plan that exists"
            other = rounded(terrain, problem.budget_bytes, relaxed)
            if other is not None:
                reached.append(("relaxation", other.solution.step_ns))
                found = min(found, other, key=lambda one: one.solution.step_ns)
            watch("relaxation", found.solution.step_ns, least)
        found, ended = improve(
            terrain, problem.budget_bytes, found, relaxed=relaxed, goal_ns=least, seconds=effort.seconds,
            rounds=effort.rounds, patience=effort.patience, seed=effort.seed,
            watch=lambda solution: watch("local search", solution.step_ns, least),
        )  # fmt: skip
        reached.append(("local search", found.solution.step_ns))
        ended += "" if relaxed is not None else f" (the relaxation was not solved in {_BOUND_SECONDS:g} s)"
    return Answer(
        solution=_in_captured_indices(found.solution, order), plain_ns=plain_ns, bound_ns=least, reached=tuple(reached),
        ended=ended,
    )  # fmt: skip


def smallest_budget(problem: Problem) -> int:
    """The smallest budget in bytes this planner can meet."""
    return _least(Terrain(reordered(problem, memory_aware_order(problem)))).solution.peak_bytes


def least_peak(problem: Problem, overhead_percent: float, effort: Effort = GREEDY) -> Answer:
    """The plan with the smallest peak found whose step takes at most that much longer than the ops alone; the
    problem's own budget does not matter."""
    highest = int(Terrain(problem).level.max(initial=0))
    best = solve(replace(problem, budget_bytes=highest), effort)
    limit_ns = best.plain_ns * (1 + overhead_percent / 100)
    low, high = smallest_budget(problem), best.solution.peak_bytes
    # the greedy finds about where, the whole effort settles it
    for hard, steps in ((GREEDY, _COARSE_STEPS), (effort, _FINE_STEPS)):
        for _ in range(steps):
            middle = (low + high) // 2
            answer = _fitting(replace(problem, budget_bytes=middle), hard)
            if answer is not None and answer.solution.step_ns <= limit_ns:
                best, high = answer, answer.solution.peak_bytes
            else:
                low = middle
        low = max(smallest_budget(problem), int(high * _LOOK_BELOW))
        if effort.seconds <= 0:
            break
    return best


def touched_bytes(problem: Problem) -> list[int]:
    """Bytes no plan can avoid at each op: what it touches, its workspace, and what may never be moved."""
    size = [storage.size_bytes for storage in problem.storages]
    pinned = {i for i, s in enumerate(problem.storages) if s.enters and not s.swappable}
    always = problem.fixed_bytes + sum(size[i] for i in pinned)
    return [
        always + op.workspace_bytes + sum(size[s] for s in {*op.reads, *op.writes, *op.creates} - pinned)
        for op in problem.ops
    ]


def _fitting(problem: Problem, effort: Effort) -> Answer | None:
    try:
        return solve(problem, effort)
    except InfeasibleBudget:
        return None


def _ladder(terrain: Terrain, plain_ns: int) -> Found | None:
    """The fastest of the greedy's plans at this budget and at fixed smaller ones, down to a rung so much slower that
    no smaller one will be faster; so that more budget is not slower than the rungs below it."""
    budget = terrain.problem.budget_bytes
    peak = int(terrain.level.max(initial=0))
    best = construct(terrain, budget)
    for share in _RUNGS:
        rung = int(peak * share)
        if rung >= budget:
            continue
        if best is None or rung < budget // 2 or best.solution.step_ns <= plain_ns:
            break
        found = construct(terrain, rung)
        if found is None:
            break
        if found.solution.step_ns > _FAR * best.solution.step_ns:
            break
        best = min(best, found, key=lambda one: (one.solution.step_ns, -one.solution.peak_bytes))
    return best


def _infeasible(terrain: Terrain, order: tuple[int, ...], smallest: int) -> InfeasibleBudget:
    floor = touched_bytes(terrain.problem)
    op = max(range(len(floor)), key=lambda k: floor[k])
    return InfeasibleBudget(
        "no plan fits the budget", smallest_bytes=smallest, op=order[op], op_bytes=floor[op],
        hint=f"the smallest feasible budget is {smallest} bytes",
    )  # fmt: skip


def _least(terrain: Terrain) -> Found:
    """The plan with the smallest peak that bisection finds between the physical floor and the plan without swaps."""
    low = max(touched_bytes(terrain.problem), default=0)
    high = int(terrain.level.max(initial=0))
    best = construct(terrain, high)
    assert best is not None, "the plan without swaps fits its own peak"
    step = max(1, (high - low) // _STEP_SHARE)
    while high - low > step:
        middle = (low + high) // 2
        found = construct(terrain, middle)
        if found is None:
            low = middle
        else:
            best, high = found, found.solution.peak_bytes
    return best


def _in_captured_indices(solution: Solution, order: tuple[int, ...]) -> Solution:
    return replace(solution, runs=tuple(replace(run, op=order[run.op]) for run in solution.runs))
