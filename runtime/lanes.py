"""The CPU lane: storages leave to a spill file and come back, each direction on a thread of its own.

The interface is four calls at planned boundaries: `out` starts a copy, `free` waits for it and gives the memory back,
`fetch` takes memory and starts the copy back, `wait` waits for that one. Copies go in chunks, the one with the nearest
deadline first. Memory changes only in `free` and `fetch`, in
the training thread, so that what is resident never depends on timing.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tensile.compiler import torch_private
from tensile.runtime.pool import spill_slots
from tensile.runtime.spill import SpillFile
from tensile.schedules.errors import LaneError, TensileError

MESSAGE = "tensile: this tensor is swapped out between steps; use `with step.resident():` to look at it"


# a copy that is needed sooner waits for this much of another one at most; a multiple of the spill file's alignment
CHUNK_BYTES = 16 * 2**20


class _Job:
    """One copy between memory and the spill file; `done` is released when it has ended, `error` is what it raised."""

    __slots__ = ("address", "done", "error", "moved", "offset", "size_bytes")

    def __init__(self, address: int, size_bytes: int, offset: int) -> None:
        self.address, self.size_bytes, self.offset = address, size_bytes, offset
        self.moved = 0
        self.done = threading.Event()
        self.error: BaseException | None = None


class _Worker:
    """A thread that copies in chunks, always of the job with the nearest deadline; equal ones in the order given."""

    def __init__(self, name: str, move: Callable[[int, int, int], None]) -> None:
        self._move = move
        self._jobs: list[tuple[int, int, _Job]] = []
        self._given = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: _Job, deadline: int) -> _Job:
        with self._changed:
            self._given += 1
            heapq.heappush(self._jobs, (deadline, self._given, job))
            self._changed.notify()
        return job

    def stop(self) -> None:
        """End what was given, then the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            job = next_one[2]
            part = min(CHUNK_BYTES, job.size_bytes - job.moved)
            try:
                self._move(job.address + job.moved, part, job.offset + job.moved)
            except BaseException as error:  # handed to the training thread, which raises it at the planned place
                job.error = error
            job.moved += part
            if job.error is not None or job.moved >= job.size_bytes:
                job.done.set()
            else:
                with self._changed:
                    heapq.heappush(self._jobs, next_one)

    def _next(self) -> tuple[int, int, _Job] | None:
        with self._changed:
            while not self._jobs and not self._stopped:
                self._changed.wait()
            return heapq.heappop(self._jobs) if self._jobs else None


@dataclass(slots=True)
class LaneCounts:
    """What a lane has done since it was opened; stalls are waits of the training thread."""

    copied_out: int = 0
    copied_in: int = 0
    stall_out_us: float = 0.0
    stall_in_us: float = 0.0
    waits: int = 0
    waited: int = 0  # of `waits`, those that found the copy unfinished


@dataclass(slots=True)
class _Away:
    """A storage the lane has something to do with."""

    storage: torch.UntypedStorage
    state: str  # "writing", "out", "reading"
    job: _Job | None = None
    fresh: torch.UntypedStorage | None = None
    size_bytes: int = field(default=0)


class CpuLane:
    """Storages to a spill file and back. `size_bytes`: of every storage the plan swaps, by index.

    Raises LaneError when the disk cannot hold them.
    """

    def __init__(self, size_bytes: Mapping[int, int], directory: Path | None) -> None:
        self._sizes = dict(size_bytes)
        self._offsets, total = spill_slots(size_bytes)
        self._file = SpillFile(directory, total)
        self._writer = _Worker("tensile-out", lambda *part: self._file.write(*part))
        self._reader = _Worker("tensile-in", lambda *part: self._file.read(*part))
        self._away: dict[int, _Away] = {}
        self._process = os.getpid()
        self.counts = LaneCounts()

    @property
    def direct(self) -> bool:
        """Whether copies bypass the page cache."""
        return self._file.direct

    @property
    def bounced(self) -> int:
        """Copies that went through a buffer because their memory was not aligned."""
        return self._file.bounced

    def is_away(self, index: int) -> bool:
        """Whether a storage is not (wholly) resident."""
        return index in self._away

    def is_writing(self, index: int) -> bool:
        """Whether a storage's copy out has begun and its memory is not given back yet."""
        return index in self._away and self._away[index].state == "writing"

    def out(self, index: int, storage: torch.UntypedStorage, deadline: int) -> None:
        """Start copying a storage to the host; it stays readable until `free`. What has the nearest deadline, any
        number, goes first."""
        self._require_own_process()
        address, size, offset = storage.data_ptr(), storage.nbytes(), self._offsets[index]
        if size > self._sizes[index]:
            raise LaneError(
                f"storage {index} has {size} bytes, the plan keeps room for {self._sizes[index]}",
                hint="compile the plan again on this machine",
            )
        job = self._writer.put(_Job(address, size, offset), deadline)
        self._away[index] = _Away(storage=storage, state="writing", job=job, size_bytes=size)
        self.counts.copied_out += 1

    def free(self, index: int) -> None:
        """Wait for the copy out, then give the memory back."""
        away = self._away[index]
        self.counts.stall_out_us += self._finish(away)
        torch_private.hollow_out(away.storage, MESSAGE)
        away.state = "out"

    def fetch(self, index: int, deadline: int) -> None:
        """Take memory and start copying back; `deadline` as in `out`."""
        self._require_own_process()
        away = self._away[index]
        if torch_private.CAN_SWAP_POINTERS:
            target = away.fresh = torch_private.new_storage(away.size_bytes, away.storage.device)
        else:
            away.storage.resize_(away.size_bytes)
            target = away.storage
        address, size, offset = target.data_ptr(), away.size_bytes, self._offsets[index]
        away.job = self._reader.put(_Job(address, size, offset), deadline)
        away.state = "reading"
        self.counts.copied_in += 1

    def wait(self, index: int) -> None:
        """Wait for the copy back; the storage and every view of it are whole again."""
        away = self._away[index]
        self.counts.waits += 1
        stall = self._finish(away)
        self.counts.waited += stall > 0
        self.counts.stall_in_us += stall
        if away.fresh is not None:
            torch_private.refill(away.storage, away.fresh)
        del self._away[index]

    def bring_back(self, keep: Callable[[int], bool]) -> None:
        """End every copy and make resident again what `keep` says; the rest is forgotten. Raises LaneError."""
        failure: BaseException | None = None
        for index in list(self._away):
            away = self._away[index]
            if away.job is not None:
                away.job.done.wait()
            if away.state == "writing" or not keep(index):
                del self._away[index]
                continue
            try:
                if away.state == "out" or (away.job is not None and away.job.error is not None):
                    if away.state == "reading" and not torch_private.CAN_SWAP_POINTERS:
                        away.storage.resize_(0)
                    self.fetch(index, 0)
                self.wait(index)
            except TensileError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop the threads and give the disk back. Call `bring_back` first."""
        if os.getpid() == self._process:
            self._writer.stop()
            self._reader.stop()
        self._file.close()

    def _finish(self, away: _Away) -> float:
        """Wait for a storage's copy; microseconds waited. Raises what the copy raised."""
        assert away.job is not None
        stall = 0.0
        if not away.job.done.is_set():
            started = time.perf_counter()
            away.job.done.wait()
            stall = 1e6 * (time.perf_counter() - started)
        if away.job.error is not None:
            raise away.job.error
        away.job = None
        return stall

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise LaneError(
                "a planned step cannot run in a forked process", hint="call tensile.load in the process that trains"
            )
