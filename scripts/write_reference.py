"""Writes the reference of settings and metrics from the code, and the table of result files from these.

python -m scripts.write_reference [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

import services.balancer.settings
import services.planner.metrics
import services.planner.settings
from evenkeel.variables import KNOWN
from services.balancer.access import Occupancy
from services.balancer.history import History
from services.balancer.people import build_metrics
from services.balancer.workers import WorkerPool
from services.operations.settings import ServiceSettings
from trainer_client.observing.metrics import RankMeasures

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
COMPOSE = {
    "CPUS": "Cores of each service.",
    "GRAFANA_IMAGE": "Image of Grafana.",
    "PROMETHEUS_IMAGE": "Image of Prometheus.",
    "PROMETHEUS_URL": "Address under which readers of alerts find Prometheus.",
    "PYTHON_IMAGE": "Base image of the services.",
    "SECRETS": "Folder of the password, the certificates and the tokens.",
    "VERSION": "Tag of the services' images.",
}
SETTINGS = """# Settings

<!-- Written by scripts/write_reference.py from the code. -->

## Ranks and the command line

Read on every rank by `Balancer.connect`, `Balancer.from_env` and `RankExporter.from_env`, and by `evenkeel`. Arguments
go before variables. `evenkeel doctor` names variables that are likely misspelt.

{ranks}

{services}

## Compose

Read by `make up` and `docker compose`.

{compose}
"""
SERVICE = """## {title}

`python -m {program}` takes each as a flag (`port_file` is `--port-file`), as a variable
(`{prefix}PORT_FILE`) or from the YAML or TOML file that `config` names; what comes first in this list
wins. A variable of the prefix that names no setting ends the start.

{settings}"""
METRICS = """# Metrics

<!-- Written by scripts/write_reference.py from the code. -->

Units are seconds, bytes and ratios. A histogram `x` has the series `x_bucket`, `x_sum` and `x_count`. The services also
export what the Python client of Prometheus tells of a process (`process_…`, `python_gc_…`).

## Ranks

From a `RankExporter` ([deployment](../operate/deployment.md#metrics-of-the-ranks)). Prometheus calls the label `job`
`exported_job`.

{ranks}

## Balancer

{balancer}

## Planner

{planner}
"""


RESULTS = """# Result files

<!-- Written by scripts/write_reference.py from the files. -->

`benchmarks/results/`, latest first, with versions and commands. With a note, commit and date are when they
came.

{files}
"""


def main(arguments: list[str]) -> int:
    """Writes the pages, or tells which are not as the code would have them."""
    status = 0
    for path, text in texts().items():
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} differs from what python -m scripts.write_reference writes", file=sys.stderr)
            status = 1
    return status


def texts() -> dict[Path, str]:
    """The pages by path."""
    return {
        FOLDER / "settings.md": settings_page(),
        FOLDER / "metrics.md": metrics_page(),
        ROOT / "docs" / "evidence" / "files.md": results_page(),
    }


def settings_page() -> str:
    """Every environment variable and setting.

    Raises:
        ValueError: If a file of compose uses a variable that nothing is said of, or the other way round.
    """
    defaults = dict(_compose_defaults())
    if defaults.keys() != COMPOSE.keys():
        raise ValueError(f"say what these variables of compose are for: {sorted(defaults.keys() ^ COMPOSE.keys())}")
    parts = []
    for title, program, kind in (
        ("Balancer", "services.balancer", services.balancer.settings.Settings),
        ("Planner", "services.planner", services.planner.settings.Settings),
    ):
        table = _table(("setting", "default", "what it says"), _settings(kind))
        prefix = kind.model_config["env_prefix"]
        parts.append(SERVICE.format(title=title, program=program, prefix=prefix, settings=table))
    compose = ((f"`EVENKEEL_{name}`", f"`{defaults[name]}`", text) for name, text in sorted(COMPOSE.items()))
    return SETTINGS.format(
        ranks=_table(("variable", "what it says"), ((f"`EVENKEEL_{name}`", text) for name, text in KNOWN.items())),
        services="\n\n".join(parts),
        compose=_table(("variable", "default", "what it says"), compose),
    )


def _settings(kind: type[ServiceSettings]) -> Iterable[tuple[str, str, str]]:
    for name, field in kind.model_fields.items():
        default = "" if field.default_factory is not None or field.default is None else f"`{field.default}`"
        yield f"`{name}`", default, " ".join((field.description or "").split())


def _compose_defaults() -> Iterable[tuple[str, str]]:
    for path in (ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("*.yml"))):
        for name, default in re.findall(r"\$\{EVENKEEL_(\w+):-([^}]*)\}", path.read_text(encoding="utf-8")):
            yield name, default.removesuffix("/services").removesuffix("/grafana_password")


def results_page() -> str:
    """Every result file, the latest first."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        made = result["provenance"]
        machine = made["machine"]
        cores = [f"{machine['cores']} cores"] if "cores" in machine else []
        rows.append(
            (f"`{path.name}`", made["date"][:10], made["commit"][:12], ", ".join([*machine.get("gpus", []), *cores]))
        )
    rows.sort(key=lambda row: row[1], reverse=True)
    return RESULTS.format(files=_table(("file", "date", "commit", "machine"), rows))


def metrics_page() -> str:
    """Every metric of the services and the ranks."""
    return METRICS.format(
        ranks=_metrics(RankMeasures(job="", rank=0).registry),
        balancer=_metrics(_balancer()),
        planner=_metrics(services.planner.metrics.Metrics().registry),
    )


def _balancer() -> CollectorRegistry:
    """What a balancer exports."""
    settings = services.balancer.settings.Settings(workers=1)
    pool = WorkerPool(settings.limits(), workers=1, seconds=1.0)
    return build_metrics(History(), Occupancy(max_calls=1, max_bytes=1), pool).registry


def _metrics(registry: CollectorRegistry) -> str:
    collectors = registry._names_to_collectors  # nothing public tells the labels
    rows = []
    for each in sorted(registry.collect(), key=lambda family: family.name):
        if each.name.startswith("evenkeel_"):
            labels = getattr(collectors.get(each.name), "_labelnames", None) or getattr(each, "_labelnames", ())
            name = f"`{each.name}{'_total' if each.type == 'counter' else ''}`"
            rows.append((name, each.type, ", ".join(f"`{label}`" for label in labels), each.documentation))
    return _table(("metric", "type", "labels", "what it says"), rows)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
