"""A plan for a person or a script: what it promises, what it moves, what is there at the peak. Nothing is printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from textwrap import wrap
from typing import Any

from tensile.schedules.findings import Finding, row_name
from tensile.schedules.plan import Free, OpRow, Plan, Recompute, SwapIn, SwapOut
from tensile.schedules.timeline import Timeline, resident_at, timeline
from tensile.schedules.units import format_bytes, format_us

_BARS = "▁▂▃▄▅▆▇█"
_NARROWEST = 60
_TOP_STORAGES = 8
_TOP_MODULES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What happens to one module's storages in a step: how often, how many bytes, and the time of the runs."""

    module: str
    count: int
    size_bytes: int
    time_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPeak:
    """One storage at the peak. `source` is the line that created it; `state`: held, on its way out or in, again (a
    copy that a recompute creates and drops), or held by the caller (an output of the last step)."""

    storage: int
    name: str
    kind: str
    size_bytes: int
    module: str
    source: str
    state: str


def inspect_text(plan: Plan, *, width: int = 100, pattern: str | None = None) -> str:
    """What `tensile inspect` shows, in lines of at most `width` characters (60 or more): a summary on one screen, or
    with a `pattern` (a glob on the call or the module) the rows that match."""
    width = max(width, _NARROWEST)
    lines = _summary(plan, width) if pattern is None else _rows_text(plan, pattern)
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
        f"{storage.name} ({storage.kind}, {format_bytes(storage.size_bytes)}{_from(storage.source)})"
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


def swapped(plan: Plan) -> tuple[Moved, ...]:
    """Copies out in a step by the module that owns the storage, most bytes first."""
    modules = _modules(plan)
    return _by_module(
        (modules[event.storage], plan.storages[event.storage].size_bytes, 0)
        for event in plan.events
        if isinstance(event, SwapOut)
    )


def recomputed(plan: Plan) -> tuple[Moved, ...]:
    """Second runs in a step by the module of the op; bytes are those that come back to life."""
    return _by_module(
        (
            plan.rows[event.row].module,
            sum(plan.storages[storage].size_bytes for storage in event.restores),
            plan.rows[event.row].time_ns,
        )
        for event in plan.events
        if isinstance(event, Recompute)
    )


def at_row(plan: Plan, row: int) -> tuple[AtPeak, ...]:
    """Every storage that takes device memory at `row`, the largest first."""
    creators = _creators(plan)
    modules = _modules(plan)
    states = [(stay.storage, "again" if stay.again else _STATES[stay.purpose]) for stay in resident_at(plan, row)]
    states += [(s.storage, "held by the caller") for s in plan.storages if s.kind == "output" and s.leaves]
    found = []
    for index, state in states:
        storage = plan.storages[index]
        found.append(
            AtPeak(
                storage=index,
                name=storage.name,
                kind=storage.kind,
                size_bytes=storage.size_bytes,
                module=modules[index],
                source=creators[index].source if index in creators else "",
                state=state,
            )
        )
    return tuple(sorted(found, key=lambda storage: -storage.size_bytes))


def matching(plan: Plan, pattern: str) -> tuple[int, ...]:
    """Rows whose call or module matches a glob such as `*attn*`."""
    return tuple(
        k for k, row in enumerate(plan.rows) if fnmatchcase(row.call, pattern) or fnmatchcase(row.module, pattern)
    )


_STATES = {"compute": "held", "out": "on its way out", "in": "on its way in"}


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
                f"{_overhead(plan):+.1%} for swaps and recomputes",
            ),
            ("at rest", format_bytes(promise.resting_bytes), "", "", "between two steps"),
            ("spill", format_bytes(promise.spill_bytes), "", "", "host memory or disk"),
            numeric=(1, 2),
        ),
        f"the process may take {promise.rss_slack_percent}% more than the peak",
        "",
        f"memory   {_spark(line, width - 9)}",
        "",
        f"swaps: {len(outs)} copies of {storages} storages, {format_bytes(sum(outs))} out a step",
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


def _moved_text(moved: Iterable[Moved]) -> list[str]:
    """Modules with their numbers folded (h.*.attn), most bytes first."""
    folded = _by_module((_fold(m.module), m.size_bytes, 1000 * m.time_us, m.count) for m in moved)
    rows = [
        (f"  {m.count} x", m.module or "outside the model", format_bytes(m.size_bytes), format_us(m.time_us))
        for m in folded[:_TOP_MODULES]
    ]
    if not any(m.time_us for m in folded):
        rows = [(*row[:3], "") for row in rows]
    more = len(folded) - _TOP_MODULES
    return [*_table(*rows, numeric=(0, 2, 3)), *([f"  and {more} more modules"] if more > 0 else [])]


def _by_module(items: Iterable[tuple[str, int, int] | tuple[str, int, int, int]]) -> tuple[Moved, ...]:
    """Items are (module, bytes, nanoseconds) and, when one stands for several, how many."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for module, size_bytes, time_ns, *count in items:
        total = sums[module]
        total[0] += count[0] if count else 1
        total[1] += size_bytes
        total[2] += time_ns
    moved = (
        Moved(module=module, count=count, size_bytes=size_bytes, time_us=round(time_ns / 1000))
        for module, (count, size_bytes, time_ns) in sums.items()
    )
    return tuple(sorted(moved, key=lambda m: (-m.size_bytes, -m.count, m.module)))


def _creators(plan: Plan) -> dict[int, OpRow]:
    creators: dict[int, OpRow] = {}
    for row in plan.rows:
        for storage in row.creates:
            creators.setdefault(storage, row)
    return creators


def _modules(plan: Plan) -> list[str]:
    """The module of each storage: of the op that creates it, or the one a parameter or its state is named after."""
    creators = _creators(plan)
    return [
        creators[s.storage].module if s.storage in creators else s.name.partition("/")[0].rpartition(".")[0]
        for s in plan.storages
    ]


def _fold(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _from(source: str) -> str:
    return f", {source}" if source else ""


def _overhead(plan: Plan) -> float:
    """How much longer the step takes than its ops once each."""
    once_ns = sum({row.op: row.time_ns for row in plan.rows}.values())
    return 1000 * plan.promise.step_us / once_ns - 1 if once_ns else 0.0


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _spark(line: Timeline, width: int) -> str:
    """Bytes over the rows, the most in each stretch, from none to the peak."""
    count = len(line.total_bytes)
    width = min(width, count)
    peak = max(line.peak_bytes, 1)
    stretches = (line.total_bytes[i * count // width : (i + 1) * count // width] for i in range(width))
    return "".join(_BARS[max(stretch) * (len(_BARS) - 1) // peak] for stretch in stretches)


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
