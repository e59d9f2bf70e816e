"""Op times on disk: what was kept is found again, and a bad file is never trusted."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tensile.compiler.profile_cache import Measured, ProfileCache, default_cache_dir

DEVICE = "a CPU, 2 threads, torch 2.14.1"
CONV = Measured(time_ns=1_250_000, workspace_bytes=4096, in_step=True)
ADD = Measured(time_ns=900, workspace_bytes=0, in_step=False)


def kept(folder: Path) -> Path:
    """The cache file of a folder that has one."""
    (file,) = folder.glob("profile-*.json")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder that does not exist yet and afterwards holds one op."""
    cache = ProfileCache(tmp_path / "tensile", DEVICE)
    cache.put("conv", CONV)
    cache.save()
    return tmp_path / "tensile"


def test_what_was_kept_is_found_again(folder: Path) -> None:
    cache = ProfileCache(folder, DEVICE)
    assert cache.get("conv") == cache["conv"] == CONV
    assert cache.get("add") is None
    assert cache.note is None


def test_another_device_does_not_see_it(folder: Path) -> None:
    assert ProfileCache(folder, DEVICE.replace("2 threads", "1 thread")).get("conv") is None


def test_two_compiles_that_save_in_turn_both_keep_their_ops(folder: Path) -> None:
    first, second = ProfileCache(folder, DEVICE), ProfileCache(folder, DEVICE)
    first.put("add", ADD)
    second.put("mul", ADD)
    first.save()
    second.save()
    after = ProfileCache(folder, DEVICE)
    assert (after.get("conv"), after.get("add"), after.get("mul")) == (CONV, ADD, ADD)


def test_compiles_that_save_at_once_never_see_half_a_file(folder: Path) -> None:
    notes: list[str | None] = []

    def keep_many(start: int) -> None:
        for number in range(start, start + 40):
            cache = ProfileCache(folder, DEVICE)
            cache.put(f"op {number}", Measured(time_ns=number, workspace_bytes=0, in_step=True))
            cache.save()
            notes.append(cache.note)

    workers = [threading.Thread(target=keep_many, args=(1000 * worker,)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert notes == [None] * 120
    after = ProfileCache(folder, DEVICE)
    assert after.note is None
    assert any(after.get(f"op {1000 * worker + 39}") is not None for worker in range(3))
    assert [file.name for file in folder.iterdir()] == [kept(folder).name]


def edited(folder: Path, **changes: object) -> str:
    return json.dumps(json.loads(kept(folder).read_text()) | changes)


BAD = {
    "empty": lambda folder: "",
    "cut off": lambda folder: kept(folder).read_text()[:-20],
    "not an object": lambda folder: "[1, 2]",
    "no ops": lambda folder: json.dumps({"version": 3, "device": DEVICE}),
    "older version": lambda folder: edited(folder, version=1),
    "another device's": lambda folder: edited(folder, device="a GPU"),
    "a time that is text": lambda folder: edited(folder, ops={"a": ["1", 0, True]}),
    "a time that is a truth value": lambda folder: edited(folder, ops={"a": [True, 0, True]}),
    "a time that is a fraction": lambda folder: edited(folder, ops={"a": [1.5, 0, True]}),
    "a time that is negative": lambda folder: edited(folder, ops={"a": [-1, 0, True]}),
    "an entry too short": lambda folder: edited(folder, ops={"a": [1, 0]}),
    "an entry that is null": lambda folder: edited(folder, ops={"a": None}),
    "nested without end": lambda folder: "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_not_used_and_that_is_said(folder: Path, name: str) -> None:
    kept(folder).write_text(BAD[name](folder))
    cache = ProfileCache(folder, DEVICE)
    assert cache.get("conv") is None
    assert cache.note is not None
    assert cache.note.startswith("kept op times could not be used (")
    assert cache.note.endswith("; measured anew")


def test_a_bad_file_is_replaced_by_a_good_one(folder: Path) -> None:
    kept(folder).write_text("not JSON")
    cache = ProfileCache(folder, DEVICE)
    cache.put("add", ADD)
    cache.save()
    after = ProfileCache(folder, DEVICE)
    assert after.get("add") == ADD
    assert after.note is None


def test_bytes_that_are_no_text_are_not_used(folder: Path) -> None:
    kept(folder).write_bytes(b"\xff\xfe\x00")
    assert ProfileCache(folder, DEVICE).note is not None


def test_a_folder_that_cannot_be_made_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file" / "tensile", DEVICE)
    cache.put("add", ADD)
    cache.save()
    assert cache["add"] == ADD
    assert cache.note is not None
    assert cache.note.startswith(("op times could not be kept: ", "kept op times could not be used "))


def test_an_assumed_value_is_not_kept(folder: Path) -> None:
    cache = ProfileCache(folder, DEVICE)
    cache.assume("strange", ADD)
    cache.put("add", ADD)
    cache.save()
    assert cache["strange"] == ADD
    assert ProfileCache(folder, DEVICE).get("strange") is None


def test_no_folder_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = ProfileCache(None, DEVICE)
    cache.put("add", ADD)
    cache.save()
    assert cache["add"] == ADD
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tensile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "tensile"
