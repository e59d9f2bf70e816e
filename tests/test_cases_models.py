"""Cases from people who train under memory pressure: adapters, batch norm, dropout, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from planning import (
    CHECKPOINTING_OFF,
    assert_trains_alike,
    at_line,
    gradients_after,
    job,
    loaded,
    plan_for,
    refusal,
    through,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensile
from tensile.compiler.capture import capture

# T07: LoRA on a frozen base


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, 16) * 0.1)
        self.b = nn.Parameter(torch.randn(16, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return y


class Lora(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = Adapted(), Adapted(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(F.gelu(checkpoint(self.first, x, use_reentrant=self.reentrant)))
        return y


def lora(reentrant: bool = False) -> tensile.Workload:
    return job(lambda: Lora(reentrant), batch=lambda: torch.randn(128, 16), zero=False)


def test_t07_adapters_get_gradients_and_the_frozen_base_stays_as_it_is() -> None:
    plans = assert_trains_alike(lora())
    for plan in plans:
        frozen = {number for number, storage in enumerate(plan.storages) if ".base." in storage.name}
        assert {plan.storages[index].kind for index in frozen} == {"parameter"}
        assert len(frozen) == 4
        assert not any(frozen.intersection(row.writes) for row in plan.rows)
    assert gradients_after(lora()) == {
        f"{block}.{name}": name in ("a", "b")
        for block in ("first", "second") for name in ("a", "b", "base.weight", "base.bias")
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_t07_a_reentrant_checkpoint_whose_input_needs_no_gradient_gives_its_adapters_none_as_in_eager() -> None:
    assert_trains_alike(lora(reentrant=True))
    has = gradients_after(lora(reentrant=True))
    assert [has[name] for name in ("first.a", "first.b", "second.a", "second.b")] == [False, False, True, True]


# T11: batch norm once


class Normed(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32).requires_grad_(not frozen)
        self.norm = nn.BatchNorm1d(32, momentum=0.1).requires_grad_(not frozen)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.relu(self.norm(self.linear(x))))
        return y


@pytest.mark.parametrize("frozen", [False, True])
def test_t11_batch_norm_statistics_move_once_a_step(frozen: bool) -> None:
    workload = job(lambda: Normed(frozen))
    assert_trains_alike(workload)
    norm = workload.model.norm
    with loaded(plan_for(workload), workload) as step:
        for _ in range(3):
            step(*workload.batch)
    assert norm.num_batches_tracked.item() == 3
    assert not torch.equal(norm.running_mean, torch.zeros(32))


def test_t11_batch_norm_in_the_users_own_checkpoint_is_refused() -> None:
    error = refusal(job(Normed, lambda m, x: checkpoint(m, x, use_reentrant=False).square().mean()))
    what = "a checkpointed region updates batch-norm statistics, which eager does twice"
    assert (error.code, error.what, error.hint) == ("TS113", what, CHECKPOINTING_OFF)
    assert at_line(error).startswith("test_cases_models.py in <lambda>: error = refusal(job(Normed, ")


# T16: dropout under recompute


class Dropping(nn.Module):
    def __init__(self, own_checkpoint: bool) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32)
        self.own_checkpoint = own_checkpoint

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.two(self.drop(self.one(x)))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.own_checkpoint else self.inner(x))


def dropping(own_checkpoint: bool = False) -> nn.Module:
    blocks = [nn.Sequential(Dropping(own_checkpoint), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*blocks)


DROPOUT: dict[str, Callable[[], tensile.Workload]] = {
    "in nested blocks": lambda: job(dropping),
    "own checkpoint": lambda: job(lambda: dropping(own_checkpoint=True)),
    "checkpoint in a checkpoint": lambda: job(lambda: dropping(own_checkpoint=True), through(use_reentrant=False)),
    "re-entrant": lambda: job(
        dropping, lambda m, x: checkpoint(m, x.detach().requires_grad_(), use_reentrant=True).square().mean()
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPOUT)
def test_t16_dropout_draws_the_same_masks_as_eager_and_leaves_the_same_generator(case: str) -> None:
    assert_trains_alike(DROPOUT[case]())


def test_t16_every_step_draws_a_fresh_mask() -> None:
    workload = job(dropping)
    for group in workload.optimizer.param_groups:
        group["lr"] = 0.0
    with loaded(plan_for(workload), workload) as step:
        assert len({float(step(*workload.batch)) for _ in range(4)}) == 4


def test_t16_a_checkpoint_that_draws_anew_in_backward_is_refused() -> None:
    error = refusal(job(dropping, through(use_reentrant=False, preserve_rng_state=False)))
    assert (error.code, error.hint) == ("TS114", "pass preserve_rng_state=True, or switch checkpointing off")
    assert error.what == (
        "a checkpointed region draws random numbers with preserve_rng_state=False: eager's backward draws others than "
        "its forward"
    )
    assert at_line(error) == ("planning.py in forward: return checkpoint(model, x, **options).square().mean()")
    # nothing is drawn: nothing differs
    capture(job(lambda: nn.Linear(32, 32), through(use_reentrant=False, preserve_rng_state=False)))


class Recurrent(nn.Module):
    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 12, layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.lstm(x)[0])
        return y


@pytest.mark.parametrize(("layers", "dropout"), [(2, 0.3), (1, 0.0)])
def test_t16_an_lstm_of_fixed_length_trains_alike(layers: int, dropout: float) -> None:
    assert_trains_alike(job(lambda: Recurrent(layers, dropout), batch=lambda: torch.randn(16, 10, 16)))
