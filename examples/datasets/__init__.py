"""Data sets to try balancing on: synthetic sequences, and readers of published files."""

from examples.datasets.amazon import read_amazon
from examples.datasets.batch import SequenceBatch
from examples.datasets.gowalla import read_gowalla
from examples.datasets.histories import Histories, HistoryBatches
from examples.datasets.keys import Keys
from examples.datasets.kuairand import read_kuairand
from examples.datasets.lengths import (
    DISTRIBUTIONS,
    Lengths,
    LogNormalLengths,
    NormalLengths,
    UniformLengths,
    ZipfLengths,
    lengths_named,
)
from examples.datasets.movielens import read_movielens
from examples.datasets.published import identify, read_histories
from examples.datasets.semantic_ids import SemanticIds, read_semantic_ids
from examples.datasets.synthetic import SyntheticSequences
from examples.datasets.yambda import read_yambda

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
    "identify",
    "lengths_named",
    "read_amazon",
    "read_gowalla",
    "read_histories",
    "read_kuairand",
    "read_movielens",
    "read_semantic_ids",
    "read_yambda",
]
