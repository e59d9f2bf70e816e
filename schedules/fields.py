"""The keys of a plan file: for each record one table that says what a field is called, which values it takes, and how
they are read and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from tensile.schedules.document import Path, kind_of, shown
from tensile.schedules.errors import PlanFileError
from tensile.schedules.plan import (
    Event,
    Fingerprint,
    Free,
    Kind,
    OpRow,
    Phase,
    Promise,
    Recompute,
    Residence,
    Source,
    StorageRow,
    Subject,
    SwapIn,
    SwapOut,
)
from tensile.schedules.units import format_bytes, format_us

LARGEST_INT = 2**63 - 1
AGAIN = "compile the plan again"

_T = TypeVar("_T")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*\Z")
_RESERVED = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}  # not text to one YAML reader or another
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_ESCAPED = re.compile('["\\\\\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]')


class Fault(Exception):
    """What is wrong at `path`, seen from the value at hand; every level above puts its own key in front."""

    def __init__(self, what: str, *path: str | int, hint: str = AGAIN) -> None:
        super().__init__(what)
        self.what = what
        self.path: Path = path
        self.hint = hint

    def under(self, key: str | int) -> Fault:
        self.path = (key, *self.path)
        return self


class _Required:
    """The default of a key that must be there."""


_REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Field:
    """One key: the record's attribute, how its value is read and written, and the value that is left out."""

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any], str]
    default: Any = _REQUIRED


Table = Mapping[str, Field]


def read_record(build: Callable[..., _T], table: Table, value: Any) -> _T:
    """A record from a mapping that has the table's keys and no other. Raises Fault."""
    if type(value) is not dict:
        raise Fault(f"expected mapping, found {kind_of(value)}")
    arguments: dict[str, Any] = {}
    for key, field in table.items():
        if key in value:
            try:
                arguments[field.name] = field.read(value[key])
            except Fault as fault:
                raise fault.under(key) from None
        elif field.default is _REQUIRED:
            raise Fault(f"missing key {key}")
        else:
            arguments[field.name] = field.default
    if len(value) > len(arguments) or any(key not in table for key in value):
        unknown = next(key for key in value if key not in table)
        raise Fault("unknown key", unknown, hint="remove it, or compile the plan again")
    return build(**arguments)


def write_block(table: Table, record: object, indent: str = "") -> str:
    """A record as one line a key, every key there."""
    lines = []
    for key, field in table.items():
        text = field.write(getattr(record, field.name))
        lines.append(f"{indent}{key}:{'' if text.startswith(chr(10)) else ' '}{text}")
    return "\n".join(lines)


def _write_flow(table: Table, record: object) -> str:
    """A record on one line; what is at its default is left out."""
    parts = []
    for key, field in table.items():
        value = getattr(record, field.name)
        if value != field.default:
            parts.append(f"{key}: {field.write(value)}")
    return f"{{{', '.join(parts)}}}"


def _read_list(read: Callable[[Any], _T], value: Any) -> tuple[_T, ...]:
    """Every item of a list, read. Raises Fault."""
    if type(value) is not list:
        raise Fault(f"expected list, found {kind_of(value)}")
    items: list[_T] = []
    try:
        for item in value:
            items.append(read(item))
    except Fault as fault:
        raise fault.under(len(items)) from None
    return tuple(items)


def _read_event(value: Any) -> Event:
    """An event from a mapping whose first key says which kind it is. Raises Fault."""
    if type(value) is not dict:
        raise Fault(f"expected mapping, found {kind_of(value)}")
    kind = next(iter(value), "nothing")
    if kind not in _EVENTS:
        raise Fault(f"expected {', '.join(_EVENTS)} as the first key, found {shown(kind)}")
    event: Event = read_record(*_EVENTS[kind], value)
    return event


def _write_event(event: Event) -> str:
    return _write_flow(_TABLE_OF[type(event)], event)


def read_text(value: Any) -> str:
    if type(value) is not str:
        nested = type(value) is dict or type(value) is list
        raise Fault(f"expected str, found {kind_of(value)}", hint=AGAIN if nested else "put text in quotes")
    return value


def _write_text(value: str) -> str:
    """Plain where every YAML reader takes it for text, else in double quotes with YAML's escapes."""
    if _PLAIN.match(value) and value.lower() not in _RESERVED:
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PlanFileError(
            f"no plan file can hold {value!r}: it has no UTF-8 form", hint="rename the file or module it comes from"
        ) from error
    return f'"{_ESCAPED.sub(_escape, value)}"'


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04x}"


def _read_int(value: Any) -> int:
    if type(value) is not int:
        raise Fault(f"expected int, found {kind_of(value)}")
    if not 0 <= value <= LARGEST_INT:
        raise Fault(f"expected an int from 0 to 2**63 - 1, found {value if value < 0 else 'a larger one'}")
    return value


def _write_int(value: int) -> str:
    return f"{value:d}"


def _read_ints(value: Any) -> tuple[int, ...]:
    return _read_list(_read_int, value)


def _write_ints(value: Iterable[int]) -> str:
    return f"[{', '.join(map(_write_int, value))}]"


def _read_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise Fault(f"expected bool, found {kind_of(value)}")
    return value


def _write_bool(value: bool) -> str:
    return "true" if value else "false"


def _text(name: str, default: Any = _REQUIRED) -> Field:
    return Field(name, read_text, _write_text, default)


def _int(name: str, default: Any = _REQUIRED) -> Field:
    return Field(name, _read_int, _write_int, default)


def _ints(name: str, default: Any = _REQUIRED) -> Field:
    return Field(name, _read_ints, _write_ints, default)


def _bool(name: str, default: Any = _REQUIRED) -> Field:
    return Field(name, _read_bool, _write_bool, default)


def _word(name: str, allowed: Any, default: Any = _REQUIRED) -> Field:
    words: tuple[str, ...] = get_args(allowed)

    def read_word(value: Any) -> str:
        text = read_text(value)
        if text not in words:
            raise Fault(f"expected one of {', '.join(words)}, found '{shown(text)}'")
        return text

    return Field(name, read_word, _write_text, default)


def _bytes(name: str) -> Field:
    """A number of bytes on a line of its own, with a comment in words, which readers of the file skip."""
    return Field(name, _read_int, lambda value: _with_words(value, 1024, format_bytes))


def _us(name: str) -> Field:
    return Field(name, _read_int, lambda value: _with_words(value, 1000, format_us))


def _with_words(value: int, smallest: int, words: Callable[[int], str]) -> str:
    return f"{value:d}  # {words(value)}" if value >= smallest else f"{value:d}"


def _nested(name: str, build: Callable[..., Any], table: Table, indent: str) -> Field:
    return Field(
        name,
        lambda value: read_record(build, table, value),
        lambda record: f"\n{write_block(table, record, indent)}",
    )


def _items(name: str, read: Callable[[Any], Any], write: Callable[[Any], str]) -> Field:
    """A list with one line an item."""
    return Field(
        name,
        lambda value: _read_list(read, value),
        lambda items: "".join(f"\n- {write(item)}" for item in items) or "[]",
    )


def _rows(name: str, build: Callable[..., Any], table: Table) -> Field:
    return _items(name, lambda value: read_record(build, table, value), lambda record: _write_flow(table, record))


def _table(*fields: Field, **renamed: Field) -> Table:
    """Keys are the attributes' own names, save for the `renamed`, which come first."""
    return {**renamed, **{field.name: field for field in fields}}


_FINGERPRINT = _table(*map(_text, ("torch", "device", "optimizer", "state", "batch", "ops")))
_SUBJECT = _table(
    _text("workload"), _text("device_name"), _nested("fingerprint", Fingerprint, _FINGERPRINT, indent="    ")
)
_PROMISE = _table(
    _bytes("peak_bytes"),
    _int("peak_row"),
    _bytes("budget_bytes"),
    _bytes("eager_peak_bytes"),
    _word("eager_peak_source", Source),
    _bytes("resting_bytes"),
    _bytes("spill_bytes"),
    _int("rss_slack_percent"),
    _us("step_us"),
    _us("bound_us"),
    _us("eager_step_us"),
    _word("eager_step_source", Source),
    _text("profile_source"),
    _text("planner"),
)
_STORAGE = _table(
    _int("storage"),
    _text("name"),
    _word("kind", Kind),
    _int("size_bytes"),
    _text("dtype"),
    _ints("shape"),
    _bool("enters", False),
    _bool("leaves", False),
    _word("starts", Residence, "absent"),
)
_ROW = _table(
    _int("op"),
    _text("call"),
    _word("phase", Phase),
    _text("module", ""),
    _text("source", ""),
    _ints("reads", ()),
    _ints("writes", ()),
    _ints("creates", ()),
    _int("time_ns"),
    _int("workspace_bytes", 0),
)
_EVENTS: Mapping[str, tuple[Callable[..., Event], Table]] = {
    "swap_out": (
        SwapOut,
        _table(_int("start"), _int("free"), _int("begin_us"), _int("end_us"), swap_out=_int("storage")),
    ),
    "swap_in": (
        SwapIn,
        _table(_int("start"), _int("need"), _int("begin_us"), _int("end_us"), swap_in=_int("storage")),
    ),
    "recompute": (Recompute, _table(_ints("restores"), recompute=_int("row"))),
    "free": (Free, _table(_int("at"), free=_ints("storages"))),
}
_TABLE_OF: Mapping[object, Table] = dict(_EVENTS.values())
PLAN = _table(
    _nested("subject", Subject, _SUBJECT, indent="  "),
    _nested("promise", Promise, _PROMISE, indent="  "),
    _items("notes", read_text, _write_text),
    _rows("storages", StorageRow, _STORAGE),
    _rows("rows", OpRow, _ROW),
    _items("events", _read_event, _write_event),
)
