"""From a solution to the plan: the only place where indices get names and expected times."""

from __future__ import annotations

from collections import defaultdict

from tensile.compiler.graph import Graph
from tensile.compiler.occupancy import memory, residences
from tensile.compiler.problem import Problem
from tensile.compiler.profile import Profile
from tensile.compiler.simulate import Timeline, run_ns, simulate
from tensile.compiler.solution import Answer, Run, Solution
from tensile.schedules.plan import (
    Event,
    Free,
    OpRow,
    Plan,
    Promise,
    Recompute,
    StorageRow,
    Subject,
    SwapIn,
    SwapOut,
)
from tensile.schedules.units import format_bytes

RSS_SLACK_PERCENT = 3  # what the process may be resident with above allocated bytes, under the tight memory policy
_KINDS = (SwapOut, SwapIn, Recompute, Free)


def emit(
    graph: Graph, profile: Profile, problem: Problem, answer: Answer, *, workload_name: str,
    notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan that an answer to `problem` stands for."""
    solution = answer.solution
    timeline = simulate(problem, solution.runs, solution.swaps)
    away = {swap.storage for swap in solution.swaps}
    starts_out = {swap.storage for swap in solution.swaps if swap.wraps}
    size = [storage.size_bytes for storage in problem.storages]
    promise = Promise(
        peak_bytes=timeline.peak_bytes, peak_row=timeline.peak_run, budget_bytes=problem.budget_bytes,
        eager_peak_bytes=profile.eager_peak_bytes, eager_peak_source=profile.eager_source,
        resting_bytes=_resting(problem, starts_out), spill_bytes=sum(size[s] for s in away),
        rss_slack_percent=RSS_SLACK_PERCENT, step_us=timeline.step_ns // 1000,
        bound_us=int(answer.bound_ns) // 1000, eager_step_us=profile.eager_step_us,
        eager_step_source=profile.eager_source, profile_source=profile.source, planner=solution.planner,
    )  # fmt: skip
    return Plan(
        subject=Subject(workload=workload_name, fingerprint=graph.fingerprint, device_name=profile.device_name),
        promise=promise,
        rows=tuple(_row(graph, problem, run) for run in solution.runs),
        storages=tuple(_storages(graph, problem, starts_out)),
        events=tuple(_events(problem, solution, timeline)),
        notes=(*notes, *_notes(problem, answer, timeline)),
    )


def _row(graph: Graph, problem: Problem, run: Run) -> OpRow:
    op, facts = graph.ops[run.op], problem.ops[run.op]
    first = run.restores is None
    return OpRow(
        op=run.op, call=op.call, phase=op.phase, module=op.module, source=op.source,
        reads=facts.reads if first else facts.again_reads, writes=facts.writes if first else facts.again_writes,
        creates=facts.creates, time_ns=run_ns(problem, run), workspace_bytes=facts.workspace_bytes,
    )  # fmt: skip


def _storages(graph: Graph, problem: Problem, starts_out: set[int]) -> list[StorageRow]:
    first = {tensor.storage: tensor for tensor in reversed(graph.tensors)}
    return [
        StorageRow(
            storage=s.index, name=s.name, kind=s.kind, size_bytes=problem.storages[s.index].size_bytes,
            dtype=first[s.index].dtype if s.index in first else "",
            shape=first[s.index].shape if s.index in first else (),
            enters=s.enters, leaves=s.leaves,
            starts="out" if s.index in starts_out else "resident" if s.enters else "absent",
        )
        for s in graph.storages
    ]  # fmt: skip


def _events(problem: Problem, solution: Solution, timeline: Timeline) -> list[Event]:
    events: list[Event] = []
    for swap, out_ns, in_ns in zip(solution.swaps, timeline.out_ns, timeline.in_ns, strict=True):
        events.append(
            SwapOut(
                storage=swap.storage,
                start=swap.out_start,
                free=swap.out_free,
                begin_us=out_ns[0] // 1000,
                end_us=out_ns[1] // 1000,
            )
        )
        events.append(
            SwapIn(
                storage=swap.storage,
                start=swap.in_start,
                need=swap.in_need,
                begin_us=in_ns[0] // 1000,
                end_us=in_ns[1] // 1000,
            )
        )
    for k, run in enumerate(solution.runs):
        if run.restores is not None:
            events.append(Recompute(row=k, restores=run.restores))
    gone: dict[int, list[int]] = defaultdict(list)
    for storage, first, end in residences(problem, solution.runs):
        facts = problem.storages[storage]
        last_stay = end == len(solution.runs) and (facts.leaves or facts.enters)
        if not last_stay and first < end:
            gone[end].append(storage)
    events += [Free(at=at, storages=tuple(sorted(storages))) for at, storages in sorted(gone.items())]
    return sorted(events, key=_place)


def _place(event: Event) -> tuple[int, int, int, int]:
    """Boundary, kind, then the order in which a lane copies: the earlier deadline first."""
    kind = _KINDS.index(type(event))
    match event:
        case SwapOut():
            return event.start, kind, event.free, event.storage
        case SwapIn():
            return event.start, kind, event.need, event.storage
        case Recompute():
            return event.row, kind, 0, 0
        case Free():
            return event.at, kind, 0, 0


def _resting(problem: Problem, starts_out: set[int]) -> int:
    """Bytes resident after the step: what leaves or was there before, unless it is away."""
    return sum(s.size_bytes for i, s in enumerate(problem.storages) if (s.enters or s.leaves) and i not in starts_out)


def _notes(problem: Problem, answer: Answer, timeline: Timeline) -> list[str]:
    solution = answer.solution
    captured = max(memory(problem, [Run(op=op) for op in range(len(problem.ops))], ()), default=0)
    first_runs = [run for run in solution.runs if run.restores is None]
    ordered = max(memory(problem, first_runs, ()), default=0)
    size = [storage.size_bytes for storage in problem.storages]
    moved = sum(size[swap.storage] for swap in solution.swaps)
    again = [run for run in solution.runs if run.restores is not None]
    again_ns = sum(run_ns(problem, run) for run in again)
    step = max(1, timeline.step_ns)
    return [
        f"order: peak {format_bytes(captured)} as captured, {format_bytes(ordered)} as ordered",
        f"swap: {len(solution.swaps)} storages, {format_bytes(moved)} each way a step, "
        f"waiting {sum(timeline.stall_ns) / step:.1%} of the step",
        f"recompute: {len(again)} runs, {again_ns / step:.1%} of the step",
        _planners(answer),
    ]


def _planners(answer: Answer) -> str:
    """What each planner reached, over the ops alone."""

    def over(step_ns: float) -> str:
        return f"{step_ns / max(1, answer.plain_ns) - 1:+.2%}"

    reached = ", ".join(f"{name} {over(step_ns)}" for name, step_ns in answer.reached)
    ended = f"; the search ended: {answer.ended}" if answer.ended else ""
    return f"planners: {reached}; no plan is below {over(answer.bound_ns)}{ended}"
