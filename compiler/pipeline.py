"""The compiler on one screen: the stages in order, from a workload to a plan the referee accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from tensile.compiler import torch_private
from tensile.compiler.budget import Budget
from tensile.compiler.capture import Captured, capture
from tensile.compiler.eager import measure_eager
from tensile.compiler.emit import emit
from tensile.compiler.frontier import Frontier, frontier
from tensile.compiler.graph import Graph
from tensile.compiler.measure import measure
from tensile.compiler.problem import SMALLEST_SWAP_BYTES, build_problem
from tensile.compiler.profile import Link, Profile
from tensile.compiler.solve import Effort, least_peak, smallest_budget, solve
from tensile.compiler.workload import Workload
from tensile.schedules.check import check
from tensile.schedules.errors import InfeasibleBudget
from tensile.schedules.plan import Plan
from tensile.schedules.units import format_bytes, format_us


class Progress(Protocol):
    """Hears what the compiler is doing; must not raise."""

    def stage(self, text: str) -> None:
        """A new stage begins."""

    def tick(self, done: int, total: int, text: str) -> None:
        """`done` of `total` parts of the current stage are done; `text` says which one is next."""


class Silent:
    """Progress nobody watches."""

    def stage(self, text: str) -> None:
        pass

    def tick(self, done: int, total: int, text: str) -> None:
        pass


def profile_workload(
    workload: Workload, *, link: Link, cache_dir: Path | None, repeats: int = 5, progress: Progress | None = None
) -> tuple[Captured, Profile]:
    """Capture a workload and measure it on this device. `cache_dir=None` measures everything anew."""
    watch = progress or Silent()
    watch.stage("capture")
    captured = capture(workload, progress=lambda text: watch.tick(0, 0, text))
    watch.stage("eager step")
    eager = measure_eager(workload, captured.graph)
    watch.stage("measure")
    profile = measure(
        captured, workload, link=link, eager=eager, cache_dir=cache_dir, repeats=repeats, progress=watch.tick
    )
    return captured, profile


def plan_profiled(
    graph: Graph,
    profile: Profile,
    *,
    name: str,
    budget: Budget,
    margin_percent: int = 85,
    smallest_swap_bytes: int = SMALLEST_SWAP_BYTES,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan a measured graph for a budget and let the referee judge the result.

    `margin_percent`: copies are planned at this share of the measured bandwidth, so that a slower link does not stall.
    `smallest_swap_bytes`: storages below it stay where they are. `effort`: of the search, `Effort()` by default.
    With a torch that cannot swap state the plan leaves it in memory, and says so.
    Raises InfeasibleBudget, with the smallest feasible budget and the op that holds it up.
    """
    watch = progress or Silent()
    watch.stage("plan")
    without = _state_stays()
    if without:
        watch.stage(without)
    eager_peak = profile.eager_peak_bytes
    problem = build_problem(
        graph, profile, eager_peak, margin_percent=margin_percent, smallest_swap_bytes=smallest_swap_bytes,
        swap_state=not without,
    )  # fmt: skip
    if budget.overhead_percent is not None:
        answer = least_peak(problem, budget.overhead_percent, effort or Effort())
        problem = replace(problem, budget_bytes=answer.solution.peak_bytes)
    else:
        wanted = smallest_budget(problem) if budget.smallest else budget.bytes_of(eager_peak)
        problem = replace(problem, budget_bytes=wanted)
        try:
            answer = solve(problem, effort or Effort(), _told(watch))
        except InfeasibleBudget as error:
            raise _named(error, graph, budget, wanted, without) from error
    plan = emit(graph, profile, problem, answer, workload_name=name, notes=(without,) if without else ())
    watch.stage("check")
    findings = check(plan)
    assert not findings, "the planner wrote a plan the referee rejects:\n" + "\n".join(map(str, findings))
    return plan


def frontier_profiled(
    graph: Graph, profile: Profile, *, points: int, margin_percent: int = 85, effort: Effort | None = None,
    progress: Progress | None = None,
) -> Frontier:  # fmt: skip
    """The memory/time curve of a measured graph: the fastest plan at every budget, and the bound below it."""
    watch = progress or Silent()
    watch.stage("frontier")
    without = _state_stays()
    if without:
        watch.stage(without)
    problem = build_problem(
        graph, profile, profile.eager_peak_bytes, margin_percent=margin_percent, swap_state=not without
    )  # fmt: skip
    return frontier(
        problem, points=points, effort=effort, watch=lambda done, total: watch.tick(done, total, "budgets")
    )  # fmt: skip


def _state_stays() -> str:
    """Why plans on this machine leave parameters and optimizer state in memory; "" when they need not."""
    if torch_private.CAN_SWAP_POINTERS:
        return ""
    return f"state stays in memory: torch {torch.__version__} cannot empty a storage and fill it again under its views"


def _told(progress: Progress) -> Callable[[str, int, float], None]:
    """Tells the distance to the bound closing."""

    def told(planner: str, step_ns: int, bound_ns: float) -> None:
        gap = step_ns / max(1.0, bound_ns) - 1
        progress.tick(0, 0, f"{planner}: {format_us(step_ns // 1000)}, at most {gap:.2%} above the best there is")

    return told


def _named(error: InfeasibleBudget, graph: Graph, budget: Budget, budget_bytes: int, without: str) -> InfeasibleBudget:
    """The same refusal with the op's name, module and source line."""
    op = graph.ops[error.op] if error.op is not None else None
    held = ""
    if op is not None:
        held = f"; {op.call} in {op.module or 'the step'} needs {format_bytes(error.op_bytes)} at once"
    return InfeasibleBudget(
        f"no plan fits {budget} = {format_bytes(budget_bytes)}{held}",
        smallest_bytes=error.smallest_bytes,
        where=op.source if op is not None else None,
        hint=f"the smallest feasible budget is {format_bytes(error.smallest_bytes)} ({error.smallest_bytes} bytes): "
        f"--budget {error.smallest_bytes}, or --budget min" + (f" ({without})" if without else ""),
        op=error.op,
        op_bytes=error.op_bytes,
    )
