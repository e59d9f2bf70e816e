"""The profile of a captured step: op times and workspaces by distinct op, measured inside the step or one by one.

Ops of equal key share a measurement, and what the cache knows is not measured again.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch

from tensile.compiler.alone import created_bytes, measure_alone
from tensile.compiler.capture import Captured
from tensile.compiler.clock import clock_of
from tensile.compiler.eager import Eager, model_eager_peak
from tensile.compiler.graph import Graph, Op
from tensile.compiler.headroom import fits
from tensile.compiler.in_step import time_in_step
from tensile.compiler.profile import Link, Profile
from tensile.compiler.profile_cache import Measured, ProfileCache
from tensile.compiler.program import Program
from tensile.compiler.snapshot import generators_kept
from tensile.compiler.workload import Workload

_ASSUMED_BYTES_PER_S = 4 * 10**9  # memory traffic of an op that cannot be run alone

Progress = Callable[[int, int, str], None]


def measure(
    captured: Captured, workload: Workload, *, link: Link, eager: Eager, cache_dir: Path | None, repeats: int = 5,
    setting: str = "", progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """The profile of a captured step on this device: medians over `repeats` runs, by distinct op.

    A step that fits is run op by op, in turn with the user's own, so that both are timed under the same conditions; of
    one that does not, the new ops are run alone on made-up tensors of their layouts. `cache_dir=None` keeps nothing.
    `setting` names what else the times depend on, such as a malloc policy of this process; settings are cached apart,
    and the eager time is then the one of `eager`, which may have been taken without it.
    The workload and the generators are bit for bit as before afterwards.
    """
    graph, program = captured.graph, captured.program
    watch = progress or (lambda _done, _total, _text: None)
    device = device_name(graph.device)
    cache = ProfileCache(cache_dir, ", ".join(filter(None, (device, f"torch {torch.__version__}", setting))))
    distinct = {op.key: op for op in reversed(graph.ops)}
    in_step = eager.source == "measured" and fits(eager.peak_bytes + _changed_bytes(graph), graph.device)
    new = [op for op in reversed(distinct.values()) if not _known(cache.get(op.key), in_step)]
    how, eager_us, estimated = "measured by an earlier compile", eager.step_us, ""
    if new and in_step:
        times = time_in_step(captured, workload, repeats=repeats, progress=watch)
        for key, measured in times.ops.items():
            cache.put(key, measured)
        eager_us = eager.step_us if setting else times.eager_us
        how = f"measured inside the step, {clock_of(graph.device).name}, medians of {times.passes} passes"
    elif new:
        how = f"measured one op at a time, {clock_of(graph.device).name}, medians of {repeats} runs or more"
        estimated = _measure_each(graph, program, new, cache, repeats, watch)
    cache.save()
    found = [cache[op.key] for op in graph.ops]
    workspace_bytes = tuple(measured.workspace_bytes for measured in found)
    excess_bytes = tuple(measured.excess_bytes for measured in found)
    op_ns = tuple(measured.time_ns for measured in found)
    modelled = model_eager_peak(graph, workspace_bytes, excess_bytes)
    peak_bytes = eager.peak_bytes if eager.source == "measured" else modelled
    source = f"{how}; {len(new)} of {len(distinct)} distinct ops new"
    return Profile(
        device_name=device, source="; ".join(filter(None, (source, estimated, cache.note))), op_ns=op_ns,
        workspace_bytes=workspace_bytes, link=link,
        excess_bytes=excess_bytes, eager_step_us=eager_us or sum(op_ns) // 1000,
        eager_peak_bytes=peak_bytes, eager_source=eager.source,
    )  # fmt: skip


def device_name(device: str) -> str:
    """What the device is called, e.g. "AMD EPYC, 2 threads"."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    model = f"{platform.machine()} CPU"
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def _known(measured: Measured | None, in_step: bool) -> bool:
    """Whether a kept time will do: one taken alone is replaced where the step fits."""
    return measured is not None and (measured.in_step or not in_step)


def _changed_bytes(graph: Graph) -> int:
    """What the step changes of what it finds: copied before the step is run op by op."""
    changed = {storage for op in graph.ops for storage in op.writes}
    return sum(s.size_bytes for s in graph.storages if s.enters and s.index in changed and s.device == graph.device)


def _measure_each(
    graph: Graph, program: Program, ops: list[Op], cache: ProfileCache, repeats: int, watch: Progress
) -> str:  # fmt: skip
    """Measure ops alone into the cache; returns what had to be estimated, "" if nothing. Estimates are not kept for
    the next compile, and never zero: memory traffic at an assumed rate, the outputs once more as workspace, and
    results that keep a storage as large as the op's largest input."""
    failed: dict[str, None] = {}
    with generators_kept():
        for done, op in enumerate(ops):
            watch(done, len(ops), op.call)
            try:
                cache.put(op.key, measure_alone(graph, program, op, repeats=repeats))
            except (RuntimeError, ValueError, TypeError, LookupError, AssertionError):
                failed[op.call] = None
                cache.assume(op.key, _estimate(graph, op))
    names = ", ".join(failed)
    return f"estimated from their bytes, because they cannot run on made-up values: {names}" if failed else ""


def _estimate(graph: Graph, op: Op) -> Measured:
    touched = sum(graph.storages[s].size_bytes for s in {*op.reads, *op.writes, *op.creates})
    largest = max((graph.storages[s].size_bytes for s in op.reads), default=0)
    return Measured(
        time_ns=10**9 * touched // _ASSUMED_BYTES_PER_S + 1000, workspace_bytes=created_bytes(graph, op), in_step=False,
        excess_bytes=tuple(max(0, largest - graph.storages[s].size_bytes) for s in op.creates),
    )  # fmt: skip
