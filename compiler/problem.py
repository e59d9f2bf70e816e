"""The planning problem: integers only, so that any planner, test or other program can read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOp:
    """Storages are indices into Problem.storages. `again_ok`: may be run again; `again_reads`/`again_writes` are what
    a second run reads and writes (batch norm without statistics writes nothing). `movable`: an optimizer op."""

    time_ns: int
    workspace_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    after: tuple[int, ...]
    again_ok: bool
    again_reads: tuple[int, ...]
    again_writes: tuple[int, ...]
    phase: int  # 0 forward, 1 backward, 2 optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemStorage:
    """`size_bytes` is what the allocator takes (rounded). `swappable`: big enough, owned by a tensor the runtime may
    hollow out, and not held by the caller (the batch is not)."""

    size_bytes: int
    enters: bool
    leaves: bool
    swappable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Minimise the step time so that memory at every run is at most `budget_bytes`.

    Memory at run k = fixed_bytes + resident storages (inputs and outputs of the run included) + its workspace.
    The horizon is cyclic: what enters and leaves may be out at the boundary between two steps."""

    ops: tuple[ProblemOp, ...]  # in captured order
    storages: tuple[ProblemStorage, ...]
    budget_bytes: int
    fixed_bytes: int  # always resident and never movable: outputs of the last step the caller still holds
    out_ps_per_byte: int  # link, picoseconds per byte, safety margin included
    in_ps_per_byte: int
    out_latency_ns: int
    in_latency_ns: int
    duplex_percent: int
