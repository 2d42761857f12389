"""Readers of published files, on small generated files in the published formats."""

from __future__ import annotations

import gc
import gzip
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples.datasets import ClickOptions, draw_clicks, identify, read_criteo, read_histories
from examples.datasets.criteo import MISSING
from tests.examples.datasets.generated import WRITERS, generate

HISTORIES = [name for name in WRITERS if name != "Criteo"]


@pytest.mark.parametrize("name", HISTORIES)
def test_what_was_written_in_a_published_format_is_read(tmp_path: Path, name: str) -> None:
    path = generate(name, tmp_path / "new", users=30, items=40, seed=3)
    assert identify(path) == name.partition("-")[0]
    data = read_histories(path)
    drawn = draw_clicks(_options()).histories
    assert data.lengths.tolist() == drawn.lengths.tolist()
    # The same items under the data set's own ids: each item is another one there, and always the same.
    pairs = set(zip(data.items.tolist(), drawn.items.tolist(), strict=True))
    assert len(pairs) == data.num_items == drawn.num_items
    if name not in ("Gowalla", "Yambda-sequential"):  # which do not tell what was liked
        assert data.liked.tolist() == drawn.liked.tolist()
    assert all((np.diff(data.times[begin:end]) > 0).all()
               for begin, end in zip(data.offsets[:-1], data.offsets[1:], strict=True))  # fmt: skip


def _options() -> ClickOptions:
    from tests.examples.datasets.generated import _LENGTHS

    return ClickOptions(num_users=30, num_items=40, lengths=_LENGTHS, seed=3)


def test_ids_are_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "loc-gowalla_totalCheckins.txt"
    file.write_text(
        "0\t2010-10-19T23:55:27Z\t30.2359091167\t-97.7951395833\t22847\n"
        "0\t2010-10-18T22:17:43Z\t30.2691029532\t-97.7493953705\t420315\n\n"
        "7\t2010-10-17T23:42:03Z\t30.2557309927\t-97.7633857727\t316637\n"
    )
    data = read_histories(file)
    assert data.users.tolist() == [0, 7]
    assert data.item_ids[data.items].tolist() == [420315, 22847, 316637]  # by time
    assert data.times.tolist() == [1287440263, 1287532527, 1287358923]
    books = tmp_path / "ratings_Books.csv"  # of 2014; the file of 2018 has the item first
    books.write_text("AH2L9G3DQHHAJ,0000000116,4.0,1019865600\nA2IIIDRK3PRRZY,0000000116,1.0,1395619200\n")
    assert read_histories(books).num_items == 1
    games = tmp_path / "Video_Games.csv"
    games.write_text("0439381673,A21ROB4YDOZA5P,1.0,1402272000\n0439381673,A3TNZ2Q5E7HTHD,3.0,1399680000\n")
    assert read_histories(games).num_items == 1
    beauty = tmp_path / "ratings_Beauty.csv"  # of 2014, handed on by Kaggle
    beauty.write_text("UserId,ProductId,Rating,Timestamp\nA39HTATAQ9V7YF,205616461,5.0,1369699200\n")
    assert identify(beauty) == "Amazon"
    assert read_histories(beauty).actions.tolist() == [5]
    reviews = tmp_path / "Video_Games.json.gz"
    reviews.write_bytes(gzip.compress(
        b'{"overall": 5.0, "reviewerID": "A1HP7NVNPFMA4N", "asin": "0700026657", "unixReviewTime": 1445040000}\n'
        b'{"overall": 4.0, "reviewerID": "A1HP7NVNPFMA4N", "asin": "0700026999", "unixReviewTime": 1437955200}\n'
    ))  # fmt: skip
    found = read_histories(reviews)
    assert (found.actions.tolist(), found.lengths.tolist()) == ([4, 5], [2])


def test_criteo_is_read_as_far_as_asked_with_gaps_as_missing(tmp_path: Path) -> None:
    path = generate("Criteo", tmp_path, users=1, items=5)
    table = read_criteo(path, rows=40)
    assert table.shape == (40, 26)
    assert (table == MISSING).any()
    assert table.max() > 1 << 31
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    assert [f"{key:08x}" if key != MISSING else "" for key in table[3].tolist()] == lines[3].rstrip("\n").split("\t")[
        14:
    ]
    train = tmp_path / "train.txt"  # of the challenge; its test.txt has no label
    train.write_text("".join(lines[:3]))
    assert np.array_equal(read_criteo(train), table[:3])
    (tmp_path / "test.txt").write_text("".join(line.partition("\t")[2] for line in lines[:3]))
    assert np.array_equal(read_criteo(tmp_path / "test.txt"), table[:3])
    assert identify(tmp_path / "test.txt") == identify(train) == identify(path) == "Criteo"
    with pytest.raises(ValueError, match="have 26 keys each and no history"):
        read_histories(train)


CHECKIN = "0\t2010-10-19T23:55:27Z\t30.2\t-97.7\t22847\n"
RATING = "user_id,parent_asin,rating,timestamp\nAGKASBHYZPGTEPO6LWZPVJWB2BVA,B006GBITXC,3.0,1452647382000\n"
REVIEW = '{"user_id": "A", "parent_asin": "B", "rating": 1.0, "timestamp": 1}\n'


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gowalla.txt", CHECKIN + "0\t2010-10-19T23:55:27Z\t30.2\n", "line 2: '0.*' is not user, check-in time"),
        ("gowalla.txt", CHECKIN + CHECKIN.replace("2010-10-19", "yesterday"), "'0 yesterday.* is not user, check-in"),
        ("gowalla.txt", CHECKIN + CHECKIN.replace("22847", "x"), "x' is not user, check-in time"),
        ("Toys.csv", RATING + "A,B,3.0\n", "line 3: 'A,B,3.0' is not user_id,parent_asin,rating,timestamp of 2023"),
        ("Toys.csv", RATING + "A,B,good,1\n", "'A,B,good,1' is not user_id,parent_asin"),
        ("Toys.csv", RATING.partition("\n")[0] + "\n", "holds no ratings"),
        ("Toys.csv", "AH2L9G3DQHHAJ,00000001166,4.0,1019865600\n", "either the first or the second column"),
        ("Toys.jsonl", '{"user_id": "A", "rating": 1}\n', "line 1: .* is not a review with user_id, parent_asin"),
        ("Toys.jsonl", '{"user_id": \n', "line 1: .* is not a review"),
        ("day_0", "\t".join(["0"] * 14 + ["zz"] * 26) + "\n", "is no number in base 16"),
        ("day_0", "\t".join(["0"] * 40) + "\n0\t1\n", r"line 2: '0\\t1' is not a label, 13 counts"),
        ("Toys.csv", RATING + ",B006GBITXC,3.0,1\n", "',B006GBITXC,3.0,1' is not user_id,parent_asin"),
        ("Toys.jsonl", REVIEW + REVIEW.replace('"A"', "null"), "line 2: .* is not a review with user_id, parent_asin"),
        ("Toys.jsonl", REVIEW + REVIEW.replace('"B"', "null"), "line 2: .* is not a review with user_id, parent_asin"),
        ("Toys.csv", (RATING + RATING.partition("\n")[2])[:-7], "last line: '.*,1452647' has no line break, as if"),
        ("gowalla.txt", CHECKIN + CHECKIN[:-2], "last line: .*2284' has no line break, as if"),
        ("day_0", "\t".join(["0"] * 40), "last line: .*0' has no line break, as if"),
        ("KuaiRand-Pure.tar", "x" * 257 + "ustar\n", "is an archive; unpack it, and give the folder or file in it"),
        ("notes.txt", "hello\n", "none of the known data sets; give a MovieLens folder"),
        ("ratings.csv", "userId,movieId,rating\n1,2,3\n", "none of the known data sets"),
    ],
)  # fmt: skip
def test_other_files_are_refused_by_what_is_wrong(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    read: Callable[[Path], object] = read_criteo if name.startswith("day") else read_histories
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        read(path)


@pytest.mark.parametrize("name", ["Gowalla", "Amazon", "Yambda", "Criteo"])
def test_files_that_were_not_downloaded_whole_are_refused(tmp_path: Path, name: str) -> None:
    path = generate(name, tmp_path, users=30, items=40)
    _cut(path)
    with pytest.raises(ValueError, match=rf"{path.name}.*download it anew"):
        (read_criteo if name == "Criteo" else read_histories)(path)


def test_parquet_of_something_else_is_refused(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    path = tmp_path / "likes.parquet"
    parquet.write_table(arrow.table({"uid": [1], "timestamp": [5]}), path)
    with pytest.raises(ValueError, match="no column item_id; its columns are uid, timestamp"):
        read_histories(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"uid": [3, 4], "timestamp": [1, 2], "item_id": [7, None]}, "row 2 has no item_id; download it anew"),
        ({"uid": [None, 4], "timestamp": [1, 2], "item_id": [7, 8]}, "row 1 has no uid; download"),
        ({"uid": [4], "timestamp": [None], "item_id": [[7]]}, "column timestamp is of the type null; a file has whole"),
        ({"uid": [4], "timestamp": [1], "item_id": ["7"]}, "column item_id is of the type string; a file has whole"),
        (
            {"uid": [3, 4], "timestamp": [[1], [2, 3]], "item_id": [[7], [8]]},
            "row 2 has another number of values in timestamp than in item_id; download",
        ),
        ({"uid": [3, 4], "timestamp": [[1], [2]], "item_id": [[7], [None]]}, "row 2 has no item_id for each event"),
        ({"uid": [3, 4], "timestamp": [[1], None], "item_id": [[7], [8]]}, "row 2 has no timestamp; download"),
    ],
)
def test_parquet_with_gaps_is_refused_by_row(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    path = tmp_path / "likes.parquet"
    parquet.write_table(arrow.table(columns), path)
    with pytest.raises(ValueError, match=rf"likes.parquet.*{message}"):
        read_histories(path)


def test_an_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "ml-20m.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("ml-20m/ratings.csv", "userId,movieId,rating,timestamp\n")
    with pytest.raises(ValueError, match=r"ml-20m.zip is an archive; unpack it"):
        read_histories(path)
    path = tmp_path / "KuaiRand-Pure.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(tmp_path / "ml-20m.zip", "KuaiRand-Pure/data/x")
    with pytest.raises(ValueError, match=r"KuaiRand-Pure.tar.gz is an archive; unpack it"):
        read_histories(path)


def test_ratings_with_the_history_before_are_read_as_ratings(tmp_path: Path) -> None:
    path = tmp_path / "Toys.train.csv"
    path.write_text("user_id,parent_asin,rating,timestamp,history\nA,X,3.0,7,\nA,Y,5.0,8,X\nB,X,1.0,5,\n")
    data = read_histories(path)
    assert identify(path) == "Amazon"
    assert (data.lengths.tolist(), data.items.tolist(), data.actions.tolist()) == ([2, 1], [0, 1, 0], [3, 5, 1])


def test_files_are_closed(tmp_path: Path) -> None:
    for name in HISTORIES:
        path = generate(name, tmp_path / name, users=5, items=9)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ResourceWarning)
            read_histories(path)
            gc.collect()
        assert not found, (name, [str(one.message) for one in found])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; give a MovieLens folder"):
        read_histories(tmp_path / "ml-1m")


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    path = generate("Gowalla", tmp_path, users=1200, items=40)
    told: list[int] = []
    read_histories(path, watch=lambda file, read: told.append(read) if file == path else None)
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size
