"""How long compiling takes without measuring: GPT-2 small (12 layers) and ResNet-50. `make bench-compile`.

Op times come from a flat guess instead of the device, because only the compiler itself is timed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from common import record
from transformers import GPT2Config, GPT2LMHeadModel

import tensile
from tensile.compiler.budget import parse_budget
from tensile.compiler.capture import capture
from tensile.compiler.graph import Graph
from tensile.compiler.load import load_workload
from tensile.compiler.pipeline import plan_profiled
from tensile.compiler.problem import build_problem
from tensile.compiler.profile import Link, Profile
from tensile.compiler.solve import solve
from tensile.schedules import codec

LIMIT_S = {"gpt2-small": 30.0, "resnet50": 20.0}
LINK = Link(out_bytes_per_s=2 * 10**9, in_bytes_per_s=10**9, out_latency_us=50, in_latency_us=80, duplex_percent=60)


def gpt2_small() -> tensile.Workload:
    """GPT-2 small: 12 layers, 768 wide, single-tensor AdamW, clipping, dropout."""
    config = GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-4)

    def step(model, optimizer, input_ids):  # type: ignore[no-untyped-def]
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return tensile.Workload(model, optimizer, step, (torch.randint(50257, (4, 256)),), name="gpt2-small")


def guessed_profile(graph: Graph) -> Profile:
    """20 microseconds an op and a nanosecond for every 8 bytes it touches."""
    size = [storage.size_bytes for storage in graph.storages]
    op_ns = tuple(20_000 + sum(size[s] for s in {*op.reads, *op.writes, *op.creates}) // 8 for op in graph.ops)
    peak = plan_free_peak(graph)
    return Profile(
        device_name="guessed", source="guessed", op_ns=op_ns, workspace_bytes=(0,) * len(op_ns),
        excess_bytes=((),) * len(op_ns), link=LINK,
        eager_step_us=sum(op_ns) // 1000, eager_peak_bytes=peak, eager_source="modelled",
    )  # fmt: skip


def plan_free_peak(graph: Graph) -> int:
    """Peak of the captured order when everything dies at its last use."""
    size = [storage.size_bytes for storage in graph.storages]
    last = {s: op.index for op in graph.ops for s in (*op.reads, *op.writes, *op.creates)}
    live = sum(s.size_bytes for s in graph.storages if s.enters)
    peak = live
    for op in graph.ops:
        live += sum(size[s] for s in op.creates)
        peak = max(peak, live)
        dying = {s for s in (*op.reads, *op.writes, *op.creates) if last[s] == op.index}
        live -= sum(size[s] for s in dying if not (graph.storages[s].leaves or graph.storages[s].enters))
    return peak


@contextmanager
def timed(row: dict[str, object], key: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    row[key] = round(time.perf_counter() - started, 2)


def main() -> None:
    rows = []
    makers: dict[str, Callable[[], tensile.Workload]] = {
        "gpt2-small": gpt2_small,
        "resnet50": lambda: load_workload("examples/resnet50.py"),
    }
    for name, make in makers.items():
        workload = make()
        row: dict[str, object] = {"model": name}
        with timed(row, "capture_s"):
            captured = capture(workload)
        graph = captured.graph
        row["ops"] = len(graph.ops)
        profile = guessed_profile(graph)
        with timed(row, "plan_s"):
            plan = plan_profiled(graph, profile, name=name, budget=parse_budget("60%"))
        with timed(row, "greedy_s"):
            solve(build_problem(graph, profile, plan.promise.budget_bytes))
        with timed(row, "write_and_read_s"):
            codec.loads(codec.dumps(plan))
        total = sum(float(str(row[key])) for key in ("capture_s", "plan_s", "write_and_read_s"))
        row |= {"total_s": round(total, 2), "limit_s": LIMIT_S[name], "ok": "yes" if total <= LIMIT_S[name] else "NO"}
        rows.append(row)
    record("compile", rows, "make bench-compile")


if __name__ == "__main__":
    main()
