"""Measuring ops: each distinct one once, with the right inputs, into the right numbers, and nothing of the user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workloads
from user_state import everything

import tensile
from tensile.compiler import measure as measure_module
from tensile.compiler.alone import created_bytes, measure_alone
from tensile.compiler.budget import parse_budget
from tensile.compiler.capture import Captured, capture
from tensile.compiler.eager import Eager, measure_eager, model_eager_peak
from tensile.compiler.graph import Graph, Op, Storage, Tensor
from tensile.compiler.measure import device_name, measure
from tensile.compiler.op_inputs import OpInputs, made_up_inputs
from tensile.compiler.pipeline import plan_profiled, profile_workload
from tensile.compiler.problem import build_problem
from tensile.compiler.profile import Link, Profile
from tensile.compiler.profile_cache import Measured
from tensile.compiler.program import Call, Program, Ref, Value
from tensile.compiler.solve import GREEDY
from tensile.runtime.verify import verify
from tensile.schedules.plan import Fingerprint

LINK = Link(
    out_bytes_per_s=10**9, in_bytes_per_s=10**9, out_latency_us=50, in_latency_us=80, duplex_percent=60
)  # fmt: skip
FITS = Eager(step_us=1000, peak_bytes=10**6, source="measured")
TOO_BIG = Eager(step_us=0, peak_bytes=10**6, source="modelled")
Case = tuple[Captured, tensile.Workload]


def captured(workload: tensile.Workload) -> Case:
    return capture(workload, check_twice=False), workload


@pytest.fixture(scope="module")
def small() -> Case:
    return captured(workloads.perceptron("adam", width=16, dropout=0.1))


@pytest.fixture(scope="module")
def convolving() -> Case:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(16, 8, 3), torch.nn.Flatten(), torch.nn.LazyLinear(10),
    )  # fmt: skip
    images, labels = torch.randn(4, 16, 32, 32), torch.randint(10, (4,))
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return captured(tensile.Workload(model, optimizer, workloads.image_step, (images, labels)))


def profile(case: Case, eager: Eager, folder: Path | None = None, **options: Any) -> Profile:
    return measure(case[0], case[1], link=LINK, eager=eager, cache_dir=folder, **options)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of ops that are measured alone from now on, and "step" for every time the step is."""
    seen: list[str] = []

    def alone(graph: Graph, program: Program, op: Op, *, repeats: int) -> Measured:
        seen.append(op.key)
        return measure_alone(graph, program, op, repeats=repeats)

    def in_step(*args: Any, **options: Any) -> Any:
        seen.append("step")
        return time_in_step(*args, **options)

    time_in_step = measure_module.time_in_step
    monkeypatch.setattr(measure_module, "measure_alone", alone)
    monkeypatch.setattr(measure_module, "time_in_step", in_step)
    return seen


def test_ops_of_equal_key_are_measured_once_and_get_one_time(small: Case, ran: list[str]) -> None:
    found = profile(small, TOO_BIG)
    ops = small[0].graph.ops
    assert max(Counter(op.key for op in ops).values()) > 1
    assert sorted(ran) == sorted({op.key for op in ops})
    assert len(set(zip((op.key for op in ops), found.op_ns, found.workspace_bytes, strict=True))) == len(ran)
    assert found.source.startswith("measured one op at a time, ")
    assert found.source.endswith(f"; {len(ran)} of {len(ran)} distinct ops new")


def test_a_step_that_fits_is_timed_as_a_whole(small: Case, ran: list[str]) -> None:
    found = profile(small, FITS)
    assert ran == ["step"]
    assert found.source.startswith("measured inside the step, ")
    assert all(time_ns > 0 for time_ns in found.op_ns)
    assert found.eager_step_us > 0


@pytest.mark.parametrize("eager", [FITS, TOO_BIG], ids=["inside the step", "alone"])
def test_what_is_cached_is_not_run_again(small: Case, ran: list[str], tmp_path: Path, eager: Eager) -> None:
    first = profile(small, eager, tmp_path)
    ran.clear()
    again = profile(small, eager, tmp_path)
    assert ran == []
    assert (again.op_ns, again.workspace_bytes) == (first.op_ns, first.workspace_bytes)
    assert again.source.startswith("measured by an earlier compile; 0 of ")


def test_a_deeper_model_measures_only_what_is_new(small: Case, ran: list[str], tmp_path: Path) -> None:
    profile(small, TOO_BIG, tmp_path)
    known = set(ran)
    ran.clear()
    deeper = captured(workloads.perceptron("adam", width=16, layers=4, dropout=0.1))
    profile(deeper, TOO_BIG, tmp_path)
    assert set(ran) == {op.key for op in deeper[0].graph.ops} - known
    assert len(ran) < len(known) / 4


def test_times_taken_alone_are_replaced_where_the_step_fits_but_not_the_other_way(
    small: Case, ran: list[str], tmp_path: Path
) -> None:
    profile(small, TOO_BIG, tmp_path)
    ran.clear()
    profile(small, FITS, tmp_path)
    assert ran == ["step"]
    profile(small, TOO_BIG, tmp_path)
    assert ran == ["step"]


def test_another_setting_of_the_machine_is_measured_anew(small: Case, ran: list[str], tmp_path: Path) -> None:
    profile(small, FITS, tmp_path)
    found = profile(small, FITS, tmp_path, setting="malloc tight")
    assert ran == ["step", "step"]
    assert found.eager_step_us == FITS.step_us


def test_a_step_whose_copies_do_not_fit_beside_it_is_measured_alone(
    small: Case, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = small[0].graph
    state = sum(s.size_bytes for s in graph.storages if s.kind in ("parameter", "optimizer_state"))
    asked = []
    monkeypatch.setattr(measure_module, "fits", lambda size, device: asked.append((size, device)) or False)
    profile(small, FITS)
    assert "step" not in ran
    assert asked == [(FITS.peak_bytes + state, "cpu")]


@pytest.mark.parametrize("eager", [FITS, TOO_BIG], ids=["inside the step", "alone"])
def test_measuring_leaves_model_optimizer_batch_and_generators_as_before(convolving: Case, eager: Eager) -> None:
    case = convolving[0], replace_batch(convolving[1])
    before = everything(case[1])
    measure_eager(case[1], case[0].graph)
    profile(case, eager)
    assert everything(case[1]) == before


def replace_batch(workload: tensile.Workload) -> tensile.Workload:
    return replace(workload, batch=tuple(leaf.clone() for leaf in workload.batch))


def workspace_by_call(case: Case, found: Profile) -> dict[str, set[int]]:
    by_call: dict[str, set[int]] = {}
    for op, size in zip(case[0].graph.ops, found.workspace_bytes, strict=True):
        by_call.setdefault(op.call, set()).add(size)
    return by_call


def test_convolutions_have_workspace_and_sums_have_none(convolving: Case) -> None:
    by_call = workspace_by_call(convolving, profile(convolving, FITS))
    assert min(by_call["aten.convolution.default"]) > 0
    assert min(by_call["aten.convolution_backward.default"]) > 0
    # in place: nothing but the Python number of mul_ and relu_ as a tensor
    for call in ("aten.add_.Tensor", "aten.mul_.Tensor", "aten.relu_.default"):
        assert max(by_call[call]) < 16


def test_workspaces_are_the_same_inside_the_step_and_alone(convolving: Case) -> None:
    assert profile(convolving, FITS).workspace_bytes == profile(convolving, TOO_BIG).workspace_bytes


def test_workspaces_make_the_modelled_eager_peak_exact(convolving: Case) -> None:
    captured_step, workload = convolving
    eager = measure_eager(workload, captured_step.graph)
    found = profile(convolving, eager)
    modelled = model_eager_peak(captured_step.graph, found.workspace_bytes)
    assert found.eager_peak_bytes == eager.peak_bytes
    # what the step function's own variable holds is not in the graph: the logits, 4 rows of 10 floats, and the result
    assert 0 <= eager.peak_bytes - modelled <= 4 * 10 * 4 + 4


def test_a_step_that_does_not_fit_gets_its_peak_and_time_from_its_ops(convolving: Case) -> None:
    found = profile(convolving, TOO_BIG)
    assert found.eager_source == "modelled"
    assert found.eager_peak_bytes == model_eager_peak(convolving[0].graph, found.workspace_bytes)
    assert found.eager_peak_bytes > model_eager_peak(convolving[0].graph)
    assert found.eager_step_us == sum(found.op_ns) // 1000


@torch.library.custom_op("tensile_measure_tests::picky", mutates_args=())
def picky_op(x: torch.Tensor) -> torch.Tensor:
    """Takes numbers above 1 only, which no made-up value is."""
    if x.min() <= 1:
        raise ValueError("a value is not above 1")
    return x - 1


picky_op.register_fake(torch.empty_like)
picky_op.register_autograd(lambda context, gradient: gradient)


def picky_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = picky_op(2 + model(x).square()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture(scope="module")
def picky() -> Case:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return captured(tensile.Workload(model, optimizer, picky_step, (torch.randn(8, 8),)))


def test_an_op_that_refuses_made_up_values_is_estimated_and_named_and_not_kept(
    picky: Case, ran: list[str], tmp_path: Path
) -> None:
    graph = picky[0].graph
    (op,) = (op for op in graph.ops if "picky" in op.call)
    found = profile(picky, TOO_BIG, tmp_path)
    assert found.source.endswith(f"; estimated from their bytes, because they cannot run on made-up values: {op.call}")
    assert found.op_ns[op.index] > 0
    assert found.workspace_bytes[op.index] == created_bytes(graph, op) == 256
    ran.clear()
    profile(picky, TOO_BIG, tmp_path)
    assert ran == [op.key]


def test_the_same_op_is_measured_where_the_step_fits(picky: Case) -> None:
    assert "estimated" not in profile(picky, FITS).source


def test_progress_says_how_many_are_done(small: Case) -> None:
    for eager in (FITS, TOO_BIG):
        ticks: list[tuple[int, int, str]] = []
        profile(small, eager, progress=lambda done, total, text, ticks=ticks: ticks.append((done, total, text)))
        totals = {total for _, total, _ in ticks}
        assert len(totals) == 1
        assert [done for done, _, _ in ticks] == list(range(totals.pop()))
        assert all(text for _, _, text in ticks)


def test_a_damaged_cache_is_said_in_the_profile(small: Case, tmp_path: Path) -> None:
    profile(small, TOO_BIG, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert "; kept op times could not be used (" in profile(small, TOO_BIG, tmp_path).source


def test_the_device_is_named_with_its_threads() -> None:
    threads = torch.get_num_threads()
    assert device_name("cpu").endswith(", 1 thread" if threads == 1 else f", {threads} threads")


def op_by_hand(
    target: Callable[..., Any], args: tuple[Any, ...], storages: list[int], tensors: list[dict[str, Any]],
    *, writes: tuple[int, ...] = (), scalars: tuple[Any, ...] = (),
) -> tuple[Graph, Program, Op]:  # fmt: skip
    """One op over hand-written storages (bytes) and tensors; values are the tensors, then the scalars."""
    made = tuple(
        Tensor(**({"index": i, "offset": 0, "dtype": "float32", "producer": None} | facts))
        for i, facts in enumerate(tensors)
    )
    op = Op(
        index=0, name="op", call="op", phase="forward", module="", source="", inputs=tuple(range(len(made))),
        outputs=(), reads=tuple(range(len(storages))), writes=writes, creates=(), after=(),
        rng=False, no_recompute="", key="op",
    )  # fmt: skip
    graph = Graph(
        name="by hand", device="cpu", ops=(op,), tensors=made,
        fingerprint=Fingerprint(torch="2", device="cpu", optimizer="", state="", batch="", ops=""),
        storages=tuple(
            Storage(index=i, name=f"s{i}", kind="activation", size_bytes=size, device="cpu", enters=True, leaves=True)
            for i, size in enumerate(storages)
        ),
    )  # fmt: skip
    values = [Value(tensor=t.index) for t in made] + [Value(tensor=None, hint=hint) for hint in scalars]
    result = Value(tensor=None)
    program = Program(
        inputs=(), values=(*values, result), ops=(Call(target=target, args=args, kwargs={}, results=len(values)),),
        again={}, glue={}, returns=None, gradients=(), reassigned=(), counters=(),
    )  # fmt: skip
    return graph, program, op


def test_inputs_have_the_layouts_of_the_step_and_share_what_it_shares() -> None:
    column = {"storage": 0, "shape": (3,), "stride": (4,), "offset": 1}
    rows = {"storage": 0, "shape": (2, 4), "stride": (4, 1), "offset": 4}
    other = {"storage": 1, "shape": (3,), "stride": (1,)}
    case = op_by_hand(torch.cat, ([Ref(0), Ref(2)], slice(Ref(1), None)), [48, 12], [column, rows, other])
    inputs = made_up_inputs(*case)
    (first, second), cut = inputs.args
    whole = cut.start
    assert (first.shape, first.stride(), first.storage_offset()) == ((3,), (4,), 1)
    assert (whole.shape, whole.stride(), whole.storage_offset()) == ((2, 4), (4, 1), 4)
    assert first.untyped_storage()._cdata == whole.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert first.untyped_storage().nbytes() == 48
    first[1] = 7.0
    assert whole[0, 1] == 7.0


def test_values_are_benign_and_of_every_dtype() -> None:
    dtypes = [
        "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn",
    ]  # fmt: skip
    sizes = [100 * getattr(torch, dtype).itemsize for dtype in dtypes]
    tensors = [{"storage": i, "shape": (100,), "stride": (1,), "dtype": dtype} for i, dtype in enumerate(dtypes)]
    case = op_by_hand(torch.cat, tuple(map(Ref, range(len(dtypes)))), sizes, tensors)
    for made, dtype in zip(made_up_inputs(*case).args, dtypes, strict=True):
        assert made.dtype is getattr(torch, dtype)
        if dtype.startswith("float8"):
            assert not made.float().any()
        elif made.is_floating_point():
            assert 0.25 <= made.min() < made.max() <= 0.75
        elif made.is_complex():
            assert torch.view_as_real(made).min() >= 0.25
        elif dtype == "bool":
            assert 0 < made.sum() < 100
        else:
            assert not made.any()


def test_scalars_are_as_at_capture() -> None:
    tensor = {"storage": 0, "shape": (2,), "stride": (1,)}
    case = op_by_hand(torch.add, (Ref(0), Ref(1), Ref(2), 4), [8], [tensor], scalars=(0.9, None))
    assert made_up_inputs(*case).args[1:] == (0.9, 1.0, 4)


def test_a_storage_of_odd_size_keeps_its_size() -> None:
    case = op_by_hand(torch.neg, (Ref(0),), [11], [{"storage": 0, "shape": (2,), "stride": (1,)}])
    inputs = made_up_inputs(*case)
    assert inputs.args[0].untyped_storage().nbytes() == inputs.size_bytes == 11


def test_an_op_that_writes_starts_every_run_from_the_same_values() -> None:
    seen: list[float] = []

    def shrink(tensor: torch.Tensor, factor: float) -> torch.Tensor:
        seen.append(float(tensor.sum()))
        return tensor.mul_(factor)

    tensor = {"storage": 0, "shape": (64,), "stride": (1,)}
    graph, program, op = op_by_hand(shrink, (Ref(0), 1e-30), [256], [tensor], writes=(0,))
    measure_alone(graph, program, op, repeats=5)
    assert len(seen) > 5
    assert len(set(seen)) == 1


def test_workspace_is_what_an_op_allocates_above_its_outputs() -> None:
    def wasteful(tensor: torch.Tensor) -> None:
        twice = torch.empty(2 * tensor.numel(), dtype=torch.uint8)
        del twice
        torch.empty(tensor.numel(), dtype=torch.uint8)

    case = op_by_hand(wasteful, (Ref(0),), [1000], [{"storage": 0, "shape": (1000,), "stride": (1,), "dtype": "uint8"}])
    assert measure_alone(*case, repeats=5).workspace_bytes == 2000


def test_a_sum_has_no_workspace() -> None:
    pair = [{"storage": i, "shape": (250,), "stride": (1,)} for i in range(2)]
    graph, program, op = op_by_hand(torch.add, (Ref(0), Ref(1)), [1000, 1000, 1000], pair)
    graph = replace(graph, ops=(op := replace(op, reads=(0, 1), creates=(2,)),))
    assert measure_alone(graph, program, op, repeats=5).workspace_bytes == 0


def test_made_up_inputs_draw_from_no_generator_of_the_users() -> None:
    before = torch.get_rng_state()
    case = op_by_hand(torch.neg, (Ref(0),), [4000], [{"storage": 0, "shape": (1000,), "stride": (1,)}], writes=(0,))
    inputs: OpInputs = made_up_inputs(*case)
    inputs.refresh()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_result_that_keeps_a_larger_storage_is_measured_with_it() -> None:
    """The mean of aten.mse_loss is one number on the storage of the whole loss."""
    kept = torch.nn.functional.mse_loss(torch.ones(1000), torch.zeros(1000)).untyped_storage().nbytes()
    job = workloads.perceptron("sgd", rows=64)

    def step(model, optimizer, images, labels):  # type: ignore[no-untyped-def]
        loss = torch.nn.functional.mse_loss(model(images), images[:, :10])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job = tensile.Workload(job.model, job.optimizer, step, job.batch)
    link = Link(out_bytes_per_s=1, in_bytes_per_s=1, out_latency_us=0, in_latency_us=0, duplex_percent=100)
    captured, profile = profile_workload(job, link=link, cache_dir=None, repeats=1)
    loss = next(op for op in captured.graph.ops if "mse_loss.default" in op.call)
    assert profile.excess_bytes[loss.index] == (64 * 10 * 4 - 4 if kept > 4 else 0,)
    problem = build_problem(captured.graph, profile, 10**9)
    assert problem.storages[loss.creates[0]].size_bytes == 4 + profile.excess_bytes[loss.index][0]


def test_an_lstm_is_planned_for_what_it_takes() -> None:
    """Each of its results has a storage of its own size; the workspace among them is larger than its layout."""
    torch.manual_seed(0)
    model = torch.nn.LSTM(16, 32, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, batch):  # type: ignore[no-untyped-def]
        loss = model(batch)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job = tensile.Workload(model, optimizer, step, (torch.randn(16, 20, 16),))
    link = Link(out_bytes_per_s=10**9, in_bytes_per_s=10**9, out_latency_us=0, in_latency_us=0, duplex_percent=100)
    captured, profile = profile_workload(job, link=link, cache_dir=None, repeats=1)
    plan = plan_profiled(captured.graph, profile, name="lstm", budget=parse_budget("100%"), effort=GREEDY)
    result = verify(job, plan, steps=3)
    assert result.first_difference is None
    assert result.planned_peak_bytes <= result.promised_peak_bytes <= 1.05 * profile.eager_peak_bytes
    assert result.promised_peak_bytes <= 1.05 * result.planned_peak_bytes
