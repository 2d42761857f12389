"""How to balance, from a configuration file: every part chosen by its name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from trainer_client.balancing import BalanceOptions
from trainer_client.balancing.costs import make_cost
from trainer_client.balancing.pipelines import PIPELINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a file chose.

    Attributes:
        cost: The cost, made from its name and options; None: not in the file.
        options: How to balance.
        pipeline: Name of a pipeline for `make_pipeline`; None: not in the file.
    """

    cost: Callable[[Any], Any] | None
    options: BalanceOptions
    pipeline: str | None


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, as YAML 1.2 does, and not for text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+"), list("-+0123456789"))


def load_configuration(path: str | Path) -> Configuration:
    """Reads a YAML or TOML file.

        cost: {name: hstu, num_layers: 8, width: 1024, num_heads: 4, head_dim: 256, history: history}
        balance: {strategy: minimal_move, depth: 3, timeout: 2.0}    # durations in seconds
        pipeline: sparse_dist

    All three are optional. Names are those of `cost_names()`, `strategies()` and `pipeline_names()`, own ones of
    installed packages among them.

    Raises:
        ValueError: If something is unknown or out of range; the message names the file, the field and what is known.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        return read_configuration(tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _Loader) or {})
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_configuration(content: Any) -> Configuration:
    """The same from what a file holds.

    Raises:
        ValueError: If `load_configuration` would.
    """
    content = _mapping("the configuration", content, ("cost", "balance", "pipeline"))
    cost, pipeline = content.get("cost"), content.get("pipeline")
    if isinstance(cost, str):
        cost = {"name": cost}
    if "cost" in content and (not isinstance(cost, Mapping) or "name" not in cost):
        raise ValueError("cost has no name; give name and options, for example {name: tokens, tokens: history}")
    if pipeline is not None:
        PIPELINES.check(pipeline)
    return Configuration(
        cost=None if cost is None else make_cost(**cost),
        options=_options(content.get("balance") or {}),
        pipeline=pipeline,
    )


def _options(section: Any) -> BalanceOptions:
    defaults = BalanceOptions()
    values = dict(_mapping("balance", section, [field.name for field in fields(BalanceOptions) if field.init]))
    for key, value in values.items():
        if isinstance(getattr(defaults, key), timedelta):
            try:
                values[key] = timedelta(seconds=value)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{key} is {value!r}; give seconds as a number") from error
    return BalanceOptions(**values)


def _mapping(what: str, value: Any, keys: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {type(value).__name__}; give a mapping of {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise ValueError(f"{what} has no {key!r}; use {', '.join(keys)}")
    return value
