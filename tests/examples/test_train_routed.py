import re

from benchmarks.harness import zygote


def _run(*arguments: str) -> str:
    done = zygote.run("examples.train_routed", *arguments, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_saves_and_resumes_under_another_mode_and_number_of_ranks() -> None:
    small = ("--cpu", "--ranks", "2", "--resume-ranks", "3", "--steps", "10", "--batch", "32", "--dim", "4")
    shown = _run(*small, "--dist-type", "roundrobin", "--resume-as", "hash_roundrobin", "--seed", "3")
    balances = re.findall(r"^(\S+) over (\d) ranks: keys asked of each rank \[(.*)\], max/mean (\S+)$", shown, re.M)
    assert [found[:2] for found in balances] == [("roundrobin", "2"), ("hash_roundrobin(seed=3)", "3")]
    asked = [[int(count) for count in found[2].split(", ")] for found in balances]
    assert asked[0][1] == 0
    assert float(balances[0][3]) == 2
    assert len(asked[1]) == 3
    assert float(balances[1][3]) < 1.5
    loaded = re.search(r"^loaded ([\d,]+) rows into hash_roundrobin\(seed=3\) over 3 ranks$", shown, re.M)
    # Both ranks looked some of the same keys up, so the table has fewer rows than were asked for, but no row was lost.
    rows = int(loaded[1].replace(",", ""))
    assert asked[0][0] / 2 <= rows <= asked[0][0]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", shown, re.M)]
    assert [int(step) for step in re.findall(r"^step (\d+):", shown, re.M)] == [10, 20]
    assert losses[1] < losses[0]
