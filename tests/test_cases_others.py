"""Cases from people who train under memory pressure: single features that other tools work alone with, at best."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import workloads
from planning import assert_trains_alike, job, loaded, mean_square, plan_for, refusal
from torch import nn

import tensile
from tensile.compiler.allocator import allocated_peak
from tensile.schedules.errors import PlanMismatch


class Attention(nn.Module):
    """Without a fused kernel: memory grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y: torch.Tensor = self.out((q @ k.transpose(-1, -2) / 4).softmax(-1) @ v)
        return y


class Scaled(nn.Module):
    """Reads a plain attribute, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(32, 32), 0.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x) * self.scale
        return y


class Alternating(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x)
        return y * 2 if self.calls % 2 else y


class Doubling(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 2 * self.calls + 1
        y: torch.Tensor = self.linear(x)
        return y


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    model[0].requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def noisy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y + torch.randn_like(y)).square().mean()


FEATURES: dict[str, Callable[[], tensile.Workload]] = {
    "weight norm": lambda: job(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))),
    "channels last": lambda: job(
        convolutions, batch=lambda: torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    ),
    "vmap": lambda: job(lambda: nn.Linear(32, 32), lambda m, x: torch.vmap(m)(x).square().mean()),
    "a layer frozen from the start": lambda: job(frozen_first),
    "noise": lambda: job(lambda: nn.Linear(32, 32), noisy),
    "a plain attribute": lambda: job(Scaled),
    "attention without a fused kernel": lambda: job(Attention, batch=lambda: torch.randn(2, 64, 16)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_single_feature_trains_alike(feature: str) -> None:
    assert_trains_alike(FEATURES[feature]())


def test_the_square_of_the_length_is_what_leaves_when_attention_is_planned() -> None:
    workload = FEATURES["attention without a fused kernel"]()
    plan = plan_for(workload)
    square = 2 * 64 * 64 * 4
    moved = {event.storage for event in plan.events if hasattr(event, "storage") and hasattr(event, "free")}
    assert any(plan.storages[storage].size_bytes == square for storage in moved)


def test_deterministic_algorithms_are_kept_and_switching_them_later_is_named() -> None:
    workload = job(lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()))
    torch.use_deterministic_algorithms(True)
    try:
        assert_trains_alike(workload)
        with loaded(plan_for(workload), workload) as step:
            step(*workload.batch)
            torch.use_deterministic_algorithms(False)
            with pytest.raises(PlanMismatch) as refused:
                step(*workload.batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert refused.value.what == "the plan does not cover this step: deterministic algorithms is False"
    assert refused.value.where == "planned with True"


def test_a_plain_attribute_that_changes_is_named_and_a_counter_is_not_in_the_way() -> None:
    workload = job(Scaled)
    with loaded(plan_for(workload), workload) as step:
        step(*workload.batch)
        workload.model.calls += 10
        step(*workload.batch)
        assert workload.model.calls == 12
        workload.model.scale = 0.25
        with pytest.raises(PlanMismatch) as refused:
            step(*workload.batch)
    assert str(refused.value) == (
        "error: the plan does not cover this step: scale of module (the model) is 0.25\n  at planned with 0.5\n"
        'help: compile a plan for this case, or pass on_mismatch="eager"'
    )


def test_another_rate_of_dropout_is_named() -> None:
    workload = job(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)))
    with loaded(plan_for(workload), workload) as step:
        step(*workload.batch)
        workload.model[1].p = 0.1
        with pytest.raises(PlanMismatch) as refused:
            step(*workload.batch)
    assert refused.value.what == "the plan does not cover this step: p of module 1 is 0.1"


def test_a_counter_that_does_not_count_evenly_is_refused() -> None:
    error = refusal(job(Doubling))
    assert error.code == "TS108"
    assert error.what == "the step is not the same twice: it sets calls to 1, then to 3"
    assert error.where == "module (the model)"


def test_a_step_that_depends_on_a_counter_is_refused() -> None:
    error = refusal(job(Alternating))
    assert error.code == "TS108"
    assert error.what == (
        "the step is not the same twice: it depends on Python randomness, a counter or another Python value"
    )
    assert error.where is not None
    assert error.where.startswith("test_cases_others.py:")
    assert error.where.endswith(" in forward")


def test_sparse_gradients_are_refused_at_the_users_line() -> None:
    error = refusal(
        job(lambda: nn.Embedding(50, 16, sparse=True), batch=lambda: torch.randint(50, (64,)), optimizer="sgd")
    )
    assert (error.code, error.what) == ("TS110", "the step makes sparse gradients")
    assert error.where is not None
    assert error.where.startswith("planning.py:")
    assert error.where.endswith(" in mean_square")
    assert error.hint == "pass sparse=False to the module"


def with_scaler(scaler: torch.amp.GradScaler) -> tensile.Workload:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    return tensile.Workload(model, torch.optim.AdamW(model.parameters()), step, (torch.randn(128, 32),))


def test_a_gradient_scaler_is_refused_and_left_as_it_was_and_one_switched_off_trains_alike() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = dict(vars(scaler))
    error = refusal(with_scaler(scaler))
    assert vars(scaler) == before
    assert (error.code, error.what) == (
        "TS117", "the step uses a GradScaler, which skips the update when gradients overflow"
    )  # fmt: skip
    assert error.hint == "train in bfloat16 or float32, which need no scaling: GradScaler(enabled=False)"
    assert error.where is not None
    assert error.where.startswith("test_cases_others.py:")
    assert error.where.endswith("in step: scaler.scale(loss).backward()")
    assert_trains_alike(with_scaler(torch.amp.GradScaler("cpu", enabled=False)))


class Remembering:
    """Keeps a tensor from step to step, outside of model and optimizer."""

    last: Any = None

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return y.square().mean()


def test_a_tensor_kept_from_step_to_step_elsewhere_is_refused() -> None:
    error = refusal(job(lambda: nn.Linear(32, 32), Remembering()))
    assert error.code == "TS103"
    assert error.what == "the step uses a tensor that is neither parameter, buffer, optimizer state nor batch"
    assert error.hint == "register it with register_buffer, or pass it in the batch"


def test_python_randomness_is_refused() -> None:
    error = refusal(job(lambda: nn.Linear(32, 32), lambda m, x: m(x).square().mean() * random.random()))
    assert error.code == "TS108"


# Long runs and neighbours


def test_twenty_steps_whose_outputs_are_kept_take_no_more_memory_than_five() -> None:
    workload = workloads.perceptron("adamw", dropout=0.1)
    with loaded(plan_for(workload), workload) as step:
        losses = [step(*workload.batch) for _ in range(5)]
        early, loss = allocated_peak(lambda: step(*workload.batch))
        tensors = live_tensors()
        losses += [loss, *(step(*workload.batch) for _ in range(13))]
        late, loss = allocated_peak(lambda: step(*workload.batch))
        assert live_tensors() == tensors + 13 + 1
        assert late == early
    assert len({float(value) for value in [*losses, loss]}) == 20


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


NEIGHBOUR = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import planning
import workloads

workload = workloads.perceptron("adamw", dropout=0.1)
plan = planning.plan_for(workload, sys.argv[2])
with planning.loaded(plan, workload) as step:
    torch.manual_seed(1)
    losses = [float(step(*workload.batch)) for _ in range(20)]
    report = step.report()
assert report.measured_peak_bytes <= plan.promise.peak_bytes <= plan.promise.budget_bytes
print(losses)
"""


@pytest.mark.slow
def test_two_processes_with_their_own_budgets_do_not_disturb_each_other() -> None:
    folder = str(Path(__file__).parent)
    started = [
        subprocess.Popen([sys.executable, "-c", NEIGHBOUR, folder, budget], stdout=subprocess.PIPE, text=True)
        for budget in ("80%", "60%")
    ]
    texts = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert texts[0] == texts[1] != ""
