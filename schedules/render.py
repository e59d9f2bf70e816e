"""A plan for a person or a script: what it promises, what it moves, what is there at the peak. Nothing is printed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from tensile.schedules.findings import Finding, printable, row_name
from tensile.schedules.plan import Free, Plan, Recompute, SwapIn, SwapOut
from tensile.schedules.tally import Moved, at_row, by_module, matching, recomputed, swapped
from tensile.schedules.timeline import Timeline, timeline
from tensile.schedules.units import format_bytes, format_us

_BARS = "▁▂▃▄▅▆▇█"
_NARROWEST = 60
_TOP_STORAGES = 8
_TOP_MODULES = 6


def inspect_text(plan: Plan, *, width: int = 100, pattern: str | None = None) -> str:
    """What `tensile inspect` shows, in lines of at most `width` characters (60 or more): a summary on one screen, or
    with a `pattern` (a glob on the call or the module) the rows that match."""
    width = max(width, _NARROWEST)
    lines = _summary(plan, width) if pattern is None else _rows_text(plan, pattern)
    lines = [printable(line) for line in lines]
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in lines)


def inspect_json(plan: Plan, *, pattern: str | None = None) -> dict[str, Any]:
    """The same as plain dictionaries and lists: exact bytes, every module, every storage at the peak."""
    line = timeline(plan)
    row = plan.rows[line.peak_row]
    answer: dict[str, Any] = {
        "subject": asdict(plan.subject),
        "promise": asdict(plan.promise),
        "counts": {
            "ops": len({row.op for row in plan.rows}),
            "rows": len(plan.rows),
            "storages": len(plan.storages),
            "swap_outs": sum(isinstance(event, SwapOut) for event in plan.events),
            "swap_ins": sum(isinstance(event, SwapIn) for event in plan.events),
            "recomputes": sum(isinstance(event, Recompute) for event in plan.events),
        },
        "swapped": [asdict(moved) for moved in swapped(plan)],
        "recomputed": [asdict(moved) for moved in recomputed(plan)],
        "peak": {
            "row": line.peak_row,
            "total_bytes": line.peak_bytes,
            "workspace_bytes": row.workspace_bytes,
            "held_bytes": line.held_bytes,
            "kind_bytes": {kind: totals[line.peak_row] for kind, totals in line.kind_bytes.items()},
            "call": row.call,
            "phase": row.phase,
            "module": row.module,
            "source": row.source,
            "storages": [asdict(storage) for storage in at_row(plan, line.peak_row)],
        },
        "notes": list(plan.notes),
    }
    if pattern is not None:
        answer["rows"] = [
            {"row": k, **asdict(plan.rows[k]), "total_bytes": line.total_bytes[k]} for k in matching(plan, pattern)
        ]
    return answer


def gate(plan: Plan, max_peak_bytes: int) -> Finding | None:
    """What to say when the planned peak is over `max_peak_bytes`: where, by how much, and what is there; else None."""
    line = timeline(plan)
    if line.peak_bytes <= max_peak_bytes:
        return None
    row = plan.rows[line.peak_row]
    largest = ", ".join(
        f"{printable(storage.name)} ({storage.kind}, {format_bytes(storage.size_bytes)}{_from(storage.source)})"
        for storage in at_row(plan, line.peak_row)[:3]
    )
    over = format_bytes(line.peak_bytes - max_peak_bytes)
    return Finding(
        "max-peak",
        f"rows[{line.peak_row}]",
        f"the peak, {format_bytes(line.peak_bytes)}, is {over} over {format_bytes(max_peak_bytes)}, in "
        f"{row_name(plan, line.peak_row)}, {row.phase}{_from(row.source)}; "
        f"largest there: {largest or 'nothing but workspace'}",
    )


def _summary(plan: Plan, width: int) -> list[str]:
    line = timeline(plan)
    promise, print_ = plan.promise, plan.subject.fingerprint
    outs = [plan.storages[event.storage].size_bytes for event in plan.events if isinstance(event, SwapOut)]
    storages = len({event.storage for event in plan.events if isinstance(event, SwapOut)})
    again = [plan.rows[event.row].time_ns for event in plan.events if isinstance(event, Recompute)]
    lines = [
        f"{plan.subject.workload} on {plan.subject.device_name}",
        f"torch {print_.torch}, {print_.device}, {print_.optimizer}, batch {print_.batch}",
        f"planned by {promise.planner}, profile {promise.profile_source}",
        "",
        *_table(
            ("", "planned", "eager", "", ""),
            (
                "peak",
                format_bytes(promise.peak_bytes),
                format_bytes(promise.eager_peak_bytes),
                promise.eager_peak_source,
                f"{_share(promise.peak_bytes, promise.eager_peak_bytes)} of eager, budget "
                f"{format_bytes(promise.budget_bytes)}",
            ),
            (
                "step",
                format_us(promise.step_us),
                format_us(promise.eager_step_us),
                promise.eager_step_source,
                f"{_overhead(plan)} for swaps and recomputes, at least {_overhead(plan, promise.bound_us)}",
            ),
            ("at rest", format_bytes(promise.resting_bytes), "", "", "between two steps"),
            ("spill", format_bytes(promise.spill_bytes), "", "", "host memory or disk"),
            numeric=(1, 2),
        ),
        f"the process may take {promise.rss_slack_percent}% more than the peak",
        "",
        f"memory   {_spark(plan, line, width - 9)}",
        "",
        f"swaps: {len(outs)} copies of {storages} storages, {format_bytes(sum(outs))} out a step",
        *_wrap_parts(_swapped_kinds(plan), width),
        *_moved_text(swapped(plan)),
        f"recomputes: {len(again)} rows, {format_us(sum(again) / 1000)} a step",
        *_moved_text(recomputed(plan)),
        "",
        *_peak_text(plan, line, width),
    ]
    if plan.notes:
        lines.append("")
    for note in plan.notes:
        lines += wrap(note, width, initial_indent="note: ", subsequent_indent="  ")
    return lines


def _peak_text(plan: Plan, line: Timeline, width: int) -> list[str]:
    row = plan.rows[line.peak_row]
    there = at_row(plan, line.peak_row)
    kinds = {kind: totals[line.peak_row] for kind, totals in line.kind_bytes.items()}
    there_now = sorted(((total, kind) for kind, total in kinds.items() if total), reverse=True)
    parts = [f"{kind} {format_bytes(total)}" for total, kind in there_now]
    if row.workspace_bytes:
        parts.append(f"workspace {format_bytes(row.workspace_bytes)}")
    if line.held_bytes:
        parts.append(f"outputs the caller holds {format_bytes(line.held_bytes)}")
    return [
        f"peak: {row_name(plan, line.peak_row)} of {len(plan.rows)}, {row.phase}{_from(row.source)}",
        *_wrap_parts(parts, width),
        *_table(
            *(
                (
                    f"  {_share(storage.size_bytes, line.peak_bytes)}",
                    format_bytes(storage.size_bytes),
                    storage.kind if storage.state == "held" else f"{storage.kind}, {storage.state}",
                    storage.name,
                    storage.source,
                )
                for storage in there[:_TOP_STORAGES]
            ),
            numeric=(0, 1),
        ),
        *([f"  and {len(there) - _TOP_STORAGES} more"] if len(there) > _TOP_STORAGES else []),
    ]


def _wrap_parts(parts: Iterable[str], width: int) -> list[str]:
    """Parts with commas between, broken only between two parts."""
    glued = ", ".join(part.replace(" ", "\0") for part in parts)
    return [text.replace("\0", " ") for text in wrap(glued, width, initial_indent="  ", subsequent_indent="  ")]


def _rows_text(plan: Plan, pattern: str) -> list[str]:
    rows = matching(plan, pattern)
    if not rows:
        return [f"no row's call or module matches {pattern!r}"]
    line = timeline(plan)
    happens = _happenings(plan)
    cells = []
    for k in rows:
        row = plan.rows[k]
        total = format_bytes(line.total_bytes[k])
        cells.append((str(k), total, row.phase, row.call, row.module, row.source, "; ".join(happens[k])))
    return _table(("row", "memory", "phase", "call", "module", "source", "events"), *cells, numeric=(0, 1))


def _happenings(plan: Plan) -> dict[int, list[str]]:
    """What the events do around each row, in words."""
    words: dict[int, list[str]] = defaultdict(list)
    for event in plan.events:
        match event:
            case SwapOut():
                words[event.start].append(f"{plan.storages[event.storage].name} starts out")
                words[event.free].append(f"{plan.storages[event.storage].name} is out")
            case SwapIn():
                words[event.start].append(f"{plan.storages[event.storage].name} starts in")
                words[event.need].append(f"{plan.storages[event.storage].name} is in")
            case Recompute():
                names = ", ".join(plan.storages[storage].name for storage in event.restores)
                words[event.row].append(f"recomputes {names}" if names else "recomputes in place")
            case Free():
                words[event.at].append(f"frees {len(event.storages)}")
    return words


def _moved_text(moved: tuple[Moved, ...]) -> list[str]:
    """Modules with their numbers folded (h.*.attn), most bytes first."""
    folded = by_module((_fold(m.module), m.size_bytes, 1000 * m.time_us, m.count) for m in moved)
    members = Counter(_fold(m.module) for m in moved)
    timed = any(m.time_us for m in moved)
    rows = [
        (
            f"  {m.count} x",
            f"{m.module or 'outside the model'}{f' ({members[m.module]} modules)' if members[m.module] > 1 else ''}",
            format_bytes(m.size_bytes),
            format_us(m.time_us) if timed else "",
        )
        for m in folded[:_TOP_MODULES]
    ]
    more = len(folded) - _TOP_MODULES
    return [*_table(*rows, numeric=(0, 2, 3)), *([f"  and {more} more modules"] if more > 0 else [])]


def _swapped_kinds(plan: Plan) -> list[str]:
    """Of what kinds the bytes are that are copied out, the most first."""
    kinds: dict[str, int] = defaultdict(int)
    for event in plan.events:
        if isinstance(event, SwapOut):
            storage = plan.storages[event.storage]
            kinds[storage.kind] += storage.size_bytes
    return [f"{kind} {format_bytes(kinds[kind])}" for kind in sorted(kinds, key=lambda kind: (-kinds[kind], kind))]


def _fold(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _from(source: str) -> str:
    return f", {printable(source)}" if source else ""


def _overhead(plan: Plan, step_us: int | None = None) -> str:
    """How much longer a step, the plan's by default, takes than its ops once each."""
    once_ns = sum({row.op: row.time_ns for row in plan.rows}.values())
    taken_us = plan.promise.step_us if step_us is None else step_us
    more = 1000 * taken_us / once_ns - 1 if once_ns else 0.0
    return f"{round(100 * more, 1) + 0.0:+.1f}%"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _spark(plan: Plan, line: Timeline, width: int) -> str:
    """Bytes over the expected time of the rows, the most in each stretch, from none to the peak."""
    total_ns = sum(row.time_ns for row in plan.rows)
    width = min(width, len(plan.rows))
    most = [0] * width
    begin_ns = 0
    for k, row in enumerate(plan.rows):
        first, last = (ns * width // total_ns if total_ns else 0 for ns in (begin_ns, begin_ns + row.time_ns))
        for place in range(min(first, width - 1), min(last, width - 1) + 1):
            most[place] = max(most[place], line.total_bytes[k])
        begin_ns += row.time_ns
    peak = max(line.peak_bytes, 1)
    return "".join(_BARS[level * (len(_BARS) - 1) // peak] for level in most)


def _table(*rows: tuple[str, ...], numeric: tuple[int, ...]) -> list[str]:
    """Columns wide enough for their cells; `numeric` ones are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in numeric else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
