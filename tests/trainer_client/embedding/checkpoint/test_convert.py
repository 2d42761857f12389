import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trainer_client.embedding.checkpoint.dumps import KEYS, MODES, check_rows, opened, write_dump
from trainer_client.embedding.checkpoint import CheckpointError, convert
from trainer_client.embedding.checkpoint.files import Staging
from trainer_client.embedding.routing import Routing, hash_roundrobin, roundrobin

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("source", MODES, ids=str)
@pytest.mark.parametrize("target", MODES, ids=str)
def test_every_row_is_on_its_owner_for_every_pair_of_modes_and_ranks(
    source: Routing, target: Routing, tmp_path: Path
) -> None:
    for before, after in itertools.product(RANKS, RANKS):
        old, new = tmp_path / "old", tmp_path / "new"
        write_dump(old, source, before)
        result = convert(opened(old), new, world_size=after, routing=target)
        assert result.rows == len(KEYS) + sum(opened(old).records["items/counter"].rows)
        check_rows(opened(new), target, after)
        frequencies = sum(opened(new).records["items/counter"].rows)
        assert frequencies == sum(opened(old).records["items/counter"].rows)
        shutil.rmtree(old)
        shutil.rmtree(new)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 8), (4, 2)])
@pytest.mark.parametrize("target", [*MODES, hash_roundrobin(77)], ids=str)
def test_between_formats_and_back(target: Routing, before: int, after: int, tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", roundrobin(), before)
    convert(opened(tmp_path / "dump"), tmp_path / "dcp", world_size=after, routing=target, target_format="dcp")
    check_rows(opened(tmp_path / "dcp"), target, after)
    assert opened(tmp_path / "dcp").records["items"].extra["evict_strategy"] == "lru"
    convert(opened(tmp_path / "dcp"), tmp_path / "dcp2", world_size=before, routing=hash_roundrobin(5))
    check_rows(opened(tmp_path / "dcp2"), hash_roundrobin(5), before)
    convert(
        opened(tmp_path / "dcp2"), tmp_path / "dump2", world_size=5, routing={"items": "roundrobin"},
        target_format="dynamicemb",
    )  # fmt: skip
    check_rows(opened(tmp_path / "dump2"), roundrobin(), 5)


def test_a_dump_without_dist_type_is_roundrobin_with_a_warning(tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 3, dist_type=False)
    with pytest.warns(UserWarning, match="names no dist_type: table items counts as roundrobin"):
        check_rows(opened(tmp_path / "old"), roundrobin(), 3)


def test_a_dump_under_another_mode_than_it_says_is_refused_before_a_row_is_lost(tmp_path: Path) -> None:
    write_dump(tmp_path / "old", hash_roundrobin(), 3, dist_type=False)
    with (
        pytest.warns(UserWarning, match="roundrobin"),
        pytest.raises(CheckpointError, match=r"keys\.rank_\d\.world_size_3: holds key -?\d+ .* gives it to rank"),
    ):
        convert(opened(tmp_path / "old"), tmp_path / "new", world_size=2)
    assert not (tmp_path / "new").exists()


def damage_truncated(path: Path) -> str:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    return path.name


def damage_missing(path: Path) -> str:
    path.unlink()
    return path.name


@pytest.mark.parametrize("array", ["keys", "values", "opt_values", "scores"])
@pytest.mark.parametrize("damage", [damage_truncated, damage_missing])
def test_damaged_dumps_name_the_file(array: str, damage: object, tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 3)
    name = damage(tmp_path / "old" / f"items_emb_{array}.rank_1.world_size_3")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        opened(tmp_path / "old")


def test_swapped_doubled_and_foreign_files_of_a_dump(tmp_path: Path) -> None:
    for case in ("swapped", "doubled", "key twice", "world sizes"):
        old = tmp_path / "old"
        write_dump(old, roundrobin(), 2, keys=np.arange(20))
        for array in ("keys", "values", "opt_values", "scores"):
            first, second = (old / f"items_emb_{array}.rank_{r}.world_size_2" for r in (0, 1))
            if case == "swapped":
                first.rename(old / "x")
                second.rename(first)
                (old / "x").rename(second)
            elif case == "doubled":
                shutil.copy(first, second)
            elif case == "key twice":
                first.write_bytes(first.read_bytes() * 2)
            else:
                shutil.copy(first, old / f"items_emb_{array}.rank_0.world_size_4")
        message = {
            "key twice": r"emb_keys\.rank_0\.world_size_2: key 0 of table items is in the checkpoint twice",
            "world sizes": r"world sizes \[2, 4\]",
        }
        with pytest.raises(CheckpointError, match=message.get(case, r"rank_[01]\.world_size_2: holds key")):
            convert(opened(old), tmp_path / "new", world_size=3)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["old"]
        shutil.rmtree(old)


def test_damaged_files_of_torch_checkpoints_are_named(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", roundrobin(), 2)
    convert(opened(tmp_path / "dump"), tmp_path / "good", world_size=2, target_format="dcp")
    keys = next(opened(tmp_path / "good").rows("items", 0)).keys.numpy().tobytes()
    data = next(file for file in (tmp_path / "good").glob("*.distcp") if keys in file.read_bytes())
    half, flipped = data.stat().st_size // 2, bytearray(data.read_bytes())
    flipped[bytes(flipped).find(keys)] ^= 4
    for change in (data.read_bytes()[:half], b"", bytes(flipped), None):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        broken = tmp_path / "bad" / data.name
        if change is None:
            broken.unlink()
        else:
            broken.write_bytes(change)
        with pytest.raises(CheckpointError, match=data.name.replace(".", r"\.")):
            convert(opened(tmp_path / "bad"), tmp_path / "new", world_size=3)
        assert not (tmp_path / "new").exists()
        shutil.rmtree(tmp_path / "bad")


def test_an_interrupted_conversion_leaves_the_old_checkpoint_whole_and_can_be_repeated(tmp_path: Path) -> None:
    write_dump(tmp_path / "source", roundrobin(), 3)
    convert(opened(tmp_path / "source"), tmp_path / "target", world_size=2)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(opened(tmp_path / "source"), tmp_path / "target", world_size=4, overwrite=True, progress=stop)
    check_rows(opened(tmp_path / "target"), roundrobin(), 2)
    (tmp_path / ".target.writing" / "rows").mkdir(parents=True)  # of a process that was killed
    convert(opened(tmp_path / "source"), tmp_path / "target", world_size=4, overwrite=True)
    check_rows(opened(tmp_path / "target"), roundrobin(), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_dying_between_the_two_renamings_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dump(tmp_path / "target", roundrobin(), 3)
    staging = Staging(tmp_path / "target", overwrite=True)
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing"):
            raise OSError("killed")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(OSError, match="killed"):
        staging.publish()
    monkeypatch.undo()
    check_rows(opened(tmp_path / "target"), roundrobin(), 3)


KILLED = """
import os, signal, sys
from pathlib import Path
from trainer_client.embedding.checkpoint import convert, open_checkpoint

def count(frame, event, argument):
    global calls
    if event == "c_call":
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

root, form = Path(sys.argv[1]), sys.argv[2]
for kill_at in map(int, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        calls = 0
        sys.setprofile(count)
        convert(open_checkpoint(root / "source"), root / "target", world_size=3, target_format=form, overwrite=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = {r.world_size for r in open_checkpoint(root / "target").records.values()}
    print(os.WIFSIGNALED(status), *found)
"""


@pytest.mark.parametrize("target_format", ["dynamicemb", "dcp"])
def test_killed_anywhere_there_is_the_old_checkpoint_or_the_new_one(target_format: str, tmp_path: Path) -> None:
    write_dump(tmp_path / "source", roundrobin(), 4)
    convert(opened(tmp_path / "source"), tmp_path / "target", world_size=2)
    kills = [str(500 * 2**step + step) for step in range(8)]
    command = [sys.executable, "-c", KILLED, str(tmp_path), target_format, *kills, "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    killed, left = done[::2], done[1::2]
    assert killed.count("True") >= 3
    assert left[-1] == "3"
    assert set(left) <= {"2", "3"}
    assert left == sorted(left)
    check_rows(opened(tmp_path / "target"), roundrobin(), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_two_processes_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    write_dump(tmp_path / "source", roundrobin(), 2)
    writing = Staging(tmp_path / "new", overwrite=False)
    with pytest.raises(CheckpointError, match=r"\.new\.writing: another process writes this checkpoint"):
        convert(opened(tmp_path / "source"), tmp_path / "new", world_size=2)
    writing.discard()
    convert(opened(tmp_path / "source"), tmp_path / "new", world_size=2)


def test_refusals(tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 1)
    with pytest.raises(CheckpointError, match="old exists"):
        convert(opened(tmp_path / "old"), tmp_path / "old", world_size=2)
    with pytest.raises(CheckpointError, match="no routing seed"):
        convert(opened(tmp_path / "old"), tmp_path / "new", world_size=2, routing=hash_roundrobin(1))
    with pytest.raises(CheckpointError, match="no such directory"):
        opened(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither"):
        opened(tmp_path / "empty")
    (tmp_path / "old" / "items_opt_args.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="dist_type"),
        pytest.raises(CheckpointError, match="its size is not recorded; give num_embeddings"),
    ):
        convert(opened(tmp_path / "old"), tmp_path / "new", world_size=2, routing="continuous")


MEMORY_SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np
from tests.trainer_client.embedding.checkpoint.dumps import write_dump
from trainer_client.embedding.checkpoint import convert, open_checkpoint
from trainer_client.embedding.routing import roundrobin
root = Path(sys.argv[1])

def dump(name, rows):
    path = root / name
    path.mkdir()
    (path / "t_opt_args.json").write_text('{"dist_type": "roundrobin"}')
    with (path / "t_emb_keys.rank_0.world_size_1").open("wb") as keys, (
        path / "t_emb_values.rank_0.world_size_1").open("wb") as values:
        for start in range(0, rows, 10_000):
            np.arange(start, start + 10_000).tofile(keys)
            np.zeros((10_000, 64), np.float32).tofile(values)

def peak(name, form):
    convert(open_checkpoint(root / name), root / (name + form), world_size=4, target_format=form)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

dump("small", 400_000)
dump("large", 1_200_000)
print(*[peak(name, form) for name in ("small", "large") for form in ("dynamicemb", "dcp")])
"""


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after_small, after_large = (int(number) for number in done.stdout.split()[1::2])
    # 211 MB more rows: what may grow is the keys of one rank, 1.6 MB, and their sort.
    assert after_large - after_small < 48
