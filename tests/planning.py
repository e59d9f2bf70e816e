"""Plans of small steps, and the oracle of every case: planned training is eager training bit for bit, as promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import workloads
from torch.utils.checkpoint import checkpoint

import tensile
from tensile.compiler.budget import parse_budget
from tensile.compiler.capture import capture
from tensile.compiler.graph import Graph
from tensile.compiler.pipeline import plan_profiled, profile_workload
from tensile.compiler.profile import Link, Profile
from tensile.runtime.session import PlannedStep
from tensile.runtime.verify import Verification, verify
from tensile.schedules.errors import CaptureError, InfeasibleBudget
from tensile.schedules.plan import Plan, Recompute, SwapOut

SMALLEST = 64  # bytes: the models are tiny, everything moves
FAST = Link(
    out_bytes_per_s=10**10, in_bytes_per_s=10**10, out_latency_us=1, in_latency_us=1, duplex_percent=100,
)  # fmt: skip
CHECKPOINTING_OFF = "leave checkpointing to the plan: switch it off in the model"
SLOW = Link(out_bytes_per_s=10**6, in_bytes_per_s=10**6, out_latency_us=1, in_latency_us=1, duplex_percent=100)


def profiled(workload: tensile.Workload, link: Link = FAST) -> tuple[Graph, Profile]:
    captured, profile = profile_workload(workload, link=link, cache_dir=None, repeats=1)
    return captured.graph, profile


def plan_within(graph: Graph, profile: Profile, budget: str) -> Plan:
    """A plan for the budget, or for the smallest feasible one where that is more."""

    def plan(text: str) -> Plan:
        return plan_profiled(graph, profile, name="case", budget=parse_budget(text), smallest_swap_bytes=SMALLEST)

    try:
        return plan(budget)
    except InfeasibleBudget as error:
        return plan(str(error.smallest_bytes))


def plan_for(workload: tensile.Workload, budget: str = "min", link: Link = FAST) -> Plan:
    return plan_within(*profiled(workload, link), budget)


def assert_trains_alike(workload: tensile.Workload, *, change_lr: bool = True) -> list[Plan]:
    """Plan for 80 % with a fast link and for 55 % with a slow one; both train as eager does, within the promise.

    Returns the plans; the second one moves or recomputes something.
    """
    graph, profile = profiled(workload)
    plans = [plan_within(graph, profile, "80%"), plan_within(graph, replace(profile, link=SLOW), "55%")]
    for plan in plans:
        assert_kept(verify(workload, plan, change_lr=change_lr))
    assert moves(plans[1])
    return plans


def assert_kept(result: Verification) -> None:
    assert result.first_difference is None
    assert 0 < result.planned_peak_bytes <= result.promised_peak_bytes


def moves(plan: Plan) -> int:
    """How many swaps and recomputes a plan has."""
    return sum(isinstance(event, (SwapOut, Recompute)) for event in plan.events)


def loaded(plan: Plan, workload: tensile.Workload, **options: Any) -> PlannedStep:
    return tensile.load(
        plan, model=workload.model, optimizer=workload.optimizer, step_fn=workload.step_fn, **options
    )  # fmt: skip


def step_of(forward: Callable[..., torch.Tensor], *, zero: bool = True) -> Callable[..., torch.Tensor]:
    """A training step around `forward(model, *batch)`, which returns the loss. `zero`: gradients are dropped at the
    end; otherwise at the start, and stay."""

    def step(model: Any, optimizer: Any, *batch: Any) -> torch.Tensor:
        if not zero:
            optimizer.zero_grad()
        loss = forward(model, *batch)
        loss.backward()
        optimizer.step()
        if zero:
            optimizer.zero_grad()
        return loss.detach()

    return step


def mean_square(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def job(
    model: Callable[[], torch.nn.Module], forward: Callable[..., torch.Tensor] = mean_square,
    batch: Callable[[], torch.Tensor] = lambda: torch.randn(128, 32), *, optimizer: str = "adamw", zero: bool = True,
) -> tensile.Workload:  # fmt: skip
    """A workload made from one seed."""
    torch.manual_seed(0)
    made = model()
    return tensile.Workload(
        made, workloads.OPTIMIZERS[optimizer](made.parameters()), step_of(forward, zero=zero), (batch(),)
    )


def through(**options: Any) -> Callable[..., torch.Tensor]:
    def forward(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, **options).square().mean()

    return forward


def gradients_after(workload: tensile.Workload, steps: int = 4) -> dict[str, bool]:
    """Which parameters have a gradient after planned steps; frozen ones must be as before."""
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in workload.model.named_parameters()
        if not parameter.requires_grad
    }
    with loaded(plan_for(workload), workload) as step:
        for _ in range(steps):
            step(*workload.batch)
    parameters = dict(workload.model.named_parameters())
    assert all(torch.equal(parameters[name], before) for name, before in frozen.items())
    return {name: parameter.grad is not None for name, parameter in parameters.items()}


def refusal(workload: tensile.Workload) -> CaptureError:
    with pytest.raises(CaptureError) as refused:
        capture(workload)
    return refused.value


def at_line(error: CaptureError) -> str:
    """Place and text of the user's line, without its number."""
    assert error.where is not None
    file, _, rest = error.where.partition(":")
    return f"{file} {rest.partition(' ')[2]}"
