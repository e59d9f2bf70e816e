"""Draws docs/gpt2-step.svg: memory over one step, eager order against a plan. `python docs/picture.py PLAN`;
needs the extra `plot`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from tensile.schedules import codec
from tensile.schedules.plan import Free, Plan, Recompute
from tensile.schedules.timeline import timeline

MIB = 2**20


def without_moves(plan: Plan) -> Plan:
    """The same order with nothing swapped; only for plans without recomputes."""
    assert not any(isinstance(event, Recompute) for event in plan.events)
    events = tuple(event for event in plan.events if isinstance(event, Free))
    storages = tuple(replace(s, starts="resident" if s.enters else "absent") for s in plan.storages)
    return replace(plan, events=events, storages=storages)


def main() -> None:
    plan = codec.read(Path(sys.argv[1]))
    planned, plain = timeline(plan), timeline(without_moves(plan))
    plt.rcParams["svg.hashsalt"] = "tensile"
    figure, axes = plt.subplots(figsize=(9, 3.2))
    rows = range(len(planned.total_bytes))
    axes.fill_between(rows, [b / MIB for b in plain.total_bytes], step="post", color="#d9d9d9", label="nothing moved")
    axes.fill_between(rows, [b / MIB for b in planned.total_bytes], step="post", color="#4878a8", label="planned")
    axes.axhline(plan.promise.eager_peak_bytes / MIB, color="#888888", linestyle=":", label="eager's peak")
    axes.axhline(plan.promise.budget_bytes / MIB, color="#b03a2e", linestyle="--", label="budget")
    axes.set(xlabel="op of the step", ylabel="MiB on the device", xlim=(0, len(rows) - 1), ylim=(0, None))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "gpt2-step.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
