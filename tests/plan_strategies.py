"""Hypothesis strategies for plans: valid by construction, and broken in one known way.

A plan is built as a planner would build it, but blindly: a random captured step, a random legal order, random
recomputes whose inputs are unchanged, random swaps of idle intervals. Its memory is summed up set by set, a third way
beside the referee's and the timeline's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from plan_breaks import BREAKS

from tensile.schedules.plan import (
    Event,
    Fingerprint,
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

Draw = Callable[[st.SearchStrategy[Any]], Any]

WORDS = st.one_of(
    st.sampled_from(
        ["", "h.0.attn", "h.1.mlp", "model.py:31 in forward", "yes", "null", "1.5", "0x10", "a: b", "- c", "~"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
SIZES = st.one_of(st.integers(0, 9), st.integers(0, 2**40))


@dataclass(frozen=True)
class Op:
    reads: frozenset[int]
    writes: frozenset[int]
    creates: tuple[int, ...]
    statistics: frozenset[int] = frozenset()  # written by the first run only, as batch norm does
    again_ok: bool = True


@dataclass(frozen=True)
class Run:
    op: int
    reads: frozenset[int]
    writes: frozenset[int]
    restores: tuple[int, ...] | None = None


@dataclass
class Step:
    """A captured step and the runs chosen for it."""

    ops: list[Op] = field(default_factory=list)
    storages: list[StorageRow] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def births(self, run: Run) -> tuple[int, ...]:
        return self.ops[run.op].creates if run.restores is None else run.restores


@st.composite
def plans(draw: Draw) -> Plan:
    """Plans that `check` accepts."""
    step = Step()
    _draw_storages(draw, step)
    _draw_ops(draw, step)
    _draw_order(draw, step)
    for _ in range(draw(st.integers(0, 4))):
        _draw_recompute(draw, step)
    rows = _rows(draw, step)
    events, starts_out = _draw_moves(draw, step)
    storages = tuple(replace(s, starts="out") if s.storage in starts_out else s for s in step.storages)
    return promised(_plan(draw, tuple(rows), storages, _timed(draw, sorted(events, key=_place))))


@st.composite
def broken_plans(draw: Draw) -> tuple[str, Plan]:
    """(how it was broken, a plan that `check` must reject)."""
    plan = draw(plans())
    options = [(name, broken) for name, breaks in BREAKS.items() for broken in breaks(plan)]
    return draw(st.sampled_from(options))


def promised(plan: Plan) -> Plan:
    """The plan with the memory promises its rows and events keep, summed up set by set."""
    out = {e.storage for e in plan.events if isinstance(e, SwapOut)}
    out |= {s.storage for s in plan.storages if s.starts == "out"}
    levels, resting = bytes_by_sets(plan)
    held = sum(s.size_bytes for s in plan.storages if s.kind == "output" and s.leaves)
    short = resting + held - max(levels)
    if short > 0:  # let the last row's workspace stand for what only the end of the step needs
        last = plan.rows[-1]
        grown = last.workspace_bytes + resting + held - levels[-1]
        plan = replace(plan, rows=(*plan.rows[:-1], replace(last, workspace_bytes=grown)))
        levels[-1] = resting + held
    promise = replace(
        plan.promise,
        peak_bytes=max(levels),
        peak_row=levels.index(max(levels)),
        budget_bytes=max(plan.promise.budget_bytes, max(levels)),
        resting_bytes=resting,
        spill_bytes=sum(plan.storages[s].size_bytes for s in out),
    )
    return replace(plan, promise=promise)


def bytes_by_sets(plan: Plan) -> tuple[list[int], int]:
    """Bytes at every row, and those that stay between two steps."""
    size = [s.size_bytes for s in plan.storages]
    held = sum(s.size_bytes for s in plan.storages if s.kind == "output" and s.leaves)
    there = {s.storage for s in plan.storages if s.starts == "resident"}
    restores = {e.row: e.restores for e in plan.events if isinstance(e, Recompute)}
    levels = []
    for k in range(len(plan.rows) + 1):
        there -= {e.storage for e in plan.events if isinstance(e, SwapOut) and e.free == k}
        there -= {s for e in plan.events if isinstance(e, Free) and e.at == k for s in e.storages}
        there |= {e.storage for e in plan.events if isinstance(e, SwapIn) and e.start == k}
        if k < len(plan.rows):
            row = plan.rows[k]
            kept = restores.get(k, row.creates)
            there |= set(kept)
            passing = sum(size[s] for s in row.creates if s not in kept)
            levels.append(held + sum(size[s] for s in there) + passing + row.workspace_bytes)
    return levels, sum(size[s] for s in there)


# ---- the captured step


def _draw_storages(draw: Draw, step: Step) -> None:
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["parameter", "buffer", "optimizer_state", "gradient"]))
        _add_storage(draw, step, kind, enters=True, leaves=kind != "gradient" or draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        _add_storage(draw, step, draw(st.sampled_from(["batch", "constant"])), enters=True, leaves=draw(st.booleans()))


def _add_storage(draw: Draw, step: Step, kind: Any, *, enters: bool, leaves: bool) -> int:
    index = len(step.storages)
    step.storages.append(
        StorageRow(
            storage=index,
            name=draw(WORDS),
            kind=kind,
            size_bytes=draw(SIZES),
            dtype="float32",
            shape=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            enters=enters,
            leaves=leaves,
            starts="resident" if enters else "absent",
        )
    )
    return index


def _draw_ops(draw: Draw, step: Step) -> None:
    for _ in range(draw(st.integers(1, 10))):
        known = list(range(len(step.storages)))
        state = [s for s in known if step.storages[s].enters]
        reads: frozenset[int] = draw(st.frozensets(st.sampled_from(known), max_size=3)) if known else frozenset()
        writes = frozenset({draw(st.sampled_from(known[-3:]))}) if known and draw(st.booleans()) else frozenset()
        statistics: frozenset[int] = frozenset()
        if state and not writes and draw(st.integers(0, 3)) == 0:
            statistics = frozenset({draw(st.sampled_from(state))}) - reads
        creates = []
        for _ in range(draw(st.sampled_from([0, 1, 1, 2]) if not writes else st.sampled_from([0, 0, 1]))):
            kind = draw(st.sampled_from(["activation", "activation", "activation", "output", "gradient"]))
            creates.append(_add_storage(draw, step, kind, enters=False, leaves=kind != "activation"))
        step.ops.append(Op(reads, writes, tuple(creates), statistics, again_ok=draw(st.integers(0, 3)) > 0))


def _draw_order(draw: Draw, step: Step) -> None:
    """A random order that keeps every read behind the write it saw, and every write behind the reads before it."""

    def conflict(a: Op, b: Op) -> bool:
        changed_a, changed_b = {*a.writes, *a.statistics, *a.creates}, {*b.writes, *b.statistics, *b.creates}
        return bool(changed_a & (b.reads | changed_b) or changed_b & (a.reads | changed_a))

    left = list(range(len(step.ops)))
    while left:
        ready = [j for j in left if not any(i < j and conflict(step.ops[i], step.ops[j]) for i in left)]
        op = draw(st.sampled_from(ready))
        left.remove(op)
        chosen = step.ops[op]
        step.runs.append(Run(op, chosen.reads, chosen.writes | chosen.statistics))


def _contents(step: Step, until: int) -> dict[int, int]:
    """Who wrote each storage last, just before run `until`; -1 for what entered."""
    last = {s.storage: -1 for s in step.storages}
    for run in step.runs[:until]:
        last.update(dict.fromkeys((*run.writes, *step.births(run)), run.op))
    return last


def _draw_recompute(draw: Draw, step: Step) -> None:
    """Make one storage again before the next run that touches it, when what its makers read is unchanged."""
    choices = []
    for storage in step.storages:
        touches = _touches(step, storage.storage)
        for before, after in pairwise(touches):
            chain = _chain(step, storage.storage, before, after)
            if chain is not None and storage.storage not in step.births(step.runs[after]):
                choices.append((after, chain))
    if choices:
        at, chain = draw(st.sampled_from(choices))
        step.runs[at:at] = chain


def _chain(step: Step, storage: int, before: int, after: int) -> list[Run] | None:
    makers = [r.op for r in step.runs[: before + 1] if r.restores is None and storage in step.ops[r.op].creates]
    makers += [r.op for r in step.runs[: before + 1] if r.restores is None and storage in r.writes]
    if not makers or storage not in step.ops[makers[0]].creates:
        return None
    now = _contents(step, after)
    makers = makers[: makers.index(now[storage]) + 1]
    expected: dict[int, int] = {s.storage: -1 for s in step.storages}
    seen: dict[int, dict[int, int]] = {}
    for index, op in enumerate(step.ops):
        seen[index] = dict(expected)
        expected.update(dict.fromkeys((*op.writes, *op.statistics, *op.creates), index))
    chain = []
    for place, maker in enumerate(makers):
        op = step.ops[maker]
        if not op.again_ok or (op.writes if not place else op.creates or op.writes != {storage}):
            return None
        if any(now[s] != seen[maker][s] for s in op.reads - {storage}):
            return None
        chain.append(Run(maker, op.reads, op.writes, (storage,) if not place else ()))
    return chain


def _touches(step: Step, storage: int) -> list[int]:
    return [k for k, run in enumerate(step.runs) if storage in {*run.reads, *run.writes, *step.births(run)}]


# ---- frees and swaps


def _draw_moves(draw: Draw, step: Step) -> tuple[list[Event], set[int]]:
    events: list[Event] = [
        Recompute(row=k, restores=r.restores) for k, r in enumerate(step.runs) if r.restores is not None
    ]
    frees: dict[int, set[int]] = {}
    starts_out: set[int] = set()
    end = len(step.runs)
    for storage in step.storages:
        index = storage.storage
        if storage.kind in ("batch", "constant"):
            continue
        births = [k for k, run in enumerate(step.runs) if index in step.births(run)]
        spans = [-1, *births] if storage.enters else births
        for born, nextborn in zip(spans, [*spans[1:], end + 1], strict=True):
            touches = [k for k in _touches(step, index) if born <= k < nextborn]
            stays = nextborn == end + 1 and storage.leaves
            wraps = stays and storage.enters and draw(st.booleans()) and draw(st.booleans())
            moves = _Moves(draw, step, index, frees, events)
            if wraps:
                starts_out.add(index)
                if touches:
                    moves.come_in(0, touches[0])
                    moves.host_valid = True
            if born < 0 and not wraps:
                touches.insert(0, -1)  # it may leave before the first run touches it
            gaps: list[tuple[int, int | None]] = list(zip(touches, (*touches[1:], None)[: len(touches)], strict=True))
            for before, after in gaps:
                if after is None and wraps:
                    moves.go_out(before, end)
                elif after is None and not stays:
                    latest = min(nextborn, end)
                    frees.setdefault(draw(st.integers(max(before + 1, 0), latest)), set()).add(index)
                elif draw(st.integers(0, 3)) == 0:
                    until = end if after is None else after
                    freed = moves.go_out(before, until)
                    moves.come_in(freed, until)
    events += [Free(at=at, storages=tuple(sorted(gone))) for at, gone in frees.items()]
    return events, starts_out


@dataclass
class _Moves:
    """The swaps of one storage between two births."""

    draw: Draw
    step: Step
    storage: int
    frees: dict[int, set[int]]
    events: list[Event]
    arrived: int = -1
    host_valid: bool = False
    copied_at: int = 0

    def come_in(self, earliest: int, latest: int) -> None:
        start = self.draw(st.integers(earliest, latest))
        self.arrived = self.draw(st.integers(start, latest))
        self.events.append(SwapIn(storage=self.storage, start=start, need=self.arrived, begin_us=0, end_us=0))

    def go_out(self, before: int, until: int) -> int:
        """Away after run `before`, at the latest at boundary `until`; the boundary at which it is gone."""
        free = self.draw(st.integers(before + 1, until))
        runs = self.step.runs
        written = [k for k in range(before + 1) if self.storage in {*runs[k].writes, *self.step.births(runs[k])}]
        last_write = max(written, default=-1)
        if self.host_valid and last_write < self.copied_at and self.draw(st.booleans()):
            self.frees.setdefault(free, set()).add(self.storage)  # the host copy is still good
            return free
        start = self.draw(st.integers(max(last_write + 1, self.arrived + 1, 0), free))
        self.events.append(SwapOut(storage=self.storage, start=start, free=free, begin_us=0, end_us=0))
        self.host_valid, self.copied_at = True, free
        return free


def _place(event: Event) -> tuple[int, int, int]:
    kind = (SwapOut, SwapIn, Recompute, Free).index(type(event))
    match event:
        case SwapOut() | SwapIn():
            return event.start, kind, event.storage
        case Recompute():
            return event.row, kind, 0
        case Free():
            return event.at, kind, 0


def _timed(draw: Draw, events: list[Event]) -> tuple[Event, ...]:
    """Copies one after the other in each lane."""
    clock = {SwapOut: 0, SwapIn: 0}
    timed: list[Event] = []
    for event in events:
        if isinstance(event, (SwapOut, SwapIn)):
            begin = clock[type(event)] + draw(st.integers(0, 3))
            clock[type(event)] = begin + draw(st.integers(0, 9))
            event = replace(event, begin_us=begin, end_us=clock[type(event)])
        timed.append(event)
    return tuple(timed)


# ---- the records


def _rows(draw: Draw, step: Step) -> list[OpRow]:
    calls = [draw(WORDS) for _ in step.ops]
    return [
        OpRow(
            op=run.op,
            call=calls[run.op],
            phase=draw(st.sampled_from(["forward", "backward", "optimizer"])),
            module=draw(WORDS),
            source=draw(WORDS),
            reads=tuple(sorted(run.reads)),
            writes=tuple(sorted(run.writes)),
            creates=step.ops[run.op].creates,
            time_ns=draw(st.integers(0, 2**30)),
            workspace_bytes=draw(SIZES),
        )
        for run in step.runs
    ]


def _plan(draw: Draw, rows: tuple[OpRow, ...], storages: tuple[StorageRow, ...], events: tuple[Event, ...]) -> Plan:
    fingerprint = Fingerprint(
        torch="2.14.1", device="cpu", optimizer=draw(WORDS), state="0123456789abcdef", batch=draw(WORDS), ops="12e4"
    )
    source = st.sampled_from(["measured", "modelled"])
    promise = Promise(
        peak_bytes=0,
        peak_row=0,
        budget_bytes=0,
        eager_peak_bytes=draw(SIZES),
        eager_peak_source=draw(source),
        resting_bytes=0,
        spill_bytes=0,
        rss_slack_percent=draw(st.integers(0, 30)),
        step_us=draw(SIZES),
        bound_us=draw(SIZES),
        eager_step_us=draw(SIZES),
        eager_step_source=draw(source),
        profile_source=draw(WORDS),
        planner="greedy",
    )
    return Plan(
        subject=Subject(workload=draw(WORDS), fingerprint=fingerprint, device_name=draw(WORDS)),
        promise=promise,
        rows=rows,
        storages=storages,
        events=events,
        notes=tuple(draw(st.lists(WORDS, max_size=2))),
    )
