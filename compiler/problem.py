"""The planning problem: integers only, so that any planner, test or other program can read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tensile.compiler.graph import Graph, Op, Storage
from tensile.compiler.profile import Profile

# a copy costs tens of microseconds before its first byte: below this size it is not worth its place in a lane
SMALLEST_SWAP_BYTES = 256 * 2**10
_ROUNDING_BYTES = {"cpu": 1, "cuda": 512}  # what the device's allocator rounds a size up to
_PHASES = {"forward": 0, "backward": 1, "optimizer": 2}
_MOVABLE = ("parameter", "buffer", "optimizer_state", "gradient", "activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOp:
    """Storages are indices into Problem.storages. `again_ok`: may be run again; `again_ns`, `again_reads` and
    `again_writes` are what a second run takes, reads and writes (batch norm without statistics writes nothing)."""

    time_ns: int
    workspace_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    after: tuple[int, ...]
    again_ok: bool
    again_ns: int
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
    smallest_bytes: int  # storages below it are not worth a decision
    fixed_bytes: int  # always resident and never movable: outputs of the last step the caller still holds
    out_ps_per_byte: int  # link, picoseconds per byte, safety margin included
    in_ps_per_byte: int
    out_latency_ns: int
    in_latency_ns: int
    duplex_percent: int

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for files and other programs."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Problem:
        """The problem `to_json` wrote."""
        tuples = {"reads", "writes", "creates", "after", "again_reads", "again_writes"}

        def op(facts: dict[str, Any]) -> ProblemOp:
            facts = {key: tuple(value) if key in tuples else value for key, value in facts.items()}
            return ProblemOp(**facts)

        ops = tuple(op(facts) for facts in data["ops"])
        storages = tuple(ProblemStorage(**storage) for storage in data["storages"])
        return Problem(**{**data, "ops": ops, "storages": storages})


def build_problem(
    graph: Graph, profile: Profile, budget_bytes: int, *, margin_percent: int = 85,
    smallest_swap_bytes: int = SMALLEST_SWAP_BYTES, swap_state: bool = True,
) -> Problem:  # fmt: skip
    """The planning problem of a measured graph. Copies are planned at `margin_percent` of the measured bandwidth;
    storages below `smallest_swap_bytes` are not swapped, those below a quarter of it not recomputed. Without
    `swap_state` what enters the step stays where it is."""
    rounding = _ROUNDING_BYTES.get(graph.device.partition(":")[0], 1)
    excess = {
        s: extra for op in graph.ops for s, extra in zip(op.creates, profile.excess_bytes[op.index], strict=False)
    }
    storages = tuple(
        _storage(storage, excess.get(storage.index, 0), graph.device, rounding, smallest_swap_bytes, swap_state)
        for storage in graph.storages
    )
    held = sum(storages[s.index].size_bytes for s in graph.storages if s.kind == "output" and s.leaves)
    link = profile.link
    return Problem(
        ops=tuple(
            _op(op, graph, profile.op_ns[op.index], profile.workspace_bytes[op.index]) for op in graph.ops
        ),
        storages=storages, budget_bytes=budget_bytes, smallest_bytes=smallest_swap_bytes // 4, fixed_bytes=held,
        out_ps_per_byte=_ps_per_byte(link.out_bytes_per_s, margin_percent),
        in_ps_per_byte=_ps_per_byte(link.in_bytes_per_s, margin_percent),
        out_latency_ns=1000 * link.out_latency_us, in_latency_ns=1000 * link.in_latency_us,
        duplex_percent=link.duplex_percent,
    )  # fmt: skip


def _storage(
    storage: Storage, excess: int, device: str, rounding: int, smallest: int, swap_state: bool
) -> ProblemStorage:  # fmt: skip
    size = -(-(storage.size_bytes + excess) // rounding) * rounding if storage.device == device else 0
    movable = storage.kind in _MOVABLE and not (storage.leaves and not storage.enters)
    return ProblemStorage(
        size_bytes=size, enters=storage.enters, leaves=storage.leaves,
        swappable=movable and size >= smallest and (swap_state or not storage.enters),
    )  # fmt: skip


def _op(op: Op, graph: Graph, time_ns: int, workspace_bytes: int) -> ProblemOp:
    # statistics of a batch norm: the second run leaves them out
    skipped = {s for s in op.writes if graph.storages[s].enters} if not op.no_recompute else set()
    return ProblemOp(
        time_ns=time_ns, workspace_bytes=workspace_bytes, reads=op.reads, writes=op.writes, creates=op.creates,
        after=op.after, again_ok=not op.no_recompute, again_ns=time_ns,
        again_reads=tuple(s for s in op.reads if s not in skipped),
        again_writes=tuple(s for s in op.writes if s not in skipped), phase=_PHASES[op.phase],
    )  # fmt: skip


def _ps_per_byte(bytes_per_s: int, margin_percent: int) -> int:
    return -(-(10**12) * 100 // (max(1, bytes_per_s) * margin_percent))
