"""Data sets to try balancing on: synthetic sequences, and readers of published files."""

from examples.datasets.batch import SequenceBatch
from examples.datasets.histories import Histories, HistoryBatches
from examples.datasets.keys import Keys
from examples.datasets.lengths import (
    DISTRIBUTIONS,
    Lengths,
    LogNormalLengths,
    NormalLengths,
    UniformLengths,
    ZipfLengths,
    lengths_named,
)
from examples.datasets.published import (
    read_amazon,
    read_gowalla,
    read_histories,
    read_kuairand,
    read_movielens,
    read_yambda,
)
from examples.datasets.semantic_ids import SemanticIds, read_semantic_ids
from examples.datasets.synthetic import SyntheticSequences

__all__ = [
    "DISTRIBUTIONS",
    "Histories",
    "HistoryBatches",
    "Keys",
    "Lengths",
    "LogNormalLengths",
    "NormalLengths",
    "SemanticIds",
    "SequenceBatch",
    "SyntheticSequences",
    "UniformLengths",
    "ZipfLengths",
    "lengths_named",
    "read_amazon",
    "read_gowalla",
    "read_histories",
    "read_kuairand",
    "read_movielens",
    "read_semantic_ids",
    "read_yambda",
]
