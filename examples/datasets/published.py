"""Data sets of users and what they did, read from their published files by pyarrow; text may be packed as `.gz`."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user

KNOWN = (
    "a MovieLens folder (ratings.dat or ratings.csv), a KuaiRand folder (log_standard_*.csv), "
    "loc-gowalla_totalCheckins.txt, an Amazon category (ratings as .csv, reviews as .jsonl or .json), "
    "or a Yambda .parquet; text files may be packed as .gz"
)
AGES = (1, 18, 25, 35, 45, 50, 56)
LIKED_FROM = 4.0  # stars
LISTENED_FROM = 50  # percent of a track, above which Yambda itself speaks of a listen
# The bits of an action of KuaiRand, the lowest first, and the features of its users.
ACTIONS = (
    "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter",
)  # fmt: skip
CONTEXT = ("user_active_degree", "is_live_streamer", "is_video_author", "follow_user_num_range", "fans_user_num_range",
           "friend_user_num_range", "register_days_range")  # fmt: skip
# User, item, stars and time of Amazon's ratings, of 2023 and as Kaggle hands on those of 2014; and of its reviews.
_RATINGS = (("user_id", "parent_asin", "rating", "timestamp"), ("UserId", "ProductId", "Rating", "Timestamp"))
_REVIEWS = (("user_id", "parent_asin", "rating", "timestamp"), ("reviewerID", "asin", "overall", "unixReviewTime"))
_ASIN = 10  # characters of an item's id at Amazon; ids of users are longer

Columns = dict[str, NDArray[Any]]


def read_histories(path: str | Path) -> Histories:
    """Reads a data set by what its files look like.

    Args:
        path: Its folder or file.

    Raises:
        FileNotFoundError: If there is nothing, or a folder lacks the files.
        ValueError: If it is no such data set, or a file is not in its published format.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give {KNOWN}")
    if path.name in ("ratings.dat", "ratings.csv") and ("::" in _first_line(path) or "movieId" in _first_line(path)):
        path = path.parent
    if path.is_dir():
        if (path / "ratings.dat").exists() or (path / "ratings.csv").exists():
            return read_movielens(path)
        if _logs(path):
            return read_kuairand(path)
        raise FileNotFoundError(f"{path} has neither ratings.dat nor ratings.csv (MovieLens) nor log_standard_*.csv "
                                f"(KuaiRand); give {KNOWN}")  # fmt: skip
    line = _first_line(path)
    if line.startswith("PAR1"):
        return read_yambda(path)
    if line.count("\t") == 4:
        return read_gowalla(path)
    if line.startswith("{") or line.count(",") in (3, 4):
        return read_amazon(path)
    raise ValueError(f"{path} is none of the known data sets; give {KNOWN}")


def read_movielens(folder: str | Path) -> Histories:
    """MovieLens-1M (`ratings.dat`, `users.dat`), -20M, -25M or -32M (`ratings.csv`), unpacked.

    Actions are twice the rating (half stars are counted), liked means four stars or more, times are Unix seconds. The
    context of 1M is sex (0 F, 1 M), age group (0 to 6) and occupation (0 to 20); others have none.

    Raises:
        FileNotFoundError: If the folder holds neither.
        ValueError: If a file is not in its published format.
    """
    root = Path(folder)
    old, new = root / "ratings.dat", root / "ratings.csv"
    types = {"userId": "int64", "movieId": "int64", "rating": "float64", "timestamp": "int64"}
    if old.exists():  # columns parted by two colons: every second one is empty
        names = ["userId", "", "movieId", "", "rating", "", "timestamp"]
        table = _read_text(old, types, names=[name or f"empty{at}" for at, name in enumerate(names)], delimiter=":")
    elif new.exists():
        table = _read_text(new, types)
    else:
        raise FileNotFoundError(f"{root} has neither ratings.dat (MovieLens-1M) nor ratings.csv (-20M, -25M, -32M)")
    context = {}
    if old.exists() and (root / "users.dat").exists():
        for line in (root / "users.dat").read_text(encoding="latin-1").splitlines():
            user, gender, age, occupation, _ = line.split("::")
            context[int(user)] = ["FM".index(gender), AGES.index(int(age)), int(occupation)]
    return group_by_user(
        users=table["userId"], items=table["movieId"], actions=np.rint(2 * table["rating"]).astype(np.int64),
        liked=table["rating"] >= LIKED_FROM, times=table["timestamp"], context=context,
    )  # fmt: skip


def read_kuairand(folder: str | Path, *, random_exposure: bool = False, liked: str = "is_click") -> Histories:
    """KuaiRand-Pure, -1K or -27K, unpacked: its folder, or the folder `data` in it.

    Actions are a bit set of `ACTIONS`; times are milliseconds. The context are the categorical user features
    `CONTEXT`, numbered by their sorted values.

    Args:
        folder: Where the files are.
        random_exposure: Whether to add the log of randomly exposed videos.
        liked: The column that a ranking model shall predict.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If a file is not in its published format, or there is no such column to predict.
    """
    if liked not in ACTIONS:
        raise ValueError(f"liked is {liked!r}; use one of {', '.join(ACTIONS)}")
    logs = _logs(Path(folder), "log_*.csv" if random_exposure else "log_standard_*.csv")
    if not logs:
        raise FileNotFoundError(f"{folder} has no log_standard_*.csv; unpack KuaiRand there")
    types = dict.fromkeys(("user_id", "video_id", "time_ms", *ACTIONS), "int64")
    tables = [_read_text(path, types) for path in logs]
    table = {name: np.concatenate([one[name] for one in tables]) for name in types}
    actions = sum((table[name] != 0).astype(np.int64) << bit for bit, name in enumerate(ACTIONS))
    context: dict[int, list[int]] = {}
    for path in sorted(logs[0].parent.glob("user_features_*.csv")):
        features = _read_text(path, {"user_id": "int64"} | dict.fromkeys(CONTEXT, "string"))
        numbers = [np.unique(features[name], return_inverse=True)[1] for name in CONTEXT]
        context |= dict(zip(features["user_id"].tolist(), np.stack(numbers, axis=1).tolist(), strict=True))
    return group_by_user(
        users=table["user_id"], items=table["video_id"], actions=np.asarray(actions),
        liked=table[liked] != 0, times=table["time_ms"], context=context,
    )  # fmt: skip


def read_gowalla(path: str | Path) -> Histories:
    """`loc-gowalla_totalCheckins.txt` of SNAP: an item is a location, all check-ins count as liked, times in seconds.

    Raises:
        ValueError: If it is not in its published format.
    """
    types = {"user": "int64", "time": "timestamp[s]", "place": "int64"}
    names = ["user", "time", "latitude", "longitude", "place"]
    table = _read_text(Path(path), types, names=names, delimiter="\t")
    count = len(table["user"])
    return group_by_user(
        users=table["user"], items=table["place"], actions=np.zeros(count, np.int64), liked=np.ones(count, np.bool_),
        times=table["time"].astype("datetime64[s]").astype(np.int64),
    )  # fmt: skip


def read_amazon(path: str | Path) -> Histories:
    """A category of Amazon's ratings or reviews of 2014, 2018 or 2023, as McAuley's group publishes them.

    Ratings are of 2023 with a header, or of 2014 (user first) and 2018 (item first) without one: ids of ten characters
    are items. Reviews are a JSON object a line. Users and items are numbered in the order of their first appearance.
    An action is the number of stars; liked means four or more. Times are milliseconds (2023) or seconds.

    Raises:
        ValueError: If it is not in a published format.
    """
    path = Path(path)
    line = _first_line(path)
    kinds = ("string", "string", "float64", "int64")
    if line.startswith("{"):
        names = next((names for names in _REVIEWS if f'"{names[0]}"' in line), _REVIEWS[0])
        table = _read_reviews(path, dict(zip(names, kinds, strict=True)))
    else:
        header = next((names for names in _RATINGS if line.startswith(",".join(names))), None)
        names = header or ("user", "item", "stars", "time")
        if header is None and len(line.partition(",")[0]) == _ASIN:
            names = ("item", "user", "stars", "time")
        types = dict(zip(names, kinds, strict=True))
        table = _read_text(path, types, names=None if header else list(names))
        names = names if header else ("user", "item", "stars", "time")
    users, items, stars, times = (table[name] for name in names)
    return group_by_user(
        users=_numbered(users), items=_numbered(items), actions=np.rint(stars).astype(np.int64),
        liked=stars >= LIKED_FROM, times=times,
    )  # fmt: skip


def read_yambda(path: str | Path) -> Histories:
    """A parquet file of Yambda, Yandex's music listens: flat, or with a row of lists for each user.

    Liked means that a track was played to more than half, or an event of the type `like`; in files without these
    columns all events count as liked. An action is 1 for a liked event, else 0. Times are seconds.

    Raises:
        ValueError: If it is not in its published format.
    """
    import pyarrow as arrow
    from pyarrow import compute, parquet

    try:
        names = parquet.read_schema(path).names
        known = [name for name in ("uid", "timestamp", "item_id", "event_type", "played_ratio_pct") if name in names]
        table = parquet.read_table(path, columns=known)
        columns = {name: table.column(name).combine_chunks() for name in known}
        if arrow.types.is_list(columns["item_id"].type):
            counts = compute.list_value_length(columns["item_id"]).to_numpy(zero_copy_only=False)
            lists = {name: compute.list_flatten(column) for name, column in columns.items() if name != "uid"}
            columns = lists | {"uid": arrow.array(np.repeat(columns["uid"].to_numpy(zero_copy_only=False), counts))}
        users, items, times = (
            columns[name].cast("int64").to_numpy(zero_copy_only=False).astype(np.int64)
            for name in ("uid", "item_id", "timestamp")
        )
    except (arrow.ArrowException, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a Yambda file as published: {error}; download it anew") from error
    liked = np.full(len(users), not {"event_type", "played_ratio_pct"} & columns.keys())
    if "event_type" in columns:
        liked |= np.array(columns["event_type"].cast("string").to_pylist()) == "like"
    if "played_ratio_pct" in columns:
        played = compute.fill_null(columns["played_ratio_pct"], 0).to_numpy(zero_copy_only=False)
        liked |= played > LISTENED_FROM
    return group_by_user(users=users, items=items, actions=liked.astype(np.int64), liked=liked, times=times)


def _logs(folder: Path, pattern: str = "log_standard_*.csv") -> list[Path]:
    return sorted(folder.glob(pattern)) or sorted((folder / "data").glob(pattern))


def _first_line(path: Path) -> str:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as file:
        return bytes(file.readline(1 << 16)).decode("utf-8-sig", "replace").strip("\r\n")


def _numbered(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Ids by the order of their first appearance."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(one, len(numbers)) for one in ids.tolist()], dtype=np.int64)


def _read_text(
    path: Path, types: dict[str, str], *, names: Sequence[str] | None = None, delimiter: str = ","
) -> Columns:
    """Columns of a text file; without `names` its first line names them."""
    import pyarrow as arrow
    from pyarrow import csv

    try:
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=names),
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(
                include_columns=list(types), column_types={name: _type(kind) for name, kind in types.items()}
            ),
        )
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise ValueError(f"{path} is not as it is published: {error}") from error
    with path.open("rb") as file:
        file.seek(-1, 2)
        whole = path.suffix == ".gz" or file.read().isspace()  # a number that was cut off is a number still
    if not whole:
        raise ValueError(f"{path} has no line break at its end, as if it had been cut off there; download it anew")
    return _whole(path, table)


def _read_reviews(path: Path, types: dict[str, str]) -> Columns:
    import pyarrow as arrow
    from pyarrow import json

    schema = arrow.schema([(name, _type(kind)) for name, kind in types.items()])
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        with arrow.input_stream(str(path), compression="detect") as stream:
            table = json.read_json(stream, json.ReadOptions(block_size=1 << 26), options)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not as it is published: {error}") from error
    return _whole(path, table)


def _whole(path: Path, table: Any) -> Columns:
    """The columns, none of which lacks a value."""
    if not table.num_rows:
        raise ValueError(f"{path} holds no events; download it anew")
    for name in table.column_names:
        if missing := table.column(name).null_count:
            raise ValueError(f"{path} has {missing} lines without {name}; download it anew")
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _type(kind: str) -> Any:
    import pyarrow as arrow

    return arrow.timestamp("s", tz="UTC") if kind == "timestamp[s]" else arrow.type_for_alias(kind)
