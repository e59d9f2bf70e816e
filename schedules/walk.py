"""The referee's walk through one step, boundary by boundary: who is where, with which contents, and the bytes.

Contents are known by the captured op that wrote them last. In captured order every op finds certain contents; a run
in another place, or a second run, must find the same ones, and then leaves the same ones. That one rule holds the
data hazards (RAW, WAR, WAW), the legality of every recompute, and the validity of host copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from tensile.schedules.findings import Finding, row_name, storage_name
from tensile.schedules.plan import Free, OpRow, Plan, Recompute, SwapIn, SwapOut

_AS_ENTERED = -1  # contents from before the step
_NONE = -2


def walk(plan: Plan) -> Iterator[Finding]:
    """What goes wrong in a step of a plan whose references are sound; see `check` for the rules."""
    walker = _Walker(plan)
    for boundary in range(len(plan.rows) + 1):
        yield from walker.cross(boundary)
        if boundary < len(plan.rows):
            yield from walker.run(boundary)
    yield from walker.end()


class _Walker:
    """The state of the step between two rows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.expected, self.final = _captured_contents(plan)
        self.where: list[Literal["absent", "arriving", "resident"]] = [
            "resident" if s.starts == "resident" else "absent" for s in plan.storages
        ]
        self.contents = [_AS_ENTERED if s.enters else _NONE for s in plan.storages]
        self.host = [_AS_ENTERED if s.starts == "out" else _NONE for s in plan.storages]
        self.leaving: dict[int, int] = {}  # storage -> its swap-out under way, an index of plan.events
        self.missed: set[int] = set()  # storages whose absence has been reported
        self.resident_bytes = sum(s.size_bytes for s in plan.storages if s.starts == "resident")
        self.held_bytes = sum(s.size_bytes for s in plan.storages if s.kind == "output" and s.leaves)
        self.row_bytes: list[int] = []
        self.seen: set[int] = set()
        self.restores = {event.row: set(event.restores) for event in plan.events if isinstance(event, Recompute)}
        self.out_starts: dict[int, list[int]] = defaultdict(list)
        self.frees: dict[int, list[int]] = defaultdict(list)
        self.in_starts: dict[int, list[int]] = defaultdict(list)
        self.needs: dict[int, list[int]] = defaultdict(list)
        for k, event in enumerate(plan.events):
            match event:
                case SwapOut():
                    self.out_starts[event.start].append(k)
                    self.frees[max(event.start, event.free)].append(k)
                case SwapIn():
                    self.in_starts[event.start].append(k)
                    self.needs[max(event.start, event.need)].append(k)
                case Free():
                    self.frees[event.at].append(k)

    # ---- one boundary

    def cross(self, boundary: int) -> Iterator[Finding]:
        for k in self.out_starts[boundary]:
            yield from self._begin_out(k)
        for k in self.frees[boundary]:
            event = self.plan.events[k]
            if isinstance(event, Free):
                for storage in event.storages:
                    yield from self._free(k, storage)
            elif isinstance(event, SwapOut) and self.leaving.get(event.storage) == k:
                del self.leaving[event.storage]
                self.host[event.storage] = self.contents[event.storage]
                if self.where[event.storage] != "absent":
                    self._drop(event.storage)
        for k in self.in_starts[boundary]:
            yield from self._begin_in(k)
        for k in self.needs[boundary]:
            event = self.plan.events[k]
            assert isinstance(event, SwapIn)
            if self.where[event.storage] == "arriving":
                self.where[event.storage] = "resident"

    def _begin_out(self, k: int) -> Iterator[Finding]:
        event = self.plan.events[k]
        assert isinstance(event, SwapOut)
        storage, name, at = event.storage, storage_name(self.plan, event.storage), f"events[{k}]"
        if storage in self.leaving:
            yield Finding("swap_out", at, f"{name} is being copied out by events[{self.leaving[storage]}] already")
            return
        if self.where[storage] == "arriving":
            yield Finding("swap_out", at, f"{name} is still being copied in at boundary {event.start}")
        elif self.where[storage] == "absent":
            yield Finding("swap_out", at, f"{name} is not resident at boundary {event.start}")
        self.leaving[storage] = k

    def _free(self, k: int, storage: int) -> Iterator[Finding]:
        name, at = storage_name(self.plan, storage), f"events[{k}].free"
        if storage in self.leaving:
            yield Finding("free", at, f"{name} is still being copied out by events[{self.leaving.pop(storage)}]")
            self.host[storage] = self.contents[storage]
        if self.where[storage] == "absent":
            yield Finding("free", at, f"{name} is not resident")
            return
        if self.where[storage] == "arriving":
            yield Finding("free", at, f"{name} is still being copied in")
        self._drop(storage)

    def _begin_in(self, k: int) -> Iterator[Finding]:
        event = self.plan.events[k]
        assert isinstance(event, SwapIn)
        storage, name, at = event.storage, storage_name(self.plan, event.storage), f"events[{k}]"
        if self.where[storage] != "absent":
            yield Finding("swap_in", at, f"{name} is on the device already at boundary {event.start}")
            return
        if self.host[storage] == _NONE:
            yield Finding("swap_in", at, f"{name} has no host copy at boundary {event.start}")
        elif self.host[storage] != self.contents[storage]:
            yield Finding("swap_in", at, f"the host copy of {name} is older than its contents were when it was freed")
        self._take(storage)
        self.where[storage] = "arriving"

    def _drop(self, storage: int) -> None:
        self.where[storage] = "absent"
        self.resident_bytes -= self.plan.storages[storage].size_bytes

    def _take(self, storage: int) -> None:
        self.where[storage] = "resident"
        self.missed.discard(storage)
        self.resident_bytes += self.plan.storages[storage].size_bytes

    # ---- one row

    def run(self, k: int) -> Iterator[Finding]:
        row = self.plan.rows[k]
        again = row.op in self.seen
        self.seen.add(row.op)
        touched = sorted({*row.reads, *row.writes})
        for storage in touched:
            yield from self._touch(k, row, storage, again)
        kept = self.restores.get(k, set()) & set(row.creates) if again else set(row.creates)
        dropped_bytes = 0
        for storage in row.creates:
            if storage not in kept:
                dropped_bytes += self.plan.storages[storage].size_bytes
            elif self.where[storage] == "absent":
                self._take(storage)
            else:
                message = f"{row_name(self.plan, k)} creates {storage_name(self.plan, storage)}, which is there already"
                yield Finding("create", f"rows[{k}].creates", message)
        self.row_bytes.append(self.held_bytes + self.resident_bytes + dropped_bytes + row.workspace_bytes)
        for storage in (*kept, *row.writes):
            self.contents[storage] = row.op

    def _touch(self, k: int, row: OpRow, storage: int, again: bool) -> Iterator[Finding]:
        name, at = storage_name(self.plan, storage), f"rows[{k}]"
        if self.where[storage] == "arriving":
            yield Finding("swap_in", at, f"{row_name(self.plan, k)} touches {name} before its copy in is waited for")
        elif self.where[storage] == "absent":
            if storage not in self.missed:
                self.missed.add(storage)
                yield Finding("resident", at, f"{row_name(self.plan, k)} touches {name}, which is not resident")
            return
        if storage in row.writes and storage in self.leaving:
            message = f"{row_name(self.plan, k)} writes {name} while events[{self.leaving[storage]}] copies it out"
            yield Finding("swap_out", at, message)
        expected = self.expected[row.op].get(storage, self.contents[storage])
        if self.contents[storage] != expected:
            message = (
                f"{row_name(self.plan, k)} finds {name} {_as_left(self.contents[storage])}, "
                f"in captured order {_as_left(expected)}"
            )
            yield Finding("recompute" if again else "order", at, message)

    # ---- the end of the step

    def end(self) -> Iterator[Finding]:
        yield from self._boundary()
        yield from self._bytes()

    def _boundary(self) -> Iterator[Finding]:
        for storage, row in enumerate(self.plan.storages):
            name, at = storage_name(self.plan, storage), f"storages[{storage}]"
            if row.kind in ("batch", "constant"):
                continue
            there = self.where[storage] != "absent"
            if not row.leaves:
                if there:
                    yield Finding("boundary", at, f"{name} does not leave the step but is still there at its end")
            elif row.starts == "out":
                if there:
                    yield Finding("boundary", at, f"{name} starts the step out but is resident at its end")
                elif self.host[storage] != self.final.get(storage, _AS_ENTERED):
                    yield Finding("boundary", at, f"{name} ends the step out, without a host copy of its last contents")
            elif not there:
                yield Finding("boundary", at, f"{name} leaves the step but is not there at its end")
            elif self.contents[storage] != self.final.get(storage, _AS_ENTERED):
                yield Finding("boundary", at, f"{name} ends the step {_as_left(self.contents[storage])}, "
                              f"in captured order {_as_left(self.final.get(storage, _AS_ENTERED))}")  # fmt: skip

    def _bytes(self) -> Iterator[Finding]:
        promise = self.plan.promise
        peak, there = max(self.row_bytes), self.row_bytes[promise.peak_row]
        between = self.resident_bytes + self.held_bytes
        if peak != promise.peak_bytes:
            where = row_name(self.plan, self.row_bytes.index(peak))
            message = f"the peak is {peak} bytes, in {where}; {promise.peak_bytes} are promised"
            yield Finding("peak", "promise.peak_bytes", message)
        elif there != peak:
            message = f"{row_name(self.plan, promise.peak_row)} has {there} bytes, the peak is {peak}"
            yield Finding("peak", "promise.peak_row", message)
        if between > max(peak, promise.peak_bytes):
            message = f"{between} bytes at the end of the step are more than at any row"
            yield Finding("peak", "promise.peak_bytes", message)
        if self.resident_bytes != promise.resting_bytes:
            message = f"{self.resident_bytes} bytes stay between two steps; {promise.resting_bytes} are promised"
            yield Finding("resting", "promise.resting_bytes", message)


def _captured_contents(plan: Plan) -> tuple[dict[int, dict[int, int]], dict[int, int]]:
    """For each op, the contents of what it touches when all ops run once in captured order; and the last contents."""
    first: dict[int, OpRow] = {}
    for row in plan.rows:
        first.setdefault(row.op, row)
    last: dict[int, int] = {}
    expected: dict[int, dict[int, int]] = {}
    for op, row in sorted(first.items()):
        expected[op] = {s: last.get(s, _AS_ENTERED) for s in (*row.reads, *row.writes)}
        last.update(dict.fromkeys((*row.creates, *row.writes), op))
    return expected, last


def _as_left(contents: int) -> str:
    if contents == _NONE:
        return "empty"
    return "as it entered the step" if contents == _AS_ENTERED else f"as op {contents} left it"
