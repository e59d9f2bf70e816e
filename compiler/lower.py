"""From a traced fx graph to the Graph record and the Program that runs it."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg as fx_map
from torch.utils import _pytree as pytree

from tensile.compiler import torch_private
from tensile.compiler.graph import Graph, Op, Storage, Tensor
from tensile.compiler.program import Call, Input, Program, Ref, Value
from tensile.compiler.provenance import Provenance
from tensile.compiler.refusals import refuse
from tensile.compiler.tidy import RUNNING_STATISTICS, draws, has_effects, tensors_of, unannotated_writes
from tensile.compiler.trace import BEFORE_ZERO_GRAD, Traced
from tensile.schedules.plan import Fingerprint, Kind

# ops that look at a tensor's shape, never at its contents
_METADATA_ONLY = {
    f"aten::{name}"
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
                 "new_zeros", "new_ones", "new_full", "new_empty_strided")
}  # fmt: skip


def lower(
    traced: Traced, *, name: str, device: str, fingerprint: Fingerprint, user_folder: str | None
) -> tuple[Graph, Program]:
    """The plain-data graph of a tidied trace, and the program behind it. `fingerprint.ops` is filled in here."""
    return _Lowering(traced, user_folder).result(name, device, fingerprint)


class _Lowering:
    """One pass over the nodes. A node is an op when it touches memory, otherwise glue."""

    def __init__(self, traced: Traced, user_folder: str | None) -> None:
        self._traced = traced
        nodes = list(traced.graph_module.graph.nodes)
        self._nodes = [node for node in nodes if node.op == "call_function"]
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        self._constants = [node for node in nodes if node.op == "get_attr"]
        self._output = next(node for node in nodes if node.op == "output")
        self._provenance = Provenance(nodes, user_folder)
        self._value: dict[Node, int] = {}
        self._values: list[Value] = []
        self._producers: list[frozenset[int]] = []  # value -> ops it comes from
        self._tensors: list[Tensor] = []
        self._storages: list[Storage] = []
        self._storage_of: dict[int, int] = {}  # storage key -> index
        self._keep: list[torch.Tensor] = []  # storages stay alive, so that keys stay unique
        self._last_touch: dict[int, int] = {}  # storage -> op that created or wrote it last
        self._names: Counter[str] = Counter()
        self._digest = hashlib.sha256()

    def result(self, name: str, device: str, fingerprint: Fingerprint) -> tuple[Graph, Program]:
        inputs = self._inputs()
        ops: list[Op] = []
        calls: list[Call] = []
        again: dict[int, Call] = {}
        glue: dict[int, Call] = {}
        hazards = _Hazards()
        release: int | None = None
        for node in self._nodes:
            if node in self._value:
                continue  # an element, unpacked where its tuple was made
            arguments = node.all_input_nodes
            sources: frozenset[int] = frozenset().union(*(self._producers[self._value[a]] for a in arguments))
            if any(tensor.layout is not torch.strided for tensor in tensors_of(node.meta.get("val"))):
                raise refuse(
                    "TS110", "the step makes sparse gradients", where=self._provenance.of(node).source,
                    hint="pass sparse=False to the module",
                )  # fmt: skip
            if self._is_glue(node):
                call = self._call(node, sources, origin=None)
                glue |= dict.fromkeys(_result_values(call), call)
                continue
            index = len(ops)
            read, written = self._touched(node)
            origin = self._provenance.of(node)
            op_name = self._op_name(node, origin.module)
            known = len(self._storages)
            call = self._call(node, frozenset((index,)), origin=(index, op_name))
            created = tuple(range(known, len(self._storages)))
            drawing, effects = draws(node), has_effects(node)
            barrier = effects and not written and not drawing
            after = hazards.add(index, read, written, created, drawing, barrier) | sources
            ops.append(
                Op(
                    index=index, name=op_name, call=str(node.target), phase=origin.phase, module=origin.module,
                    source=origin.source, inputs=self._tensors_in(arguments),
                    outputs=tuple(t for v in _result_values(call) if (t := self._values[v].tensor) is not None),
                    reads=read, writes=written, creates=created, after=tuple(sorted(after - {index})), rng=drawing,
                    no_recompute=self._no_recompute(node, written), key=self._key(node),
                )
            )  # fmt: skip
            calls.append(call)
            for storage in (*written, *created):
                self._last_touch[storage] = index
            if unannotated_writes(node):
                args = tuple(None if i in RUNNING_STATISTICS else a for i, a in enumerate(call.args))
                again[index] = Call(target=call.target, args=args, kwargs=call.kwargs, results=call.results)
            if node.meta.get(BEFORE_ZERO_GRAD):
                release = index
        returns, gradients, reassigned = self._outputs()
        if release is not None:
            ops[release] = replace(ops[release], release_gradient=True)
        program = Program(
            inputs=inputs, values=tuple(self._values), ops=tuple(calls), again=again, glue=glue, returns=returns,
            gradients=gradients, reassigned=reassigned, counters=self._traced.counters,
        )  # fmt: skip
        graph = Graph(
            name=name, device=device, fingerprint=replace(fingerprint, ops=self._digest.hexdigest()[:16]),
            ops=tuple(ops), tensors=tuple(self._tensors), storages=tuple(self._storages),
        )  # fmt: skip
        return graph, program

    def _inputs(self) -> tuple[Input, ...]:
        """Values, tensors and storages of what exists before the step."""
        inputs = []
        tensors, hypers = self._traced.inputs, self._traced.hypers
        for node, fake in zip(self._placeholders, tensors, strict=False):
            if fake.kind == "gradient" and not node.users:
                continue  # the step drops it before anything looks at it
            enters: dict[str, Any] = {"kind": fake.kind, "enters": True, "leaves": fake.kind != "batch"}
            value = self._new_value(node, fake.tensor, frozenset(), {"name": fake.name, **enters}, producer=None)
            inputs.append(Input(value=value, kind=fake.kind, name=fake.name, leaf=fake.leaf))  # type: ignore[arg-type]
        for node, hyper in zip(self._placeholders[len(tensors) :], hypers, strict=True):
            value = self._new_value(node, torch_private.hint_of(hyper.symbol), frozenset(), {}, producer=None)
            inputs.append(
                Input(value=value, kind="hyper", name=hyper.name, group=hyper.group, key=hyper.key, item=hyper.item)
            )
        for node in self._constants:
            tensor = getattr(self._traced.graph_module, str(node.target))
            name = f"constant.{node.target}"
            facts = {"name": name, "kind": "constant", "enters": True, "leaves": True}
            value = self._new_value(node, tensor, frozenset(), facts, producer=None)
            inputs.append(Input(value=value, kind="constant", name=name, tensor=tensor))
            self._digest.update(repr((tuple(tensor.shape), str(tensor.dtype), tensor.tolist())).encode())
        return tuple(inputs)

    def _new_value(
        self, node: Node | None, content: Any, sources: frozenset[int], facts: dict[str, Any], *, producer: int | None
    ) -> int:
        """Number a value; a tensor on a storage not met before makes that storage, described by `facts`."""
        value = len(self._values)
        tensor: int | None = None
        hint: float | int | bool | None = None
        if isinstance(content, torch.Tensor):
            tensor = self._new_tensor(content, facts, producer)
        elif isinstance(content, (int, float, bool)):
            hint = content
        elif isinstance(content, (torch.SymFloat, torch.SymInt)):
            hint = torch_private.hint_or_none(content)
        self._values.append(Value(tensor=tensor, hint=hint))
        self._producers.append(sources)
        if node is not None:
            self._value[node] = value
        return value

    def _new_tensor(self, content: torch.Tensor, facts: dict[str, Any], producer: int | None) -> int:
        key = torch_private.storage_key(content)
        storage = self._storage_of.get(key)
        if storage is None:
            storage = self._storage_of[key] = len(self._storages)
            self._keep.append(content)
            size = int(content.untyped_storage().nbytes())
            self._storages.append(Storage(index=storage, size_bytes=size, device=str(content.device), **facts))
        index = len(self._tensors)
        tensor = Tensor(
            index=index, storage=storage, shape=tuple(map(int, content.shape)),
            stride=tuple(map(int, content.stride())),
            offset=int(content.storage_offset()), dtype=str(content.dtype).removeprefix("torch."),
            producer=producer if producer is not None else self._last_touch.get(storage),
        )  # fmt: skip
        self._tensors.append(tensor)
        self._digest.update(repr((storage, tensor.shape, tensor.stride, tensor.offset, tensor.dtype)).encode())
        return index

    def _is_glue(self, node: Node) -> bool:
        """Views, elements and Python scalars: nothing written, nothing allocated, nothing looked at."""
        if has_effects(node):
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            return True
        produced = tensors_of(node.meta.get("val"))
        if not produced:
            return False
        held = {torch_private.storage_key(t) for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))}
        return all(torch_private.storage_key(tensor) in held for tensor in produced)

    def _touched(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Storages whose contents an op uses, and those it changes."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return (), ()
        written: set[int] = set()
        schema = target._schema
        hidden = unannotated_writes(node)
        for position, argument in enumerate(schema.arguments):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if (argument.alias_info is not None and argument.alias_info.is_write) or position in hidden:
                written |= self._storages_in(given)
        blind = torch_private.op_name(target) in _METADATA_ONLY
        read = set() if blind else self._storages_in([node.args, node.kwargs])
        return tuple(sorted(read)), tuple(sorted(written))

    def _storages_in(self, arguments: Any) -> set[int]:
        nodes = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Node)]
        return {self._tensors[t].storage for t in self._tensors_in(nodes)}

    def _tensors_in(self, nodes: list[Node]) -> tuple[int, ...]:
        return tuple(t for node in nodes if (t := self._values[self._value[node]].tensor) is not None)

    def _op_name(self, node: Node, module: str) -> str:
        stem = f"{module}/{_short(node)}" if module else _short(node)
        self._names[stem] += 1
        return f"{stem}.{self._names[stem] - 1}"

    def _call(self, node: Node, sources: frozenset[int], origin: tuple[int, str] | None) -> Call:
        """The node as a Call; its results become values, tuples unpacked when only their elements are used."""
        args, kwargs = self._with_refs(node.args), self._with_refs(node.kwargs)
        content = node.meta.get("val")
        producer, name = origin if origin is not None else (None, "")
        facts = {"name": name, "kind": "activation", "enters": False, "leaves": False}
        results: int | tuple[int | None, ...]
        if isinstance(content, (list, tuple)) and all(user.target is operator.getitem for user in node.users):
            elements: list[int | None] = [None] * len(content)
            for position, element in enumerate(content):
                users = [user for user in node.users if user.args[1] == position]
                element_facts = {**facts, "name": f"{name}[{position}]"}
                if users or isinstance(element, torch.Tensor):
                    element_value = self._new_value(None, element, sources, element_facts, producer=producer)
                    elements[position] = element_value
                    self._value |= dict.fromkeys(users, element_value)
            results = tuple(elements)
        elif isinstance(content, (list, tuple)):
            raise refuse("TS112", f"{node.target} returns a structure that is passed on whole", hint="report this op")
        else:
            results = self._new_value(node, content, sources, facts, producer=producer)
        self._digest.update(repr((str(node.target), args, kwargs, results)).encode())
        return Call(target=torch_private.runnable(node.target), args=args, kwargs=kwargs, results=results)

    def _with_refs(self, argument: Any) -> Any:
        """The argument with nodes as Refs, and fx's immutable lists and dictionaries as plain ones."""
        if isinstance(argument, Node):
            return Ref(self._value[argument])
        if isinstance(argument, list):
            return [self._with_refs(a) for a in argument]
        if type(argument) is tuple:
            return tuple(self._with_refs(a) for a in argument)
        if isinstance(argument, dict):
            return {key: self._with_refs(a) for key, a in argument.items()}
        if isinstance(argument, slice):
            return slice(*(self._with_refs(a) for a in (argument.start, argument.stop, argument.step)))
        return argument

    def _no_recompute(self, node: Node, written: tuple[int, ...]) -> str:
        """Why running this op again could give other bits; "" when it gives the same."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return "is a check"
        if draws(node):
            return "draws random numbers"
        entering = [self._storages[s].name for s in written if self._storages[s].enters]
        if entering and not unannotated_writes(node):
            return f"changes {entering[0]} in place"
        if torch.Tag.data_dependent_output in target.tags:
            return "reads a value into Python"
        if target.namespace not in ("aten", "prims"):
            return "a custom op, not known to be deterministic"
        if has_effects(node) and not written:
            return "has side effects"
        return ""

    def _key(self, node: Node) -> str:
        """Equal keys take equal time: call, layout and aliasing of tensor arguments, other constants."""
        storages: dict[int, int] = {}

        def fact(argument: Node) -> str:
            tensor = self._values[self._value[argument]].tensor
            if tensor is None:
                return "scalar"
            t = self._tensors[tensor]
            alias = storages.setdefault(t.storage, len(storages))
            return f"{t.dtype}{list(t.shape)}{list(t.stride)}@{alias}+{t.offset}"

        arguments = fx_map((node.args, node.kwargs), lambda n: _Text(fact(n)))
        return f"{node.target}{arguments!r}"

    def _outputs(self) -> tuple[Any, tuple[tuple[str, int | None], ...], tuple[tuple[str, str, int], ...]]:
        """The result tree, the gradients and the reassigned attributes, and which storages they keep."""
        listed: Any = self._output.args[0]
        leaves = [Ref(self._value[leaf]) if isinstance(leaf, Node) else leaf for leaf in listed]
        traced = self._traced
        returns = pytree.tree_unflatten(leaves[: traced.return_count], traced.returns)
        rest = iter(leaves[traced.return_count :])
        gradients = tuple((name, next(rest).value if present else None) for name, present in traced.gradients)
        reassigned = tuple((module, key, next(rest).value) for module, key in traced.reassigned)
        for leaf in leaves[: traced.return_count]:
            self._leaves_step(leaf, "output", "")
        for name, value in gradients:
            self._leaves_step(Ref(value) if value is not None else None, "gradient", f"{name}.grad")
        for module, key, value in reassigned:
            self._leaves_step(Ref(value), "buffer", f"{module}.{key}'")
        self._digest.update(repr((leaves, traced.gradients, reassigned)).encode())
        return returns, gradients, reassigned

    def _leaves_step(self, leaf: Any, kind: Kind, name: str) -> None:
        tensor = self._values[leaf.value].tensor if isinstance(leaf, Ref) else None
        if tensor is None:
            return
        storage = self._storages[self._tensors[tensor].storage]
        if not storage.leaves:
            self._storages[storage.index] = replace(
                storage, leaves=True, kind=storage.kind if storage.enters else kind, name=name or storage.name
            )


class _Hazards:
    """Which earlier ops an op must follow: RAW, WAR, WAW on storages, the generator's chain, barriers."""

    def __init__(self) -> None:
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self._drew: int | None = None
        self._barrier: int | None = None

    def add(
        self, index: int, read: tuple[int, ...], written: tuple[int, ...], created: tuple[int, ...], drawing: bool,
        barrier: bool,
    ) -> frozenset[int]:  # fmt: skip
        after = {self._writer[s] for s in (*read, *written) if s in self._writer}
        after |= {reader for s in written for reader in self._readers.get(s, ())}
        if drawing and self._drew is not None:
            after.add(self._drew)
        if self._barrier is not None and barrier:
            after.add(self._barrier)
        for storage in read:
            self._readers.setdefault(storage, []).append(index)
        for storage in (*written, *created):
            self._writer[storage] = index
            self._readers[storage] = []
        if drawing:
            self._drew = index
        if barrier:
            self._barrier = index
        return frozenset(after - {index})


class _Text(str):
    """Prints without quotes inside a repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _short(node: Node) -> str:
    target = node.target
    return (
        torch_private.op_name(target).partition("::")[2].partition(".")[0]
        if isinstance(target, torch._ops.OpOverload)
        else "check"
    )


def _result_values(call: Call) -> tuple[int, ...]:
    results = (call.results,) if isinstance(call.results, int) else call.results
    return tuple(value for value in results if value is not None)
