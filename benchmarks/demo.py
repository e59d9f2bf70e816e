"""The demo: compile GPT-2 for 60 % of its eager peak, train eagerly and under the plan, compare. `make demo`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from trial import Killed, Trial, run

from tensile.schedules import codec
from tensile.schedules.units import format_bytes, format_us

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gpt2.py"
STEPS = 8


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan_path = Path(folder) / "gpt2.plan.yaml"
        command = ["-m", "tensile.cli", "compile", str(EXAMPLE), "--budget", "60%", "-o", str(plan_path)]
        print("$ tensile compile examples/gpt2.py --budget 60% -o gpt2.plan.yaml", flush=True)
        if subprocess.run([sys.executable, *command]).returncode:
            sys.exit("the example did not compile")
        promise = codec.read(plan_path).promise
        eager, planned = (run(str(EXAMPLE), plan=plan, steps=STEPS) for plan in (None, plan_path))
    for trial in (eager, planned):
        if isinstance(trial, Killed):
            sys.exit(f"a training run ended with {trial.returncode}: {trial.error}")
    assert isinstance(eager, Trial)
    assert isinstance(planned, Trial)

    equal = eager.losses == planned.losses and eager.state == planned.state
    table = Table("", "eager", "promised", "measured", title=f"GPT-2, {STEPS} steps, two processes")
    table.add_row(
        "peak, allocated", format_bytes(eager.peak_bytes), format_bytes(promise.peak_bytes),
        format_bytes(planned.peak_bytes),
    )  # fmt: skip
    table.add_row(
        "peak, process", format_bytes(eager.high_water_bytes), "", format_bytes(planned.high_water_bytes),
    )  # fmt: skip
    table.add_row("step time", format_us(eager.step_us), format_us(promise.step_us), format_us(planned.step_us))
    table.add_row(
        "  of eager's", "1.00", f"{promise.step_us / eager.step_us:.2f}", f"{planned.step_us / eager.step_us:.2f}"
    )
    Console().print(table)
    print(f"losses and all state bitwise equal: {'yes' if equal else 'NO'}")
    print(planned.applied)
    within = planned.peak_bytes <= promise.peak_bytes <= promise.budget_bytes
    if not (equal and within):
        sys.exit("the plan broke its promise")


if __name__ == "__main__":
    main()
