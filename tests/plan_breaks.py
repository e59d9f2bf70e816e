"""Ways to break a plan that `check` accepts, each of which it must then reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tensile.schedules.plan import Event, Free, Plan, Recompute, SwapIn, SwapOut


def _without(plan: Plan, k: int) -> Plan:
    return replace(plan, events=plan.events[:k] + plan.events[k + 1 :])


def _promise(plan: Plan, **changes: int) -> Plan:
    return replace(plan, promise=replace(plan.promise, **changes))


def _each(kind: type[Event], breaks: Callable[[Plan, int], Plan]) -> Callable[[Plan], list[Plan]]:
    return lambda plan: [breaks(plan, k) for k, event in enumerate(plan.events) if isinstance(event, kind)]


def _twice(plan: Plan, k: int) -> Plan:
    return replace(plan, events=(*plan.events[: k + 1], *plan.events[k:]))


BREAKS: dict[str, Callable[[Plan], list[Plan]]] = {
    "peak one higher": lambda plan: [_promise(plan, peak_bytes=plan.promise.peak_bytes + 1)],
    "rest one higher": lambda plan: [_promise(plan, resting_bytes=plan.promise.resting_bytes + 1)],
    "budget one below the peak": lambda plan: [_promise(plan, budget_bytes=plan.promise.peak_bytes - 1)],
    "a free forgotten": _each(Free, _without),
    "a free twice": _each(Free, _twice),
    "a swap-out forgotten": _each(SwapOut, _without),
    "a swap-in forgotten": _each(SwapIn, _without),
    "a swap-in twice": _each(SwapIn, _twice),
    "a recompute forgotten": _each(Recompute, _without),
    "a recompute twice": _each(Recompute, _twice),
    "the last op never run": lambda plan: [
        replace(
            plan, rows=tuple(replace(r, op=r.op + 1) if r.op == max(x.op for x in plan.rows) else r for r in plan.rows)
        )
    ],
    "an op run again": lambda plan: [replace(plan, rows=(*plan.rows, plan.rows[-1]))],
}
