"""The captured step as something that can run: the callables behind a Graph's ops, and where inputs come from.

A Program is what the runtime turns into code. It is never stored: loading a plan captures again and compares.
Values are numbered; a value is what one expression returns (a tensor, a Python scalar, or a structure of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for value `value` inside the arguments of a Call (also nested in lists, tuples, dicts and slices)."""

    value: int


def replace_refs(arguments: Any, replacement: Callable[[Ref], Any]) -> Any:
    """The arguments of a Call with every Ref replaced, those inside lists, tuples, dicts and slices too."""
    match arguments:
        case Ref():
            return replacement(arguments)
        case list():
            return [replace_refs(argument, replacement) for argument in arguments]
        case tuple():
            return tuple(replace_refs(argument, replacement) for argument in arguments)
        case dict():
            return {key: replace_refs(argument, replacement) for key, argument in arguments.items()}
        case slice(start=start, stop=stop, step=step):
            return slice(*(replace_refs(argument, replacement) for argument in (start, stop, step)))
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call. `results` is a value number when the result is used as it is, or a tuple with one entry per element
    when the result is a tuple or list that is unpacked at once (None: that element is dropped)."""

    target: Callable[..., Any]  # an OpOverload, or a Python function for glue
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: int | tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """`tensor` is the index in Graph.tensors, None for a scalar or structure; `hint` is a scalar's value at capture."""

    tensor: int | None
    hint: float | int | bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Where an input value comes from at run time.

    parameter, buffer, optimizer_state, gradient: `state[name]` of the Captured step.
    batch: leaf number `leaf` of the flattened batch. hyper: `optimizer.param_groups[group][key]`, element `item` of
    it when it is a tuple (betas). constant: a tensor the trace made, `tensor`.
    """

    value: int
    kind: Literal["parameter", "buffer", "optimizer_state", "gradient", "batch", "hyper", "constant"]
    name: str
    leaf: int | None = None
    group: int | None = None
    key: str | None = None
    item: int | None = None
    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A plain attribute of a module that the step itself changes (`self.calls += 1`): its values at capture before and
    after one step. Nothing the step computes depends on it."""

    module: str
    key: str
    before: Any
    after: Any

    def next(self, value: Any) -> Any:
        """What one more step makes of `value`: numbers move on by as much as at capture, anything else is set."""
        if all(type(v) in (int, float) for v in (value, self.before, self.after)):
            return value + (self.after - self.before)
        return self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`ops[i]` is the call of Graph.ops[i]; `again[i]` replaces it when it is recomputed (batch norm without its
    statistics); `glue[v]` computes value v and has no memory effect, so it may run anywhere between its inputs and
    its first use. `returns` is the tree of the step's result with Refs for tensors and traced scalars;
    `gradients` says what each parameter's .grad is after the step (None: no gradient); `reassigned` are module
    attributes (module path, attribute) the step bound to a new tensor, `counters` those that are plain values."""

    inputs: tuple[Input, ...]
    values: tuple[Value, ...]
    ops: tuple[Call, ...]
    again: dict[int, Call]
    glue: dict[int, Call]  # keyed by each value the call yields; a multi-result call stands under each of its values
    returns: Any
    gradients: tuple[tuple[str, int | None], ...]  # (parameter name, value)
    reassigned: tuple[tuple[str, str, int], ...]  # (module path, attribute, value)
    counters: tuple[Counter, ...]
