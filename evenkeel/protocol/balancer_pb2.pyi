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

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_VERSION: _ClassVar[ErrorCode]
    ERROR_CODE_RANKS_DIFFER: _ClassVar[ErrorCode]
    ERROR_CODE_JOB_NAME_TAKEN: _ClassVar[ErrorCode]
    ERROR_CODE_SUPERSEDED: _ClassVar[ErrorCode]
    ERROR_CODE_ROUND_OUT_OF_RANGE: _ClassVar[ErrorCode]
    ERROR_CODE_CONFLICTING_SUBMIT: _ClassVar[ErrorCode]
    ERROR_CODE_LIMIT_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_JOINED: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
COUNTS_UNSPECIFIED: Counts
COUNTS_EQUAL: Counts
COUNTS_FREE: Counts
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_VERSION: ErrorCode
ERROR_CODE_RANKS_DIFFER: ErrorCode
ERROR_CODE_JOB_NAME_TAKEN: ErrorCode
ERROR_CODE_SUPERSEDED: ErrorCode
ERROR_CODE_ROUND_OUT_OF_RANGE: ErrorCode
ERROR_CODE_CONFLICTING_SUBMIT: ErrorCode
ERROR_CODE_LIMIT_EXCEEDED: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_NOT_JOINED: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode

class Join(_message.Message):
    __slots__ = ("protocol_versions", "job", "group", "loader", "run_id", "restart_count", "world_size", "rank", "node", "window", "options", "schema", "client_version", "ranks", "opening")
    PROTOCOL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    protocol_versions: _containers.RepeatedScalarFieldContainer[int]
    job: str
    group: str
    loader: str
    run_id: str
    restart_count: int
    world_size: int
    rank: int
    node: str
    window: int
    options: PartitionOptions
    schema: Schema
    client_version: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    opening: int
    def __init__(self, protocol_versions: _Optional[_Iterable[int]] = ..., job: _Optional[str] = ..., group: _Optional[str] = ..., loader: _Optional[str] = ..., run_id: _Optional[str] = ..., restart_count: _Optional[int] = ..., world_size: _Optional[int] = ..., rank: _Optional[int] = ..., node: _Optional[str] = ..., window: _Optional[int] = ..., options: _Optional[_Union[PartitionOptions, _Mapping]] = ..., schema: _Optional[_Union[Schema, _Mapping]] = ..., client_version: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., opening: _Optional[int] = ...) -> None: ...

class PartitionOptions(_message.Message):
    __slots__ = ("strategy", "counts", "tolerance", "speeds", "memory_caps", "min_samples", "move_price", "split")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_CAPS_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MOVE_PRICE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    counts: Counts
    tolerance: float
    speeds: bytes
    memory_caps: bytes
    min_samples: int
    move_price: float
    split: Split
    def __init__(self, strategy: _Optional[str] = ..., counts: _Optional[_Union[Counts, str]] = ..., tolerance: _Optional[float] = ..., speeds: _Optional[bytes] = ..., memory_caps: _Optional[bytes] = ..., min_samples: _Optional[int] = ..., move_price: _Optional[float] = ..., split: _Optional[_Union[Split, _Mapping]] = ...) -> None: ...

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

class Schema(_message.Message):
    __slots__ = ("hash", "fields", "roles")
    HASH_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    roles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hash: _Optional[bytes] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., roles: _Optional[_Iterable[int]] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("path", "dtype", "kind", "shape")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Field.Kind]
        KIND_DENSE: _ClassVar[Field.Kind]
        KIND_JAGGED: _ClassVar[Field.Kind]
        KIND_SHARED: _ClassVar[Field.Kind]
    KIND_UNSPECIFIED: Field.Kind
    KIND_DENSE: Field.Kind
    KIND_JAGGED: Field.Kind
    KIND_SHARED: Field.Kind
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    kind: Field.Kind
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., kind: _Optional[_Union[Field.Kind, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("protocol_version", "instance", "server_version", "limits", "takes_nodes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TAKES_NODES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instance: int
    server_version: str
    limits: Limits
    takes_nodes: bool
    def __init__(self, protocol_version: _Optional[int] = ..., instance: _Optional[int] = ..., server_version: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., takes_nodes: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_ranks", "max_samples_per_rank", "max_rounds_ahead", "max_message_bytes", "max_sessions")
    MAX_RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUNDS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    max_ranks: int
    max_samples_per_rank: int
    max_rounds_ahead: int
    max_message_bytes: int
    max_sessions: int
    def __init__(self, max_ranks: _Optional[int] = ..., max_samples_per_rank: _Optional[int] = ..., max_rounds_ahead: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("round", "num_samples", "costs_i64", "costs_f64", "memory", "sizes", "lengths", "batch_sizes", "exhausted", "timeout_ms", "measurement", "rank", "traceparent", "divisible", "learned", "held")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COSTS_I64_FIELD_NUMBER: _ClassVar[int]
    COSTS_F64_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DIVISIBLE_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    round: int
    num_samples: int
    costs_i64: bytes
    costs_f64: bytes
    memory: bytes
    sizes: bytes
    lengths: bytes
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    exhausted: bool
    timeout_ms: int
    measurement: Measurement
    rank: int
    traceparent: str
    divisible: bytes
    learned: LearnedSpeeds
    held: int
    def __init__(self, round: _Optional[int] = ..., num_samples: _Optional[int] = ..., costs_i64: _Optional[bytes] = ..., costs_f64: _Optional[bytes] = ..., memory: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., batch_sizes: _Optional[_Iterable[int]] = ..., exhausted: bool = ..., timeout_ms: _Optional[int] = ..., measurement: _Optional[_Union[Measurement, _Mapping]] = ..., rank: _Optional[int] = ..., traceparent: _Optional[str] = ..., divisible: _Optional[bytes] = ..., learned: _Optional[_Union[LearnedSpeeds, _Mapping]] = ..., held: _Optional[int] = ...) -> None: ...

class LearnedSpeeds(_message.Message):
    __slots__ = ("stragglers", "fixed", "delays")
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    DELAYS_FIELD_NUMBER: _ClassVar[int]
    stragglers: _containers.RepeatedCompositeFieldContainer[Straggler]
    fixed: float
    delays: _containers.RepeatedCompositeFieldContainer[Delay]
    def __init__(self, stragglers: _Optional[_Iterable[_Union[Straggler, _Mapping]]] = ..., fixed: _Optional[float] = ..., delays: _Optional[_Iterable[_Union[Delay, _Mapping]]] = ...) -> None: ...

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

class Straggler(_message.Message):
    __slots__ = ("rank", "speed", "since")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    speed: float
    since: int
    def __init__(self, rank: _Optional[int] = ..., speed: _Optional[float] = ..., since: _Optional[int] = ...) -> None: ...

class Measurement(_message.Message):
    __slots__ = ("round", "compute_seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    compute_seconds: float
    def __init__(self, round: _Optional[int] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("round", "decision", "error", "rank")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    round: int
    decision: Decision
    error: Error
    rank: int
    def __init__(self, round: _Optional[int] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...

class SubmitNode(_message.Message):
    __slots__ = ("round", "ranks", "num_samples", "costs_int", "costs_f64", "memory", "sizes", "lengths", "batch_sizes", "exhausted", "timeout_ms", "divisible", "num_divisible", "learned", "traceparents", "held")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COSTS_INT_FIELD_NUMBER: _ClassVar[int]
    COSTS_F64_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    DIVISIBLE_FIELD_NUMBER: _ClassVar[int]
    NUM_DIVISIBLE_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    round: int
    ranks: bytes
    num_samples: bytes
    costs_int: bytes
    costs_f64: bytes
    memory: bytes
    sizes: bytes
    lengths: bytes
    batch_sizes: bytes
    exhausted: bytes
    timeout_ms: int
    divisible: bytes
    num_divisible: bytes
    learned: LearnedSpeeds
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    held: bytes
    def __init__(self, round: _Optional[int] = ..., ranks: _Optional[bytes] = ..., num_samples: _Optional[bytes] = ..., costs_int: _Optional[bytes] = ..., costs_f64: _Optional[bytes] = ..., memory: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., batch_sizes: _Optional[bytes] = ..., exhausted: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., divisible: _Optional[bytes] = ..., num_divisible: _Optional[bytes] = ..., learned: _Optional[_Union[LearnedSpeeds, _Mapping]] = ..., traceparents: _Optional[_Iterable[str]] = ..., held: _Optional[bytes] = ...) -> None: ...

class AnswerNode(_message.Message):
    __slots__ = ("round", "ranks", "decision", "num_parts", "num_sources", "num_cuts", "loads", "num_fields")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_CUTS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_FIELDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    ranks: bytes
    decision: Decision
    num_parts: bytes
    num_sources: bytes
    num_cuts: bytes
    loads: bytes
    num_fields: int
    def __init__(self, round: _Optional[int] = ..., ranks: _Optional[bytes] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., num_parts: _Optional[bytes] = ..., num_sources: _Optional[bytes] = ..., num_cuts: _Optional[bytes] = ..., loads: _Optional[bytes] = ..., num_fields: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("instance", "outcome", "reason", "detail", "missing_ranks", "digest", "destinations", "destination_steps", "sources", "source_counts", "source_totals", "source_groups", "balance", "batch_balances", "cuts", "pieces")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Decision.Outcome]
        OUTCOME_BALANCED: _ClassVar[Decision.Outcome]
        OUTCOME_IDENTITY: _ClassVar[Decision.Outcome]
    OUTCOME_UNSPECIFIED: Decision.Outcome
    OUTCOME_BALANCED: Decision.Outcome
    OUTCOME_IDENTITY: Decision.Outcome
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Decision.Reason]
        REASON_DEADLINE: _ClassVar[Decision.Reason]
        REASON_NOT_FOUND: _ClassVar[Decision.Reason]
        REASON_PARTITION_FAILED: _ClassVar[Decision.Reason]
        REASON_DRAINING: _ClassVar[Decision.Reason]
        REASON_OVERLOADED: _ClassVar[Decision.Reason]
        REASON_WORKER_STUCK: _ClassVar[Decision.Reason]
        REASON_WORKER_DIED: _ClassVar[Decision.Reason]
        REASON_QUEUED: _ClassVar[Decision.Reason]
        REASON_TOO_COSTLY: _ClassVar[Decision.Reason]
        REASON_QUARANTINED: _ClassVar[Decision.Reason]
        REASON_NOT_FOLLOWED: _ClassVar[Decision.Reason]
        REASON_INVALID_COSTS: _ClassVar[Decision.Reason]
        REASON_COMPILING: _ClassVar[Decision.Reason]
        REASON_NO_DECISION: _ClassVar[Decision.Reason]
        REASON_BREAKER_OPEN: _ClassVar[Decision.Reason]
        REASON_DECISIONS_DIFFER: _ClassVar[Decision.Reason]
        REASON_TRANSFERS_DIFFER: _ClassVar[Decision.Reason]
        REASON_NOT_TRAINED: _ClassVar[Decision.Reason]
    REASON_UNSPECIFIED: Decision.Reason
    REASON_DEADLINE: Decision.Reason
    REASON_NOT_FOUND: Decision.Reason
    REASON_PARTITION_FAILED: Decision.Reason
    REASON_DRAINING: Decision.Reason
    REASON_OVERLOADED: Decision.Reason
    REASON_WORKER_STUCK: Decision.Reason
    REASON_WORKER_DIED: Decision.Reason
    REASON_QUEUED: Decision.Reason
    REASON_TOO_COSTLY: Decision.Reason
    REASON_QUARANTINED: Decision.Reason
    REASON_NOT_FOLLOWED: Decision.Reason
    REASON_INVALID_COSTS: Decision.Reason
    REASON_COMPILING: Decision.Reason
    REASON_NO_DECISION: Decision.Reason
    REASON_BREAKER_OPEN: Decision.Reason
    REASON_DECISIONS_DIFFER: Decision.Reason
    REASON_TRANSFERS_DIFFER: Decision.Reason
    REASON_NOT_TRAINED: Decision.Reason
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_STEPS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOTALS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_BALANCES_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    instance: int
    outcome: Decision.Outcome
    reason: Decision.Reason
    detail: str
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    destinations: bytes
    destination_steps: bytes
    sources: bytes
    source_counts: bytes
    source_totals: bytes
    source_groups: _containers.RepeatedScalarFieldContainer[int]
    balance: Balance
    batch_balances: _containers.RepeatedCompositeFieldContainer[Balance]
    cuts: bytes
    pieces: bytes
    def __init__(self, instance: _Optional[int] = ..., outcome: _Optional[_Union[Decision.Outcome, str]] = ..., reason: _Optional[_Union[Decision.Reason, str]] = ..., detail: _Optional[str] = ..., missing_ranks: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ..., destinations: _Optional[bytes] = ..., destination_steps: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., source_counts: _Optional[bytes] = ..., source_totals: _Optional[bytes] = ..., source_groups: _Optional[_Iterable[int]] = ..., balance: _Optional[_Union[Balance, _Mapping]] = ..., batch_balances: _Optional[_Iterable[_Union[Balance, _Mapping]]] = ..., cuts: _Optional[bytes] = ..., pieces: _Optional[bytes] = ...) -> None: ...

class Balance(_message.Message):
    __slots__ = ("own_load_before", "own_load_after", "mean_load", "max_load_before", "max_load_after", "imbalance_before", "imbalance_after", "lower_bound", "samples", "moved_samples", "size", "moved_size", "moved_size_between_nodes", "partition_seconds", "split_samples", "pieces", "exchanged", "exchanged_between_nodes", "max_load_whole")
    OWN_LOAD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    OWN_LOAD_AFTER_FIELD_NUMBER: _ClassVar[int]
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
    PARTITION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_BETWEEN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOAD_WHOLE_FIELD_NUMBER: _ClassVar[int]
    own_load_before: float
    own_load_after: float
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
    partition_seconds: float
    split_samples: int
    pieces: int
    exchanged: int
    exchanged_between_nodes: int
    max_load_whole: float
    def __init__(self, own_load_before: _Optional[float] = ..., own_load_after: _Optional[float] = ..., mean_load: _Optional[float] = ..., max_load_before: _Optional[float] = ..., max_load_after: _Optional[float] = ..., imbalance_before: _Optional[float] = ..., imbalance_after: _Optional[float] = ..., lower_bound: _Optional[float] = ..., samples: _Optional[int] = ..., moved_samples: _Optional[int] = ..., size: _Optional[int] = ..., moved_size: _Optional[int] = ..., moved_size_between_nodes: _Optional[int] = ..., partition_seconds: _Optional[float] = ..., split_samples: _Optional[int] = ..., pieces: _Optional[int] = ..., exchanged: _Optional[int] = ..., exchanged_between_nodes: _Optional[int] = ..., max_load_whole: _Optional[float] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "field", "value", "remedy", "message", "fatal")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    field: str
    value: str
    remedy: str
    message: str
    fatal: bool
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., remedy: _Optional[str] = ..., message: _Optional[str] = ..., fatal: bool = ...) -> None: ...

class BalanceRequest(_message.Message):
    __slots__ = ("join", "submit", "submits", "elsewhere", "told")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    join: Join
    submit: Submit
    submits: SubmitGroup
    elsewhere: Elsewhere
    told: Told
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., submits: _Optional[_Union[SubmitGroup, _Mapping]] = ..., elsewhere: _Optional[_Union[Elsewhere, _Mapping]] = ..., told: _Optional[_Union[Told, _Mapping]] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("agreed", "unfollowed")
    AGREED_FIELD_NUMBER: _ClassVar[int]
    UNFOLLOWED_FIELD_NUMBER: _ClassVar[int]
    agreed: int
    unfollowed: _containers.RepeatedCompositeFieldContainer[Unfollowed]
    def __init__(self, agreed: _Optional[int] = ..., unfollowed: _Optional[_Iterable[_Union[Unfollowed, _Mapping]]] = ...) -> None: ...

class Unfollowed(_message.Message):
    __slots__ = ("round", "reason", "ranks", "by_ranks")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BY_RANKS_FIELD_NUMBER: _ClassVar[int]
    round: int
    reason: Decision.Reason
    ranks: _containers.RepeatedScalarFieldContainer[int]
    by_ranks: bool
    def __init__(self, round: _Optional[int] = ..., reason: _Optional[_Union[Decision.Reason, str]] = ..., ranks: _Optional[_Iterable[int]] = ..., by_ranks: bool = ...) -> None: ...

class Elsewhere(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitGroup(_message.Message):
    __slots__ = ("submits", "nodes")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    nodes: _containers.RepeatedCompositeFieldContainer[SubmitNode]
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[SubmitNode, _Mapping]]] = ...) -> None: ...

class BalanceResponse(_message.Message):
    __slots__ = ("joined", "answer", "error", "answers", "leaving")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    answer: Answer
    error: Error
    answers: AnswerGroup
    leaving: Leaving
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., answers: _Optional[_Union[AnswerGroup, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("from_round",)
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    from_round: int
    def __init__(self, from_round: _Optional[int] = ...) -> None: ...

class AnswerGroup(_message.Message):
    __slots__ = ("answers", "nodes")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    nodes: _containers.RepeatedCompositeFieldContainer[AnswerNode]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[AnswerNode, _Mapping]]] = ...) -> None: ...

class BalanceRoundRequest(_message.Message):
    __slots__ = ("join", "submit")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    join: Join
    submit: Submit
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ...) -> None: ...

class BalanceRoundResponse(_message.Message):
    __slots__ = ("joined", "answer")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    answer: Answer
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class GetSessionStatsRequest(_message.Message):
    __slots__ = ("job", "group", "loader", "watch")
    class Watch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WATCH_UNSPECIFIED: _ClassVar[GetSessionStatsRequest.Watch]
        WATCH_ROW: _ClassVar[GetSessionStatsRequest.Watch]
        WATCH_ALL: _ClassVar[GetSessionStatsRequest.Watch]
    WATCH_UNSPECIFIED: GetSessionStatsRequest.Watch
    WATCH_ROW: GetSessionStatsRequest.Watch
    WATCH_ALL: GetSessionStatsRequest.Watch
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: str
    loader: str
    watch: GetSessionStatsRequest.Watch
    def __init__(self, job: _Optional[str] = ..., group: _Optional[str] = ..., loader: _Optional[str] = ..., watch: _Optional[_Union[GetSessionStatsRequest.Watch, str]] = ...) -> None: ...

class GetSessionStatsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("job", "group", "loader", "run_id", "restart_count", "world_size", "joined_ranks", "last_round", "rounds_balanced", "rounds_identity", "seconds_since_last_message", "last_balance", "last_loads_before", "last_loads_after", "mean_round_wait_seconds", "watch", "last_learned")
    class RoundsIdentityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    JOINED_RANKS_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BALANCED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_BALANCE_FIELD_NUMBER: _ClassVar[int]
    LAST_LOADS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LAST_LOADS_AFTER_FIELD_NUMBER: _ClassVar[int]
    MEAN_ROUND_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    LAST_LEARNED_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: str
    loader: str
    run_id: str
    restart_count: int
    world_size: int
    joined_ranks: int
    last_round: int
    rounds_balanced: int
    rounds_identity: _containers.ScalarMap[str, int]
    seconds_since_last_message: float
    last_balance: Balance
    last_loads_before: bytes
    last_loads_after: bytes
    mean_round_wait_seconds: float
    watch: str
    last_learned: LearnedSpeeds
    def __init__(self, job: _Optional[str] = ..., group: _Optional[str] = ..., loader: _Optional[str] = ..., run_id: _Optional[str] = ..., restart_count: _Optional[int] = ..., world_size: _Optional[int] = ..., joined_ranks: _Optional[int] = ..., last_round: _Optional[int] = ..., rounds_balanced: _Optional[int] = ..., rounds_identity: _Optional[_Mapping[str, int]] = ..., seconds_since_last_message: _Optional[float] = ..., last_balance: _Optional[_Union[Balance, _Mapping]] = ..., last_loads_before: _Optional[bytes] = ..., last_loads_after: _Optional[bytes] = ..., mean_round_wait_seconds: _Optional[float] = ..., watch: _Optional[str] = ..., last_learned: _Optional[_Union[LearnedSpeeds, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("protocol_versions", "instance", "server_version", "limits", "draining", "sessions", "streams", "strategies")
    PROTOCOL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    protocol_versions: _containers.RepeatedScalarFieldContainer[int]
    instance: int
    server_version: str
    limits: Limits
    draining: bool
    sessions: int
    streams: int
    strategies: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_versions: _Optional[_Iterable[int]] = ..., instance: _Optional[int] = ..., server_version: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., draining: bool = ..., sessions: _Optional[int] = ..., streams: _Optional[int] = ..., strategies: _Optional[_Iterable[str]] = ...) -> None: ...
