"""Which rank owns an embedding key, and putting the keys of a batch into the order of their owners."""

from trainer_client.embedding.routing.bucketize import (
    Bucketized,
    block_bucketize,
    bucketize_kjt,
    owners,
    route,
    torchrec_uses_evenkeel,
)
from trainer_client.embedding.routing.cpu import warm_up
from trainer_client.embedding.routing.ownership import (
    DIST_TYPES,
    MAX_RANKS,
    DistType,
    Routing,
    RoutingLike,
    as_routing,
    block_size,
    continuous,
    hash_roundrobin,
    roundrobin,
)
from trainer_client.embedding.routing.skew import SkewReport, report

__all__ = [
    "DIST_TYPES",
    "MAX_RANKS",
    "Bucketized",
    "DistType",
    "Routing",
    "RoutingLike",
    "SkewReport",
    "as_routing",
    "block_bucketize",
    "block_size",
    "bucketize_kjt",
    "continuous",
    "hash_roundrobin",
    "owners",
    "report",
    "roundrobin",
    "route",
    "torchrec_uses_evenkeel",
    "warm_up",
]
