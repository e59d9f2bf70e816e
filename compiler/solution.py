"""What a planner answers: the order of execution, what runs again, what is swapped. Integers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution. `restores` is None for the first execution of an op; for a recompute it lists the storages,
    among those the op creates, that come back to life (empty for an op that only writes in place)."""

    op: int
    restores: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A storage leaves for one idle interval. All four are boundaries of the run sequence (boundary k is just before
    runs[k]; len(runs) is the end of the step). Within a step 0 <= out_start < out_free <= in_start <= in_need <= N.
    A swap that crosses the end of the step (`wraps`) has in_start <= in_need <= out_start: it starts the step out."""

    storage: int
    out_start: int
    out_free: int
    in_start: int
    in_need: int
    wraps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Everything else follows: a storage is freed right after the last run that touches it before it is created again
    (or for good), unless it leaves the step."""

    runs: tuple[Run, ...]
    swaps: tuple[Swap, ...]
    planner: str
    step_ns: int  # simulated, steady state
    peak_bytes: int
    peak_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fastest plan found, and how near it is to the best there can be. `bound_ns`: no plan of this op order is
    faster, within the budget and under the problem's times. `reached`: (planner, step in ns) of every part that ran."""

    solution: Solution
    plain_ns: int  # the ops alone
    bound_ns: float
    reached: tuple[tuple[str, int], ...]
    ended: str  # why the search ended: "rounds", "seconds", "bound", "interrupted"; "" when there was none
