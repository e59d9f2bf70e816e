"""Inside a hard memory limit where eager is killed, the planned run finishes with eager's losses."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common import record
from trial import Killed, compiled, run

EXAMPLE = "examples/gpt2.py"
STEPS = 4
ROOM = 64 * 2**20  # first-call caches, threads and pages of libraries above what is there before the first step


@contextmanager
def hard_limit(limit_bytes: int) -> Iterator[Callable[[list[str]], list[str]] | None]:
    """A wrapper that runs a command inside a memory cgroup of its own, or None where cgroups cannot be made."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, key = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = root / f"tensile-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / key).write_text(str(limit_bytes))
    except OSError:
        yield None
        return
    try:
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        yield lambda command: ["sh", "-c", join, "sh", *command]
    finally:
        group.rmdir()


def main() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise SystemExit("bench-limit skipped: a memory cgroup needs Linux and the right to make one")
    rows = []
    with compiled(EXAMPLE, "60%") as (path, plan):
        free, at_rest = run(EXAMPLE, plan=None, steps=STEPS), run(EXAMPLE, plan=path, steps=1)
        if isinstance(free, Killed) or isinstance(at_rest, Killed):
            raise SystemExit(f"an unlimited run did not finish: {free} {at_rest}")
        promised = plan.promise.peak_bytes * (1 + plan.promise.rss_slack_percent / 100)
        limit = int(at_rest.base_bytes - plan.promise.resting_bytes + promised + ROOM)
        with hard_limit(limit) as wrap:
            if wrap is None:
                raise SystemExit("bench-limit skipped: no memory cgroup can be made here")
            for name, plan_path in (("eager", None), ("planned", path)):
                trial = run(EXAMPLE, plan=plan_path, steps=STEPS, wrap=wrap)
                finished = not isinstance(trial, Killed)
                rows.append({
                    "run": name, "limit_bytes": limit, "unlimited_eager_high_water_bytes": free.high_water_bytes,
                    "finished": "yes" if finished else f"no ({trial.returncode})",
                    "high_water_bytes": trial.high_water_bytes if finished else 0,
                    "losses as unlimited eager": ("yes" if trial.losses == free.losses else "NO") if finished else "-",
                })  # fmt: skip
    record("limit", rows, "make bench-limit")


if __name__ == "__main__":
    main()
