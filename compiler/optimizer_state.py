"""Optimizer state before it is born: created in place, with the very bits the first step would have started from."""

from __future__ import annotations

import torch

from tensile.compiler.graph import Graph
from tensile.compiler.live import state_tensors
from tensile.compiler.program import Program

# What each exact class of torch.optim starts its state with, by key. SGD begins with a copy of the gradient; a buffer
# of -0.0 gives it the same bits, since momentum * -0.0 + g == g for every g, both zeros included.
_BIRTH: dict[type[torch.optim.Optimizer], dict[str, float]] = {
    torch.optim.SGD: {"momentum_buffer": -0.0},
    torch.optim.Adam: {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0},
    torch.optim.AdamW: {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "max_exp_avg_sq": 0.0},
    torch.optim.NAdam: {"step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0},
    torch.optim.Adamax: {"step": 0.0, "exp_avg": 0.0, "exp_inf": 0.0},
    torch.optim.Adadelta: {"step": 0.0, "square_avg": 0.0, "acc_delta": 0.0},
    torch.optim.RMSprop: {"step": 0.0, "square_avg": 0.0, "momentum_buffer": 0.0, "grad_avg": 0.0},
}
if hasattr(torch.optim, "Muon"):
    _BIRTH[torch.optim.Muon] = {"momentum_buffer": 0.0}


def materialise_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, graph: Graph, program: Program
) -> str | None:
    """Create the optimizer state the captured step needs and the optimizer does not have yet.

    Returns None when the optimizer is ready, or why its first step has to run eagerly; then nothing was changed.
    """
    held = {entry.name: entry.tensor for entry in state_tensors(model, optimizer)}
    missing = [i for i in program.inputs if i.kind == "optimizer_state" and i.name not in held]
    if not missing:
        return None
    birth = _BIRTH.get(type(optimizer))
    if birth is None:
        return f"{type(optimizer).__name__} creates its state in its first step"
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return "dampening makes the first step differ from the others"
    born = []
    for entry in missing:
        owner, _, key = entry.name.rpartition("/")
        if key not in birth or owner not in held:
            return f"{type(optimizer).__name__} creates {key} in its first step"
        index = program.values[entry.value].tensor
        assert index is not None, f"{entry.name} is not a tensor"
        layout = graph.tensors[index]
        tensor = torch.empty_strided(
            layout.shape,
            layout.stride,
            dtype=getattr(torch, layout.dtype),
            device=graph.storages[layout.storage].device,
        ).fill_(birth[key])
        born.append((held[owner], key, tensor))
    for parameter, key, tensor in born:
        optimizer.state[parameter][key] = tensor
    return None
