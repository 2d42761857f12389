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


def test_it_solves_beside_a_program_whose_own_solvers_use_more_threads():
    program = """
import highspy
import numpy as np
from scipy import sparse

from evenkeel.placement.milp import solve_milp


def with_threads(threads):
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", threads)
    solver.addVariable(0.0, 1.0)
    solver.changeColIntegrality(0, highspy.HighsVarType.kInteger)
    return solver.run()


assert with_threads(2) == highspy.HighsStatus.kOk
assert with_threads(1) == highspy.HighsStatus.kError, "HiGHS takes another number of threads now"
row = sparse.csr_matrix([[2.0, 3.0, 4.0]])
whole = np.ones(3, dtype=np.bool_)
found = solve_milp(-np.arange(1.0, 4), row, np.array([-np.inf]), np.array([5.0]), whole, np.ones(3))
assert found.proved and found.objective == -3.0, found
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
