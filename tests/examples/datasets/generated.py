"""Small files in the formats of published data sets, drawn by a rule: to try the readers without a download."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from examples.datasets import ClickOptions, Histories, LogNormalLengths, draw_clicks

_LENGTHS = LogNormalLengths(mean=80, sigma=1.3, minimum=2, maximum=3000)
_START = 1_300_000_000  # Unix seconds of the first event


def generate(name: str, folder: Path, *, users: int = 3000, items: int = 2000, seed: int = 0) -> Path:
    """Writes a data set.

    Args:
        name: One of `WRITERS`.
        folder: Where to; made if needed.
        users: Users, or a hundredth of the rows where there are none.
        items: Size of the catalogue.
        seed: Of what is drawn.

    Returns:
        What the readers take: the folder, or the file in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ClickOptions(num_users=users, num_items=items, lengths=_LENGTHS, seed=seed)
    return WRITERS[name](folder, draw_clicks(options).histories)


def _events(data: Histories) -> Iterator[tuple[int, int, int, bool]]:
    """User, item, place in the user's history and liked of each event."""
    places = np.arange(len(data.items)) - np.repeat(data.offsets[:-1], data.lengths)
    users = np.repeat(data.users, data.lengths)
    yield from zip(users.tolist(), data.items.tolist(), places.tolist(), data.liked.tolist(), strict=True)


def _movielens_1m(folder: Path, data: Histories) -> Path:
    lines = (f"{user + 1}::{item + 1}::{4 if liked else 2}::{_START + 60 * at}\n"
             for user, item, at, liked in _events(data))  # fmt: skip
    (folder / "ratings.dat").write_text("".join(lines))
    users = (f"{user + 1}::{'FM'[user % 2]}::{(1, 18, 25, 35)[user % 4]}::{user % 21}::48067\n" for user in data.users)
    (folder / "users.dat").write_text("".join(users), encoding="latin-1")
    return folder


def _movielens(folder: Path, data: Histories) -> Path:
    lines = (f"{user + 1},{item + 1},{4.5 if liked else 2.0},{_START + 60 * at}\n"
             for user, item, at, liked in _events(data))  # fmt: skip
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    return folder


def _kuairand(folder: Path, data: Histories) -> Path:
    (folder / "data").mkdir(exist_ok=True)
    header = (
        "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
        "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
    )
    lines = (
        f"{user},{item},20220408,1400,{1000 * (_START + 60 * at)},{int(liked)},0,0,0,0,0,0,9000,12000,0,0,0,0,1\n"
        for user, item, at, liked in _events(data)
    )
    (folder / "data" / "log_standard_4_08_to_4_21_1k.csv").write_text(header + "".join(lines))
    return folder


def _gowalla(folder: Path, data: Histories) -> Path:
    path = folder / "loc-gowalla_totalCheckins.txt.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for user, item, at, _ in reversed(list(_events(data))):  # the latest first, as published
            time = np.datetime64(_START + 60 * at, "s")
            file.write(f"{user}\t{time}Z\t{30 + item / 1e4:.10f}\t{-97 - item / 1e4:.10f}\t{8932 + 3 * item}\n")
    return path


def _amazon(folder: Path, data: Histories) -> Path:
    path = folder / "Toys_and_Games.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("user_id,parent_asin,rating,timestamp\n")
        for user, item, at, liked in _events(data):
            file.write(f"A{user:027d},B{item:09d},{5.0 if liked else 2.0},{1000 * (_START + 60 * at)}\n")
    return path


def _amazon_reviews(folder: Path, data: Histories) -> Path:
    path = folder / "Toys_and_Games.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for user, item, at, liked in _events(data):
            review = {"rating": 5.0 if liked else 2.0, "title": "", "text": "", "asin": f"B{item:09d}",
                      "parent_asin": f"B{item:09d}", "user_id": f"A{user:027d}",
                      "timestamp": 1000 * (_START + 60 * at), "helpful_vote": 0, "verified_purchase": True}  # fmt: skip
            file.write(json.dumps(review) + "\n")
    return path


def _amazon_2018(folder: Path, data: Histories) -> Path:
    path = folder / "Video_Games.csv"
    lines = (f"B{item:09d},A{user:013d},{5.0 if liked else 2.0},{_START + 60 * at}\n"
             for user, item, at, liked in _events(data))  # fmt: skip
    path.write_text("".join(lines))
    return path


def _amazon_2014(folder: Path, data: Histories) -> Path:
    path = folder / "ratings_Books.csv"
    lines = (f"A{user:013d},{item:010d},{5.0 if liked else 2.0},{_START + 60 * at}\n"
             for user, item, at, liked in _events(data))  # fmt: skip
    path.write_text("".join(lines))
    return path


def _yambda(folder: Path, data: Histories) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet

    path = folder / "listens.parquet"
    users, items, places, liked = (np.array(column) for column in zip(*_events(data), strict=True))
    table = {
        "uid": arrow.array(users, arrow.uint32()),
        "timestamp": arrow.array(5 * places, arrow.uint32()),
        "item_id": arrow.array(items + 1, arrow.uint32()),
        "is_organic": arrow.array(np.ones(len(users)), arrow.uint8()),
        "played_ratio_pct": arrow.array(np.where(liked, 100, 10), arrow.uint16()),
        "track_length_seconds": arrow.array(np.full(len(users), 200), arrow.uint32()),
    }
    parquet.write_table(arrow.table(table), path)
    return path


def _yambda_sequential(folder: Path, data: Histories) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet

    path = folder / "likes.parquet"
    places = np.arange(len(data.items)) - np.repeat(data.offsets[:-1], data.lengths)
    columns = {"timestamp": 5 * places, "item_id": data.items + 1, "is_organic": np.ones(len(places), np.int64)}
    offsets = arrow.array(data.offsets, arrow.int32())
    lists = {
        name: arrow.ListArray.from_arrays(offsets, arrow.array(values, arrow.uint32()))
        for name, values in columns.items()
    }
    parquet.write_table(arrow.table({"uid": arrow.array(data.users, arrow.uint32()), **lists}), path)
    return path


def _criteo(folder: Path, data: Histories) -> Path:
    path = folder / "day_0.gz"
    rng = np.random.default_rng(len(data.items))
    popular = rng.zipf(1.3, (100 * len(data.users), 26)).astype(np.uint64)
    mixed = (popular * np.arange(1, 27, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    hashed = (mixed >> np.uint64(32)).tolist()
    missing = (rng.random((len(hashed), 26)) < 0.05).tolist()
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for keys, gaps in zip(hashed, missing, strict=True):
            features = ["" if gap else f"{key:08x}" for key, gap in zip(keys, gaps, strict=True)]
            file.write("\t".join(["0", *(["5"] * 13), *features]) + "\n")
    return path


WRITERS: dict[str, Callable[[Path, Histories], Path]] = {
    "MovieLens-1M": _movielens_1m,
    "MovieLens": _movielens,
    "KuaiRand": _kuairand,
    "Gowalla": _gowalla,
    "Amazon": _amazon,
    "Amazon-reviews": _amazon_reviews,
    "Amazon-2018": _amazon_2018,
    "Amazon-2014": _amazon_2014,
    "Yambda": _yambda,
    "Yambda-sequential": _yambda_sequential,
    "Criteo": _criteo,
}
