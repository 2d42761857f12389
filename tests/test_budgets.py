"""How large the house is, and that a capability keeps to its room.

Who deletes lowers the numbers; what a new capability may raise is in CONTRIBUTING. Goals stand beside them.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LINES = {  # of Python, stubs of the wire apart: most allowed, goal
    "evenkeel": (12565, 9500),
    "services": (4303, 4500),
    "services/balancer": (1816, 2000),
    "evenkeel/partitioning": (4838, 4000),
    "evenkeel/placement": (5487, 4500),
    "evenkeel/key_statistics": (741, 500),
    "services/planner": (1000, 1000),
    "services/operations": (803, 800),
    "services/security": (683, 700),
    "trainer_client": (20997, 15000),
    "trainer_client/balancing": (10906, 8000),
    "trainer_client/balancing/adapters": (600, 600),
    "trainer_client/embedding": (4037, 3000),
    "trainer_client/embedding/checkpoint": (1335, 1100),
    "trainer_client/attention": (1136, 1000),
    "trainer_client/planning": (2049, 1200),
    "trainer_client/observing": (758, 700),
    "trainer_client/cli": (1567, 900),
    "tests": (23560, 20000),
    "benchmarks": (7993, 8000),
}
WORDS = {"docs/*.md": (25000, 25000), "README.md": (900, 900)}


def files(*patterns: str) -> list[str]:
    """Tracked and new files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in found if (ROOT / path).is_file()]


@pytest.mark.parametrize("folder", LINES)
def test_lines_of_a_folder(folder: str) -> None:
    lines = sum(
        (ROOT / path).read_bytes().count(b"\n") for path in files(f"{folder}/*.py") if "_pb2" not in Path(path).name
    )
    most, goal = LINES[folder]
    assert lines <= most, f"{folder} has {lines} lines, {most} are allowed and {goal} the goal: delete as many"


@pytest.mark.parametrize("texts", WORDS)
def test_words_of_texts(texts: str) -> None:
    words = sum(len((ROOT / path).read_text().split()) for path in files(texts))
    assert words <= WORDS[texts][0]


_BALANCING = "trainer_client/balancing"
ROOMS = {  # words of a capability, where it lives, in how many files outside its words may stand; 8 is the goal
    "windows": (r"\bwindows?\b", ("evenkeel/partitioning/windows.py", f"{_BALANCING}/windows.py"), 11),
    "splits": (
        r"SplitSample|SplitOptions|spans_of",  # pieces are also those of copies, and of columns
        ("evenkeel/partitioning/split", "trainer_client/attention/", f"{_BALANCING}/splitting.py"),
        8,
    ),
    "users": (r"\busers=|\.users\b|gather_users", ("evenkeel/partitioning/users.py",), 8),
    "speeds": (r"\bspeeds\b", ("evenkeel/partitioning/speeds.py", f"{_BALANCING}/learned_speeds.py"), 22),
    "caps": (r"memory_caps", ("evenkeel/partitioning/memory.py",), 10),
    "sampling": (r"BatchSampler|BudgetSampler|CountedSampler", (f"{_BALANCING}/sampling/",), 4),
    "adapters": (r"torcheasyrec|recsys_examples|lightning", (f"{_BALANCING}/adapters/",), 0),
    "hot rows": (
        r"HotRows|hot_choice|hold_hot",
        ("trainer_client/embedding/tables/hot", "evenkeel/placement/hot_rows.py"),
        3,
    ),
    "resume": (r"[Rr]esum", (f"{_BALANCING}/resume.py", f"{_BALANCING}/windows.py"), 8),
    "learned costs": (r"LearnedCost|learned_cost", (f"{_BALANCING}/costs/",), 6),
}


@pytest.mark.parametrize("capability", ROOMS)
def test_a_capability_keeps_to_its_room(capability: str) -> None:
    words, rooms, most = ROOMS[capability]
    product = files("evenkeel/*.py", "services/*.py", "trainer_client/*.py")
    outside = [
        path
        for path in product
        if not path.startswith(rooms) and "_pb2" not in path and re.search(words, (ROOT / path).read_text())
    ]
    assert all(any(path.startswith(room) for path in product) for room in rooms), f"{capability} has moved: {rooms}"
    assert len(outside) <= most, f"{capability}: its words stand in {len(outside)} files outside: {outside}"
