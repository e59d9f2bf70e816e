"""tensile: fit a PyTorch training step into a memory budget, planned offline and replayed bit for bit.

`Workload` describes a training step for the compiler; `load` turns a plan file into the step to call in a training
loop. Both are loaded on first use, so that `import tensile` costs nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tensile._version import __version__
from tensile.schedules.errors import TensileError

if TYPE_CHECKING:
    from tensile.compiler.workload import Workload
    from tensile.runtime.session import PlannedStep, load

# torch reads this once, before its first large tensor: with it, large tensors on the CPU begin on a page of their own
# and are copied to disk and back without a detour. Set it to 0 beforehand to keep torch's default.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__all__ = ["PlannedStep", "TensileError", "Workload", "__version__", "load"]

_HOME = {
    "Workload": "tensile.compiler.workload",
    "PlannedStep": "tensile.runtime.session",
    "load": "tensile.runtime.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tensile' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
