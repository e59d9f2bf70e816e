"""What a planned step has to say for itself."""

from __future__ import annotations

from dataclasses import dataclass

from tensile.schedules.units import format_bytes, format_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An honest account: what was applied, what was promised, what was measured, what went another way."""

    swaps: tuple[int, int]  # applied, of
    recomputes: tuple[int, int]
    frees: tuple[int, int]
    promised_peak_bytes: int
    measured_peak_bytes: int | None
    unmeasured_because: str | None
    steps: int
    eager_steps: int
    eager_because: str | None  # the last reason a step ran eagerly
    promised_step_us: int
    median_step_us: float | None
    stall_us: float  # of the training thread, waiting for copies, per planned step
    waits: int
    waited: int
    bounced: int
    remarks: tuple[str, ...]

    @property
    def applied(self) -> str:
        """One line: how much of the plan is in effect."""
        parts = (("swaps", self.swaps), ("recomputes", self.recomputes), ("frees", self.frees))
        return "applied " + ", ".join(f"{done} of {total} {name}" for name, (done, total) in parts)

    def __str__(self) -> str:
        measured = "not measured: " + (self.unmeasured_because or "no planned step has run")
        if self.measured_peak_bytes is not None:
            measured = f"measured {format_bytes(self.measured_peak_bytes)}"
        lines = [
            f"tensile: {self.applied}",
            f"  peak: promised {format_bytes(self.promised_peak_bytes)}, {measured}",
            f"  steps: {self.steps} planned, {self.eager_steps} eager"
            + (f" ({self.eager_because})" if self.eager_because else ""),
        ]
        if self.median_step_us is not None:
            lines.append(
                f"  step time: expected {format_us(self.promised_step_us)}, median {format_us(self.median_step_us)}, "
                f"of it waiting for copies {format_us(self.stall_us)}"
            )
        if self.waits:
            lines.append(f"  copies back: {self.waits - self.waited} of {self.waits} were there in time")
        if self.bounced:
            lines.append(f"  {self.bounced} copies went through a buffer: import tensile before the model is made")
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks)])
