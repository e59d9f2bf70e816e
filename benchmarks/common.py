"""Tables on the screen, and the same numbers kept with command, versions and machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"


def record(name: str, rows: list[dict[str, Any]], command: str) -> None:
    """Print the rows as a table and store them as results/NAME.json."""
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=max(100, Console().width)).print(table)
    RESULTS.mkdir(exist_ok=True)
    data = {"command": command, "versions": _versions(), "machine": _machine(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")


def _versions() -> dict[str, str]:
    import torch

    import tensile

    return {"python": platform.python_version(), "torch": torch.__version__, "tensile": tensile.__version__}


def _machine() -> dict[str, Any]:
    from tensile.compiler.measure import device_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": sys.platform, "cpu": device_name("cpu"), "cores": os.cpu_count(), "memory_bytes": memory,
            "gpu": "none"}  # fmt: skip
