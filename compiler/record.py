"""What a step dispatches, op by op: the user's frames for every op, and whether two runs of a step are the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensile.compiler import torch_private

Frame = tuple[str, int, str]
"""File, line and function; a stack of them has the innermost last."""

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run: what every op was given and gave, the frames it came from, and what the run left behind. Two runs of one
    step have equal `calls` and `left`."""

    calls: tuple[Any, ...]
    frames: tuple[tuple[Frame, ...], ...]
    left: Any


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every op is noted, and annotated with its frames if it becomes a node of a graph."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Any] = []
        self._frames: list[tuple[Frame, ...]] = []
        self._number: dict[int, int] = {}  # storage key -> how many were met before it
        self._keep: list[torch.UntypedStorage] = []  # storages stay alive, so that keys stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # no op of the step: a question of fake tensors
            return func(*args, **kwargs)
        frames = _frames(sys._getframe(1))
        torch_private.annotate_frames(frames)
        given = self._facts(args), self._facts(kwargs)
        result = func(*args, **kwargs)
        self._calls.append((str(func), given, self._facts(result)))
        self._frames.append(frames)
        return result

    def finish(self, left: Sequence[Any]) -> Record:
        """The record of a run that leaves these values behind."""
        return Record(calls=tuple(self._calls), frames=tuple(self._frames), left=self._facts(left))

    def _facts(self, value: Any) -> Any:
        """What is the same in another run of the same step: layouts and storages by number, symbols by expression."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._facts, value))
        if isinstance(value, dict):
            return tuple((key, self._facts(item)) for key, item in value.items())
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return torch_private.expression_of(value)
        if isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))):
            return repr(value)
        return type(value).__name__

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, torch_private.FakeTensor):
            return torch_private.values_of(tensor)
        if tensor.layout is not torch.strided:
            return str(tensor.layout)
        key = torch_private.storage_key(tensor)
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._keep)
            self._keep.append(tensor.untyped_storage())
        return number, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _frames(innermost: FrameType | None) -> tuple[Frame, ...]:
    found: list[Frame] = []
    frame = innermost
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor the compiler's nor made up."""
    return not file.startswith((_TORCH, _HERE, "<"))
