"""Hyper-parameters as inputs of the captured step, so that a schedule may change them every step.

Every float, and every tuple of floats (betas), in `optimizer.param_groups` becomes a symbol. Fused optimizer ops take
plain floats and would bake the symbol's value; during a trace they are called with the value, and the graph's call is
wired to the symbol's placeholder afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tensile.compiler import torch_private
from tensile.compiler.refusals import refuse

FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """One symbolic entry: `param_groups[group][key]`, element `item` of it when that is a tuple."""

    group: int
    key: str
    item: int | None
    symbol: Any

    @property
    def name(self) -> str:
        return f"group{self.group}.{self.key}" + ("" if self.item is None else f"[{self.item}]")


def symbolic_hypers(optimizer: torch.optim.Optimizer, mode: torch_private.FakeTensorMode) -> tuple[Hyper, ...]:
    """A symbol for every float entry of every group, hinted with its current value."""
    hypers = []
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            items: list[tuple[int | None, float]] = [(None, value)] if isinstance(value, float) else []
            if isinstance(value, (tuple, list)) and value and all(isinstance(v, float) for v in value):
                items = list(enumerate(value))
            for item, number in items:
                name = f"group{index}_{key}" + ("" if item is None else f"_{item}")
                symbol = torch_private.symbolic_float(mode, number, name)
                hypers.append(Hyper(group=index, key=key, item=item, symbol=symbol))
    return tuple(hypers)


def group_entries(
    optimizer: torch.optim.Optimizer, hypers: tuple[Hyper, ...], symbols: list[Any]
) -> dict[tuple[int, str], Any]:
    """What each group entry is replaced by while tracing: the symbol, or the tuple of symbols."""
    entries: dict[tuple[int, str], Any] = {}
    for hyper, symbol in zip(hypers, symbols, strict=True):
        place = (hyper.group, hyper.key)
        if hyper.item is None:
            entries[place] = symbol
        else:
            kind = type(optimizer.param_groups[hyper.group][hyper.key])
            entries[place] = kind((*entries.get(place, ()), symbol))
    return entries


class FusedCalls:
    """Remembers which symbol each fused call was given, in call order."""

    def __init__(self, hypers: tuple[Hyper, ...]) -> None:
        self._index = {_expression(hyper.symbol): position for position, hyper in enumerate(hypers)}
        self._given: list[dict[str, int]] = []  # keyword -> position in hypers, one a call

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, the fused functions of torch take the symbols' values and note the symbols."""
        saved = {name: getattr(torch, name) for name in FUSED if hasattr(torch, name)}
        try:
            for name, function in saved.items():
                setattr(torch, name, self._recording(function))
            yield
        finally:
            for name, function in saved.items():
                setattr(torch, name, function)

    def _recording(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given: dict[str, int] = {}
            for keyword, value in kwargs.items():
                if isinstance(value, torch.SymFloat):
                    position = self._index.get(_expression(value))
                    if position is None:
                        raise refuse(
                            "TS107", f"a fused optimizer is called with {keyword} computed from hyper-parameters",
                            hint="use foreach=True or the plain optimizer",
                        )  # fmt: skip
                    given[keyword] = position
                    kwargs[keyword] = torch_private.hint_of(value)
            self._given.append(given)
            return function(*args, **kwargs)

        return call

    def wire(self, graph_module: GraphModule, placeholders: list[Node]) -> None:
        """Give the graph's fused calls the placeholders of the symbols they were called with."""
        names = {f"aten.{name}.default" for name in FUSED}
        calls = [node for node in graph_module.graph.nodes if str(node.target) in names]
        assert len(calls) == len(self._given), "a fused call was recorded but not traced"
        for node, given in zip(calls, self._given, strict=True):
            node.kwargs = {**node.kwargs, **{keyword: placeholders[position] for keyword, position in given.items()}}


def _expression(symbol: Any) -> Any:
    return symbol.node.expr
