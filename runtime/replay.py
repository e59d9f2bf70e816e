"""From a plan and a captured program to straight-line Python that runs the step.

Every value is a local variable, dropped at its last use in planned order. A storage the plan only frees dies with its
last variable, exactly at the plan's boundary. A storage the plan swaps or recomputes is emptied by the lane at the
planned boundary while its variables, and every view of it, live on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensile.compiler import torch_private
from tensile.compiler.graph import Graph
from tensile.compiler.program import Call, Program, Ref
from tensile.schedules.plan import Free, Plan, Recompute, SwapIn, SwapOut

_PERSISTENT = ("parameter", "buffer", "optimizer_state", "gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The step as a function `run(inputs, lane)`: `inputs` lists the program's input values in order and is emptied at
    once; returns the values of `outputs` in order. `source` is its text, for reading."""

    run: Callable[[list[Any], Any], list[Any]]
    source: str
    outputs: tuple[int, ...]
    swaps: int
    recomputes: int
    frees: int


@dataclass(slots=True)
class _Line:
    """One statement: what it binds and what it reads, both as variable names."""

    text: str
    binds: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


def build_replay(plan: Plan, graph: Graph, program: Program) -> Replay:
    """Generate and compile the step. The plan must be for this very graph; `bind` sees to that."""
    return _Builder(plan, graph, program).build()


class _Builder:
    def __init__(self, plan: Plan, graph: Graph, program: Program) -> None:
        self._plan, self._graph, self._program = plan, graph, program
        self._names: dict[str, Any] = {"inf": float("inf"), "nan": float("nan"), "restore": restore}
        self._functions: dict[Any, str] = {}
        self._constants: dict[int, str] = {}
        self._lines: list[_Line] = []
        self._bound: set[int] = set()
        self._storage_of = [
            None if value.tensor is None else graph.tensors[value.tensor].storage for value in program.values
        ]
        self._handles: set[int] = set()  # storages whose handle is a local already
        managed: set[int] = set()
        self._away: set[int] = set()  # storages that are hollow at this place in the code
        for event in plan.events:
            if isinstance(event, (SwapOut, SwapIn)):
                managed.add(event.storage)
            elif isinstance(event, Recompute):
                managed.update(event.restores)
        self._managed = managed
        self._recompute = {event.row: event for event in plan.events if isinstance(event, Recompute)}
        self._touches_of: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(plan.rows):
            for storage in {*row.reads, *row.writes, *row.creates}:
                self._touches_of[storage].append(number)

    def build(self) -> Replay:
        plan, program = self._plan, self._program
        for entry in program.inputs:
            self._bound.add(entry.value)
        names = [f"v{entry.value}" for entry in program.inputs]
        unpack = f"{', '.join(names)}{',' if len(names) == 1 else ''} = inputs" if names else "pass"
        self._lines.append(_Line(unpack, binds=tuple(names)))
        self._lines.append(_Line("inputs.clear()"))
        for entry in program.inputs:
            self._handle(entry.value)
        by_boundary = self._events()
        updating = False
        for number, row in enumerate(plan.rows):
            self._boundary(by_boundary[number])
            if not updating and self._changes_state(row.writes):
                self._lines.append(_Line("lane.begin_update()"))
                updating = True
            again = number in self._recompute
            call = program.again.get(row.op, program.ops[row.op]) if again else program.ops[row.op]
            if again:
                self._run_again(call, self._recompute[number])
            else:
                self._run(call)
        self._boundary(by_boundary[len(plan.rows)])
        leaves = [leaf for leaf in pytree.tree_leaves(program.returns, is_leaf=_is_ref) if isinstance(leaf, Ref)]
        outputs = (
            *(leaf.value for leaf in leaves),
            *(value for _, value in program.gradients if value is not None),
            *(value for _, _, value in program.reassigned),
        )
        for value in outputs:
            self._need(value)
        results = tuple(f"v{value}" for value in outputs)
        self._lines.append(_Line(f"return [{', '.join(results)}]", reads=results))
        source = "\n".join(["def run(inputs, lane):", *(f"    {text}" for text in self._with_drops())]) + "\n"
        exec(compile(source, "<tensile step>", "exec"), self._names)
        kinds = [type(event) for event in plan.events]
        return Replay(
            run=self._names["run"], source=source, outputs=outputs, swaps=kinds.count(SwapOut),
            recomputes=kinds.count(Recompute), frees=kinds.count(Free),
        )  # fmt: skip

    def _events(self) -> dict[int, list[tuple[int, Any, str]]]:
        """What happens at each boundary: (place in the boundary's order, event, part of the event)."""
        found: dict[int, list[tuple[int, Any, str]]] = defaultdict(list)
        for event in self._plan.events:
            if isinstance(event, SwapOut):
                found[event.start].append((0, event, "out"))
                found[event.free].append((1, event, "free"))
            elif isinstance(event, Free):
                found[event.at].append((2, event, "drop"))
            elif isinstance(event, SwapIn):
                found[event.start].append((3, event, "fetch"))
                found[event.need].append((4, event, "wait"))
        for events in found.values():
            events.sort(key=lambda entry: entry[0])
        return found

    def _boundary(self, events: list[tuple[int, Any, str]]) -> None:
        for _, event, part in events:
            if part == "drop":
                for storage in event.storages:
                    if storage in self._managed:
                        handle = f"s{storage}"
                        self._lines.append(_Line(f"lane.drop({storage}, {handle})", reads=(handle,)))
            elif part == "out":
                handle = f"s{event.storage}"
                self._lines.append(_Line(f"lane.out({event.storage}, {handle}, {event.free})", reads=(handle,)))
            elif part == "fetch":
                self._lines.append(_Line(f"lane.fetch({event.storage}, {event.need})"))
            else:
                self._lines.append(_Line(f"lane.{part}({event.storage})"))

    def _run(self, call: Call) -> None:
        self._emit(call)
        for value in _results(call):
            self._handle(value)

    def _handle(self, value: int) -> None:
        """Keep the storage object of a managed storage at hand from its birth on."""
        storage = self._storage_of[value]
        if storage in self._managed and storage not in self._handles:
            self._handles.add(storage)
            text = f"s{storage} = v{value}.untyped_storage()"
            self._lines.append(_Line(text, binds=(f"s{storage}",), reads=(f"v{value}",)))

    def _run_again(self, call: Call, event: Recompute) -> None:
        expression, reads = self._expression(call)
        self._lines.append(_Line(f"r = {expression}", binds=("r",), reads=reads))
        values = (call.results,) if isinstance(call.results, int) else call.results
        for storage in event.restores:
            position = next(i for i, v in enumerate(values) if v is not None and self._storage_of[v] == storage)
            result = "r" if isinstance(call.results, int) else f"r[{position}]"
            if torch_private.CAN_SWAP_POINTERS:
                text, used = f"restore(s{storage}, {result})", (f"s{storage}", "r")
            else:
                aliases = tuple(f"v{v}" for v in sorted(self._bound) if self._storage_of[v] == storage)
                text = f"s{storage} = restore_aliases({result}, [{', '.join(aliases)}])"
                self._names["restore_aliases"] = restore_aliases
                self._lines.append(_Line(text, binds=(f"s{storage}",), reads=("r", *aliases)))
                continue
            self._lines.append(_Line(text, reads=used))

    def _emit(self, call: Call) -> None:
        expression, reads = self._expression(call)
        binds: tuple[str, ...]
        if isinstance(call.results, int):
            target, binds = f"v{call.results}", (f"v{call.results}",)
        else:
            binds = tuple(f"v{v}" if v is not None else "_" for v in call.results)
            target = f"({', '.join(binds)},)" if binds else "_"
            binds = binds or ("_",)
        self._lines.append(_Line(f"{target} = {expression}", binds=binds, reads=reads))
        self._bound.update(_results(call))

    def _expression(self, call: Call) -> tuple[str, tuple[str, ...]]:
        needed = [leaf.value for leaf in _refs((call.args, call.kwargs))]
        for value in needed:
            self._need(value)
        arguments = [self._text(a) for a in call.args] + [f"{k}={self._text(v)}" for k, v in call.kwargs.items()]
        return f"{self._function(call.target)}({', '.join(arguments)})", tuple(f"v{value}" for value in needed)

    def _need(self, value: int) -> None:
        """Run the glue a value comes from, right before its first use."""
        pending = [value]
        while pending:
            current = pending[-1]
            if current in self._bound:
                pending.pop()
                continue
            glue = self._program.glue[current]
            missing = [ref.value for ref in _refs((glue.args, glue.kwargs)) if ref.value not in self._bound]
            if missing:
                pending.extend(missing)
            else:
                self._emit(glue)
                pending.pop()

    def _function(self, target: Any) -> str:
        if target not in self._functions:
            name = f"f{len(self._functions)}"
            self._functions[target] = name
            # the operator behind an overload is called without the overload's Python layer
            self._names[name] = target._op if isinstance(target, torch._ops.OpOverload) else target
        return self._functions[target]

    def _text(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            return f"v{argument.value}"
        if type(argument) is list:
            return f"[{', '.join(map(self._text, argument))}]"
        if type(argument) is tuple:
            return f"({', '.join(map(self._text, argument))}{',' if len(argument) == 1 else ''})"
        if argument is None or type(argument) in (bool, int, str, float):
            return repr(argument)
        if isinstance(argument, slice):
            return f"slice({self._text(argument.start)}, {self._text(argument.stop)}, {self._text(argument.step)})"
        if isinstance(argument, (list, tuple)):  # fx's immutable lists, torch.Size
            return self._text(list(argument))
        name = self._constants.setdefault(id(argument), f"c{len(self._constants)}")
        self._names[name] = argument
        return name

    def _changes_state(self, writes: tuple[int, ...]) -> bool:
        return any(self._graph.storages[s].enters and self._graph.storages[s].kind in _PERSISTENT for s in writes)

    def _with_drops(self) -> Iterator[str]:
        """The statements, with every local set to None behind its last use."""
        last: dict[str, int] = {}
        for number, line in enumerate(self._lines):
            for name in (*line.binds, *line.reads):
                last[name] = number
        dying: dict[int, list[str]] = defaultdict(list)
        for name, number in last.items():
            dying[number].append(name)
        for number, line in enumerate(self._lines):
            yield line.text
            # `r` is bound over and over: it must not outlive the row that bound it
            names = [n for n in dying[number] if n != "r"]
            ends_row = "r" in (*line.binds, *line.reads) and not self._reads_r(number + 1)
            names += ["r"] if ends_row else []
            if names and not line.text.startswith("return"):
                yield " = ".join(names) + " = None"

    def _reads_r(self, number: int) -> bool:
        return number < len(self._lines) and "r" in self._lines[number].reads


def restore(storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
    """The hollow storage takes over the memory of a tensor just recomputed, which nothing else uses."""
    fresh = tensor.untyped_storage()
    assert fresh.nbytes() == storage.nbytes(), "a recomputed tensor has another size than the first time"
    torch_private.refill(storage, fresh)


def restore_aliases(tensor: torch.Tensor, aliases: list[torch.Tensor]) -> torch.UntypedStorage:
    """As `restore`, for torch that cannot swap pointers: every tensor on the emptied storage moves to the new one."""
    fresh = tensor.untyped_storage()
    for alias in aliases:
        if alias is not None:
            alias.set_(fresh, alias.storage_offset(), alias.shape, alias.stride())
    return fresh


def _refs(arguments: Any) -> list[Ref]:
    return [leaf for leaf in pytree.tree_leaves(_without_slices(arguments), is_leaf=_is_ref) if _is_ref(leaf)]


def _without_slices(value: Any) -> Any:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, dict):
        return [_without_slices(v) for v in value.values()]
    if isinstance(value, (list, tuple)):
        return [_without_slices(v) for v in value]
    return value


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


def _results(call: Call) -> tuple[int, ...]:
    results = (call.results,) if isinstance(call.results, int) else call.results
    return tuple(value for value in results if value is not None)
