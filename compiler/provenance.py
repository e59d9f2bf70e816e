"""Who asked for an op: phase, module and the user's own line, for backward ops too.

While a step is traced every node is annotated with the frames it comes from (record.py) and the module whose forward is
running, or, inside a backward pass, with the sequence number of the forward op its autograd node belongs to. Afterwards
`Provenance.of` reads the notes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tensile.compiler import torch_private
from tensile.compiler.record import Frame
from tensile.schedules.plan import Phase

_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one op comes from. `source` is "train.py:31 in train_step", "" if unknown."""

    phase: Phase
    module: str
    source: str


@contextlib.contextmanager
def annotated(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Annotate everything traced inside with module path, phase and, in backward, the forward op it mirrors."""
    names = {id(module): name for name, module in model.named_modules()}
    running: list[str] = []
    phase: list[Phase] = ["forward"]

    def note(**more: Any) -> None:
        torch_private.annotate(phase=phase[-1], module=running[-1] if running else "", **more)

    def enter(module: torch.nn.Module, _args: Any) -> None:
        running.append(names.get(id(module), running[-1] if running else ""))
        note()

    def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
        running.pop()
        note()

    @contextlib.contextmanager
    def during(entered: Phase) -> Iterator[None]:
        phase.append(entered)
        note()
        try:
            yield
        finally:
            phase.pop()
            note()

    def mirror(number: int, leaf: str | None) -> Callable[[Any], None]:
        return lambda _gradients: note(mirrors=number, leaf=leaf)

    leaves = {id(parameter): name for name, parameter in model.named_parameters()}
    engine_backward, engine_grad = torch.autograd.backward, torch.autograd.grad

    def hook_graph(roots: Any) -> list[Any]:
        handles, seen = [], set()
        pending = [tensor.grad_fn for tensor in torch.utils._pytree.tree_leaves(roots) if _has_graph(tensor)]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            leaf = leaves.get(id(variable)) if variable is not None else None
            handles.append(node.register_prehook(mirror(node._sequence_nr(), leaf)))
            pending.extend(following for following, _ in node.next_functions)
        return handles

    def wrapped(engine: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(engine)
        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            handles = hook_graph(tensors)
            try:
                with during("backward"):
                    return engine(tensors, *args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return run

    user_step = optimizer.step

    @functools.wraps(user_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        with during("optimizer"):
            return user_step(*args, **kwargs)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    note()
    try:
        torch.autograd.backward, torch.autograd.grad = wrapped(engine_backward), wrapped(engine_grad)
        optimizer.step = step  # type: ignore[method-assign]
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = engine_backward, engine_grad
        optimizer.__dict__.pop("step", None)
        if getattr(user_step, "__func__", None) is not type(optimizer).step:
            optimizer.step = user_step  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


class Provenance:
    """Reads the annotations of a traced graph."""

    def __init__(self, nodes: list[Node], user_folder: str | None) -> None:
        self._user_folder = user_folder
        self._forward: dict[int, Node] = {}
        self._last_backward = -1
        for index, node in enumerate(nodes):
            notes = node.meta.get("custom", {})
            if notes.get("phase") == "backward":
                self._last_backward = index
            elif node.meta.get("seq_nr", -1) >= 0 and self._last_backward < 0:
                # of the nodes with one number, the last is the differentiable one: numbers grow behind it
                self._forward[node.meta["seq_nr"]] = node
        self._position = {node: index for index, node in enumerate(nodes)}

    def of(self, node: Node) -> Origin:
        notes = node.meta.get("custom", {})
        phase: Phase = notes.get("phase", "forward")
        if phase == "forward" and 0 <= self._last_backward < self._position[node]:
            phase = "optimizer"  # clipping and the like, between backward and the update
        twin = self._forward.get(notes.get("mirrors", -1)) if phase == "backward" else None
        if twin is not None:
            module = twin.meta.get("custom", {}).get("module", "")
            return Origin(phase=phase, module=module, source=self._line(twin) or self._line(node))
        leaf: str | None = notes.get("leaf")
        module = leaf.rpartition(".")[0] if leaf else notes.get("module", "")
        return Origin(phase=phase, module=module, source=self._line(node))

    def _line(self, node: Node) -> str:
        return user_line(node.meta.get("custom", {}).get("frames", ()), self._user_folder)


@functools.lru_cache(maxsize=65536)
def user_line(frames: tuple[Frame, ...], user_folder: str | None) -> str:
    """The innermost of some frames outside torch that is the user's: in their folder, else outside libraries.

    Library files are named by their last two parts and the user's by their last, so that no line names a machine.
    """
    own = [frame for frame in frames if user_folder and frame[0].startswith(user_folder) and not _library(frame[0])]
    outside = [frame for frame in frames if not _library(frame[0])]
    for candidates in (own, outside, frames):
        if candidates:
            file, line, function = candidates[-1]
            parts = Path(file).parts[-2 if _library(file) else -1 :]
            return f"{'/'.join(parts)}:{line} in {function}"
    return ""


def _library(file: str) -> bool:
    return any(name in file for name in _LIBRARIES)
