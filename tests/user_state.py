"""What a user has before and after: everything a step may change, in a form that can be compared."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

import tensile


def everything(workload: tensile.Workload) -> dict[str, Any]:
    """All a step may change: bits, which objects hold them, and the generators."""
    model, optimizer = workload.model, workload.optimizer
    found: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tobytes(),
        "options": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "training": [module.training for module in model.modules()],
        "plain": [{k: v for k, v in vars(m).items() if isinstance(v, (int, float))} for m in model.modules()],
    }  # fmt: skip

    def add(name: str, tensor: torch.Tensor | None) -> None:
        found[name] = None if tensor is None else (id(tensor), tensor.detach().numpy().tobytes())

    for name, parameter in model.named_parameters():
        add(name, parameter)
        add(f"{name}.grad", parameter.grad)
        found[f"{name}/keys"] = sorted(optimizer.state.get(parameter, {}))
        for key, value in optimizer.state.get(parameter, {}).items():
            add(f"{name}/{key}", value) if torch.is_tensor(value) else found.update({f"{name}/{key}": value})
    for name, buffer in model.named_buffers():
        add(name, buffer)
    for position, leaf in enumerate(pytree.tree_leaves(tuple(workload.batch))):
        add(f"batch {position}", leaf)
    return found
