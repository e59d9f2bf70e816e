"""The ledger: what the planner reaches on stored problems, exactly; it moves with the planner, in the same commit.

`python tests/test_ledger.py --update` writes it anew; the difference is to be read.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from referee import faults

from tensile.compiler.problem import Problem
from tensile.compiler.solve import Effort, solve

LEDGER = Path(__file__).with_name("ledger.json")
PROBLEMS = Path(__file__).parent.parent / "benchmarks" / "problems"
CELLS = [
    (name, share)
    for name in ("vgg16-2080ti", "resnet50-2080ti", "gpt2-h200", "bert-2080ti")
    for share in (0.6, 0.5, 0.4)
]
EFFORT = Effort(seconds=3600, rounds=15)


def entry(name: str, share: float) -> dict[str, Any]:
    data = json.loads(gzip.decompress((PROBLEMS / f"{name}.json.gz").read_bytes()))
    problem = replace(Problem.from_json(data["problem"]), budget_bytes=int(data["captured_peak_bytes"] * share))
    answer = solve(problem, EFFORT)
    assert faults(problem, answer.solution) == []
    return {
        "problem": name, "budget": share, "peak_bytes": answer.solution.peak_bytes,
        "step_ns": answer.solution.step_ns, "greedy_ns": answer.reached[0][1],
        "overhead": f"{100 * (answer.solution.step_ns / answer.plain_ns - 1):.3f}",
        "bound": f"{100 * (answer.bound_ns / answer.plain_ns - 1):.3f}",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "share"), CELLS)
def test_the_planner_reaches_what_the_ledger_says(name: str, share: float) -> None:
    known = {(row["problem"], row["budget"]): row for row in json.loads(LEDGER.read_text())}
    assert entry(name, share) == known[name, share]


if __name__ == "__main__" and "--update" in sys.argv:
    LEDGER.write_text("[\n" + ",\n".join(json.dumps(entry(*cell)) for cell in CELLS) + "\n]\n")
