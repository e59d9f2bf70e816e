"""Op times where they happen: the captured step run op by op, each op timed, in turn with the user's own step.

Alone, an op finds memory that is mapped and inputs made up for it; inside a step it does not. Taking both times in turn
lets a machine that others use slow both down alike, so that the ops' sum stays comparable with the eager step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensile.compiler.allocator import Span, allocated_within
from tensile.compiler.alone import created_bytes, excess_bytes
from tensile.compiler.capture import Captured
from tensile.compiler.clock import Clock, clock_of
from tensile.compiler.profile_cache import Measured
from tensile.compiler.program import Call, Input, Program, replace_refs
from tensile.compiler.snapshot import undone
from tensile.compiler.workload import Workload

_MOST_NS = 20 * 10**9  # passes of a slow step are fewer, so that timing them takes about this long
_FEWEST_PASSES = 3

_Marks = tuple[int, Any, Any, Any, Any]  # op, then the clock's marks: start, called, dropping, end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Every distinct op by key, the eager step timed in turn with them, and how many passes there were."""

    ops: dict[str, Measured]
    eager_us: int
    passes: int


def time_in_step(
    captured: Captured, workload: Workload, *, repeats: int, progress: Callable[[int, int, str], None]
) -> StepTimes:
    """Medians over `repeats` passes (three for a step of seconds), workspaces from a first pass that is not timed.

    Needs the eager step's memory and two copies of what the step changes. The workload is as before afterwards.
    """
    graph = captured.graph
    clock = clock_of(graph.device)
    marks: list[_Marks] = []
    eager_ns: list[int] = []
    with undone(workload):
        replay = _Replay(captured, workload)
        progress(0, 1 + repeats, "workspaces")
        peaks = allocated_within(replay.run_in_spans, graph.device)
        passes = repeats
        done = 0
        while done < passes:
            progress(1 + done, 1 + passes, "op times")
            started = clock.mark()
            workload.step_fn(workload.model, workload.optimizer, *workload.batch)
            ended = clock.mark()
            replay.run_timed(clock, marks)
            clock.settle()
            eager_ns.append(clock.ns(started, ended))
            done += 1
            passes = min(repeats, max(_FEWEST_PASSES, _MOST_NS // (2 * max(1, eager_ns[0]))))
    times: dict[int, list[int]] = defaultdict(list)
    for op_index, start, called, dropping, end in marks:
        times[op_index].append(clock.ns(start, called) + clock.ns(dropping, end))
    # the mean of the ops' medians, not the median of all: equal ops at a warm and at a cold place keep their sum
    medians: dict[str, list[float]] = defaultdict(list)
    for op_index, ns in times.items():
        medians[graph.ops[op_index].key].append(statistics.median(ns))
    workspace: dict[str, int] = {}
    excess: dict[str, tuple[int, ...]] = {}
    for op in graph.ops:
        above = max(0, peaks.get(op.index, 0) - created_bytes(graph, op) - sum(replay.excess[op.index]))
        workspace[op.key] = max(above, workspace.get(op.key, 0))
        here = replay.excess[op.index]
        excess[op.key] = tuple(map(max, here, excess.get(op.key, here)))
    ops = {
        key: Measured(
            time_ns=round(statistics.mean(ns)), workspace_bytes=workspace[key], in_step=True, excess_bytes=excess[key]
        )
        for key, ns in medians.items()
    }
    return StepTimes(ops=ops, eager_us=round(statistics.median(eager_ns) / 1000), passes=done)


class _Replay:
    """The captured step over copies of what it changes; every run goes on from where the last one ended."""

    def __init__(self, captured: Captured, workload: Workload) -> None:
        self._schedule = _schedule(captured.program)
        self._inputs = _inputs(captured, workload)
        self._captured = captured
        self.excess: dict[int, tuple[int, ...]] = {}  # by op; known after `run_in_spans`

    def run_timed(self, clock: Clock, marks: list[_Marks]) -> None:
        """One step; the marks of every op. Giving memory back belongs to the op that used it
        last, as it does in a step."""
        with torch.no_grad():
            values = dict(self._inputs)
            for op, call, dead in self._schedule:
                args, kwargs = _filled(call, values)
                start = clock.mark()
                result = call.target(*args, **kwargs)
                called = clock.mark()
                _bind(values, call, result)
                dropping = clock.mark()
                del result, args, kwargs
                for value in dead:
                    values.pop(value, None)
                if op is not None:
                    marks.append((op, start, called, dropping, clock.mark()))

    def run_in_spans(self, span: Span) -> None:
        """One step, every op inside a span of its number."""
        with torch.no_grad():
            values = dict(self._inputs)
            for op, call, dead in self._schedule:
                args, kwargs = _filled(call, values)
                if op is None:
                    result = call.target(*args, **kwargs)
                else:
                    with span(op):
                        result = call.target(*args, **kwargs)
                    graph = self._captured.graph
                    self.excess[op] = excess_bytes(graph, self._captured.program, graph.ops[op], result)
                _bind(values, call, result)
                del result, args, kwargs
                for value in dead:
                    values.pop(value, None)


def _schedule(program: Program) -> list[tuple[int | None, Call, tuple[int, ...]]]:
    """(op or None for glue, call, values dead after it) in captured order, glue right before its first use."""
    order: list[tuple[int | None, Call]] = []
    ready = {entry.value for entry in program.inputs}

    def emit(op: int | None, call: Call) -> None:
        for used in _values_in((call.args, call.kwargs)):
            if used not in ready:
                emit(None, program.glue[used])
        order.append((op, call))
        ready.update(_results(call))

    for index, call in enumerate(program.ops):
        emit(index, call)
    last: dict[int, int] = {}
    for place, (_, call) in enumerate(order):
        last |= dict.fromkeys([*_values_in((call.args, call.kwargs)), *_results(call)], place)
    dead: dict[int, list[int]] = defaultdict(list)
    for value, place in last.items():
        dead[place].append(value)
    return [(op, call, tuple(dead[place])) for place, (op, call) in enumerate(order)]


def _inputs(captured: Captured, workload: Workload) -> dict[int, Any]:
    """A value for every input: the live tensor where the step only reads its storage, a copy where it writes.

    Inputs that share a storage share its copy. Optimizer state and gradients that do not exist yet are zeros.
    """
    graph, program = captured.graph, captured.program
    written = {storage for op in graph.ops for storage in op.writes}
    leaves = pytree.tree_leaves(tuple(workload.batch))
    copies: dict[int, torch.UntypedStorage] = {}
    found: dict[int, Any] = {}
    for entry in program.inputs:
        index = program.values[entry.value].tensor
        live = _live(entry, captured.state, leaves, workload)
        if index is None:
            found[entry.value] = live
            continue
        layout = graph.tensors[index]
        if live is not None and layout.storage not in written:
            found[entry.value] = live.detach()
            continue
        if layout.storage not in copies:
            facts = graph.storages[layout.storage]
            fresh = torch.empty(facts.size_bytes, dtype=torch.uint8, device=facts.device).zero_().untyped_storage()
            copies[layout.storage] = fresh if live is None else live.untyped_storage().clone()
        empty = torch.empty(0, dtype=getattr(torch, layout.dtype), device=graph.storages[layout.storage].device)
        found[entry.value] = empty.set_(copies[layout.storage], layout.offset, layout.shape, layout.stride)
    return found


def _live(entry: Input, state: dict[str, torch.Tensor], leaves: list[Any], workload: Workload) -> Any:
    match entry.kind:
        case "batch":
            assert entry.leaf is not None
            return leaves[entry.leaf]
        case "constant":
            return entry.tensor
        case "hyper":
            assert entry.group is not None
            assert entry.key is not None
            value = workload.optimizer.param_groups[entry.group][entry.key]
            return value if entry.item is None else value[entry.item]
        case "gradient":
            parameter = state.get(entry.name.removesuffix(".grad"))
            return None if parameter is None else parameter.grad
        case _:
            return state.get(entry.name)


def _bind(values: dict[int, Any], call: Call, result: Any) -> None:
    if isinstance(call.results, int):
        values[call.results] = result
    else:
        values |= {v: r for v, r in zip(call.results, result, strict=False) if v is not None}


def _results(call: Call) -> list[int]:
    return [call.results] if isinstance(call.results, int) else [v for v in call.results if v is not None]


def _values_in(arguments: Any) -> list[int]:
    """The values the arguments refer to."""
    found: list[int] = []
    replace_refs(arguments, lambda ref: found.append(ref.value))
    return found


def _filled(call: Call, values: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with every value in place."""
    args, kwargs = replace_refs((call.args, call.kwargs), lambda ref: values[ref.value])
    return args, kwargs
