from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Counts(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COUNTS_UNSPECIFIED: _ClassVar[Counts]
    COUNTS_EQUAL: _ClassVar[Counts]
    COUNTS_FREE: _ClassVar[Counts]
COUNTS_UNSPECIFIED: Counts
COUNTS_EQUAL: Counts
COUNTS_FREE: Counts

class PlanRoundRequest(_message.Message):
    __slots__ = ("job", "group", "loader", "run_id", "restart_count", "client_version", "round", "ranks", "batches", "batch_sizes", "costs_int", "costs_f64", "sizes", "memory", "nodes", "divisible", "options", "facts", "users")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    COSTS_INT_FIELD_NUMBER: _ClassVar[int]
    COSTS_F64_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DIVISIBLE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: str
    loader: str
    run_id: str
    restart_count: int
    client_version: str
    round: int
    ranks: int
    batches: int
    batch_sizes: bytes
    costs_int: bytes
    costs_f64: bytes
    sizes: bytes
    memory: bytes
    nodes: bytes
    divisible: bytes
    options: PlanOptions
    facts: RunFacts
    users: bytes
    def __init__(self, job: _Optional[str] = ..., group: _Optional[str] = ..., loader: _Optional[str] = ..., run_id: _Optional[str] = ..., restart_count: _Optional[int] = ..., client_version: _Optional[str] = ..., round: _Optional[int] = ..., ranks: _Optional[int] = ..., batches: _Optional[int] = ..., batch_sizes: _Optional[bytes] = ..., costs_int: _Optional[bytes] = ..., costs_f64: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., memory: _Optional[bytes] = ..., nodes: _Optional[bytes] = ..., divisible: _Optional[bytes] = ..., options: _Optional[_Union[PlanOptions, _Mapping]] = ..., facts: _Optional[_Union[RunFacts, _Mapping]] = ..., users: _Optional[bytes] = ...) -> None: ...

class PlanOptions(_message.Message):
    __slots__ = ("strategy", "counts", "tolerance", "move_price", "min_samples", "speeds", "memory_caps", "split")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    MOVE_PRICE_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_CAPS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    counts: Counts
    tolerance: float
    move_price: float
    min_samples: int
    speeds: bytes
    memory_caps: bytes
    split: Split
    def __init__(self, strategy: _Optional[str] = ..., counts: _Optional[_Union[Counts, str]] = ..., tolerance: _Optional[float] = ..., move_price: _Optional[float] = ..., min_samples: _Optional[int] = ..., speeds: _Optional[bytes] = ..., memory_caps: _Optional[bytes] = ..., split: _Optional[_Union[Split, _Mapping]] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("above", "within", "between", "fixed")
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    above: float
    within: float
    between: float
    fixed: float
    def __init__(self, above: _Optional[float] = ..., within: _Optional[float] = ..., between: _Optional[float] = ..., fixed: _Optional[float] = ...) -> None: ...

class RunFacts(_message.Message):
    __slots__ = ("rounds_by_lead", "rounds_unbalanced", "last_trouble", "stragglers", "delays", "step_seconds")
    ROUNDS_BY_LEAD_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_UNBALANCED_FIELD_NUMBER: _ClassVar[int]
    LAST_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    DELAYS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rounds_by_lead: int
    rounds_unbalanced: int
    last_trouble: str
    stragglers: _containers.RepeatedCompositeFieldContainer[Straggler]
    delays: _containers.RepeatedCompositeFieldContainer[Delay]
    step_seconds: float
    def __init__(self, rounds_by_lead: _Optional[int] = ..., rounds_unbalanced: _Optional[int] = ..., last_trouble: _Optional[str] = ..., stragglers: _Optional[_Iterable[_Union[Straggler, _Mapping]]] = ..., delays: _Optional[_Iterable[_Union[Delay, _Mapping]]] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class Straggler(_message.Message):
    __slots__ = ("rank", "speed", "since")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    speed: float
    since: int
    def __init__(self, rank: _Optional[int] = ..., speed: _Optional[float] = ..., since: _Optional[int] = ...) -> None: ...

class Delay(_message.Message):
    __slots__ = ("rank", "cause", "share", "since")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Delay.Cause]
        CAUSE_LOADING: _ClassVar[Delay.Cause]
        CAUSE_NETWORK: _ClassVar[Delay.Cause]
        CAUSE_LOOP: _ClassVar[Delay.Cause]
    CAUSE_UNSPECIFIED: Delay.Cause
    CAUSE_LOADING: Delay.Cause
    CAUSE_NETWORK: Delay.Cause
    CAUSE_LOOP: Delay.Cause
    RANK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    cause: Delay.Cause
    share: float
    since: int
    def __init__(self, rank: _Optional[int] = ..., cause: _Optional[_Union[Delay.Cause, str]] = ..., share: _Optional[float] = ..., since: _Optional[int] = ...) -> None: ...

class PlanRoundResponse(_message.Message):
    __slots__ = ("destinations", "batches", "part_samples", "part_begins", "pieces", "loads_before", "loads_after", "figures", "seconds")
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    PART_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PART_BEGINS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    LOADS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LOADS_AFTER_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    destinations: bytes
    batches: bytes
    part_samples: bytes
    part_begins: bytes
    pieces: bytes
    loads_before: bytes
    loads_after: bytes
    figures: _containers.RepeatedCompositeFieldContainer[BatchFigures]
    seconds: float
    def __init__(self, destinations: _Optional[bytes] = ..., batches: _Optional[bytes] = ..., part_samples: _Optional[bytes] = ..., part_begins: _Optional[bytes] = ..., pieces: _Optional[bytes] = ..., loads_before: _Optional[bytes] = ..., loads_after: _Optional[bytes] = ..., figures: _Optional[_Iterable[_Union[BatchFigures, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class BatchFigures(_message.Message):
    __slots__ = ("mean_load", "max_load_before", "max_load_after", "imbalance_before", "imbalance_after", "lower_bound", "samples", "moved_samples", "size", "moved_size", "moved_size_between_nodes", "split_samples", "pieces", "exchanged", "exchanged_between_nodes", "max_load_whole")
    MEAN_LOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_LOAD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOAD_AFTER_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_AFTER_FIELD_NUMBER: _ClassVar[int]
    LOWER_BOUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MOVED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MOVED_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOVED_SIZE_BETWEEN_NODES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_BETWEEN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOAD_WHOLE_FIELD_NUMBER: _ClassVar[int]
    mean_load: float
    max_load_before: float
    max_load_after: float
    imbalance_before: float
    imbalance_after: float
    lower_bound: float
    samples: int
    moved_samples: int
    size: int
    moved_size: int
    moved_size_between_nodes: int
    split_samples: int
    pieces: int
    exchanged: int
    exchanged_between_nodes: int
    max_load_whole: float
    def __init__(self, mean_load: _Optional[float] = ..., max_load_before: _Optional[float] = ..., max_load_after: _Optional[float] = ..., imbalance_before: _Optional[float] = ..., imbalance_after: _Optional[float] = ..., lower_bound: _Optional[float] = ..., samples: _Optional[int] = ..., moved_samples: _Optional[int] = ..., size: _Optional[int] = ..., moved_size: _Optional[int] = ..., moved_size_between_nodes: _Optional[int] = ..., split_samples: _Optional[int] = ..., pieces: _Optional[int] = ..., exchanged: _Optional[int] = ..., exchanged_between_nodes: _Optional[int] = ..., max_load_whole: _Optional[float] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "instance", "draining", "limits", "strategies")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    instance: int
    draining: bool
    limits: Limits
    strategies: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server_version: _Optional[str] = ..., instance: _Optional[int] = ..., draining: bool = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., strategies: _Optional[_Iterable[str]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_ranks", "max_samples", "max_batches", "max_message_bytes", "max_calls")
    MAX_RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_FIELD_NUMBER: _ClassVar[int]
    max_ranks: int
    max_samples: int
    max_batches: int
    max_message_bytes: int
    max_calls: int
    def __init__(self, max_ranks: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_batches: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_calls: _Optional[int] = ...) -> None: ...
