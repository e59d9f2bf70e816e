"""What a checkpointed region of the user's must not do: eager runs it twice in a step, the plan once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.fx import Node

from tensile.compiler import torch_private
from tensile.compiler.refusals import refuse
from tensile.compiler.tidy import draws, tensors_of, unannotated_writes

_HINT = "leave checkpointing to the plan: switch it off in the model"


@contextlib.contextmanager
def checkpointed(
    model: torch.nn.Module, names: Mapping[int, str], nodes: Callable[[], list[Node]], keeps_generator: bool
) -> Iterator[None]:
    """Around a region while it is traced: raises TS113 or TS114 when a second run would not be like the first.

    `names` of the step's tensors by storage key; `nodes` recorded so far; `keeps_generator`: random numbers are drawn
    again as before.
    """
    start, registries = len(nodes()), _registries(model)
    yield
    recorded = nodes()
    inside = recorded[start:]
    if any(unannotated_writes(node) for node in inside):
        raise refuse("TS113", "a checkpointed region updates batch-norm statistics, which eager does twice", hint=_HINT)
    for node in inside:
        for key in _changed(node):
            if key in names or key in _storages(recorded[:start]):
                what = names.get(key, "a tensor it was given")
                raise refuse("TS113", f"a checkpointed region changes {what}, which eager does twice", hint=_HINT)
    for place, tensor in _registries(model).items():
        if registries.get(place) is not tensor:
            raise refuse("TS113", f"a checkpointed region binds {place} anew, which eager does twice", hint=_HINT)
    if not keeps_generator and any(draws(node) for node in inside):
        raise refuse(
            "TS114", "a checkpointed region draws random numbers with preserve_rng_state=False: eager's backward "
            "draws others than its forward", hint="pass preserve_rng_state=True, or switch checkpointing off",
        )  # fmt: skip


def require_one_sum(nodes: list[Node], reentrant: list[range], parameters: Mapping[Node, str]) -> None:
    """Raise TS118 for a parameter whose gradient eager sums in another order than one backward pass over the step.

    A re-entrant region sums up the gradients of its own uses first. That is the same for two uses in all, not for more.
    """
    place = {node: number for number, node in enumerate(nodes)}
    for parameter, name in parameters.items():
        uses = [place[user] for user in parameter.users if user.meta.get("custom", {}).get("phase") == "forward"]
        if len(uses) > 2 and any(use in region for use in uses for region in reentrant):
            raise refuse(
                "TS118",
                f"{name} is used {len(uses)} times, also in a re-entrant checkpoint, where its gradient is summed in "
                "another order",
                where=name, hint="pass use_reentrant=False, or switch checkpointing off",
            )  # fmt: skip


def _registries(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        f"{name}.{key}" if name else key: tensor
        for name, module in model.named_modules()
        for registry in (module._parameters, module._buffers)
        for key, tensor in registry.items()
    }


def _changed(node: Node) -> list[int]:
    """Keys of the storages a node changes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    found = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written = given if isinstance(given, (list, tuple)) else [given]
            found += [key for value in written if isinstance(value, Node) for key in _storages([value])]
    return found


def _storages(nodes: list[Node]) -> set[int]:
    return {torch_private.storage_key(tensor) for node in nodes for tensor in tensors_of(node.meta.get("val"))}
