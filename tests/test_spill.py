"""The spill file and the lane: what goes out comes back, and what goes wrong is said."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensile.runtime import spill as spill_module
from tensile.runtime.lanes import CHUNK_BYTES as CHUNK
from tensile.runtime.lanes import CpuLane
from tensile.runtime.pool import ALIGNMENT, spill_slots
from tensile.runtime.spill import SpillFile
from tensile.schedules.errors import LaneError

SIZES = st.lists(st.integers(1, 3 * 2**20) | st.sampled_from([1, 511, 512, 1280, 4095, 4096, 4097, 2**20 + 1024]),
                 min_size=1, max_size=6)  # fmt: skip


def bytes_of(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, order=st.randoms(use_true_random=False), shift=st.sampled_from([0, 64, 512]))
def test_neighbours_in_the_file_never_touch_each_other(sizes: list[int], order: Any, shift: int) -> None:
    slots, total = spill_slots(dict(enumerate(sizes)))
    file = SpillFile(None, total)
    try:
        backing = [bytes_of(size + shift, seed) for seed, size in enumerate(sizes)]
        numbers = list(range(len(sizes)))
        order.shuffle(numbers)
        for number in numbers:
            file.write(backing[number].data_ptr() + shift, sizes[number], slots[number])
        order.shuffle(numbers)
        for number in numbers:
            back = torch.zeros(sizes[number] + shift, dtype=torch.uint8)
            file.read(back.data_ptr() + shift, sizes[number], slots[number])
            assert torch.equal(back[shift:], backing[number][shift:])
    finally:
        file.close()


def test_slots_are_aligned_and_apart() -> None:
    slots, total = spill_slots({7: 1, 2: 4096, 5: 4097})
    assert slots == {2: 0, 5: ALIGNMENT, 7: 3 * ALIGNMENT}
    assert total == 4 * ALIGNMENT


@settings(max_examples=15, deadline=None)
@given(sizes=SIZES)
def test_a_storage_comes_back_through_the_lane_with_its_bits(sizes: list[int]) -> None:
    lane = CpuLane(dict(enumerate(sizes)), None)
    try:
        tensors = [bytes_of(size, seed) for seed, size in enumerate(sizes)]
        wanted = [tensor.clone() for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        for number, storage in enumerate(storages):
            lane.out(number, storage, number)
        for number in range(len(sizes)):
            lane.free(number)
        with pytest.raises(RuntimeError, match="swapped out"):
            tensors[0].sum()
        for number in range(len(sizes)):
            lane.fetch(number, number)
        for number in range(len(sizes)):
            lane.wait(number)
        assert all(map(torch.equal, tensors, wanted))
        assert lane.counts.copied_out == lane.counts.copied_in == len(sizes)
    finally:
        lane.close()


def test_the_copy_with_the_nearest_deadline_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * CHUNK
    lane = CpuLane(dict.fromkeys(range(3), size), None)
    begun, go_on = threading.Event(), threading.Event()
    moves: list[int] = []
    write = os.pwritev

    def watched(fd: int, memory: Any, offset: int) -> int:
        moves.append(offset // size)
        begun.set()
        assert go_on.wait(10)
        return write(fd, memory, offset)

    monkeypatch.setattr(spill_module.os, "pwritev", watched)
    tensors = [bytes_of(size, seed) for seed in range(3)]
    wanted = [tensor.clone() for tensor in tensors]
    for number, deadline in ((0, 30), (1, 20), (2, 10)):
        lane.out(number, tensors[number].untyped_storage(), deadline)
        assert begun.wait(10)
    go_on.set()
    for number in range(3):
        lane.free(number)
    # the first chunk was under way when the more urgent copies came; the rest of it waited for them
    assert moves == [0, 2, 2, 1, 1, 0]
    for number in range(3):
        lane.fetch(number, number)
        lane.wait(number)
    assert all(map(torch.equal, tensors, wanted))
    lane.close()


def failing(kind: str) -> Any:
    def call(*_: Any) -> int:
        if kind == "short":
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return call


@pytest.mark.parametrize("kind", ["short", "error"])
def test_a_failed_write_leaves_the_storage_whole(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    lane = CpuLane({0: 2**20}, None)
    tensor = bytes_of(2**20, 1)
    wanted = tensor.clone()
    monkeypatch.setattr(spill_module.os, "pwritev", failing(kind))
    lane.out(0, tensor.untyped_storage(), 1)
    with pytest.raises(LaneError, match=r"ended early|cannot be written"):
        lane.free(0)
    assert torch.equal(tensor, wanted)
    lane.bring_back(lambda index: True)
    assert torch.equal(tensor, wanted)
    lane.close()


@pytest.mark.parametrize("kind", ["short", "error"])
def test_a_failed_read_is_tried_again_when_everything_is_brought_back(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lane = CpuLane({0: 2**20}, None)
    tensor = bytes_of(2**20, 1)
    wanted = tensor.clone()
    lane.out(0, tensor.untyped_storage(), 1)
    lane.free(0)
    with monkeypatch.context() as patch:
        patch.setattr(spill_module.os, "preadv", failing(kind))
        lane.fetch(0, 1)
        with pytest.raises(LaneError, match=r"ended early|cannot be read"):
            lane.wait(0)
    lane.bring_back(lambda index: True)
    assert torch.equal(tensor, wanted)
    lane.close()


def test_a_full_disk_is_met_before_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_module.os, "posix_fallocate", full)
    with pytest.raises(LaneError, match=r"swaps out 4\.00 KiB, the disk has"):
        SpillFile(None, 4096)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaneError, match="does not exist"):
        SpillFile(tmp_path / "nowhere", 4096)


def test_the_file_has_no_name(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, 2**20)
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_a_forked_process_is_refused() -> None:
    lane = CpuLane({0: 4096}, None)
    tensor = bytes_of(4096, 1)
    child = os.fork()
    if child == 0:
        try:
            lane.out(0, tensor.untyped_storage(), 1)
        except LaneError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lane.close()
