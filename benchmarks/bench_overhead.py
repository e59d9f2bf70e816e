"""What replaying costs: a plan that swaps and recomputes nothing, against eager in the same run. `make bench-overhead`.

Both steps run in one process, alternating, on two copies of the workload that start from the same seed; the ratio is
the median of the per-pair ratios.
"""

from __future__ import annotations

import statistics
import time

from common import record
from trial import compiled

import tensile
from tensile.compiler.load import load_workload

EXAMPLES = ("gpt2", "resnet50")
PAIRS = 15


def main() -> None:
    rows = []
    for example in EXAMPLES:
        spec = f"examples/{example}.py"
        with compiled(spec, "150%") as (path, plan):
            eager, planned = load_workload(spec), load_workload(spec)
            with tensile.load(
                path, model=planned.model, optimizer=planned.optimizer, step_fn=planned.step_fn, memory_policy="none"
            ) as step:
                ratios, eager_us, planned_us = [], [], []
                for pair in range(PAIRS + 2):
                    started = time.perf_counter()
                    eager.step_fn(eager.model, eager.optimizer, *eager.batch)
                    between = time.perf_counter()
                    step(*planned.batch)
                    ended = time.perf_counter()
                    if pair >= 2:  # the first steps create state and are measured for memory
                        eager_us.append(1e6 * (between - started))
                        planned_us.append(1e6 * (ended - between))
                        ratios.append((ended - between) / (between - started))
                report = step.report()
        rows.append({
            "model": example, "eager_us": round(statistics.median(eager_us)),
            "planned_us": round(statistics.median(planned_us)), "planned/eager": f"{statistics.median(ratios):.3f}",
            "eager_peak_bytes": plan.promise.eager_peak_bytes, "planned_peak_bytes": report.measured_peak_bytes,
            "peak": "<= eager" if (report.measured_peak_bytes or 0) <= plan.promise.eager_peak_bytes else "ABOVE EAGER",
        })  # fmt: skip
    record("overhead", rows, "make bench-overhead")


if __name__ == "__main__":
    main()
