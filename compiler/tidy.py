"""Rewrites of a traced graph that keep every bit: dead ops out, detach out, long optimizer lists in chunks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tensile.compiler import torch_private
from tensile.compiler.facts import ValueFact

CHUNK_BYTES = 2**20
CHUNK_TENSORS = 32

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)


def tidy(graph_module: GraphModule) -> None:
    """Rewrite in place: drop profiler marks, dead pure nodes, detach and alias; chunk foreach and fused ops."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _is_profiler(node):
            node.replace_all_uses_with(None)
    for node in reversed(list(graph.nodes)):
        if _is_profiler(node):
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and _is_list_op(node):
            _chunk(graph, node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not has_effects(node):
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _is_profiler(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "profiler"


def draws(node: Node) -> bool:
    """Whether a node consumes the default generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # attention kernels carry the tag, but draw only when they drop out
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(value != 0.0)
    return True


def has_effects(node: Node) -> bool:
    """Whether a node does more than return its result: writes, draws, checks, prints, communicates."""
    target = node.target
    if isinstance(target, ValueFact):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.is_mutable or draws(node) or bool(unannotated_writes(node)):
        return True
    return (
        not target._schema.returns
        or target.namespace not in ("aten", "prims")
        or "assert" in torch_private.op_name(target)
    )


_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
RUNNING_STATISTICS = (3, 4)


def unannotated_writes(node: Node) -> tuple[int, ...]:
    """Argument positions a node writes although its schema does not say so: batch norm's running statistics."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or torch_private.op_name(target) not in _BATCH_NORMS
        or not node.args[5]
    ):
        return ()
    return tuple(position for position in RUNNING_STATISTICS if isinstance(node.args[position], Node))


def _is_list_op(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = torch_private.op_name(target)
    return name.startswith(("aten::_foreach_", "aten::_fused_")) and isinstance(node.args[0], (list, tuple))


def _chunk(graph: torch.fx.Graph, node: Node) -> None:
    """Split one op over lists of tensors into several over shorter lists; each tensor's arithmetic is its own."""
    count = len(node.args[0])  # type: ignore[arg-type]
    cuts = _cuts(node, count)
    if len(cuts) <= 1:
        return
    results: list[Node | None] = [None] * count
    returns_list = bool(node.target._schema.returns)  # type: ignore[union-attr]
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    with graph.inserting_before(node):
        for start, stop in cuts:

            def part(value: Any, start: int = start, stop: int = stop) -> Any:
                return value[start:stop] if _is_per_tensor(value, count) else value

            piece = graph.call_function(
                target, tuple(part(a) for a in node.args), {k: part(v) for k, v in node.kwargs.items()}
            )
            piece.meta = dict(node.meta)
            if not returns_list:
                piece.meta["val"] = None
                continue
            piece.meta["val"] = list(node.meta["val"][start:stop])
            for offset in range(stop - start):
                item = graph.call_function(operator.getitem, (piece, offset))
                item.meta = {**node.meta, "val": piece.meta["val"][offset]}
                results[start + offset] = item
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index, arg-type]
            graph.erase_node(user)
        else:
            user.replace_input_with(node, tuple(results))  # type: ignore[arg-type]
    graph.erase_node(node)


def _is_per_tensor(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _cuts(node: Node, count: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most CHUNK_TENSORS tensors; a range ends when one of its lists reaches CHUNK_BYTES."""
    size = [max(_bytes(arg[i]) for arg in node.args if _is_per_tensor(arg, count)) for i in range(count)]  # type: ignore[index]
    cuts, start, held = [], 0, 0
    for index in range(count):
        held += size[index]
        if held >= CHUNK_BYTES or index + 1 - start >= CHUNK_TENSORS or index + 1 == count:
            cuts.append((start, index + 1))
            start, held = index + 1, 0
    return cuts


def _bytes(value: Any) -> int:
    tensor = value.meta.get("val") if isinstance(value, Node) else value
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


def tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """The tensors in a node's value, flattened."""
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
