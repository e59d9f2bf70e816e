"""Valid plans made by hand from a captured step: captured order, frees at last use, chosen swaps and recomputes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tensile.compiler.graph import Graph
from tensile.schedules.plan import (
    Event,
    Free,
    OpRow,
    Plan,
    Promise,
    Recompute,
    StorageRow,
    Subject,
    SwapIn,
    SwapOut,
)

ALWAYS = ("batch", "constant")


def plan_of(
    graph: Graph,
    *,
    swaps: Iterable[tuple[int, int, int]] = (),
    wraps: Iterable[int] = (),
    recomputes: Iterable[tuple[int, int]] = (),
    workspace: dict[int, int] | None = None,
) -> Plan:
    """A plan in captured order.

    swaps: (storage, op it is touched by last before leaving, op it is touched by next), within the step.
    wraps: storages (entering and leaving) that are away from their last touch to their first touch in the next step.
    recomputes: (storage, op before which it is made again); its only toucher up to its gap must be its creator.
    """
    runs: list[tuple[int, tuple[int, ...] | None]] = []
    again: dict[int, list[int]] = defaultdict(list)
    for storage, before in recomputes:
        again[before].append(storage)
    creator = {s: op.index for op in graph.ops for s in op.creates}
    for op in graph.ops:
        for storage in again[op.index]:
            runs.append((creator[storage], (storage,)))
        runs.append((op.index, None))
    first = {op: k for k, (op, restored) in enumerate(runs) if restored is None}
    touches: dict[int, list[int]] = defaultdict(list)
    births: dict[int, list[int]] = defaultdict(list)
    for k, (index, restored) in enumerate(runs):
        op = graph.ops[index]
        reads = set(op.reads)
        writes = set(op.writes) if restored is None else set()
        created = set(op.creates) if restored is None else set(restored)
        if restored is not None:
            reads -= set(op.writes)
        for storage in reads | writes | created:
            touches[storage].append(k)
        for storage in created:
            births[storage].append(k)
    events: list[Event] = []
    starts_out = set(wraps)
    for storage, last, following in swaps:
        out, back = first[last] + 1, first[following]
        events.append(
            SwapOut(storage=storage, start=out, free=out + (1 if back - out > 1 else 0), begin_us=0, end_us=0)
        )
        events.append(SwapIn(storage=storage, start=max(back - 1, out + 1), need=back, begin_us=0, end_us=0))
    for storage in starts_out:
        events.append(
            SwapIn(storage=storage, start=touches[storage][0], need=touches[storage][0], begin_us=0, end_us=0)
        )
        end = touches[storage][-1] + 1
        events.append(SwapOut(storage=storage, start=end, free=end, begin_us=0, end_us=0))
    for k, (index, restored) in enumerate(runs):
        if restored is not None:
            events.append(Recompute(row=k, restores=restored))
            assert not set(graph.ops[index].writes) - {s for s in graph.ops[index].writes if graph.storages[s].enters}
    frees: dict[int, set[int]] = defaultdict(set)
    for storage in graph.storages:
        if storage.enters or not touches[storage.index]:
            continue
        marks = [*births[storage.index][1:], len(runs)]
        for mark in marks:
            if mark == len(runs) and storage.leaves:
                continue
            frees[max(k for k in touches[storage.index] if k < mark) + 1].add(storage.index)
    events += [Free(at=at, storages=tuple(sorted(gone))) for at, gone in sorted(frees.items())]
    order = (SwapOut, SwapIn, Recompute, Free)

    def anchor(event: Event) -> tuple[int, int, int]:
        at = event.row if isinstance(event, Recompute) else event.at if isinstance(event, Free) else event.start
        return at, order.index(type(event)), getattr(event, "storage", 0)

    events.sort(key=anchor)
    rows = tuple(_row(graph, index, restored is not None, (workspace or {}).get(index, 0)) for index, restored in runs)
    storages = tuple(_storage(graph, s.index, s.index in starts_out) for s in graph.storages)
    plan = Plan(
        subject=Subject(workload=graph.name, fingerprint=graph.fingerprint, device_name="test"),
        promise=_promise(0, 0), rows=rows, storages=storages, events=tuple(events),
    )  # fmt: skip
    return plan


def _row(graph: Graph, index: int, again: bool, workspace: int) -> OpRow:
    op = graph.ops[index]
    entering = {s for s in op.writes if graph.storages[s].enters}
    skipped = entering if again else set()
    return OpRow(
        op=index, call=op.call, phase=op.phase, module=op.module, source=op.source,
        reads=tuple(s for s in op.reads if s not in skipped), writes=tuple(s for s in op.writes if s not in skipped),
        creates=op.creates, time_ns=1000, workspace_bytes=workspace,
    )  # fmt: skip


def _storage(graph: Graph, index: int, away: bool) -> StorageRow:
    s = graph.storages[index]
    first = next((t for t in graph.tensors if t.storage == index), None)
    return StorageRow(
        storage=index, name=s.name, kind=s.kind, size_bytes=s.size_bytes, dtype=first.dtype if first else "",
        shape=first.shape if first else (), enters=s.enters, leaves=s.leaves,
        starts=("out" if away else "resident") if s.enters else "absent",
    )  # fmt: skip


def _promise(peak: int, row: int) -> Promise:
    return Promise(
        peak_bytes=peak, peak_row=row, budget_bytes=peak, eager_peak_bytes=0, eager_peak_source="modelled",
        resting_bytes=0, spill_bytes=0, rss_slack_percent=3, step_us=1, bound_us=1, eager_step_us=1,
        eager_step_source="modelled", profile_source="none", planner="by hand",
    )  # fmt: skip
