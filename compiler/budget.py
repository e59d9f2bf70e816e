"""How much memory a plan may use: bytes, a share of the eager peak, or as little as possible within some time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensile.schedules.errors import TensileError
from tensile.schedules.units import parse_bytes

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Exactly one of `size_bytes`, `percent` (of the eager peak), `smallest` and `overhead_percent` (the least memory
    for at most this much more time) is set; `text` is what was asked."""

    text: str
    size_bytes: int | None = None
    percent: float | None = None
    smallest: bool = False
    overhead_percent: float | None = None

    def bytes_of(self, eager_peak_bytes: int) -> int:
        """The budget in bytes, given the eager step's peak; not for what only the planner can find."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.percent is not None, "the smallest budget is the planner's to find"
        return int(eager_peak_bytes * self.percent / 100)

    def __str__(self) -> str:
        return self.text


def parse_budget(text: str) -> Budget:
    """A budget from "8GiB", "60%" (of the eager peak) or "min". Raises TensileError for anything else, and for zero."""
    if text.strip().lower() == "min":
        return Budget(text="min", smallest=True)
    match = _PERCENT.match(text)
    if match:
        budget = Budget(text=text.strip(), percent=float(match.group(1)))
        if not 0 < float(match.group(1)) <= 1000:
            raise TensileError(f"budget {text!r} is out of range", hint="give a share of the eager peak such as 60%")
        return budget
    try:
        size = parse_bytes(text)
    except TensileError as error:
        raise TensileError(f"not a budget: {text!r}", hint="write 8GiB, 60% (of the eager peak) or min") from error
    if size <= 0:
        raise TensileError(f"budget {text!r} is out of range", hint="a budget is more than zero bytes")
    return Budget(text=text.strip(), size_bytes=size)


def parse_overhead(text: str) -> Budget:
    """The least memory within an overhead, from "5%" or "0.5 %". Raises TensileError for anything else."""
    match = _PERCENT.match(text)
    if not match or float(match.group(1)) > 1000:
        raise TensileError(f"not an overhead: {text!r}", hint="write how much longer the step may take, such as 5%")
    return Budget(text=f"within {text.strip()} more time", overhead_percent=float(match.group(1)))
