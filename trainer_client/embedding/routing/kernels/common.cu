// Bucketize on the GPU: a stable partition of a batch's keys by the rank that owns them.
//
// Keys come sorted by (feature, row), so the rank-major output with its cells in (feature, row) order is a stable
// partition of the whole key array by owner. Four launches:
//   scan_rows     offsets of the rows (single pass, decoupled look-back), and which row each tile begins in
//   count_tile    keys per (rank, row), written once as the new lengths, and keys per (rank, tile)
//   scan_tiles    prefix sums of the tiles' counts, and where each rank begins
//   scatter_tile  stable ranks of the keys by warp votes, reordered in shared memory, written in runs
//
// A tile is a stretch of the sequence in which each row counts `row_cost` units and each key one, so tiles are even
// whatever the rows' lengths are. A row of at most LONG_ROW keys belongs to the tile that it begins in, and its counts fit
// bytes; a longer one is cut at the tiles' boundaries, and its lengths are summed by atomics over cells set to zero before.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// Macros: RANKS; KEY, LENGTH, WEIGHT (integer types of the sizes of keys, lengths and weights); MAX_TILE_KEYS,
// COUNT_THREADS, SCATTER_THREADS, SCATTER_BLOCKS (blocks a multiprocessor that registers must allow).

struct Params {
  const LENGTH* lengths;
  const KEY* keys;
  const i64* blocks;         // rows a rank of each feature; null without continuous features
  const i64* feature_ends;   // running sum of rows over features; null where all features have as many
  const int* modes;          // null if all features share `mode` and `mix`
  const u64* mixes;
  const WEIGHT* weights;
  LENGTH* new_lengths;
  KEY* new_keys;
  WEIGHT* new_weights;
  KEY* positions;
  KEY* slots;
  u32* offsets;              // rows + 1
  uint4* points;             // tiles + 1: row, key and feature where each tile begins
  u32* counts;               // ranks x pitch
  u32* totals;               // ranks
  u32* bases;                // ranks
  u64* scan_state;           // zeroed, one per block of scan_rows
  u32* tickets;              // zeroed, 2
  u64 num_rows, num_keys, num_features, rows_per_feature, num_tiles, pitch;
  u64 unit_bits, row_cost, rows_per_pass, lanes_per_row, clear_long, mode, mix, num_blocks;
};

struct Point {
  u32 row, key, feature;
  bool inside;  // the tile boundary cuts this row; in memory the highest bit of `row`
};

enum Kind { NARROW, WIDE, MODULO, HASH };  // continuous with 32-bit or wider limits, roundrobin, hash_roundrobin

struct Route {
  Kind kind;
  u32 block, last, magic;  // NARROW: rows a rank, last key in range, 2^32 / block
  u64 mix;                 // HASH: seed; WIDE: rows a rank
};

struct Routed {
  u32 owner;
  KEY sent;
};

#define FULL 0xffffffffu
static const u32 SCAN_THREADS = 256, TILE_THREADS = 512, LONG_FLAG = 0x80000000u;
static const u32 SCATTER_WARPS = SCATTER_THREADS / 32;
static const u32 ROUNDS = (MAX_TILE_KEYS + SCATTER_THREADS - 1) / SCATTER_THREADS;
static const u32 LONG_ROW = 255;  // what a byte can count

constexpr u32 bits_below(u32 number) {
  u32 bits = 0;
  while (1u << bits < number) bits++;
  return bits;
}
static const u32 BITS = bits_below(RANKS);

__device__ __forceinline__ u32 warp_inclusive(u32 value, u32 lane) {
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(FULL, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Exclusive sum over a block of `WARPS` warps; returns the block's total in `total`.
template <u32 WARPS>
__device__ __forceinline__ u32 block_exclusive(u32 value, u32* warp_sums, u32& total) {
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 inclusive = warp_inclusive(value, lane);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  u32 sums = lane < WARPS ? warp_sums[lane] : 0;
  u32 running = warp_inclusive(sums, lane);
  total = __shfl_sync(FULL, running, WARPS - 1);
  u32 before = __shfl_sync(FULL, running - sums, warp);
  return before + inclusive - value;
}

__device__ __forceinline__ u64 feature_start_row(const Params& p, u32 feature) {
  if (p.feature_ends) return feature ? (u64)p.feature_ends[feature - 1] : 0;
  return feature * p.rows_per_feature;
}

__device__ u32 feature_of_row(const Params& p, u32 row) {
  if (!p.feature_ends) return row / (u32)p.rows_per_feature;
  u32 low = 0, high = (u32)p.num_features - 1;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if ((u64)p.feature_ends[middle] > row) high = middle; else low = middle + 1;
  }
  return low;
}

__device__ u32 feature_of_key(const Params& p, u32 key, u32 low, u32 high) {
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (p.offsets[feature_start_row(p, middle)] <= key) low = middle; else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ Route load_route(const Params& p, u32 feature) {
  Route route = {MODULO, 0, 0, 0, p.mixes ? p.mixes[feature] : p.mix};
  u32 mode = p.modes ? (u32)p.modes[feature] : (u32)p.mode;
  if (mode == 2) route.kind = HASH;
  if (mode == 0) {
    u64 block = p.num_blocks ? (u64)p.blocks[p.num_blocks > 1 ? feature : 0] : 0, limit = block * RANKS;
    route.kind = WIDE;
    route.mix = block;
    if (limit && !__umul64hi(block, RANKS) && (limit - 1) >> 32 == 0) {
      route.kind = NARROW;
      route.block = (u32)block;
      route.last = (u32)(limit - 1);
      route.magic = FULL / (u32)block;
    }
  }
  return route;
}

// Continuous routing by 64-bit divisions.
__device__ __noinline__ Routed route_wide(u64 key, u64 block) {
  if (block && (__umul64hi(block, RANKS) || key < block * RANKS)) {
    u64 owner = key / block;
    return {(u32)owner, (KEY)(key - owner * block)};
  }
  return {(u32)(key % RANKS), (KEY)(key / RANKS)};
}

template <Kind KIND>
__device__ __forceinline__ Routed route_key(const Route& route, KEY raw) {
  u64 key = (u64)(i64)raw;
  if (KIND == WIDE) return route_wide(key, route.mix);
  if (KIND == NARROW) {
    if (key > route.last) return route_wide(key, route.block);
    u32 owner = __umulhi((u32)key, route.magic), rest = (u32)key - owner * route.block;
    bool next = rest >= route.block;  // the product is one too small at most
    return {owner + next, (KEY)(next ? rest - route.block : rest)};
  }
  if (KIND == HASH) {
    key ^= route.mix;
    key ^= key >> 33;
    key *= 0xff51afd7ed558ccdull;
    key ^= key >> 33;
    key *= 0xc4ceb9fe1a85ec53ull;
    key ^= key >> 33;
  }
  return {(u32)(key % RANKS), raw};
}

__device__ __forceinline__ Routed route_any(const Route& route, KEY raw) {
  switch (route.kind) {
    case NARROW: return route_key<NARROW>(route, raw);
    case WIDE: return route_key<WIDE>(route, raw);
    case HASH: return route_key<HASH>(route, raw);
    default: return route_key<MODULO>(route, raw);
  }
}

__device__ __noinline__ Routed route_in_features(const Params& p, u32 at, u32 low, u32 high, KEY raw) {
  return route_any(load_route(p, feature_of_key(p, at, low, high)), raw);
}

template <Kind KIND>
__device__ __forceinline__ void route_round(const Route& route, KEY* sent, u32* owners, u32 first, u32 num) {
#pragma unroll
  for (u32 j = 0; j < ROUNDS; j++) {
    owners[j] = 0;
    if (first + j * 32 < num) {
      Routed routed = route_key<KIND>(route, sent[j]);
      owners[j] = routed.owner;
      sent[j] = routed.sent;
    }
  }
}

__device__ __forceinline__ Point tile_start(const Params& p, u32 tile) {
  uint4 packed = p.points[tile];
  Point point;
  point.row = packed.x & ~LONG_FLAG;
  point.key = packed.y;
  point.feature = packed.z;
  point.inside = packed.x & LONG_FLAG;
  return point;
}

__device__ __forceinline__ uint4 make_point(const Params& p, u32 row, u32 key, bool inside) {
  bool many = p.modes || p.num_blocks > 1;
  u32 feature = many ? feature_of_row(p, min(row, (u32)p.num_rows - 1)) : 0;
  return make_uint4(row | (inside ? LONG_FLAG : 0), key, feature, 0);
}

// Writes the beginnings of the tiles that begin inside a row.
__device__ __forceinline__ void place_points(const Params& p, u32 row, u32 begin, u32 length) {
  u64 start = begin + p.row_cost * row, end = start + p.row_cost + length, unit = 1ull << p.unit_bits;
  u32 tile = (u32)((start + unit - 1) >> p.unit_bits);
#pragma unroll 1
  for (u64 at = (u64)tile << p.unit_bits; at < end; at += unit, tile++) {
    u64 into = at - start;
    if (into == 0) {
      p.points[tile] = make_point(p, row, begin, false);
    } else if (length > LONG_ROW) {
      p.points[tile] = make_point(p, row, begin + (u32)(into > p.row_cost ? into - p.row_cost : 0), true);
    } else {
      p.points[tile] = make_point(p, row + 1, begin + length, false);
    }
  }
}

