"""The unmodified step: how long it takes and how much it holds, run for real, or modelled where it would not fit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tensile.compiler.allocator import allocated_peak, profiler_is_active
from tensile.compiler.clock import clock_of
from tensile.compiler.graph import Graph
from tensile.compiler.headroom import fits
from tensile.compiler.snapshot import resting_bytes, undone
from tensile.compiler.workload import Workload
from tensile.schedules.errors import TensileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """The eager step's time and peak, device bytes at rest included. `step_us` is 0 when it was not run."""

    step_us: int
    peak_bytes: int
    source: Literal["measured", "modelled"]


def measure_eager(workload: Workload, graph: Graph, *, steps: int = 3) -> Eager:
    """Run the user's own step for real; the workload is bit for bit as before afterwards.

    The first step warms up and creates optimizer state, the second gives the allocated peak, the others the median
    time. As in a training loop, what a step returned is held until the next one has ended. A step that would need
    most of the memory that is left is modelled instead, as is one under a profiler.
    Raises TensileError when the step itself fails.
    """
    modelled = Eager(step_us=0, peak_bytes=model_eager_peak(graph), source="modelled")
    # what is at rest is counted though it is there already: the snapshot takes as much again
    if profiler_is_active() or not fits(modelled.peak_bytes, graph.device):
        return modelled
    clock = clock_of(graph.device)

    held: Any = None

    def step() -> None:
        nonlocal held
        held = workload.step_fn(workload.model, workload.optimizer, *workload.batch)

    try:
        with undone(workload):
            allocated_peak(step, graph.device)
            resting = resting_bytes(workload, graph.device, held)
            above, _ = allocated_peak(step, graph.device)
            times = []
            for _ in range(steps):
                started = clock.mark()
                step()
                ended = clock.mark()
                clock.settle()
                times.append(clock.ns(started, ended))
    except torch.OutOfMemoryError:
        return modelled
    except (RuntimeError, ValueError, TypeError) as error:
        raise TensileError(
            f"the step fails when it is run eagerly: {error}",
            hint="run step_fn(model, optimizer, *batch) yourself first",
        ) from error
    return Eager(step_us=round(statistics.median(times) / 1000), peak_bytes=resting + above, source="measured")


def model_eager_peak(
    graph: Graph, workspace_bytes: Sequence[int] | None = None, excess_bytes: Sequence[tuple[int, ...]] | None = None
) -> int:  # fmt: skip
    """Bytes eager holds at its worst op, with the ops' workspaces and what their results take above their layouts.

    Gradients live until zero_grad ran, in this step or the next, everything else until its last use; the caller holds
    what the last step returned. What the user's own variables hold longer is not known here."""
    end = len(graph.ops)
    release = next((op.index for op in graph.ops if op.release_gradient), None)
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for op in graph.ops:
        born |= dict.fromkeys(op.creates, op.index)
        last |= dict.fromkeys((*op.reads, *op.writes, *op.creates), op.index)
    gradients = _gradients(graph)
    size = [storage.size_bytes for storage in graph.storages]
    for op, extra in zip(graph.ops, excess_bytes or (), strict=False):
        for created, more in zip(op.creates, extra, strict=False):
            size[created] += more
    change = [0] * (end + 2)
    for storage in graph.storages:
        if storage.device != graph.device:
            continue
        if not storage.enters and storage.index not in born:
            continue
        dies = end
        if not storage.leaves and storage.kind != "batch":
            dies = last.get(storage.index, -1)
            if storage.kind == "gradient" and storage.enters:
                dies = max(dies, -1 if release is None else release)
            elif storage.index in gradients:
                dies = max(dies, end if release is None else release)
        change[born.get(storage.index, 0)] += size[storage.index]
        change[dies + 1] -= size[storage.index]
        if storage.leaves and not storage.enters and storage.kind == "output":
            change[0] += size[storage.index]
        if storage.leaves and not storage.enters and storage.kind == "gradient" and release is not None:
            change[0] += size[storage.index]
            change[release + 1] -= size[storage.index]
    level = peak = 0
    for index in range(end):
        level += change[index]
        peak = max(peak, level + (workspace_bytes[index] if workspace_bytes is not None else 0))
    return peak


def _gradients(graph: Graph) -> set[int]:
    """Storages made in backward that the optimizer reads: parameters' gradients."""
    made = {s for op in graph.ops if op.phase == "backward" for s in op.creates}
    return {s for op in graph.ops if op.phase == "optimizer" for s in op.reads} & made
