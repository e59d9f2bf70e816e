"""From a workload to its captured step: graph, program and guards.

The user's step runs on fake tensors, recorded twice under different random seeds, once as a graph; what it does must
be the same both times. Nothing of the user's changes, and no generator is consumed.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch.utils import _pytree as pytree

from tensile.compiler.graph import Graph, verify
from tensile.compiler.guards import Guards, make_guards
from tensile.compiler.live import collect_state
from tensile.compiler.lower import lower
from tensile.compiler.program import Counter, Program
from tensile.compiler.provenance import user_line
from tensile.compiler.refusals import refuse, translated
from tensile.compiler.tidy import tidy
from tensile.compiler.trace import (
    Rerun,
    Steady,
    Traced,
    asks_for_values,
    batch_names,
    find_steady_state,
    rerun_step,
    trace_step,
)
from tensile.compiler.workload import Workload
from tensile.schedules.plan import Fingerprint

__all__ = ["Captured", "capture", "collect_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A step as data and as something that can run. `state` maps names to the live tensors there were at capture;
    optimizer state that is born at the first step is not among them yet (see optimizer_state.py)."""

    graph: Graph
    program: Program
    state: dict[str, torch.Tensor]
    guards: Guards


def capture(workload: Workload, *, check_twice: bool = True, progress: Callable[[str], None] | None = None) -> Captured:
    """Capture one steady-state step of `workload`. Raises CaptureError (TS101 and up) when it cannot be exact.

    `check_twice` runs the step a second time with other Python and numpy seeds, to find what a trace would bake in.
    """
    say = progress or (lambda _text: None)
    _refuse_wrappers(workload.model)
    folder = _user_folder(workload)
    values = asks_for_values(workload.model)
    try:
        try:
            traced, graph, program = _captured(workload, folder, say, check_twice=check_twice, values=values)
        except Exception as error:
            if values or translated(error, folder).code != "TS101":
                raise
            say("trace with the batch's values")
            traced, graph, program = _captured(workload, folder, say, check_twice=check_twice, values=True)
    except (Exception, SystemExit) as error:
        raise translated(error, folder) from error
    verify(graph)
    return Captured(
        graph=graph, program=program, state=collect_state(workload.model, workload.optimizer),
        guards=make_guards(workload, traced),
    )  # fmt: skip


def _captured(
    workload: Workload, folder: str | None, say: Callable[[str], None], *, check_twice: bool, values: bool
) -> tuple[Traced, Graph, Program]:
    say("what one step leaves behind")
    steady = find_steady_state(workload, values=values)
    say("trace")
    traced = trace_step(workload, steady, values=values)
    graph, program = _lowered(traced, workload, folder)
    if check_twice:
        say("run again")
        _require_same(traced, _run_differently(workload, steady, traced.counters, values=values), folder)
    return traced, graph, program


def _lowered(traced: Traced, workload: Workload, folder: str | None) -> tuple[Graph, Program]:
    tidy(traced.graph_module)
    devices = {str(fake.tensor.device) for fake in traced.inputs if fake.kind == "parameter"}
    device = sorted(devices - {"cpu"})[0] if devices - {"cpu"} else "cpu"
    fingerprint = Fingerprint(
        torch=torch.__version__.partition("+")[0], device=torch.device(device).type,
        optimizer=describe_optimizer(workload.optimizer), state=_state_digest(traced), batch=_describe_batch(workload),
        ops="",
    )  # fmt: skip
    return lower(traced, name=workload.name, device=device, fingerprint=fingerprint, user_folder=folder)


def _run_differently(workload: Workload, steady: Steady, counters: tuple[Counter, ...], *, values: bool) -> Rerun:
    """Another run, under other seeds of Python's and numpy's generators and with the attributes of modules as the
    first left them."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        random.seed(random.random() + 1.0)
        numpy.random.seed(int(numpy.random.randint(2**31)) ^ 1)
        return rerun_step(workload, steady, values=values, counters=counters)
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _require_same(traced: Traced, again: Rerun, folder: str | None) -> None:
    first, second = traced.record, again.record
    if (first.calls, first.left) != (second.calls, second.left):
        pairs = enumerate(zip(first.calls, second.calls, strict=False))
        different = next((index for index, (one, other) in pairs if one != other), None)
        raise refuse(
            "TS108", "the step is not the same twice: it depends on Python randomness, a counter or another Python "
            "value", where=user_line(first.frames[different], folder) if different is not None else None,
            hint="draw with torch (torch.rand, dropout), or pass what changes in the batch as a tensor",
        )  # fmt: skip
    _require_steady_counters(traced.counters, again.counters)


def _require_steady_counters(first: tuple[Counter, ...], second: tuple[Counter, ...]) -> None:
    """A planned step moves the counters on by itself, so it must know by how much."""
    later = {(counter.module, counter.key): counter.after for counter in second}
    for counter in first:
        found = later.get((counter.module, counter.key), counter.after)
        if found != counter.next(counter.after):
            raise refuse(
                "TS108",
                f"the step is not the same twice: it sets {counter.key} to {counter.after!r}, then to {found!r}",
                where=f"module {counter.module or '(the model)'}",
                hint="count steps outside the model, or keep the number in a buffer",
            )  # fmt: skip


def _refuse_wrappers(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel") or hasattr(
            module, "_get_fsdp_state"
        ):
            raise refuse(
                "TS109", f"the model is wrapped in {kind}, whose communication a trace cannot see",
                where=f"module {name or '(the model)'}", hint="pass the inner module",
            )  # fmt: skip


def _user_folder(workload: Workload) -> str | None:
    try:
        file = inspect.getsourcefile(inspect.unwrap(workload.step_fn))
    except TypeError:
        return None
    return str(Path(file).resolve().parent) if file else None


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Class and the options that shape its ops: "AdamW(amsgrad=False, foreach=None)", once for groups alike."""
    texts = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in sorted(group.items()) if isinstance(v, (bool, str, type(None)))}
        texts.append(f"{type(optimizer).__name__}({', '.join(f'{k}={v}' for k, v in options.items())})")
    return " + ".join(dict.fromkeys(texts))


def _state_digest(traced: Traced) -> str:
    facts = [
        (f.name, f.kind, tuple(f.tensor.shape), tuple(f.tensor.stride()), str(f.tensor.dtype), f.tensor.requires_grad)
        for f in traced.inputs
        if f.kind != "batch"
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _describe_batch(workload: Workload) -> str:
    leaves = pytree.tree_leaves(tuple(workload.batch))
    texts = []
    for name, leaf in zip(batch_names(workload), leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            shape = ",".join(map(str, leaf.shape))
            strides = "" if leaf.is_contiguous() else f" strides {tuple(leaf.stride())}"
            texts.append(f"{name} {str(leaf.dtype).removeprefix('torch.')}[{shape}]{strides}")
        else:
            texts.append(f"{name}={leaf!r}")
    return ", ".join(texts)
