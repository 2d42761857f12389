"""The one writer of result files: each names the commit, the date, the machine, the versions and the command."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_LINE = 500
_PACKAGES = ("numpy", "numba", "torch", "grpcio", "fbgemm_gpu", "torchrec", "highspy", "scipy")


def read_options(description: str | None, quick: str, **paths: str) -> argparse.Namespace:
    """Whether a benchmark is to be `quick`, the file `json` that its figures go to, and paths by name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    for name, what in ({"json": "file to write the figures to"} | paths).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help=what)
    return parser.parse_args()


def provenance() -> dict[str, Any]:
    """Of a result that this process writes."""
    return {
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)), "cpu": _cpu(), "gpus": _gpus(),
            "load": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }  # fmt: skip


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Writes a result as JSON, with where it comes from; None: not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text({"provenance": provenance()} | result) + "\n", encoding="utf-8")


def _text(value: Any, indent: str = "") -> str:
    """As JSON, indented down to what fits a line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= _LINE or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(key), ensure_ascii=False)}: {_text(one, inner)}" for key, one in value.items()]
    else:
        parts = [_text(one, inner) for one in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{end}"


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name).removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    if "torch" not in sys.modules:
        return []
    cuda = sys.modules["torch"].cuda
    return [cuda.get_device_name(at) for at in range(cuda.device_count())] if cuda.is_available() else []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
