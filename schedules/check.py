"""The independent referee: everything that is wrong with a plan, not the first thing.

It shares nothing with the planners or the timeline: it walks the step boundary by boundary, as the runtime will.

| rule | what it demands |
|---|---|
| references | indices point at something, once; storages stand at their own place; there is a row |
| sizes | bytes and times are not negative |
| events | events are ordered by boundary, then by kind; none ends before it starts |
| ops | every captured op, 0 to the last, runs; what runs again is the same op on the same storages |
| recompute | rows that repeat an op and `Recompute` events match one to one; a second run finds what the first found |
| order | a first run finds the contents that it finds in captured order |
| create | a storage is created when it is not there, and by one op |
| resident | what a row touches is resident |
| free | what is freed is resident, and no copy of it is under way |
| swap_out | what is copied out is resident and not written until it is freed |
| swap_in | what is copied in is absent, has a host copy of its last contents, and is not touched before it is needed |
| lanes | a lane copies one storage at a time; a copy is interrupted only by one that is needed no later |
| caller | the batch and constants are there all the time: neither freed nor swapped |
| boundary | every storage ends the step as the next one needs it: there, out with a valid host copy, or gone |
| peak | the worst row, the bytes there and between two steps are as promised |
| budget | the promised peak is within the budget |
| resting | the bytes between two steps are as promised |
| spill | the host has room for every storage that is ever out |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from tensile.schedules.findings import Finding, row_name, storage_name
from tensile.schedules.plan import Event, Free, Plan, Recompute, SwapIn, SwapOut
from tensile.schedules.walk import walk

__all__ = ["Finding", "check"]

_KINDS = (SwapOut, SwapIn, Recompute, Free)


def check(plan: Plan) -> tuple[Finding, ...]:
    """Everything that is wrong with `plan`; () for a plan that can be trusted. Never raises.

    A plan that points outside itself is judged on that alone: nothing else can be said of it.
    """
    dangling = tuple(_references(plan))
    if dangling:
        return dangling
    return (
        *_sizes(plan),
        *_events(plan),
        *_ops(plan),
        *_recomputes(plan),
        *_creators(plan),
        *_lanes(plan),
        *_caller(plan),
        *_starts(plan),
        *walk(plan),
        *_host(plan),
        *_budget(plan),
    )


def boundary_of(event: Event) -> int:
    """The boundary an event is filed under."""
    match event:
        case SwapOut() | SwapIn():
            return event.start
        case Recompute():
            return event.row
        case Free():
            return event.at


def _references(plan: Plan) -> Iterator[Finding]:
    rows, storages = len(plan.rows), len(plan.storages)

    def outside(numbers: tuple[int, ...], count: int, noun: str, where: str) -> Iterator[Finding]:
        for number in numbers:
            if not 0 <= number < count:
                yield Finding("references", where, f"there is no {noun} {number}")
        for number, times in Counter(numbers).items():
            if times > 1:
                yield Finding("references", where, f"{noun} {number} stands there {times} times")

    if not plan.rows:
        yield Finding("references", "rows", "a plan has at least one row")
    for k, storage in enumerate(plan.storages):
        if storage.storage != k:
            yield Finding("references", f"storages[{k}]", f"storage {storage.storage} stands at place {k}")
    for k, row in enumerate(plan.rows):
        if row.op < 0:
            yield Finding("references", f"rows[{k}].op", f"there is no op {row.op}")
        yield from outside(row.reads, storages, "storage", f"rows[{k}].reads")
        yield from outside(row.writes, storages, "storage", f"rows[{k}].writes")
        yield from outside(row.creates, storages, "storage", f"rows[{k}].creates")
    for k, event in enumerate(plan.events):
        match event:
            case SwapOut():
                yield from outside((event.storage,), storages, "storage", f"events[{k}].swap_out")
                yield from outside((event.start,), rows + 1, "boundary", f"events[{k}].start")
                yield from outside((event.free,), rows + 1, "boundary", f"events[{k}].free")
            case SwapIn():
                yield from outside((event.storage,), storages, "storage", f"events[{k}].swap_in")
                yield from outside((event.start,), rows + 1, "boundary", f"events[{k}].start")
                yield from outside((event.need,), rows + 1, "boundary", f"events[{k}].need")
            case Recompute():
                yield from outside((event.row,), rows, "row", f"events[{k}].recompute")
                yield from outside(event.restores, storages, "storage", f"events[{k}].restores")
            case Free():
                yield from outside((event.at,), rows + 1, "boundary", f"events[{k}].at")
                yield from outside(event.storages, storages, "storage", f"events[{k}].free")
    yield from outside((plan.promise.peak_row,), rows, "row", "promise.peak_row")


def _sizes(plan: Plan) -> Iterator[Finding]:
    for k, storage in enumerate(plan.storages):
        if storage.size_bytes < 0:
            message = f"{storage_name(plan, k)} has {storage.size_bytes} bytes"
            yield Finding("sizes", f"storages[{k}].size_bytes", message)
    for k, row in enumerate(plan.rows):
        if row.workspace_bytes < 0:
            message = f"{row_name(plan, k)} needs {row.workspace_bytes} bytes"
            yield Finding("sizes", f"rows[{k}].workspace_bytes", message)
        if row.time_ns < 0:
            yield Finding("sizes", f"rows[{k}].time_ns", f"{row_name(plan, k)} takes {row.time_ns} ns")


def _events(plan: Plan) -> Iterator[Finding]:
    before = (0, 0)
    for k, event in enumerate(plan.events):
        place = (boundary_of(event), _KINDS.index(type(event)))
        if place < before:
            yield Finding("events", f"events[{k}]", "stands behind an event that comes later, by boundary, then kind")
        before = max(before, place)
        if isinstance(event, SwapOut) and event.free < event.start:
            yield Finding("events", f"events[{k}].free", f"freed at boundary {event.free}, before the copy may start")
        if isinstance(event, SwapIn) and event.need < event.start:
            yield Finding("events", f"events[{k}].need", f"needed at boundary {event.need}, before the copy may start")


def _ops(plan: Plan) -> Iterator[Finding]:
    first: dict[int, int] = {}
    for k, row in enumerate(plan.rows):
        first.setdefault(row.op, k)
    for op in range(max(first)):
        if op not in first:
            yield Finding("ops", "rows", f"op {op} never runs")
    for k, row in enumerate(plan.rows):
        once = plan.rows[first[row.op]]
        if row.call != once.call:
            yield Finding("ops", f"rows[{k}].call", f"op {row.op} is {once.call} in row {first[row.op]}")
        if not set(row.reads) <= set(once.reads) or not set(row.writes) <= set(once.writes):
            yield Finding("ops", f"rows[{k}]", f"{row_name(plan, k)} touches what its first run did not")
        if set(row.creates) != set(once.creates):
            yield Finding("ops", f"rows[{k}].creates", f"{row_name(plan, k)} creates other storages than its first run")


def _recomputes(plan: Plan) -> Iterator[Finding]:
    seen: set[int] = set()
    again: set[int] = set()
    for k, row in enumerate(plan.rows):
        if row.op in seen:
            again.add(k)
        seen.add(row.op)
    said: set[int] = set()
    for k, event in enumerate(plan.events):
        if not isinstance(event, Recompute):
            continue
        if event.row not in again:
            yield Finding("recompute", f"events[{k}]", f"{row_name(plan, event.row)} is the first run of its op")
        if event.row in said:
            yield Finding("recompute", f"events[{k}]", f"{row_name(plan, event.row)} has a recompute already")
        said.add(event.row)
        for storage in sorted(set(event.restores) - set(plan.rows[event.row].creates)):
            message = f"{row_name(plan, event.row)} does not create {storage_name(plan, storage)}"
            yield Finding("recompute", f"events[{k}].restores", message)
    for lonely in sorted(again - said):
        message = f"{row_name(plan, lonely)} repeats op {plan.rows[lonely].op} without a recompute"
        yield Finding("recompute", f"rows[{lonely}]", message)


def _creators(plan: Plan) -> Iterator[Finding]:
    creators: dict[int, set[int]] = defaultdict(set)
    for row in plan.rows:
        for storage in row.creates:
            creators[storage].add(row.op)
    for storage, ops in sorted(creators.items()):
        if len(ops) > 1:
            names = " and ".join(map(str, sorted(ops)))
            yield Finding("create", f"storages[{storage}]", f"{storage_name(plan, storage)} is created by ops {names}")


def _lanes(plan: Plan) -> Iterator[Finding]:
    for lane in (SwapOut, SwapIn):
        copies = [(k, event) for k, event in enumerate(plan.events) if isinstance(event, lane)]
        copies.sort(key=lambda copy: (copy[1].begin_us, -copy[1].end_us, -_deadline(copy[1])))
        under_way: list[tuple[int, SwapOut | SwapIn]] = []  # each interrupts the one before
        for k, event in copies:
            if event.end_us < event.begin_us:
                yield Finding("lanes", f"events[{k}].end_us", "the copy ends before it begins")
            while under_way and under_way[-1][1].end_us <= event.begin_us:
                under_way.pop()
            if under_way and under_way[-1][1].begin_us < event.end_us:
                last, outer = under_way[-1]
                if event.end_us > outer.end_us or _deadline(event) > _deadline(outer):
                    message = (
                        f"the copy begins at {event.begin_us} us while events[{last}] keeps the lane until "
                        f"{outer.end_us} us"
                    )
                    yield Finding("lanes", f"events[{k}].begin_us", message)
            under_way.append((k, event))


def _deadline(event: SwapOut | SwapIn) -> int:
    return event.free if isinstance(event, SwapOut) else event.need


def _caller(plan: Plan) -> Iterator[Finding]:
    held = {s.storage for s in plan.storages if s.kind in ("batch", "constant")}
    for storage in sorted(held):
        if not plan.storages[storage].enters or plan.storages[storage].starts != "resident":
            message = f"{storage_name(plan, storage)} is the caller's and does not start the step resident"
            yield Finding("caller", f"storages[{storage}]", message)
    for k, event in enumerate(plan.events):
        match event:
            case SwapOut() | SwapIn():
                moved: tuple[int, ...] = (event.storage,)
            case Recompute():
                moved = event.restores
            case Free():
                moved = event.storages
        for storage in moved:
            if storage in held:
                message = f"{storage_name(plan, storage)} is the caller's; a plan may not move it"
                yield Finding("caller", f"events[{k}]", message)


def _starts(plan: Plan) -> Iterator[Finding]:
    for k, storage in enumerate(plan.storages):
        name, where = storage_name(plan, k), f"storages[{k}].starts"
        if storage.enters and storage.starts == "absent":
            yield Finding("boundary", where, f"{name} enters the step but starts absent")
        if not storage.enters and storage.starts != "absent":
            yield Finding("boundary", where, f"{name} does not enter the step but starts {storage.starts}")
        if storage.enters and not storage.leaves and storage.starts == "out":
            yield Finding("boundary", where, f"{name} starts out, but does not leave the step that has to put it there")


def _host(plan: Plan) -> Iterator[Finding]:
    out = {event.storage for event in plan.events if isinstance(event, SwapOut)}
    out |= {s.storage for s in plan.storages if s.starts == "out"}
    needed = sum(plan.storages[storage].size_bytes for storage in out)
    if plan.promise.spill_bytes < needed:
        message = f"{len(out)} storages are ever out and need {needed} bytes; {plan.promise.spill_bytes} are promised"
        yield Finding("spill", "promise.spill_bytes", message)


def _budget(plan: Plan) -> Iterator[Finding]:
    if plan.promise.peak_bytes > plan.promise.budget_bytes:
        message = f"the promised peak, {plan.promise.peak_bytes} bytes, is over the budget, {plan.promise.budget_bytes}"
        yield Finding("budget", "promise.budget_bytes", message)
