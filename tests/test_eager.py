"""The eager step, run or modelled: its peak is right, and nothing of the user's is different afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import workloads
from user_state import everything

import tensile
from tensile.compiler import eager as eager_module
from tensile.compiler import headroom
from tensile.compiler.allocator import allocated_peak, allocated_within
from tensile.compiler.capture import capture
from tensile.compiler.clock import clock_of
from tensile.compiler.eager import measure_eager, model_eager_peak
from tensile.compiler.graph import Graph, Op, Storage
from tensile.compiler.snapshot import resting_bytes, undone
from tensile.schedules.errors import TensileError
from tensile.schedules.plan import Fingerprint

FINGERPRINT = Fingerprint(torch="2", device="cpu", optimizer="", state="", batch="", ops="")


class Eventful(torch.nn.Module):
    """Batch-norm statistics, a buffer bound anew, a counter, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.inner(x)
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y


def eventful(*, trained: bool) -> tensile.Workload:
    """A step that changes all it can: gradients stay, the rate decays, the batch is scaled in place."""
    torch.manual_seed(0)
    model = Eventful()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        x.mul_(1.0 + random.random() + numpy.random.random())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        model.eval() if loss > 1e9 else model.train()
        return loss.detach()

    workload = tensile.Workload(model, optimizer, step, (torch.randn(4, 8),))
    if trained:
        step(model, optimizer, *workload.batch)
    return workload


@pytest.mark.parametrize("trained", [False, True], ids=["before the first step", "after a step"])
def test_a_step_that_is_undone_leaves_every_bit_and_object_as_before(trained: bool) -> None:
    workload = eventful(trained=trained)
    before = everything(workload)
    with undone(workload):
        for _ in range(2):
            workload.step_fn(workload.model, workload.optimizer, *workload.batch)
        assert everything(workload) != before
    assert everything(workload) == before


def test_a_step_that_fails_half_way_is_undone_too_and_named() -> None:
    workload = eventful(trained=True)

    def failing(*args: Any) -> None:
        workload.step_fn(*args)
        raise ValueError("no more data")

    broken = tensile.Workload(workload.model, workload.optimizer, failing, workload.batch)
    before = everything(workload)
    with pytest.raises(TensileError) as caught:
        measure_eager(broken, graph_of([], []))
    assert str(caught.value).splitlines()[0].endswith("the step fails when it is run eagerly: no more data")
    assert caught.value.hint == "run step_fn(model, optimizer, *batch) yourself first"
    assert everything(workload) == before


CASES: dict[str, Callable[[], tensile.Workload]] = {
    "perceptron, Adam, dropout": lambda: workloads.perceptron("adam", dropout=0.1),
    "perceptron, SGD": lambda: workloads.perceptron("sgd", rows=256),
    "GPT-2, AdamW, clipped": lambda: workloads.make("gpt2", "adamw", clip=1.0),
    "GPT-2, gradients zeroed in place": lambda: workloads.make("gpt2", "adam", zero_first=True, set_to_none=False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_modelled_peak_is_within_two_percent_of_the_measured_one(name: str) -> None:
    workload = CASES[name]()
    graph = capture(workload, check_twice=False).graph
    before = everything(workload)
    eager = measure_eager(workload, graph)
    assert everything(workload) == before
    assert eager.source == "measured"
    assert eager.step_us > 0
    assert model_eager_peak(graph) == pytest.approx(eager.peak_bytes, rel=0.02)


def test_a_step_that_would_not_fit_is_modelled_and_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: Any) -> None:
        raise AssertionError("the step ran")

    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(eager_module, "fits", lambda size, device: asked.append((size, device)) or False)
    workload = workloads.perceptron()
    graph = capture(workload, check_twice=False).graph
    eager = measure_eager(tensile.Workload(workload.model, workload.optimizer, never, workload.batch), graph)
    assert (eager.source, eager.step_us, eager.peak_bytes) == ("modelled", 0, model_eager_peak(graph))
    assert asked == [(eager.peak_bytes, "cpu")]


def test_out_of_memory_while_it_runs_is_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    graph = two_updates(None)
    workload = workloads.perceptron()
    eager = measure_eager(tensile.Workload(workload.model, workload.optimizer, greedy, workload.batch), graph)
    assert (eager.source, eager.peak_bytes) == ("modelled", 80)


def test_resting_bytes_count_a_shared_storage_once_and_kept_gradients() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    model.tied = model.weight
    model.register_buffer("first_rows", model.weight.detach()[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = tensile.Workload(model, optimizer, lambda *_: None, (torch.zeros(3), {"more": torch.zeros(2)}))
    assert resting_bytes(workload, "cpu") == 64 + 12 + 8
    model.weight.grad = torch.zeros(4, 4)
    assert resting_bytes(workload, "cpu") == 64 + 12 + 8 + 64


def graph_of(storages: list[tuple[str, int, bool]], ops: list[dict[str, Any]]) -> Graph:
    """A graph by hand: storages (kind or name, bytes, enters and leaves), ops with what differs from nothing."""
    kinds = {"parameter": "parameter", "gradient": "gradient", "batch": "batch"}
    nothing: dict[str, Any] = {
        "call": "aten.add.Tensor", "phase": "forward", "module": "", "source": "", "inputs": (), "outputs": (),
        "reads": (), "writes": (), "creates": (), "after": (), "rng": False, "no_recompute": "", "key": "",
    }  # fmt: skip
    return Graph(
        name="by hand", device="cpu", fingerprint=FINGERPRINT, tensors=(),
        storages=tuple(
            Storage(index=i, name=name, kind=kinds.get(name, "activation"), size_bytes=size, device="cpu",  # type: ignore[arg-type]
                    enters=stays, leaves=stays and name != "batch")
            for i, (name, size, stays) in enumerate(storages)
        ),
        ops=tuple(Op(**(nothing | {"index": i, "name": f"op.{i}"} | op)) for i, op in enumerate(ops)),
    )  # fmt: skip


def two_updates(release_at: int | None) -> Graph:
    """Parameters 0 and 1 (10 each), an activation 2 (40) for both gradients 3 and 4 (10 each), two updates, and an op
    after them that takes 35 for a moment."""
    ops: list[dict[str, Any]] = [
        {"reads": (0, 1), "creates": (2,)},
        {"reads": (2,), "creates": (3,), "phase": "backward"},
        {"reads": (2,), "creates": (4,), "phase": "backward"},
        {"reads": (3,), "writes": (0,), "phase": "optimizer"},
        {"reads": (4,), "writes": (1,), "phase": "optimizer"},
        {"reads": (0,), "creates": (5,), "phase": "optimizer"},
    ]
    if release_at is not None:
        ops[release_at]["release_gradient"] = True
    sizes = [("parameter", 10, True), ("parameter", 10, True), ("a", 40, False), ("g", 10, False), ("g", 10, False)]
    return graph_of([*sizes, ("t", 35, False)], ops)


def test_the_model_keeps_gradients_until_the_end_without_zero_grad() -> None:
    # at op 2: 20 parameters + 40 + 20 gradients; at op 5: 20 + 20 gradients + 35
    assert model_eager_peak(two_updates(None)) == 80
    assert model_eager_peak(two_updates(None), [0, 0, 0, 0, 0, 10]) == 85


def test_the_model_drops_gradients_where_zero_grad_ran() -> None:
    assert model_eager_peak(two_updates(4), [0, 0, 0, 0, 0, 10]) == 80
    assert model_eager_peak(two_updates(4), [0, 0, 0, 0, 0, 26]) == 81


def test_the_model_keeps_the_batch_and_counts_workspaces_at_their_op() -> None:
    graph = graph_of(
        [("batch", 100, True), ("a", 30, False), ("b", 30, False)],
        [{"reads": (0,), "creates": (1,)}, {"reads": (1,), "creates": (2,)}, {"reads": (2,)}],
    )
    assert model_eager_peak(graph) == 160
    assert model_eager_peak(graph, [31, 0, 0]) == 161


def test_the_allocated_peak_counts_what_was_freed_again() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(500, dtype=torch.uint8)
        del first
        return torch.cat([second, second[:100]])

    peak, result = allocated_peak(run)
    assert (peak, result.numel()) == (1500, 600)


def test_spans_are_counted_apart_and_above_their_own_entry() -> None:
    kept = []

    def run(span: Any) -> None:
        kept.append(torch.empty(10_000, dtype=torch.uint8))
        with span(4):
            kept.append(torch.empty(100, dtype=torch.uint8))
            torch.empty(50, dtype=torch.uint8)
            kept.append(torch.empty(20, dtype=torch.uint8))
        kept.append(torch.empty(10_000, dtype=torch.uint8))
        with span(9):
            pass

    assert allocated_within(run) == {4: 150, 9: 0}


def files(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str]) -> None:
    monkeypatch.setattr(headroom, "_lines", lambda file: contents.get(str(file), "").splitlines())


MEMINFO = {"/proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n"}
GROUP_2 = {
    "/proc/self/cgroup": "0::/jobs/mine\n",
    "/sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "/sys/fs/cgroup/jobs/mine/memory.current": "5000\n",
    "/sys/fs/cgroup/jobs/memory.max": "9000\n",
    "/sys/fs/cgroup/jobs/memory.current": "6000\n",
    "/sys/fs/cgroup/jobs/memory.stat": "anon 4000\ninactive_file 2000\n",
}
GROUP_1 = {
    "/proc/self/cgroup": "3:cpu,cpuacct:/jobs\n2:memory:/jobs\n",
    "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "4000\n",
    "/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "1000\n",
}


@pytest.mark.parametrize(
    ("contents", "left"),
    [({}, 2**62), (MEMINFO, 1_024_000), (MEMINFO | GROUP_2, 5000), (MEMINFO | GROUP_1, 3000)],
    ids=["nothing is known", "the system", "a parent control group", "a control group of the first version"],
)
def test_headroom_is_the_least_of_what_limits_the_process(
    monkeypatch: pytest.MonkeyPatch, contents: dict[str, str], left: int
) -> None:
    files(monkeypatch, contents)
    assert headroom.headroom_bytes("cpu") == left
    assert headroom.fits(left * 3 // 4, "cpu")
    assert not headroom.fits(left, "cpu")


def test_this_systems_headroom_is_less_than_its_memory() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("the system does not tell")
    assert 0 < headroom.headroom_bytes("cpu") < 2**50


def test_one_thread_is_timed_by_what_it_computes_and_several_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = clock_of("cpu")
    start = alone.mark()
    time.sleep(0.05)
    assert alone.name == "CPU time"
    assert alone.ns(start, alone.mark()) < 40_000_000
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    together = clock_of("cpu")
    start = together.mark()
    time.sleep(0.05)
    assert together.name == "wall time"
    assert together.ns(start, together.mark()) >= 50_000_000
