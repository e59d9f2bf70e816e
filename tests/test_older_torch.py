"""What is planned and replayed where torch cannot trade the memory of two storages, as before 2.14."""

from __future__ import annotations

import pytest
import workloads

from tensile.compiler import torch_private
from tensile.compiler.budget import parse_budget
from tensile.compiler.pipeline import plan_profiled, profile_workload
from tensile.compiler.profile import Link
from tensile.runtime.verify import verify
from tensile.schedules.errors import InfeasibleBudget
from tensile.schedules.plan import Recompute, SwapOut

FAST = Link(out_bytes_per_s=10**9, in_bytes_per_s=10**9, out_latency_us=0, in_latency_us=0, duplex_percent=100)
SLOW = Link(out_bytes_per_s=10**6, in_bytes_per_s=10**6, out_latency_us=0, in_latency_us=0, duplex_percent=100)


@pytest.mark.parametrize(("link", "kind"), [(FAST, SwapOut), (SLOW, Recompute)], ids=["swaps", "recomputes"])
def test_activations_are_swapped_and_recomputed_bit_for_bit_and_state_stays(
    monkeypatch: pytest.MonkeyPatch, link: Link, kind: type
) -> None:
    monkeypatch.setattr(torch_private, "CAN_SWAP_POINTERS", False)
    job = workloads.make("bert", "adam")
    captured, profile = profile_workload(job, link=link, cache_dir=None, repeats=1)
    plan = plan_profiled(captured.graph, profile, name="bert", budget=parse_budget("60%"), smallest_swap_bytes=1024)
    assert any(isinstance(event, kind) for event in plan.events)
    swapped = {event.storage for event in plan.events if isinstance(event, SwapOut)}
    assert not any(plan.storages[s].enters for s in swapped)
    assert plan.notes[0].startswith("state stays in memory: torch ")
    result = verify(job, plan, steps=4)
    assert result.first_difference is None
    assert result.planned_peak_bytes <= result.promised_peak_bytes <= 0.6 * profile.eager_peak_bytes


def test_a_budget_that_state_alone_exceeds_says_that_state_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "CAN_SWAP_POINTERS", False)
    job = workloads.make("bert", "adam")
    captured, profile = profile_workload(job, link=FAST, cache_dir=None, repeats=1)
    with pytest.raises(InfeasibleBudget, match=r"\(state stays in memory: torch .* cannot empty a storage and fill"):
        plan_profiled(captured.graph, profile, name="bert", budget=parse_budget("10%"))
