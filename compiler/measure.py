"""Op times and workspaces, measured one op at a time on made-up tensors of exactly its layouts.

Measuring needs one op's memory, never the model's. Ops of equal key share a measurement, and what the cache knows is
not measured again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensile.compiler.allocator import allocated_peak
from tensile.compiler.capture import Captured
from tensile.compiler.eager import Eager
from tensile.compiler.graph import Graph, Op
from tensile.compiler.in_place import time_in_place
from tensile.compiler.profile import Link, Profile
from tensile.compiler.profile_cache import Measured, ProfileCache
from tensile.compiler.program import Call, Program, Ref
from tensile.compiler.workload import Workload

_LEAST_S = 0.02  # cheap ops are repeated at least this long
_MOST_REPEATS = 200
_FALLBACK_BYTES_PER_S = 4 * 10**9  # memory traffic assumed for an op that cannot be run alone


def measure(
    captured: Captured, workload: Workload, *, link: Link, eager: Eager, cache_dir: Path | None, repeats: int = 5,
    progress: Callable[[int, int, str], None] | None = None,
) -> Profile:  # fmt: skip
    """The profile of a captured step on this device: medians over at least `repeats` runs of every distinct op.

    Times are taken inside the step where it fits (in_place.py), else from ops alone. The user's tensors are not touched, nor is the random generator.
    """
    graph, program = captured.graph, captured.program
    device = device_name(graph.device)
    cache = ProfileCache(cache_dir, f"{device}, torch {graph.fingerprint.torch}")
    wanted = {op.key: op for op in reversed(graph.ops)}
    new = [op for op in graph.ops if wanted[op.key] is op and cache.get(op.key) is None]
    failed: list[str] = []
    generator = torch.get_rng_state()
    try:
        for done, op in enumerate(new):
            if progress is not None:
                progress(done, len(new), op.call)
            cache.put(op.key, _measured(graph, program, op, repeats, failed))
    finally:
        torch.set_rng_state(generator)
    if new and eager.source == "measured":
        for key, time_ns in time_in_place(captured, workload).items():
            cache.put(key, replace(cache[key], time_ns=time_ns))
    cache.save()
    found = [cache[op.key] for op in graph.ops]
    times = tuple(measured.time_ns for measured in found)
    where = "inside the step" if eager.source == "measured" else "each op alone"
    source = f"measured {where}, medians; {len(new)} of {len(wanted)} distinct ops new"
    if failed:
        source += f"; estimated from their bytes because they cannot run alone: {', '.join(sorted(set(failed)))}"
    if cache.note:
        source += f"; {cache.note}"
    return Profile(
        device_name=device, source=source, op_ns=times,
        workspace_bytes=tuple(measured.workspace_bytes for measured in found), link=link,
        eager_step_us=eager.step_us or sum(times) // 1000,
        eager_peak_bytes=eager.peak_bytes, eager_source=eager.source,
    )  # fmt: skip


def device_name(device: str) -> str:
    """What the device is called, e.g. "AMD EPYC, 2 threads"."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    model = "CPU"
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {torch.get_num_threads()} threads"


def _measured(graph: Graph, program: Program, op: Op, repeats: int, failed: list[str]) -> Measured:
    call = program.ops[op.index]
    try:
        args, kwargs = _made_up(graph, program, call)
        with torch.no_grad():
            call.target(*args, **kwargs)
            times: list[float] = []
            while len(times) < repeats or (sum(times) < _LEAST_S and len(times) < _MOST_REPEATS):
                started = time.perf_counter()
                result = call.target(*args, **kwargs)
                del result
                times.append(time.perf_counter() - started)
            peak, _ = allocated_peak(lambda: call.target(*args, **kwargs))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        failed.append(op.call)
        size = sum(graph.storages[s].size_bytes for s in {*op.reads, *op.writes, *op.creates})
        return Measured(time_ns=10**9 * size // _FALLBACK_BYTES_PER_S, workspace_bytes=0)
    created = sum(graph.storages[s].size_bytes for s in op.creates)
    return Measured(time_ns=int(1e9 * statistics.median(times)), workspace_bytes=max(0, peak - created))


def _made_up(graph: Graph, program: Program, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call: tensors of the same layout and aliasing, benign values, scalars as at capture."""
    storages: dict[int, torch.Tensor] = {}

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        value = program.values[leaf.value]
        if value.tensor is None:
            return 1.0 if value.hint is None else value.hint
        t = graph.tensors[value.tensor]
        dtype = getattr(torch, t.dtype)
        base = storages.get(t.storage)
        if base is None:
            size, device = graph.storages[t.storage].size_bytes, graph.storages[t.storage].device
            base = storages[t.storage] = torch.empty(size, dtype=torch.uint8, device=device)
            flat = base[: size // dtype.itemsize * dtype.itemsize].view(dtype)
            flat.fill_(0.5 if dtype.is_floating_point or dtype.is_complex else dtype is torch.bool)
        empty = torch.empty(0, dtype=dtype, device=base.device)
        return empty.set_(base.untyped_storage(), t.offset, t.shape, t.stride)

    is_ref = lambda leaf: isinstance(leaf, Ref)  # noqa: E731
    args = pytree.tree_map(made, call.args, is_leaf=is_ref)
    kwargs = pytree.tree_map(made, call.kwargs, is_leaf=is_ref)
    return args, kwargs
