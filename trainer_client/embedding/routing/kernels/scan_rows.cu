template <u32 PER_THREAD>
__device__ __forceinline__ void scan(const Params& p) {
  __shared__ u32 shared_tile, warp_sums[SCAN_THREADS / 32], shared_before;
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) shared_tile = atomicAdd(p.tickets, 1);
  __syncthreads();
  u32 tile = shared_tile, first = (tile * SCAN_THREADS + warp * 32) * PER_THREAD + lane, rows = (u32)p.num_rows;
  u32 lengths[PER_THREAD], before[PER_THREAD], sum = 0;
  bool good = true;
#pragma unroll
  for (u32 j = 0; j < PER_THREAD; j++) {
    i64 length = first + j * 32 < rows ? (i64)p.lengths[first + j * 32] : 0;
    good &= 0 <= length && length <= (i64)p.num_keys;
    lengths[j] = (u32)length;
  }
#pragma unroll
  for (u32 j = 0; j < PER_THREAD; j++) {
    u32 inclusive = warp_inclusive(lengths[j], lane);
    before[j] = sum + inclusive - lengths[j];
    sum += __shfl_sync(FULL, inclusive, 31);
  }
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  u32 warp_before = 0, total = 0;
  for (u32 w = 0; w < SCAN_THREADS / 32; w++) {
    if (w == warp) warp_before = total;
    total += warp_sums[w];
  }
  volatile u64* state = p.scan_state;
  if (threadIdx.x == 0) state[tile] = (tile ? 1ull << 62 : 2ull << 62) | total;
  if (warp == 0) {
    u32 sum_before = 0;
    for (int last = (int)tile - 1; last >= 0; last -= 32) {
      int at = last - (int)lane;
      u64 seen = at >= 0 ? state[at] : 2ull << 62;
      while (__any_sync(FULL, seen >> 62 == 0)) {
        if (seen >> 62 == 0) seen = state[at];
      }
      u32 complete = __ballot_sync(FULL, seen >> 62 == 2);
      u32 nearest = complete ? __ffs(complete) - 1 : 31;
      sum_before += __reduce_add_sync(FULL, lane <= nearest ? (u32)seen : 0);
      if (complete) break;
    }
    if (lane == 0) {
      if (tile) state[tile] = 2ull << 62 | (sum_before + total);
      shared_before = sum_before;
    }
  }
  __syncthreads();
  u32 block_before = shared_before + warp_before;
#pragma unroll
  for (u32 j = 0; j < PER_THREAD; j++) {
    u32 row = first + j * 32, begin = block_before + before[j];
    if (row < rows) {
      p.offsets[row] = begin;
      if (row == rows - 1) {
        p.offsets[rows] = begin + lengths[j];
        good &= begin + lengths[j] == p.num_keys;
      }
      place_points(p, row, begin, lengths[j]);
      if (row == rows - 1) p.points[p.num_tiles] = make_point(p, rows, begin + lengths[j], false);
    }
  }
  if (p.clear_long) {
#pragma unroll 1
    for (u32 j = 0; j < PER_THREAD; j++) {
      u32 row = first + j * 32, cut = __ballot_sync(FULL, row < rows && p.lengths[row] > (LENGTH)LONG_ROW);
      while (cut) {
        u32 source = __ffs(cut) - 1, long_row = __shfl_sync(FULL, row, source);
        cut &= cut - 1;
        for (u64 rank = lane; rank < RANKS; rank += 32) p.new_lengths[rank * rows + long_row] = 0;
      }
    }
  }
  if (!good) {
    printf("block_bucketize: lengths must not be negative and must add up to the %llu indices\n", p.num_keys);
    __trap();
  }
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 4) scan_rows(const __grid_constant__ Params p) { scan<8>(p); }

// For few rows, whose tiles a thread a row places sooner.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 4) scan_few_rows(const __grid_constant__ Params p) { scan<1>(p); }
