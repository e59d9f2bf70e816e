"""A referee of solutions that shares nothing with the planner: it executes them on symbols instead of numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tensile.compiler.problem import Problem
from tensile.compiler.solution import Solution, Swap


def faults(problem: Problem, solution: Solution) -> list[str]:
    """What is wrong with a solution: something touched that is not there or holds other contents, a swap of what is
    not there, a step that does not end as it began, an op left out or in the wrong order. Empty when nothing is."""
    return [*_order(problem, solution), *_Execution(problem, solution).run()]


def peak(problem: Problem, solution: Solution) -> int:
    """Bytes at the worst run, counted storage by storage."""
    execution = _Execution(problem, solution)
    execution.run()
    return execution.peak


def _order(problem: Problem, solution: Solution) -> list[str]:
    first = [run.op for run in solution.runs if run.restores is None]
    if sorted(first) != list(range(len(problem.ops))):
        return [f"first runs are {first}"]
    place = {op: k for k, op in enumerate(first)}
    return [f"op {op} before {a}" for op in first for a in problem.ops[op].after if place[a] > place[op]]


def _captured(problem: Problem) -> tuple[list[dict[int, Any]], dict[int, Any]]:
    """What every op found in what it reads and writes, in captured order; and what is there at the end."""
    contents: dict[int, Any] = {s: ("in", s) for s, facts in enumerate(problem.storages) if facts.enters}
    found = []
    for number, op in enumerate(problem.ops):
        found.append({s: contents[s] for s in {*op.reads, *op.writes} - set(op.creates)})
        contents |= {s: ("made", number, s) for s in op.creates}
        contents |= {s: ("written", number, contents[s]) for s in op.writes}
    return found, contents


class _Execution:
    def __init__(self, problem: Problem, solution: Solution) -> None:
        self.problem, self.solution = problem, solution
        self.found, self.final = _captured(problem)
        self.there: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.flying: dict[int, Any] = {}
        self.faults: list[str] = []
        self.peak = 0
        self.last_use: dict[tuple[int, int], int] = {}

    def run(self) -> list[str]:
        problem, runs = self.problem, self.solution.runs
        starts_out = {swap.storage for swap in self.solution.swaps if swap.wraps}
        entered = {s: ("in", s) for s, facts in enumerate(problem.storages) if facts.enters}
        self.there = {s: contents for s, contents in entered.items() if s not in starts_out}
        self.host = {s: entered[s] for s in starts_out}
        at: dict[int, dict[str, list[Swap]]] = defaultdict(lambda: defaultdict(list))
        for swap in self.solution.swaps:
            for part in ("out_start", "out_free", "in_start", "in_need"):
                at[getattr(swap, part)][part].append(swap)
        uses = self._uses()
        for k, run in enumerate(runs):
            self._boundary(at[k])
            op, again = problem.ops[run.op], run.restores is not None
            made = set(run.restores or ()) if again else set(op.creates)
            reads, writes = (op.again_reads, op.again_writes) if again else (op.reads, op.writes)
            for s in {*reads, *writes} - set(op.creates):
                if s not in self.there:
                    self.faults.append(f"run {k} (op {run.op}) touches {s}, which is not there")
                elif self.there[s] != self.found[run.op][s]:
                    self.faults.append(f"run {k} (op {run.op}) finds {self.there[s]} in {s}")
            if again and not op.again_ok:
                self.faults.append(f"run {k}: op {run.op} may not run again")
            self.there |= {s: ("made", run.op, s) for s in made}
            # what a second run makes besides is another copy, even of what is there
            resident = [*(set(self.there) | set(self.flying) | made), *(set(op.creates) - made)]
            size = sum(problem.storages[s].size_bytes for s in resident)
            self.peak = max(self.peak, problem.fixed_bytes + size + op.workspace_bytes)
            for s in writes:
                if s in self.there:
                    self.there[s] = ("written", run.op, self.there[s])
            for s in list(self.there):
                facts = problem.storages[s]
                if not facts.enters and not uses[s, k] and not (facts.leaves and self._is_last_stay(s, k)):
                    del self.there[s]
        self._boundary(at[len(runs)])
        for s, facts in enumerate(problem.storages):
            if not facts.leaves:
                continue
            where = self.host if s in starts_out else self.there
            if where.get(s) != self.final.get(s):
                self.faults.append(f"storage {s} ends the step as {where.get(s)}")
        return self.faults

    def _boundary(self, parts: dict[str, list[Swap]]) -> None:
        for swap in parts["out_start"]:
            self._require(swap.storage, "copied out")
            self.host[swap.storage] = self.there.get(swap.storage)
        for swap in parts["out_free"]:
            self._require(swap.storage, "freed")
            if self.there.pop(swap.storage, None) != self.host[swap.storage]:
                self.faults.append(f"storage {swap.storage} was written while it was copied out")
            if not self.problem.storages[swap.storage].swappable:
                self.faults.append(f"storage {swap.storage} may not be swapped")
        for swap in parts["in_start"]:
            if swap.storage in self.there:
                self.faults.append(f"storage {swap.storage} is copied in while it is there")
            self.flying[swap.storage] = self.host.get(swap.storage)
        for swap in parts["in_need"]:
            self.there[swap.storage] = self.flying.pop(swap.storage, None)

    def _require(self, storage: int, what: str) -> None:
        if storage not in self.there:
            self.faults.append(f"storage {storage} is {what} and is not there")

    def _uses(self) -> dict[tuple[int, int], bool]:
        """Whether a storage is touched after run k before it is made again."""
        found: dict[tuple[int, int], bool] = defaultdict(bool)
        wanted = [False] * len(self.problem.storages)
        for k in reversed(range(len(self.solution.runs))):
            for s, soon in enumerate(wanted):
                found[s, k] = soon
            run = self.solution.runs[k]
            op = self.problem.ops[run.op]
            if run.restores is None:
                made, touches = set(op.creates), {*op.reads, *op.writes}
            else:
                made, touches = set(run.restores), {*op.again_reads, *op.again_writes}
            for s in made:
                wanted[s] = False
            for s in touches - made:
                wanted[s] = True
        return found

    def _is_last_stay(self, storage: int, k: int) -> bool:
        later = self.solution.runs[k + 1 :]
        return not any(storage in (self.problem.ops[r.op].creates if r.restores is None else r.restores) for r in later)
