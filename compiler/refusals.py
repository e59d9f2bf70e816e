"""Why a step cannot be captured, by number, in the user's words and with the user's own line.

| code | the step ... |
|---|---|
| TS101 | branches on a tensor's value |
| TS102 | makes a tensor whose size depends on values |
| TS103 | uses a tensor that is neither parameter, buffer, optimizer state nor batch |
| TS104 | calls a custom op without a fake implementation |
| TS105 | leaves torch (`.numpy()` and the like) |
| TS106 | calls a compiled function |
| TS107 | bakes a hyper-parameter into the trace |
| TS108 | is not the same twice (Python randomness, counters) |
| TS109 | runs in a distributed wrapper (DDP, FSDP) |
| TS110 | makes sparse gradients |
| TS111 | raises an error of its own |
| TS112 | passes on a structure of tensors whole |
| TS113 | changes state inside a checkpointed region, which eager runs twice |
| TS114 | draws random numbers in a checkpointed region that does not keep the generator |
| TS115 | leaves a gradient on a tensor of the batch |
| TS116 | returns an object a plan cannot fill in |
| TS117 | uses a GradScaler |
| TS118 | uses a parameter in a re-entrant checkpoint and elsewhere |
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from tensile.compiler.provenance import user_line
from tensile.compiler.record import is_users
from tensile.schedules.errors import CaptureError

_TRANSLATIONS = (
    (
        ("GuardOnDataDependentSymNode", "DataDependentOutputException", "Could not guard on data-dependent",
         "Could not extract specialized integer from data-dependent"),
        "TS101", "the step branches on a tensor's value",
        "replace the branch by torch.where, or move what needs the value (if, float(), print) out of step_fn",
    ),
    (
        ("DynamicOutputShapeException",),
        "TS102", "the step makes a tensor whose size depends on values",
        "use a mask or a fixed size instead of nonzero, unique or boolean indexing",
    ),
    (
        ("Please convert all Tensors to FakeTensors first", "Mixing fake modes"),
        "TS103", "the step uses a tensor that is neither parameter, buffer, optimizer state nor batch",
        "register it with register_buffer, or pass it in the batch",
    ),
    (
        ("UnsupportedOperatorException", "no fake impl", "register_fake", "no meta", "NotImplementedError: aten"),
        "TS104", "the step calls an op that has no fake implementation",
        "give it one with torch.library.register_fake",
    ),
    (
        (".numpy() is not supported", "numpy() is not supported", "Can't call numpy()"),
        "TS105", "the step leaves torch with .numpy()",
        "stay in torch inside step_fn, or do it outside",
    ),
    (
        ("SparseTensorImpl", "sparse layout"),
        "TS110", "the step makes sparse gradients", "pass sparse=False to the module",
    ),
    (
        ("FX to symbolically trace a dynamo-optimized function", "torch.compile"),
        "TS106", "the step calls a function compiled by torch.compile",
        "pass the uncompiled model; tensile plans the eager step",
    ),
)  # fmt: skip

_HINTS = (
    (("does not require grad and does not have a grad_fn",), "leave at least one parameter that requires a gradient"),
    (("step() missing 1 required positional argument: 'closure'",),
     "use an optimizer whose step() needs no closure, such as AdamW or SGD"),
    (("SystemExit",), "a step must return; take the call of sys.exit() out of step_fn"),
)  # fmt: skip
_HINT = "run the step eagerly once; if it works there, this op or model is not supported by the capture"


def refuse(code: str, what: str, *, hint: str, where: str | None = None) -> CaptureError:
    """The refusal `code`; raise what this returns."""
    return CaptureError(what, where=where, hint=hint, code=code)


def translated(error: BaseException, user_folder: str | None) -> CaptureError:
    """The refusal that an exception met while tracing stands for, with the user's own line."""
    if isinstance(error, CaptureError):
        error.where = error.where or _where(error, user_folder)
        return error
    text = f"{type(error).__name__}: {error}"
    where = _where(error, user_folder)
    for marks, code, what, hint in _TRANSLATIONS:
        if any(mark in text for mark in marks):
            if code == "TS101" and _in_optimizer(error):
                what = "the optimizer branches on a tensor's value"
                hint = "use an optimizer that computes on tensors only, such as AdamW, SGD or Muon"
            return refuse(code, what, where=where, hint=hint)
    lines = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    hint = next((hint for marks, hint in _HINTS if any(mark in text for mark in marks)), _HINT)
    return refuse("TS111", f"the step raises while it is traced: {summary}", where=where, hint=hint)


def _in_optimizer(error: BaseException) -> bool:
    """Whether the innermost code outside the rest of torch is an optimizer of torch."""
    home, torch_folder = str(Path(torch.optim.__file__).parent), str(Path(torch.__file__).parent)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    told = [file for file in files if file.startswith(home) or not file.startswith(torch_folder)]
    return bool(told) and told[-1].startswith(home)


def _where(error: BaseException, user_folder: str | None) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    told = [(frame.filename, frame.lineno or 0, frame.name) for frame in frames if is_users(frame.filename)]
    place = user_line(tuple(told), user_folder)
    for frame in reversed(frames):
        if place.startswith(f"{Path(frame.filename).name}:{frame.lineno} ") and frame.line:
            return f"{place}: {frame.line}"
    return place or None
