"""Conversions between routings, numbers of ranks and formats; damage, kills, and what is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_client.embedding.checkpoint.dumps import KEYS, MODES, check_rows, opened, write_dump
from tests.trainer_client.embedding.keys import make
from trainer_client.embedding.checkpoint import CheckpointError, convert, dcp, load, open_checkpoint, save
from trainer_client.embedding.checkpoint.convert import Format
from trainer_client.embedding.checkpoint.files import staging
from trainer_client.embedding.checkpoint.record import TableRecord
from trainer_client.embedding.routing import Routing, continuous, hash_roundrobin, roundrobin

RANKS = st.integers(1, 8)
ROUTINGS = st.sampled_from(MODES)
SEEDED = st.sampled_from([*MODES, hash_roundrobin(77)])
TARGETS: st.SearchStrategy[tuple[Format, Routing, int]] = st.one_of(
    st.tuples(st.just("dynamicemb"), ROUTINGS, RANKS), st.tuples(st.just("dcp"), SEEDED, RANKS)
)


@given(source=ROUTINGS, ranks=RANKS, targets=st.lists(TARGETS, min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_every_row_is_on_its_owner_however_it_went(
    tmp_path_factory: pytest.TempPathFactory, source: Routing, ranks: int, targets: list[tuple[Format, Routing, int]]
) -> None:
    folder = tmp_path_factory.mktemp("ways")
    before = folder / "0"
    write_dump(before, source, ranks)
    counted = sum(opened(before).records["items/counter"].rows)
    for number, (form, routing, world_size) in enumerate(targets, 1):
        after = folder / "later" / str(number)
        told = [(0, 0)]
        result = convert(
            opened(before), after, world_size=world_size, routing={"items": routing}, target_format=form,
            progress=lambda *rows, told=told: told.append(rows),
        )  # fmt: skip
        assert result.rows == len(KEYS) + counted
        assert told == sorted(told)
        assert told[-1] == (result.rows * (1 if form == "dynamicemb" else 2),) * 2
        old, new = opened(before), opened(after).records
        files = [(name, rank) for name, record in old.records.items() for rank in range(record.world_size)]
        rows = [(new[name].owners(each.keys), rank) for name, rank in files for each in old.rows(name, rank)]
        assert result.moved == sum(int((owners != rank).sum()) for owners, rank in rows)
        check_rows(opened(after), routing, world_size)
        assert opened(after).records["items"].extra["evict_strategy"] == "lru"
        assert sum(opened(after).records["items/counter"].rows) == counted
        before = after


@given(st.integers(0, 12), st.integers(1, 5))
def test_chunks_hold_every_row_once(rows: int, chunk_rows: int) -> None:
    record = TableRecord(
        name="t", routing=continuous(), world_size=1, num_embeddings=rows + 1, rows=(rows,), arrays={},
        chunk_rows=chunk_rows,
    )  # fmt: skip
    assert record.block == rows + 1
    assert [row for first, count in record.chunks(0) for row in range(first, first + count)] == [*range(rows)]
    assert all(0 < count <= chunk_rows for _, count in record.chunks(0))


def test_a_dump_under_another_mode_than_it_says_is_refused_before_a_row_is_lost(tmp_path: Path) -> None:
    write_dump(tmp_path / "right", roundrobin(), 3, dist_type=False)
    with pytest.warns(UserWarning, match="names no dist_type: table items counts as roundrobin"):
        check_rows(opened(tmp_path / "right"), roundrobin(), 3)
    write_dump(tmp_path / "wrong", hash_roundrobin(), 3, dist_type=False)
    check_rows(open_checkpoint(tmp_path / "wrong", routing="hash_roundrobin"), hash_roundrobin(), 3)
    with (
        pytest.warns(UserWarning, match="roundrobin"),
        pytest.raises(CheckpointError, match=r"keys\.rank_\d\.world_size_3: holds key -?\d+ .* gives it to rank"),
    ):
        convert(opened(tmp_path / "wrong"), tmp_path / "new", world_size=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("array", ["keys", "values", "opt_values", "scores"])
@pytest.mark.parametrize("missing", [False, True])
def test_damaged_dumps_name_the_file(array: str, missing: bool, tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 3)
    path = tmp_path / "old" / f"items_emb_{array}.rank_1.world_size_3"
    content = path.read_bytes()
    path.unlink()
    if not missing:
        path.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
        opened(tmp_path / "old")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("swapped", r"rank_[01]\.world_size_2: holds key"),
        ("doubled", r"rank_[01]\.world_size_2: holds key"),
        ("key twice", r"emb_keys\.rank_0\.world_size_2: key 0 of table items is in the checkpoint twice"),
        ("world sizes", r"world sizes \[2, 4\]"),
    ],
)
def test_files_of_a_dump_in_the_wrong_place_are_named(case: str, message: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    write_dump(old, roundrobin(), 2, keys=np.arange(20))
    for array in ("keys", "values", "opt_values", "scores"):
        first, second = (old / f"items_emb_{array}.rank_{r}.world_size_2" for r in (0, 1))
        one, other = first.read_bytes(), second.read_bytes()
        if case == "swapped":
            first.write_bytes(other)
        if case in ("swapped", "doubled"):
            second.write_bytes(one)
        elif case == "key twice":
            first.write_bytes(one * 2)
        else:
            (old / f"items_emb_{array}.rank_0.world_size_4").write_bytes(one)
    with pytest.raises(CheckpointError, match=message):
        convert(opened(old), tmp_path / "new", world_size=3)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_damaged_files_of_torch_checkpoints_are_named(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", roundrobin(), 2)
    convert(opened(tmp_path / "dump"), tmp_path / "good", world_size=2, target_format="dcp")
    keys = next(opened(tmp_path / "good").rows("items", 0)).keys.numpy().tobytes()
    data = next(file for file in (tmp_path / "good").glob("*.distcp") if keys in file.read_bytes())
    whole = data.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.find(keys)] ^= 4
    for change in (whole[: len(whole) // 2], b"", bytes(flipped), None):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        (tmp_path / "bad" / data.name).unlink()
        if change is not None:
            (tmp_path / "bad" / data.name).write_bytes(change)
        with pytest.raises(CheckpointError, match=data.name.replace(".", r"\.")):
            convert(opened(tmp_path / "bad"), tmp_path / "new", world_size=3)
        assert not (tmp_path / "new").exists()
        shutil.rmtree(tmp_path / "bad")


def test_a_torch_checkpoint_without_checksums_is_refused(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", roundrobin(), 1)
    dump = opened(tmp_path / "dump")  # whose format has none
    dcp.write(
        tmp_path / "bad", list(dump.records.values()), [0],
        lambda table, _, array, *rows: dump.read(table, 0, 0, *rows)[array], alone=True,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"checksums of table items.* are missing; restore it from a copy"):
        opened(tmp_path / "bad")


def test_an_interrupted_conversion_leaves_the_old_checkpoint_whole_and_can_be_repeated(tmp_path: Path) -> None:
    write_dump(tmp_path / "source", roundrobin(), 3)
    convert(opened(tmp_path / "source"), tmp_path / "target", world_size=2)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(opened(tmp_path / "source"), tmp_path / "target", world_size=4, overwrite=True, progress=stop)
    check_rows(opened(tmp_path / "target"), roundrobin(), 2)
    for left in (".target.writing", ".target.replaced"):  # by processes that were killed
        (tmp_path / left / "rows").mkdir(parents=True)
    convert(opened(tmp_path / "source"), tmp_path / "target", world_size=4, overwrite=True)
    check_rows(opened(tmp_path / "target"), roundrobin(), 4)
    (tmp_path / "target").rename(tmp_path / ".target.replaced")  # where one died between the two renamings
    with pytest.raises(CheckpointError, match="target exists"):
        convert(opened(tmp_path / "source"), tmp_path / "target", world_size=2)
    (tmp_path / "target").rename(tmp_path / ".target.replaced")
    check_rows(opened(tmp_path / "target"), roundrobin(), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_two_processes_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    write_dump(tmp_path / "source", roundrobin(), 2)
    refused = pytest.raises(CheckpointError, match=r"\.new\.writing: another process writes this checkpoint")
    with staging(tmp_path / "new", overwrite=False), refused:
        convert(opened(tmp_path / "source"), tmp_path / "new", world_size=2)
    convert(opened(tmp_path / "source"), tmp_path / "new", world_size=2, overwrite=True)


def test_refusals(tmp_path: Path) -> None:
    old = tmp_path / "old"
    write_dump(old, roundrobin(), 1)
    with pytest.raises(CheckpointError, match="old exists"):
        convert(opened(old), old, world_size=2)
    with pytest.raises(ValueError, match="world_size is 0"):
        convert(opened(old), tmp_path / "new", world_size=0)
    with pytest.raises(CheckpointError, match="no routing seed"):
        convert(opened(old), tmp_path / "new", world_size=2, routing=hash_roundrobin(1))
    for number, told in enumerate(
        ("'a', 'old'", "'a', 'b', 'old'", "'a', 'b', 'c' and 1 more", "'a', 'b', 'c' and 2 more")
    ):
        (tmp_path / "abcd"[number]).touch()
        with pytest.raises(CheckpointError, match=f"holds {told}, which belong to no checkpoint"):
            convert(opened(old), tmp_path, world_size=2, overwrite=True)
    (old / "items_opt_args.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="dist_type"),
        pytest.raises(CheckpointError, match="its size is not recorded; give num_embeddings"),
    ):
        convert(opened(old), tmp_path / "new", world_size=2, routing="continuous")


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    collection = make()
    mixed, file, link = tmp_path / "mixed", tmp_path / "notes.txt", tmp_path / "latest"
    save(collection, mixed)
    save(collection, mixed, overwrite=True)
    (mixed / "dense.pt").write_bytes(b"the rest of the model")
    (mixed / "logs").mkdir()
    file.write_text("notes")
    save(collection, tmp_path / "step-1")
    link.symlink_to("step-1")
    for target, words in (
        (mixed, "holds 'dense.pt', 'logs', which belong to no checkpoint of tables and would be gone"),
        (file, "is a file and no checkpoint"),
        (link, "is a symbolic link"),
    ):
        with pytest.raises(CheckpointError, match=words):
            save(collection, target, overwrite=True)
        with pytest.raises(CheckpointError, match=words):
            convert(open_checkpoint(tmp_path / "step-1"), target, world_size=2, overwrite=True)
    assert (mixed / "dense.pt").read_bytes() == b"the rest of the model"
    assert file.read_text() == "notes"
    assert link.is_symlink()
    (tmp_path / "nothing").mkdir()
    save(collection, tmp_path / "nothing", overwrite=True)
    assert load(collection, tmp_path / "nothing") == load(collection, tmp_path / "step-1")
    with (
        pytest.raises(CheckpointError, match="holds 'logs'"),
        staging(tmp_path / "later", overwrite=True),
    ):
        (tmp_path / "later" / "logs").mkdir(parents=True)  # while it is written
    assert (tmp_path / "later" / "logs").exists()


ALONE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from trainer_client.embedding.checkpoint import convert, open_checkpoint
root, source = Path(sys.argv[1]), Path(sys.argv[1], "source")

def count(frame, event, argument):
    global calls
    if event == "c_call":
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

for form in ("dynamicemb", "dcp"):
    for kill_at in [500 * 4**step + step for step in range(4)] + [0]:
        child = os.fork()
        if child == 0:
            calls = 0
            sys.setprofile(count)
            convert(open_checkpoint(source), root / form, world_size=3, target_format=form, overwrite=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found = {r.world_size for r in open_checkpoint(root / form).records.values()}
        print(os.WIFSIGNALED(status), *found)

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
    lines = Path("/proc/self/status").read_text("ascii").splitlines()  # `getrusage` would tell what forked it had
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) // 1024

dump("small", 100_000)
dump("large", 400_000)
print(*[peak(name, form) for name in ("small", "large") for form in ("dynamicemb", "dcp")])
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What a process of its own said: how conversions that were killed ended, then peaks of memory."""
    root = tmp_path_factory.mktemp("alone")
    write_dump(root / "source", roundrobin(), 4)
    for form in ("dynamicemb", "dcp"):
        convert(opened(root / "source"), root / form, world_size=2)
    given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed; else peaks differ by 50 MB
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(root)], capture_output=True, text=True, check=True, env=given_back
    )
    return root, done.stdout.splitlines()


def test_memory_does_not_grow_with_the_table(alone: tuple[Path, list[str]]) -> None:
    after_small, after_large = map(int, alone[1][-1].split()[1::2])
    # 77 MB more rows: what may grow is the keys of one rank, 0.6 MB, and their sort.
    assert after_large - after_small < 20


def test_killed_anywhere_there_is_the_old_checkpoint_or_the_new_one(alone: tuple[Path, list[str]]) -> None:
    root, lines = alone
    for form, tries in (("dynamicemb", lines[:5]), ("dcp", lines[5:-1])):
        killed, left = zip(*map(str.split, tries), strict=True)
        assert killed.count("True") >= 2
        assert left[-1] == "3"
        assert set(left) <= {"2", "3"}
        assert list(left) == sorted(left)
        check_rows(opened(root / form), roundrobin(), 3)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]
