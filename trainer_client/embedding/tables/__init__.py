"""Row-wise sharded embeddings whose keys are routed in any way: key exchange, lookup at the owner, exchange back."""

from trainer_client.embedding.tables.clipping import clip_grad_norm_
from trainer_client.embedding.tables.collection import RoutedEmbeddingCollection
from trainer_client.embedding.tables.config import KeyBatch, RoutedTable, TableFactory
from trainer_client.embedding.tables.hot_choice import HotChoice, HotCosts, choose_hot_rows
from trainer_client.embedding.tables.tables import BlockTable, KeyTable

__all__ = [
    "BlockTable",
    "HotChoice",
    "HotCosts",
    "KeyBatch",
    "KeyTable",
    "RoutedEmbeddingCollection",
    "RoutedTable",
    "TableFactory",
    "choose_hot_rows",
    "clip_grad_norm_",
]
