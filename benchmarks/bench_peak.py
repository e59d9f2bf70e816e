"""Measured peak against the promised one: GPT-2, ResNet-50, VGG-16 at 100, 80 and 60 % of eager's."""

from __future__ import annotations

import sys

from common import record
from trial import Killed, compiled, run

EXAMPLES = ("gpt2", "resnet50", "vgg16")
PERCENT = (100, 80, 60)


def main() -> None:
    rows = []
    for example in EXAMPLES:
        eager = run(f"examples/{example}.py", plan=None, steps=4)
        for percent in PERCENT:
            with compiled(f"examples/{example}.py", f"{percent}%") as (path, plan):
                planned = run(f"examples/{example}.py", plan=path, steps=4)
            if isinstance(eager, Killed) or isinstance(planned, Killed):
                raise SystemExit(f"{example} at {percent} % did not finish: {eager} {planned}")
            promised = plan.promise.peak_bytes
            rows.append({
                "model": example, "budget": f"{percent}%", "eager_bytes": eager.peak_bytes, "promised_bytes": promised,
                "measured_bytes": planned.peak_bytes, "gap": f"{1 - planned.peak_bytes / promised:.2%}",
                "kept": "yes" if planned.peak_bytes <= promised else "NO",
                "step/eager": f"{planned.step_us / eager.step_us:.2f}",
                "promised step/eager": f"{plan.promise.step_us / plan.promise.eager_step_us:.2f}",
                "same bits": "yes" if (eager.losses, eager.state) == (planned.losses, planned.state) else "NO",
            })  # fmt: skip
            print(rows[-1], file=sys.stderr)
    record("peak", rows, "make bench-peak")
    if any(row["kept"] != "yes" or row["same bits"] != "yes" for row in rows):
        sys.exit("not every plan kept its promise")


if __name__ == "__main__":
    main()
