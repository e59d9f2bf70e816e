"""Branches the step took on values of its batch, kept in the graph as checks.

A model may look at its batch ("is the attention mask all ones?") and branch. The trace goes the way the example batch
goes; the check makes every later batch that would go another way fail with a message, before any state has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import GraphModule, Node

from tensile.compiler import torch_private
from tensile.schedules.errors import PlanMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFact:
    """A relation between values of the batch; called with these values in every step."""

    text: str
    source: str
    holds: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return "check"

    def __call__(self, *values: Any) -> None:
        if not self.holds(*values):
            raise PlanMismatch(
                f"the plan does not cover this batch: the step branches on its values, and {self.text} no longer holds",
                where=self.source or None, hint='compile a plan for such a batch, or pass on_mismatch="eager"',
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"check({self.text})"


def insert_value_facts(graph_module: GraphModule, mode: torch_private.FakeTensorMode) -> None:
    """Put a check right behind the node that reads the last of the values a branch looked at."""
    bound: dict[Any, Node] = {}
    order: dict[Node, int] = {}
    for position, node in enumerate(graph_module.graph.nodes):
        order[node] = position
        for symbol in node.meta.get("unbacked_bindings") or {}:
            bound[symbol] = node
    for expression in torch_private.value_relations(mode):
        symbols = sorted(expression.free_symbols, key=str)
        if not symbols or not all(symbol in bound for symbol in symbols):
            continue  # about a hyper-parameter: the domain of a square root, not a branch
        reads = [bound[symbol] for symbol in symbols]
        last = max(reads, key=order.__getitem__)
        names = {symbol: sympy.Symbol(f"value{i}") for i, symbol in enumerate(symbols)}
        text = str(expression.xreplace(names)).replace("value0", "the value") if len(symbols) == 1 else str(expression)
        fact = ValueFact(text=text, source="", holds=sympy.lambdify(symbols, expression, "math"))
        with graph_module.graph.inserting_after(last):
            check = graph_module.graph.call_function(fact, tuple(reads))
        check.meta = {**last.meta, "val": None, "unbacked_bindings": None}
