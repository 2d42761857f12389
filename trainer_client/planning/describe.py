"""A model's tables as the planner wants them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from evenkeel.placement import InvalidInputError, Optimizer, Table
from evenkeel.placement.access import Access, Zipf

_BYTES = {"FP32": 4, "FP16": 2, "BF16": 2}


def describe_configs(
    configs: Iterable[Any],
    *,
    optimizer: Optimizer = Optimizer.ADAM,
    ids_per_sample: Mapping[str, float] | None = None,
    access: Mapping[str, Access] | None = None,
    group: str = "",
    **same: Any,
) -> tuple[Table, ...]:
    """Tables of the planner from TorchRec's `EmbeddingConfig` or `EmbeddingBagConfig`.

    Args:
        configs: The configurations.
        optimizer: Optimizer of the tables.
        ids_per_sample: Mean number of lookups of a sample by table name; the number of its features by default.
        access: Access statistics by table name, for instance of a `KeyHistogram`.
        group: Name of the module that owns the tables.
        same: Fields of `evenkeel.placement.Table` that all tables share.

    Raises:
        InvalidInputError: If no runtime keeps a table's data type, or statistics are of a table that is not there.
    """
    configs = list(configs)
    names = {config.name for config in configs}
    for what, given in (("ids_per_sample", ids_per_sample), ("access", access)):
        for name in given or {}:
            remedy = f"use one of: {', '.join(sorted(names))}"
            if name not in names:
                raise InvalidInputError(f"{what}[{name!r}]", name, "is no table", remedy)
    tables = []
    for config in configs:
        kind = getattr(config.data_type, "name", str(config.data_type))
        if kind not in _BYTES:
            remedy = f"use one of: {', '.join(_BYTES)}"
            raise InvalidInputError(f"{config.name}.data_type", kind, "is not planned for", remedy)
        features = max(1, len(config.feature_names))
        tables.append(
            Table(
                name=config.name,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                value_bytes=_BYTES[kind],
                features=features,
                ids_per_sample=float((ids_per_sample or {}).get(config.name, features)),
                access=(access or {}).get(config.name, Zipf()),
                optimizer=optimizer,
                pooled=hasattr(config, "pooling"),
                group=group,
                **same,
            )
        )
    return tuple(tables)


def describe_model(model: nn.Module, **options: Any) -> tuple[Table, ...]:
    """Tables of all embedding collections of `model`, each in the group of its module's path.

    Args:
        model: The model, before sharding.
        options: As for `describe_configs`, `group` excepted; statistics by table name may name any table.

    Raises:
        InvalidInputError: If `describe_configs` would, or a table is in two modules.
    """
    found: dict[str, Table] = {}
    given: dict[str, Any] = {what: dict(options.pop(what, None) or {}) for what in ("ids_per_sample", "access")}
    for path, module in embedding_modules(model):
        configs = module_configs(module)
        names = {config.name for config in configs}
        own: dict[str, Any] = {
            what: {name: value for name, value in by.items() if name in names} for what, by in given.items()
        }
        for table in describe_configs(configs, group=path, **own, **options):
            if table.name in found:
                raise InvalidInputError(table.name, path, "is in two modules", "give tables names of their own")
            found[table.name] = table
    for what, by in given.items():
        for name in by.keys() - found.keys():
            raise InvalidInputError(f"{what}[{name!r}]", name, "is no table", f"use one of: {', '.join(sorted(found))}")
    return tuple(found.values())


def embedding_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every unsharded embedding collection of TorchRec in `model`."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

    kinds = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    return [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]


def module_configs(module: Any) -> list[Any]:
    """The table configurations of an embedding collection."""
    return list(
        module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    )
