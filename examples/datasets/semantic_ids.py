"""Sequences of semantic ids: each item is a tuple of codes, as generative retrieval models read them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user

_TOKEN = re.compile(r"^<[a-z]+_(\d+)>$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticIds:
    """The codes of each item.

    Attributes:
        codes: (items, levels) int64.
        histories: What the users did; item numbers are rows of `codes`.
    """

    codes: NDArray[np.int64]
    histories: Histories

    @property
    def codebook_sizes(self) -> NDArray[np.int64]:
        """(levels,) codes of each level."""
        sizes: NDArray[np.int64] = self.codes.max(axis=0) + 1
        return sizes

    def tokens(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """(len(items) × levels,) tokens: the codes of each item one after the other, levels numbered on one another."""
        first = np.concatenate([[0], np.cumsum(self.codebook_sizes)[:-1]])
        flat: NDArray[np.int64] = (self.codes[items] + first).reshape(-1)
        return flat


def read_semantic_ids(index: str | Path, interactions: str | Path) -> SemanticIds:
    """Reads `NAME.index.json` (item → codes) and `NAME.inter.json` (user → items in the order of time).

    Codes are whole numbers or tokens such as `<a_17>`, the form in which LC-Rec and its successors publish them. Every
    event counts as liked; times are positions.

    Raises:
        ValueError: If a file is not in this form, codes are of different depth, or a user has an item without codes.
    """
    table, users = _lists(index, "item"), _lists(interactions, "user")
    codes = {item: [_code(value, item) for value in values] for item, values in table.items()}
    depths = {len(values) for values in codes.values()}
    if len(depths) != 1 or 0 in depths:
        raise ValueError(f"{index} has items of {sorted(depths)} codes; all need the same number, at least 1")
    events = [
        (user, _whole(item, interactions, "item"), place)
        for user, items in users.items()
        for place, item in enumerate(items)
    ]
    if not events:
        raise ValueError(f"{interactions} holds no events; give items of at least one user")
    unknown = sorted({item for _, item, _ in events} - codes.keys())
    if unknown:
        raise ValueError(f"{interactions} has items without codes in {index}, for example {unknown[:5]}")
    columns = np.array(events, dtype=np.int64).reshape(-1, 3)
    histories = group_by_user(
        users=columns[:, 0],
        items=columns[:, 1],
        actions=np.zeros(len(columns), dtype=np.int64),
        liked=np.ones(len(columns), dtype=np.bool_),
        times=columns[:, 2],
    )
    rows = np.array([codes[item] for item in histories.item_ids.tolist()], dtype=np.int64)
    return SemanticIds(codes=rows.reshape(-1, depths.pop()), histories=histories)


def _lists(path: str | Path, kind: str) -> dict[int, list[Any]]:
    """What a file of lists holds, by whole numbers."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(values, list) for values in content.values()):
        raise ValueError(f"{path} is no object of lists; give one list for each {kind}")
    return {_whole(key, path, kind): values for key, values in content.items()}


def _whole(value: Any, path: str | Path, kind: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has the {kind} {value!r}; number {kind}s from 0, as whole numbers") from error


def _code(value: Any, item: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _TOKEN.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"item {item} has the code {value!r}; give whole numbers or tokens such as <a_17>")
    return int(match.group(1))
