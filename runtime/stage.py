"""The plan in place between model and optimizer: inputs gathered, the step run, results put where they belong."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensile.compiler import torch_private
from tensile.compiler.live import collect_state
from tensile.compiler.optimizer_state import materialise_state
from tensile.compiler.program import Ref
from tensile.runtime.bind import Bound
from tensile.runtime.lanes import MESSAGE, CpuLane
from tensile.schedules.errors import PlanMismatch


class Stage:
    """Holds what one bound plan needs at every step. `lane` does the copies; `updating` is true from the first change
    of the user's state until the step has ended."""

    def __init__(self, bound: Bound, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lane: CpuLane) -> None:
        self._bound, self._model, self._optimizer = bound, model, optimizer
        self.lane = lane
        self.updating = False
        program, graph = bound.captured.program, bound.captured.graph
        self._inputs = program.inputs
        self._gradient_names = {e.name.removesuffix(".grad") for e in program.inputs if e.kind == "gradient"}
        self._state: dict[str, torch.Tensor] = {}
        self._held: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._parameters: list[tuple[torch.Tensor, bool, str]] = []
        self._entry_gradients: list[torch.Tensor | None] = []
        self._storage_of_input = {
            e.name: graph.tensors[t].storage
            for e in program.inputs
            if (t := program.values[e.value].tensor) is not None
        }
        self._return_leaves, self._return_spec = pytree.tree_flatten(
            program.returns, is_leaf=lambda leaf: isinstance(leaf, Ref)
        )
        self._persistent = {s.index for s in graph.storages if s.enters and s.leaves}

    def check(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        """Raise PlanMismatch unless this step is what the plan covers."""
        self._bound.captured.guards.check(self._optimizer, leaves, spec)

    def prepare(self) -> str | None:
        """Have all state the step needs, away where the plan wants it, and drop the gradients that the step would drop
        unseen. A reason to run this step eagerly, or None."""
        if not self._state or any(holder.get(key) is not tensor for holder, key, tensor in self._held):
            reason = self._collect()
            if reason is not None:
                return reason
        for parameter, has_gradient, name in self._parameters:
            if parameter.grad is not None and not has_gradient:
                raise PlanMismatch(
                    f"{name} has a gradient before the step, which eager would add to", where=f"{name}.grad",
                    hint="call optimizer.zero_grad() first",
                )  # fmt: skip
            if name in self._gradient_names and parameter.grad is None:
                return f"{name} has no gradient to add to yet"
        for storage in self._bound.starts_out:
            if not self.lane.is_away(storage):
                self.lane.out(storage, self._starts_out_storage(storage), 0)
        for storage in self._bound.starts_out:
            if self.lane.is_away(storage) and self.lane.is_writing(storage):
                self.lane.free(storage)
        for parameter, _, name in self._parameters:
            if name not in self._gradient_names:
                parameter.grad = None
        return None

    def run(self, leaves: list[Any]) -> list[Any]:
        """One planned step on the flattened batch; the values of the replay's outputs."""
        inputs: list[Any] = []
        groups = self._optimizer.param_groups
        for entry in self._inputs:
            if entry.kind == "batch":
                assert entry.leaf is not None
                inputs.append(leaves[entry.leaf])
            elif entry.kind == "hyper":
                assert entry.group is not None
                assert entry.key is not None
                value = groups[entry.group][entry.key]
                inputs.append(float(value if entry.item is None else value[entry.item]))
            elif entry.kind == "constant":
                inputs.append(entry.tensor)
            elif entry.kind == "gradient":
                inputs.append(self._state[entry.name.removesuffix(".grad")].grad)
            else:
                inputs.append(self._state[entry.name])
        self._entry_gradients = [parameter.grad for parameter, _, _ in self._parameters]
        leaves.clear()
        with torch.no_grad():
            return self._bound.replay.run(inputs, self)

    def finish(self, values: list[Any]) -> Any:
        """Put gradients and changed attributes in place; the step's result."""
        self.updating = False
        program = self._bound.captured.program
        rest = iter(values)
        returned = [next(rest) if isinstance(leaf, Ref) else leaf for leaf in self._return_leaves]
        for name, value in program.gradients:
            self._state[name].grad = next(rest) if value is not None else None
        for module_name, key, _ in program.reassigned:
            module = self._model.get_submodule(module_name)
            registry = module._buffers if key in module._buffers else module._parameters
            registry[key] = next(rest)
            self._state = {}  # names lead to other tensors now
        for counter in program.counters:
            attributes = self._model.get_submodule(counter.module).__dict__
            attributes[counter.key] = counter.next(attributes.get(counter.key, counter.before))
        self._entry_gradients = []
        return pytree.tree_unflatten(returned, self._return_spec)

    def undo_gradients(self) -> None:
        """Give parameters back the gradients they had before the step."""
        if self._entry_gradients:
            for (parameter, _, _), gradient in zip(self._parameters, self._entry_gradients, strict=True):
                parameter.grad = gradient
        self._entry_gradients = []

    def bring_back(self) -> None:
        """Everything the user owns is in memory again."""
        self.updating = False
        self.lane.bring_back(lambda storage: storage in self._persistent)

    def resident_bytes(self) -> int:
        """Device bytes of the state, batch and gradients the step starts with, each storage once, away ones not."""
        graph = self._bound.captured.graph
        away = sum(graph.storages[s].size_bytes for s in self._bound.swapped if self.lane.is_away(s))
        return sum(s.size_bytes for s in graph.storages if s.enters and s.device == graph.device) - away

    # what the generated code calls besides the lane's own calls

    def begin_update(self) -> None:
        """From here on the user's state changes."""
        self.updating = True

    def drop(self, _index: int, storage: torch.UntypedStorage) -> None:
        """Give a storage's memory back without a copy."""
        torch_private.hollow_out(storage, MESSAGE)

    def out(self, index: int, storage: torch.UntypedStorage, deadline: int) -> None:
        self.lane.out(index, storage, deadline)

    def free(self, index: int) -> None:
        self.lane.free(index)

    def fetch(self, index: int, deadline: int) -> None:
        self.lane.fetch(index, deadline)

    def wait(self, index: int) -> None:
        self.lane.wait(index)

    def _collect(self) -> str | None:
        """Find the live tensors by name, and create optimizer state that is not born yet."""
        bound = self._bound
        reason = materialise_state(self._model, self._optimizer, bound.captured.graph, bound.captured.program)
        if reason is not None:
            return reason
        state = collect_state(self._model, self._optimizer)
        for entry in self._inputs:
            if entry.kind in ("parameter", "buffer", "optimizer_state"):
                self._require_layout(entry.name, entry.value, state.get(entry.name))
        self._state = state
        after = dict(bound.captured.program.gradients)
        self._parameters = [(state[name], after[name] is not None, name) for name in after]
        self._held = [
            (entries, key, value)
            for entries in self._optimizer.state.values()
            for key, value in entries.items()
            if isinstance(value, torch.Tensor)
        ]
        return None

    def _require_layout(self, name: str, value: int, tensor: torch.Tensor | None) -> None:
        index = self._bound.captured.program.values[value].tensor
        assert index is not None
        planned = self._bound.captured.graph.tensors[index]
        if tensor is None:
            raise PlanMismatch(f"{name} is gone", where=name, hint="load the plan again")
        live = (tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))
        if live != (planned.shape, planned.stride, planned.dtype):
            raise PlanMismatch(
                f"{name} is {live[2]}{list(live[0])}, planned as {planned.dtype}{list(planned.shape)}", where=name,
                hint="load the plan again",
            )  # fmt: skip

    def _starts_out_storage(self, storage: int) -> torch.UntypedStorage:
        name = next(name for name, index in self._storage_of_input.items() if index == storage)
        if name in self._state:
            return self._state[name].untyped_storage()
        gradient = self._state[name.removesuffix(".grad")].grad
        assert gradient is not None, f"{name} was checked to exist"
        return gradient.untyped_storage()
