"""Eager and planned training from one snapshot, every bit compared."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensile.compiler.live import collect_state
from tensile.compiler.workload import Workload
from tensile.runtime.memory import MemoryPolicy, allocated_peak
from tensile.runtime.session import load
from tensile.schedules.plan import Plan
from tensile.schedules.units import format_bytes, format_us

_Bits = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What both runs did. `first_difference` names the first thing whose bits differ, None when all are equal; `ok` is
    that, and a measured peak within the promise."""

    steps: int
    first_difference: str | None
    promised_peak_bytes: int
    planned_peak_bytes: int
    eager_peak_bytes: int
    planned_step_us: float
    eager_step_us: float
    applied: str

    @property
    def ok(self) -> bool:
        return self.first_difference is None and self.planned_peak_bytes <= self.promised_peak_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        bits = "yes" if self.first_difference is None else f"NO, first in {self.first_difference}"
        return "\n".join([
            f"{self.steps} steps: losses, gradients, parameters, buffers, optimizer state and generator equal: {bits}",
            f"peak: eager {format_bytes(self.eager_peak_bytes)}, promised {format_bytes(self.promised_peak_bytes)}, "
            f"measured {format_bytes(self.planned_peak_bytes)}",
            f"step: eager {format_us(self.eager_step_us)}, planned {format_us(self.planned_step_us)} "
            f"({self.planned_step_us / self.eager_step_us:.2f} of eager)",
            self.applied,
        ])  # fmt: skip


def verify(
    workload: Workload, plan: Plan, *, steps: int = 4, change_lr: bool = True, spill_dir: Path | None = None,
    memory_policy: MemoryPolicy = "none",
) -> Verification:  # fmt: skip
    """Train `steps` steps eagerly, go back, train as many under the plan, and compare bit by bit after every step.

    The learning rate changes at every step when `change_lr`. The workload ends as it began. It takes at least three,
    because the planned peak is measured in the third. Raises what loading and running the plan raises.
    """
    if steps < 3:
        raise ValueError(f"verify takes at least 3 steps, not {steps}")
    model, optimizer, batch = workload.model, workload.optimizer, tuple(workload.batch)
    start = _Snapshot(model, optimizer)

    def eager(*args: Any) -> Any:
        return workload.step_fn(model, optimizer, *args)

    with _rates_restored(optimizer):
        eager_peak = [0]
        eager_us: list[float] = []
        want = list(_train(eager, model, optimizer, batch, steps, change_lr, eager_us, eager_peak))
    start.restore(model, optimizer)
    resting = _bytes_at_rest(model, optimizer, batch, want[0])
    with (
        _rates_restored(optimizer),
        load(plan, model=model, optimizer=optimizer, step_fn=workload.step_fn, spill_dir=spill_dir,
             memory_policy=memory_policy) as step,
    ):  # fmt: skip
        planned_us: list[float] = []
        difference = None
        for number, have in enumerate(
            _train(step, model, optimizer, batch, steps, change_lr, planned_us, None, step.resident)
        ):
            difference = difference or _first_difference(want[number], have, number)
        report = step.report()
    start.restore(model, optimizer)
    return Verification(
        steps=steps, first_difference=difference, promised_peak_bytes=plan.promise.peak_bytes,
        planned_peak_bytes=report.measured_peak_bytes or 0, eager_peak_bytes=resting + eager_peak[0],
        planned_step_us=statistics.median(planned_us), eager_step_us=statistics.median(eager_us),
        applied=report.applied,
    )  # fmt: skip


def _train(
    step: Callable[..., Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...],
    steps: int, change_lr: bool, times_us: list[float], peak: list[int] | None,
    whole: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[_Bits]:  # fmt: skip
    """The bits after each step. `whole` makes the state readable; `peak[0]` becomes the third step's allocated peak."""
    for number in range(steps):
        if change_lr:
            for group in optimizer.param_groups:
                _set_rate(group, group["lr"] * (0.9 + 0.05 * number))
        started = time.perf_counter()
        if peak is not None and number in (1, 2):
            peak[0], result = allocated_peak(lambda: step(*batch))
        else:
            result = step(*batch)
        if number != 1:
            times_us.append(1e6 * (time.perf_counter() - started))
        with whole():
            yield _bits(model, optimizer, result)
        del result


class _Snapshot:
    """Everything a step may change, copied."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._tensors = {name: tensor.detach().clone() for name, tensor in collect_state(model, optimizer).items()}
        self._had_state = {id(parameter): set(entries) for parameter, entries in optimizer.state.items()}
        self._gradients = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
        self._generator = torch.get_rng_state()

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in list(optimizer.state):
            known = self._had_state.get(id(parameter))
            if known is None:
                del optimizer.state[parameter]
                continue
            for key in set(optimizer.state[parameter]) - known:
                del optimizer.state[parameter][key]
        with torch.no_grad():
            for name, tensor in collect_state(model, optimizer).items():
                tensor.copy_(self._tensors[name])
        for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        torch.set_rng_state(self._generator)


def _bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer, result: Any) -> _Bits:
    leaves = [
        leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf, dtype=torch.float64)
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, (torch.Tensor, int, float))
    ]
    found: _Bits = {f"result {number}": _copy(leaf) for number, leaf in enumerate(leaves)}
    found |= {name: _copy(tensor) for name, tensor in collect_state(model, optimizer).items()}
    found |= {
        f"{name}.grad": None if parameter.grad is None else _copy(parameter.grad)
        for name, parameter in model.named_parameters()
    }
    return found | {"the random generator": torch.get_rng_state()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _first_difference(want: _Bits, have: _Bits, number: int) -> str | None:
    for name in (*want, *(have.keys() - want.keys())):
        a, b = want.get(name), have.get(name)
        if (a is None) != (b is None):
            return f"{name} after step {number + 1}: {'missing' if b is None else 'unexpected'}"
        if a is not None and b is not None and not same_bits(a, b):
            return f"{name} after step {number + 1}"
    return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape and dtype; NaN equals itself, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.detach().contiguous().reshape(-1) for t in (a, b)]
    return a.numel() == 0 or torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


def _bytes_at_rest(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...], after_step: _Bits
) -> int:
    """Bytes of parameters, buffers, batch and, from the bits after a step, of optimizer state and gradients left."""
    tensors = [*collect_state(model, optimizer).values(), *(t for t in pytree.tree_leaves(batch) if torch.is_tensor(t))]
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    known = set(collect_state(model, optimizer))
    born = sum(t.nbytes for name, t in after_step.items() if t is not None and "/" in name and name not in known)
    gradients = sum(t.nbytes for name, t in after_step.items() if t is not None and name.endswith(".grad"))
    return sum(held.values()) + born + gradients


@contextlib.contextmanager
def _rates_restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    rates = [
        group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """As learning-rate schedulers do it: a rate that is a tensor changes in place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate
