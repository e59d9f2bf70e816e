"""The captured step does what eager does, bit for bit, and says where every op comes from."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import workloads
from replaying import train_captured, train_eagerly

import tensile
from tensile.compiler.allocator import allocated_peak
from tensile.compiler.capture import capture, collect_state
from tensile.compiler.graph import verify
from tensile.schedules.errors import CaptureError, PlanMismatch

FAST = [("gpt2", "adamw"), ("vit", "sgd_fused"), ("vgg16", "sgd")]
SLOW = [
    *((m, o) for m in workloads.TEXT for o in workloads.OPTIMIZERS if (m, o) not in FAST),
    *(
        (m, o)
        for m in workloads.IMAGES
        for o in ("sgd", "momentum", "nesterov", "adam", "adamw_foreach", "adamw_fused")
    ),
]


def assert_same_bits(make: workloads.Maker, steps: int = 4) -> None:
    eager, planned = train_eagerly(make(), steps), train_captured(make(), steps)
    assert eager.keys() == planned.keys()
    different = [name for name in eager if eager[name] != planned[name]]
    assert not different


@pytest.mark.parametrize(("model", "optimizer"), FAST)
def test_a_captured_step_replays_bit_for_bit(model: str, optimizer: str) -> None:
    assert_same_bits(lambda: workloads.make(model, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), SLOW)
def test_every_model_and_optimizer_replays_bit_for_bit(model: str, optimizer: str) -> None:
    assert_same_bits(lambda: workloads.make(model, optimizer))


@pytest.mark.parametrize("optimizer", list(workloads.OPTIMIZERS))
def test_every_optimizer_obeys_a_changing_learning_rate(optimizer: str) -> None:
    assert_same_bits(lambda: workloads.perceptron(optimizer, width=16, dropout=0.2))


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 1.0},
        {"zero_first": True},
        {"zero_first": True, "set_to_none": False},
        {"set_to_none": False, "clip": 0.5},
        {"bf16": True},
    ],
)
def test_habits_of_training_loops_are_kept(options: dict[str, object]) -> None:
    assert_same_bits(lambda: workloads.make("gpt2", "adamw", **options))


def test_value_branches_on_the_mask_are_taken_as_eager_takes_them_and_checked() -> None:
    assert_same_bits(lambda: workloads.make("llama", "adamw"))
    workload = workloads.make("llama", "adamw")
    captured = capture(workload, check_twice=False)
    assert [op for op in captured.graph.ops if op.call.startswith("check(")]
    ragged = dict(workload.batch[0])
    ragged["attention_mask"] = ragged["attention_mask"].clone()
    ragged["attention_mask"][0, :5] = 0
    with pytest.raises(PlanMismatch, match="branches on its values"):
        train_captured(tensile.Workload(workload.model, workload.optimizer, workload.step_fn, (ragged,)), 1, captured)


def step_of(forward):  # type: ignore[no-untyped-def]
    def step(model, optimizer, x):  # type: ignore[no-untyped-def]
        loss = forward(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def small(model: torch.nn.Module, forward, optimizer: str = "adamw", x: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
    x = torch.randn(8, 16) if x is None else x
    return tensile.Workload(model, workloads.OPTIMIZERS[optimizer](model.parameters()), step_of(forward), (x,))


def seeded(make):  # type: ignore[no-untyped-def]
    def build() -> tensile.Workload:
        torch.manual_seed(0)
        return make()

    return build


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.mask = x > 0
        return x**3

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient * ctx.mask


@torch.library.custom_op("tensile_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, gradient: gradient * 2)


class Averaging(torch.nn.Module):
    """Rebinds a buffer in forward, and multiplies another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.count.mul_(2)
        return y + self.average


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def frozen_first() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(inplace=True), torch.nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


def hooked() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    model[0].register_forward_hook(lambda _module, _args, out: out * 1.5)
    model[1].register_full_backward_hook(lambda _module, gradients, _out: (gradients[0] * 0.5,))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def normalised() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(inplace=True),
                               torch.nn.Linear(32, 4))  # fmt: skip


def mean_square(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


CASES = {
    "autograd.Function": lambda: small(torch.nn.Linear(16, 4), lambda m, x: Cube.apply(m(x)).mean()),
    "custom op": lambda: small(torch.nn.Linear(16, 4), lambda m, x: double(m(x)).square().mean()),
    "reassigned buffer": lambda: small(Averaging(), mean_square),
    "tied weights": lambda: small(Tied(), lambda m, x: F.cross_entropy(m(x), x), x=torch.randint(50, (12,))),
    "frozen layer": lambda: small(frozen_first(), mean_square),
    "hooks": lambda: small(hooked(), mean_square),
    "batch norm": lambda: small(normalised(), mean_square, "momentum"),
    "weight norm": lambda: small(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 4)), mean_square),
    "noise": lambda: small(torch.nn.Linear(16, 4), lambda m, x: (m(x) + torch.randn_like(m(x))).square().mean()),
    "item as a scalar": lambda: small(torch.nn.Linear(16, 4), lambda m, x: m(x).square().mean() * x.abs().max().item()),
    "checkpoint with dropout": lambda: small(
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)),
        lambda m, x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).square().mean(),
    ),
    "channels last": lambda: small(
        torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), mean_square,
        x=torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "vmap": lambda: small(torch.nn.Linear(16, 4), lambda m, x: torch.vmap(m)(x).square().mean()),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_features_of_models_replay_bit_for_bit(case: str) -> None:
    assert_same_bits(seeded(CASES[case]))


def test_parameter_groups_keep_their_own_hyper_parameters() -> None:
    def make() -> tensile.Workload:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[1].parameters(), "lr": 0.01}],
            fused=True,
        )
        return tensile.Workload(model, optimizer, step_of(mean_square), (torch.randn(8, 16),))

    assert_same_bits(seeded(make))


def test_capture_leaves_the_workload_and_the_generators_as_they_were() -> None:
    workload = seeded(lambda: small(Averaging(), mean_square))()
    before = {name: tensor.clone() for name, tensor in collect_state(workload.model, workload.optimizer).items()}
    attributes = dict(workload.model.__dict__)
    states = torch.get_rng_state(), random.getstate()
    capture(workload)
    after = collect_state(workload.model, workload.optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    assert workload.model.__dict__.keys() == attributes.keys()
    assert "step" not in vars(workload.optimizer)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_every_op_has_a_phase_a_module_and_the_users_line() -> None:
    graph = capture(workloads.make("gpt2", "adamw"), check_twice=False).graph
    assert {op.phase for op in graph.ops} == {"forward", "backward", "optimizer"}
    assert all(op.source.startswith("workloads.py:") for op in graph.ops)
    backward = [op for op in graph.ops if op.phase == "backward"]
    assert sum(bool(op.module) for op in backward) > 0.9 * len(backward)
    assert any(op.module == "transformer.h.0.attn" for op in backward)


def test_a_captured_graph_is_consistent_and_a_broken_one_is_not() -> None:
    from dataclasses import replace

    graph = capture(workloads.perceptron(), check_twice=False).graph
    verify(graph)
    reader = next(op for op in graph.ops if op.after)
    broken = list(graph.ops)
    broken[reader.index] = replace(reader, after=())
    with pytest.raises(AssertionError, match="may run before"):
        verify(replace(graph, ops=tuple(broken)))


def test_fingerprints_are_equal_for_equal_steps_and_differ_otherwise() -> None:
    one, same = (capture(workloads.perceptron(), check_twice=False).graph.fingerprint for _ in range(2))
    wider = capture(workloads.perceptron(width=65), check_twice=False).graph.fingerprint
    other = capture(workloads.perceptron("adamw"), check_twice=False).graph.fingerprint
    assert one == same
    assert one.state != wider.state
    assert one.optimizer != other.optimizer


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * random.random()


closure = torch.ones(4)


def branching(model, x):  # type: ignore[no-untyped-def]
    y = model(x)
    if y.sum() > 0:
        y = y * 2
    return y.square().mean()


REFUSALS = {
    "branch": ("TS101", "the step branches on a tensor's value", lambda: small(torch.nn.Linear(16, 4), branching)),
    "closure": ("TS103", "the step uses a tensor that is neither parameter, buffer, optimizer state nor batch",
                lambda: small(torch.nn.Linear(16, 4), lambda m, x: (m(x) * closure).mean())),
    "numpy": ("TS105", "the step leaves torch with .numpy()",
              lambda: small(torch.nn.Linear(16, 4), lambda m, x: m(x).mean() * float(x.numpy().max()))),
    "compiled": ("TS106", "the step calls a function compiled by torch.compile",
                 lambda: small(torch.compile(torch.nn.Linear(16, 4)), mean_square)),
    "randomness": ("TS108", "the step is not the same twice: it depends on Python randomness, a counter or another "
                   "Python value", lambda: small(Counting(), mean_square)),
    "data parallel": ("TS109", "the model is wrapped in DataParallel, whose communication a trace cannot see",
                      lambda: small(torch.nn.DataParallel(torch.nn.Linear(16, 4)), mean_square)),
    "sparse": ("TS110", "the step makes sparse gradients", lambda: small(
        torch.nn.Embedding(50, 16, sparse=True), mean_square, "sgd", torch.randint(50, (12,)))),
    "batch norm in a checkpoint": ("TS113", "a checkpointed region updates batch-norm statistics, which eager does "
                                   "twice", lambda: small(normalised(), lambda m, x: torch.utils.checkpoint.checkpoint(
                                       m, x, use_reentrant=False).square().mean())),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSALS))
def test_what_cannot_be_captured_is_refused_by_name(case: str) -> None:
    code, what, make = REFUSALS[case]
    with pytest.raises(CaptureError) as refusal:
        capture(seeded(make)())
    assert refusal.value.code == code
    assert refusal.value.what == what
    assert refusal.value.hint


def test_a_refusal_names_the_users_own_line() -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(seeded(lambda: small(torch.nn.Linear(16, 4), branching))())
    assert refusal.value.where is not None
    assert refusal.value.where.startswith("test_capture.py:")
    assert refusal.value.where.endswith("in branching: if y.sum() > 0:")


def constant(model, x):  # type: ignore[no-untyped-def]
    return (model(x) * torch.tensor(random.random())).mean()


def scaled(model, x):  # type: ignore[no-untyped-def]
    return (model(x) * random.random()).mean()


def wired(model, x):  # type: ignore[no-untyped-def]
    hidden, other = x.sin(), x.cos()
    return model(hidden if random.random() < 0.5 else other).mean()


def returning(model, x):  # type: ignore[no-untyped-def]
    y = model(x)
    hidden, other = y.sin(), y.cos()
    model.kept = (hidden if random.random() < 0.5 else other).detach()
    return y.mean()


def with_buffer() -> torch.nn.Module:
    model = torch.nn.Linear(16, 4)
    model.register_buffer("kept", torch.zeros(12, 4))
    return model


@pytest.mark.parametrize("loss", [constant, scaled, wired, returning])
def test_whatever_differs_between_two_runs_is_refused(
    loss: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = seeded(lambda: small(with_buffer(), loss))()
    numbers = iter([0.9, 0.8, 0.1])  # what the step leaves, the trace, the other run
    ours = random.random

    def theirs() -> float:
        return next(numbers) if inspect.stack()[1].function == loss.__name__ else ours()

    monkeypatch.setattr(random, "random", theirs)
    with pytest.raises(CaptureError) as refusal:
        capture(workload)
    assert refusal.value.code == "TS108"
    assert next(numbers, None) is None


def test_a_step_that_differs_names_the_line_where_it_does() -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(seeded(lambda: small(torch.nn.Linear(16, 4), scaled))())
    line = inspect.getsourcelines(scaled)[1] + 1
    assert refusal.value.where == f"test_capture.py:{line} in scaled"


def test_capturing_allocates_no_copy_of_the_weights() -> None:
    workload = workloads.make("gpt2", "sgd")
    weights = sum(p.nbytes for p in workload.model.parameters())
    peak, _ = allocated_peak(lambda: capture(workload))
    assert peak < weights // 4
