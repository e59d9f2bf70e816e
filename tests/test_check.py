"""The referee: accepts every valid plan, finds every kind of fault, and says which."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_strategies import broken_plans, bytes_by_sets, plans, promised

from tensile.schedules import codec
from tensile.schedules.check import Finding, check
from tensile.schedules.plan import Event, Free, OpRow, Plan, Recompute, StorageRow, SwapIn, SwapOut

SCHEDULES = Path(codec.__file__).parent
CHAIN, RECOMPUTE, RESIDUAL, SWAP = (
    codec.read(SCHEDULES / f"{name}.yaml") for name in ("chain", "recompute", "residual", "swap")
)

# ---- laws


def test_a_copy_that_is_needed_sooner_may_go_between() -> None:
    first, second = SWAP.events[4], SWAP.events[7]
    assert isinstance(first, SwapIn)
    assert isinstance(second, SwapIn)
    assert first.need < second.need
    between = changed(SWAP, events={7: {"begin_us": first.begin_us - 1, "end_us": first.end_us + 1}})
    assert check(between) == ()


@given(plans())
@settings(max_examples=120, deadline=None)
def test_a_valid_plan_has_no_findings(plan: Plan) -> None:
    assert check(plan) == ()


@given(broken_plans())
@settings(max_examples=120, deadline=None)
def test_a_broken_plan_has_findings(broken: tuple[str, Plan]) -> None:
    how, plan = broken
    assert check(plan), how


@pytest.mark.parametrize("plan", [CHAIN, RECOMPUTE, RESIDUAL, SWAP], ids=["chain", "recompute", "residual", "swap"])
def test_an_example_has_no_findings(plan: Plan) -> None:
    assert check(plan) == ()


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_other_numbers_for_the_storages_change_nothing(plan: Plan, random: Any) -> None:
    numbers = list(range(len(plan.storages)))
    random.shuffle(numbers)
    renamed = relabelled(plan, numbers)
    assert check(renamed) == ()
    assert bytes_by_sets(renamed) == bytes_by_sets(plan)


@given(plans(), st.data())
@settings(max_examples=120, deadline=None)
def test_a_plan_with_anything_changed_is_judged_without_a_crash(plan: Plan, data: st.DataObject) -> None:
    numbers = st.integers(-2, len(plan.rows) + 2)
    events = list(plan.events)
    for _ in range(data.draw(st.integers(1, 3))):
        if events:
            k = data.draw(st.integers(0, len(events) - 1))
            events[k] = data.draw(mutated(events[k], numbers))
    rows = list(plan.rows)
    k = data.draw(st.integers(0, len(rows) - 1))
    some = st.lists(numbers, max_size=3).map(tuple)
    rows[k] = replace(rows[k], op=data.draw(numbers), reads=data.draw(some), writes=data.draw(some))
    for finding in check(replace(plan, rows=tuple(rows), events=tuple(events))):
        assert finding.rule
        assert finding.where
        assert finding.message


# ---- one fault each


def changed(plan: Plan, **parts: Any) -> Plan:
    """The plan with changes such as rows={3: {"op": 4}} and the memory promises it then keeps; last, to its promise."""
    promise = parts.pop("promise", {})
    for part, changes in parts.items():
        items = list(getattr(plan, part))
        for k, fields in changes.items():
            items[k] = replace(items[k], **fields)
        plan = replace(plan, **{part: tuple(items)})
    plan = promised(plan)
    return replace(plan, promise=replace(plan.promise, **promise))


def with_events(plan: Plan, *, drop: tuple[int, ...] = (), add: tuple[Event, ...] = ()) -> Plan:
    """The plan without some events and with others, in order, and with the memory promises it then keeps."""
    events = [event for k, event in enumerate(plan.events) if k not in drop] + list(add)
    return promised(replace(plan, events=tuple(sorted(events, key=place))))


def place(event: Event) -> tuple[int, int]:
    kind = (SwapOut, SwapIn, Recompute, Free).index(type(event))
    match event:
        case SwapOut() | SwapIn():
            return event.start, kind
        case Recompute():
            return event.row, kind
        case Free():
            return event.at, kind


def with_rows(plan: Plan, *order: int) -> Plan:
    return replace(plan, rows=tuple(plan.rows[k] for k in order))


def free(at: int, *storages: int) -> Free:
    return Free(at=at, storages=storages)


def out(storage: int, start: int, free: int, begin_us: int, end_us: int) -> SwapOut:
    return SwapOut(storage=storage, start=start, free=free, begin_us=begin_us, end_us=end_us)


def back(storage: int, start: int, need: int, begin_us: int, end_us: int) -> SwapIn:
    return SwapIn(storage=storage, start=start, need=need, begin_us=begin_us, end_us=end_us)


def relabelled(plan: Plan, numbers: list[int]) -> Plan:
    """The same plan with storage k called numbers[k]."""

    def new(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers[s] for s in storages)

    storages: list[StorageRow] = sorted(
        (replace(s, storage=numbers[s.storage]) for s in plan.storages), key=lambda s: s.storage
    )
    rows: list[OpRow] = [
        replace(r, reads=new(r.reads), writes=new(r.writes), creates=new(r.creates)) for r in plan.rows
    ]
    events: list[Event] = []
    for event in plan.events:
        match event:
            case SwapOut() | SwapIn():
                events.append(replace(event, storage=numbers[event.storage]))
            case Recompute():
                events.append(replace(event, restores=new(event.restores)))
            case Free():
                events.append(replace(event, storages=new(event.storages)))
    return replace(plan, storages=tuple(storages), rows=tuple(rows), events=tuple(events))


def mutated(event: Event, numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Event]:
    several = st.lists(numbers, max_size=3).map(tuple)
    match event:
        case SwapOut():
            return st.builds(out, numbers, numbers, numbers, numbers, numbers)
        case SwapIn():
            return st.builds(back, numbers, numbers, numbers, numbers, numbers)
        case Recompute():
            return st.builds(lambda row, restores: Recompute(row=row, restores=restores), numbers, several)
        case Free():
            return st.builds(lambda at, storages: Free(at=at, storages=storages), numbers, several)


ENDS_OLDER = replace(
    with_rows(RECOMPUTE, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 8, 12),
    events=(free(5, 5), free(6, 4), free(7, 7), Recompute(row=8, restores=(4,)), free(8, 8),
            Recompute(row=9, restores=()), free(11, 4, 9),
            Recompute(row=12, restores=(4,)), free(12, 10), free(14, 11)),
)  # fmt: skip

MOMENTUM = "storage 13 (0.weight/momentum_buffer)"
KEEPS_TWO = changed(CHAIN, storages={4: {"kind": "gradient", "leaves": True, "size_bytes": 1000},
                                     12: {"kind": "gradient", "leaves": True}})  # fmt: skip
CROWDED = with_events(KEEPS_TWO, drop=(0, 6), add=(out(4, 1, 2, 0, 1), back(4, 11, 11, 2, 3)))

FAULTS: list[tuple[str, Plan, list[str]]] = [
    # references
    ("a storage that is not there", changed(CHAIN, rows={0: {"reads": (0, 2, 13)}}),
     ["references: there is no storage 13 at rows[0].reads"]),
    ("a storage twice in a row", changed(CHAIN, rows={0: {"reads": (0, 0, 2)}}),
     ["references: storage 0 stands there 2 times at rows[0].reads"]),
    ("a storage twice in a free", with_events(CHAIN, drop=(6,), add=(free(11, 12, 12),)),
     ["references: storage 12 stands there 2 times at events[6].free"]),
    ("a negative op", changed(CHAIN, rows={0: {"op": -1}}),
     ["references: there is no op -1 at rows[0].op"]),
    ("a boundary behind the end", with_events(CHAIN, drop=(6,), add=(free(12, 12),)),
     ["references: there is no boundary 12 at events[6].at"]),
    ("a copy before the step", changed(SWAP, events={0: {"start": -1}}),
     ["references: there is no boundary -1 at events[0].start"]),
    ("a recompute behind the end", changed(RECOMPUTE, events={5: {"row": 13}}),
     ["references: there is no row 13 at events[5].recompute"]),
    ("a peak behind the end", changed(CHAIN, promise={"peak_row": 11}),
     ["references: there is no row 11 at promise.peak_row"]),
    ("a storage in another place", changed(CHAIN, storages={3: {"storage": 4}}),
     ["references: storage 4 stands at place 3 at storages[3]"]),
    ("no rows", replace(CHAIN, rows=(), events=(), promise=replace(CHAIN.promise, peak_row=0)),
     ["references: a plan has at least one row at rows",
      "references: there is no row 0 at promise.peak_row"]),
    # sizes
    ("a negative size", changed(CHAIN, storages={7: {"size_bytes": -4}}),
     ["sizes: storage 7 (loss) has -4 bytes at storages[7].size_bytes"]),
    ("a negative workspace", changed(CHAIN, rows={2: {"workspace_bytes": -1}}),
     ["sizes: row 2 (aten.mm.default in 2) needs -1 bytes at rows[2].workspace_bytes"]),
    ("a negative time", changed(CHAIN, rows={2: {"time_ns": -1}}),
     ["sizes: row 2 (aten.mm.default in 2) takes -1 ns at rows[2].time_ns"]),
    # events
    ("events out of order", replace(CHAIN, events=(CHAIN.events[1], CHAIN.events[0], *CHAIN.events[2:])),
     ["events: stands behind an event that comes later, by boundary, then kind at events[1]"]),
    ("a free before a swap-out", replace(SWAP, events=(SWAP.events[1], SWAP.events[0], *SWAP.events[2:])),
     ["events: stands behind an event that comes later, by boundary, then kind at events[1]"]),
    ("a copy freed before it starts", replace(
        SWAP, events=(*SWAP.events[:9], out(13, 11, 10, 17, 21), SWAP.events[10])),
     ["events: freed at boundary 10, before the copy may start at events[9].free"]),
    ("a copy needed before it starts", replace(
        SWAP, events=(*SWAP.events[:7], back(13, 10, 9, 12, 16), *SWAP.events[8:])),
     ["events: needed at boundary 9, before the copy may start at events[7].need"]),
    # ops
    ("an op left out", changed(CHAIN, rows={10: {"op": 11}}),
     ["ops: op 10 never runs at rows"]),
    ("another call in the second run", changed(RECOMPUTE, rows={8: {"call": "aten.addmm.default"}}),
     ["ops: op 0 is aten.mm.default in row 0 at rows[8].call"]),
    ("more reads in the second run", changed(RECOMPUTE, rows={8: {"reads": (0, 2, 3)}}),
     ["ops: row 8 (aten.mm.default in 0) touches what its first run did not at rows[8]"]),
    ("more writes in the second run", changed(RECOMPUTE, rows={8: {"writes": (3,)}}),
     ["ops: row 8 (aten.mm.default in 0) touches what its first run did not at rows[8]"]),
    ("other storages in the second run", changed(RECOMPUTE, rows={9: {"creates": (5,)}}),
     ["ops: row 9 (aten.relu_.default in 1) creates other storages than its first run at rows[9].creates",
      "create: storage 5 (2/mm.0) is created by ops 1 and 2 at storages[5]"]),
    # recompute
    ("a second run without an event", with_events(RECOMPUTE, drop=(5,)),
     ["recompute: row 9 (aten.relu_.default in 1) repeats op 1 without a recompute at rows[9]"]),
    ("an event without a second run", with_events(RECOMPUTE, add=(Recompute(row=2, restores=()),)),
     ["recompute: row 2 (aten.mm.default in 2) is the first run of its op at events[0]"]),
    ("an event twice", with_events(RECOMPUTE, add=(Recompute(row=9, restores=()),)),
     ["recompute: row 9 (aten.relu_.default in 1) has a recompute already at events[6]"]),
    ("a storage the op does not create", changed(RECOMPUTE, events={5: {"restores": (4,)}}),
     ["recompute: row 9 (aten.relu_.default in 1) does not create storage 4 (0/mm.0) at events[5].restores"]),
    ("an input written since", changed(RECOMPUTE, rows={7: {"writes": (0, 1)}}),
     ["recompute: row 8 (aten.mm.default in 0) finds storage 0 (0.weight) as op 9 left it, "
      "in captured order as it entered the step at rows[8]"]),
    ("a change in place made twice", with_events(replace(
        with_rows(CHAIN, 0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10), events=tuple(
            replace(e, at=e.at + (e.at > 7)) if isinstance(e, Free) else e for e in CHAIN.events)),
        add=(Recompute(row=8, restores=()),)),
     ["recompute: row 8 (aten.add_.Tensor in 2) finds storage 1 (2.weight) as op 9 left it, "
      "in captured order as it entered the step at rows[8]"]),
    # order
    ("a weight updated before its last reader", with_events(
        with_rows(CHAIN, 0, 1, 2, 3, 4, 5, 7, 6, 8, 9, 10), drop=(2,), add=(free(8, 8),)),
     ["order: row 7 (aten.mm.default in 2) finds storage 1 (2.weight) as op 9 left it, "
      "in captured order as it entered the step at rows[7]"]),
    ("a reader before the change in place", with_events(
        with_rows(RESIDUAL, 0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 10), drop=(4, 5), add=(free(10, 5, 9, 11),)),
     ["order: row 8 (aten.native_batch_norm_backward.default in norm) finds storage 11 (fc/mm.2) as op 6 left it, "
      "in captured order as op 7 left it at rows[8]"]),
    # create
    ("made again while it is there", with_events(RECOMPUTE, drop=(1,)),
     ["create: row 8 (aten.mm.default in 0) creates storage 4 (0/mm.0), which is there already at rows[8].creates"]),
    ("two creators", with_events(changed(CHAIN, rows={9: {"creates": (4, 12)}}), drop=(5,), add=(free(10, 4, 11),)),
     ["create: storage 4 (0/mm.0) is created by ops 0 and 8 at storages[4]"]),
    # resident
    ("freed before its last reader", with_events(CHAIN, drop=(0,), add=(free(1, 4),)),
     ["resident: row 1 (aten.relu.default in 1) touches storage 4 (0/mm.0), which is not resident at rows[1]"]),
    ("out when touched, said once", with_events(SWAP, drop=(4, 6), add=(free(9, 10),)),
     ["resident: row 8 (aten.threshold_backward.default in 1) touches storage 5 (1/relu.0), "
      "which is not resident at rows[8]"]),
    ("out when touched, twice", with_events(RECOMPUTE, drop=(1, 6), add=(free(5, 4), free(10, 4), free(11, 9))),
     ["resident: row 5 (aten.mm.default in 2) touches storage 4 (0/mm.0), which is not resident at rows[5]",
      "resident: row 10 (aten.threshold_backward.default in 1) touches storage 4 (0/mm.0), "
      "which is not resident at rows[10]"]),
    # free
    ("freed twice", with_events(CHAIN, add=(free(3, 4),)),
     ["free: storage 4 (0/mm.0) is not resident at events[1].free"]),
    ("freed while it is copied out", with_events(changed(SWAP, events={0: {"free": 7}}), add=(free(6, 5),)),
     ["free: storage 5 (1/relu.0) is still being copied out by events[0] at events[3].free"]),
    ("freed while it is copied in", with_events(changed(
        SWAP, rows={8: {"reads": (10,)}}, events={4: {"need": 11}})),
     ["free: storage 5 (1/relu.0) is still being copied in at events[6].free"]),
    # swap_out
    ("copied out before it is there", changed(SWAP, events={0: {"start": 1}}),
     ["swap_out: storage 5 (1/relu.0) is not resident at boundary 1 at events[0]"]),
    ("copied out twice at once", with_events(changed(SWAP, events={9: {"begin_us": 30, "end_us": 30}}),
                                             add=(out(5, 3, 6, 4, 5),)),
     ["swap_out: storage 5 (1/relu.0) is being copied out by events[0] already at events[2]"]),
    ("written while it is copied out", changed(SWAP, rows={2: {"writes": (5,)}}),
     ["swap_out: row 2 (aten.mm.default in 2) writes storage 5 (1/relu.0) while events[0] copies it out at rows[2]"]),
    ("copied out while it is copied in", with_events(
        SWAP, drop=(6, 9), add=(free(9, 10), out(5, 8, 9, 6, 7), out(13, 11, 11, 17, 21))),
     ["swap_out: storage 5 (1/relu.0) is not resident at boundary 8 at events[4]"]),
    # swap_in
    ("copied in twice", with_events(SWAP, add=(back(5, 8, 8, 10, 10),)),
     ["swap_in: storage 5 (1/relu.0) is on the device already at boundary 8 at events[5]"]),
    ("never copied out", with_events(SWAP, drop=(0,), add=(free(6, 5),)),
     ["swap_in: storage 5 (1/relu.0) has no host copy at boundary 8 at events[4]"]),
    ("a stale host copy", with_events(
        changed(SWAP, rows={8: {"writes": (5,)}}), add=(back(5, 10, 10, 16, 17), free(11, 5))),
     ["swap_in: the host copy of storage 5 (1/relu.0) is older than its contents were when it was freed at events[8]"]),
    ("touched before it is there", with_events(
        changed(SWAP, events={4: {"need": 9}}), drop=(6,), add=(free(9, 10), free(10, 5))),
     ["swap_in: row 8 (aten.threshold_backward.default in 1) touches storage 5 (1/relu.0) "
      "before its copy in is waited for at rows[8]"]),
    # lanes
    ("two copies in one lane", changed(SWAP, events={7: {"begin_us": 9}}),
     ["lanes: the copy begins at 9 us while events[4] keeps the lane until 10 us at events[7].begin_us"]),
    ("a copy inside a more urgent one", changed(SWAP, events={7: {"begin_us": 8, "end_us": 9}}),
     ["lanes: the copy begins at 8 us while events[4] keeps the lane until 10 us at events[7].begin_us"]),
    ("a copy that ends before it begins", changed(SWAP, events={9: {"end_us": 16}}),
     ["lanes: the copy ends before it begins at events[9].end_us"]),
    # caller
    ("the batch freed", with_events(CHAIN, drop=(6,), add=(free(11, 2, 12),)),
     ["caller: storage 2 (batch[0]) is the caller's; a plan may not move it at events[6]"]),
    ("a batch that does not enter", changed(CHAIN, storages={2: {"enters": False}}),
     ["caller: storage 2 (batch[0]) is the caller's and does not start the step resident at storages[2]",
      "boundary: storage 2 (batch[0]) does not enter the step but starts resident at storages[2].starts",
      "order: row 0 (aten.mm.default in 0) finds storage 2 (batch[0]) empty, "
      "in captured order as it entered the step at rows[0]",
      "order: row 9 (aten.mm.default in 0) finds storage 2 (batch[0]) empty, "
      "in captured order as it entered the step at rows[9]"]),
    ("the batch away at the start", changed(replace(SWAP, events=(back(2, 0, 0, 0, 1), *SWAP.events)),
                                            storages={2: {"starts": "out", "leaves": True}}),
     ["caller: storage 2 (batch[0]) is the caller's and does not start the step resident at storages[2]",
      "caller: storage 2 (batch[0]) is the caller's; a plan may not move it at events[0]"]),
    # boundary
    ("left behind", with_events(CHAIN, drop=(6,)),
     ["boundary: storage 12 (0/mm.1) does not leave the step but is still there at its end at storages[12]"]),
    ("the output freed", with_events(CHAIN, drop=(6,), add=(free(11, 7, 12),)),
     ["boundary: storage 7 (loss) leaves the step but is not there at its end at storages[7]"]),
    ("out at the start, there at the end", with_events(SWAP, drop=(9,)),
     [f"boundary: {MOMENTUM} starts the step out but is resident at its end at storages[13]"]),
    ("out at the end without a copy", with_events(SWAP, drop=(9,), add=(free(11, 13),)),
     [f"boundary: {MOMENTUM} ends the step out, without a host copy of its last contents "
      "at storages[13]"]),
    ("made again and left at an older state", changed(ENDS_OLDER, storages={4: {"leaves": True}}),
     ["boundary: storage 4 (0/mm.0) ends the step as op 0 left it, in captured order as op 1 left it at storages[4]"]),
    ("out at the start, but nothing puts it there", changed(SWAP, storages={13: {"leaves": False}}),
     [f"boundary: {MOMENTUM} starts out, "
      "but does not leave the step that has to put it there at storages[13].starts"]),
    ("there at the start without entering", changed(SWAP, storages={13: {"enters": False}}),
     [f"boundary: {MOMENTUM} does not enter the step but starts out at storages[13].starts",
      f"swap_in: the host copy of {MOMENTUM} is older than its contents were when it was freed at events[7]",
      f"order: row 10 (aten._fused_sgd_.default in 0) finds {MOMENTUM} empty, "
      "in captured order as it entered the step at rows[10]"]),
    ("entering but nowhere", changed(CHAIN, storages={2: {"kind": "gradient", "starts": "absent"}}),
     ["boundary: storage 2 (batch[0]) enters the step but starts absent at storages[2].starts",
      "resident: row 0 (aten.mm.default in 0) touches storage 2 (batch[0]), which is not resident at rows[0]"]),
    # peak, budget, resting, spill
    ("a peak too low", changed(CHAIN, promise={"peak_bytes": 1907}),
     ["peak: the peak is 1908 bytes, in row 6 (aten.mm.default in 2); 1907 are promised at promise.peak_bytes"]),
    ("a peak too high", changed(CHAIN, promise={"peak_bytes": 1909}),
     ["peak: the peak is 1908 bytes, in row 6 (aten.mm.default in 2); 1909 are promised at promise.peak_bytes"]),
    ("a peak elsewhere", changed(CHAIN, promise={"peak_row": 5}),
     ["peak: row 5 (aten.mm.default in 2) has 1708 bytes, the peak is 1908 at promise.peak_row"]),
    ("more at the end than at any row", replace(CROWDED, rows=CHAIN.rows, promise=replace(
        CROWDED.promise, peak_bytes=2204, peak_row=1)),
     ["peak: 2408 bytes at the end of the step are more than at any row at promise.peak_bytes"]),
    ("a peak over the budget", changed(CHAIN, promise={"budget_bytes": 1907}),
     ["budget: the promised peak, 1908 bytes, is over the budget, 1907 at promise.budget_bytes"]),
    ("a rest too low", changed(CHAIN, promise={"resting_bytes": 1003}),
     ["resting: 1004 bytes stay between two steps; 1003 are promised at promise.resting_bytes"]),
    ("too little room on the host", changed(SWAP, promise={"spill_bytes": 599}),
     ["spill: 2 storages are ever out and need 600 bytes; 599 are promised at promise.spill_bytes"]),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "findings"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_fault_is_found_and_nothing_else(plan: Plan, findings: list[str]) -> None:
    assert [str(finding) for finding in check(plan)] == findings


def test_every_rule_has_a_fault_that_breaks_only_it() -> None:
    text = inspect.getdoc(inspect.getmodule(check)) or ""
    rules = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")} - {"rule"}
    alone = {findings[0].partition(":")[0] for _, _, findings in FAULTS if len(findings) == 1}
    assert len(rules) == 18
    assert rules == alone


def test_all_faults_are_found_not_the_first() -> None:
    plan = changed(with_events(CHAIN, drop=(0, 6)), promise={"peak_bytes": 1, "budget_bytes": 0})
    assert [finding.rule for finding in check(plan)] == ["boundary", "boundary", "peak", "budget"]


def test_a_finding_reads_as_one_line() -> None:
    assert str(Finding("free", "events[3]", "storage 4 (a) is not resident")) == (
        "free: storage 4 (a) is not resident at events[3]"
    )
