"""From "model.py[:name]" to the Workload its function returns, with errors that name the user's own line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from tensile.compiler.workload import Workload
from tensile.schedules.errors import ModelFileError, TensileError

DEFAULT_NAME = "workload"


def load_workload(spec: str) -> Workload:
    """Import the file and call its function. Its folder is importable meanwhile, as when the file is run.

    Raises ModelFileError, naming the file, the line and the remedy, when the file cannot be imported, has no such
    function, or the function raises or returns anything but a Workload.
    """
    file, name = split_spec(spec)
    module = _imported(file)
    function = getattr(module, name, None)
    if function is None:
        offered = [
            n for n, f in vars(module).items() if callable(f) and getattr(f, "__module__", "") == module.__name__
        ]
        raise ModelFileError(
            f"{file.name} has no function {name}()", where=str(file),
            hint=f"define {name}() returning tensile.Workload(model, optimizer, step_fn, batch)"
            + (f", or name another: {file.name}:{offered[0]}" if offered else ""),
        )  # fmt: skip
    if not callable(function):
        raise ModelFileError(
            f"{name} in {file.name} is {type(function).__name__}, not a function", where=str(file),
            hint=f"define {name}() returning tensile.Workload(model, optimizer, step_fn, batch)",
        )  # fmt: skip
    with _folder_importable(file):
        try:
            workload = function()
        except TensileError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(f"{name}() in {file.name} raised", file, error) from error
    _require_workload(workload, file, name)
    return Workload(workload.model, workload.optimizer, workload.step_fn, workload.batch, name=f"{file.name}:{name}")


def split_spec(spec: str) -> tuple[Path, str]:
    """("model.py", "name") of "model.py:name"; the default name where none is given."""
    file, separator, name = spec.rpartition(":")
    if not separator or not name.isidentifier():
        file, name = spec, DEFAULT_NAME
    return Path(file), name


def _imported(file: Path) -> ModuleType:
    if not file.is_file():
        raise ModelFileError(f"there is no model file {file}", hint="give the path of a Python file: model.py[:name]")
    module_name = f"tensile_model_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    if spec is None or spec.loader is None:
        raise ModelFileError(f"{file} is not a Python file", hint="give the path of a Python file: model.py[:name]")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    with _folder_importable(file):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise _failed(f"{file.name} cannot be imported", file, error) from error
    return module


@contextmanager
def _folder_importable(file: Path) -> Iterator[None]:
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _failed(what: str, file: Path, error: BaseException) -> ModelFileError:
    own = str(file.resolve())
    if isinstance(error, SyntaxError) and error.filename == own:
        where = f"{file}:{error.lineno}: {(error.text or '').strip()}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == own]
        where = f"{file}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(file)
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = f"python {file} shows the whole traceback"
    if isinstance(error, ModuleNotFoundError):
        hint = f"install {error.name} in this environment"
    return ModelFileError(f"{what}: {summary}", where=where, hint=hint)


def _require_workload(workload: object, file: Path, name: str) -> None:
    if not isinstance(workload, Workload):
        raise ModelFileError(
            f"{name}() in {file.name} returned {type(workload).__name__}", where=str(file),
            hint="return tensile.Workload(model, optimizer, step_fn, batch)",
        )  # fmt: skip
    expected = (
        ("model", workload.model, torch.nn.Module, "a torch.nn.Module"),
        ("optimizer", workload.optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer"),
        ("batch", workload.batch, (tuple, list), "a tuple or list of arguments"),
    )
    for field, value, kind, text in expected:
        if not isinstance(value, kind):
            raise ModelFileError(
                f"the workload's {field} is {type(value).__name__}, not {text}", where=f"{file}, {name}()",
                hint="tensile.Workload(model, optimizer, step_fn, batch); step_fn(model, optimizer, *batch)",
            )  # fmt: skip
    if not callable(workload.step_fn):
        raise ModelFileError(
            f"the workload's step_fn is {type(workload.step_fn).__name__}, not a function", where=f"{file}, {name}()",
            hint="step_fn(model, optimizer, *batch) runs forward, loss, backward and optimizer.step()",
        )  # fmt: skip
