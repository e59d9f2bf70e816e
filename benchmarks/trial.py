"""One training run in a process of its own, eagerly or under a plan: losses, a digest of all state, peaks, times."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensile.schedules import codec
from tensile.schedules.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one run measured. `peak_bytes` is allocated bytes at the worst moment of the second step, resting bytes
    included; `high_water_bytes` the process's resident peak over all steps; `step_us` the median of the later steps."""

    losses: tuple[str, ...]  # hexadecimal floats
    state: str  # SHA-256 over every parameter, buffer, optimizer state tensor and the generator's state
    peak_bytes: int
    high_water_bytes: int
    base_bytes: int  # anonymous bytes resident before the first step; pages of files can be dropped, these cannot
    step_us: float
    report: str  # what the planned step says of itself; "" when eager
    applied: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The run did not finish: `returncode` is negative for a signal; `error` is its last line."""

    returncode: int
    error: str


def run(
    spec: str, *, plan: Path | None, steps: int = 6, memory_policy: str = "tight", threads: int | None = None,
    wrap: Callable[[list[str]], list[str]] = lambda command: command,
) -> Trial | Killed:  # fmt: skip
    """Train `spec` ("model.py:name") for `steps` steps in a new process; `wrap` may put the command under a limit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trial.json"
        command = [sys.executable, __file__, spec, "--steps", str(steps), "--out", str(out), "--policy", memory_policy]
        command += ["--plan", str(plan)] if plan else []
        command += ["--threads", str(threads)] if threads else []
        # eager as a user has it who never heard of tensile: without the page alignment `import tensile` asks for
        environment = os.environ | ({} if plan else {"THP_MEM_ALLOC_ENABLE": "0"})
        done = subprocess.run(wrap(command), capture_output=True, text=True, env=environment)
        if done.returncode != 0 or not out.exists():
            return Killed(returncode=done.returncode, error=(done.stderr.strip().splitlines() or [""])[-1])
        return Trial(**json.loads(out.read_text()))


@contextmanager
def compiled(spec: str, budget: str) -> Iterator[tuple[Path, Plan]]:
    """A plan for `spec`, made by the command line in a process of its own; the file is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.plan.yaml"
        command = [sys.executable, "-m", "tensile.cli", "compile", spec, "--budget", budget, "-o", str(path), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{spec} at {budget} did not compile:\n{done.stderr}")
        yield path, codec.read(path)


def train(spec: str, *, plan: Path | None, steps: int, memory_policy: str) -> Trial:
    """The run itself, in this process. The learning rate changes at every step."""
    import torch

    import tensile
    from tensile.compiler.load import load_workload
    from tensile.runtime.memory import allocated_peak, high_water_bytes, reset_high_water

    job = load_workload(spec)
    model, optimizer, batch = job.model, job.optimizer, tuple(job.batch)
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.manual_seed(1)
    planned = None
    step: Callable[..., Any]
    if plan is not None:
        planned = step = tensile.load(
            plan, model=model, optimizer=optimizer, step_fn=job.step_fn, batch=batch, memory_policy=memory_policy
        )
    else:

        def step(*args: Any) -> Any:
            return job.step_fn(model, optimizer, *args)

    reset_high_water()
    base_bytes = _anonymous_bytes()
    losses, seconds, peak_bytes = [], [], 0
    for number in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + number) / steps
        started = time.perf_counter()
        if planned is None and number in (1, 2):  # the second run knows the sizes of what the first one left
            resting = _resting_bytes(model, optimizer, batch)
            above, out = allocated_peak(lambda: step(*batch))
            peak_bytes = resting + above
        else:
            out = step(*batch)
            seconds.append(time.perf_counter() - started)
        loss = out if isinstance(out, torch.Tensor) else torch.utils._pytree.tree_leaves(out)[0]
        losses.append(float(loss).hex())
        del out, loss
    high_water = high_water_bytes()
    report = applied = ""
    if planned is not None:
        peak_bytes = planned.report().measured_peak_bytes or 0
        report, applied = str(planned.report()), planned.report().applied
        planned.close()
    return Trial(
        losses=tuple(losses), state=_digest(model, optimizer), peak_bytes=peak_bytes, high_water_bytes=high_water,
        base_bytes=base_bytes, step_us=1e6 * statistics.median(seconds[-3:]), report=report, applied=applied,
    )  # fmt: skip


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return 1024 * int(fields.get("RssAnon", "0 kB").split()[0])


def _resting_bytes(model: Any, optimizer: Any, batch: tuple[Any, ...]) -> int:
    import torch
    from torch.utils._pytree import tree_leaves

    from tensile.compiler.capture import collect_state

    tensors = [*collect_state(model, optimizer).values(), *(t for t in tree_leaves(batch) if torch.is_tensor(t))]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _digest(model: Any, optimizer: Any) -> str:
    import hashlib

    import torch

    from tensile.compiler.capture import collect_state

    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, tensor in sorted(collect_state(model, optimizer).items()):
        digest.update(name.encode())
        flat = tensor.detach().contiguous().reshape(-1)
        digest.update(bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", default="tight")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    trial = train(args.spec, plan=args.plan, steps=args.steps, memory_policy=args.policy)
    args.out.write_text(json.dumps(asdict(trial)))


if __name__ == "__main__":
    main()
