"""The planner on stored problems: what greedy, relaxation and search reach, and the bound. `make bench-planner`.

Overheads are points of the ops' time. `reference` is what a prototype reached on the same problems with 10 s of local
search (greedy, LP rounding, ruin and recreate).
`python benchmarks/bench_planner.py NAME...` takes only these problems and stores nothing.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import record

from tensile.compiler.problem import Problem
from tensile.compiler.solve import Effort, solve
from tensile.schedules.errors import InfeasibleBudget

PROBLEMS = Path(__file__).resolve().parent / "problems"
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
EFFORT = Effort(seconds=10, rounds=10**6, patience=10**6)
# reached by the prototype, in points, at SHARES; None where it found no plan
REFERENCE: dict[str, tuple[float | None, ...]] = {
    "resnet50-2080ti": (0.00, 1.89, 3.51, 5.51, 8.10), "vgg16-2080ti": (0.00, 0.32, 0.90, 1.76, None),
    "inception_v3-2080ti": (0.00, 1.50, 3.11, 4.91, 6.54), "densenet121-2080ti": (1.10, 4.39, 6.85, 9.50, 12.38),
    "gpt2-2080ti": (0.00, 0.11, 0.89, 1.86, 4.69), "bert-2080ti": (0.00, 0.00, 0.25, 0.80, 3.79),
    "resnet50-h200": (0.31, 2.36, 3.80, 5.80, 7.99), "gpt2-h200": (0.00, 0.27, 0.82, 1.60, 4.91),
    "bert-h200": (0.00, 0.00, 0.28, 0.68, 5.03), "llama24-h200": (0.25, 3.94, 9.91, 18.26, 53.86),
}  # fmt: skip


def read(name: str) -> tuple[Problem, int]:
    """A stored problem and its captured peak in bytes."""
    data = json.loads(gzip.decompress((PROBLEMS / f"{name}.json.gz").read_bytes()))
    return Problem.from_json(data["problem"]), data["captured_peak_bytes"]


def main() -> None:
    names = sys.argv[1:] or list(REFERENCE)
    rows: list[dict[str, Any]] = []
    for name in names:
        problem, peak = read(name)
        for share, reference in zip(SHARES, REFERENCE[name], strict=True):
            rows.append(_row(name, replace(problem, budget_bytes=int(peak * share)), share, reference))
            print(rows[-1], file=sys.stderr)
    near = [float(row["gap"]) for row in rows if row["gap"] != "-" and float(row["budget"]) >= 0.4]
    for limit in (0.3, 1.0):
        share = sum(gap <= limit for gap in near) / max(1, len(near))
        print(f"within {limit} points of the bound at budgets >= 0.4: {share:.0%} of {len(near)}")
    behind = [r for r in rows if r["reference"] != "-" and r["plan"] != "-"
              and float(r["plan"]) > float(r["reference"]) + 0.005]  # fmt: skip
    print(f"behind the reference: {len(behind)} of {len(rows)}")
    if not sys.argv[1:]:
        record("planner", rows, "make bench-planner")


def _row(name: str, problem: Problem, share: float, reference: float | None) -> dict[str, Any]:
    started = time.perf_counter()
    row: dict[str, Any] = {"problem": name, "budget": share, "greedy": "-", "relaxation": "-", "plan": "-",
                           "bound": "-", "gap": "-"}  # fmt: skip
    try:
        answer = solve(problem, EFFORT)
    except InfeasibleBudget as error:
        row["bound"] = f"no plan; least budget {error.smallest_bytes / problem.budget_bytes * share:.3f}"
    else:

        def points(step_ns: float) -> float:
            return 100 * (step_ns / answer.plain_ns - 1)

        reached = {planner: f"{points(step_ns):.2f}" for planner, step_ns in answer.reached}
        row |= {key: reached.get(key, "-") for key in ("greedy", "relaxation")}
        row |= {"plan": f"{points(answer.solution.step_ns):.2f}", "bound": f"{points(answer.bound_ns):.2f}",
                "gap": f"{points(answer.solution.step_ns) - points(answer.bound_ns):.2f}"}  # fmt: skip
    return row | {
        "reference": "-" if reference is None else reference,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
