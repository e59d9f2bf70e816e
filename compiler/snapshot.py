"""Run the user's own step and take it back: afterwards everything is bit for bit as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tensile.compiler.live import collect_state
from tensile.compiler.torch_private import storage_key
from tensile.compiler.workload import Workload


@contextlib.contextmanager
def undone(workload: Workload) -> Iterator[None]:
    """Afterwards parameters, buffers, gradients, optimizer state and options, the batch, attributes of modules and the
    generators of torch, numpy and Python are as before; the tensors are the same objects with the same bits.

    Holds one copy of all these tensors meanwhile, on the CPU. What lies elsewhere (a learning-rate scheduler, a list
    the step appends to) is not known here and stays changed.
    """
    model, optimizer = workload.model, workload.optimizer
    with contextlib.ExitStack() as undo:
        undo.enter_context(generators_kept())
        _keep_bits(workload, undo)
        for module in model.modules():
            _keep_dict(module.__dict__, undo)
            for name in ("_parameters", "_buffers"):
                _keep_dict(module.__dict__[name], undo)
        _keep_dict(optimizer.__dict__, undo)
        for group in optimizer.param_groups:
            _keep_dict(group, undo)
        for entries in optimizer.state.values():
            _keep_dict(entries, undo)
        _keep_dict(optimizer.state, undo)
        yield


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the generators of torch (all devices in use), numpy and Python are where they were."""
    accelerators = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    cpu, numpy_state, python_state = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if accelerators:
            torch.cuda.set_rng_state_all(accelerators)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)


def resting_bytes(workload: Workload, device: str, held: Any = None) -> int:
    """Bytes on the device between two steps: state, gradients that are kept, the batch, and what the caller still
    holds of the last step's result, every storage once."""
    results = [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]
    here = [tensor for tensor in (*_tensors(workload), *results) if tensor.device == torch.device(device)]
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in here}.values())


def _tensors(workload: Workload) -> list[torch.Tensor]:
    state = [*collect_state(workload.model, workload.optimizer).values()]
    gradients = [tensor.grad for tensor in state if tensor.is_leaf and tensor.grad is not None]
    batch = [leaf for leaf in pytree.tree_leaves(tuple(workload.batch)) if isinstance(leaf, torch.Tensor)]
    return [*state, *gradients, *batch]


def _keep_bits(workload: Workload, undo: contextlib.ExitStack) -> None:
    tensors = _tensors(workload)
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    copies = [(storage, _host_copy(storage)) for storage in storages.values()]
    places = [(tensor, tensor.detach()) for tensor in tensors]
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.requires_grad]

    def restore() -> None:
        for storage, copy in copies:
            storage.copy_(copy)
        for tensor, place in places:
            if tensor.data_ptr() != place.data_ptr():  # the step bound another storage to it
                tensor.data = place
        for tensor, gradient in gradients:
            tensor.grad = gradient

    undo.callback(restore)


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes()).copy_(storage)  # type: ignore[no-untyped-call]


def _keep_dict(target: dict[Any, Any], undo: contextlib.ExitStack) -> None:
    saved = dict(target)

    def restore() -> None:
        target.clear()
        target.update(saved)

    undo.callback(restore)
