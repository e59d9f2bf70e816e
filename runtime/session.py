"""`tensile.load`: the step a training loop calls, and what it does when something goes wrong."""

from __future__ import annotations

import atexit
import contextlib
import functools
import statistics
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from tensile.compiler.workload import StepFn, Workload
from tensile.runtime.bind import Bound, bind
from tensile.runtime.lanes import CpuLane
from tensile.runtime.memory import MemoryPolicy, allocated_peak, apply_memory_policy, profiler_is_active
from tensile.runtime.report import Report
from tensile.runtime.stage import Stage
from tensile.schedules import codec
from tensile.schedules.errors import LaneError, PlanMismatch, StepLost, TensileError
from tensile.schedules.plan import Free, Plan, Recompute, SwapOut

# after the first step, so many in a row run under the profiler: the allocator learns the sizes of the blocks that were
# there before, and the last of them gives the peak
_MEASURED_IN_A_ROW = 2


def load(
    plan: Plan | str | Path,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step_fn: StepFn,
    batch: Sequence[Any] | None = None,
    on_mismatch: Literal["error", "eager"] = "error",
    spill_dir: Path | str | None = None,
    memory_policy: MemoryPolicy = "tight",
) -> PlannedStep:
    """The planned step: call it as `step(*batch)` where `step_fn(model, optimizer, *batch)` was called.

    The live step is captured and compared with the plan: now when an example `batch` is given, else at the first call.
    `on_mismatch` says what happens to a step the plan does not cover: raise PlanMismatch, or run it eagerly (and say so
    in `report()`). `spill_dir` is where swapped-out tensors go on the CPU (default: the system's temporary folder).
    `memory_policy` makes the process's resident memory follow the allocator: "tight" (needed for a hard memory limit),
    "loose" (faster), "none".

    Raises PlanFileError, PlanMismatch, CaptureError, LaneError (the disk is too small), all before any step.
    """
    if on_mismatch not in ("error", "eager"):
        raise TensileError(f"on_mismatch is {on_mismatch!r}", hint='pass "error" or "eager"')
    if memory_policy not in ("tight", "loose", "none"):
        raise TensileError(f"memory_policy is {memory_policy!r}", hint='pass "tight", "loose" or "none"')
    read = plan if isinstance(plan, Plan) else codec.read(Path(plan))
    step = PlannedStep(
        read, model, optimizer, step_fn, on_mismatch=on_mismatch,
        spill_dir=Path(spill_dir) if spill_dir is not None else None, memory_policy=memory_policy,
    )  # fmt: skip
    if batch is not None:
        step.attach(tuple(batch))
    return step


class PlannedStep:
    """A training step under a plan. Call it; `report()` tells what happened; `close()` (or `with`) ends it."""

    def __init__(
        self, plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step_fn: StepFn, *,
        on_mismatch: str, spill_dir: Path | None, memory_policy: MemoryPolicy,
    ) -> None:  # fmt: skip
        self._plan, self._model, self._optimizer, self._step_fn = plan, model, optimizer, step_fn
        self._eager_allowed = on_mismatch == "eager"
        self._spill_dir = spill_dir
        self._bound: Bound | None = None
        self._stage: Stage | None = None
        self._optimizer_state: object = None
        self._unbound_because: PlanMismatch | None = None
        self._closed = False
        self._lost = False
        self._steps = self._eager_steps = 0
        self._eager_because: str | None = None
        self._peak_bytes: int | None = None
        self._unmeasured_because: str | None = "it takes three planned steps"
        self._measured_in_a_row = 0
        self._times_us: deque[float] = deque(maxlen=101)
        refused = apply_memory_policy(memory_policy)
        self._remarks: tuple[str, ...] = (f"resident memory may exceed allocated memory: {refused}",) if refused else ()
        # an object of its own, so that closing one step does not take another step's handler along
        self._at_exit = functools.partial(_close_at_exit, weakref.WeakMethod(self.close))
        atexit.register(self._at_exit)

    def __call__(self, *batch: Any) -> Any:
        """Run one training step; returns what step_fn returns."""
        if self._closed:
            raise TensileError("this planned step is closed", hint="call tensile.load again")
        if self._lost:
            raise StepLost(
                "an earlier step failed after it began to update the model",
                hint="load a checkpoint into the model and optimizer, then call step.reset()",
            )
        try:
            stage = self.attach(batch)
            leaves, spec = pytree.tree_flatten(batch)
            stage.check(leaves, spec)
        except PlanMismatch as mismatch:
            if not self._eager_allowed:
                raise
            return self._eager(batch, mismatch.what)
        try:
            reason = stage.prepare()
        except BaseException as error:
            raise self._recovered(stage, error, torch.get_rng_state()) from error.__cause__
        if reason is not None:
            return self._eager(batch, reason)
        del batch
        return self._planned(stage, leaves)

    def attach(self, batch: tuple[Any, ...]) -> Stage:
        """Capture the live step for this batch and apply the plan; done once, by the first call if not before."""
        if self._stage is not None and self._optimizer.state is not self._optimizer_state:
            # load_state_dict has made another dictionary with other tensors
            self._stage.bring_back()
            self._set_stage(self._stage.lane)
        if self._stage is None:
            if self._unbound_because is not None:
                raise self._unbound_because
            workload = Workload(self._model, self._optimizer, self._step_fn, batch)
            try:
                self._bound = bind(self._plan, workload)
            except PlanMismatch as mismatch:
                self._unbound_because = mismatch
                raise
            lane = CpuLane(self._bound.swapped, self._spill_dir)
            if self._bound.swapped and not lane.direct:
                self._remarks += ("the spill folder's file system has no direct I/O: copies go through the page cache",)
            self._set_stage(lane)
        assert self._stage is not None
        return self._stage

    def _set_stage(self, lane: CpuLane) -> None:
        assert self._bound is not None
        self._stage = Stage(self._bound, self._model, self._optimizer, lane)
        self._optimizer_state = self._optimizer.state

    def report(self) -> Report:
        """What was applied, promised and measured so far."""
        replay = self._bound.replay if self._bound else None
        done = (replay.swaps, replay.recomputes, replay.frees) if replay else (0, 0, 0)
        wanted = _event_counts(self._plan)
        counts = self._stage.lane.counts if self._stage else None
        stall_us = counts.stall_in_us + counts.stall_out_us if counts else 0.0
        return Report(
            swaps=(done[0], wanted[0]), recomputes=(done[1], wanted[1]), frees=(done[2], wanted[2]),
            promised_peak_bytes=self._plan.promise.peak_bytes, measured_peak_bytes=self._peak_bytes,
            unmeasured_because=self._unmeasured_because, steps=self._steps, eager_steps=self._eager_steps,
            eager_because=self._eager_because, promised_step_us=self._plan.promise.step_us,
            median_step_us=statistics.median(self._times_us) if self._times_us else None,
            stall_us=stall_us / max(1, self._steps), waits=counts.waits if counts else 0,
            waited=counts.waited if counts else 0, bounced=self._stage.lane.bounced if self._stage else 0,
            remarks=self._remarks,
        )  # fmt: skip

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Inside the context every parameter and optimizer state tensor is in memory, whatever the plan says."""
        if self._stage is not None:
            self._stage.bring_back()
        yield

    def reset(self) -> None:
        """Go on after StepLost, once the model and optimizer hold a good state again."""
        self._lost = False

    def close(self) -> None:
        """Bring everything back and give the spill space back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._stage is not None:
            try:
                self._stage.bring_back()
            finally:
                self._stage.lane.close()

    def __enter__(self) -> PlannedStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _eager(self, batch: tuple[Any, ...], reason: str) -> Any:
        with self.resident():
            self._eager_steps += 1
            self._measured_in_a_row = 0
            self._eager_because = reason
            return self._step_fn(self._model, self._optimizer, *batch)

    def _planned(self, stage: Stage, leaves: list[Any]) -> Any:
        generator = torch.get_rng_state()
        measuring = self._steps > 0 and self._peak_bytes is None
        if measuring and profiler_is_active():
            measuring, self._measured_in_a_row, self._unmeasured_because = False, 0, "a profiler was running"
        started = time.perf_counter()
        try:
            if measuring:
                base = stage.resident_bytes()
                above, values = allocated_peak(lambda: stage.run(leaves))
                self._measured_in_a_row += 1
                if self._measured_in_a_row == _MEASURED_IN_A_ROW:
                    self._peak_bytes = base + above
            else:
                values = stage.run(leaves)
                if self._steps > 0:
                    self._times_us.append(1e6 * (time.perf_counter() - started))
        except BaseException as error:
            raise self._recovered(stage, error, generator) from error.__cause__
        self._steps += 1
        return stage.finish(values)

    def _recovered(self, stage: Stage, error: BaseException, generator: torch.Tensor) -> BaseException:
        """Put the state back as it was before the step, or say that it is lost; what to raise."""
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        lost = stage.updating
        try:
            stage.bring_back()
        except LaneError as failure:
            lost, error = True, failure
        if lost:
            self._lost = True
            return _with_cause(
                StepLost(
                    f"the step failed after it began to update the model: {error}",
                    hint="the model is neither as before nor as after the step: load a checkpoint, call step.reset()",
                ),
                error,
            )
        torch.set_rng_state(generator)
        stage.undo_gradients()
        if isinstance(error, LaneError):
            return _with_cause(
                LaneError(f"{error.what}; the model is as it was before the step", where=error.where, hint=error.hint),
                error,
            )
        return error


def _with_cause(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _close_at_exit(reference: weakref.WeakMethod[Any]) -> None:
    close = reference()
    if close is not None:
        close()


def _event_counts(plan: Plan) -> tuple[int, int, int]:
    kinds = [type(event) for event in plan.events]
    return kinds.count(SwapOut), kinds.count(Recompute), kinds.count(Free)
