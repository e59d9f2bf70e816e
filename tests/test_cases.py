"""Cases from people who train under memory pressure: budgets, optimizers, plans that do not fit, tied weights."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import planning
import pytest
import torch
import torch.nn.functional as F
import workloads
from click.testing import CliRunner
from planning import assert_kept, assert_trains_alike, job, loaded, moves, plan_for, step_of
from torch import nn

import tensile
from tensile.cli import main
from tensile.compiler.budget import parse_budget
from tensile.compiler.capture import capture
from tensile.compiler.graph import Graph
from tensile.compiler.pipeline import plan_profiled
from tensile.compiler.profile import Profile
from tensile.runtime.verify import verify
from tensile.schedules.errors import CaptureError, InfeasibleBudget, PlanMismatch
from tensile.schedules.plan import Plan, SwapOut

# T01: a sweep of budgets

DEEP = """
import torch
import tensile
from torch import nn


def train_step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def workload():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    batch = torch.randn(2048, 512), torch.randint(10, (2048,))
    return tensile.Workload(model, torch.optim.Adam(model.parameters()), train_step, batch)
"""
SHARES = (100, 90, 80, 70, 60, 50, 40)


def deep() -> tensile.Workload:
    names: dict[str, Any] = {}
    exec(DEEP, names)
    workload: tensile.Workload = names["workload"]()
    return workload


@pytest.fixture(scope="module")
def sweep() -> tuple[Graph, Profile, dict[int, Plan]]:
    graph, profile = planning.profiled(deep())
    plans = {
        share: plan_profiled(graph, profile, name="deep", budget=parse_budget(f"{share}%")) for share in SHARES
    }  # fmt: skip
    return graph, profile, plans


def test_t01_every_budget_of_a_sweep_is_kept_and_less_memory_never_takes_less_time(
    sweep: tuple[Graph, Profile, dict[int, Plan]],
) -> None:
    _, profile, plans = sweep
    for share, plan in plans.items():
        assert plan.promise.peak_bytes <= plan.promise.budget_bytes == profile.eager_peak_bytes * share // 100
        assert share == 100 or moves(plan)
    promises = [plan.promise for plan in plans.values()]
    for more, less in itertools.pairwise(promises):
        assert less.peak_bytes <= more.peak_bytes
        assert less.step_us >= more.step_us


def test_t01_the_plan_is_for_the_steady_state_not_for_the_first_step(
    sweep: tuple[Graph, Profile, dict[int, Plan]],
) -> None:
    weights_and_state = 3 * sum(parameter.nbytes for parameter in deep().model.parameters())
    assert weights_and_state == pytest.approx(12_670_000, rel=0.01)
    # 50.52 MB above the batch, from the second step on; the first has no optimizer state yet and takes 42.07 MB
    assert sweep[1].eager_peak_bytes - 2048 * 512 * 4 == pytest.approx(50_520_000, rel=0.01)


@pytest.mark.parametrize("share", [pytest.param(share, marks=pytest.mark.slow) for share in SHARES[:-1]] + [40])
def test_t01_the_measured_peak_is_within_the_budget_and_near_the_estimate(
    sweep: tuple[Graph, Profile, dict[int, Plan]], share: int
) -> None:
    plan = sweep[2][share]
    result = verify(deep(), plan)
    assert_kept(result)
    assert result.planned_peak_bytes == pytest.approx(plan.promise.peak_bytes, rel=0.05)


def test_t01_a_budget_below_weights_and_state_is_refused_with_the_smallest_feasible_one(
    sweep: tuple[Graph, Profile, dict[int, Plan]], tmp_path: Path
) -> None:
    graph, profile, _ = sweep
    with pytest.raises(InfeasibleBudget) as refused:
        plan_profiled(graph, profile, name="deep", budget=parse_budget("12670000"))
    least = refused.value.smallest_bytes
    assert str(refused.value).splitlines()[0].startswith("error: no plan fits 12670000 = 12.1 MiB; aten.")
    assert f"({least} bytes): --budget {least}, or --budget min" in str(refused.value)
    assert plan_profiled(graph, profile, name="deep", budget=parse_budget(str(least))).promise.peak_bytes <= least
    smallest = plan_profiled(graph, profile, name="deep", budget=parse_budget("min"))
    assert 12_670_000 < smallest.promise.peak_bytes <= least
    (tmp_path / "deep.py").write_text(DEEP.replace("2048", "64"))
    arguments = [
        "compile", f"{tmp_path}/deep.py", "--budget", "1000000", "-o", f"{tmp_path}/deep.yaml", "--repeats", "1",
        "--cache-dir", f"{tmp_path}/cache", "-q",
    ]  # fmt: skip
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert "help: the smallest feasible budget is " in done.stderr
    assert not (tmp_path / "deep.yaml").exists()


# T06: the optimizer in the plan

GROUPED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "momentum, dampened": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=False),
    "adam, rate in a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), foreach=False),
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
    "muon": lambda groups: torch.optim.Muon(groups, lr=0.01),
}


def grouped(make: Callable[[Any], torch.optim.Optimizer]) -> tensile.Workload:
    """Two parameter groups with different weight decay, matrices only."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False)
    )
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.1},
        {"params": [model[2].weight, model[4].weight], "weight_decay": 0.01},
    ]
    return tensile.Workload(model, make(groups), step_of(planning.mean_square), (torch.randn(64, 32),))


@pytest.mark.parametrize("name", GROUPED)
def test_t06_every_optimizer_trains_alike_from_its_first_step_on_in_two_groups(name: str) -> None:
    workload = grouped(GROUPED[name])
    assert not workload.optimizer.state
    plans = assert_trains_alike(workload)
    # what is born in the first step is in the plan of every step
    entries = sum(len(names) for names in state_names(workload).values())
    assert sum(storage.kind == "optimizer_state" and "/" in storage.name for storage in plans[0].storages) >= entries


def state_names(workload: tensile.Workload) -> dict[int, list[str]]:
    """Keys of optimizer state tensors by parameter, after one eager step of a copy."""
    twin = copy.deepcopy(workload)
    twin.step_fn(twin.model, twin.optimizer, *twin.batch)
    return {
        number: [key for key, value in entries.items() if isinstance(value, torch.Tensor)]
        for number, entries in enumerate(twin.optimizer.state.values())
    }


def test_t06_a_learning_rate_of_zero_is_obeyed() -> None:
    workload = grouped(GROUPED["momentum"])
    with loaded(plan_for(workload), workload) as step:
        step(*workload.batch)
        with step.resident():
            before = [parameter.detach().clone() for parameter in workload.model.parameters()]
        for group in workload.optimizer.param_groups:
            group["lr"] = 0.0
        step(*workload.batch)
        with step.resident():
            assert all(map(torch.equal, before, workload.model.parameters()))


def test_t06_a_learning_rate_bound_to_another_tensor_is_named() -> None:
    workload = grouped(GROUPED["adam, rate in a tensor"])
    with loaded(plan_for(workload), workload) as step:
        step(*workload.batch)
        workload.optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
        with pytest.raises(PlanMismatch) as refused:
            step(*workload.batch)
    assert str(refused.value) == (
        "error: the plan does not cover this step: lr of parameter group 1 is another tensor than when the plan was "
        "loaded\n  at change it in place, or load the plan again\n"
        'help: compile a plan for this case, or pass on_mismatch="eager"'
    )


def closing(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = planning.mean_square(model, x)
        value.backward()
        return value

    return optimizer.step(loss).detach()


def test_t06_optimizers_that_branch_on_values_are_refused() -> None:
    adafactor = grouped(lambda groups: torch.optim.Adafactor(groups))
    lbfgs = grouped(lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]]))
    for workload, place in (
        (adafactor, ("planning.py:", "in step: optimizer.step()")),
        (replace(lbfgs, step_fn=closing), ("test_cases.py:", "in closing: return optimizer.step(loss).detach()")),
    ):
        with pytest.raises(CaptureError) as refused:
            capture(workload)
        assert (refused.value.code, refused.value.what) == ("TS101", "the optimizer branches on a tensor's value")
        assert refused.value.hint == "use an optimizer that computes on tensors only, such as AdamW, SGD or Muon"
        assert refused.value.where is not None
        assert refused.value.where.startswith(place[0])
        assert refused.value.where.endswith(place[1])


# T14: no silent no-op


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(workloads.perceptron("adamw"))


def mismatch(plan: Plan, workload: tensile.Workload) -> str:
    """The refusal of a plan; run eagerly instead, the report says how much was applied and why no more."""
    with pytest.raises(PlanMismatch) as refused:
        loaded(plan, workload, batch=workload.batch)
    with loaded(plan, workload, on_mismatch="eager") as step:
        for _ in range(4):
            step(*workload.batch)
        text = str(step.report())
    swaps = sum(isinstance(event, SwapOut) for event in plan.events)
    assert f"applied 0 of {swaps} swaps, 0 of" in text
    assert f"steps: 0 planned, 4 eager ({refused.value.what})" in text
    assert "not measured" in text
    return str(refused.value)


def test_t14_a_renamed_layer_is_an_error_or_a_report_of_nothing_applied(plan: Plan) -> None:
    workload = workloads.perceptron("adamw")
    names = ["first", *map(str, range(1, len(workload.model)))]
    renamed = nn.Sequential(OrderedDict(zip(names, workload.model, strict=True)))
    text = mismatch(plan, replace(workload, model=renamed))
    assert text.startswith(
        "error: the plan is for other parameters, buffers or optimizer state: "
        "0.weight was float32[64, 64] when it was planned, and is not there\n"
    )  # fmt: skip
    assert "\n  at subject.fingerprint.state\nhelp: compile a plan for this step: tensile compile MODEL.py" in text


def test_t14_a_plan_for_another_torch_names_both_versions(plan: Plan) -> None:
    fingerprint = replace(plan.subject.fingerprint, torch="2.0.0")
    old = replace(plan, subject=replace(plan.subject, fingerprint=fingerprint))
    assert mismatch(old, workloads.perceptron("adamw")) == (
        f"error: the plan is for another torch: planned 2.0.0, this is {plan.subject.fingerprint.torch}\n"
        "  at subject.fingerprint.torch\n"
        'help: compile a plan for this step: tensile compile MODEL.py, or pass on_mismatch="eager"'
    )


def test_t14_a_plan_for_another_device_names_it(plan: Plan) -> None:
    fingerprint = replace(plan.subject.fingerprint, device="cuda")
    other = replace(plan, subject=replace(plan.subject, fingerprint=fingerprint))
    assert "cuda" in mismatch(other, workloads.perceptron("adamw"))


def test_t14_a_budget_that_needs_nothing_says_so_with_the_margin() -> None:
    workload = workloads.perceptron("adamw")
    plan = plan_for(workload, "200%")
    assert not moves(plan)
    assert any(note.startswith("swap: 0 storages, 0 B each way") for note in plan.notes)
    with loaded(plan, workload) as step:
        for _ in range(4):
            step(*workload.batch)
        report = step.report()
    assert report.applied.startswith("applied 0 of 0 swaps, 0 of 0 recomputes, ")
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= plan.promise.peak_bytes < plan.promise.budget_bytes


# T24: tied weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits


def tied() -> tensile.Workload:
    return job(Tied, lambda model, ids: F.cross_entropy(model(ids), ids), lambda: torch.randint(50, (16,)))


def test_t24_a_tied_weight_is_one_storage_and_stays_one_object() -> None:
    workload = tied()
    plans = assert_trains_alike(workload)
    for plan in plans:
        assert [storage.name for storage in plan.storages if storage.kind == "parameter"] == ["embedding.weight"]
    least = plans[1]
    swapped = {event.storage for event in least.events if isinstance(event, SwapOut)}
    assert any(least.storages[storage].name == "embedding.weight" for storage in swapped)
    weight = workload.model.embedding.weight
    with loaded(least, workload) as step, step.resident():
        before = weight.detach().clone()
    with loaded(least, workload) as step:
        for _ in range(2):
            step(*workload.batch)
    assert workload.model.head.weight is workload.model.embedding.weight is weight
    assert not torch.equal(before, weight)


def test_t24_a_tied_and_swapped_model_is_saved_loaded_and_trained_on_in_one_process() -> None:
    def train(step: Callable[..., Any], whole: Callable[[], Any], workload: tensile.Workload) -> list[Any]:
        torch.manual_seed(1)
        losses = [step(*workload.batch) for _ in range(2)]
        with whole():
            saved = copy.deepcopy((workload.model.state_dict(), workload.optimizer.state_dict()))
        losses += [step(*workload.batch) for _ in range(2)]
        with whole():
            workload.model.load_state_dict(saved[0])
            workload.optimizer.load_state_dict(saved[1])
        losses += [step(*workload.batch) for _ in range(2)]
        with whole():
            state = workload.optimizer.state_dict()["state"][0]
            return [*losses, *(t.clone() for t in (*workload.model.state_dict().values(), *state.values()))]

    eager, planned = tied(), tied()

    def eager_step(*batch: Any) -> Any:
        return eager.step_fn(eager.model, eager.optimizer, *batch)

    want = train(eager_step, nullcontext, eager)
    with loaded(plan_for(tied(), "min"), planned) as step:
        have = train(step, step.resident, planned)
        assert (step.report().steps, step.report().eager_steps) == (6, 0)
    assert len(want) == len(have) > 6
    assert all(map(torch.equal, want, have))
