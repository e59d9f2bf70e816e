"""Imports point one way: cli -> runtime -> compiler -> schedules; and the plan needs no torch to be judged."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensile

ROOT = Path(tensile.__file__).resolve().parent
ROOMS = ("schedules", "compiler", "runtime")  # from the ground up
FILES = sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))
MODULES = {".".join(("tensile", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES}
PLANNERS = {"bound", "emit", "eager", "expand", "frontier", "frontier_plot", "greedy", "improve", "measure",
            "occupancy", "order", "pipeline", "problem", "search", "simulate", "solution", "solve",
            "terrain"}  # fmt: skip


def imports(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Every module a file imports, also inside functions unless `at_import_only`; names of `from x import y` as x.y."""
    tree = ast.parse(path.read_text())
    nodes = list(tree.body) if at_import_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    """The room a module name points into; None for what is not ours, "top" for tensile itself and the cli."""
    parts = module.split(".")
    if parts[0] != "tensile":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "top"


def outsiders(path: Path) -> set[str]:
    """Top-level packages a file imports that are neither ours nor the standard library's."""
    names = {module.partition(".")[0] for module in imports(path)}
    return names - set(sys.stdlib_module_names) - {"tensile"}


def test_there_are_modules_to_look_at() -> None:
    assert {"tensile.schedules.plan", "tensile.compiler.graph", "tensile.runtime.replay"} <= set(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    own = ROOMS.index(str(room_of(name)))
    allowed = {*ROOMS[: own + 1]}
    wrong = {
        module
        for module in imports(MODULES[name])
        if (room := room_of(module)) is not None and room not in allowed and module != "tensile._version.__version__"
    }
    assert not wrong, f"{name} must not import {wrong}"


def test_the_test_sees_an_arrow_that_points_up(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from tensile.runtime.lanes import CpuLane\n")
    assert [room_of(module) for module in imports(bad)] == ["runtime"]


def test_the_runtime_sees_the_compilers_front_end_only() -> None:
    for name, path in MODULES.items():
        if room_of(name) == "runtime":
            seen = {
                part for module in imports(path) if room_of(module) == "compiler" for part in module.split(".")[2:3]
            }
            assert not seen & PLANNERS, f"{name} must not import the planner: {seen & PLANNERS}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    arrows = {
        name: {other for module in imports(path, at_import_only=True) for other in (module, module.rpartition(".")[0])}
        & set(MODULES) - {name}
        for name, path in MODULES.items()
    }
    while arrows:
        leaves = [name for name, targets in arrows.items() if not targets & set(arrows)]
        assert leaves, f"a circle among {sorted(arrows)}"
        for name in leaves:
            del arrows[name]


def test_the_schedules_need_pyyaml_only() -> None:
    used = {name: outsiders(path) for name, path in MODULES.items() if room_of(name) == "schedules"}
    assert {name: names for name, names in used.items() if names} == {"tensile.schedules.document": {"yaml"}}


@pytest.mark.parametrize(
    ("library", "homes"),
    [("yaml", {"schedules/document.py"}), ("click", {"cli.py"}), ("rich", {"cli.py"})],
)
def test_a_library_has_one_home(library: str, homes: set[str]) -> None:
    files = [*FILES, *ROOT.glob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if library in outsiders(path)} == homes


HEAVY = "sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'ortools', 'networkx', 'numpy'})"


@pytest.mark.parametrize(
    "code",
    [
        "import tensile",
        "import tensile.schedules",
        *sorted(f"import {name}" for name in MODULES if room_of(name) == "schedules"),
        "from tensile import cli",
    ],
)
def test_importing_loads_neither_torch_nor_a_solver(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print({HEAVY})"], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "arguments", [("inspect", "PLAN"), ("inspect", "PLAN", "--json"), ("check", "PLAN", "--max-peak", "8GiB")]
)
def test_a_plan_is_inspected_and_checked_without_torch_or_a_solver(arguments: tuple[str, ...]) -> None:
    plan = str(ROOT / "schedules" / "swap.yaml")
    words = ["tensile", *(plan if word == "PLAN" else word for word in arguments)]
    code = (
        f"import sys; sys.argv = {words!r}; from tensile.cli import main\n"
        "try: main()\n"
        f"except SystemExit as done: print('exit', done.code, {HEAVY}, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == "exit 0 []\n"
    assert result.stdout
