"""What a plan says: frozen records, and nothing that reads, writes or judges them.

A plan is a sequence of rows, each one execution of a captured op, and of events anchored to *boundaries*: boundary
`k` is the moment just before row `k`; boundary `len(rows)` is the end of the step. At one boundary things happen in
this order: copies out begin (`SwapOut.start`), frees (`Free.at`, `SwapOut.free`), allocations (`SwapIn.start`), waits
(`SwapIn.need`). Positions, never times, decide what is resident, so memory at every row is an exact integer:

bytes at row k = what the caller holds + resident storages + storages the row creates + the row's workspace.

- Resident is a storage from the row that creates it, `SwapIn.start` or boundary 0 until `Free.at` or `SwapOut.free`.
- A recompute creates all its op creates, also beside a copy that still lives; what it does not restore is gone when
  the row ends, without a `Free`.
- The batch and constants (kinds `batch`, `constant`) belong to the caller: resident at every row, never freed.
- The caller may still hold the last step's outputs: every storage of kind `output` that leaves counts once more at
  every row. Gradients that leave without entering do not: they are dropped before row 0 of the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]
Kind = Literal["parameter", "buffer", "optimizer_state", "gradient", "batch", "constant", "activation", "output"]
Residence = Literal["resident", "out", "absent"]
Source = Literal["measured", "modelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a plan is for, field by field, so that a mismatch can name the field.

    Digests are the first 16 hexadecimal digits of a SHA-256.
    """

    torch: str  # version, e.g. "2.14.1"
    device: str  # device type, e.g. "cpu"
    optimizer: str  # class and structural options, e.g. "AdamW(amsgrad=False, foreach=None)"
    state: str  # digest of names, shapes, strides, dtypes of parameters, buffers, optimizer state
    batch: str  # human text of the batch, e.g. "input_ids int64[8,512]"
    ops: str  # digest of ops and their arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Which step on which machine the plan was made for."""

    workload: str  # "gpt2.py:workload"
    fingerprint: Fingerprint
    device_name: str  # e.g. "AMD EPYC, 2 threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What the plan guarantees and what it expects.

    `peak_bytes` is a guarantee: allocated bytes on the device at the worst row of any steady-state step, including
    parameters, optimizer state, gradients, batch, op workspaces and bytes in flight. Times are expectations.
    """

    peak_bytes: int
    peak_row: int  # a row at which peak_bytes is reached
    budget_bytes: int
    eager_peak_bytes: int
    eager_peak_source: Source
    resting_bytes: int  # resident after boundary len(rows), between two steps
    spill_bytes: int  # host memory or disk: at least the sum of the sizes of all storages that are ever out
    rss_slack_percent: int  # the process's high-water mark may exceed peak_bytes by this much under the memory policy
    step_us: int
    bound_us: int  # no plan in this op order takes less within the budget, under the same op and copy times
    eager_step_us: int
    eager_step_source: Source
    profile_source: str  # "measured" and how
    planner: str  # "local search"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One execution of a captured op. A row whose op already ran is a recompute and has a `Recompute` event."""

    op: int  # index in captured order
    call: str  # "aten.mm.default"
    phase: Phase
    module: str  # module path, "" when outside the model
    source: str  # the user's own line, "train.py:31"
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]  # storages changed in place
    creates: tuple[int, ...]  # storages the op allocates
    time_ns: int
    workspace_bytes: int  # above inputs and outputs, while the op runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRow:
    """One storage: what memory holds. Views share it and cost nothing."""

    storage: int
    name: str
    kind: Kind
    size_bytes: int
    dtype: str  # of its first tensor, "float32"
    shape: tuple[int, ...]  # of its first tensor
    enters: bool  # exists before the step
    leaves: bool  # exists after the step
    starts: Residence  # where it is at boundary 0; and, for what enters and leaves, at the end too


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut:
    """Copy a storage to the host. The copy may begin at boundary `start`; at boundary `free` compute waits for it
    and the device bytes are given back. `begin_us`, `end_us` are expected times in the step; a copy that is needed
    sooner may go between."""

    storage: int
    start: int
    free: int
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn:
    """Copy a storage back. Device bytes are taken and the copy may begin at boundary `start`; compute waits for it
    at boundary `need`."""

    storage: int
    start: int
    need: int
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Row `row` runs its op again; of what the op creates, `restores` come back to life, the rest is dropped at once.
    Empty for an op that only writes in place."""

    row: int
    restores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The device bytes of `storages` are given back at boundary `at`, without a copy."""

    at: int
    storages: tuple[int, ...]


Event = SwapOut | SwapIn | Recompute | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan. `rows[k]` runs k-th; `storages[k].storage == k`; `events` are ordered by boundary (`start`, `row`,
    `at`), then by kind in the order of `Event`. Each lane copies in chunks, the copy with the nearest
    deadline (`free`, `need`) first."""

    subject: Subject
    promise: Promise
    rows: tuple[OpRow, ...]
    storages: tuple[StorageRow, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()  # what the compiler found worth saying, one line each
