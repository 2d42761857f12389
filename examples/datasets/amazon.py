"""Amazon's reviews of 2014, 2018 and 2023 as McAuley's group publishes them: ratings only, or whole reviews."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from examples.datasets.histories import Histories, group_by_user
from examples.datasets.tables import Watch, chunks, open_lines, split_lines

HEADER = "user_id,parent_asin,rating,timestamp"
# Of 2023, without and with the user's items before; and of ratings of 2014 as Kaggle hands them on.
HEADERS = (HEADER, f"{HEADER},history", "UserId,ProductId,Rating,Timestamp")
LIKED_FROM = 4.0  # stars
_ASIN = 10  # characters of an item's id; ids of users are longer
_LOOKED_AT = 1000  # lines
# Names of user, item, stars and time in a review: of 2023, and before.
_REVIEWS = (("user_id", "parent_asin", "rating", "timestamp"), ("reviewerID", "asin", "overall", "unixReviewTime"))

Event = tuple[str, str, float, int]


def read_amazon(path: str | Path, *, watch: Watch | None = None) -> Histories:
    """Reads a file of one category, also packed (`.gz`).

    - Ratings only: 2023 with the header `user_id,parent_asin,rating,timestamp`, also with a column `history`; 2014
      (user first) and 2018 (item first) without one. Which column holds the items is seen by their ids of ten
      characters. Kaggle's copies of 2014 have the header `UserId,ProductId,Rating,Timestamp`.
    - Reviews, a JSON object a line: `….jsonl` (2023), `….json` (2014, 2018).

    Users and items are numbered in the order of their first appearance, since their ids are no numbers. An action is
    the number of stars; liked means four stars or more. Times are milliseconds (2023) or seconds.

    Args:
        path: The file.
        watch: Is told how far reading is.

    Raises:
        ValueError: If it is not in a published format.
    """
    path = Path(path)
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    columns: tuple[list[int], list[int], list[float], list[int]] = ([], [], [], [])
    with open_lines(path, watch) as lines:
        start = list(islice(lines, _LOOKED_AT))
        events = _reviews if start and start[0].lstrip().startswith("{") else _ratings
        for user, item, stars, time in events(start, lines, path):
            columns[0].append(users.setdefault(user, len(users)))
            columns[1].append(items.setdefault(item, len(items)))
            columns[2].append(stars)
            columns[3].append(time)
    if not columns[0]:
        raise ValueError(f"{path} holds no ratings; download it anew")
    stars_given = np.array(columns[2])
    return group_by_user(
        users=np.array(columns[0], dtype=np.int64),
        items=np.array(columns[1], dtype=np.int64),
        actions=np.rint(stars_given).astype(np.int64),
        liked=stars_given >= LIKED_FROM,
        times=np.array(columns[3], dtype=np.int64),
    )


def _ratings(start: list[str], rest: Iterator[str], path: Path) -> Iterator[Event]:
    headed = bool(start) and start[0].strip() in HEADERS
    wanted = f"{HEADER} of 2023, user,item,rating,timestamp of 2014, or item,user,rating,timestamp of 2018"
    columns = 1 + start[0].count(",") if headed else 4
    looked_at = [line.strip().split(",") for line in start[headed:] if not line.isspace()]
    if any(len(row) != columns for row in looked_at[:1]):
        raise ValueError(f"{path}, line {1 + headed}: {','.join(looked_at[0])[:200]!r} is not {wanted}")
    item = 1
    if not headed and looked_at:
        asins = [all(len(row[column]) == _ASIN for row in looked_at if len(row) == 4) for column in (0, 1)]
        if asins[0] == asins[1]:
            raise ValueError(f"{path}, line 1: {','.join(looked_at[0])[:200]!r} is not {wanted}: either the first or "
                             "the second column must hold items, of ten characters each")  # fmt: skip
        item = asins.index(True)
    for first, chunk in chunks(chain(start[headed:], rest), 1 + headed):
        for row in split_lines(chunk, path, first=first, separator=",", columns=columns, wanted=wanted):
            try:
                if not row[0] or not row[1]:
                    raise ValueError("an id is missing")
                yield row[1 - item], row[item], float(row[2]), int(row[3])
            except ValueError as error:
                raise ValueError(f"{path}: {','.join(row)[:200]!r} is not {wanted}") from error


def _reviews(start: list[str], rest: Iterator[str], path: Path) -> Iterator[Event]:
    names: tuple[str, ...] | None = None
    for number, line in enumerate(chain(start, rest), start=1):
        if line.isspace():
            continue
        try:
            review: dict[str, Any] = json.loads(line)
            names = names or next(keys for keys in _REVIEWS if keys[0] in review)
            user, item, stars, time = (review[name] for name in names)
            if not all(isinstance(id_, str) and id_ for id_ in (user, item)):
                raise ValueError("an id is missing")
            yield user, item, float(stars), int(time)
        except (StopIteration, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {line.rstrip()[:200]!r} is not a review with "
                + " or ".join(", ".join(keys) for keys in _REVIEWS)
            ) from error
