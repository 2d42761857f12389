"""The solver leaves standard output to the program that plans."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_is_printed_by_making_filling_and_running_a_solver():
    program = """
from evenkeel.placement.highs import Highs

for _ in range(2):
    solver = Highs()
    solver.addCol(-1.0, 0.0, 3.0, 0, [], [])
    solver.run()
    assert solver.getInfo().objective_function_value == -3.0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "")
