"""The whole curve: the fastest plan at every budget, and below it the bound that no plan beats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensile.compiler.occupancy import memory
from tensile.compiler.problem import Problem
from tensile.compiler.solution import Answer, Run
from tensile.compiler.solve import Effort, smallest_budget, solve

POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One budget: the fastest plan found that fits it, and the time no plan within it beats."""

    budget_bytes: int
    peak_bytes: int  # of the plan
    step_ns: int
    bound_ns: float
    planner: str

    def to_json(self, plain_ns: int) -> dict[str, Any]:
        """For scripts: bytes, microseconds, and overheads over the ops alone."""
        return {
            "budget_bytes": self.budget_bytes, "peak_bytes": self.peak_bytes, "step_us": self.step_ns // 1000,
            "bound_us": int(self.bound_ns) // 1000, "overhead": round(self.step_ns / max(1, plain_ns) - 1, 6),
            "bound_overhead": round(self.bound_ns / max(1, plain_ns) - 1, 6), "planner": self.planner,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """`points` from the largest budget to the smallest; `plain_ns`: the ops alone."""

    points: tuple[Point, ...]
    plain_ns: int


def frontier(
    problem: Problem, *, points: int = POINTS, effort: Effort | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Frontier:  # fmt: skip
    """Plans at evenly spaced budgets between what the step takes without a plan's moves and the smallest feasible one.

    The problem's own budget does not matter. A plan for a smaller budget counts for every larger one too, and a bound
    for a larger budget for every smaller one.
    """
    highest = max(memory(problem, [Run(op=op) for op in range(len(problem.ops))], ()), default=0)
    lowest = min(smallest_budget(problem), highest)
    budgets = [highest - (highest - lowest) * k // max(1, points - 1) for k in range(points)]
    answers: list[Answer] = []
    for number, budget in enumerate(budgets):
        watch(number, points)
        answers.append(solve(replace(problem, budget_bytes=budget), effort or Effort(seconds=2.0, rounds=60)))
    found = []
    least = 0.0
    for number, budget in enumerate(budgets):
        least = max(least, answers[number].bound_ns)
        best = min((answer.solution for answer in answers[number:]), key=lambda solution: solution.step_ns)
        found.append(Point(
            budget_bytes=budget, peak_bytes=best.peak_bytes, step_ns=best.step_ns, bound_ns=least,
            planner=best.planner,
        ))  # fmt: skip
    return Frontier(points=tuple(found), plain_ns=answers[0].plain_ns if answers else 0)
