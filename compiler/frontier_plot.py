"""The curve as a picture: memory against overhead, the plans and the bound below them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tensile.compiler.frontier import Frontier
from tensile.schedules.errors import TensileError

_LIBRARIES = {".html": "plotly", ".png": "matplotlib", ".svg": "matplotlib", ".pdf": "matplotlib"}
_GIB = 2.0**30


def check_plot(path: Path) -> None:
    """Raises TensileError when `path` cannot be drawn: an unknown ending, or its library is not installed."""
    library = _LIBRARIES.get(path.suffix)
    if library is None:
        raise TensileError(f"cannot draw {path}", hint=f"end the name in one of {', '.join(sorted(_LIBRARIES))}")
    if importlib.util.find_spec(library) is None:
        raise TensileError(f"drawing {path.suffix} needs {library}", hint=f"pip install {library}")


def draw(curve: Frontier, name: str, eager_peak_bytes: int, path: Path) -> None:
    """Write the picture; an HTML page opens without a network. Call `check_plot` first."""
    memory = [point.budget_bytes / _GIB for point in curve.points]
    plans = [100 * (point.step_ns / curve.plain_ns - 1) for point in curve.points]
    bounds = [100 * (point.bound_ns / curve.plain_ns - 1) for point in curve.points]
    if path.suffix == ".html":
        _draw_html(memory, plans, bounds, eager_peak_bytes / _GIB, name, path)
    else:
        _draw_image(memory, plans, bounds, eager_peak_bytes / _GIB, name, path)


def _draw_image(
    memory: list[float], plans: list[float], bounds: list[float], eager: float, name: str, path: Path
) -> None:  # fmt: skip
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(memory, plans, where="pre", marker="o", color="#4878a8", label="plan")
    axes.plot(memory, bounds, marker="_", linestyle=":", color="#b03a2e", label="bound: no plan is below")
    axes.axvline(eager, color="#888888", linestyle="--", label="eager's peak")
    axes.set(xlabel="budget, GiB", ylabel="overhead, % of the step", title=name)
    axes.legend(frameon=False)
    figure.savefig(path)


def _draw_html(
    memory: list[float], plans: list[float], bounds: list[float], eager: float, name: str, path: Path
) -> None:  # fmt: skip
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_scatter(x=memory, y=plans, name="plan", mode="lines+markers", line_shape="vh")
    figure.add_scatter(x=memory, y=bounds, name="bound: no plan is below", mode="lines+markers", line_dash="dot")
    figure.add_vline(x=eager, line_dash="dash", annotation_text="eager's peak")
    figure.update_layout(title=name, xaxis_title="budget, GiB", yaxis_title="overhead, % of the step")
    figure.write_html(path, include_plotlyjs=True)
