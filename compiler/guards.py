"""What a trace bakes in, checked before every planned step.

Shapes, dtypes and strides of the batch; train or eval mode and other plain attributes of modules; requires_grad; which
tensors the modules and the optimizer's options hold; options of the optimizer; facts about hyper-parameters the trace
relied on (`weight_decay != 0`); flags of torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from tensile.compiler import torch_private
from tensile.compiler.hypers import Hyper
from tensile.compiler.live import PLAIN
from tensile.compiler.program import Counter
from tensile.compiler.refusals import refuse
from tensile.compiler.trace import Traced, batch_names
from tensile.compiler.workload import Workload
from tensile.schedules.errors import PlanMismatch

_HINT = 'compile a plan for this case, or pass on_mismatch="eager"'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fact:
    """A relation between hyper-parameters the trace relied on."""

    text: str
    holds: Callable[..., Any]
    places: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attributes:
    """The plain attributes of one module: `read(live)` must give `values`."""

    live: dict[str, Any]
    read: Callable[[dict[str, Any]], Any]
    values: Any
    planned: dict[str, Any]
    name: str

    def check(self) -> None:
        """Raise PlanMismatch, naming the first attribute that is not as captured."""
        try:
            if self.read(self.live) == self.values:
                return
        except KeyError:
            pass
        key, was = next((k, v) for k, v in self.planned.items() if k not in self.live or self.live[k] != v)
        module = f"module {self.name}" if self.name else "module (the model)"
        if key == "training":
            modes = ("eval", "train")
            raise _changed(f"{module} is in {modes[not was]} mode", f"planned in {modes[was]} mode")
        now = repr(self.live[key]) if key in self.live else "gone"
        raise _changed(f"{key} of {module} is {now}", f"planned with {was!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """The facts of one capture. `check` costs about a microsecond a module and raises PlanMismatch for the first that
    fails."""

    spec: pytree.TreeSpec
    names: tuple[str, ...]
    tensors: tuple[tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device, bool], ...]
    constants: tuple[tuple[int, Any], ...]
    attributes: tuple[_Attributes, ...]
    held: tuple[tuple[dict[str, Any], str, int, str], ...]
    trainable: tuple[tuple[torch.Tensor, bool, str], ...]
    options: tuple[tuple[int, str, Any], ...]
    option_tensors: tuple[tuple[int, str, int], ...]
    symbolic: tuple[tuple[int, str, int | None], ...]
    facts: tuple[_Fact, ...]
    groups: tuple[tuple[int, ...], ...]
    flags: tuple[tuple[str, Any], ...]

    def check(self, optimizer: torch.optim.Optimizer, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        """Raise PlanMismatch, naming what changed, unless everything is as captured. `leaves`: the flattened batch."""
        self.check_batch(leaves, spec)
        for module in self.attributes:
            module.check()
        for registry, key, identity, name in self.held:
            if id(registry.get(key)) != identity:
                raise _changed(f"{name} is another tensor than when the plan was loaded", "load the plan again")
        for tensor, trainable, name in self.trainable:
            if tensor.requires_grad is not trainable:
                raise _changed(f"{name}.requires_grad is {tensor.requires_grad}", f"planned with {trainable}")
        groups = optimizer.param_groups
        if len(groups) != len(self.groups):
            raise _changed(f"the optimizer has {len(groups)} parameter groups", f"planned with {len(self.groups)}")
        for group, (index, members) in zip(groups, enumerate(self.groups), strict=True):
            if tuple(map(id, group["params"])) != members:
                raise _changed(f"parameter group {index} holds other parameters", "load the plan again")
        for index, key, value in self.options:
            if groups[index].get(key) != value:
                raise _changed(
                    f"{key} of parameter group {index} is {groups[index].get(key)!r}", f"planned with {value!r}"
                )
        for index, key, identity in self.option_tensors:
            if id(groups[index].get(key)) != identity:
                raise _changed(
                    f"{key} of parameter group {index} is another tensor than when the plan was loaded",
                    "change it in place, or load the plan again",
                )
        for index, key, item in self.symbolic:
            value = groups[index].get(key)
            value = value if item is None or value is None else value[item]
            if type(value) is not float and type(value) is not int:
                raise _changed(f"{key} of parameter group {index} is {value!r}", "planned with a number")
        for fact in self.facts:
            values = [_hyper(groups, place) for place in fact.places]
            if not fact.holds(*values):
                raise _changed(
                    f"{fact.text} no longer holds (now {', '.join(map(str, values))})", "the step depends on it"
                )
        flags = current_flags()
        if flags != self.flags:
            name, was, now = next((n, a, b) for (n, a), (_, b) in zip(self.flags, flags, strict=True) if a != b)
            raise _changed(f"{name} is {now}", f"planned with {was}")

    def check_batch(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        """The part of `check` about the batch."""
        if spec != self.spec:
            raise _changed("the batch has another structure", f"planned for {self.spec}")
        for leaf, shape, stride, dtype, device, gradient in self.tensors:
            tensor = leaves[leaf]
            if not isinstance(tensor, torch.Tensor):
                raise _changed(f"{self.names[leaf]} is {tensor!r}", "planned with a tensor")
            if (
                tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.stride() != stride
                or tensor.device != device
            ):
                now = _layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                planned = _layout(shape, stride, dtype, device)
                raise _changed(f"{self.names[leaf]} is {now}", f"planned with {planned}")
            if tensor.requires_grad is not gradient:
                raise _changed(
                    f"{self.names[leaf]}.requires_grad is {tensor.requires_grad}", f"planned with {gradient}"
                )
        for leaf, value in self.constants:
            if isinstance(leaves[leaf], torch.Tensor) or leaves[leaf] != value:
                raise _changed(f"{self.names[leaf]} is {leaves[leaf]!r}", f"planned with {value!r}")


def make_guards(workload: Workload, traced: Traced) -> Guards:
    """The guards of a traced workload. Raises TS107 when the trace fixed a hyper-parameter's value."""
    model, optimizer = workload.model, workload.optimizer
    leaves, spec = pytree.tree_flatten(tuple(workload.batch))
    symbols = {hyper.symbol.node.expr: hyper for hyper in traced.hypers}
    symbolic = {(h.group, h.key) for h in traced.hypers}
    named = list(model.named_modules())
    return Guards(
        spec=spec,
        names=tuple(batch_names(workload)),
        tensors=tuple(
            (i, t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
            for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)
        ),
        constants=tuple((i, v) for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)),
        attributes=tuple(_attributes(module, name, traced.counters) for name, module in named),
        held=tuple(
            (registry, key, id(tensor), f"{name}.{key}" if name else key)
            for name, module in named
            for registry in (module._parameters, module._buffers)
            for key, tensor in registry.items()
            if (name, key) not in traced.reassigned
        ),
        trainable=tuple((p, p.requires_grad, name) for name, p in model.named_parameters()),
        options=tuple(
            (index, key, value)
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params" and (index, key) not in symbolic and not isinstance(value, torch.Tensor)
            and key not in _SCHEDULERS_OWN
        ),
        option_tensors=tuple(
            (index, key, id(value))
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items() if isinstance(value, torch.Tensor)
        ),
        symbolic=tuple((h.group, h.key, h.item) for h in traced.hypers),
        facts=_facts(traced, symbols),
        groups=tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups),
        flags=current_flags(),
    )  # fmt: skip


def _attributes(module: torch.nn.Module, name: str, counters: tuple[Counter, ...]) -> _Attributes:
    """What a module's forward may read and a trace bakes in; what the step itself changes is left out."""
    counted = {counter.key for counter in counters if counter.module == name}
    planned = {key: value for key, value in module.__dict__.items() if type(value) in PLAIN and key not in counted}
    read = operator.itemgetter(*planned)
    return _Attributes(live=module.__dict__, read=read, values=read(module.__dict__), planned=planned, name=name)


_SCHEDULERS_OWN = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


def _facts(traced: Traced, symbols: dict[Any, Hyper]) -> tuple[_Fact, ...]:
    facts = []
    for guard in torch_private.guards_of(traced.mode):
        free = sorted(guard.free_symbols & symbols.keys(), key=str)
        if not free or free != sorted(guard.free_symbols, key=str):
            continue
        if isinstance(guard, sympy.Eq) and guard.rhs.is_number and free == [guard.lhs]:
            hyper = symbols[guard.lhs]
            value = traced_value(hyper)
            if value != 0.0:  # "is zero" shapes the step legitimately and is checked; any other value is baked in
                raise refuse(
                    "TS107", f"the step fixes the value of {hyper.name} ({value})", where=hyper.name,
                    hint="use an optimizer whose ops take it as an argument, such as foreach=True",
                )  # fmt: skip
        text = str(guard.xreplace({symbol: sympy.Symbol(symbols[symbol].name) for symbol in free}))
        places = tuple((symbols[s].group, symbols[s].key, symbols[s].item) for s in free)
        facts.append(_Fact(text=text, holds=sympy.lambdify(free, guard, "math"), places=places))
    return tuple(facts)


def traced_value(hyper: Hyper) -> float:
    """The value a hyper-parameter had at capture."""
    return torch_private.hint_of(hyper.symbol)


def current_flags() -> tuple[tuple[str, Any], ...]:
    """Global settings of torch that change what a step computes."""
    return (
        ("autocast on the CPU", torch.is_autocast_enabled("cpu")),
        ("autocast on CUDA", torch.is_autocast_enabled("cuda")),
        ("torch.is_grad_enabled()", torch.is_grad_enabled()),
        ("the default dtype", torch.get_default_dtype()),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
    )


def _hyper(groups: list[dict[str, Any]], place: tuple[int, str, int | None]) -> Any:
    index, key, item = place
    value = groups[index][key]
    return value if item is None else value[item]


def _layout(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"


def _changed(what: str, planned: str) -> PlanMismatch:
    return PlanMismatch(f"the plan does not cover this step: {what}", where=planned, hint=_HINT)
