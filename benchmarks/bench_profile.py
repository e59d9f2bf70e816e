"""Whether op times add up to the step: their sum against the eager step, both ways of measuring. `make bench-profile`.

Every row is a process of its own. `eager` is the user's unmodified step; under the malloc policy "tight", which the
planned step runs with by default, ops that make large tensors take longer, and the ratio says how much. `alone` is how
steps that do not fit are measured. `modelled` is how far the eager peak computed from the graph and the workspaces is
off, in bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

EXAMPLES = ("gpt2", "resnet50", "vgg16")
POLICIES = ("none", "tight")


def one(example: str, policy: str, threads: int | None) -> dict[str, Any]:
    """The row of one example, measured in this process."""
    import torch

    from tensile.compiler.capture import capture
    from tensile.compiler.eager import measure_eager, model_eager_peak
    from tensile.compiler.load import load_workload
    from tensile.compiler.measure import measure
    from tensile.compiler.profile import Link
    from tensile.runtime.memory import apply_memory_policy

    logging.disable(logging.WARNING)
    if threads:
        torch.set_num_threads(threads)
    workload = load_workload(f"examples/{example}.py")
    captured = capture(workload, check_twice=False)
    eager = measure_eager(workload, captured.graph)
    setting = ""
    if policy != "none":
        refused = apply_memory_policy(policy)  # type: ignore[arg-type]
        assert refused is None, refused
        setting = f"malloc {policy}"
    # op times do not depend on the link; a record needs one
    link = Link(out_bytes_per_s=1, in_bytes_per_s=1, out_latency_us=0, in_latency_us=0, duplex_percent=100)
    inside = measure(captured, workload, link=link, eager=eager, cache_dir=None, setting=setting)
    alone = measure(
        captured, workload, link=link, eager=replace(eager, source="modelled"), cache_dir=None, setting=setting
    )
    modelled = model_eager_peak(captured.graph, inside.workspace_bytes)
    eager_us = inside.eager_step_us
    distinct = len({op.key for op in captured.graph.ops})
    return {
        "model": example, "threads": torch.get_num_threads(), "malloc": policy,
        "ops": f"{len(captured.graph.ops)}, {distinct} distinct", "eager ms": round(eager_us / 1000),
        "ops/eager": f"{sum(inside.op_ns) / 1000 / eager_us:.3f}",
        "alone/eager": f"{sum(alone.op_ns) / 1000 / eager_us:.3f}",
        "same workspace": "yes" if alone.workspace_bytes == inside.workspace_bytes else "NO",
        "eager peak": eager.peak_bytes, "modelled": f"{modelled - eager.peak_bytes:+d}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="threads torch computes with (default: torch's own choice)")
    parser.add_argument("--examples", nargs="+", default=EXAMPLES, choices=EXAMPLES)
    parser.add_argument("--one", nargs=2, metavar=("EXAMPLE", "POLICY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one, args.threads)))
        return
    from common import record

    given = ["--threads", str(args.threads)] if args.threads else []
    rows = []
    for example in args.examples:
        for policy in POLICIES:
            command = [sys.executable, __file__, "--one", example, policy, *given]
            rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    record("profile", rows, " ".join(["python benchmarks/bench_profile.py", *given]))


if __name__ == "__main__":
    main()
