"""The oracle: eager training, and the captured program run op by op in captured order with nothing clever."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

import tensile
from tensile.compiler.capture import Captured, capture, collect_state
from tensile.compiler.optimizer_state import materialise_state
from tensile.compiler.program import Call, Ref

Bits = dict[str, bytes | None]


def change_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Another learning rate, momentum and weight decay at every step."""
    for group in optimizer.param_groups:
        group["lr"] *= 1 + 0.1 * step
        for key in ("momentum", "weight_decay"):
            if group.get(key):
                group[key] *= 0.99


def bits_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def all_bits(workload: tensile.Workload, losses: list[bytes]) -> Bits:
    """Losses, state, gradients and the generator, as bytes by name."""
    bits: Bits = {f"loss {number}": loss for number, loss in enumerate(losses)}
    bits |= {name: bits_of(tensor) for name, tensor in collect_state(workload.model, workload.optimizer).items()}
    for name, parameter in workload.model.named_parameters():
        bits[f"{name}.grad"] = None if parameter.grad is None else bits_of(parameter.grad)
    return bits | {"generator": bits_of(torch.get_rng_state())}


def train_eagerly(workload: tensile.Workload, steps: int) -> Bits:
    torch.manual_seed(1)
    losses = []
    for number in range(steps):
        change_rates(workload.optimizer, number)
        result = workload.step_fn(workload.model, workload.optimizer, *workload.batch)
        losses.append(bits_of(pytree.tree_leaves(result)[0]))
    return all_bits(workload, losses)


def train_captured(workload: tensile.Workload, steps: int, captured: Captured | None = None) -> Bits:
    captured = captured or capture(workload, check_twice=False)
    torch.manual_seed(1)
    reason = materialise_state(workload.model, workload.optimizer, captured.graph, captured.program)
    accumulates = any(entry.kind == "gradient" for entry in captured.program.inputs)
    losses = []
    for number in range(steps):
        change_rates(workload.optimizer, number)
        if number == 0 and (reason or accumulates):
            result = workload.step_fn(workload.model, workload.optimizer, *workload.batch)
        else:
            result = interpret(captured, workload)
        losses.append(bits_of(pytree.tree_leaves(result)[0]))
    return all_bits(workload, losses)


def interpret(captured: Captured, workload: tensile.Workload) -> Any:
    """One step: every op in captured order, glue where it is first needed."""
    program = captured.program
    state = collect_state(workload.model, workload.optimizer)
    leaves = pytree.tree_leaves(tuple(workload.batch))
    values: dict[int, Any] = {}
    for entry in program.inputs:
        if entry.kind == "batch":
            values[entry.value] = leaves[entry.leaf]
        elif entry.kind == "hyper":
            value = workload.optimizer.param_groups[entry.group][entry.key]
            values[entry.value] = value if entry.item is None else value[entry.item]
        elif entry.kind == "constant":
            values[entry.value] = entry.tensor
        elif entry.kind == "gradient":
            values[entry.value] = state[entry.name.removesuffix(".grad")].grad
        else:
            values[entry.value] = state[entry.name]

    def fill(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return get(argument.value)
        if isinstance(argument, (list, tuple)):
            return type(argument)(fill(a) for a in argument) if type(argument) in (list, tuple) else argument
        if isinstance(argument, dict):
            return {key: fill(a) for key, a in argument.items()}
        return argument

    def get(value: int) -> Any:
        if value not in values:
            run(program.glue[value])
        return values[value]

    def run(call: Call) -> None:
        result = call.target(*fill(call.args), **fill(call.kwargs))
        if isinstance(call.results, int):
            values[call.results] = result
        else:
            values.update({v: r for v, r in zip(call.results, result, strict=True) if v is not None})

    with torch.no_grad():
        for call in program.ops:
            run(call)
        is_ref = lambda leaf: isinstance(leaf, Ref)  # noqa: E731
        returned = pytree.tree_map(
            lambda leaf: get(leaf.value) if is_ref(leaf) else leaf, program.returns, is_leaf=is_ref
        )
        for name, value in program.gradients:
            state[name].grad = None if value is None else get(value)
        for module_name, key, value in program.reassigned:
            module = workload.model.get_submodule(module_name)
            (module._buffers if key in module._buffers else module._parameters)[key] = get(value)
    return returned
