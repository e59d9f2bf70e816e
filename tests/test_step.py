"""The planned step in a training loop: the same bits, the promised peak, and a clear word when something goes wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import workloads

import tensile
from tensile.compiler import torch_private
from tensile.compiler.budget import parse_budget
from tensile.compiler.capture import collect_state
from tensile.compiler.pipeline import plan_profiled, profile_workload
from tensile.compiler.profile import Link
from tensile.runtime import spill
from tensile.runtime.verify import verify
from tensile.schedules import codec
from tensile.schedules.errors import InfeasibleBudget, LaneError, PlanMismatch, StepLost, TensileError
from tensile.schedules.plan import Plan, Recompute, SwapOut

SMALLEST = 1024  # bytes: small models, everything moves
FAST = Link(
    out_bytes_per_s=10**10, in_bytes_per_s=10**10, out_latency_us=1, in_latency_us=1, duplex_percent=100,
)  # fmt: skip
SLOW = Link(out_bytes_per_s=10**6, in_bytes_per_s=10**6, out_latency_us=1, in_latency_us=1, duplex_percent=100)


def plan_for(workload: tensile.Workload, budget: str, link: Link = FAST) -> Plan:
    captured, profile = profile_workload(workload, link=link, cache_dir=None, repeats=1)
    try:
        return plan_profiled(
            captured.graph, profile, name="test", budget=parse_budget(budget), smallest_swap_bytes=SMALLEST
        )
    except InfeasibleBudget as error:
        return plan_profiled(
            captured.graph, profile, name="test", budget=parse_budget(str(error.smallest_bytes)),
            smallest_swap_bytes=SMALLEST,
        )  # fmt: skip


def make(optimizer: str = "adamw", rows: int = 256, dropout: float = 0.1) -> tensile.Workload:
    return workloads.perceptron(optimizer, rows=rows, dropout=dropout)


@pytest.fixture(scope="module")
def swapping() -> Plan:
    plan = plan_for(make(), "60%")
    assert any(isinstance(event, SwapOut) for event in plan.events)
    return plan


@pytest.fixture(scope="module")
def smallest() -> Plan:
    """Few rows, so that parameters and optimizer state are most of the memory and must leave between steps."""
    return plan_for(make("adamw", rows=16), "min")


@pytest.fixture
def step(swapping: Plan) -> Iterator[tuple[tensile.Workload, Any]]:
    job = make()
    with tensile.load(swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn) as planned:
        yield job, planned


def bits(job: tensile.Workload) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in collect_state(job.model, job.optimizer).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "adamw_foreach", "adam_fused"])
@pytest.mark.parametrize("link", [FAST, SLOW], ids=["swaps", "recomputes"])
@pytest.mark.parametrize("budget", ["100%", "70%", "min"])
def test_planned_and_eager_training_are_equal_bit_for_bit(optimizer: str, link: Link, budget: str) -> None:
    job = make(optimizer, dropout=0.0 if link is SLOW else 0.1)
    result = verify(job, plan_for(job, budget, link))
    assert result.first_difference is None
    assert 0 < result.planned_peak_bytes <= result.promised_peak_bytes


def test_a_slow_link_is_answered_with_recomputes() -> None:
    plan = plan_for(make("sgd", rows=1024, dropout=0.0), "70%", SLOW)
    assert any(isinstance(event, Recompute) for event in plan.events)


@pytest.mark.parametrize("model", ["gpt2", "resnet50"])
def test_models_are_equal_at_the_smallest_budget(model: str) -> None:
    job = workloads.make(model, "momentum" if model == "resnet50" else "adamw")
    result = verify(job, plan_for(job, "60%"))
    assert result.first_difference is None
    assert result.planned_peak_bytes <= result.promised_peak_bytes


def test_the_report_counts_what_was_applied(step: tuple[tensile.Workload, Any], swapping: Plan) -> None:
    job, planned = step
    for _ in range(4):
        planned(*job.batch)
    report = planned.report()
    swaps = sum(isinstance(event, SwapOut) for event in swapping.events)
    assert report.swaps == (swaps, swaps)
    assert (report.steps, report.eager_steps) == (4, 0)
    assert 0 < report.measured_peak_bytes <= swapping.promise.peak_bytes
    assert f"applied {swaps} of {swaps} swaps" in str(report)


def test_a_peak_not_measured_yet_is_no_number(step: tuple[tensile.Workload, Any]) -> None:
    job, planned = step
    for _ in range(2):
        planned(*job.batch)
    assert planned.report().measured_peak_bytes is None
    assert "not measured: it takes three planned steps" in str(planned.report())


TOUCHES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + 1, "sum": lambda t: t.sum(), "clone": lambda t: t.clone(),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
    "item": lambda t: t.reshape(-1)[0].item(), "tolist": lambda t: t.tolist(), "matmul": lambda t: t.t() @ t,
    "zero_": lambda t: t.zero_(), "to": lambda t: t.to(torch.float64), "print": lambda t: repr(t),
    "numpy": lambda t: t.numpy().sum(),
    "isnan": lambda t: t.isnan().any(), "equal": lambda t: torch.equal(t, t + 0),
    "foreach": lambda t: torch._foreach_add([t], 1.0), "norm": lambda t: torch.linalg.vector_norm(t),
}  # fmt: skip


@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_what_is_swapped_out_between_steps_is_an_error(smallest: Plan, touch: str) -> None:
    job = make("adamw", rows=16)
    with tensile.load(smallest, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn) as planned:
        planned(*job.batch)
        away = [s.name for s in smallest.storages if s.starts == "out"]
        state = collect_state(job.model, job.optimizer)
        matrices = [state[name].detach() for name in away if name in state and state[name].dim() == 2]
        assert matrices, "the plan leaves nothing out between steps"
        with pytest.raises(RuntimeError, match="swapped out between steps"):
            TOUCHES[touch](matrices[0])
        with planned.resident():
            TOUCHES[touch](matrices[0].clone())


def test_identity_views_and_aliases_survive(step: tuple[tensile.Workload, Any]) -> None:
    job, planned = step
    weight = job.model[0].weight
    view = weight.detach()[:3]
    for _ in range(3):
        planned(*job.batch)
    with planned.resident():
        assert job.model[0].weight is weight
        assert torch.equal(view, weight.detach()[:3])
        assert view.data_ptr() == weight.data_ptr()


def test_leaving_makes_everything_ordinary_again(swapping: Plan) -> None:
    eager, job = make(), make()
    torch.manual_seed(1)
    for _ in range(3):
        eager.step_fn(eager.model, eager.optimizer, *eager.batch)
    torch.manual_seed(1)
    planned = tensile.load(swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn)
    for _ in range(3):
        planned(*job.batch)
    planned.close()
    planned.close()
    assert same(bits(job), bits(eager))
    with pytest.raises(TensileError, match="closed"):
        planned(*job.batch)


FAULTS = {
    "short": "the spill file ended early: 0 of ",
    "EIO": f"the spill file cannot be {{verb}}: {os.strerror(errno.EIO)}",
    "ENOSPC": f"the spill file cannot be {{verb}}: {os.strerror(errno.ENOSPC)}",
}
VERBS = {"pwritev": "written", "preadv": "read"}
LOST = "load a checkpoint, call step.reset()"


@pytest.fixture
def moving(smallest: Plan) -> Iterator[tuple[tensile.Workload, Any]]:
    """A step whose parameters and optimizer state are away between steps: copies before and after every update."""
    job = make("adamw", rows=16)
    with tensile.load(smallest, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn) as planned:
        planned(*job.batch)
        yield job, planned


def fail(patch: pytest.MonkeyPatch, call: str, kind: str, planned: Any, *, updating: bool) -> None:
    """The first copy that begins before the first update of a step, or after it, goes wrong."""
    real, failed = getattr(os, call), []

    def copy(*arguments: Any) -> int:
        if failed or planned._stage.updating is not updating:
            return int(real(*arguments))
        failed.append(call)
        if kind == "short":
            return 0
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    patch.setattr(spill.os, call, copy)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("call", VERBS)
def test_a_copy_that_fails_before_the_first_update_leaves_everything_as_it_was(
    moving: tuple[tensile.Workload, Any], monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    job, planned = moving
    with planned.resident():
        before, generator = bits(job), torch.get_rng_state()
    with monkeypatch.context() as patch:
        fail(patch, call, kind, planned, updating=False)
        with pytest.raises(LaneError) as failed:
            planned(*job.batch)
    message = str(failed.value)
    assert message.startswith("error: " + FAULTS[kind].format(verb=VERBS[call]))
    assert "; the model is as it was before the step" in message
    assert same(bits(job), before)
    assert torch.equal(torch.get_rng_state(), generator)
    planned(*job.batch)
    with planned.resident():
        assert not same(bits(job), before)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("call", VERBS)
def test_a_copy_that_fails_after_the_first_update_says_that_the_step_is_lost(
    moving: tuple[tensile.Workload, Any], monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    job, planned = moving
    with planned.resident():
        good = bits(job)
    with monkeypatch.context() as patch:
        fail(patch, call, kind, planned, updating=True)
        with pytest.raises(StepLost) as lost:
            planned(*job.batch)
    message = str(lost.value)
    assert message.startswith("error: the step failed after it began to update the model: error: ")
    assert FAULTS[kind].format(verb=VERBS[call]) in message
    assert message.endswith(f"help: the model is neither as before nor as after the step: {LOST}")
    with pytest.raises(StepLost, match="an earlier step failed after it began to update the model"):
        planned(*job.batch)
    with torch.no_grad(), planned.resident():
        for name, tensor in collect_state(job.model, job.optimizer).items():
            tensor.copy_(good[name])
    planned.reset()
    planned(*job.batch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_before_the_first_update_leaves_the_state_before_the_step(
    step: tuple[tensile.Workload, Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    job, planned = step
    planned(*job.batch)
    with planned.resident():
        before = bits(job)
    calls = []

    def interrupt(self: Any, index: int) -> None:
        calls.append(index)
        raise error("now")

    with monkeypatch.context() as patch:
        patch.setattr(type(planned._stage), "free", interrupt)
        with pytest.raises(error, match="now"):
            planned(*job.batch)
    assert len(calls) == 1
    with planned.resident():
        assert same(bits(job), before)
    planned(*job.batch)


TRAINING = """
import sys
import tensile, workloads
job = workloads.perceptron("adamw", rows=16, dropout=0.1)
step = tensile.load(sys.argv[1], model=job.model, optimizer=job.optimizer, step_fn=job.step_fn, spill_dir=sys.argv[2])
while True:
    step(*job.batch)
    print("stepped", flush=True)
"""


def test_a_killed_process_leaves_nothing_in_the_spill_folder(smallest: Plan, tmp_path: Path) -> None:
    plan_file, folder = tmp_path / "step.plan.yaml", tmp_path / "spill"
    folder.mkdir()
    codec.save(smallest, plan_file)
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(plan_file), str(folder)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert training.stdout is not None
    try:
        assert [training.stdout.readline() for _ in range(3)] == ["stepped\n"] * 3
        # the spill file is in the folder, and has no name there
        links = [os.readlink(f"/proc/{training.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{training.pid}/fd")]
        assert any(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)
    finally:
        training.kill()
        training.wait()
        training.stdout.close()
    assert list(folder.iterdir()) == []


def test_another_batch_shape_is_named_or_run_eagerly(swapping: Plan) -> None:
    job = make()
    short = tuple(t[:7] for t in job.batch)
    with tensile.load(swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn) as planned:
        planned(*job.batch)
        with pytest.raises(PlanMismatch, match=r"\[7, 64\]"):
            planned(*short)
    job = make()
    with tensile.load(
        swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn, on_mismatch="eager"
    ) as planned:
        planned(*job.batch)
        planned(*short)
        planned(*job.batch)
        assert (planned.report().steps, planned.report().eager_steps) == (2, 1)
        assert "eager" in str(planned.report())


def test_eval_mode_and_frozen_parameters_are_noticed(step: tuple[tensile.Workload, Any]) -> None:
    job, planned = step
    planned(*job.batch)
    job.model.eval()
    with pytest.raises(PlanMismatch, match="train"):
        planned(*job.batch)
    job.model.train()
    job.model[0].weight.requires_grad_(False)
    with pytest.raises(PlanMismatch, match="requires_grad"):
        planned(*job.batch)


def test_another_model_or_optimizer_is_refused_before_the_first_step(swapping: Plan) -> None:
    other = make("sgd")
    with pytest.raises(PlanMismatch, match="optimizer"):
        tensile.load(swapping, model=other.model, optimizer=other.optimizer, step_fn=other.step_fn, batch=other.batch)
    wide = workloads.perceptron("adamw", rows=256, width=32, dropout=0.1)
    with pytest.raises(PlanMismatch, match=r"subject\.fingerprint"):
        tensile.load(swapping, model=wide.model, optimizer=wide.optimizer, step_fn=wide.step_fn, batch=wide.batch)


def test_two_planned_steps_do_not_disturb_each_other(swapping: Plan) -> None:
    jobs = [make(), make()]
    steps = [tensile.load(swapping, model=j.model, optimizer=j.optimizer, step_fn=j.step_fn) for j in jobs]
    for _ in range(3):
        for job, planned in zip(jobs, steps, strict=True):
            torch.manual_seed(3)
            planned(*job.batch)
    for planned in steps:
        planned.close()
    assert same(bits(jobs[0]), bits(jobs[1]))


def test_nothing_is_left_in_the_spill_folder(swapping: Plan, tmp_path: Path) -> None:
    job = make()
    with tensile.load(
        swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn, spill_dir=tmp_path
    ) as planned:
        planned(*job.batch)
        assert list(tmp_path.iterdir()) == []


def test_a_missing_spill_folder_is_refused_before_the_first_step(swapping: Plan, tmp_path: Path) -> None:
    job = make()
    before = bits(job)
    with pytest.raises(LaneError, match="does not exist"):
        tensile.load(
            swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn, batch=job.batch,
            spill_dir=tmp_path / "nowhere",
        )  # fmt: skip
    assert same(bits(job), before)


@pytest.mark.parametrize(("option", "value"), [("on_mismatch", "ignore"), ("memory_policy", "tightest")])
def test_unknown_options_are_refused(swapping: Plan, option: str, value: str) -> None:
    job = make()
    with pytest.raises(TensileError, match=value):
        tensile.load(swapping, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn, **{option: value})


def test_a_plan_that_swaps_state_is_refused_by_name_where_torch_cannot(
    smallest: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make("adamw", rows=16)
    monkeypatch.setattr(torch_private, "CAN_SWAP_POINTERS", False)
    with pytest.raises(PlanMismatch, match=r"the plan swaps \S+, and torch \S+ cannot empty a storage of yours"):
        tensile.load(smallest, model=job.model, optimizer=job.optimizer, step_fn=job.step_fn, batch=job.batch)
