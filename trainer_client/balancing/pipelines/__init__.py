"""Balanced batches in TorchRec's training pipelines."""

from trainer_client.balancing.pipelines.batches import BalancedBatch, balanced_batches
from trainer_client.balancing.pipelines.by_name import make_pipeline, pipeline_names, register_pipeline

__all__ = ["BalancedBatch", "balanced_batches", "make_pipeline", "pipeline_names", "register_pipeline"]
