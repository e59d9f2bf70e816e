"""Odd model files: each is planned and trains as eager does, or is refused in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensile.cli import main

MODEL = """
import os, sys
import torch
import tensile
from torch import nn

F = nn.functional


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def job(step, model=None, optimizer=None, batch=None):
    model = model or net()
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    batch = (torch.randn(256, 64), torch.randn(256, 64)) if batch is None else batch
    return lambda: tensile.Workload(model, optimizer, step, batch)


def loss_of(model, x, y):
    return F.mse_loss(model(x), y)


def begins_with_zero_grad(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


def zero_grad_in_the_middle(model, optimizer, x, y):
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def zeroes_in_place(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def prints(model, optimizer, x, y):
    loss = begins_with_zero_grad(model, optimizer, x, y)
    print("loss", loss.shape)
    return loss


def draws_its_own_batch(model, optimizer):
    return begins_with_zero_grad(model, optimizer, torch.randn(256, 64), torch.zeros(256, 64))


def returns_activations(model, optimizer, x, y):
    optimizer.zero_grad()
    hidden = model[1](model[0](x))
    loss = F.mse_loss(model[2](hidden), y)
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), "hidden": hidden.detach()}


def without_backward(model, optimizer, x, y):
    with torch.no_grad():
        return loss_of(model, x, y)


class Lone(nn.Module):
    def forward(self, x):
        return x * 2


def steps_the_optimizers_own(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x) + optimizer.param_groups[0]["params"][0], y)
    loss.backward()
    optimizer.step()
    return loss


def lone_tensor():
    weight = torch.zeros(64, requires_grad=True)
    return job(steps_the_optimizers_own, Lone(), torch.optim.SGD([weight], lr=0.1))()


keeps = job(begins_with_zero_grad)
middle = job(zero_grad_in_the_middle)
in_place = job(zeroes_in_place)
printing = job(prints)
no_batch = job(draws_its_own_batch, batch=())
activations = job(returns_activations)
forward_only = job(without_backward)


def exits():
    sys.exit(3)


def exits_in_step():
    return job(lambda model, optimizer, x, y: sys.exit(3))()


def frozen():
    return job(begins_with_zero_grad, net().requires_grad_(False), None)()


def lbfgs():
    model = net()
    return job(begins_with_zero_grad, model, torch.optim.LBFGS(model.parameters()))()


def raising():
    def step(model, optimizer, x, y):
        raise KeyError("no such column")

    return job(step)()


def wrong_shape():
    return job(begins_with_zero_grad, batch=(torch.randn(256, 63), torch.randn(256, 64)))()


def wrong_arguments():
    return job(begins_with_zero_grad, batch=(torch.randn(256, 64),))()


def meta():
    with torch.device("meta"):
        return job(begins_with_zero_grad)()


def no_batch_tuple():
    return tensile.Workload(net(), torch.optim.SGD(net().parameters()), begins_with_zero_grad, torch.randn(2))


def stranger():
    other = torch.randn(256, 64)
    return job(lambda model, optimizer, x, y: begins_with_zero_grad(model, optimizer, other, y))()


def exits_at_once():
    os.environ["TENSILE_TEST"] = "1"
    raise SystemExit("no data today")
"""

PLANNED = (
    "keeps", "middle", "in_place", "printing", "no_batch", "activations", "forward_only", "lone_tensor",
)  # fmt: skip
REFUSED = {
    "exits": ["exits() in hostile.py raised: SystemExit: 3", "hostile.py:1", "sys.exit(3)"],
    "exits_at_once": ["SystemExit: no data today", "hostile.py:1"],
    "exits_in_step": ["TS111", "SystemExit", "hostile.py:1", "take the call of sys.exit() out of step_fn"],
    "frozen": ["TS111", "hostile.py:", "requires a gradient"],
    "lbfgs": ["TS111", "hostile.py:", "closure"],
    "raising": ["TS111", "KeyError", "no such column", "hostile.py:"],
    "wrong_shape": ["TS111", "hostile.py:", "63"],
    "wrong_arguments": ["TS111", "missing 1 required positional argument: 'y'"],
    "meta": ["meta device", "0.weight"],
    "no_batch_tuple": ["batch is Tensor"],
    "stranger": ["TS103", "hostile.py:"],
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(MODEL)
    return path


def tensile_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("name", PLANNED)
def test_an_odd_step_is_planned_and_trains_as_eager_does(file: Path, tmp_path: Path, name: str, budget: str) -> None:
    model, plan = f"{file}:{name}", tmp_path / "plan.yaml"
    done = tensile_cli("compile", model, "--budget", budget, "-o", plan, "--no-cache", "--repeats", 1,
                       "--time-limit", 0.1, "--json", "-q")  # fmt: skip
    assert done.exit_code == 0, done.output
    verified = tensile_cli("verify", model, plan, "--json", "-q")
    assert verified.exit_code == 0, verified.output
    result = json.loads(verified.stdout[verified.stdout.index("{") :])
    assert result["ok"]
    assert 0 < result["planned_peak_bytes"] <= json.loads(done.stdout[done.stdout.index("{") :])["peak_bytes"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_planned_is_refused_in_plain_words(file: Path, tmp_path: Path, name: str) -> None:
    plan = tmp_path / "plan.yaml"
    done = tensile_cli("compile", f"{file}:{name}", "-o", plan, "--no-cache", "-q")
    assert done.exit_code == 1, done.output
    assert all(word in done.stderr for word in REFUSED[name]), done.stderr
    assert "Traceback" not in done.output
    assert not plan.exists()
