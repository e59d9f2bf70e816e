"""Arguments for one op, made up: tensors of exactly its layouts and aliasing, benign values, scalars as at capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tensile.compiler.graph import Graph, Op
from tensile.compiler.program import Program, Ref, replace_refs

_UNKNOWN_SCALAR = 1.0  # for what `.item()` returned in the trace
_DRAWN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInputs:
    """`call.target(*args, **kwargs)` runs the op. `refresh()` gives the storages it writes their first values back, so
    that no run sees what an earlier one left (sums grow, products vanish into denormals)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[torch.Tensor, ...]  # one tensor over the whole of each written storage
    size_bytes: int

    def refresh(self) -> None:
        """Fill what the op writes anew."""
        for whole in self.written:
            _fill(whole)


def made_up_inputs(graph: Graph, program: Program, op: Op) -> OpInputs:
    """Inputs for one op; needs the memory of its storages, and neither model nor generator.

    Floats are drawn from [0.25, 0.75): no denormals, no infinities, legal for logarithms, roots and probabilities, and
    different enough for what depends on values (max pooling). Integers are 0, which every index may be; Booleans are
    mixed. Arguments that share a storage in the step share it here.
    """
    call = program.ops[op.index]
    whole: dict[int, torch.Tensor] = {}

    def made(ref: Ref) -> Any:
        value = program.values[ref.value]
        if value.tensor is None:
            return _UNKNOWN_SCALAR if value.hint is None else value.hint
        layout = graph.tensors[value.tensor]
        dtype = getattr(torch, layout.dtype)
        if layout.storage not in whole:
            storage = graph.storages[layout.storage]
            whole[layout.storage] = torch.empty(
                storage.size_bytes // dtype.itemsize, dtype=dtype, device=storage.device
            )
            if storage.size_bytes % dtype.itemsize:
                whole[layout.storage].untyped_storage().resize_(storage.size_bytes)
            _fill(whole[layout.storage])
        base = whole[layout.storage]
        empty = torch.empty(0, dtype=dtype, device=base.device)
        return empty.set_(base.untyped_storage(), layout.offset, layout.shape, layout.stride)

    args, kwargs = replace_refs(call.args, made), replace_refs(call.kwargs, made)
    return OpInputs(
        args=args, kwargs=kwargs, written=tuple(whole[s] for s in op.writes if s in whole),
        size_bytes=sum(base.untyped_storage().nbytes() for base in whole.values()),
    )  # fmt: skip


def _fill(flat: torch.Tensor) -> None:
    generator = torch.Generator(flat.device).manual_seed(0)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if flat.dtype in _DRAWN:
        flat.uniform_(0.25, 0.75, generator=generator)
    elif flat.dtype is torch.bool:
        flat.random_(0, 2, generator=generator)
    else:
        flat.zero_()
