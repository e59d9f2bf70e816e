"""Laws of the planner over generated problems, and small graphs whose numbers are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referee import faults, peak

from tensile.compiler.occupancy import memory
from tensile.compiler.order import memory_aware_order
from tensile.compiler.problem import Problem, ProblemOp, ProblemStorage
from tensile.compiler.simulate import simulate
from tensile.compiler.solution import Run, Solution, Swap
from tensile.compiler.solve import Effort, smallest_budget, solve, touched_bytes
from tensile.schedules.errors import InfeasibleBudget


def op(*, reads=(), writes=(), creates=(), time=1000, workspace=0, after=(), again=True, phase=0):  # type: ignore[no-untyped-def]
    return ProblemOp(
        time_ns=time, again_ns=time, workspace_bytes=workspace, reads=tuple(reads), writes=tuple(writes),
        creates=tuple(creates), after=tuple(after), again_ok=again, again_reads=tuple(reads),
        again_writes=tuple(writes), phase=phase,
    )  # fmt: skip


def storage(size: int, *, enters: bool = False, leaves: bool = False, swappable: bool = True) -> ProblemStorage:
    return ProblemStorage(size_bytes=size, enters=enters, leaves=leaves, swappable=swappable)


def problem(ops: list[ProblemOp], storages: list[ProblemStorage], *, budget: int = 10**9, ps: int = 1000) -> Problem:
    """`ps`: picoseconds a byte takes on either lane."""
    return Problem(
        ops=tuple(ops), storages=tuple(storages), budget_bytes=budget, smallest_bytes=1, fixed_bytes=0,
        out_ps_per_byte=ps, in_ps_per_byte=ps, out_latency_ns=0, in_latency_ns=0, duplex_percent=100,
    )  # fmt: skip


def refusal(p: Problem) -> InfeasibleBudget | None:
    try:
        solve(p)
    except InfeasibleBudget as error:
        return error
    return None


def plain_peak(p: Problem) -> int:
    return max(memory(p, [Run(op=k) for k in range(len(p.ops))], ()))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A forward chain with skips, a backward that reads what the forward kept, updates in place."""
    layers = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(1, 100), min_size=3 * layers + 1, max_size=3 * layers + 1))
    times = draw(st.lists(st.integers(1, 5000), min_size=3 * layers, max_size=3 * layers))
    weights = list(range(layers))
    kept = [layers + k for k in range(layers)]
    gradients = [2 * layers + k for k in range(layers)]
    batch = 3 * layers
    storages = [storage(sizes[w], enters=True, leaves=True) for w in weights]
    storages += [storage(sizes[k]) for k in kept] + [storage(sizes[g]) for g in gradients]
    storages.append(storage(sizes[batch], enters=True, swappable=False))
    ops = []
    for k in range(layers):
        reads = {weights[k], kept[k - 1] if k else batch}
        if k > 1 and draw(st.booleans()):
            reads.add(kept[draw(st.integers(0, k - 2))])
        made = [ops_index for ops_index, o in enumerate(ops) if set(o.creates) & reads]
        ops.append(op(reads=sorted(reads), creates=[kept[k]], time=times[k], after=made,
                      workspace=draw(st.integers(0, 20)), again=draw(st.booleans())))  # fmt: skip
    for number, k in enumerate(reversed(range(layers))):
        reads = {weights[k], kept[k]} | ({gradients[k + 1]} if k + 1 < layers else set())
        ops.append(op(reads=sorted(reads), creates=[gradients[k]], time=times[layers + k], after=[k, len(ops) - 1],
                      phase=1, again=False))  # fmt: skip
        assert len(ops) == layers + number + 1
    for k in reversed(range(layers)):
        backward = layers + (layers - 1 - k)
        below = [backward + 1] if k else []
        ops.append(op(reads=[weights[k], gradients[k]], writes=[weights[k]], time=times[2 * layers + k],
                      after=[k, backward, *below], again=False, phase=2))  # fmt: skip
    p = problem(ops, storages, ps=draw(st.sampled_from([1, 1000, 10**5])))
    low, high = max(touched_bytes(p)), plain_peak(p)
    return replace(p, budget_bytes=draw(st.integers(low, max(low, high))))


@st.composite
def messy_problems(draw: st.DrawFn) -> Problem:
    """Any order of ops that read, write in place and create, with the hazards they have."""
    count = draw(st.integers(3, 16))
    facts = [storage(draw(st.integers(1, 60)), enters=True, leaves=True, swappable=draw(st.booleans())) for _ in "abc"]
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    ops: list[ProblemOp] = []
    for number in range(count):
        known = st.integers(0, len(facts) - 1)
        reads = draw(st.lists(known, max_size=3, unique=True))
        writes = draw(st.lists(known, max_size=1)) if draw(st.integers(0, 3)) == 0 else []
        creates = list(range(len(facts), len(facts) + draw(st.integers(0, 2))))
        facts += [storage(draw(st.integers(1, 60)), swappable=draw(st.booleans()), leaves=draw(st.integers(0, 9)) == 0)
                  for _ in creates]  # fmt: skip
        after = {last_write[s] for s in {*reads, *writes} if s in last_write}
        after |= {r for s in writes for r in readers.get(s, [])} - {number}
        for s in {*reads, *writes}:
            readers.setdefault(s, []).append(number)
        for s in {*writes, *creates}:
            last_write[s], readers[s] = number, []
        updates = any(s < 3 for s in writes) and draw(st.booleans())
        ops.append(op(
            reads=sorted({*reads, *writes}), writes=writes, creates=creates, time=draw(st.integers(1, 2000)),
            after=sorted(after), again=draw(st.booleans()), workspace=draw(st.integers(0, 20)),
            phase=2 if updates else 0,
        ))  # fmt: skip
    p = problem(ops, facts, ps=draw(st.sampled_from([1, 1000, 10**5])))
    low, high = max(touched_bytes(p)), plain_peak(p)
    return replace(p, budget_bytes=draw(st.integers(low, max(low, high))))


@settings(max_examples=300, deadline=None)
@given(problems() | messy_problems())
def test_every_answer_is_within_the_budget_and_complete(p: Problem) -> None:
    least = smallest_budget(p)
    if p.budget_bytes < least:
        refused = refusal(p)
        if refused is not None:  # a budget below the one bisection found may still be met
            assert refused.smallest_bytes == least <= plain_peak(p)
            return
    answer = solve(p).solution
    levels = memory(p, answer.runs, answer.swaps)
    assert max(levels) == answer.peak_bytes <= p.budget_bytes
    assert levels[answer.peak_run] == answer.peak_bytes
    assert simulate(p, answer.runs, answer.swaps).step_ns == answer.step_ns
    assert faults(p, answer) == []
    assert peak(p, answer) == answer.peak_bytes


@settings(max_examples=60, deadline=None)
@given(problems() | messy_problems())
def test_no_plan_beats_the_bound_and_the_search_only_gains(p: Problem) -> None:
    if refusal(p) is not None:
        return
    answer = solve(p, Effort(seconds=60, rounds=12, seed=1))
    assert faults(p, answer.solution) == []
    assert peak(p, answer.solution) == answer.solution.peak_bytes <= p.budget_bytes
    assert answer.plain_ns <= answer.bound_ns <= answer.solution.step_ns * (1 + 1e-9)
    assert answer.solution.step_ns == min(step for _, step in answer.reached) <= solve(p).solution.step_ns
    assert answer.ended in ("", "bound", "rounds")
    assert solve(p, Effort(seconds=60, rounds=12, seed=1)) == answer


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_smallest_budget_is_met_and_named_by_the_refusal(p: Problem) -> None:
    least = smallest_budget(p)
    assert solve(replace(p, budget_bytes=least)).solution.peak_bytes <= least
    assert least >= max(touched_bytes(p))


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_other_names_for_the_storages_change_nothing(p: Problem, random) -> None:  # type: ignore[no-untyped-def]
    names = list(range(len(p.storages)))
    random.shuffle(names)

    def renamed(group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names[s] for s in group)

    ops = tuple(
        replace(o, reads=renamed(o.reads), writes=renamed(o.writes), creates=renamed(o.creates),
                again_reads=renamed(o.again_reads), again_writes=renamed(o.again_writes))
        for o in p.ops
    )  # fmt: skip
    back = {new: old for old, new in enumerate(names)}
    other = replace(p, ops=ops, storages=tuple(p.storages[back[k]] for k in range(len(names))))
    assert plain_peak(other) == plain_peak(p)
    assert memory_aware_order(other) == memory_aware_order(p)
    assert touched_bytes(other) == touched_bytes(p)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_an_answer_depends_on_the_problem_alone(p: Problem) -> None:
    def answer():  # type: ignore[no-untyped-def]
        try:
            return solve(p).solution
        except InfeasibleBudget as error:
            return error.smallest_bytes

    assert answer() == answer()


@settings(max_examples=40, deadline=None)
@given(problems())
def test_a_budget_that_holds_everything_is_answered_with_no_event_and_no_other_is_faster(p: Problem) -> None:
    roomy = solve(replace(p, budget_bytes=plain_peak(p))).solution
    assert not roomy.swaps
    assert all(run.restores is None for run in roomy.runs)
    try:
        tight = solve(p).solution
    except InfeasibleBudget:
        return
    assert roomy.step_ns == sum(o.time_ns for o in p.ops) <= tight.step_ns


@settings(max_examples=60, deadline=None)
@given(problems())
def test_problems_survive_json(p: Problem) -> None:
    assert Problem.from_json(p.to_json()) == p


# chain: x -> a -> b -> c; backward reads c, b, a in turn. Sizes: batch 1, activations 10, gradients 10
#   op                f_a  f_b  f_c  b_c  b_b  b_a
#   resident           11   21   31   41   41   31     b_c: x a b c + gradient c
CHAIN_OPS = [
    op(reads=[0], creates=[1]), op(reads=[1], creates=[2], after=[0]), op(reads=[2], creates=[3], after=[1]),
    op(reads=[3], creates=[4], after=[2], phase=1), op(reads=[2, 4], creates=[5], after=[1, 3], phase=1),
    op(reads=[1, 5], creates=[6], after=[0, 4], phase=1),
]  # fmt: skip
CHAIN = problem(CHAIN_OPS, [storage(1, enters=True, swappable=False), *[storage(10) for _ in range(6)]], ps=10)


def test_chain_memory_by_hand() -> None:
    runs = [Run(op=k) for k in range(6)]
    assert memory(CHAIN, runs, ()) == [11, 21, 31, 41, 41, 31]


def test_chain_a_swap_by_hand() -> None:
    # `a` leaves after f_b (given back before f_c) and is back before b_a
    runs = [Run(op=k) for k in range(6)]
    swap = Swap(storage=1, out_start=2, out_free=3, in_start=5, in_need=5)
    assert memory(CHAIN, runs, [swap]) == [11, 21, 31, 31, 31, 31]


def test_chain_a_recompute_by_hand() -> None:
    # `a` is made again right before b_a: the run adds a row, and what b_b no longer holds is gone by then
    runs = [*(Run(op=k) for k in range(5)), Run(op=0, restores=(1,)), Run(op=5)]
    assert memory(CHAIN, runs, ()) == [11, 21, 21, 31, 31, 21, 31]


def test_chain_the_planner_meets_the_floor_at_the_least_cost() -> None:
    # the floor is b_b: x, b, gradients c and b. `a` must be away over it and back before b_a, right behind it: the
    # copy back hides behind nothing, and ten bytes at 10 ps are a tenth of a nanosecond, counted as one
    assert max(touched_bytes(CHAIN)) == 31
    answer = solve(replace(CHAIN, budget_bytes=31)).solution
    assert answer.peak_bytes == 31
    assert answer.step_ns == 6001


def test_chain_below_the_floor_is_refused_with_op_and_bytes() -> None:
    with pytest.raises(InfeasibleBudget) as refused:
        solve(replace(CHAIN, budget_bytes=30))
    assert (refused.value.smallest_bytes, refused.value.op, refused.value.op_bytes) == (31, 4, 31)


def test_diamond_by_hand() -> None:
    # x -> a; a -> b; a -> c; (b, c) -> d: `a` lives until c, b waits for d
    ops = [op(reads=[0], creates=[1]), op(reads=[1], creates=[2], after=[0]), op(reads=[1], creates=[3], after=[0]),
           op(reads=[2, 3], creates=[4], after=[1, 2])]  # fmt: skip
    p = problem(ops, [storage(1, enters=True, swappable=False), storage(10), storage(20), storage(30), storage(5)])
    assert memory(p, [Run(op=k) for k in range(4)], ()) == [11, 31, 61, 56]
    # the floor: f_c touches a and c, d touches b, c and d
    assert touched_bytes(p) == [11, 31, 41, 56]
    assert solve(replace(p, budget_bytes=56)).solution.peak_bytes == 56


def test_residual_by_hand() -> None:
    # y = x2 + f(x2): the skip lives over f; recomputing it costs its op once more
    ops = [op(reads=[0], creates=[1], time=10), op(reads=[1], creates=[2], after=[0]),
           op(reads=[2], creates=[3], after=[1]), op(reads=[1, 3], creates=[4], after=[0, 2])]  # fmt: skip
    p = problem(ops, [storage(1, enters=True, swappable=False), *[storage(10) for _ in range(4)]], ps=10**9)
    assert memory(p, [Run(op=k) for k in range(4)], ()) == [11, 21, 31, 31]
    assert solve(replace(p, budget_bytes=31)).solution.step_ns == 3010
    with pytest.raises(InfeasibleBudget):
        solve(replace(p, budget_bytes=30))


def test_what_draws_random_numbers_is_swapped_and_never_made_again() -> None:
    ops = [replace(o, again_ok=False) if k == 0 else o for k, o in enumerate(CHAIN_OPS)]
    slow = replace(CHAIN, ops=tuple(ops), budget_bytes=31, in_ps_per_byte=10**8, out_ps_per_byte=10**8)
    answer = solve(slow).solution
    assert all(run.op != 0 for run in answer.runs if run.restores is not None)
    assert {swap.storage for swap in answer.swaps} >= {1}


def test_what_a_second_run_makes_besides_counts_beside_the_first() -> None:
    p = problem([op(creates=[0, 1]), op(workspace=1), op(reads=[0, 1], again=False)],
                [storage(10), storage(30, leaves=True)], budget=100)  # fmt: skip
    runs = (Run(op=0), Run(op=1), Run(op=0, restores=(0,)), Run(op=2))
    again = Solution(runs=runs, swaps=(), planner="by hand", step_ns=4000, peak_bytes=70, peak_run=2)
    assert memory(p, runs, ()) == [40, 31, 70, 40]
    assert faults(p, again) == []
    assert peak(p, again) == 70


def test_a_tied_weight_is_out_only_between_its_uses() -> None:
    # w is read by the first and the last op: the only interval worth a swap is the middle
    ops = [op(reads=[0, 1], creates=[2]), op(reads=[2], creates=[3], after=[0]), op(reads=[3], creates=[4], after=[1]),
           op(reads=[4, 1], writes=[1], after=[0, 2], again=False)]  # fmt: skip
    sizes = [storage(1, enters=True, swappable=False), storage(50, enters=True, leaves=True)]
    p = problem(ops, [*sizes, storage(10), storage(60), storage(5)], ps=1)
    assert memory(p, [Run(op=k) for k in range(4)], ()) == [61, 121, 116, 56]
    answer = solve(replace(p, budget_bytes=71)).solution
    assert answer.peak_bytes <= 71
    assert [swap.storage for swap in answer.swaps if not swap.wraps] == [1]


def test_a_stall_by_hand() -> None:
    # one byte takes 1 us: ten bytes out during one 1000 ns op leave 9000 ns to wait, and the same back
    p = replace(CHAIN, in_ps_per_byte=10**6, out_ps_per_byte=10**6)
    runs = [Run(op=k) for k in range(6)]
    timeline = simulate(p, runs, [Swap(storage=1, out_start=2, out_free=3, in_start=4, in_need=5)])
    assert timeline.stall_ns == (0, 0, 0, 9000, 0, 9000, 0)
    assert timeline.step_ns == 6000 + 18000
    assert timeline.out_ns == ((2000, 12000),)
    assert timeline.in_ns == ((13000, 23000),)
