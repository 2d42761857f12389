"""MovieLens-1M, -10M, -20M, -25M and -32M as GroupLens publishes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user
from examples.datasets.tables import Watch, open_lines, read_numbers

AGES = (1, 18, 25, 35, 45, 50, 56)
LIKED_FROM = 4.0  # stars
HEADER = "userId,movieId,rating,timestamp"
_RATING = np.dtype([("user", np.int64), ("movie", np.int64), ("stars", np.float64), ("time", np.int64)])


def read_movielens(folder: str | Path, *, watch: Watch | None = None) -> Histories:
    """Reads an unpacked `ml-1m` (`ratings.dat`, `users.dat`), or `ml-20m`, `ml-25m`, `ml-32m` (`ratings.csv`).

    Actions are twice the rating (half stars are counted), liked means four stars or more, times are Unix seconds. The
    context of 1M is sex (0 F, 1 M), age group (0 to 6) and occupation (0 to 20); others have none.

    Args:
        folder: Where the files are.
        watch: Is told how far reading is.

    Raises:
        FileNotFoundError: If the folder holds neither.
        ValueError: If a file is not in its published format.
    """
    root = Path(folder)
    if (root / "ratings.dat").exists():
        table = _ratings(root / "ratings.dat", separator="::", watch=watch)
        context = _users(root / "users.dat") if (root / "users.dat").exists() else None
    elif (root / "ratings.csv").exists():
        table = _ratings(root / "ratings.csv", header=HEADER, watch=watch)
        context = None
    else:
        raise FileNotFoundError(f"{root} has neither ratings.dat (MovieLens-1M) nor ratings.csv "
                                "(MovieLens-20M, -25M, -32M)")  # fmt: skip
    return group_by_user(
        users=table["user"],
        items=table["movie"],
        actions=np.rint(2 * table["stars"]).astype(np.int64),
        liked=table["stars"] >= LIKED_FROM,
        times=table["time"],
        context=context,
    )


def _ratings(
    path: Path, *, separator: str = ",", header: str | None = None, watch: Watch | None = None
) -> NDArray[Any]:
    with open_lines(path, watch) as file:
        if header is not None and (found := next(file, "").strip()) != header:
            raise ValueError(f"{path}, line 1: the header is {found!r}; expected {header}")
        lines = file if separator == "," else (line.replace(separator, ",") for line in file)
        first = 1 if header is None else 2
        parts = list(read_numbers(lines, path, dtype=_RATING, first=first, wanted="user, movie, rating, timestamp"))
    if not parts:
        raise ValueError(f"{path} holds no ratings; unpack the data set anew")
    table = np.concatenate(parts)
    wrong = ~((table["stars"] > 0) & (table["stars"] <= 5))
    if wrong.any():
        example = table[int(wrong.argmax())]
        raise ValueError(f"{path}: user {example['user']} rated movie {example['movie']} {example['stars']}; "
                         "ratings are 0.5 to 5 stars")  # fmt: skip
    return table


def _users(path: Path) -> dict[int, list[int]]:
    """UserID::Gender::Age::Occupation::Zip-code, by user."""
    users = {}
    for number, line in enumerate(path.read_text(encoding="latin-1").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            user, gender, age, occupation, _ = line.split("::")
            users[int(user)] = ["FM".index(gender), AGES.index(int(age)), int(occupation)]
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {line!r} is not UserID::Gender::Age::Occupation::Zip-code"
            ) from error
    return users
