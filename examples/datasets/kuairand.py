"""KuaiRand-Pure, -1K and -27K as published."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user
from examples.datasets.tables import Watch, open_lines, read_numbers

# The bits of an action, the lowest first, by the columns of the log.
ACTIONS = (
    "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter",
)  # fmt: skip
CONTEXT = ("user_active_degree", "is_live_streamer", "is_video_author", "follow_user_num_range", "fans_user_num_range",
           "friend_user_num_range", "register_days_range")  # fmt: skip


def read_kuairand(
    folder: str | Path, *, random_exposure: bool = False, liked: str = "is_click", watch: Watch | None = None
) -> Histories:
    """Reads an unpacked KuaiRand folder, or its `data` folder: logs in one part or in several.

    Actions are a bit set of `ACTIONS`; times are milliseconds. The context are the categorical user features
    `CONTEXT`, numbered by their sorted values.

    Args:
        folder: Where the files are.
        random_exposure: Whether to add the log of randomly exposed videos.
        liked: The column that a ranking model shall predict.
        watch: Is told how far reading is.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If a file is not in its published format, or there is no such column to predict.
    """
    if liked not in ACTIONS:
        raise ValueError(f"liked is {liked!r}; use one of {', '.join(ACTIONS)}")
    root = Path(folder)
    root = root / "data" if (root / "data").is_dir() else root
    logs = sorted(root.glob("log_standard_*.csv"))
    if random_exposure:
        logs += sorted(root.glob("log_random_*.csv"))
    if not logs:
        raise FileNotFoundError(f"{root} has no log_standard_*.csv; unpack KuaiRand there")
    table = np.concatenate([_events(path, watch) for path in logs])
    if not len(table):
        raise ValueError(f"the logs of {root} hold no events; unpack KuaiRand anew")
    features = sorted(root.glob("user_features_*.csv"))
    return group_by_user(
        users=table[:, 0],
        items=table[:, 1],
        actions=table[:, 3],
        liked=(table[:, 3] >> ACTIONS.index(liked) & 1).astype(np.bool_),
        times=table[:, 2],
        context=_context(features) if features else None,
    )


def _events(path: Path, watch: Watch | None) -> NDArray[np.int64]:
    """(events, 4) user, video, time and actions of a log, by the names in its header."""
    names = ("user_id", "video_id", "time_ms", *ACTIONS)
    with open_lines(path, watch) as file:
        header = [name.strip() for name in next(file, "").split(",")]
        missing = [name for name in names if name not in header]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; its columns are {', '.join(header)}")
        columns = [header.index(name) for name in names]
        bits = 1 << np.arange(len(ACTIONS), dtype=np.int64)
        wanted = "a line of whole numbers for " + ", ".join(header)
        parts = [np.zeros((0, 4), dtype=np.int64)]
        for table in read_numbers(file, path, dtype=np.int64, first=2, wanted=wanted, columns=columns):
            parts.append(np.column_stack([table[:, :3], (table[:, 3:] != 0) @ bits]))
    return np.concatenate(parts)


def _context(paths: list[Path]) -> dict[int, list[int]]:
    rows: dict[int, dict[str, str]] = {}
    for path in paths:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                try:
                    user = int(row["user_id"])
                except (KeyError, TypeError, ValueError):
                    user = -1
                if user < 0 or None in row.values():
                    raise ValueError(f"{path}, line {reader.line_num}: {','.join(filter(None, row.values()))!r} is not "
                                     f"a user_id and features {', '.join(reader.fieldnames or ())}")  # fmt: skip
                rows[user] = row
    present = [name for name in CONTEXT if rows and all(name in row for row in rows.values())]
    numbers = {
        name: {value: number for number, value in enumerate(sorted({row[name] for row in rows.values()}))}
        for name in present
    }
    return {user: [numbers[name][row[name]] for name in present] for user, row in rows.items()}
