"""The memory/time curve: laws over generated problems, the command, the pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from referee import faults
from test_planner import plain_peak, problems

from tensile.cli import main
from tensile.compiler.frontier import Frontier, Point, frontier
from tensile.compiler.frontier_plot import check_plot, draw
from tensile.compiler.problem import Problem
from tensile.compiler.solve import Effort, least_peak, smallest_budget
from tensile.schedules.errors import TensileError

MODEL = """
import torch
import tensile


def train_step(model, optimizer, x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def workload():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return tensile.Workload(model, optimizer, train_step, (torch.randn(2048, 512), torch.randn(2048, 512)))
"""
CURVE = Frontier(
    points=(
        Point(budget_bytes=2**30, peak_bytes=2**30, step_ns=1000, bound_ns=1000.0, planner="order"),
        Point(budget_bytes=2**29, peak_bytes=2**29, step_ns=1200, bound_ns=1100.0, planner="greedy"),
    ),
    plain_ns=1000,
)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_less_memory_never_takes_less_time_and_no_point_is_below_its_bound(p: Problem) -> None:
    curve = frontier(p, points=5, effort=Effort(seconds=60, rounds=5))
    assert curve.points[0].budget_bytes == plain_peak(p)
    assert curve.points[0].step_ns == curve.plain_ns == sum(op.time_ns for op in p.ops)
    assert curve.points[-1].budget_bytes == min(smallest_budget(p), plain_peak(p))
    for point in curve.points:
        assert point.peak_bytes <= point.budget_bytes
        assert point.bound_ns <= point.step_ns * (1 + 1e-9)
    for more, less in pairwise(curve.points):
        assert more.budget_bytes >= less.budget_bytes
        assert more.step_ns <= less.step_ns
        assert more.bound_ns <= less.bound_ns


@settings(max_examples=25, deadline=None)
@given(problems())
def test_the_least_peak_within_an_overhead_keeps_to_it(p: Problem) -> None:
    free, some = (least_peak(p, percent).solution for percent in (0.0, 50.0))
    plain_ns = sum(op.time_ns for op in p.ops)
    assert free.step_ns == plain_ns
    assert some.step_ns <= 1.5 * plain_ns
    assert some.peak_bytes <= plain_peak(p)
    assert faults(replace(p, budget_bytes=some.peak_bytes), some) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("frontier") / "model.py"
    file.write_text(MODEL)
    return file


def test_the_command_prints_the_curve_and_draws_it(model: Path) -> None:
    picture = model.with_suffix(".html")
    command = ["frontier", str(model), "--points", "4", "--repeats", "1", "--json", "--plot", str(picture)]
    done = CliRunner().invoke(main, [*command, "--cache-dir", str(model.parent / "cache")])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [point["budget_bytes"] for point in answer["points"]] == sorted(
        (point["budget_bytes"] for point in answer["points"]), reverse=True
    )
    assert answer["points"][0]["overhead"] == 0
    assert answer["points"][-1]["budget_bytes"] < 0.7 * answer["eager_peak_bytes"]
    assert "plotly" in picture.read_text()


def test_a_compile_within_an_overhead_says_so_and_fits(model: Path) -> None:
    output = model.with_suffix(".yaml")
    done = CliRunner().invoke(
        main, ["compile", str(model), "--max-overhead", "10%", "-o", str(output), "--json", "--repeats", "1",
               "--cache-dir", str(model.parent / "cache"), "--time-limit", "1"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    promise = json.loads(done.stdout)
    assert promise["peak_bytes"] == promise["budget_bytes"] < promise["eager_peak_bytes"]


def test_a_budget_and_an_overhead_exclude_each_other(model: Path) -> None:
    done = CliRunner().invoke(main, ["compile", str(model), "--max-overhead", "10%", "--budget", "60%"])
    assert done.exit_code == 2
    assert "--budget and --max-overhead exclude each other" in done.output


@pytest.mark.parametrize("text", ["", "5", "five %", "-1%", "1001%"])
def test_an_overhead_that_is_none_is_refused(model: Path, text: str) -> None:
    done = CliRunner().invoke(main, ["compile", str(model), "--max-overhead", text])
    assert done.exit_code == 1
    assert f"not an overhead: {text!r}" in done.stderr


@pytest.mark.parametrize(("ending", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".html", b"<!doctype html>")])
def test_every_kind_of_picture_is_written(tmp_path: Path, ending: str, start: bytes) -> None:
    path = tmp_path / f"curve{ending}"
    check_plot(path)
    draw(CURVE, "model.py:workload", 2**30, path)
    assert path.read_bytes().startswith(start)


def test_a_picture_of_no_known_kind_is_refused_before_the_work() -> None:
    with pytest.raises(TensileError) as caught:
        check_plot(Path("curve.doc"))
    assert str(caught.value) == (
        "error: cannot draw curve.doc\nhelp: end the name in one of .html, .pdf, .png, .svg"
    )  # fmt: skip
