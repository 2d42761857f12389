"""Yambda, Yandex's music listens, as published: parquet files, flat or with a row for each user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user
from examples.datasets.tables import Watch

NEEDED = ("uid", "timestamp", "item_id")
LISTENED_FROM = 50  # percent of the track, above which the data set itself speaks of a listen
_OPTIONAL = ("event_type", "played_ratio_pct")
_ROWS = 1 << 20


def read_yambda(path: str | Path, *, watch: Watch | None = None) -> Histories:
    """Reads a file such as `flat/50m/listens.parquet`, `flat/50m/multi_event.parquet`, `sequential/50m/likes.parquet`.

    Liked means that a track was played to more than half, or an event of the type `like`; in files without these
    columns all events count as liked. An action is 1 for a liked event, else 0. Times are seconds.

    Args:
        path: The file.
        watch: Is told how far reading is.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is not in its published format.
    """
    path = Path(path)
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path} is a parquet file; pip install pyarrow to read it") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in NEEDED if name not in names]
            if missing:
                raise ValueError(f"{path} has no column {', '.join(missing)}; its columns are {', '.join(names)}")
            wanted = [*NEEDED, *(name for name in _OPTIONAL if name in names)]
            size, rows, read = path.stat().st_size, max(file.metadata.num_rows, 1), 0
            parts = []
            for batch in file.iter_batches(batch_size=_ROWS, columns=wanted):
                columns = {name: batch.column(name) for name in wanted}
                _check(columns, path, read)
                parts.append(_events(columns))
                read += batch.num_rows
                if watch is not None:
                    watch(path, size * read // rows)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole parquet file ({error}); download it anew") from error
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    if not table or not len(table["users"]):
        raise ValueError(f"{path} holds no events; download it anew")
    return group_by_user(
        users=table["users"],
        items=table["items"],
        actions=table["liked"].astype(np.int64),
        liked=table["liked"],
        times=table["times"],
    )


def _is_list(column: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(column.type) or types.is_large_list(column.type))


def _check(columns: dict[str, Any], path: Path, first: int) -> None:
    """Refuses rows that lack a number, and lists of a row that differ in length.

    Args:
        columns: Of some rows.
        path: Of their file.
        first: Rows before them.

    Raises:
        ValueError: If there are such rows, with the file, the row and the column.
    """
    from pyarrow import compute, types

    for name in NEEDED:
        column = columns[name]
        if _is_list(column) != (name != "uid" and _is_list(columns["item_id"])) or not types.is_integer(
            column.type.value_type if _is_list(column) else column.type
        ):
            raise ValueError(f"{path}: the column {name} is of the type {column.type}; a file has whole numbers, or "
                             "lists of them in all columns but uid")  # fmt: skip
        _refuse(column.is_null(), path, first, f"has no {name}")
    lists = {name: column for name, column in columns.items() if name != "uid" and _is_list(column)}
    counts = {name: compute.list_value_length(column) for name, column in lists.items()}
    for name, count in counts.items():
        unequal = compute.fill_null(compute.not_equal(count, counts["item_id"]), fill_value=True)
        _refuse(unequal, path, first, f"has another number of values in {name} than in item_id")
    for name in NEEDED:
        if name in lists and (flat := compute.list_flatten(lists[name])).null_count:
            rows = compute.list_parent_indices(lists[name]).filter(flat.is_null())
            row = first + rows[0].as_py() + 1
            raise ValueError(f"{path}, row {row} has no {name} for each event; download it anew")


def _refuse(wrong: Any, path: Path, first: int, what: str) -> None:
    """Raises a ValueError for the first of the rows that is wrong."""
    from pyarrow import compute

    at = compute.index(wrong, True).as_py()
    if at >= 0:
        raise ValueError(f"{path}, row {first + at + 1} {what}; download it anew")


def _events(columns: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The events of some rows; a row is an event, or a user with lists of events."""
    import pyarrow as arrow
    from pyarrow import compute

    users = columns["uid"]
    if _is_list(columns["item_id"]):
        counts = compute.list_value_length(columns["item_id"])
        users = np.repeat(users.to_numpy(zero_copy_only=False), counts.to_numpy(zero_copy_only=False))
        columns = {name: compute.list_flatten(column) for name, column in columns.items() if name != "uid"}
    else:
        users = users.to_numpy(zero_copy_only=False)
    liked = np.ones(len(users), dtype=np.bool_)
    if any(name in columns for name in _OPTIONAL):
        liked[:] = False
    if "event_type" in columns:
        liked |= np.array(columns["event_type"].cast(arrow.string()).to_pylist()) == "like"
    if "played_ratio_pct" in columns:
        played = compute.fill_null(columns["played_ratio_pct"], 0).to_numpy(zero_copy_only=False)
        liked |= played > LISTENED_FROM
    return {
        "users": users.astype(np.int64),
        "items": columns["item_id"].to_numpy(zero_copy_only=False).astype(np.int64),
        "times": columns["timestamp"].to_numpy(zero_copy_only=False).astype(np.int64),
        "liked": liked,
    }
