"""Every private torch API tensile leans on, named, with what to do when it is gone.

Checked on 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback as fx_traceback
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = ["FakeTensor", "FakeTensorMode", "ShapeEnv"]


def fake_mode(*, values: bool) -> FakeTensorMode:
    """Tensors without data. Static shapes, `.item()` becomes a symbol, a real tensor met on the way is an error.

    With `values`, those made by `fake_with_values` are followed by their real values (slower by half).

    Gone: torch.export's public tracing has the same machinery underneath.
    """
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=values):
        return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False, static_shapes=True)


def fake_with_values(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A stand-in whose values are known while tracing, and those computed from it alone; for the batch.

    A branch on such values goes the way this batch takes it; the trace records the fact (see `value_facts`).
    Gone: branches on the batch's values are refused (TS101).
    """
    fake = mode.from_tensor(tensor, static_shapes=True)
    fake.real_tensor = tensor if mode.propagate_real_tensors else None
    return fake


def fake_without_values(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A stand-in without values: nothing is computed for real from it, and nothing is copied.

    Gone, the converters' switch: the values are copied and forgotten, which takes time and their memory.
    """
    with contextlib.ExitStack() as undo:
        meta_converter: Any = getattr(mode.fake_tensor_converter, "meta_converter", None)
        copying: Any
        for copying in (meta_converter, getattr(meta_converter, "describer", None)):
            if hasattr(copying, "copy_data"):
                undo.callback(setattr, copying, "copy_data", copying.copy_data)
                copying.copy_data = False
        fake: FakeTensor = forget_values(mode.from_tensor(tensor, static_shapes=True))
    return fake


def forget_values(fake: Any) -> Any:
    """The stand-in itself, its values no longer known."""
    fake.real_tensor = None
    return fake


@contextlib.contextmanager
def checkpointing_neutralised(
    entered: Callable[[bool, bool], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """torch.utils.checkpoint restores generators in Python, which a graph cannot see: call straight through instead.

    The values are the same; what to recompute is the planner's to choose. `entered(keeps_generator, reentrant)` is
    entered around every region that eager would run again. A re-entrant one none of whose arguments needs a gradient
    gives none to its parameters either. Gone: checkpointed models with dropout differ from eager, and the bitwise tests
    say so.
    """
    import torch.utils.checkpoint as home

    def once(keeps_generator: bool, *, reentrant: bool = False) -> contextlib.AbstractContextManager[None]:
        # without gradients eager has nothing to run again
        return entered(keeps_generator, reentrant) if torch.is_grad_enabled() else contextlib.nullcontext()

    def nothing(_function: Any, preserve: bool = True, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        with once(preserve):
            yield

    class Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
                with torch.no_grad():
                    return function(*args)
            with once(preserve, reentrant=True):
                return function(*args)

    def direct(
        function: Callable[..., Any], args: Any, kwargs: Any, *, use_reentrant: bool | None = None,
        preserve_rng_state: bool = True, **_options: Any,
    ) -> Any:  # fmt: skip
        if use_reentrant or use_reentrant is None:
            return Direct.apply(function, preserve_rng_state, *args)
        with once(preserve_rng_state):
            return function(*args, **kwargs)

    replacements = {
        "_checkpoint_impl": direct,  # 2.14
        "_checkpoint_without_reentrant_generator": nothing,  # before
        "CheckpointFunction": Direct,
    }
    saved = {name: getattr(home, name) for name in replacements if hasattr(home, name)}
    for name in saved:
        setattr(home, name, replacements[name])
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(home, name, value)


def symbolic_float(mode: FakeTensorMode, value: float, name: str) -> Any:
    """A float the trace keeps as an input. Gone: pass the value as a 0-dim float64 tensor and read `.item()`."""
    shape_env = mode.shape_env
    assert shape_env is not None
    source = ConstantSource(name)
    symbol = shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shape_env.create_symfloatnode(symbol, hint=value, source=source)


def trace(function: Callable[..., Any], inputs: list[Any], mode: FakeTensorMode) -> torch.fx.GraphModule:
    """One graph of everything `function` dispatches: no decompositions, in-place ops kept.

    `inputs` are fake tensors and symbols of `mode`; the function receives these very objects.
    """
    with _autocast_cache_kept(), faked(mode):
        return proxy_tensor.make_fx(
            function, decomposition_table={}, tracing_mode="real", _allow_non_fake_inputs=False
        )(*inputs)


@contextlib.contextmanager
def faked(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, ops make fake tensors, and what is annotated is forgotten at the end."""
    with _quiet(), fx_traceback.preserve_node_meta(), mode:
        yield


@contextlib.contextmanager
def _autocast_cache_kept() -> Iterator[None]:
    """make_fx switches the autocast weight cache off, so that a shared weight would be cast once a use, not once.

    Gone: bf16 steps with shared weights are refused by the bitwise tests; look for the new name of the switch.
    """
    old = proxy_tensor.disable_autocast_cache
    proxy_tensor.disable_autocast_cache = contextlib.nullcontext  # type: ignore[assignment]
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        proxy_tensor.disable_autocast_cache = old
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out torch's remark on every branch that known values decide, which facts.py keeps as checks, and its
    traceback for an op that fails, which becomes a refusal with the user's line."""
    kept = {"torch.fx.experimental.symbolic_shapes": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL}
    loggers = [logging.getLogger(name) for name in kept]
    levels = [logger.level for logger in loggers]
    for logger, level in zip(loggers, kept.values(), strict=True):
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def annotate(**facts: Any) -> None:
    """Nodes traced from now on carry `facts` in meta["custom"]. Gone: torch.fx.traceback.annotate."""
    fx_traceback.current_meta["custom"] = facts


def annotate_frames(frames: tuple[tuple[str, int, str], ...]) -> None:
    """They carry these frames as well. Gone: torch.fx.traceback.annotate."""
    fx_traceback.current_meta["custom"] = {**fx_traceback.current_meta.get("custom", {}), "frames": frames}


def expression_of(symbol: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """What a symbol is computed from, comparable with one of another trace. Gone: str(symbol)."""
    return symbol.node.expr


def values_of(tensor: torch.Tensor) -> Any:
    """Dtype, shape and values of a real tensor met in a trace, where everything else is fake. Gone:
    torch.utils._python_dispatch._disable_current_modes."""
    with torch.utils._python_dispatch._disable_current_modes():
        return str(tensor.dtype), tuple(tensor.shape), repr(tensor.tolist())


def op_name(target: torch._ops.OpOverload) -> str:
    """Qualified name of an op with its overload, "aten::add.Tensor". Gone: str(target), with dots."""
    name: str = target.name()  # type: ignore[no-untyped-call]
    return name


@dataclass(frozen=True, slots=True)
class _AsInForward:
    """An op whose kernel asks whether gradients are on, run as a forward pass runs it: on, but recording nothing."""

    op: torch._ops.OpOverload

    @property
    def __name__(self) -> str:
        return str(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return self.op(*args, **kwargs)


def runnable(target: Any) -> Any:
    """What to call for a traced op while gradients are off. Gone: planned LSTMs fail on the CPU for want of a
    workspace."""
    return _AsInForward(target) if target is torch.ops.aten.mkldnn_rnn_layer.default else target


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, real or fake; unique while the storage object lives."""
    return int(tensor.untyped_storage()._cdata)


def hint_of(symbol: torch.SymFloat) -> float:
    """The value a symbol was made with, without a guard on it. Gone: keep the values beside the symbols."""
    hint: Any = symbol.node.hint
    return float(hint)


def traced_nodes() -> Callable[[], list[torch.fx.Node]]:
    """The nodes the running trace has recorded so far. Gone: zero_grad is taken to run at the end of the step."""
    mode = proxy_tensor.get_proxy_mode()
    return (lambda: list(mode.tracer.graph.nodes)) if mode is not None else list


def hint_or_none(symbol: torch.SymFloat | torch.SymInt) -> float | int | None:
    """The value behind a symbol where the trace knows it; None for what `.item()` returned."""
    node: Any = symbol.node
    hint: float | int | None = node.hint if node.has_hint() else None
    return hint


def guards_of(mode: FakeTensorMode) -> list[Any]:
    """The relations between symbols a trace relied on, as sympy expressions."""
    assert mode.shape_env is not None
    return [guard.expr for guard in mode.shape_env.guards]


def value_relations(mode: FakeTensorMode) -> list[Any]:
    """The relations between read values (`.item()`) that branches of the trace relied on, as sympy expressions."""
    assert mode.shape_env is not None
    found = [a.expr for asserts in mode.shape_env.deferred_runtime_asserts.values() for a in asserts]
    return list(dict.fromkeys(found))


# --- emptying and refilling storages, used by the runtime -----------------------------------------------------------

CAN_SWAP_POINTERS = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether a storage can trade its memory with another's, so that all views follow, and an access to an empty one can be
made an error and be allowed again (torch >= 2.14). Where not, only storages that nobody but the replay can touch are
moved: resized to nothing and back, and recomputed tensors are pointed at the new storage one by one."""


def hollow_out(storage: torch.UntypedStorage, message: str) -> None:
    """Give a storage's memory back to the allocator; from now on any access to it raises RuntimeError(message).

    Gone: `resize_(0)`, as for older torch. An access then is not noticed: the caller sees to it that there is none.
    """
    if not CAN_SWAP_POINTERS:
        storage.resize_(0)
        return
    hollow = torch._C._construct_storage_from_data_pointer(0, storage.device, storage.nbytes())
    storage._swap_data_ptr_(hollow)  # type: ignore[attr-defined]
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def refill(storage: torch.UntypedStorage, fresh: torch.UntypedStorage) -> None:
    """Give a hollow storage the memory of `fresh`, which must have no other user. Needs CAN_SWAP_POINTERS."""
    torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
    storage._swap_data_ptr_(fresh)  # type: ignore[attr-defined]


def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Fresh memory without contents."""
    return torch.UntypedStorage(size_bytes, device=device)  # type: ignore[no-untyped-call]
