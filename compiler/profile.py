"""What was measured: op latencies, workspaces, the link. A record; measure.py fills it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The copy link between device memory and the host tier, one direction each."""

    out_bytes_per_s: int
    in_bytes_per_s: int
    out_latency_us: int  # per copy
    in_latency_us: int
    duplex_percent: int  # each direction's rate while both run, in percent of its rate alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times and workspaces of a Graph's ops, in op order, and the link they run beside.

    `eager_*` are the unmodified step's; `eager_source` says whether it ran or was modelled from the graph because it
    would not fit."""

    device_name: str
    source: str  # "measured: 5 repeats, medians, 243 of 612 keys new"
    op_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    excess_bytes: tuple[tuple[int, ...], ...]  # what each storage an op creates takes above its layout
    link: Link
    eager_step_us: int
    eager_peak_bytes: int
    eager_source: Literal["measured", "modelled"]
