"""Plan -> bytes on the device at every row, by kind and by purpose; what is resident at a row.

A plan that `check` accepts has exactly the memory described here; of one it does not, this is a best reading.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from tensile.schedules.plan import Free, Kind, Plan, Recompute, SwapIn, SwapOut

Purpose = Literal["compute", "out", "in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A storage takes device memory from row `first` up to but not including row `end`. `again`: a copy that a
    recompute creates and drops at once. `purpose`: it is in use or waits for it, its bytes are on their way out, or
    on their way in."""

    storage: int
    first: int
    end: int
    purpose: Purpose = "compute"
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes at every row. `total_bytes[k]` is the sum over `kind_bytes` at k, `held_bytes` and `workspace_bytes[k]`;
    `out_bytes` and `in_bytes` are the share of `kind_bytes` in flight."""

    total_bytes: tuple[int, ...]
    kind_bytes: dict[Kind, tuple[int, ...]]
    workspace_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    in_bytes: tuple[int, ...]
    held_bytes: int  # outputs of the last step, which the caller may hold: at every row
    resting_bytes: int  # after the last row, without `held_bytes`
    peak_bytes: int
    peak_row: int  # the first row at which `peak_bytes` is reached


def timeline(plan: Plan) -> Timeline:
    """Bytes at every row of a plan with at least one row."""
    count = len(plan.rows)
    size = [s.size_bytes for s in plan.storages]
    kind = [s.kind for s in plan.storages]
    stays = stays_of(plan)
    workspace = tuple(row.workspace_bytes for row in plan.rows)
    held = sum(s.size_bytes for s in plan.storages if s.kind == "output" and s.leaves)
    kind_bytes: dict[Kind, tuple[int, ...]] = {}
    for name in get_args(Kind):
        of_kind = [stay for stay in stays if kind[stay.storage] == name]
        if of_kind:
            kind_bytes[name] = _sum(of_kind, size, count)[:count]
    resident = _sum(stays, size, count)
    total = tuple(a + b + held for a, b in zip(resident, workspace, strict=False))
    peak = max(total)
    return Timeline(
        total_bytes=total,
        kind_bytes=kind_bytes,
        workspace_bytes=workspace,
        out_bytes=_sum((stay for stay in stays if stay.purpose == "out"), size, count)[:count],
        in_bytes=_sum((stay for stay in stays if stay.purpose == "in"), size, count)[:count],
        held_bytes=held,
        resting_bytes=resident[count],
        peak_bytes=peak,
        peak_row=total.index(peak),
    )


def stays_of(plan: Plan) -> tuple[Stay, ...]:
    """When each storage takes device memory, by storage and row; a stay that lasts beyond the step ends at
    len(rows) + 1."""
    beyond = len(plan.rows) + 1
    recomputes = {event.row: event for event in plan.events if isinstance(event, Recompute)}
    changes: dict[int, list[tuple[int, int, Purpose | None]]] = defaultdict(list)  # (boundary, order there, purpose)
    stays: list[Stay] = []
    for storage in plan.storages:
        if storage.starts == "resident":
            changes[storage.storage].append((0, -1, "compute"))
    for k, row in enumerate(plan.rows):
        restores = recomputes[k].restores if k in recomputes else row.creates
        for storage_index in row.creates:
            if storage_index in restores:
                changes[storage_index].append((k, 4, "compute"))
            else:
                stays.append(Stay(storage=storage_index, first=k, end=k + 1, again=True))
    for event in plan.events:
        match event:
            case SwapOut():
                changes[event.storage].append((event.start, 0, "out"))
                changes[event.storage].append((event.free, 1, None))
            case Free():
                for storage_index in event.storages:
                    changes[storage_index].append((event.at, 1, None))
            case SwapIn():
                changes[event.storage].append((event.start, 2, "in"))
                changes[event.storage].append((event.need, 3, "compute"))
    for storage_index in sorted(changes):
        purpose: Purpose | None = None
        since = 0
        for boundary, _, then in [*sorted(changes[storage_index], key=lambda change: change[:2]), (beyond, 5, None)]:
            if purpose is not None and boundary > since:
                stays.append(Stay(storage=storage_index, first=since, end=boundary, purpose=purpose))
            purpose, since = then, boundary
    return tuple(sorted(stays, key=lambda stay: (stay.storage, stay.first, stay.end)))


def resident_at(plan: Plan, row: int) -> tuple[Stay, ...]:
    """What takes device memory at `row`, the largest first."""
    here = [stay for stay in stays_of(plan) if stay.first <= row < stay.end]
    return tuple(sorted(here, key=lambda stay: (-plan.storages[stay.storage].size_bytes, stay.storage, stay.again)))


def _sum(stays: Iterable[Stay], size: list[int], count: int) -> tuple[int, ...]:
    """Bytes at rows 0 .. count - 1 and, last, at the end of the step."""
    delta = [0] * (count + 2)
    for stay in stays:
        delta[stay.first] += size[stay.storage]
        delta[stay.end] -= size[stay.storage]
    return tuple(accumulate(delta[: count + 1]))
