"""Plan files: the only reader and writer, text <-> Plan.

A plan file is YAML, format 1.0: one line a storage, a row and an event; keys in fixed order; whole numbers; text
without dates. `...` marks the end, so that a file that was cut short is never taken for a plan.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

from tensile._version import __version__
from tensile.schedules import document, fields
from tensile.schedules.document import DocumentError, kind_of, shown
from tensile.schedules.errors import PlanFileError
from tensile.schedules.fields import AGAIN, Fault, read_record, read_text
from tensile.schedules.plan import Free, Plan, Recompute, SwapIn, SwapOut
from tensile.schedules.units import format_bytes

FORMAT = "1.0"
LARGEST_FILE_BYTES = 64 * 2**20  # ten times the plan of a step of 11 000 ops

_START = re.compile(r"(?: *(?:#[^\n]*)?\r?\n)*tensile *:")
_END = re.compile(r"\n\.\.\. *(?:\r?\n *(?:#[^\n]*)?)*\Z")
_VERSION = re.compile(r"([1-9][0-9]{0,5})\.([0-9]{1,6})\Z")
_NOT_OURS = "give a file that `tensile compile` wrote"


def dumps(plan: Plan) -> str:
    """The text of a plan: same plan, same bytes. Raises PlanFileError for text that UTF-8 cannot hold."""
    return f'tensile: "{FORMAT}"\n{fields.write_block(fields.PLAN, plan)}\n...\n'


def loads(text: str, *, name: str = "plan") -> Plan:
    """The plan in `text`; errors call it `name`. Numbers are in range and references point at something; whether the
    plan is sound is for `check` to say. Raises PlanFileError, whose `where` is the file and line."""
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise PlanFileError("the file is empty", where=name, hint=_NOT_OURS)
    if not _START.match(text):
        raise PlanFileError("not a plan: the first key is not tensile", where=name, hint=_NOT_OURS)
    if not _END.search(text):
        raise PlanFileError("the file is cut short: its last line is not ...", where=name, hint=AGAIN)
    try:
        tree = document.parse(text)
    except DocumentError as error:
        raise PlanFileError(error.what, where=f"{name}:{error.line}", hint=error.hint) from error
    newer_minor = False
    try:
        newer_minor = _read_version(tree)
        plan = _read_plan(tree)
        _refuse_dangling(plan)
    except Fault as fault:
        at = f" at {_path_text(fault.path)}" if fault.path else ""
        hint = f"a newer tensile wrote this plan: upgrade from {__version__}" if newer_minor else fault.hint
        raise PlanFileError(
            f"{fault.what}{at}", where=f"{name}:{document.line_of(text, fault.path) or 1}", hint=hint
        ) from None
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file so that it holds the whole plan or what it held before, even when the machine stops half way.

    Raises PlanFileError when it cannot be written; nothing is left behind then.
    """
    content = dumps(plan).encode()
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise PlanFileError(
            f"cannot write the plan: {error.strerror}", where=os.fspath(path), hint="choose another file"
        ) from error


def read(path: str | os.PathLike[str], *, largest_bytes: int = LARGEST_FILE_BYTES) -> Plan:
    """The plan in a file of at most `largest_bytes` bytes (64 MiB unless given). Raises PlanFileError."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(largest_bytes + 1)
    except OSError as error:
        raise PlanFileError(f"cannot read the plan: {error.strerror}", where=name, hint="check the path") from error
    if len(content) > largest_bytes:
        raise PlanFileError(f"larger than any plan: over {format_bytes(largest_bytes)}", where=name, hint=_NOT_OURS)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanFileError("not UTF-8 text", where=f"{name}:{line}", hint=_NOT_OURS) from error
    return loads(text, name=name)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last; where folders cannot be opened (Windows), the file system sees to it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_version(tree: Any) -> bool:
    """Whether a newer tensile of the same format wrote this. Raises Fault for a format this one cannot read."""
    if type(tree) is not dict:
        raise Fault(f"expected mapping, found {kind_of(tree)}")
    try:
        version = read_text(tree["tensile"])
    except Fault as fault:
        raise fault.under("tensile") from None
    match = _VERSION.match(version)
    if not match:
        raise Fault(f"expected a version such as {FORMAT}, found '{shown(version)}'", "tensile")
    ours = _VERSION.match(FORMAT)
    assert ours is not None
    if match[1] != ours[1]:
        raise Fault(
            f"plan format {version}, but this tensile {__version__} reads {ours[1]}.x",
            "tensile",
            hint=f"use a tensile that reads format {match[1]}.x, or compile the plan again with this one",
        )
    return int(match[2]) > int(ours[2])


def _read_plan(tree: dict[str, Any]) -> Plan:
    return read_record(Plan, fields.PLAN, {key: value for key, value in tree.items() if key != "tensile"})


def _refuse_dangling(plan: Plan) -> None:
    """Refuse a plan that points at a row, boundary or storage it does not have. Raises Fault."""
    storages, rows = len(plan.storages), len(plan.rows)
    for k, storage in enumerate(plan.storages):
        if storage.storage != k:
            raise Fault(f"expected {k}, its place in the list, found {storage.storage}",
                        "storages", k, "storage")  # fmt: skip
    for k, row in enumerate(plan.rows):
        for key in ("reads", "writes", "creates"):
            _refuse_outside(getattr(row, key), storages, "storage", "rows", k, key)
    _refuse_outside((plan.promise.peak_row,), rows, "row", "promise", "peak_row")
    for k, event in enumerate(plan.events):
        match event:
            case Free():
                _refuse_outside((event.at,), rows + 1, "boundary", "events", k, "at")
                _refuse_outside(event.storages, storages, "storage", "events", k, "free")
            case Recompute():
                _refuse_outside((event.row,), rows, "row", "events", k, "recompute")
                _refuse_outside(event.restores, storages, "storage", "events", k, "restores")
            case SwapOut() | SwapIn():
                until = "free" if isinstance(event, SwapOut) else "need"
                kind = "swap_out" if isinstance(event, SwapOut) else "swap_in"
                _refuse_outside((event.storage,), storages, "storage", "events", k, kind)
                _refuse_outside((event.start,), rows + 1, "boundary", "events", k, "start")
                _refuse_outside((getattr(event, until),), rows + 1, "boundary", "events", k, until)


def _refuse_outside(numbers: tuple[int, ...], count: int, noun: str, *path: str | int) -> None:
    for number in numbers:
        if number >= count:
            known = f"the last is {count - 1}" if count else "there is none"
            raise Fault(f"no {noun} {number}, {known},", *path)


def _path_text(path: document.Path) -> str:
    """A key path as a person writes it: events[3].start."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{shown(step)}"
    return text.removeprefix(".")
