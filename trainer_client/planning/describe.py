"""A model's tables as the planner wants them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from evenkeel.placement import DataType, InvalidInputError, Optimizer, Sharding, Table
from evenkeel.placement.access import Access, Zipf

# by the configuration of a table, or its module
_TOLD = {"name", "rows", "dim", "data_type", "features", "pooled", "weighted", "group"}
_TYPES = {"FP32": DataType.FLOAT32, "FP16": DataType.FLOAT16, "BF16": DataType.BFLOAT16}
_SERVED = ("INT8", "UINT8", "INT4", "INT2")


def describe_configs(
    configs: Iterable[Any],
    *,
    optimizer: Optimizer = Optimizer.ADAM,
    ids_per_sample: Mapping[str, float] | None = None,
    access: Mapping[str, Access] | None = None,
    group: str = "",
    weighted: bool = False,
    **same: Any,
) -> tuple[Table, ...]:
    """Tables of the planner from TorchRec's `EmbeddingConfig` or `EmbeddingBagConfig`.

    Args:
        configs: The configurations.
        optimizer: Optimizer of the tables.
        ids_per_sample: Mean number of lookups of a sample by table name; the number of its features by default.
        access: Access statistics by table name, such as a `Histogram`.
        group: Name of the module that owns the tables.
        weighted: Whether lookups have weights, as in a collection with `is_weighted`.
        same: Fields of `evenkeel.placement.Table` that all tables share.

    Raises:
        InvalidInputError: If no runtime trains a table's data type, or statistics are of a table that is not there.
    """
    owned = [(config, {"group": group, "weighted": weighted}) for config in configs]
    return _tables(owned, ids_per_sample or {}, access or {}, {"optimizer": optimizer, **same})


def _tables(
    owned: Sequence[tuple[Any, dict[str, Any]]],
    ids_per_sample: Mapping[str, float],
    access: Mapping[str, Access],
    same: dict[str, Any],
) -> tuple[Table, ...]:
    """Tables of configurations, each with the fields that its module gives it, beside those that all share."""
    names = sorted(config.name for config, _ in owned)
    for what, given in (("ids_per_sample", ids_per_sample), ("access", access)):
        for name in sorted(given.keys() - set(names)):
            raise InvalidInputError(f"{what}[{name!r}]", name, "is no table", f"use one of: {', '.join(names)}")
    for field, value in same.items():
        if field in _TOLD:
            raise InvalidInputError(field, value, "is told by the model", "leave it out")
        if field not in Table.__dataclass_fields__:
            remedy = f"use some of: {', '.join(sorted(set(Table.__dataclass_fields__) - _TOLD))}"
            raise InvalidInputError(field, value, "is no field of a table", remedy)
    tables = []
    for config, by_module in owned:
        features = max(1, len(config.feature_names))
        fields = {
            "name": config.name,
            "rows": config.num_embeddings,
            "dim": config.embedding_dim,
            "data_type": _data_type(config),
            "features": features,
            "ids_per_sample": float(ids_per_sample.get(config.name, features)),
            "access": access.get(config.name, Zipf()),
            "pooled": hasattr(config, "pooling"),
        }
        tables.append(Table(**{**same, **by_module, **fields}))
    return tuple(tables)


def _data_type(config: Any) -> DataType:
    kind = getattr(config.data_type, "name", str(config.data_type))
    if kind not in _TYPES:
        what = "is what trained tables are quantised to for serving, and nothing trains" if kind in _SERVED else ""
        remedy = "use FP32 or FP16, or BF16 with runtime dynamicemb"
        raise InvalidInputError(f"{config.name}.data_type", kind, what or "is not planned for", remedy)
    return _TYPES[kind]


@contextlib.contextmanager
def naming(tables: Sequence[Table]) -> Iterator[None]:
    """Lets errors of a request tell a table by its name: who has a model knows no numbers of its tables."""
    try:
        yield
    except InvalidInputError as error:
        match = re.match(r"tables\[(\d+)\]", error.field)
        if match is None:
            raise
        field = tables[int(match[1])].name + error.field[match.end() :]
        raise InvalidInputError(field, error.value, error.problem, error.remedy) from None


def check_same(config: Any, table: Table) -> None:
    """Raises `InvalidInputError` where a table of a model is not as it was planned."""
    described = (config.num_embeddings, config.embedding_dim, _data_type(config).value)
    if described != (table.rows, table.dim, table.data_type.value):
        what = f"differs from the plan, which is for {table.rows} by {table.dim} of {table.data_type.value}"
        raise InvalidInputError(config.name, described, what, "plan for the tables of this model")


def describe_model(model: nn.Module, **options: Any) -> tuple[Table, ...]:
    """Tables of all embedding collections of `model`, each in the group of its module's path.

    Args:
        model: The model, before sharding.
        options: As for `describe_configs`, but for `group` and `weighted`; statistics by table name may name any table.

    Raises:
        InvalidInputError: If `describe_configs` would, or a table is in two modules.
    """
    ids_per_sample, access = (options.pop(what, None) or {} for what in ("ids_per_sample", "access"))
    owned: list[tuple[Any, dict[str, Any]]] = []
    paths: dict[str, str] = {}
    for path, module in embedding_modules(model):
        by_module: dict[str, Any] = {"group": path, "weighted": bool(getattr(module, "is_weighted", bool)())}
        if "sharding" in options and _is_managed(model.get_submodule(path)):
            by_module["sharding"] = _by_rows(path, options["sharding"])
        for config in module_configs(module):
            if paths.setdefault(config.name, path) != path:
                raise InvalidInputError(config.name, path, "is in two modules", "give tables names of their own")
            owned.append((config, by_module))
    return _tables(owned, ids_per_sample, access, {"optimizer": Optimizer.ADAM, **options})


def embedding_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every unsharded embedding collection of TorchRec in `model`.

    Of a collection inside a module of TorchRec's that is sharded with it, the path is that module's. Were the
    collection sharded alone, learned weights would lose their gradients on the way to its rows, and each rank would
    have keys of its own in the rows of managed collisions.
    """
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    kinds = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    result: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, FeatureProcessedEmbeddingBagCollection):
            held: nn.Module = module._embedding_bag_collection
        elif _is_managed(module):
            held = module.get_submodule("_embedding_module")
        elif isinstance(module, kinds) and module not in inside:
            held = module
        else:
            continue
        inside.add(held)
        result.append((path, held))
    return result


def _is_managed(module: nn.Module) -> bool:
    """Whether rows are given to keys by managed collisions, which TorchRec shards by rows only."""
    from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

    return isinstance(module, BaseManagedCollisionEmbeddingCollection)


def _by_rows(path: str, sharding: Any) -> Sharding:
    """Row-wise, where it is among what is to choose from."""
    given = [sharding] if isinstance(sharding, str) else list(sharding)
    if Sharding.ROW_WISE not in given:
        remedy = "leave sharding out, or add row_wise"
        raise InvalidInputError("sharding", given, f"is not what {path!r} does: managed collisions are by rows", remedy)
    return Sharding.ROW_WISE


def module_configs(module: Any) -> list[Any]:
    """The table configurations of an embedding collection."""
    return list(
        module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    )


def features_of(model: nn.Module) -> dict[str, Sequence[str]]:
    """The features of each table of the model, by its name."""
    result: dict[str, Sequence[str]] = {}
    for _, module in embedding_modules(model):
        result |= {config.name: config.feature_names for config in module_configs(module)}
    if not result:
        remedy = "give the model before it is sharded, or the features of each table by its name"
        raise InvalidInputError("tables", type(model).__name__, "has no embedding collection of TorchRec", remedy)
    return result


def in_short(names: Sequence[str], kind: str = "tables") -> str:
    """The first few of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more {kind}" if len(names) > 3 else "")
