"""Writes what follows from the rules and the runbook: `python deploy/prometheus/build.py`; `--check` only compares.

- consoles/runbook.html: the runbook, which Prometheus serves and every alert links to.
- ../kubernetes/monitoring/rules.yaml: the rules for the Prometheus operator; `--runbook URL` makes their links point to
  a copy of docs/operate/runbook.md that you serve, since a Prometheus that the operator runs has no consoles.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script of this folder, run by its path
from writing import write

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SERVED = "{{ $externalURL }}/consoles/runbook.html"
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evenkeel: runbook</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem }}
h2 {{ margin-top: 2.5rem }}
h2:target {{ background: #fd03 }}
</style>
<!-- Written by deploy/prometheus/build.py from docs/operate/runbook.md. -->
{body}
</html>
"""


def runbook_page() -> str:
    """docs/operate/runbook.md as a page; a section's anchor is its alert's name in lower case."""
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse((ROOT / "docs/operate/runbook.md").read_text())
    for token, after in itertools.pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrs["id"] = after.content.lower().replace(" ", "-")
    body = markdown.renderer.render(tokens, markdown.options, {})
    if "{{" in body:
        raise ValueError("docs/operate/runbook.md holds '{{', which Prometheus would read as a template")
    return PAGE.format(body=body)


def operator_rules(runbook: str) -> str:
    """All rules as one PrometheusRule; `runbook` is the address of the page that their links name."""
    groups: list[Any] = []
    for path in sorted((FOLDER / "rules").glob("*.yml")):
        groups += yaml.safe_load(path.read_text().replace(SERVED, runbook))["groups"]
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "evenkeel", "labels": {"app.kubernetes.io/part-of": "evenkeel"}},
        "spec": {"groups": groups},
    }
    head = "# Written by deploy/prometheus/build.py from deploy/prometheus/rules.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=120)


def main() -> int:
    """Writes or compares; returns 1 if a file differs."""
    parser = argparse.ArgumentParser(description="Writes the runbook's page and the rules for the Prometheus operator.")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--runbook", default=SERVED, help="address of the runbook in the rules for the operator")
    options = parser.parse_args()
    files = {
        FOLDER / "consoles/runbook.html": runbook_page(),
        FOLDER.parent / "kubernetes/monitoring/rules.yaml": operator_rules(options.runbook),
    }
    return write(files, builder="deploy/prometheus/build.py", check=options.check)


if __name__ == "__main__":
    sys.exit(main())
