"""Cases from people who train under memory pressure: changes in place, checkpoints of their own, shapes of scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from tensile.schedules.errors import PlanMismatch

# T19: in place


class InPlaceLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv1d(4, 8, 3), nn.InstanceNorm1d(8, affine=True), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu(self.norm(self.conv(x)))
        return y


class Fading(nn.Module):
    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(32, 32), late
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            y = self.linear(x) * self.scale
            self.scale.mul_(0.9)
            return y
        self.scale.mul_(0.9)
        return (self.linear(x) * self.scale.clone()).relu()


def legal(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.add_(1)
    y.mul_(2)
    y[:, 3] = 0
    return y.square().mean()


def too_late(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(model(x))
    loss = (y * y).sum()
    y.add_(1)
    return loss


IN_PLACE: dict[str, Callable[[], tensile.Workload]] = {
    "activation last in a block": lambda: job(
        InPlaceLast, lambda m, x: m(x).mean(), lambda: torch.randn(16, 4, 32), zero=False
    ),
    "on results": lambda: job(lambda: nn.Linear(32, 32), legal, zero=False),
    "on a buffer": lambda: job(Fading, zero=False),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_t19_changes_in_place_keep_their_order_and_every_gradient_is_there(case: str) -> None:
    workload = IN_PLACE[case]()
    assert_trains_alike(workload)
    assert all(gradients_after(workload).values())


@pytest.mark.parametrize(
    "make", [lambda: job(lambda: nn.Linear(32, 32), too_late), lambda: job(lambda: Fading(late=True))],
    ids=["result", "buffer"],
)  # fmt: skip
def test_t19_where_eager_raises_the_capture_raises_with_eagers_words(make: Callable[[], tensile.Workload]) -> None:
    workload = make()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as eager:
        workload.step_fn(workload.model, workload.optimizer, *workload.batch)
    error = refusal(make())
    assert error.code == "TS111"
    said, ours = str(eager.value), error.what
    assert ours.startswith("the step raises while it is traced: RuntimeError: " + said[: said.index("[torch.")])
    assert at_line(error) == "planning.py in step: loss.backward()"


def test_t19_state_changed_in_the_users_own_checkpoint_is_refused() -> None:
    error = refusal(job(Fading, through(use_reentrant=False)))
    what = "a checkpointed region changes scale, which eager does twice"
    assert (error.code, error.what, error.hint) == ("TS113", what, CHECKPOINTING_OFF)
    assert at_line(error).endswith("in forward: return checkpoint(model, x, **options).square().mean()")


def test_t19_an_input_changed_in_the_users_own_checkpoint_is_refused() -> None:
    inside = nn.Sequential(nn.LeakyReLU(inplace=True), nn.Tanh())

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inside, model(x), use_reentrant=False).square().mean()

    error = refusal(job(lambda: nn.Linear(32, 32), forward))
    what = "a checkpointed region changes a tensor it was given, which eager does twice"
    assert (error.code, error.what, error.hint) == ("TS113", what, CHECKPOINTING_OFF)
    assert at_line(error).startswith("test_cases_steps.py in forward: return checkpoint(inside, ")


def test_t19_a_buffer_bound_anew_in_the_users_own_checkpoint_is_refused() -> None:
    class Rebinding(Fading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale = self.scale * 0.9
            return (self.linear(x) * self.scale).relu()

    error = refusal(job(Rebinding, through(use_reentrant=False)))
    what = "a checkpointed region binds scale anew, which eager does twice"
    assert (error.code, error.what, error.hint) == ("TS113", what, CHECKPOINTING_OFF)


def shared(times: int) -> tensile.Workload:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).relu()
        for _ in range(times - 2):
            y = model(y).relu()
        return checkpoint(model, y, use_reentrant=True).square().mean()

    return job(lambda: nn.Linear(32, 32), forward)


def test_t19_a_weight_in_a_reentrant_checkpoint_and_elsewhere_is_summed_as_in_eager_or_refused() -> None:
    assert_trains_alike(shared(2))
    error = refusal(shared(3))
    assert (error.code, error.where) == ("TS118", "weight")
    assert error.what == (
        "weight is used 3 times, also in a re-entrant checkpoint, where its gradient is summed in another order"
    )
    assert error.hint == "pass use_reentrant=False, or switch checkpointing off"


# T23: shapes of scripts


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass
class KnownOutput:
    loss: torch.Tensor
    logits: torch.Tensor


torch.export.register_dataclass(KnownOutput)


class Classifier(nn.Module):
    def __init__(self, output: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two, self.output = nn.Linear(32, 64), nn.Linear(64, 8), output

    def forward(self, x: torch.Tensor, labels: torch.Tensor, masked: bool = False) -> Any:
        hidden = F.gelu(self.one(x))
        logits = self.two(hidden * (hidden > 0) if masked else hidden)
        return self.output(F.cross_entropy(logits, labels), logits)


def classify(
    output: Callable[..., Any] = Output, returns: Callable[[Any], Any] = lambda out: out.loss.detach()
) -> tensile.Workload:
    """The batch is a dictionary with a flag; the loss is inside what the model returns."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> Any:
        out = model(**batch)
        (out[0] if isinstance(out, tuple) else out.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        return returns(out)

    torch.manual_seed(0)
    model = Classifier(output)
    batch = {"x": torch.randn(128, 32), "labels": torch.randint(8, (128,)), "masked": True}
    return tensile.Workload(model, torch.optim.AdamW(model.parameters()), step, (batch,))


RETURNS: dict[str, Callable[[], tensile.Workload]] = {
    "a tensor": classify,
    "a tuple": lambda: classify(lambda *out: out, lambda out: out),
    "a dictionary": lambda: classify(returns=lambda out: {"loss": out.loss.detach(), "rows": 128, "name": "train"}),
    "a number": lambda: classify(returns=lambda out: out.loss.item()),
    "nothing": lambda: classify(returns=lambda out: None),
    "a registered data class": lambda: classify(KnownOutput, lambda out: out),
}


@pytest.mark.parametrize("case", RETURNS)
def test_t23_a_step_may_take_a_dictionary_with_a_flag_and_return(case: str) -> None:
    workload = RETURNS[case]()
    assert_trains_alike(workload)
    twin = RETURNS[case]()
    want = twin.step_fn(twin.model, twin.optimizer, *twin.batch)
    with loaded(plan_for(workload), workload) as step:
        assert type(step(*workload.batch)) is type(want)


def test_t23_another_value_of_the_flag_is_named() -> None:
    workload = classify()
    with loaded(plan_for(workload), workload) as step:
        step(*workload.batch)
        with pytest.raises(PlanMismatch) as refused:
            step({**workload.batch[0], "masked": False})
    assert refused.value.what == "the plan does not cover this step: batch['masked'] is False"
    assert refused.value.where == "planned with True"


def test_t23_an_object_that_a_plan_cannot_fill_in_is_refused_not_returned_empty() -> None:
    error = refusal(classify(returns=lambda out: out))
    what = "the step returns an object of type Output, whose tensors a plan cannot fill in"
    assert (error.code, error.what) == ("TS116", what)
    assert error.hint == (
        "return the tensors in a tuple or dictionary, or pass a data class to torch.export.register_dataclass first"
    )


class Masked(torch.autograd.Function):
    """Keeps a mask and a tensor with an attribute of its own on the context, and saves a small tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = x * scale
        y.note = scale  # type: ignore[attr-defined]
        ctx.mask, ctx.kept = x > 0, y
        ctx.save_for_backward(x, torch.arange(3.0))
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, small = ctx.saved_tensors
        return gradients[0] * ctx.mask * ctx.kept.note * small.sum() + x, None


def test_t23_a_custom_function_keeps_its_mask_attribute_and_small_tensor() -> None:
    assert_trains_alike(job(lambda: nn.Linear(32, 32), lambda m, x: Masked.apply(m(x), 2.0).square().mean()))


def scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y / y.detach().abs().max().item()).square().mean()


def branching(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    if y.detach().abs().max().item() > 1:
        y = y / 2
    return y.square().mean()


def test_t23_a_scale_from_item_works_and_a_branch_on_it_is_refused_at_its_line() -> None:
    assert_trains_alike(job(lambda: nn.Linear(32, 32), scaled))
    error = refusal(job(lambda: nn.Linear(32, 32), branching))
    assert (error.code, error.what) == ("TS101", "the step branches on a tensor's value")
    assert at_line(error) == "test_cases_steps.py in branching: if y.detach().abs().max().item() > 1:"
    assert error.hint == (
        "replace the branch by torch.where, or move what needs the value (if, float(), print) out of step_fn"
    )


def test_t23_a_gradient_left_on_the_batch_is_refused() -> None:
    error = refusal(job(lambda: nn.Linear(32, 32), lambda m, x: m(x.requires_grad_()).square().mean()))
    what = "the step leaves a gradient on batch, which is part of the batch"
    assert (error.code, error.what, error.where) == ("TS115", what, "batch")
    assert error.hint == "use batch.detach().requires_grad_() in the step"
