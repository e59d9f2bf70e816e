"""What goes wrong, in words a user can act on: every error says what, where and what to do."""

from __future__ import annotations


class TensileError(Exception):
    """An error for the user: `what` happened, `where`, and a `hint` for what to do.

    `code` is the stable number of a capture refusal ("TS101"); None elsewhere.
    """

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}" if self.code else f"error: {self.what}"]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.hint:
            lines.append(f"help: {self.hint}")
        return "\n".join(lines)


class ModelFileError(TensileError):
    """The model file cannot be imported, or does not return a Workload."""


class CaptureError(TensileError):
    """The step cannot be captured exactly; `code` is TS101 and up."""


class PlanFileError(TensileError):
    """A plan file cannot be read, or is inconsistent; the key path is in `what`, file and line are `where`."""


class InfeasibleBudget(TensileError):
    """No plan fits the budget; the smallest feasible one and what holds it up are in the message.

    `smallest_bytes` is the smallest feasible budget in bytes, as far as the planner knows; `op` the index of the op
    that holds it up and `op_bytes` what is resident there.
    """

    def __init__(
        self,
        what: str,
        *,
        smallest_bytes: int,
        where: str | None = None,
        hint: str | None = None,
        op: int | None = None,
        op_bytes: int = 0,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.smallest_bytes = smallest_bytes
        self.op = op
        self.op_bytes = op_bytes


class PlanMismatch(TensileError):
    """The plan was made for another model, batch, optimizer, torch or device; or a guard failed."""


class LaneError(TensileError):
    """A copy lane failed (disk full, short read or write); the message says whether the step is lost."""


class StepLost(TensileError):
    """The step failed after it began to update the user's state; the state is neither before nor after the step."""
