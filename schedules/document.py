"""YAML text to plain dicts, lists, strings, ints and bools, guarded; the one file that knows PyYAML.

It reads PyYAML's event stream (the C parser's where there is one) and never builds YAML objects, so that neither
aliases nor nesting can blow up, and a 6 MB plan takes two seconds instead of seven.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

Path = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 8  # a plan nests five deep
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)\Z", re.ASCII)
_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # YAML 1.1, 5.1
_MAX_DIGITS = 20  # enough to show that a number is too large, short enough to convert in no time


class Odd(NamedTuple):
    """A scalar that no field of a plan may hold: a float, a null, a date, an int that is not written in decimal."""

    kind: str
    text: str


class DocumentError(Exception):
    """`what` is wrong with the text, at `line` (from 1)."""

    def __init__(self, what: str, line: int, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.line = line
        self.hint = hint


def parse(text: str) -> Any:
    """The tree of one YAML document. Raises DocumentError for what is not YAML, and for anchors, aliases, tags,
    duplicate keys, a second document and deep nesting, none of which a plan needs."""
    unprintable = _UNPRINTABLE.search(text)
    if unprintable:
        line = text.count("\n", 0, unprintable.start()) + 1
        raise DocumentError(f"character U+{ord(unprintable[0]):04X} is not allowed", line, "remove it")
    root: list[Any] = []
    open_nodes: list[list[Any] | dict[str, Any]] = []
    keys: list[Any] = []  # for each open node: the mapping key that waits for its value, or _NO_KEY
    scalars: dict[str, Any] = {}
    resolve = _resolver()
    documents = 0
    for event in _events(text):
        kind = type(event)
        if kind is yaml.ScalarEvent:
            if event.anchor is not None or event.tag is not None:
                raise _not_allowed(event)
            value = event.value
            if event.implicit[0]:  # a plain scalar: its text decides its type
                if value in scalars:
                    value = scalars[value]
                else:
                    scalars[value] = value = resolve(value)
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            if event.anchor is not None or event.tag is not None:
                raise _not_allowed(event)
            if len(open_nodes) >= _MAX_DEPTH:
                raise _fault(event, f"nested deeper than {_MAX_DEPTH} levels", "a plan nests five levels")
            value = {} if kind is yaml.MappingStartEvent else []
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            open_nodes.pop()
            keys.pop()
            continue
        elif kind is yaml.AliasEvent:
            raise _not_allowed(event)
        elif kind is yaml.DocumentStartEvent:
            documents += 1
            if documents > 1:
                raise _fault(event, "a second document starts", "one file holds one plan")
            continue
        else:
            continue

        if not open_nodes:
            root.append(value)
        else:
            parent = open_nodes[-1]
            if isinstance(parent, list):
                parent.append(value)
            elif keys[-1] is _NO_KEY:
                if type(value) is not str:
                    raise _fault(event, f"expected a key, found {kind_of(value)}", "keys are words")
                if value in parent:
                    raise _fault(event, f"duplicate key {shown(value)}", "remove one of the two")
                keys[-1] = value
            else:
                parent[keys[-1]] = value
                keys[-1] = _NO_KEY
        if type(value) is dict or type(value) is list:
            open_nodes.append(value)
            keys.append(_NO_KEY)
    return root[0] if root else Odd("nothing", "")


def line_of(text: str, path: Path) -> int | None:
    """The line (from 1) on which the node at `path` starts in a text that `parse` accepts; None if there is none."""
    events: Iterator[Any] = (e for e in _events(text) if isinstance(e, (yaml.NodeEvent, yaml.CollectionEndEvent)))
    node = next(events, None)
    for step in path:
        node = _child(node, step, events)
    return None if node is None else int(node.start_mark.line) + 1


def kind_of(value: object) -> str:
    """What a value of the tree is, in a word an error message can use."""
    if isinstance(value, Odd):
        return value.kind
    names = {dict: "mapping", list: "list", str: "str", bool: "bool", int: "int"}
    return names[type(value)]


def shown(text: str) -> str:
    """Text from a file as a message may show it: escaped, 60 characters at most."""
    return repr(text)[1:-1] if len(text) <= 60 else f"{repr(text[:60])[1:-1]}…"


class _NoKey:
    pass


_NO_KEY = _NoKey()


def _events(text: str) -> Iterator[Any]:
    """PyYAML's events; its errors become DocumentError."""
    try:
        yield from yaml.parse(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DocumentError(f"not valid YAML: {error.problem}", line, "compile the plan again") from error


def _resolver() -> Any:
    """A function from the text of a plain scalar to its value, by PyYAML's own rules (YAML 1.1)."""
    loader = _LOADER("")
    names = {"float": "float", "null": "null", "timestamp": "date", "merge": "merge key", "value": "default key"}

    def resolve(text: str) -> Any:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False)).rpartition(":")[2]
        if tag == "str":
            return text
        if tag == "bool":
            return text.lower() in ("true", "yes", "on")
        if tag == "int":
            if not _DECIMAL.match(text):
                return Odd("int that is not decimal", text)
            return int(text[:_MAX_DIGITS])
        return Odd(names.get(tag, tag), text)

    return resolve


def _child(node: Any, step: str | int, events: Iterator[Any]) -> Any:
    """The child of `node` (whose start event was just read) at key or index `step`; None if there is none."""
    if isinstance(node, yaml.MappingStartEvent):
        for key in events:
            if isinstance(key, yaml.MappingEndEvent):
                return None
            value = next(events)
            if key.value == step:
                return value
            _skip(value, events)
    if isinstance(node, yaml.SequenceStartEvent):
        for index, value in enumerate(events):
            if isinstance(value, yaml.SequenceEndEvent):
                return None
            if index == step:
                return value
            _skip(value, events)
    return None


def _skip(node: Any, events: Iterator[Any]) -> None:
    depth = 1 if isinstance(node, yaml.CollectionStartEvent) else 0
    while depth:
        event = next(events)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _not_allowed(event: Any) -> DocumentError:
    hint = "write the value out"
    if isinstance(event, yaml.AliasEvent):
        return _fault(event, f"alias *{shown(str(event.anchor))} is not allowed", hint)
    if event.anchor is not None:
        return _fault(event, f"anchor &{shown(event.anchor)} is not allowed", hint)
    hint = "a plan holds text, whole numbers, true and false only"
    return _fault(event, f"tag {shown(event.tag)} is not allowed", hint)


def _fault(event: Any, what: str, hint: str) -> DocumentError:
    return DocumentError(what, int(event.start_mark.line) + 1, hint)
