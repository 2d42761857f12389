"""A model's tables as the planner wants them, and how often their keys are looked up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from evenkeel.placement import DataType, Histogram, InvalidInputError, Optimizer, Sharding, Table
from evenkeel.placement.access import Access, Zipf

_TOLD = {"name", "rows", "dim", "data_type", "features", "pooled", "weighted"}  # by the configuration of a table
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
        access: Access statistics by table name, for instance of a `KeyHistogram`.
        group: Name of the module that owns the tables.
        weighted: Whether lookups have weights, as in a collection with `is_weighted`.
        same: Fields of `evenkeel.placement.Table` that all tables share.

    Raises:
        InvalidInputError: If no runtime trains a table's data type, or statistics are of a table that is not there.
    """
    configs = list(configs)
    names = {config.name for config in configs}
    for what, given in (("ids_per_sample", ids_per_sample), ("access", access)):
        for name in given or {}:
            remedy = f"use one of: {', '.join(sorted(names))}"
            if name not in names:
                raise InvalidInputError(f"{what}[{name!r}]", name, "is no table", remedy)
    for field, value in same.items():
        if field in _TOLD:
            raise InvalidInputError(field, value, "is told by the model", "leave it out")
        if field not in Table.__dataclass_fields__:
            remedy = f"use some of: {', '.join(sorted(set(Table.__dataclass_fields__) - _TOLD))}"
            raise InvalidInputError(field, value, "is no field of a table", remedy)
    tables = []
    for config in configs:
        features = max(1, len(config.feature_names))
        tables.append(
            Table(
                name=config.name,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                data_type=_data_type(config),
                features=features,
                ids_per_sample=float((ids_per_sample or {}).get(config.name, features)),
                access=(access or {}).get(config.name, Zipf()),
                optimizer=optimizer,
                pooled=hasattr(config, "pooling"),
                weighted=weighted,
                group=group,
                **same,
            )
        )
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
        found = re.match(r"tables\[(\d+)\]", error.field)
        if found is None:
            raise
        field = tables[int(found[1])].name + error.field[found.end() :]
        raise InvalidInputError(field, error.value, error.problem, error.remedy) from None


def check_same(config: Any, table: Table) -> None:
    """Raises `InvalidInputError` where a table of a model is not as it was planned."""
    found = (config.num_embeddings, config.embedding_dim, _data_type(config).value)
    if found != (table.rows, table.dim, table.data_type.value):
        what = f"differs from the plan, which is for {table.rows} by {table.dim} of {table.data_type.value}"
        raise InvalidInputError(config.name, found, what, "plan for the tables of this model")


def describe_model(model: nn.Module, **options: Any) -> tuple[Table, ...]:
    """Tables of all embedding collections of `model`, each in the group of its module's path.

    Args:
        model: The model, before sharding.
        options: As for `describe_configs`, but for `group` and `weighted`; statistics by table name may name any table.

    Raises:
        InvalidInputError: If `describe_configs` would, or a table is in two modules.
    """
    for field in ("group", "weighted"):
        if field in options:
            raise InvalidInputError(field, options[field], "is told by the model", "leave it out")
    found: dict[str, Table] = {}
    given: dict[str, Any] = {what: dict(options.pop(what, None) or {}) for what in ("ids_per_sample", "access")}
    for path, module in embedding_modules(model):
        configs = module_configs(module)
        names = {config.name for config in configs}
        weighted = bool(getattr(module, "is_weighted", bool)())
        own: dict[str, Any] = {
            what: {name: value for name, value in by.items() if name in names} for what, by in given.items()
        }
        if "sharding" in options and _is_managed(model.get_submodule(path)):
            own["sharding"] = _by_rows(path, options["sharding"])
        for table in describe_configs(configs, group=path, weighted=weighted, **{**options, **own}):
            if table.name in found:
                raise InvalidInputError(table.name, path, "is in two modules", "give tables names of their own")
            found[table.name] = table
    for what, by in given.items():
        for name in by.keys() - found.keys():
            raise InvalidInputError(f"{what}[{name!r}]", name, "is no table", f"use one of: {', '.join(sorted(found))}")
    return tuple(found.values())


def embedding_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every unsharded embedding collection of TorchRec in `model`.

    Of a collection inside a module of TorchRec's that is sharded with it, the path is that module's. Were the
    collection sharded alone, learned weights would lose their gradients on the way to its rows, and each rank would
    have keys of its own in the rows of managed collisions.
    """
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    kinds = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    found: list[tuple[str, nn.Module]] = []
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
        found.append((path, held))
    return found


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


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

_MIX = np.uint64(0x9E3779B97F4A7C15)


class KeyHistogram:
    """Counts the lookups of a sample of the keys exactly, and scales up.

    Which keys are in the sample is decided by a hash of the key, so a key is either counted in every batch or never.
    While more than `max_keys` keys would be counted, the sampled share is halved and the others are forgotten. With
    a share `s` and `n` keys counted, the number of keys of any frequency is known with a relative standard error
    of about `1 / sqrt(n_f)`, `n_f` being the counted keys of that frequency; the few most frequent keys are kept
    whatever the sample, so that the head of the distribution is exact from the time a key got there.

    A histogram knows how often keys are looked up, not when. Where the popular keys change, or a key comes back soon or
    never, `KeyStatistics` predicts caches much better.
    """

    def __init__(self, *, max_keys: int = 200_000, heavy_keys: int = 4_096) -> None:
        """Start empty.

        Args:
            max_keys: Keys counted at most; 24 bytes each.
            heavy_keys: Most frequent keys kept whatever the sample.

        Raises:
            InvalidInputError: If a number of keys is below one.
        """
        if max_keys < 1 or not 0 <= heavy_keys <= max_keys:
            raise InvalidInputError("max_keys", max_keys, "is too small", "give at least 1, and more than heavy_keys")
        self.max_keys, self.heavy_keys = max_keys, heavy_keys
        self._level = 0
        self._keys = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._older = np.zeros(0, dtype=np.int64)
        self._lookups = self._batches = 0

    @property
    def sampled_share(self) -> float:
        """Share of the keys that are counted."""
        return 0.5**self._level

    @property
    def lookups(self) -> int:
        """Lookups seen."""
        return self._lookups

    @property
    def relative_error(self) -> float:
        """How far off predictions from the histogram are to be expected, as a part of all lookups.

        The larger of two: the standard error of the number of keys, from sampling; and how much the share of lookups of
        the most popular keys, so and so many of them, has differed from what the first part of the batches (between a
        half and nearly all of them) said of the rest. One while fewer than two batches were seen.
        """
        if self._batches < 2 or not len(self._keys):
            return 1.0
        error = 0.0 if self._level == 0 else float(np.sqrt((1 - self.sampled_share) / len(self._keys)))
        return max(error, self._drift())

    def _drift(self) -> float:
        """Largest difference between what the first batches said of the share of popular keys, and the later ones."""
        older, newer = self._older.astype(np.float64), (self._counts - self._older).astype(np.float64)
        if not older.sum() or not newer.sum():
            return 1.0
        scale = self._scale()
        expected = _discounted(older, scale)
        order = np.argsort(-older, kind="stable")
        said = np.cumsum((expected * scale)[order]) / (older @ scale)
        was = np.cumsum((newer * scale)[order]) / (newer @ scale)
        return float(np.abs(said - was)[older[order] > 0].max())

    def observe(self, keys: torch.Tensor) -> None:
        """Count the lookups of one batch.

        Args:
            keys: (lookups,) keys of one table, repeated ones included, on any device.
        """
        if self._batches & (self._batches - 1) == 0:  # as many batches again have been seen
            self._older = self._counts.copy()
        self._batches += 1
        self._lookups += keys.numel()
        unique, counts = torch.unique(keys.detach().reshape(-1).to(torch.int64), return_counts=True)
        own, added = unique.cpu().numpy(), counts.cpu().numpy()
        kept = self._in_sample(own) | np.isin(own, self._keys, assume_unique=True)
        joined = np.concatenate([self._keys, own[kept]])
        weight = np.concatenate([self._counts, added[kept]])
        before = np.concatenate([self._older, np.zeros(int(kept.sum()), dtype=np.int64)])
        self._keys, where = np.unique(joined, return_inverse=True)
        self._counts = np.bincount(where, weights=weight, minlength=len(self._keys)).astype(np.int64)
        self._older = np.bincount(where, weights=before, minlength=len(self._keys)).astype(np.int64)
        while len(self._keys) > self.max_keys:
            self._level += 1
            heavy = np.zeros(len(self._keys), dtype=bool)
            heavy[np.argsort(-self._counts, kind="stable")[: self.heavy_keys]] = True
            stays = self._in_sample(self._keys) | heavy
            if stays.all():
                continue
            self._keys, self._counts = self._keys[stays], self._counts[stays]
            self._older = self._older[stays]

    def histogram(self, *, bins_per_factor_two: int = 4) -> Histogram:
        """The frequencies in log-spaced bins, for a plan request to carry.

        Keys that were never seen are in it too, as many lookups of them as of keys that were seen once (Good and
        Turing), and as many keys as Chao's estimator says.

        Raises:
            InvalidInputError: If nothing was observed.
        """
        if not len(self._keys):
            raise InvalidInputError("lookups", 0, "has none observed", "observe at least one batch")
        scale = self._scale()
        counts = self._counts.astype(np.float64)
        bins = np.floor(np.log2(counts) * bins_per_factor_two).astype(np.int64)
        names, where = np.unique(bins, return_inverse=True)
        keys = np.bincount(where, weights=scale, minlength=len(names))
        lookups = np.bincount(where, weights=scale * _discounted(counts, scale), minlength=len(names))
        unseen = float(scale @ counts - lookups.sum())
        kept = keys > 0
        keys, lookups = keys[kept][::-1], lookups[kept][::-1]
        once, twice = (float(scale[self._counts == times].sum()) for times in (1, 2))
        if unseen > 0:
            keys = np.append(keys, max(once**2 / (2 * max(twice, 1.0)), unseen))
            lookups = np.append(lookups, unseen)
        return Histogram(keys=tuple(keys.tolist()), lookups=tuple(lookups.tolist()))

    def _scale(self) -> FloatArray:
        """How many keys each counted one stands for."""
        sampled = self._in_sample(self._keys)
        # A heavy key outside of the sample stands for itself only, one inside for itself too: the head is complete.
        heavy = np.zeros(len(self._keys), dtype=bool)
        if self._level:
            heavy[np.argsort(-self._counts, kind="stable")[: self.heavy_keys]] = True
        return np.where(heavy, 1.0, np.where(sampled, 1 / self.sampled_share, 0.0))

    def _in_sample(self, keys: IntArray) -> BoolArray:
        if self._level == 0:
            return np.ones(len(keys), dtype=bool)
        mixed = keys.astype(np.uint64) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        shown: BoolArray = (mixed >> np.uint64(64 - self._level)) == 0
        return shown


_RARE = 4


def _discounted(counts: FloatArray, scale: FloatArray) -> FloatArray:
    """What counts say of the lookups to come, when keys that were never seen have their part.

    A key seen once or twice was lucky to be seen: Good and Turing expect `(r + 1) * n[r + 1] / n[r]` lookups in as many
    batches again of a key seen `r` times, `n[r]` being the number of those. All that is left is scaled, so that unseen
    keys have as many lookups as keys that were seen once.
    """
    total = float(scale @ counts)
    number = [float(scale[counts == times].sum()) for times in range(_RARE + 1)]
    if not 0 < number[1] < total:  # nothing that was seen once, or nothing else: neither tells anything
        return counts if number[1] == 0 else counts * 0.5
    expected = counts.copy()
    for times in range(1, _RARE):
        if number[times] > 0:
            expected[counts == times] = min(times, (times + 1) * number[times + 1] / number[times])
    result: FloatArray = expected * ((total - number[1]) / max(float(scale @ expected), 1e-12))
    return result
