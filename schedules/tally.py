"""A plan added up: what moves, by module; what is there at a row; which rows match a pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tensile.schedules.plan import OpRow, Plan, Recompute, SwapOut
from tensile.schedules.timeline import resident_at

_STATES = {"compute": "held", "out": "on its way out", "in": "on its way in"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What happens to one module's storages in a step: how often, how many bytes, and the time of the runs."""

    module: str
    count: int
    size_bytes: int
    time_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRow:
    """One storage at a row. `source` is the line that created it; `state`: held, on its way out or in, again (a
    copy that a recompute creates and drops), or held by the caller (an output of the last step)."""

    storage: int
    name: str
    kind: str
    size_bytes: int
    module: str
    source: str
    state: str


def swapped(plan: Plan) -> tuple[Moved, ...]:
    """Copies out in a step by the module that owns the storage, most bytes first."""
    modules = _modules(plan)
    return by_module(
        (modules[event.storage], plan.storages[event.storage].size_bytes, 0)
        for event in plan.events
        if isinstance(event, SwapOut)
    )


def recomputed(plan: Plan) -> tuple[Moved, ...]:
    """Second runs in a step by the module of the op; bytes are those that come back to life."""
    return by_module(
        (
            plan.rows[event.row].module,
            sum(plan.storages[storage].size_bytes for storage in event.restores),
            plan.rows[event.row].time_ns,
        )
        for event in plan.events
        if isinstance(event, Recompute)
    )


def at_row(plan: Plan, row: int) -> tuple[AtRow, ...]:
    """Every storage that takes device memory at `row`, the largest first."""
    creators = _creators(plan)
    modules = _modules(plan)
    states = [(stay.storage, "again" if stay.again else _STATES[stay.purpose]) for stay in resident_at(plan, row)]
    states += [(s.storage, "held by the caller") for s in plan.storages if s.kind == "output" and s.leaves]
    found = []
    for index, state in states:
        storage = plan.storages[index]
        found.append(
            AtRow(
                storage=index,
                name=storage.name,
                kind=storage.kind,
                size_bytes=storage.size_bytes,
                module=modules[index],
                source=creators[index].source if index in creators else "",
                state=state,
            )
        )
    return tuple(sorted(found, key=lambda storage: -storage.size_bytes))


def matching(plan: Plan, pattern: str) -> tuple[int, ...]:
    """Rows whose call or module matches a glob such as `*attn*`."""
    return tuple(
        k for k, row in enumerate(plan.rows) if fnmatchcase(row.call, pattern) or fnmatchcase(row.module, pattern)
    )


def by_module(items: Iterable[tuple[str, int, int] | tuple[str, int, int, int]]) -> tuple[Moved, ...]:
    """Items are (module, bytes, nanoseconds) and, when one stands for several, how many."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for module, size_bytes, time_ns, *count in items:
        total = sums[module]
        total[0] += count[0] if count else 1
        total[1] += size_bytes
        total[2] += time_ns
    moved = (
        Moved(module=module, count=count, size_bytes=size_bytes, time_us=round(time_ns / 1000))
        for module, (count, size_bytes, time_ns) in sums.items()
    )
    return tuple(sorted(moved, key=lambda m: (-m.size_bytes, -m.count, m.module)))


def _creators(plan: Plan) -> dict[int, OpRow]:
    creators: dict[int, OpRow] = {}
    for row in plan.rows:
        for storage in row.creates:
            creators.setdefault(storage, row)
    return creators


def _modules(plan: Plan) -> list[str]:
    """The module of each storage: of the op that creates it, or the one a parameter or its state is named after."""
    creators = _creators(plan)
    return [
        creators[s.storage].module if s.storage in creators else s.name.partition("/")[0].rpartition(".")[0]
        for s in plan.storages
    ]
