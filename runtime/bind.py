"""A plan meets a live model: everything that can be wrong with the pair is found here, before the first step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tensile.compiler import torch_private
from tensile.compiler.capture import Captured, capture
from tensile.compiler.graph import Graph
from tensile.compiler.workload import Workload
from tensile.runtime.replay import Replay, build_replay
from tensile.schedules.check import check
from tensile.schedules.errors import PlanMismatch, TensileError
from tensile.schedules.plan import Fingerprint, Free, Plan, Recompute, SwapIn, SwapOut

_STATE = ("parameter", "buffer", "optimizer_state")
_WHAT = {
    "torch": "another torch",
    "device": "another device",
    "optimizer": "another optimizer",
    "state": "other parameters, buffers or optimizer state",
    "batch": "another batch",
    "ops": "a step that does something else",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A plan applied to a captured step. `swapped` are sizes in bytes of the storages the plan moves, by index;
    `starts_out` those that are away between two steps."""

    plan: Plan
    captured: Captured
    replay: Replay
    swapped: dict[int, int]
    starts_out: tuple[int, ...]


def bind(plan: Plan, workload: Workload) -> Bound:
    """Capture the live step, compare it with the plan's subject field by field, apply every event of the plan.

    Raises PlanMismatch, naming the first field that differs, or the event that cannot be applied; CaptureError when
    the live step cannot be captured; PlanFileError for a plan the referee rejects.
    """
    findings = check(plan)
    if findings:
        raise PlanMismatch(
            f"the plan is not consistent ({len(findings)} findings): {findings[0].message}", where=findings[0].where,
            hint="compile it again; `tensile check` lists all findings",
        )  # fmt: skip
    _require_device(plan)
    captured = capture(workload, check_twice=False)
    _compare(plan, captured.graph)
    _require_applicable(plan, captured)
    replay = build_replay(plan, captured.graph, captured.program)
    swapped = {e.storage: plan.storages[e.storage].size_bytes for e in plan.events if isinstance(e, (SwapOut, SwapIn))}
    starts_out = tuple(row.storage for row in plan.storages if row.starts == "out")
    return Bound(plan=plan, captured=captured, replay=replay, swapped=swapped, starts_out=starts_out)


def _require_device(plan: Plan) -> None:
    swapped = {event.storage for event in plan.events if isinstance(event, (SwapOut, SwapIn))}
    state = next((plan.storages[s].name for s in sorted(swapped) if plan.storages[s].enters), None)
    moves = bool(swapped)
    if state is not None and not torch_private.CAN_SWAP_POINTERS:
        raise PlanMismatch(
            f"the plan swaps {state}, and torch {torch.__version__} cannot empty a storage of yours and fill it again "
            "under its views", where="events",
            hint="compile the plan with this torch, which then leaves state in memory, or use torch 2.14",
        )  # fmt: skip
    if moves and plan.subject.fingerprint.device != "cpu":
        raise PlanMismatch(
            f"there is no copy lane for {plan.subject.fingerprint.device} yet", where="subject.fingerprint.device",
            hint="plan and train on the CPU",
        )  # fmt: skip


def _compare(plan: Plan, graph: Graph) -> None:
    for field in fields(Fingerprint):
        was, now = getattr(plan.subject.fingerprint, field.name), getattr(graph.fingerprint, field.name)
        if was != now:
            said = f"planned {was}, this is {now}"
            if field.name == "state":
                said = _state_difference(plan, graph) or said
            raise PlanMismatch(
                f"the plan is for {_WHAT[field.name]}: {said}",
                where=f"subject.fingerprint.{field.name}",
                hint="compile a plan for this step: tensile compile MODEL.py, or pass on_mismatch=\"eager\"",
            )  # fmt: skip


def _state_difference(plan: Plan, graph: Graph) -> str:
    """The first parameter, buffer or optimizer state that is not as planned; "" when names, dtypes and shapes agree."""
    first = {tensor.storage: tensor for tensor in reversed(graph.tensors)}
    planned = {row.name: f"{row.dtype}{list(row.shape)}" for row in plan.storages if row.kind in _STATE}
    live = {
        storage.name: f"{first[storage.index].dtype}{list(first[storage.index].shape)}"
        for storage in graph.storages if storage.kind in _STATE and storage.index in first
    }  # fmt: skip
    for name in {**planned, **live}:
        was, now = planned.get(name), live.get(name)
        if was != now:
            return f"{name} was {was or 'not there'} when it was planned, and is {now or 'not there'}"
    return ""


def _require_applicable(plan: Plan, captured: Captured) -> None:
    """Every row and event must have its op and storages in the captured step; counts what has."""
    graph = captured.graph
    events = [e for e in plan.events if not isinstance(e, Free)]
    applied = 0
    for event in events:
        storages = event.restores if isinstance(event, Recompute) else (event.storage,)
        if all(s < len(graph.storages) and _fits(plan, graph.storages[s].size_bytes, s) for s in storages):
            applied += 1
    ops_fit = all(row.op < len(graph.ops) and row.call == graph.ops[row.op].call for row in plan.rows)
    if applied != len(events) or not ops_fit or len({row.op for row in plan.rows}) != len(graph.ops):
        raise PlanMismatch(
            f"{applied} of {len(events)} swaps and recomputes can be applied to this step", where="events",
            hint="the plan file was edited or is for another step; compile it again",
        )  # fmt: skip


def _fits(plan: Plan, size_bytes: int, storage: int) -> bool:
    """The planned size is what the allocator takes, which may be more than the layout asks for."""
    return storage < len(plan.storages) and plan.storages[storage].size_bytes >= size_bytes


def device_of(model: torch.nn.Module) -> str:
    """Type of the device a model lives on, "cpu" for one without parameters.

    Raises TensileError for a model on the meta device, which has no data.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise TensileError(
                f"the model has no data: {name} is on the meta device",
                hint="build it on a real device, or call model.to_empty(device=\"cpu\") and load its state",
            )  # fmt: skip
    kinds = {parameter.device.type for parameter in model.parameters()}
    return sorted(kinds - {"cpu"})[0] if kinds - {"cpu"} else "cpu"
