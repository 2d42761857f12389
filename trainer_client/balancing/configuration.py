"""How to balance, from a configuration file: every part chosen by its name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from evenkeel.partitioning.registry import STRATEGIES
from trainer_client.balancing import BalanceOptions
from trainer_client.balancing.costs import make_cost
from trainer_client.balancing.pipelines import PIPELINES

_DURATIONS = {"timeout", "group_timeout"}


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


def load_configuration(path: str | Path) -> Configuration:
    """Reads a YAML or TOML file.

        cost: {name: hstu, num_layers: 8, width: 1024, num_heads: 4, head_dim: 256, history: history}
        balance: {strategy: minimal_move, window: 4, timeout: 2.0}    # durations in seconds
        pipeline: sparse_dist

    All three are optional. Names are those of `cost_names()`, `strategies()` and `pipeline_names()`, own ones of
    installed packages among them.

    Raises:
        ValueError: If something is unknown or out of range; the message names the file, the field and what is known.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        content: Any = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
        return read_configuration(content)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_configuration(content: Mapping[str, Any]) -> Configuration:
    """The same from what a file holds.

    Raises:
        ValueError: If `load_configuration` would.
    """
    known = ("cost", "balance", "pipeline")
    if not isinstance(content, Mapping):
        raise ValueError(f"the configuration is {type(content).__name__}; give a mapping of {', '.join(known)}")
    for key in content:
        if key not in known:
            raise ValueError(f"there is no section {key!r}; use {', '.join(known)}")
    pipeline = content.get("pipeline")
    if pipeline is not None:
        PIPELINES.check(pipeline)
    return Configuration(
        cost=_cost(content["cost"]) if "cost" in content else None,
        options=_options(content.get("balance") or {}),
        pipeline=pipeline,
    )


def _cost(section: Any) -> Callable[[Any], Any]:
    if isinstance(section, str):
        section = {"name": section}
    if not isinstance(section, Mapping) or "name" not in section:
        raise ValueError("cost has no name; give name and options, for example {name: tokens, tokens: history}")
    return make_cost(section["name"], **{key: value for key, value in section.items() if key != "name"})


def _options(section: Any) -> BalanceOptions:
    if not isinstance(section, Mapping):
        raise ValueError(f"balance is {type(section).__name__}; give a mapping of options")
    known = [field.name for field in fields(BalanceOptions) if field.init]
    for key in section:
        if key not in known:
            raise ValueError(f"balance has no option {key!r}; use {', '.join(known)}")
    values: dict[str, Any] = {key: _number(key, value) for key, value in section.items()}
    for key in _DURATIONS & values.keys():
        try:
            values[key] = timedelta(seconds=values[key])
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{key} is {section[key]!r}; give seconds as a number") from error
    STRATEGIES.check(values.get("strategy", BalanceOptions().strategy))
    return BalanceOptions(**values)


def _number(key: str, value: Any) -> Any:
    """A duration or share as a number: YAML takes 1e-3, which has no dot, for text."""
    if key in (*_DURATIONS, "tolerance", "move_price") and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
