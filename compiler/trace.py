"""One run of the user's step without data, recorded as an fx graph.

The model and optimizer hold fake tensors while the step runs; everything it dispatches becomes the graph. Nothing of
the user's is changed: tensors, attributes, hooks, random generators and flags are as before afterwards.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tensile.compiler import torch_private
from tensile.compiler.facts import insert_value_facts
from tensile.compiler.hypers import FusedCalls, Hyper, group_entries, symbolic_hypers
from tensile.compiler.live import PLAIN, plain_attributes, state_tensors, substituted
from tensile.compiler.program import Counter
from tensile.compiler.provenance import annotated
from tensile.compiler.record import Record, Recorder
from tensile.compiler.refusals import refuse
from tensile.compiler.regions import checkpointed, require_one_sum
from tensile.compiler.tidy import has_effects
from tensile.compiler.workload import Workload

BEFORE_ZERO_GRAD = "tensile_before_zero_grad"  # marks the last lasting node before gradients were dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Fake:
    """A fake stand-in and what it stands for. `leaf` counts the flattened batch."""

    name: str
    kind: str
    tensor: torch.Tensor
    owner: str | None = None
    key: str | None = None
    leaf: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A recorded step. Placeholders stand for `inputs`, then for `hypers`, in order; the output node lists the leaves
    of `returns`, then gradients, then reassigned attributes.

    `returns` describes the result tree; `gradients` name the parameters and say which have a gradient afterwards;
    `reassigned` are (module, attribute) pairs. `mode` keeps the fake storages alive. `record` has every op, those that
    are no part of the graph as well."""

    graph_module: torch.fx.GraphModule
    mode: torch_private.FakeTensorMode
    inputs: tuple[Fake, ...]
    hypers: tuple[Hyper, ...]
    returns: pytree.TreeSpec
    return_count: int
    gradients: tuple[tuple[str, bool], ...]
    reassigned: tuple[tuple[str, str], ...]
    counters: tuple[Counter, ...]
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Another run of a traced step."""

    record: Record
    counters: tuple[Counter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """What a run leaves behind: all of it as `outputs`, and as in Traced what is what."""

    outputs: list[Any]
    returns: pytree.TreeSpec
    return_count: int
    gradients: tuple[tuple[str, bool], ...]
    reassigned: tuple[tuple[str, str], ...]
    counters: tuple[Counter, ...]
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """What exists between two steps: fake optimizer state, by parameter name and key, and gradients left behind."""

    state: dict[str, dict[str, Any]]
    gradients: frozenset[str]


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Name of every parameter the model or the optimizer holds, by identity."""
    return {id(e.tensor): e.name for e in state_tensors(model, optimizer) if e.kind == "parameter"}


def find_steady_state(workload: Workload, *, values: bool) -> Steady:
    """Run the step once on fake tensors and look at what it leaves behind; needs no memory and no data.

    `values`: the step may branch on values of its batch.
    """
    nothing = Steady(state={}, gradients=frozenset())
    return _Run(workload, torch_private.fake_mode(values=values), nothing, born=False).after_one_step()


def trace_step(workload: Workload, steady: Steady, *, values: bool) -> Traced:
    """Record one steady-state step as a graph. `values`: the step may branch on values of its batch."""
    return _Run(workload, torch_private.fake_mode(values=values), steady, born=True).trace()


def rerun_step(workload: Workload, steady: Steady, *, values: bool, counters: tuple[Counter, ...]) -> Rerun:
    """Run a steady-state step once more, without a graph, after a step that left its modules with `counters`."""
    return _Run(workload, torch_private.fake_mode(values=values), steady, born=True, counters=counters).rerun()


def asks_for_values(model: torch.nn.Module) -> bool:
    """Whether the model is known to take shortcuts that depend on its batch's values (masks in transformers)."""
    return any(type(module).__module__.startswith("transformers.") for module in model.modules())


class _Run:
    """One fake run of the step: builds the stand-ins, calls the user's code, collects what it leaves."""

    def __init__(
        self, workload: Workload, mode: torch_private.FakeTensorMode, steady: Steady, *, born: bool,
        counters: tuple[Counter, ...] = (),
    ) -> None:  # fmt: skip
        self._workload = workload
        self._counters = counters
        self._reentrant: list[range] = []
        self._mode = mode
        self._steady = steady
        model, optimizer = workload.model, workload.optimizer
        self._live = state_tensors(model, optimizer)
        self._parameter_names = parameter_names(model, optimizer)
        self._batch, self._batch_spec = pytree.tree_flatten(tuple(workload.batch))
        fakes = [Fake(name=e.name, kind=e.kind, tensor=torch_private.fake_without_values(mode, e.tensor), owner=e.owner,
                      key=e.key) for e in self._live]  # fmt: skip
        self._live_count = len(fakes)
        by_name = {fake.name: fake.tensor for fake in fakes}
        with mode:
            if born:
                known = set(by_name)
                fakes += [
                    Fake(name=f"{owner}/{key}", kind="optimizer_state", tensor=_fresh(value), owner=owner, key=key)
                    for owner, entries in steady.state.items()
                    for key, value in entries.items()
                    if isinstance(value, torch.Tensor) and f"{owner}/{key}" not in known
                ]
            fakes += [
                Fake(name=f"{name}.grad", kind="gradient", tensor=_fresh(by_name[name]), owner=name)
                for name in by_name
                if name in steady.gradients
            ]
        names = batch_names(workload)
        fakes += [
            Fake(name=names[leaf], kind="batch", tensor=torch_private.fake_with_values(mode, value), leaf=leaf)
            for leaf, value in enumerate(self._batch)
            if isinstance(value, torch.Tensor)
        ]
        self._fakes = tuple(fakes)
        self._hypers = symbolic_hypers(optimizer, mode)
        self._zero_grad_at: int | None = None
        self._traced_nodes: Callable[[], list[torch.fx.Node]] = list

    def after_one_step(self) -> Steady:
        with torch_private.faked(self._mode), self._running(*self._stand_ins()) as result:
            result()
            self._require_known_gradients()
            optimizer = self._workload.optimizer
            names = self._traced_parameter_names()
            state = {names[id(p)]: dict(entries) for p, entries in optimizer.state.items() if id(p) in names}
            gradients = frozenset(name for name, p in self._traced_parameters() if p.grad is not None)
        return Steady(state=state, gradients=gradients)

    def rerun(self) -> Rerun:
        with torch_private.faked(self._mode), self._running(*self._stand_ins()) as result:
            left = self._left(result)
        return Rerun(record=left.record, counters=left.counters)

    def trace(self) -> Traced:
        found: list[_Left] = []
        fused = FusedCalls(self._hypers)

        def flat(*arguments: Any) -> list[Any]:
            self._traced_nodes = torch_private.traced_nodes()
            tensors, symbols = arguments[: len(self._fakes)], list(arguments[len(self._fakes) :])
            with self._running(list(tensors), symbols) as result, fused.recorded():
                found.append(left := self._left(result))
                return [value.detach() if isinstance(value, torch.Tensor) else value for value in left.outputs]

        tensors, symbols = self._stand_ins()
        graph_module = torch_private.trace(flat, [*tensors, *symbols], self._mode)
        (left,) = found
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        named = zip(placeholders, self._fakes, strict=False)
        parameters = {node: fake.name for node, fake in named if fake.kind == "parameter"}
        require_one_sum(list(graph_module.graph.nodes), self._reentrant, parameters)
        fused.wire(graph_module, placeholders[len(self._fakes) :])
        insert_value_facts(graph_module, self._mode)
        if self._zero_grad_at is not None:
            before = list(graph_module.graph.nodes)[: self._zero_grad_at]
            lasting = next((node for node in reversed(before) if has_effects(node)), None)
            if lasting is not None:
                lasting.meta[BEFORE_ZERO_GRAD] = True
        return Traced(
            graph_module=graph_module, mode=self._mode, inputs=self._fakes, hypers=self._hypers, returns=left.returns,
            return_count=left.return_count, gradients=left.gradients, reassigned=left.reassigned,
            counters=left.counters, record=left.record,
        )  # fmt: skip

    def _stand_ins(self) -> tuple[list[torch.Tensor], list[Any]]:
        return [fake.tensor for fake in self._fakes], [hyper.symbol for hyper in self._hypers]

    def _left(self, result: Callable[[], Any]) -> _Left:
        """Run the step under a recorder, and look at what it leaves."""
        with Recorder() as recorder:
            leaves, returns = pytree.tree_flatten(result())
        _require_plain(leaves)
        counters = tuple(self._changed_attributes())
        self._require_known_gradients()
        gradients = [(name, p.grad) for name, p in self._traced_parameters()]
        reassigned = list(self._reassigned())
        outputs = [*leaves, *(g for _, g in gradients if g is not None), *(t for _, _, t in reassigned)]
        shape = (
            tuple((name, gradient is not None) for name, gradient in gradients),
            tuple((module, key) for module, key, _ in reassigned),
        )
        return _Left(
            outputs=outputs, returns=returns, return_count=len(leaves), gradients=shape[0], reassigned=shape[1],
            counters=counters, record=recorder.finish([*outputs, str(returns), *shape]),
        )  # fmt: skip

    @contextlib.contextmanager
    def _running(self, tensors: list[torch.Tensor], symbols: list[Any]) -> Iterator[Callable[[], Any]]:
        """The model and optimizer hold `tensors`; yields the call of the user's step. Undone at exit."""
        workload = self._workload
        model, optimizer = workload.model, workload.optimizer
        held = {id(e.tensor): tensor for e, tensor in zip(self._live, tensors, strict=False)}
        by_name = {fake.name: tensor for fake, tensor in zip(self._fakes, tensors, strict=True)}
        self._held = by_name
        batch = list(self._batch)
        for fake, tensor in zip(self._fakes, tensors, strict=True):
            if fake.leaf is not None:
                batch[fake.leaf] = tensor
        state = self._state(by_name)
        hypers = group_entries(optimizer, self._hypers, symbols)
        for name, tensor in by_name.items():
            if name in self._steady.gradients:
                tensor.grad = by_name[f"{name}.grad"]
        for entry in self._live:
            _copy_hooks(entry.tensor, held[id(entry.tensor)])
        with (
            _randomness_kept(),
            torch_private.checkpointing_neutralised(self._checkpointed),
            _tracing_denied(),
            substituted(model, optimizer, lambda t: held[id(t)], hypers, state),
            self._zero_grad_noted(model, optimizer),
            annotated(model, optimizer),
            _loss_scaling_refused(),
        ):
            for counter in self._counters:
                model.get_submodule(counter.module).__dict__[counter.key] = counter.after
            self._plain = plain_attributes(model)
            arguments = pytree.tree_unflatten(batch, self._batch_spec)
            yield lambda: workload.step_fn(model, optimizer, *arguments)

    def _state(self, by_name: dict[str, torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
        """The optimizer's state dictionary over stand-ins: live entries, and those the steady state adds."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, entries in self._workload.optimizer.state.items():
            owner = self._parameter_names[id(parameter)]
            state[by_name[owner]] = {
                key: by_name[f"{owner}/{key}"] if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
            }
        for owner, entries in self._steady.state.items():
            target = state.setdefault(by_name[owner], {})
            for key, value in entries.items():
                target.setdefault(key, by_name[f"{owner}/{key}"] if isinstance(value, torch.Tensor) else value)
        return state

    def _require_known_gradients(self) -> None:
        """Gradients are dense, and only parameters have one after the step."""
        for fake in self._fakes:
            gradient = self._held[fake.name].grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise refuse(
                    "TS110", "the step makes sparse gradients", where=fake.name, hint="pass sparse=False to the module"
                )
            if gradient is not None and fake.kind == "batch":
                raise refuse(
                    "TS115", f"the step leaves a gradient on {fake.name}, which is part of the batch", where=fake.name,
                    hint=f"use {fake.name}.detach().requires_grad_() in the step",
                )  # fmt: skip

    def _changed_attributes(self) -> Iterator[Counter]:
        for (name, key), value in plain_attributes(self._workload.model).items():
            if (name, key) in self._plain and self._plain[name, key] != value:
                yield Counter(module=name, key=key, before=self._plain[name, key], after=value)

    @contextlib.contextmanager
    def _checkpointed(self, keeps_generator: bool, reentrant: bool) -> Iterator[None]:
        names = {torch_private.storage_key(tensor): name for name, tensor in self._held.items()}
        start = len(self._traced_nodes())
        with checkpointed(self._workload.model, names, self._traced_nodes, keeps_generator):
            yield
        if reentrant:
            self._reentrant.append(range(start, len(self._traced_nodes())))

    def _traced_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(e.name, self._held[e.name]) for e in self._live if e.kind == "parameter"]

    def _traced_parameter_names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._traced_parameters()}

    def _reassigned(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Parameters and buffers the step bound to another tensor (`self.average = ...`)."""
        held = {id(tensor) for tensor in self._held.values()}
        for module_name, module in self._workload.model.named_modules():
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    if tensor is not None and id(tensor) not in held:
                        yield module_name, key, tensor

    @contextlib.contextmanager
    def _zero_grad_noted(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        def noting(user: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(*args: Any, **kwargs: Any) -> Any:
                if any(p.grad is not None for _, p in self._traced_parameters()):
                    self._zero_grad_at = len(self._traced_nodes())
                return user(*args, **kwargs)

            return zero_grad

        for owner in (model, optimizer):
            object.__setattr__(owner, "zero_grad", noting(owner.zero_grad))
        try:
            yield
        finally:
            for owner in (model, optimizer):
                owner.__dict__.pop("zero_grad", None)


def batch_names(workload: Workload) -> list[str]:
    """A name for every leaf of the batch: the step's argument name, and keys below it."""
    import inspect

    try:
        arguments = list(inspect.signature(workload.step_fn).parameters)[2:]
    except (TypeError, ValueError):
        arguments = []
    paths, _ = pytree.tree_flatten_with_path(tuple(workload.batch))
    names = []
    for (first, *rest), _value in paths:
        index = first.idx  # type: ignore[attr-defined]
        name = arguments[index] if index < len(arguments) else f"batch[{index}]"
        names.append(name + pytree.keystr(tuple(rest)))
    return names


def _require_plain(returned: list[Any]) -> None:
    """What a step returns is filled in anew at every step; only values and tensors in known containers can be."""
    for leaf in returned:
        if not isinstance(leaf, (*PLAIN, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise refuse(
                "TS116",
                f"the step returns an object of type {type(leaf).__name__}, whose tensors a plan cannot fill in",
                hint="return the tensors in a tuple or dictionary, or pass a data class to "
                "torch.export.register_dataclass first",
            )  # fmt: skip


@contextlib.contextmanager
def _loss_scaling_refused() -> Iterator[None]:
    """Inside, a GradScaler that scales is refused, before it keeps a stand-in: whether it steps depends on values."""
    owner: Any = torch.amp.GradScaler
    users = owner.scale

    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            raise refuse(
                "TS117", "the step uses a GradScaler, which skips the update when gradients overflow",
                hint="train in bfloat16 or float32, which need no scaling: GradScaler(enabled=False)",
            )  # fmt: skip
        return users(self, outputs)

    owner.scale = scale
    try:
        yield
    finally:
        owner.scale = users


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same layout, without values, on a storage of its own."""
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    forgetful: torch.Tensor = torch_private.forget_values(fresh)
    return forgetful


def _copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Hooks on a live leaf must fire on its stand-in, so that what they do is traced."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _randomness_kept() -> Iterator[None]:
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _tracing_denied() -> Iterator[None]:
    """transformers asks whether it is traced and then avoids shortcuts that eager takes: answer as eager would.

    The shortcuts look at the attention mask's values, which the batch's stand-ins know (torch_private.fake_batch).
    """
    masking = sys.modules.get("transformers.masking_utils")
    asked = getattr(masking, "is_tracing", None)
    if asked is None:
        yield
        return
    masking.is_tracing = lambda *_args, **_kwargs: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        masking.is_tracing = asked  # type: ignore[union-attr]
