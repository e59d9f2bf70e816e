"""Plan files: what is written is read back, the same plan gives the same bytes, a save is whole or nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from plan_strategies import plans

from tensile.schedules import codec
from tensile.schedules.errors import PlanFileError
from tensile.schedules.plan import Plan, SwapIn, SwapOut

SCHEDULES = Path(codec.__file__).parent
EXAMPLES = sorted(SCHEDULES.glob("*.yaml"))
SWAP = (SCHEDULES / "swap.yaml").read_text()

AGAIN = "compile the plan again"
WROTE = "give a file that `tensile compile` wrote"

# ---- round trip


@given(plans())
@settings(max_examples=150, deadline=None)
def test_a_plan_written_and_read_is_the_same_plan(plan: Plan) -> None:
    assert codec.loads(codec.dumps(plan)) == plan


@given(plans())
@settings(max_examples=50, deadline=None)
def test_the_same_plan_gives_the_same_bytes(plan: Plan) -> None:
    text = codec.dumps(plan)
    assert codec.dumps(plan) == text
    assert codec.dumps(codec.loads(text)) == text


@given(plans())
@settings(max_examples=50, deadline=None)
def test_any_yaml_reader_finds_the_same_values(plan: Plan) -> None:
    tree = yaml.safe_load(codec.dumps(plan))
    assert tree["subject"]["workload"] == plan.subject.workload
    assert tree["notes"] == list(plan.notes)
    assert [row.get("module", "") for row in tree["rows"]] == [row.module for row in plan.rows]
    assert [row["call"] for row in tree["rows"]] == [row.call for row in plan.rows]
    assert [storage["size_bytes"] for storage in tree["storages"]] == [s.size_bytes for s in plan.storages]
    assert [storage["name"] for storage in tree["storages"]] == [s.name for s in plan.storages]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_read_and_written_byte_for_byte(path: Path) -> None:
    assert codec.dumps(codec.read(path)).encode() == path.read_bytes()


def test_there_are_four_examples() -> None:
    assert [path.stem for path in EXAMPLES] == ["chain", "recompute", "residual", "swap"]


def test_the_file_starts_with_the_version_and_ends_with_the_end_mark() -> None:
    lines = SWAP.splitlines()
    assert lines[0] == 'tensile: "1.0"'
    assert lines[-1] == "..."
    assert SWAP.endswith("\n")
    assert "\r" not in SWAP


def test_one_more_swap_is_two_more_lines() -> None:
    plan = codec.loads(SWAP)
    events = (
        *plan.events,
        SwapOut(storage=1, start=11, free=11, begin_us=21, end_us=22),
        SwapIn(storage=1, start=11, need=11, begin_us=22, end_us=23),
    )
    before, after = set(SWAP.splitlines()), codec.dumps(replace(plan, events=events)).splitlines()
    assert [line for line in after if line not in before] == [
        "- {swap_out: 1, start: 11, free: 11, begin_us: 21, end_us: 22}",
        "- {swap_in: 1, start: 11, need: 11, begin_us: 22, end_us: 23}",
    ]


def test_a_step_of_1200_rows_takes_at_most_600_kb() -> None:
    plan = codec.loads(SWAP)
    module = "model.layers.31.self_attn"
    storages = tuple(
        replace(plan.storages[4], storage=k, name=f"{module}/mm.{k}", size_bytes=10**8 + k, shape=(4, 2048, 4096))
        for k in range(1500)
    )
    rows = tuple(
        replace(plan.rows[0], op=k, module=module, source=f"modeling_llama.py:{k} in forward", reads=(k, k + 1),
                creates=(k + 2,), time_ns=100_000 + k)
        for k in range(1200)
    )  # fmt: skip
    events = tuple(
        replace(plan.events[1], at=k // 2, storages=(k // 2,)) if k % 2 else
        replace(plan.events[0], storage=k // 2, start=k // 2, free=k // 2 + 3, begin_us=80 * k, end_us=80 * k + 70)
        for k in range(2000)
    )  # fmt: skip
    text = codec.dumps(replace(plan, storages=storages, rows=rows, events=events))
    assert len(text) <= 600_000
    assert len(codec.loads(text).events) == 2000


def test_a_file_may_be_commented_and_have_windows_line_ends() -> None:
    text = "\ufeff# made for the blog post\n\n" + SWAP.replace("notes:", "# why:\nnotes:") + "\n# done\n"
    assert codec.loads(text.replace("\n", "\r\n")) == codec.loads(SWAP)


def test_text_that_utf8_cannot_hold_is_refused_when_written() -> None:
    plan = codec.loads(SWAP)
    with pytest.raises(PlanFileError) as caught:
        codec.dumps(replace(plan, notes=("caf\udce9.py",)))
    assert str(caught.value) == (
        "error: no plan file can hold 'caf\\udce9.py': it has no UTF-8 form\n"
        "help: rename the file or module it comes from"
    )


# ---- files


def test_a_saved_plan_is_read_back(tmp_path: Path) -> None:
    plan = codec.loads(SWAP)
    codec.save(plan, tmp_path / "a.yaml")
    assert codec.read(tmp_path / "a.yaml") == plan
    assert (tmp_path / "a.yaml").read_text() == SWAP
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_a_saved_plan_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        codec.save(codec.loads(SWAP), tmp_path / "a.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.yaml").stat().st_mode) == 0o644


def test_saving_through_a_link_changes_the_file_it_points_at(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    codec.save(codec.loads(SWAP), tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == SWAP


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file_and_leaves_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.yaml").write_text("old")
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(PlanFileError) as caught:
        codec.save(codec.loads(SWAP), tmp_path / "a.yaml")
    assert str(caught.value) == (
        f"error: cannot write the plan: No space left on device\n  at {tmp_path / 'a.yaml'}\nhelp: choose another file"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.yaml", "old")]


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        codec.save(codec.loads(SWAP), tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_save_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot write the plan: No such file or directory"):
        codec.save(codec.loads(SWAP), tmp_path / "none" / "a.yaml")


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError) as caught:
        codec.read(tmp_path / "a.yaml")
    assert str(caught.value) == (
        f"error: cannot read the plan: No such file or directory\n  at {tmp_path / 'a.yaml'}\nhelp: check the path"
    )


def test_a_folder_is_not_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read the plan: Is a directory"):
        codec.read(tmp_path)


def test_bytes_that_are_not_text_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(SWAP.encode().replace(b"notes:", b"notes: \xff"))
    with pytest.raises(PlanFileError) as caught:
        codec.read(tmp_path / "a.yaml")
    assert str(caught.value) == f"error: not UTF-8 text\n  at {tmp_path / 'a.yaml'}:27\nhelp: {WROTE}"


def test_a_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(2**34)
    tracemalloc.start()
    try:
        with pytest.raises(PlanFileError) as caught:
            codec.read(huge, largest_bytes=2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    assert str(caught.value) == f"error: larger than any plan: over 1.00 MiB\n  at {huge}\nhelp: {WROTE}"


def test_a_device_that_never_ends_is_refused() -> None:
    with pytest.raises(PlanFileError, match="larger than any plan"):
        codec.read("/dev/zero", largest_bytes=2**20)


def test_an_error_in_a_file_names_the_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SWAP.replace("start: 2,", "start: true,"))
    with pytest.raises(PlanFileError) as caught:
        codec.read(tmp_path / "a.yaml")
    assert str(caught.value) == (
        f"error: expected int, found bool at events[0].start\n  at {tmp_path / 'a.yaml'}:58\nhelp: {AGAIN}"
    )


def test_the_text_does_not_depend_on_the_process() -> None:
    code = "import sys, hashlib; from tensile.schedules import codec; " \
           "print(hashlib.sha256(codec.dumps(codec.read(sys.argv[1])).encode()).hexdigest())"  # fmt: skip
    seen = {
        subprocess.run(
            [sys.executable, "-c", code, str(SCHEDULES / "swap.yaml")],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
