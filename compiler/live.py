"""The tensors a model and its optimizer own: what they are called, and how to put others in their place."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

PLAIN = (bool, int, float, str, type(None))  # types of attributes whose values a trace bakes in
StateKind = Literal["parameter", "buffer", "optimizer_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor that lives across steps, under its stable name. `owner` is its parameter's name for optimizer state."""

    name: str
    kind: StateKind
    tensor: torch.Tensor
    owner: str | None = None
    key: str | None = None


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[StateTensor, ...]:
    """Every parameter, buffer and optimizer state tensor, tied ones once, in a stable order.

    Names: "wte.weight", "wte.weight/exp_avg", "group0/lr" (a hyper-parameter that is a tensor), and
    "optimizer.group0.3" for a parameter the model does not own.
    """
    found: dict[int, StateTensor] = {}

    def add(entry: StateTensor) -> None:
        found.setdefault(id(entry.tensor), entry)

    for name, own in model.named_parameters():
        add(StateTensor(name=name, kind="parameter", tensor=own))
    for name, buffer in model.named_buffers():
        add(StateTensor(name=name, kind="buffer", tensor=buffer))
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            add(StateTensor(name=f"optimizer.group{index}.{position}", kind="parameter", tensor=parameter))
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                add(StateTensor(name=f"group{index}/{key}", kind="optimizer_state", tensor=value, key=key))
    for parameter, state in optimizer.state.items():
        owner = found[id(parameter)].name
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                add(StateTensor(name=f"{owner}/{key}", kind="optimizer_state", tensor=value, owner=owner, key=key))
    return tuple(found.values())


def collect_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`state_tensors` as a dictionary from name to the live tensor."""
    return {entry.name: entry.tensor for entry in state_tensors(model, optimizer)}


def plain_attributes(model: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Attributes of modules that are plain values, by module path and name."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if type(value) in PLAIN
    }


@contextlib.contextmanager
def substituted(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
    hypers: dict[tuple[int, str], Any],
    state: dict[torch.Tensor, dict[str, Any]] | None,
) -> Iterator[None]:
    """Inside the context the model and optimizer hold `stand_in(t)` for every tensor t they own.

    `hypers` replaces entries of param_groups by (group, key). `state` is the optimizer state to use, keyed by
    stand-ins; None starts without any. Everything the step does to the attributes of modules and optimizer is undone.
    """
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            attributes = dict(module.__dict__)
            undo.callback(_restore_dict, module.__dict__, attributes)
            for name in ("_parameters", "_buffers"):
                registry = attributes[name]
                undo.callback(_restore_dict, registry, dict(registry))
                for key, tensor in registry.items():
                    if tensor is not None:
                        registry[key] = stand_in(tensor)
        attributes = dict(optimizer.__dict__)
        undo.callback(_restore_dict, optimizer.__dict__, attributes)
        for index, group in enumerate(optimizer.param_groups):
            undo.callback(_restore_dict, group, dict(group))
            group["params"] = [stand_in(parameter) for parameter in group["params"]]
            for key, value in list(group.items()):
                if isinstance(value, torch.Tensor):
                    group[key] = stand_in(value)
                elif (index, key) in hypers:
                    group[key] = hypers[index, key]
        optimizer.state = defaultdict(dict, state or {})
        yield


def _restore_dict(target: dict[str, Any], saved: dict[str, Any]) -> None:
    target.clear()
    target.update(saved)
