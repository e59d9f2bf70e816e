"""The command line: from a model file to a plan and back, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensile.cli import main
from tensile.runtime.link import link_of
from tensile.schedules import codec
from tensile.schedules.plan import SwapOut

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
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    return tensile.Workload(model, optimizer, train_step, (torch.randn(1024, 256), torch.randn(1024, 256)))


def wrong():
    return 3


def failing():
    raise ValueError("no data")


def printing():
    job = workload()

    def step(model, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        print(float(loss))
        return loss

    return tensile.Workload(job.model, job.optimizer, step, job.batch)
"""


def tensile_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model.py").write_text(MODEL)
    (folder / "syntax.py").write_text("def workload(:\n")
    (folder / "imports.py").write_text("import torch\nimport no_such_package\n")
    (folder / "empty.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def plan(folder: Path) -> Path:
    path = folder / "model.plan.yaml"
    done = tensile_cli("compile", folder / "model.py", "--budget", "80%", "-o", path, "--no-cache", "--repeats", 1)
    assert done.exit_code == 0, done.output
    assert f"wrote {path}" in done.stdout
    return path


def test_a_plan_is_written_inspected_checked_and_verified(folder: Path, plan: Path) -> None:
    shown = tensile_cli("inspect", plan)
    assert shown.exit_code == 0
    assert "peak" in shown.stdout
    promise = json.loads(tensile_cli("inspect", plan, "--json").stdout)["promise"]
    assert promise["peak_bytes"] <= promise["budget_bytes"] <= 0.81 * promise["eager_peak_bytes"]
    assert tensile_cli("check", plan).exit_code == 0
    verified = tensile_cli("verify", folder / "model.py", plan, "--json", "-q")
    assert verified.exit_code == 0, verified.output
    result = json.loads(verified.stdout)
    assert result["ok"]
    assert 0 < result["planned_peak_bytes"] <= promise["peak_bytes"]


def test_compiling_again_from_one_cache_gives_the_same_plan(folder: Path, tmp_path: Path) -> None:
    """All but what is measured each time: how long eager takes, and where the profile comes from."""
    texts = []
    for name in ("first", "a", "b"):
        done = tensile_cli("compile", folder / "model.py", "--budget", "75%", "-o", tmp_path / f"{name}.yaml",
                           "--cache-dir", tmp_path / "cache", "--repeats", 1, "--json", "-q")  # fmt: skip
        assert done.exit_code == 0, done.output
        json.loads(done.stdout)
        texts.append((tmp_path / f"{name}.yaml").read_text())
    plans = [codec.loads(text) for text in texts]
    assert any(isinstance(event, SwapOut) for event in plans[0].events)
    assert plans[0].rows == plans[1].rows
    assert plans[0].events == plans[1].events
    measured = ("eager_step_us:", "profile_source:")
    lines = [[line for line in text.splitlines() if not line.strip().startswith(measured)] for text in texts]
    assert lines[0] == lines[1] == lines[2]
    assert len(list((tmp_path / "cache").glob("link-*.json"))) == 1


def test_a_kept_link_that_cannot_be_read_is_measured_anew(tmp_path: Path) -> None:
    link = link_of("cpu", tmp_path, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob("link-*.json")
    assert link_of("cpu", tmp_path, tmp_path / "cache") == link
    for wrong in ("", "[]", "{}", json.dumps({**json.loads(kept.read_text()), "in_latency_us": -1})):
        kept.write_text(wrong)
        assert link_of("cpu", tmp_path, tmp_path / "cache").out_bytes_per_s > 0
        assert json.loads(kept.read_text())["in_latency_us"] >= 0


@pytest.mark.parametrize(("limit", "code"), [("1KiB", 1), ("100GiB", 0), ("many", 1)])
def test_check_is_a_gate(plan: Path, limit: str, code: int) -> None:
    done = tensile_cli("check", plan, "--max-peak", limit)
    assert done.exit_code == code
    assert done.output


MISTAKES = {
    "no such file": (["compile", "nowhere.py"], ["nowhere.py"]),
    "no function": (["compile", "empty.py"], ["empty.py", "workload"]),
    "another name": (["compile", "model.py:job"], ["job", "model.py"]),
    "wrong result": (["compile", "model.py:wrong"], ["Workload", "int", "model.py"]),
    "its own error": (["compile", "model.py:failing"], ["ValueError", "no data", "model.py:26"]),
    "syntax": (["compile", "syntax.py"], ["syntax.py:1"]),
    "import": (["compile", "imports.py"], ["imports.py:2", "no_such_package"]),
    "reads the loss": (["compile", "model.py:printing"], ["TS1", "model.py"]),
    "budget": (["compile", "model.py", "--budget", "much"], ["much"]),
    "empty budget": (["compile", "model.py", "--budget", ""], ["not a budget"]),
    "negative budget": (["compile", "model.py", "--budget", "-5%"], ["-5%"]),
    "infeasible": (["compile", "model.py", "--budget", "9KiB", "--repeats", "1"], ["smallest feasible", "aten"]),
    "output folder": (["compile", "model.py", "-o", "no/where/plan.yaml"], ["does not exist"]),
    "output device": (["compile", "model.py", "-o", "/dev/full"], ["/dev/full"]),
    "output in proc": (["compile", "model.py", "-o", "/proc/plan.yaml"], ["/proc/plan.yaml"]),
    "no plan": (["inspect", "nowhere.yaml"], ["nowhere.yaml"]),
    "not a plan": (["check", "model.py"], ["model.py"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_exits_1_and_says_what_and_where(folder: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.chdir(folder)
    arguments, words = MISTAKES[mistake]
    before = sorted(folder.iterdir())
    done = tensile_cli(*arguments)
    assert done.exit_code == 1, done.output
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.output
    assert sorted(p for p in folder.iterdir() if p.name != "__pycache__") == [
        p for p in before if p.name != "__pycache__"
    ]


def test_usage_errors_exit_2() -> None:
    assert tensile_cli("compile").exit_code == 2
    assert tensile_cli("nonsense").exit_code == 2


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_reading_a_plan_loads_neither_torch_nor_ortools(plan: Path, command: str) -> None:
    code = (
        "import sys; from tensile.cli import main\n"
        f"try: main([{command!r}, {str(plan)!r}])\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'ortools', 'numpy'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
