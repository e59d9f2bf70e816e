"""A lower bound on the step time within a budget, and the fractional plan that reaches it: one linear program.

The relaxation looks at memory only at some ops, the checkpoints. There a gap may be absent by a swap (`away`), or by a
recompute (`again`); copies that must have ended before a checkpoint, or can only start after it, need time on their
lane. Fractions are allowed, so no plan of the same op order is faster. Source: the "absent at checkpoint" form of
shared-lane swapping; recompute follows Checkmate (arXiv 1910.02653) with every op's second run paid once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
from ortools.linear_solver import pywraplp

from tensile.compiler.terrain import Ints, Terrain

CHECKPOINTS = 20
_GRID = 14  # intervals a lane is looked at over, before and after each checkpoint
_STALL_GRID = 40
_MANY_GAPS = 2000  # from which on half the checkpoints have to do
_DEPTH = 2  # of dead inputs of dead inputs
_MB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`step_ns`: no plan is faster; infinite when no plan can fit. `again`, `away`: the relaxation's fractions per gap,
    `away` with the ops between which the gap is away; `kept`: of dead storages kept for recomputes."""

    step_ns: float
    again: dict[int, float]
    away: dict[int, tuple[float, int, int]]
    kept: dict[int, float]


def bound(
    terrain: Terrain, budget_bytes: int, *, checkpoints: int | None = None, seconds: float = 60.0
) -> Bound | None:  # fmt: skip
    """The bound for `budget_bytes` and the order in which the terrain's ops stand; None when the solver needs more than
    `seconds`."""
    if checkpoints is None:
        checkpoints = CHECKPOINTS if len(terrain.storage) < _MANY_GAPS else CHECKPOINTS // 2
    return _Relaxation(terrain, budget_bytes, checkpoints).solve(seconds)


class _Relaxation:
    """The program. Times are in ns of the plain step; work in MiB of a lane."""

    def __init__(self, terrain: Terrain, budget_bytes: int, checkpoints: int) -> None:
        self.terrain, self.facts, self.budget = terrain, terrain.facts, budget_bytes
        self.start = np.concatenate([[0.0], np.cumsum(terrain.time_ns)])  # of every op, and the end
        self.total_ns = float(self.start[-1])
        self.checks = _checkpoints(terrain.level, budget_bytes, checkpoints)
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.objective = self.solver.Objective()
        self.objective.SetMinimization()
        self.memory = {
            k: self.solver.Constraint(float(terrain.level[k] - budget_bytes) / _MB, inf) for k in self.checks
        }
        # a stall between two edges counts wherever it could
        grid = np.linspace(0.0, self.total_ns, _STALL_GRID + 1).tolist()
        edges = sorted({*grid, *(float(self.start[k]) for k in self.checks)})
        self.stalls = [(self._var(cost=1.0, top=inf), begin, end) for begin, end in pairwise(edges)]
        self.runs: dict[int, pywraplp.Variable] = {}  # op -> fraction of its second run
        self.remade: dict[int, pywraplp.Variable] = {}  # dead storage -> fraction made again
        self.kept: dict[int, dict[int, pywraplp.Variable]] = {}  # dead storage -> checkpoint -> fraction kept until it
        self.again: dict[int, pywraplp.Variable] = {}
        self.absent: dict[
            int, dict[int, pywraplp.Variable]
        ] = {}  # gap -> checkpoint -> fraction not made again by then
        self.spanned = _spanned(terrain, self.checks)
        self.away: dict[int, list[tuple[int, pywraplp.Variable]]] = defaultdict(list)
        self._recomputes()
        self._swaps()

    def solve(self, seconds: float) -> Bound | None:
        self.solver.SetTimeLimit(int(1000 * seconds))
        status = self.solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return Bound(step_ns=inf, again={}, away={}, kept={})
        if status != pywraplp.Solver.OPTIMAL:
            return None
        away = {}
        for gap, parts in self.away.items():
            found = [(op, variable.solution_value()) for op, variable in parts]
            most = max(value for _, value in found)
            if most > 1e-6:
                ops = [op for op, value in found if value > most / 2]
                away[gap] = (most, min(ops), max(ops))
        return Bound(
            step_ns=self.total_ns + max(0.0, self.objective.Value()),
            again={g: v for g, variable in self.again.items() if (v := variable.solution_value()) > 1e-6},
            away=away,
            kept={s: max(part.solution_value() for part in parts.values()) for s, parts in self.kept.items()},
        )  # fmt: skip

    def _var(self, *, cost: float = 0.0, top: float = 1.0) -> pywraplp.Variable:
        variable = self.solver.NumVar(0.0, top, "")
        if cost:
            self.objective.SetCoefficient(variable, cost)
        return variable

    def _at_most(self, limit: float, *terms: tuple[pywraplp.Variable, float]) -> None:
        row = self.solver.Constraint(-inf, limit)
        for variable, factor in terms:
            row.SetCoefficient(variable, factor)

    # ---- recompute

    def _recomputes(self) -> None:
        terrain = self.terrain
        one_a_storage: dict[int, list[int]] = defaultdict(list)
        for gap in np.nonzero(np.isfinite(terrain.remake_ns))[0].tolist():
            if not self.spanned[gap]:
                continue
            variable = self.again[gap] = self._var()
            one_a_storage[int(terrain.storage[gap])].append(gap)
            self.absent[gap] = {}
            for k in self.spanned[gap]:
                absent = self.absent[gap][k] = self._var()
                self.memory[k].SetCoefficient(absent, float(terrain.size[gap]) / _MB)
                self._at_most(0.0, (absent, 1.0), (variable, -1.0))
            self._pay(variable, int(terrain.storage[gap]), int(terrain.last[gap]))
        for gaps in one_a_storage.values():
            if len(gaps) > 1:
                self._at_most(1.0, *((self.again[gap], 1.0) for gap in gaps))
        for gap in self.again:
            self._dead_inputs(gap)
        for storage, parts in self.kept.items():
            for k, variable in parts.items():
                self.memory[k].SetCoefficient(variable, -self.facts.size[storage] / _MB)

    def _pay(self, variable: pywraplp.Variable, storage: int, last: int) -> None:
        """Making a storage again takes a second run of each of its makers; one run may serve several storages."""
        for maker in self.facts.makers(storage, last) or ():
            if maker not in self.runs:
                self.runs[maker] = self._var(cost=float(self.terrain.problem.ops[maker].again_ns))
            self._at_most(0.0, (variable, 1.0), (self.runs[maker], -1.0))

    def _dead_inputs(self, gap: int) -> None:
        """What is absent at a checkpoint is made again after it: an input that is dead by then is kept past the
        checkpoint, or made again itself, or what needs it on the way is kept."""
        terrain, facts = self.terrain, self.facts
        storage = int(terrain.storage[gap])
        # storage, the op after which it is as wanted, depth, what is kept on the way
        pending: list[tuple[int, int, int, list[int]]] = [(storage, int(terrain.last[gap]), 0, [])]
        seen = {storage}
        while pending:
            made, last, depth, way = pending.pop(0)
            for source in self._sources(made, last):
                if source in seen or facts.dies(source) >= int(terrain.next[gap]):
                    continue
                seen.add(source)
                dies, rest = facts.dies(source), max([facts.dies(node) for node in way], default=-1)
                remade = self._remade(source)
                for k, absent in self.absent[gap].items():
                    if k > max(dies, rest):
                        nodes = [(self._kept(node, k), -1.0) for node in (*way, source)]
                        again = [(remade, -1.0)] if remade is not None else []
                        self._at_most(0.0, (absent, 1.0), *nodes, *again)
                if remade is not None and depth < _DEPTH:
                    pending.append((source, facts.touches[source][-1], depth + 1, [*way, source]))

    def _sources(self, storage: int, last: int) -> list[int]:
        makers = self.facts.makers(storage, last) or ()
        found = {s for maker in makers for s in self.terrain.problem.ops[maker].again_reads} - {storage}
        return [s for s in sorted(found) if self.facts.size[s] > 0]

    def _kept(self, storage: int, k: int) -> pywraplp.Variable:
        parts = self.kept.setdefault(storage, {})
        if k not in parts:
            parts[k] = self._var()
        return parts[k]

    def _remade(self, storage: int) -> pywraplp.Variable | None:
        last = self.facts.touches[storage][-1]
        if storage not in self.remade and self.facts.makers(storage, last) is not None:
            self.remade[storage] = self._var()
            self._pay(self.remade[storage], storage, last)
        return self.remade.get(storage)

    # ---- swaps

    def _swaps(self) -> None:
        terrain, total = self.terrain, self.total_ns
        count = terrain.count
        out_work: dict[int, list[tuple[float, pywraplp.Variable, float]]] = defaultdict(list)
        in_work: dict[int, list[tuple[float, pywraplp.Variable, float]]] = defaultdict(list)
        for gap in np.nonzero(terrain.can_swap)[0].tolist():
            if not self.spanned[gap]:
                continue
            size, last, following = float(terrain.size[gap]), int(terrain.last[gap]), int(terrain.next[gap])
            wraps = following >= count
            leaves = float(self.start[last + 1])
            returns = float(self.start[following - count if wraps else following])
            out_mb, in_mb = (size + terrain.out_fixed) / _MB, (size + terrain.in_fixed) / _MB
            boundary = self._var() if wraps else None
            if boundary is not None:  # away at the end of the step as well
                out_work[count].append((leaves, boundary, out_mb))
                in_work[-1].append((returns, boundary, in_mb))
            for k in self.spanned[gap]:
                away = self._var()
                self.away[gap].append((k if k > last else k + count, away))
                self.memory[k].SetCoefficient(away, size / _MB)
                if boundary is not None:
                    self._at_most(0.0, (away, 1.0), (boundary, -1.0))
                if k > last:
                    out_work[k].append((leaves, away, out_mb))
                if not wraps or k < following - count:
                    in_work[k].append((returns, away, in_mb))
                if gap in self.again:
                    self._at_most(1.0, (away, 1.0), (self.absent[gap][k], 1.0))
        for storage, parts in self.kept.items():
            if not terrain.problem.storages[storage].swappable:
                continue
            size = float(self.facts.size[storage])
            leaves = float(self.start[self.facts.touches[storage][-1] + 1])
            for k, kept in parts.items():
                away = self._var()
                self.memory[k].SetCoefficient(away, size / _MB)
                self._at_most(0.0, (away, 1.0), (kept, -1.0))
                out_work[k].append((leaves, away, (size + terrain.out_fixed) / _MB))
        for k, work in out_work.items():
            end = total if k == count else float(self.start[k])
            for begin in np.linspace(0.0, end, _GRID, endpoint=False):
                inside = [(variable, mb) for leaves, variable, mb in work if leaves >= begin]
                self._lane_row(inside, float(begin), end, terrain.out_rate)
        for k, work in in_work.items():
            begin = 0.0 if k < 0 else float(self.start[k + 1])
            for end in np.linspace(total, begin, _GRID, endpoint=False):
                inside = [(variable, mb) for returns, variable, mb in work if returns <= end]
                self._lane_row(inside, begin, float(end), terrain.in_rate)

    def _lane_row(
        self, work: list[tuple[pywraplp.Variable, float]], begin: float, end: float, rate: float
    ) -> None:  # fmt: skip
        """What a lane must copy between two times is at most what it can, stalls and second runs in between counted."""
        per_ns = rate / _MB
        if not work or sum(mb for _, mb in work) <= (end - begin) * per_ns:
            return
        row = self.solver.Constraint(-inf, (end - begin) * per_ns)
        for variable, mb in work:
            row.SetCoefficient(variable, mb)
        for stall, first, last in self.stalls:
            if first < end and begin < last:
                row.SetCoefficient(stall, -per_ns)
        for gap, again in self.again.items():
            made_by = float(self.start[int(self.terrain.next[gap])])
            if self.start[int(self.terrain.last[gap]) + 1] >= end or made_by <= begin:
                continue
            row.SetCoefficient(again, -per_ns * float(self.terrain.remake_ns[gap]))
            # what is still absent at a checkpoint is made again after it
            later = [k for k in self.absent[gap] if self.start[k] >= end]
            if later:
                row.SetCoefficient(self.absent[gap][later[0]], per_ns * float(self.terrain.remake_ns[gap]))
        for source, variable in self.remade.items():
            since = self.facts.touches[source][-1]
            if self.start[since + 1] < end:
                cost = sum(self.terrain.problem.ops[m].again_ns for m in self.facts.makers(source, since) or ())
                row.SetCoefficient(variable, -per_ns * cost)


def _checkpoints(level: Ints, budget: int, most: int) -> list[int]:
    """Ops where memory is looked at: the worst op of parts of equal excess."""
    over = np.maximum(0, level - budget).astype(np.float64)
    if not over.any():
        return []
    part = np.minimum(most - 1, (np.cumsum(over) / over.sum() * most).astype(np.int64))
    found = []
    for number in range(most):
        ops = np.nonzero((part == number) & (over > 0))[0]
        if len(ops):
            found.append(int(ops[level[ops].argmax()]))
    return found


def _spanned(terrain: Terrain, checks: list[int]) -> list[list[int]]:
    """For every gap, the checkpoints inside it."""
    return [
        [k for k in checks if last < k < following or last < k + terrain.count < following]
        for last, following in zip(terrain.last.tolist(), terrain.next.tolist(), strict=True)
    ]
