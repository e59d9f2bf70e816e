"""A bad plan file is refused with what is wrong, where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tensile import __version__
from tensile.schedules import codec, document
from tensile.schedules.errors import PlanFileError

SCHEDULES = Path(codec.__file__).parent
SWAP = (SCHEDULES / "swap.yaml").read_text()

AGAIN = "compile the plan again"
WROTE = "give a file that `tensile compile` wrote"
INTS = "from 0 to 2**63 - 1"

# (what was done to swap.yaml, the old text, the new, what is wrong, how many lines below the old text
# the error stands, what to do)

BAD: list[tuple[str, str, str, str, int, str]] = [
    ("bool for a number", "start: 2,", "start: true,",
     "expected int, found bool at events[0].start", 0, AGAIN),
    ("yes for a number", "start: 2,", "start: yes,",
     "expected int, found bool at events[0].start", 0, AGAIN),
    ("text for a number", "free: 6,", "free: six,",
     "expected int, found str at events[0].free", 0, AGAIN),
    ("a number in quotes", "free: 6,", 'free: "6",',
     "expected int, found str at events[0].free", 0, AGAIN),
    ("a float", "end_us: 10}", "end_us: 10.5}",
     "expected int, found float at events[4].end_us", 0, AGAIN),
    ("not a number", "peak_bytes: 1808", "peak_bytes: .nan",
     "expected int, found float at promise.peak_bytes", 0, AGAIN),
    ("infinity", "budget_bytes: 1850", "budget_bytes: .inf",
     "expected int, found float at promise.budget_bytes", 0, AGAIN),
    ("nothing", "peak_row: 10", "peak_row:",
     "expected int, found null at promise.peak_row", 0, AGAIN),
    ("hexadecimal", "peak_row: 10", "peak_row: 0xA",
     "expected int, found int that is not decimal at promise.peak_row", 0, AGAIN),
    ("octal", "peak_row: 10", "peak_row: 012",
     "expected int, found int that is not decimal at promise.peak_row", 0, AGAIN),
    ("underscores", "size_bytes: 4,", "size_bytes: 4_000,",
     "expected int, found int that is not decimal at storages[7].size_bytes", 0, AGAIN),
    ("minutes and seconds", "step_us: 21", "step_us: 1:30",
     "expected int, found int that is not decimal at promise.step_us", 0, AGAIN),
    ("negative", "size_bytes: 4,", "size_bytes: -4,",
     f"expected an int {INTS}, found -4 at storages[7].size_bytes", 0, AGAIN),
    ("too large", "size_bytes: 4,", "size_bytes: 9223372036854775808,",
     f"expected an int {INTS}, found a larger one at storages[7].size_bytes", 0, AGAIN),
    ("far too large", "size_bytes: 4,", f"size_bytes: {'9' * 10_000},",
     f"expected an int {INTS}, found a larger one at storages[7].size_bytes", 0, AGAIN),
    ("a number for text", 'torch: "2.14.1"', "torch: 2.14",
     "expected str, found float at subject.fingerprint.torch", 0, "put text in quotes"),
    ("a date for text", "device: cpu", "device: 2026-01-31",
     "expected str, found date at subject.fingerprint.device", 0, "put text in quotes"),
    ("a list for text", "device: cpu", "device: [cpu]",
     "expected str, found list at subject.fingerprint.device", 0, AGAIN),
    ("text for a bool", "enters: true, starts", 'enters: "true", starts',
     "expected bool, found str at storages[2].enters", 0, AGAIN),
    ("text for a list", "shape: [50]}", "shape: 50}",
     "expected list, found int at storages[4].shape", 0, AGAIN),
    ("text in a list", "shape: [50]}", "shape: [50, x]}",
     "expected int, found str at storages[4].shape[1]", 0, AGAIN),
    ("a mapping for a list", "notes:\n", "notes: {}\nnote:\n",
     "expected list, found mapping at notes", 0, AGAIN),
    ("an unknown word", "kind: output", "kind: result",
     "expected one of parameter, buffer, optimizer_state, gradient, batch, constant, activation, output, "
     "found 'result' at storages[7].kind", 0, AGAIN),
    ("an unknown phase", "phase: optimizer, module: \"0\"", "phase: update, module: \"0\"",
     "expected one of forward, backward, optimizer, found 'update' at rows[10].phase", 0, AGAIN),
    ("an unknown key", "peak_row: 10", "peak_row: 10\n  peek_row: 10",
     "unknown key at promise.peek_row", 1, "remove it, or compile the plan again"),
    ("an unknown key in a row", "op: 2, call", "op: 2, cost: 1, call",
     "unknown key at rows[2].cost", 0, "remove it, or compile the plan again"),
    ("a missing key", "  planner: hand\n", "",
     "missing key planner at promise", -13, AGAIN),
    ("a missing section", "notes:", "nodes:",
     "missing key notes", -26, AGAIN),
    ("a missing key in an event", ", need: 8", "",
     "missing key need at events[4]", 0, AGAIN),
    ("a duplicate key", "peak_row: 10", "peak_row: 10\n  peak_row: 11",
     "duplicate key peak_row", 1, "remove one of the two"),
    ("a duplicate key in a line", "start: 2,", "start: 2, start: 3,",
     "duplicate key start", 0, "remove one of the two"),
    ("an unknown event", "swap_out: 5", "swap_off: 5",
     "expected swap_out, swap_in, recompute, free as the first key, found swap_off at events[0]", 0, AGAIN),
    ("two events in one", "{free: [4], at: 2}", "{free: [4], at: 2, recompute: 3}",
     "unknown key at events[1].recompute", 0, "remove it, or compile the plan again"),
    ("an empty event", "{free: [4], at: 2}", "{}",
     "expected swap_out, swap_in, recompute, free as the first key, found nothing at events[1]", 0, AGAIN),
    ("an event that is a list", "{free: [4], at: 2}", "[4, 2]",
     "expected mapping, found list at events[1]", 0, AGAIN),
    ("a storage that is not there", "swap_out: 5", "swap_out: 14",
     "no storage 14, the last is 13, at events[0].swap_out", 0, AGAIN),
    ("a storage a row cannot read", "reads: [3, 6], creates: [7]", "reads: [3, 60], creates: [7]",
     "no storage 60, the last is 13, at rows[3].reads", 0, AGAIN),
    ("a boundary behind the end", "at: 11}", "at: 12}",
     "no boundary 12, the last is 11, at events[10].at", 0, AGAIN),
    ("a row behind the end", "peak_row: 10", "peak_row: 11",
     "no row 11, the last is 10, at promise.peak_row", 0, AGAIN),
    ("a storage in another place", "storage: 3, name", "storage: 4, name",
     "expected 3, its place in the list, found 4 at storages[3].storage", 0, AGAIN),
    ("a word that would not end and turns the screen red", "kind: output", f'kind: "\\e[31m{"x" * 1000}"',
     "expected one of parameter, buffer, optimizer_state, gradient, batch, constant, activation, output, "
     f"found '\\x1b[31m{'x' * 55}…' at storages[7].kind", 0, AGAIN),
    ("a key like that", "peak_row: 10", f'peak_row: 10\n  "\\e[31m{"x" * 100}": 1',
     f"unknown key at promise.\\x1b[31m{'x' * 55}…", 1, "remove it, or compile the plan again"),
    ("an anchor", "shape: [50]}", "shape: &s [50]}",
     "anchor &s is not allowed", 0, "write the value out"),
    ("an alias", "shape: [50]}", "shape: *s}",
     "alias *s is not allowed", 0, "write the value out"),
    ("a Python object", "device: cpu", "device: !!python/object/apply:os.system [ls]",
     "tag tag:yaml.org,2002:python/object/apply:os.system is not allowed", 0,
     "a plan holds text, whole numbers, true and false only"),
    ("a merge key", "peak_row: 10", "<<: {}\n  peak_row: 10",
     "expected a key, found merge key", 0, "keys are words"),
    ("a number as key", "peak_row: 10", "10: peak_row",
     "expected a key, found int", 0, "keys are words"),
    ("a list as key", "peak_row: 10", "? [peak_row]\n  : 10",
     "expected a key, found list", 0, "keys are words"),
    ("deep nesting", "shape: [50]}", f"shape: {'[' * 50}{']' * 50}}}",
     "nested deeper than 8 levels", 0, "a plan nests five levels"),
    ("a second document", "events:", "---\nevents:",
     "a second document starts", 0, "one file holds one plan"),
    ("a bell", "device: cpu", "device: \acpu",
     "character U+0007 is not allowed", 0, "remove it"),
    ("a tab", "  peak_row: 10", "\tpeak_row: 10",
     "not valid YAML: found character that cannot start any token", 0, AGAIN),
    ("a line torn in half", "start: 2, free: 6, begin_us: 2, end_us: 4}", "start: 2",
     "not valid YAML: did not find expected ',' or '}'", 1, AGAIN),
    ("a newer format", 'tensile: "1.0"', 'tensile: "2.0"',
     f"plan format 2.0, but this tensile {__version__} reads 1.x at tensile", 0,
     "use a tensile that reads format 2.x, or compile the plan again with this one"),
    ("no version", 'tensile: "1.0"', 'tensile: "one"',
     "expected a version such as 1.0, found 'one' at tensile", 0, AGAIN),
    ("a version that is a number", 'tensile: "1.0"', "tensile: 1.0",
     "expected str, found float at tensile", 0, "put text in quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "what", "below", "hint"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_file_names_the_key_the_line_and_the_remedy(old: str, new: str, what: str, below: int, hint: str) -> None:
    assert old in SWAP, "the table fits the example"
    line = SWAP.count("\n", 0, SWAP.index(old)) + 1 + below
    with pytest.raises(PlanFileError) as caught:
        codec.loads(SWAP.replace(old, new, 1), name="swap.yaml")
    assert str(caught.value) == f"error: {what}\n  at swap.yaml:{line}\nhelp: {hint}"


CUT = "the file is cut short: its last line is not ..."
WHOLE: list[tuple[str, str, str, str]] = [
    ("empty", "", "the file is empty", WROTE),
    ("blank", "\n \n", "the file is empty", WROTE),
    ("another kind of file", "name: ci\non: push\n", "not a plan: the first key is not tensile", WROTE),
    ("JSON", '{"tensile": "1.0"}', "not a plan: the first key is not tensile", WROTE),
    ("a list", "- tensile: 1\n...\n", "not a plan: the first key is not tensile", WROTE),
    ("keys in another order", "notes: []\n" + SWAP, "not a plan: the first key is not tensile", WROTE),
    (
        "cut short between lines",
        SWAP[: SWAP.index("events:")],
        "the file is cut short: its last line is not ...",
        AGAIN,
    ),
    ("cut short in a line", SWAP[:-100], "the file is cut short: its last line is not ...", AGAIN),
]


@pytest.mark.parametrize(("text", "what", "hint"), [row[1:] for row in WHOLE], ids=[row[0] for row in WHOLE])
def test_what_is_not_a_whole_plan_is_refused(text: str, what: str, hint: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        codec.loads(text, name="p.yaml")
    assert str(caught.value) == f"error: {what}\n  at p.yaml\nhelp: {hint}"


def test_a_top_level_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(PlanFileError, match="expected mapping, found str"):
        codec.loads("tensile:1\n...\n")


def test_an_unknown_key_of_a_newer_minor_version_asks_for_an_upgrade() -> None:
    text = SWAP.replace('"1.0"', '"1.3"')
    assert codec.loads(text) == codec.loads(SWAP), "what is known is read"
    with pytest.raises(PlanFileError) as caught:
        codec.loads(text.replace("peak_row: 10", "peak_row: 10\n  energy_j: 3"), name="p.yaml")
    assert str(caught.value) == (
        "error: unknown key at promise.energy_j\n  at p.yaml:15\n"
        f"help: a newer tensile wrote this plan: upgrade from {__version__}"
    )


@given(st.integers(0, len(SWAP) - 5))
@settings(max_examples=200, deadline=None)
def test_a_file_cut_anywhere_is_never_taken_for_a_plan(length: int) -> None:
    with pytest.raises(PlanFileError):
        codec.loads(SWAP[:length])


@given(st.integers(0, len(SWAP) - 1), st.text(st.characters(codec="utf-8"), max_size=3), st.integers(0, 5))
@settings(max_examples=400, deadline=None)
def test_a_damaged_file_is_a_plan_or_an_error_for_the_user(at: int, new: str, drop: int) -> None:
    complaint = None
    try:
        codec.loads(SWAP[:at] + new + SWAP[at + drop :])
    except PlanFileError as error:
        complaint = error
    assert complaint is None or (complaint.what and complaint.where and complaint.hint)


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    bomb = 'tensile: "1.0"\na0: &a0 [x, x]\n'
    bomb += "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)) + "...\n"
    with pytest.raises(PlanFileError, match="anchor &a0 is not allowed"):
        codec.loads(bomb)


def test_a_million_open_brackets_are_refused_without_a_crash() -> None:
    with pytest.raises(PlanFileError, match=r"nested deeper than 8 levels|exceeded maximum nesting depth"):
        codec.loads('tensile: "1.0"\nx: ' + "[" * 1_000_000 + "\n...\n")


def test_the_python_parser_reads_the_same_where_libyaml_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_LOADER", yaml.SafeLoader)
    assert codec.loads(SWAP) == codec.read(SCHEDULES / "swap.yaml")
