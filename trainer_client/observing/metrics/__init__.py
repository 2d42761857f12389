"""Prometheus metrics of each rank: an optional exporter, `pip install 'evenkeel[metrics]'`.

exporter = RankExporter.start(rank=rank, job="train-42", port=9200 + local_rank)
for batch in exporter.watch(loader): ...
"""

from trainer_client.observing.metrics.exporter import RankExporter
from trainer_client.observing.metrics.measures import RankMeasures

__all__ = ["RankExporter", "RankMeasures"]
