"""Op times and workspaces one op at a time, on made-up inputs: for steps that do not fit into memory.

Measuring needs one op's memory, never the model's. Two things make an op alone as slow as it is in a step: its small
inputs are thrown out of the cache before every run, and its values are not all the same.
"""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tensile.compiler.allocator import allocated_peak
from tensile.compiler.clock import Clock, clock_of
from tensile.compiler.facts import ValueFact
from tensile.compiler.graph import Graph, Op
from tensile.compiler.op_inputs import OpInputs, made_up_inputs
from tensile.compiler.profile_cache import Measured
from tensile.compiler.program import Program

_LEAST_S = 0.02  # an op that takes less than this for all repeats is repeated more
_MOST_REPEATS = 30
_COLD_FROM_BYTES = 2**16  # smaller inputs are taken to be in the cache
_CACHE_BYTES = 2**25  # size of the last-level cache where the system does not tell it
_CHECK_NS = 1000  # a relation between two Python numbers

_ROUNDING_BYTES = {"cuda": 512}  # what the device's allocator rounds a size up to


def measure_alone(graph: Graph, program: Program, op: Op, *, repeats: int) -> Measured:
    """Median time of an op over at least `repeats` runs, and what it allocates above its inputs and outputs.

    Nothing of the user's is read, but ops that draw consume the default generator: the caller restores it.
    Raises what the op raises when made-up values do not suit it.
    """
    call = program.ops[op.index]
    if isinstance(call.target, ValueFact):
        return Measured(time_ns=_CHECK_NS, workspace_bytes=0, in_step=False)
    inputs = made_up_inputs(graph, program, op)
    clock = clock_of(graph.device)
    with torch.no_grad():
        excess = excess_bytes(graph, program, op, call.target(*inputs.args, **inputs.kwargs))
        times: list[int] = []
        until = time.perf_counter() + _LEAST_S
        while len(times) < repeats or (time.perf_counter() < until and len(times) < _MOST_REPEATS):
            times.append(_one_run(call.target, inputs, clock, graph.device))
        inputs.refresh()
        peak, _ = allocated_peak(lambda: call.target(*inputs.args, **inputs.kwargs), graph.device)
    return Measured(
        time_ns=int(statistics.median(times)), workspace_bytes=max(0, peak - created_bytes(graph, op) - sum(excess)),
        in_step=False, excess_bytes=excess,
    )  # fmt: skip


def created_bytes(graph: Graph, op: Op) -> int:
    """What an op's new storages take on the planned device, as its allocator counts."""
    rounding = _ROUNDING_BYTES.get(torch.device(graph.device).type, 1)
    sizes = (graph.storages[s].size_bytes for s in op.creates if graph.storages[s].device == graph.device)
    return sum(-(-size // rounding) * rounding for size in sizes)


def excess_bytes(graph: Graph, program: Program, op: Op, result: Any) -> tuple[int, ...]:
    """What the real storages of an op's results take above what their layouts ask for, in the order of `op.creates`."""
    found = dict.fromkeys(op.creates, 0)
    if not found:
        return ()
    numbers = program.ops[op.index].results
    pairs = [(numbers, result)] if isinstance(numbers, int) else zip(numbers, result, strict=False)
    for number, tensor in pairs:
        index = None if number is None else program.values[number].tensor
        storage = None if index is None else graph.tensors[index].storage
        if storage in found and isinstance(tensor, torch.Tensor):
            real = tensor.untyped_storage().nbytes()
            found[storage] = max(found[storage], real - graph.storages[storage].size_bytes)
    return tuple(found.values())


def _one_run(target: object, inputs: OpInputs, clock: Clock, device: str) -> int:
    assert callable(target)
    inputs.refresh()
    if inputs.size_bytes >= _COLD_FROM_BYTES:
        _other_memory(device).sum()
    started = clock.mark()
    result = target(*inputs.args, **inputs.kwargs)
    del result
    ended = clock.mark()
    clock.settle()
    return clock.ns(started, ended)


@functools.cache
def _other_memory(device: str) -> torch.Tensor:
    """Twice the last-level cache: reading it throws out everything else."""
    size = _CACHE_BYTES
    if torch.device(device).type == "cpu":
        try:
            text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
            size = int(text.removesuffix("K")) * 1024
        except (OSError, ValueError):
            pass
    return torch.ones(2 * size // 4, dtype=torch.float32, device=device)
