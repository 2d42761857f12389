"""The CUDA kernel of `evenkeel::block_bucketize`: workspace, launches, and the remembered module of each device."""

import ctypes
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from trainer_client.nvrtc import Module

_SCAN_THREADS, _TILE_THREADS = 256, 512
_FEW_ROWS = 1 << 14
_UNIT_BITS, _ROW_COST, _LONG_ROW = 12, 1, 255
_CELLS = 1 << 16  # bytes of shared memory for the lengths of one pass
_MAX_KEYS = 1 << 31
_MANY_KEYS = 1 << 22
_SOURCES = ("common", "scan_rows", "count_tile", "scan_tiles", "scatter_tile")
_KERNELS = ("scan_rows", "scan_few_rows", "count_tile", "scan_tiles", "scatter_tile")
_FIELDS = """
    lengths keys blocks feature_ends modes mixes weights new_lengths new_keys new_weights positions slots
    offsets points counts totals bases scan_state tickets
    num_rows num_keys num_features rows_per_feature num_tiles pitch
    unit_bits row_cost rows_per_pass lanes_per_row clear_long mode mix num_blocks
"""


class _Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _FIELDS.split()]


def _count_threads(world_size: int) -> int:
    return 128 if world_size <= 16 else 256


def scatter_shape(num_keys: int) -> tuple[int, int]:
    """Threads of a block of `scatter_tile`, and blocks a multiprocessor.

    Small blocks overlap better where there are many, larger ones finish sooner where there are few.
    """
    return (256, 3) if num_keys > _MANY_KEYS else (512, 2)


def source() -> str:
    """The CUDA source: the common part, then the kernels."""
    folder = files("trainer_client.embedding.routing").joinpath("kernels")
    return "".join(folder.joinpath(f"{part}.cu").read_text() for part in _SOURCES)


def macros(
    world_size: int, *, key_bytes: int, length_bytes: int, weight_bytes: int, scatter: tuple[int, int]
) -> dict[str, str]:
    """What the source leaves open."""
    integer = {4: "int", 8: "long long"}
    return {
        "RANKS": f"{world_size}u",
        "KEY": integer[key_bytes],
        "LENGTH": integer[length_bytes],
        "WEIGHT": {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}[weight_bytes],
        "MAX_TILE_KEYS": str((1 << _UNIT_BITS) + _LONG_ROW + 1),
        "COUNT_THREADS": str(_count_threads(world_size)),
        "SCATTER_THREADS": str(scatter[0]),
        "SCATTER_BLOCKS": str(scatter[1]),
    }


@cache
def _module(
    device: int, world_size: int, key_bytes: int, length_bytes: int, weight_bytes: int, scatter: tuple[int, int]
) -> Module:
    defines = macros(
        world_size, key_bytes=key_bytes, length_bytes=length_bytes, weight_bytes=weight_bytes, scatter=scatter
    )
    return Module(source(), _KERNELS, defines, device)


@cache
def _mode_tensors(modes: tuple[int, ...], mixes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(modes, dtype=torch.int32, device=device), torch.tensor(mixes, dtype=torch.int64, device=device)


def _align(size: int) -> int:
    return (size + 15) & ~15


def block_bucketize(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Tensor,
    world_size: int,
    modes: list[int],
    mixes: list[int],
    weights: Tensor | None = None,
    positions: bool = False,
    permutation: bool = True,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The CUDA kernel of `evenkeel::block_bucketize`; arguments as the operator's.

    Lengths that are negative or do not add up to the indices stop the GPU with a message, as a failed device-side
    assertion of PyTorch does.
    """
    num_rows, num_keys = lengths.numel(), indices.numel()
    if num_keys >= _MAX_KEYS:
        raise ValueError(f"there are {num_keys} indices; bucketize fewer than {_MAX_KEYS} at a time")
    new_indices = torch.empty_like(indices)
    new_weights = torch.empty_like(weights) if weights is not None else None
    places = torch.empty_like(indices) if positions else None
    slots = torch.empty_like(indices) if permutation else None
    if num_rows == 0:
        return lengths.new_empty(0), new_indices, new_weights, places, slots
    device = indices.device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return block_bucketize(
                lengths, indices, block_sizes, world_size, modes, mixes, weights, positions, permutation, batch_sizes
            )
    num_tiles = (num_keys + _ROW_COST * num_rows + (1 << _UNIT_BITS) - 1) >> _UNIT_BITS
    scatter = scatter_shape(num_keys)
    weight_bytes = weights.element_size() if weights is not None else 4
    module = _module(device.index, world_size, indices.element_size(), lengths.element_size(), weight_bytes, scatter)
    pitch = (num_tiles + 3) & ~3
    scan = "scan_few_rows" if num_rows <= _FEW_ROWS else "scan_rows"
    scan_blocks = -(-num_rows // (_SCAN_THREADS * (1 if num_rows <= _FEW_ROWS else 8)))
    sizes = [_align(4 * n) for n in (num_rows + 1, 4 * (num_tiles + 1), world_size * pitch, world_size, world_size)]
    work = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    at, starts = work.data_ptr(), []
    for size in sizes:
        starts.append(at)
        at += size
    rows_per_tile = (num_rows << _UNIT_BITS) // (num_keys + _ROW_COST * num_rows)
    rows_per_tile = rows_per_tile * 5 // 4 + 63
    passes = -(-rows_per_tile * world_size // _CELLS)
    rows_per_pass = max(32, min(rows_per_tile // passes + 31, _CELLS // world_size) & ~31)
    # Long rows sum up their lengths: clear all cells where rows are long on average, else those of the long rows only.
    # One fill clears them and what the scan needs cleared.
    clear_all = num_keys > _LONG_ROW * num_rows
    num_cells = world_size * num_rows if clear_all else 0
    cleared = lengths.new_zeros(num_cells + (8 * (scan_blocks + 1) + 15) // lengths.element_size())
    new_lengths = cleared[:num_cells] if clear_all else lengths.new_empty(world_size * num_rows)
    scan_state = _align(cleared.data_ptr() + num_cells * lengths.element_size())
    lanes = 1 << min(5, max(0, (num_keys // (8 * num_rows)).bit_length()))
    params = _Params(
        lengths=lengths.data_ptr(), keys=indices.data_ptr(), new_lengths=new_lengths.data_ptr(),
        new_keys=new_indices.data_ptr(), slots=slots.data_ptr() if slots is not None else 0,
        positions=places.data_ptr() if places is not None else 0,
        offsets=starts[0], points=starts[1], counts=starts[2], totals=starts[3], bases=starts[4],
        scan_state=scan_state, tickets=scan_state + 8 * scan_blocks,
        num_rows=num_rows, num_keys=num_keys, num_features=1, rows_per_feature=num_rows,
        num_tiles=num_tiles, pitch=pitch,
        unit_bits=_UNIT_BITS, row_cost=_ROW_COST, rows_per_pass=rows_per_pass, lanes_per_row=lanes,
        clear_long=not clear_all,
        mode=modes[0], mix=mixes[0],
    )  # fmt: skip
    keep: list[Tensor] = []
    if len(modes) > 1:
        keep.extend(_mode_tensors(tuple(modes), tuple(mixes), device))
        params.modes, params.mixes = keep[0].data_ptr(), keep[1].data_ptr()
    if 0 in modes:
        params.blocks, params.num_blocks = block_sizes.data_ptr(), block_sizes.numel()
    params.num_features = max(len(modes), params.num_blocks, 1)
    params.rows_per_feature = num_rows // params.num_features
    if batch_sizes is not None and params.num_features > 1:
        keep.append(torch.cumsum(batch_sizes, 0))
        params.feature_ends = keep[-1].data_ptr()
    if weights is not None and new_weights is not None:
        params.weights, params.new_weights = weights.data_ptr(), new_weights.data_ptr()
    stream = torch.cuda.current_stream(device).cuda_stream
    shared_count = 4 * (2 * world_size + rows_per_pass + 1 + world_size * (rows_per_pass // 4 | 1))
    tile_keys = (1 << _UNIT_BITS) + _LONG_ROW + 1
    shared_scatter = tile_keys * (indices.element_size() + 2) + world_size * (4 + scatter[0] // 16)
    for name, blocks, threads, shared in (
        (scan, scan_blocks, _SCAN_THREADS, 0),
        ("count_tile", num_tiles, _count_threads(world_size), shared_count),
        ("scan_tiles", world_size, _TILE_THREADS, 0),
        ("scatter_tile", num_tiles, scatter[0], shared_scatter),
    ):
        module.launch(name, blocks=blocks, threads=threads, shared=shared, stream=stream, parameters=params)
    return new_lengths, new_indices, new_weights, places, slots
