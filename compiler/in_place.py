"""Op times where they happen: the captured step run op by op on copies of the user's state, each op timed.

Alone, an op finds its inputs in the cache and its outputs in memory already mapped; inside a step it does not. Where
the step fits, its ops are timed inside it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensile.compiler.capture import Captured
from tensile.compiler.live import collect_state
from tensile.compiler.program import Call, Program, Ref
from tensile.compiler.workload import Workload


def time_in_place(captured: Captured, workload: Workload, *, passes: int = 4) -> dict[str, int]:
    """Median nanoseconds of every distinct op over `passes` steps, the first not counted. Needs the eager step's memory
    and a copy of the state; the user's tensors and the generator stay as they are."""
    graph, program = captured.graph, captured.program
    schedule = _schedule(program)
    state = _copies(captured, workload)
    leaves = pytree.tree_leaves(tuple(workload.batch))
    found: dict[str, list[float]] = defaultdict(list)
    generator = torch.get_rng_state()
    try:
        with torch.no_grad():
            for number in range(passes):
                values = {entry.value: _input(entry, state, leaves, workload) for entry in program.inputs}
                for op, call, dead in schedule:
                    args, kwargs = _filled(call.args, values), _filled(call.kwargs, values)
                    started = time.perf_counter()
                    result = call.target(*args, **kwargs)
                    elapsed = time.perf_counter() - started
                    if isinstance(call.results, int):
                        values[call.results] = result
                    else:
                        values |= {v: r for v, r in zip(call.results, result, strict=False) if v is not None}
                    # giving memory back takes time too, as it does in the step
                    started = time.perf_counter()
                    del result, args, kwargs
                    for value in dead:
                        values.pop(value, None)
                    elapsed += time.perf_counter() - started
                    if op is not None and number:
                        found[graph.ops[op].key].append(elapsed)
    finally:
        torch.set_rng_state(generator)
    return {key: int(1e9 * statistics.median(times)) for key, times in found.items()}


def _schedule(program: Program) -> list[tuple[int | None, Call, tuple[int, ...]]]:
    """(op or None for glue, call, values dead after it) in captured order, glue right before its first use."""
    order: list[tuple[int | None, Call]] = []
    ready = {entry.value for entry in program.inputs}

    def need(value: int) -> None:
        if value not in ready:
            emit(None, program.glue[value])

    def emit(op: int | None, call: Call) -> None:
        for used in _values_in((call.args, call.kwargs)):
            need(used)
        order.append((op, call))
        ready.update([call.results] if isinstance(call.results, int) else [v for v in call.results if v is not None])

    for index, call in enumerate(program.ops):
        emit(index, call)
    last: dict[int, int] = {}
    for place, (_, call) in enumerate(order):
        results = [call.results] if isinstance(call.results, int) else [v for v in call.results if v is not None]
        last |= dict.fromkeys([*_values_in((call.args, call.kwargs)), *results], place)
    dead: dict[int, list[int]] = defaultdict(list)
    for value, place in last.items():
        dead[place].append(value)
    return [(op, call, tuple(dead[place])) for place, (op, call) in enumerate(order)]


def _copies(captured: Captured, workload: Workload) -> dict[str, torch.Tensor]:
    """Copies of the state by name; optimizer state and gradients that do not exist yet are zeros."""
    live = collect_state(workload.model, workload.optimizer)
    copies: dict[str, torch.Tensor] = {}
    for entry in captured.program.inputs:
        index = captured.program.values[entry.value].tensor
        if entry.kind in ("batch", "constant") or index is None:
            continue
        facts = captured.graph.tensors[index]
        device = captured.graph.storages[facts.storage].device
        blank = torch.empty_strided(facts.shape, facts.stride, dtype=getattr(torch, facts.dtype), device=device)
        known = live.get(entry.name)
        copies[entry.name] = blank.zero_() if known is None else blank.copy_(known.detach())
    return copies


def _input(entry: Any, state: dict[str, torch.Tensor], leaves: list[Any], workload: Workload) -> Any:
    match entry.kind:
        case "batch":
            return leaves[entry.leaf]
        case "constant":
            return entry.tensor
        case "hyper":
            value = workload.optimizer.param_groups[entry.group][entry.key]
            return value if entry.item is None else value[entry.item]
        case _:
            return state[entry.name]


def _values_in(arguments: Any) -> list[int]:
    found: list[int] = []
    _filled(arguments, None, found)
    return found


def _filled(argument: Any, values: dict[int, Any] | None, found: list[int] | None = None) -> Any:
    """The argument with every Ref replaced by its value; `found` collects the Refs met instead."""
    if isinstance(argument, Ref):
        if found is not None:
            found.append(argument.value)
        return None if values is None else values[argument.value]
    if isinstance(argument, list):
        return [_filled(a, values, found) for a in argument]
    if isinstance(argument, tuple):
        return tuple(_filled(a, values, found) for a in argument)
    if isinstance(argument, dict):
        return {k: _filled(a, values, found) for k, a in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_filled(a, values, found) for a in (argument.start, argument.stop, argument.step)))
    return argument
