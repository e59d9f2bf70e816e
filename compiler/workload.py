"""What the user hands over: a model, its optimizer, one step of training, one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

StepFn = Callable[..., Any]
"""`step_fn(model, optimizer, *batch)` runs forward, loss, backward and `optimizer.step()`; returns the loss or any
tree of outputs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step and what it runs on. `batch` is a sequence of arguments; leaves may be tensors in any tree.

    Field order follows the call `step_fn(model, optimizer, *batch)`; positional arguments are allowed, this is the one
    record users build by hand.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step_fn: StepFn
    batch: Sequence[Any]
    name: str = "workload"
