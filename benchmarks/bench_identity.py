"""Planned and eager training, bit for bit: every model and optimizer at 100 % and 60 % of eager. `make bench-identity`.

Four steps with the learning rate changed at each; losses, gradients, parameters, buffers, optimizer state and the
generator are compared after every step. `--quick` takes one optimizer a model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from common import record

from tensile.compiler.budget import parse_budget
from tensile.compiler.pipeline import plan_profiled, profile_workload
from tensile.runtime.link import measure_link
from tensile.runtime.verify import verify
from tensile.schedules.errors import InfeasibleBudget

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import workloads

TEXT_OPTIMIZERS = ("adam", "adamw", "adamw_foreach", "adamw_fused")
SMALLEST = 1024  # bytes; the models are tiny, and everything is to be exercised
IMAGE_OPTIMIZERS = ("sgd", "momentum", "nesterov", "sgd_fused", "adamw")


def main() -> None:
    quick = "--quick" in sys.argv
    link = measure_link("cpu", None)
    rows: list[dict[str, Any]] = []
    cases = [(m, o) for m in workloads.TEXT for o in TEXT_OPTIMIZERS[: 1 if quick else None]]
    cases += [(m, o) for m in workloads.IMAGES for o in IMAGE_OPTIMIZERS[1 : 2 if quick else None]]
    with tempfile.TemporaryDirectory() as cache:
        for model, optimizer in cases:
            workload = workloads.make(model, optimizer)
            captured, profile = profile_workload(workload, link=link, cache_dir=Path(cache), repeats=3)
            for budget in ("100%", "60%"):
                rows.append(_row(workload, captured.graph, profile, model, optimizer, budget))
                print(rows[-1], file=sys.stderr)
    name, command = (
        ("identity-quick", "python benchmarks/bench_identity.py --quick")
        if quick
        else ("identity", "make bench-identity")
    )
    record(name, rows, command)
    if any(row["bits equal"] != "yes" or row["peak kept"] != "yes" for row in rows):
        sys.exit("not every plan kept its promise")


def _row(workload: Any, graph: Any, profile: Any, model: str, optimizer: str, budget: str) -> dict[str, Any]:
    used = budget
    try:
        plan = plan_profiled(graph, profile, name=model, budget=parse_budget(budget), smallest_swap_bytes=SMALLEST)
    except InfeasibleBudget as error:
        # tiny models hold little but state: the smallest feasible budget stands in, and is named
        used = f"min ({error.smallest_bytes / profile.eager_peak_bytes:.0%})"
        plan = plan_profiled(
            graph, profile, name=model, budget=parse_budget(str(error.smallest_bytes)), smallest_swap_bytes=SMALLEST
        )
    result = verify(workload, plan, steps=4)
    return {
        "model": model, "optimizer": optimizer, "budget": used, "applied": result.applied.removeprefix("applied "),
        "promised_bytes": result.promised_peak_bytes, "measured_bytes": result.planned_peak_bytes,
        "peak kept": "yes" if result.planned_peak_bytes <= result.promised_peak_bytes else "NO",
        "bits equal": "yes" if result.first_difference is None else result.first_difference,
    }  # fmt: skip


if __name__ == "__main__":
    main()
