"""The command line: arguments in, exit code out; the only module that prints.

stdout is the answer, stderr the progress. Exit codes: 0 done, 1 the input or the plan is at fault, 2 usage.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tensile._version import __version__
from tensile.schedules import codec, render
from tensile.schedules.check import check as referee
from tensile.schedules.errors import TensileError
from tensile.schedules.units import format_bytes, format_us, parse_bytes

if TYPE_CHECKING:
    from tensile.compiler.frontier import Frontier
    from tensile.schedules.plan import Plan

_F = TypeVar("_F", bound=Callable[..., Any])


def _plan_argument(function: _F) -> _F:
    return click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))(function)


def _json_option(function: _F) -> _F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


class _Commands(click.Group):
    """Turns every TensileError into its three lines on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TensileError as error:
            click.echo(str(error), err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tensile")
def main() -> None:
    """Fit a PyTorch training step into a memory budget: plan offline, replay bit for bit."""


@main.command("compile")
@click.argument("model", metavar="MODEL.py[:NAME]")
@click.option("--budget", metavar="SIZE|PERCENT|min",
              help="Device memory the step may use: 8GiB, 60% of the eager peak, or min.  [default: 100%]")  # fmt: skip
@click.option("--max-overhead", metavar="PERCENT",
              help="Instead of --budget: the least memory for at most this much more time.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
              help="Plan file to write. [default: MODEL.plan.yaml in this folder]")  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Where measured op and copy times are kept. [default: the user's cache folder]")  # fmt: skip
@click.option("--no-cache", is_flag=True, help="Measure every op and the link anew.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Measurements an op.")
@click.option("--margin", default=85, show_default=True, metavar="PERCENT", type=click.IntRange(1, 100),
              help="Plan copies at this share of the measured bandwidth.")  # fmt: skip
@click.option("--time-limit", default=10.0, show_default=True, metavar="SECONDS", type=click.FloatRange(0),
              help="Of the search for a faster plan; 0 takes the first one.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of the search.")
@click.option("--spill-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Folder whose disk is measured as the link. [default: the temporary folder]")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@_json_option
def compile_command(
    model: str, budget: str | None, max_overhead: str | None, output: Path | None, cache_dir: Path | None,
    no_cache: bool, repeats: int, margin: int,
    time_limit: float, seed: int, spill_dir: Path | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Trace and measure the training step of MODEL.py, plan it for a budget, write the plan.

    MODEL.py holds a function `workload()` (or NAME) that returns a tensile.Workload.

    \b
    Example:
      tensile compile examples/gpt2.py --budget 60% -o gpt2.plan.yaml
    """
    from tensile.compiler.budget import parse_budget, parse_overhead
    from tensile.compiler.load import load_workload
    from tensile.compiler.pipeline import plan_profiled, profile_workload
    from tensile.compiler.profile_cache import default_cache_dir
    from tensile.compiler.solve import Effort
    from tensile.runtime.bind import device_of
    from tensile.runtime.link import link_of

    if budget is not None and max_overhead is not None:
        raise click.UsageError("--budget and --max-overhead exclude each other")
    wanted = parse_budget("100%" if budget is None else budget)
    if max_overhead is not None:
        wanted = parse_overhead(max_overhead)
    path = output or Path(Path(model.partition(":")[0]).stem + ".plan.yaml")
    _require_writable(path)
    with _progress(quiet) as progress:
        progress.stage("load")
        workload = load_workload(model)
        progress.stage("link")
        cache = None if no_cache else (cache_dir or default_cache_dir())
        link = link_of(device_of(workload.model), spill_dir, cache)
        captured, profile = profile_workload(workload, link=link, cache_dir=cache, repeats=repeats, progress=progress)
        plan = plan_profiled(
            captured.graph, profile, name=workload.name, budget=wanted, margin_percent=margin,
            effort=Effort(seconds=time_limit, seed=seed), progress=progress,
        )  # fmt: skip
        progress.stage("write")
        codec.save(plan, path)
    if as_json:
        _echo_json({"plan": str(path), **render.inspect_json(plan)["promise"]})
    else:
        click.echo(_promise_text(plan, path))


@main.command("frontier")
@click.argument("model", metavar="MODEL.py[:NAME]")
@click.option("--points", default=12, show_default=True, type=click.IntRange(2, 100), help="Budgets to plan for.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False),
              help="Draw the curve: .png or .svg (needs matplotlib), .html (needs plotly).")  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Where measured op and copy times are kept. [default: the user's cache folder]")  # fmt: skip
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Measurements an op.")
@click.option("--time-limit", default=2.0, show_default=True, metavar="SECONDS", type=click.FloatRange(0),
              help="Of the search for a faster plan, at every budget.")  # fmt: skip
@click.option("--spill-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Folder whose disk is measured as the link. [default: the temporary folder]")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@_json_option
def frontier_command(
    model: str, points: int, plot: Path | None, cache_dir: Path | None, repeats: int, time_limit: float,
    spill_dir: Path | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """How much time each budget costs MODEL.py's step, and how much it must cost at least.

    \b
    Example:
      tensile frontier examples/gpt2.py --plot curve.html
    """
    from tensile.compiler.frontier_plot import check_plot, draw
    from tensile.compiler.load import load_workload
    from tensile.compiler.pipeline import frontier_profiled, profile_workload
    from tensile.compiler.profile_cache import default_cache_dir
    from tensile.compiler.solve import Effort
    from tensile.runtime.bind import device_of
    from tensile.runtime.link import link_of

    if plot is not None:
        check_plot(plot)
        _require_writable(plot)
    with _progress(quiet) as progress:
        progress.stage("load")
        workload = load_workload(model)
        progress.stage("link")
        cache = cache_dir or default_cache_dir()
        link = link_of(device_of(workload.model), spill_dir, cache)
        captured, profile = profile_workload(workload, link=link, cache_dir=cache, repeats=repeats, progress=progress)
        curve = frontier_profiled(
            captured.graph, profile, points=points, effort=Effort(seconds=time_limit, rounds=60), progress=progress
        )
    if plot is not None:
        draw(curve, workload.name, profile.eager_peak_bytes, plot)
    if as_json:
        _echo_json({
            "workload": workload.name, "eager_peak_bytes": profile.eager_peak_bytes,
            "ops_us": curve.plain_ns // 1000, "points": [point.to_json(curve.plain_ns) for point in curve.points],
        })  # fmt: skip
    else:
        click.echo(_frontier_text(curve, profile.eager_peak_bytes))
        if plot is not None:
            click.echo(f"wrote {plot}")


@main.command("inspect")
@_plan_argument
@click.option("--op", "pattern", metavar="PATTERN", help="Show only rows whose call or module matches (glob).")
@_json_option
def inspect_command(plan_path: Path, pattern: str | None, as_json: bool) -> None:
    """Say what a plan promises and what it does.

    \b
    Example:
      tensile inspect gpt2.plan.yaml --op '*attn*'
    """
    plan = codec.read(plan_path)
    if as_json:
        _echo_json(render.inspect_json(plan, pattern=pattern))
    else:
        click.echo(render.inspect_text(plan, width=Console().width, pattern=pattern))


@main.command("check")
@_plan_argument
@click.option("--max-peak", metavar="SIZE", help="Fail when the planned peak is above SIZE, e.g. 8GiB.")
@_json_option
def check_command(plan_path: Path, max_peak: str | None, as_json: bool) -> None:
    """Judge a plan: consistent, within its own budget, and within --max-peak. Needs neither torch nor a device.

    \b
    Example:
      tensile check gpt2.plan.yaml --max-peak 8GiB
    """
    limit = parse_bytes(max_peak) if max_peak is not None else None
    plan = codec.read(plan_path)
    findings = list(referee(plan))
    if limit is not None and (over := render.gate(plan, limit)) is not None:
        findings.append(over)
    if as_json:
        _echo_json({
            "ok": not findings, "peak_bytes": plan.promise.peak_bytes, "max_peak_bytes": limit,
            "findings": [{"rule": f.rule, "where": f.where, "message": f.message} for f in findings],
        })  # fmt: skip
    else:
        for finding in findings:
            click.echo(f"{finding.rule}: {finding.message}\n  at {finding.where}")
        verdict = f"{len(findings)} finding{'s' if len(findings) != 1 else ''}" if findings else "ok"
        allowed = f", allowed {format_bytes(limit)}" if limit is not None else ""
        click.echo(f"{verdict}: planned peak {format_bytes(plan.promise.peak_bytes)}{allowed}")
    if findings:
        sys.exit(1)


@main.command("verify")
@click.argument("model", metavar="MODEL.py[:NAME]")
@_plan_argument
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=3), help="Training steps to compare.")
@click.option("--spill-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder for swapped-out tensors.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@_json_option
def verify_command(model: str, plan_path: Path, steps: int, spill_dir: Path | None, quiet: bool, as_json: bool) -> None:
    """Run eager and planned steps from one snapshot and compare every bit, the peaks and the times.

    \b
    Example:
      tensile verify examples/gpt2.py gpt2.plan.yaml
    """
    from tensile.compiler.load import load_workload
    from tensile.runtime.verify import verify

    plan = codec.read(plan_path)
    with _progress(quiet) as progress:
        progress.stage("load")
        workload = load_workload(model)
        progress.stage("run eager and planned")
        result = verify(workload, plan, steps=steps, spill_dir=spill_dir)
    if as_json:
        _echo_json(result.as_dict())
    else:
        click.echo(str(result))
    if not result.ok:
        sys.exit(1)


def _promise_text(plan: Plan, path: Path) -> str:
    promise = plan.promise
    ran = {row.op: row.time_ns for row in plan.rows}
    overhead = 1000 * promise.step_us / max(1, sum(ran.values())) - 1
    share = promise.peak_bytes / promise.eager_peak_bytes if promise.eager_peak_bytes else 0.0
    return "\n".join([
        f"wrote {path}",
        f"peak   {format_bytes(promise.peak_bytes)} of {format_bytes(promise.budget_bytes)} budget, "
        f"{share:.0%} of eager's {format_bytes(promise.eager_peak_bytes)} ({promise.eager_peak_source})",
        f"step   {format_us(promise.step_us)} expected, {overhead:+.1%} for swaps and recomputes; "
        f"eager {format_us(promise.eager_step_us)} ({promise.eager_step_source})",
        *plan.notes,
    ])  # fmt: skip


def _frontier_text(curve: Frontier, eager_peak_bytes: int) -> str:
    rows = [("budget", "of eager", "step", "overhead", "at least")]
    for point in curve.points:
        rows.append((
            format_bytes(point.budget_bytes), f"{point.budget_bytes / max(1, eager_peak_bytes):.0%}",
            format_us(point.step_ns // 1000), f"{point.step_ns / max(1, curve.plain_ns) - 1:+.2%}",
            f"{point.bound_ns / max(1, curve.plain_ns) - 1:+.2%}",
        ))  # fmt: skip
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _require_writable(path: Path) -> None:
    """Refuse an output path before minutes of work, not after."""
    folder = path.parent
    if not folder.is_dir():
        raise TensileError(f"the folder of {path} does not exist", hint=f"mkdir -p {folder}")
    try:
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise PermissionError(None, "not a file that can be replaced")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise TensileError(f"cannot write {path}: {error.strerror}", hint="choose another file") from error


def _echo_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


class _RichProgress:
    """Stages as lines that stay, ticks as one bar; on a terminal only."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, detail="")

    def stage(self, text: str) -> None:
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=None, detail="")

    def tick(self, done: int, total: int, text: str) -> None:
        self._bar.update(self._task, completed=done, total=total or None, detail=text)


class _PlainProgress:
    """One line a stage, for logs."""

    def stage(self, text: str) -> None:
        click.echo(f"tensile: {text}", err=True)

    def tick(self, done: int, total: int, text: str) -> None:
        pass


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    from tensile.compiler.pipeline import Silent

    console = Console(stderr=True)
    if quiet:
        yield Silent()
    elif not console.is_terminal:
        yield _PlainProgress()
    else:
        columns = (
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            yield _RichProgress(bar)


if __name__ == "__main__":
    main()
