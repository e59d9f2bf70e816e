"""The unmodified step: how long it takes and how much it holds, run for real, or modelled where it would not fit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from tensile.compiler.allocator import allocated_peak, profiler_is_active
from tensile.compiler.graph import Graph
from tensile.compiler.live import collect_state
from tensile.compiler.workload import Workload
from tensile.schedules.errors import TensileError

_FITS_SHARE = 0.8  # of the memory that is free: an eager step modelled above it is not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """The eager step's time and peak, device bytes at rest included. `step_us` is 0 when it was not run."""

    step_us: int
    peak_bytes: int
    source: Literal["measured", "modelled"]


def measure_eager(workload: Workload, graph: Graph, *, steps: int = 3) -> Eager:
    """Run the user's own step for real; the workload is bit for bit as before afterwards.

    Two steps warm up (the first one creates optimizer state); then the median time of `steps`, and the allocated peak
    of one more. A step that would need most of the machine's free memory is modelled instead.
    """
    modelled = model_eager_peak(graph)
    if modelled > _FITS_SHARE * _available_bytes() or profiler_is_active():
        return Eager(step_us=0, peak_bytes=modelled, source="modelled")
    model, optimizer, batch = workload.model, workload.optimizer, tuple(workload.batch)

    def step() -> Any:
        return workload.step_fn(model, optimizer, *batch)

    try:
        with _undone(model, optimizer):
            times = []
            for number in range(1 + steps):
                started = time.perf_counter()
                step()
                if number:
                    times.append(time.perf_counter() - started)
            allocated_peak(step)
            base = _resting_bytes(model, optimizer, batch)
            above, _ = allocated_peak(step)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TensileError(
            f"the step fails when it is run eagerly: {error}", hint="run step_fn(model, optimizer, *batch) yourself first"
        ) from error
    return Eager(step_us=int(1e6 * statistics.median(times)), peak_bytes=base + above, source="measured")


def model_eager_peak(graph: Graph) -> int:
    """Bytes eager holds at its worst op, workspaces aside: gradients live until zero_grad ran or the step ends, the
    rest until its last use."""
    end = len(graph.ops)
    release = next((op.index for op in graph.ops if op.release_gradient), end)
    last: dict[int, int] = {}
    for op in graph.ops:
        last |= dict.fromkeys((*op.reads, *op.writes, *op.creates), op.index)
    gradients = _gradients(graph)
    change = [0] * (end + 2)
    for storage in graph.storages:
        if storage.device != graph.device:
            continue
        if storage.enters:
            change[0] += storage.size_bytes
            continue
        born = next((op.index for op in graph.ops if storage.index in op.creates), None)
        if born is None:
            continue
        dies = end if storage.leaves else last[storage.index]
        if storage.index in gradients:
            dies = max(dies, release)
        change[born] += storage.size_bytes
        change[dies + 1] -= storage.size_bytes
    level = peak = 0
    for step in change[:end]:
        level += step
        peak = max(peak, level)
    return peak


def _gradients(graph: Graph) -> set[int]:
    """Storages made in backward that the optimizer reads: parameters' gradients."""
    made = {s for op in graph.ops if op.phase == "backward" for s in op.creates}
    return {s for op in graph.ops if op.phase == "optimizer" for s in op.reads} & made


@contextmanager
def _undone(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Parameters, buffers, optimizer state, gradients and the generator are afterwards as before."""
    saved = {name: tensor.detach().clone() for name, tensor in collect_state(model, optimizer).items()}
    had = {id(parameter): set(entries) for parameter, entries in optimizer.state.items()}
    gradients = [(p, None if p.grad is None else p.grad.detach().clone()) for p in model.parameters()]
    generator = torch.get_rng_state()
    try:
        yield
    finally:
        for parameter in list(optimizer.state):
            if id(parameter) not in had:
                del optimizer.state[parameter]
        with torch.no_grad():
            for name, tensor in collect_state(model, optimizer).items():
                tensor.copy_(saved[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        torch.set_rng_state(generator)


def _resting_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> int:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [*collect_state(model, optimizer).values(), *gradients, *filter(torch.is_tensor, pytree.tree_leaves(batch))]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _available_bytes() -> int:
    """Memory the system could still hand out; a lot where that cannot be told."""
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return 2**62


