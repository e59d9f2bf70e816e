"""The timeline: by hand on the examples, and against a third way of summing on generated plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from plan_strategies import bytes_by_sets, plans

from tensile.schedules import codec
from tensile.schedules.plan import Plan
from tensile.schedules.timeline import Stay, resident_at, stays_of, timeline

SCHEDULES = Path(codec.__file__).parent

BY_HAND = {
    "chain": (1204, 1404, 1304, 1308, 1408, 1708, 1908, 1808, 1608, 1608, 1408),
    "swap": (1204, 1404, 1304, 1308, 1408, 1708, 1708, 1608, 1608, 1608, 1808),
    "recompute": (1204, 1204, 1304, 1308, 1408, 1708, 1708, 1608, 1408, 1408, 1608, 1608, 1408),
    "residual": (924, 1124, 1324, 1128, 1328, 1528, 1528, 1528, 1128, 1168, 728),
}


def example(name: str) -> Plan:
    return codec.read(SCHEDULES / f"{name}.yaml")


@pytest.mark.parametrize("name", list(BY_HAND))
def test_an_example_has_the_bytes_worked_out_by_hand(name: str) -> None:
    assert timeline(example(name)).total_bytes == BY_HAND[name]


@pytest.mark.parametrize("name", list(BY_HAND))
def test_an_example_keeps_its_promise(name: str) -> None:
    plan = example(name)
    line = timeline(plan)
    assert (line.peak_bytes, line.peak_row) == (plan.promise.peak_bytes, plan.promise.peak_row)
    assert line.resting_bytes == plan.promise.resting_bytes


@given(plans())
@settings(max_examples=100, deadline=None)
def test_intervals_and_sets_agree_on_every_row(plan: Plan) -> None:
    line = timeline(plan)
    assert (list(line.total_bytes), line.resting_bytes) == bytes_by_sets(plan)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_the_parts_add_up_to_the_whole(plan: Plan) -> None:
    line = timeline(plan)
    assert all(len(totals) == len(plan.rows) for totals in (*line.kind_bytes.values(), line.out_bytes, line.in_bytes))
    for k, total in enumerate(line.total_bytes):
        kinds = sum(totals[k] for totals in line.kind_bytes.values())
        assert kinds + line.held_bytes + line.workspace_bytes[k] == total
        assert line.out_bytes[k] + line.in_bytes[k] <= kinds


@given(plans())
@settings(max_examples=60, deadline=None)
def test_who_is_there_at_a_row_makes_up_its_bytes(plan: Plan) -> None:
    line = timeline(plan)
    k = line.peak_row
    there = resident_at(plan, k)
    sizes = [plan.storages[stay.storage].size_bytes for stay in there]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) + line.held_bytes + line.workspace_bytes[k] == line.peak_bytes


def test_bytes_in_flight_count_until_the_copy_is_waited_for() -> None:
    line = timeline(example("swap"))
    assert line.out_bytes == (0, 0, 200, 200, 200, 200, 0, 0, 0, 0, 0)
    assert line.in_bytes == (0,) * 11, "these copies start where they are needed"
    plan = example("swap")
    early = replace(plan, events=tuple(replace(e, start=6) if k == 4 else e for k, e in enumerate(plan.events)))
    assert timeline(early).in_bytes == (0, 0, 0, 0, 0, 0, 200, 200, 0, 0, 0)


def test_the_stays_of_a_swapped_storage_say_what_they_are_for() -> None:
    stays = [stay for stay in stays_of(example("swap")) if stay.storage in (5, 13)]
    assert stays == [
        Stay(storage=5, first=1, end=2),
        Stay(storage=5, first=2, end=6, purpose="out"),
        Stay(storage=5, first=8, end=9),
        Stay(storage=13, first=10, end=11),
    ]


def test_what_a_recompute_drops_counts_at_its_row_only() -> None:
    plan = example("recompute")
    rows = tuple(replace(row, creates=(*row.creates, 12)) if row.op == 0 else row for row in plan.rows)
    extra = replace(plan.storages[4], storage=12, name="0/mm.0[1]", size_bytes=64)
    events = tuple(replace(e, storages=(*e.storages, 12)) if k == 1 else e for k, e in enumerate(plan.events))
    wider = replace(plan, rows=rows, storages=(*plan.storages, extra), events=events)
    stays = [stay for stay in stays_of(wider) if stay.storage == 12]
    assert stays == [Stay(storage=12, first=0, end=6), Stay(storage=12, first=8, end=9, again=True)]
    assert timeline(wider).total_bytes[8] == 1408 + 64
    assert timeline(wider).total_bytes[9] == 1408


def test_the_caller_may_hold_the_last_steps_outputs_all_along() -> None:
    plan = example("chain")
    loss = replace(plan.storages[7], size_bytes=1004)
    larger = replace(plan, storages=(*plan.storages[:7], loss, *plan.storages[8:]))
    line = timeline(larger)
    assert line.held_bytes == 1004
    assert line.total_bytes[0] == 1204 + 1000, "before this step's loss exists"
    assert line.total_bytes[3] == 1308 + 2000
    assert line.resting_bytes == 1004 + 1000, "between two steps there is one"
