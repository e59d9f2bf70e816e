"""A captured training step as plain data: ops, tensors, storages, and `verify`, the check at the door."""

from __future__ import annotations

from dataclasses import dataclass

from tensile.schedules.plan import Fingerprint, Kind, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What memory holds. Alias classes of tensors, with the exact size in bytes."""

    index: int
    name: str  # "wte.weight", "wte.weight/exp_avg", or "h.0.attn/mm.2" (module path / op . ordinal)
    kind: Kind
    size_bytes: int
    device: str  # "cpu", "cuda:0"; storages on another device than the plan's cost nothing there
    enters: bool  # exists before the step (parameter, buffer, optimizer state, batch, constant, accumulated gradient)
    leaves: bool  # exists after the step (state, and what the step returns or leaves in .grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A view of a storage. `producer` is the op that returns it, None for an input; glue views have the op that
    created their storage (or wrote it last before the view was taken)."""

    index: int
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    dtype: str  # "float32"
    producer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A call that touches memory, at its place in captured order. Views, tuple getitems and Python scalar arithmetic
    are not ops but *glue* (see program.py): they cost no memory and run where they are first needed."""

    index: int
    name: str  # stable: "h.0.attn/mm.2", module path / op . ordinal within that module and phase
    call: str  # "aten.mm.default"
    phase: Phase
    module: str
    source: str  # the user's own line: "model.py:31 in forward"; "" if unknown
    inputs: tuple[int, ...]  # tensors it is called with, in argument order
    outputs: tuple[int, ...]  # tensors it returns, in order
    reads: tuple[int, ...]  # storages whose contents it uses, sorted
    writes: tuple[int, ...]  # storages changed in place, sorted (batch-norm statistics included)
    creates: tuple[int, ...]  # storages it allocates, sorted
    after: tuple[int, ...]  # ops that must run earlier: data, RAW/WAR/WAW per storage, RNG chain, side effects
    rng: bool  # consumes the default generator
    no_recompute: str  # "" if running it again gives the same bits, else the reason why not
    key: str  # ops with equal keys take the same time: call, shapes, strides, dtypes, constants
    release_gradient: bool = False  # eager drops all gradients after this op (where zero_grad ran); at most one op


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One whole step. `ops[i].index == i`, likewise tensors and storages."""

    name: str
    device: str  # "cpu" or "cuda:0": the device whose memory is planned
    fingerprint: Fingerprint
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]


def verify(graph: Graph) -> None:
    """Raise AssertionError naming the first inconsistency of a captured graph; nothing downstream checks again."""
    for name, indices in (
        ("op", [op.index for op in graph.ops]),
        ("tensor", [tensor.index for tensor in graph.tensors]),
        ("storage", [storage.index for storage in graph.storages]),
    ):
        for position, index in enumerate(indices):
            assert index == position, f"{name} {position} says it is {index}"
    for storage in graph.storages:
        assert storage.size_bytes >= 0, f"storage {storage.name} has {storage.size_bytes} bytes"
    for tensor in graph.tensors:
        assert len(tensor.shape) == len(tensor.stride), f"tensor {tensor.index} has {tensor.shape} but {tensor.stride}"
        assert 0 <= tensor.storage < len(graph.storages), f"tensor {tensor.index} is on no storage"
    alive = {storage.index for storage in graph.storages if storage.enters}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    before: list[set[int]] = []
    for op in graph.ops:
        assert all(earlier < op.index for earlier in op.after), f"{op.name} follows a later op: {op.after}"
        assert not alive & set(op.creates), f"{op.name} creates a storage again"
        missing = (set(op.reads) | set(op.writes)) - alive
        assert not missing, f"{op.name} touches storages that do not exist: {missing}"
        alive |= set(op.creates)
        before.append(set(op.after))
        for storage_index in {*op.reads, *op.writes}:
            earlier = writer.get(storage_index)
            assert earlier is None or earlier in before[-1], f"{op.name} may run before {earlier} that it depends on"
        for storage_index in op.writes:
            late = set(readers.get(storage_index, ())) - before[-1] - {op.index}
            assert not late, f"{op.name} may overwrite what {late} still read"
        for storage_index in op.reads:
            readers.setdefault(storage_index, []).append(op.index)
        for storage_index in {*op.writes, *op.creates}:
            writer[storage_index], readers[storage_index] = op.index, []
    lost = {storage.index for storage in graph.storages if storage.leaves} - alive
    assert not lost, f"storages leave the step that never existed: {lost}"
