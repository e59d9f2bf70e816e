"""What a person and a script are told about a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_strategies import plans

from tensile.schedules import codec, render
from tensile.schedules.check import check
from tensile.schedules.plan import Plan
from tensile.schedules.tally import matching, swapped
from tensile.schedules.timeline import timeline

SCHEDULES = Path(codec.__file__).parent


def example(name: str) -> Plan:
    return codec.read(SCHEDULES / f"{name}.yaml")


SWAP_TEXT = """\
swap.py:workload on no machine, worked out by hand
torch 2.14.1, cpu, SGD(lr=0.1, momentum=0.9), batch float32[25], float32[25]
planned by hand, profile supposed: 1 us an op

          planned     eager
peak     1.77 KiB  2.35 KiB  modelled  75% of eager, budget 1.81 KiB
step      21.0 us   11.0 us  modelled  +90.9% for swaps and recomputes, at least +0.0%
at rest    1004 B                      between two steps
spill       600 B                      host memory or disk
the process may take 0% more than the peak

memory   ▅▆▆▆▆▇▇▇▇▇█

swaps: 2 copies of 2 storages, 600 B out a step
  optimizer_state 400 B, activation 200 B
  2 x  * (2 modules)  600 B
recomputes: 0 rows, 0.00 us a step

peak: row 10 (aten._fused_sgd_.default in 0) of 11, optimizer, swap.py:12 in step
  parameter 800 B, optimizer_state 400 B, gradient 400 B, batch 200 B, output 4 B,
  outputs the caller holds 4 B
  22%  400 B  parameter                   0.weight
  22%  400 B  parameter                   2.weight
  22%  400 B  gradient                    0/mm.1                    swap.py:9 in step
  22%  400 B  optimizer_state             0.weight/momentum_buffer
   6%  100 B  batch                       batch[0]
   6%  100 B  batch                       batch[1]
   0%    4 B  output                      loss                      swap.py:10 in step
   0%    4 B  output, held by the caller  loss                      swap.py:10 in step

note: the chain with momentum on its first weight; relu.0 is away between its two uses in the
  backward pass, the momentum from update to update
note: at the peak, row 10: 1000 state and batch, 4 last loss, 4 loss, 400 gradient of 0.weight, 400
  momentum"""


def test_the_summary_of_the_swap_example() -> None:
    assert render.inspect_text(example("swap")) == SWAP_TEXT


def test_the_summary_fits_one_screen() -> None:
    for name in ("chain", "recompute", "residual", "swap"):
        assert render.inspect_text(example(name)).count("\n") < 40


@given(plans(), st.integers(60, 140))
@settings(max_examples=60, deadline=None)
def test_no_line_is_wider_than_asked(plan: Plan, width: int) -> None:
    for text in (render.inspect_text(plan, width=width), render.inspect_text(plan, width=width, pattern="*")):
        assert max(map(len, text.split("\n"))) <= width


def test_a_pattern_shows_the_rows_that_match_with_their_memory_and_events() -> None:
    assert render.inspect_text(example("recompute"), pattern="*relu*") == (
        "row    memory  phase    call                module  source                  events\n"
        "  1  1.18 KiB  forward  aten.relu_.default  1       recompute.py:9 in step\n"
        "  9  1.38 KiB  forward  aten.relu_.default  1       recompute.py:9 in step  recomputes in place"
    )


def test_a_pattern_may_match_the_module() -> None:
    assert matching(example("chain"), "2") == (2, 5, 6, 7)


def test_a_pattern_that_matches_nothing_says_so() -> None:
    assert render.inspect_text(example("chain"), pattern="conv*") == "no row's call or module matches 'conv*'"


def test_a_summary_names_what_is_recomputed_by_module() -> None:
    lines = render.inspect_text(example("recompute")).split("\n")
    at = lines.index("recomputes: 2 rows, 2.00 us a step")
    assert lines[at + 1] == "  2 x  * (2 modules)  200 B  2.00 us"


def test_json_has_exact_numbers_and_every_module() -> None:
    answer = json.loads(json.dumps(render.inspect_json(example("recompute"), pattern="aten.relu_*")))
    assert answer["promise"]["peak_bytes"] == 1708
    assert answer["counts"] == {
        "ops": 11, "rows": 13, "storages": 12, "swap_outs": 0, "swap_ins": 0, "recomputes": 2,
    }  # fmt: skip
    assert answer["recomputed"] == [
        {"module": "0", "count": 1, "size_bytes": 200, "time_us": 1},
        {"module": "1", "count": 1, "size_bytes": 0, "time_us": 1},
    ]
    assert answer["swapped"] == []
    assert answer["peak"]["kind_bytes"] == {
        "parameter": 800, "gradient": 400, "batch": 200, "activation": 300, "output": 4,
    }  # fmt: skip
    assert [(row["row"], row["total_bytes"]) for row in answer["rows"]] == [(1, 1204), (9, 1408)]


@given(plans())
@settings(max_examples=60, deadline=None)
def test_the_storages_at_the_peak_and_the_workspace_add_up_to_it(plan: Plan) -> None:
    peak = json.loads(json.dumps(render.inspect_json(plan)))["peak"]
    assert sum(storage["size_bytes"] for storage in peak["storages"]) + peak["workspace_bytes"] == peak["total_bytes"]


def test_a_parameter_that_is_swapped_belongs_to_the_module_it_is_named_after() -> None:
    assert [(moved.module, moved.count, moved.size_bytes) for moved in swapped(example("swap"))] == [
        ("0", 1, 400),
        ("1", 1, 200),
    ]


def test_the_gate_is_silent_at_the_peak() -> None:
    assert render.gate(example("chain"), 1908) is None


def test_the_gate_says_where_the_peak_is_and_what_is_there() -> None:
    finding = render.gate(example("chain"), 1024)
    assert str(finding) == (
        "max-peak: the peak, 1.86 KiB, is 884 B over 1.00 KiB, in row 6 (aten.mm.default in 2), backward, "
        "chain.py:9 in step; largest there: 0.weight (parameter, 400 B), 2.weight (parameter, 400 B), "
        "2/mm.1 (gradient, 400 B, chain.py:9 in step) at rows[6]"
    )


@given(plans())
@settings(max_examples=60, deadline=None)
def test_the_gate_opens_exactly_at_the_peak(plan: Plan) -> None:
    peak = timeline(plan).peak_bytes
    assert render.gate(plan, peak) is None
    assert render.gate(plan, peak - 1) is not None


@pytest.mark.parametrize("name", ["h.0.attn", "h.11.attn"])
def test_numbered_modules_are_told_together(name: str) -> None:
    plan = example("recompute")
    rows = tuple(replace(row, module=name if row.op == 0 else "h.3.attn") for row in plan.rows)
    assert "  2 x  h.*.attn (2 modules)  200 B  2.00 us" in render.inspect_text(replace(plan, rows=rows)).split("\n")


def test_a_name_from_a_file_cannot_command_the_terminal() -> None:
    plan = example("swap")
    rude = "\x1b[2J\r\nname"
    storages = tuple(replace(storage, name=rude) for storage in plan.storages)
    rows = tuple(replace(row, source=rude, module=rude) for row in plan.rows)
    plan = replace(plan, storages=storages, rows=rows, notes=(rude,))
    texts = [render.inspect_text(plan), render.inspect_text(plan, pattern="*"), str(render.gate(plan, 0))]
    texts += [finding.message for finding in check(replace(plan, events=plan.events[1:]))]
    assert len(texts) > 3
    assert all(line.isprintable() for text in texts for line in text.split("\n"))
