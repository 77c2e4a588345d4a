"""What every result file begins with."""

from __future__ import annotations

import datetime
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def results_head(module: str, packages: tuple[str, ...], paths: tuple[Path | None, ...] = ()) -> dict[str, Any]:
    """Date, machine, versions and command of a bench; of ``paths`` on the command line only the names are kept."""
    names = {str(path): path.name for path in paths if path is not None}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "command": " ".join([f"python -m {module}", *(names.get(arg, arg) for arg in sys.argv[1:])]),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _cpu_model() -> str:
    """Name of the processor as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()
