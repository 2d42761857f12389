"""Plans for DLRMv4's tables, ours and TorchRec's, into a result file: python -m benchmarks.dlrmv4 8, and 16, and 32."""

import json
import sys

from benchmarks.harness.results import RESULTS, provenance, write
from examples.dlrmv4.plan import compare, shown

if __name__ == "__main__":
    path, ranks = RESULTS / "dlrmv4.json", int(sys.argv[1])
    made = compare(ranks=[ranks])
    print(shown(made))
    others = json.loads(path.read_text("utf-8"))["cells"] if path.exists() else []
    cells = [cell for cell in others if cell["ranks"] != ranks]
    cells += [{"commit": provenance()["commit"], **cell} for cell in made["cells"]]
    write(path, made | {"cells": sorted(cells, key=lambda cell: int(cell["ranks"]))})
