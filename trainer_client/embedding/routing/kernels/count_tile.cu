extern "C" __global__ void __launch_bounds__(COUNT_THREADS, 1280 / COUNT_THREADS) count_tile(const __grid_constant__ Params p) {
  extern __shared__ u32 shared[];
  const u32 ranks = RANKS;
  u32 rows_per_pass = (u32)p.rows_per_pass, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 *tile_counts = shared, *row_counts = tile_counts + ranks, *begins = row_counts + ranks;
  u32* cells = begins + rows_per_pass + 1;  // one byte a (rank, row)
  u64 rows = p.num_rows;
  Point from = tile_start(p, blockIdx.x), to = tile_start(p, blockIdx.x + 1);
  u32 end_row = to.inside ? to.row + 1 : to.row;
  for (u32 i = threadIdx.x; i < 2 * ranks; i += COUNT_THREADS) tile_counts[i] = 0;
  for (u32 i = threadIdx.x; i < ranks * (rows_per_pass / 4 | 1); i += COUNT_THREADS) cells[i] = 0;
  Route route = load_route(p, from.feature);
  bool mixed = from.feature != to.feature;
  u32 group = (u32)p.lanes_per_row, lane_of_row = threadIdx.x & (group - 1);
  for (u32 row = from.row; row < end_row;) {
    // Passes begin at multiples of 32 rows, so that the stores of a pass fill whole sectors.
    u32 num = min(end_row, (row & ~31u) + rows_per_pass) - row, stride = (num + 3) / 4 | 1;
    bool any_long = false, any_short = false;
    for (u32 i = threadIdx.x; i <= num; i += COUNT_THREADS) {
      u32 begin = p.offsets[row + i];
      bool is_long = i < num && p.offsets[row + i + 1] - begin > LONG_ROW;
      any_long |= is_long;
      any_short |= i < num && !is_long;
      begins[i] = max(from.key, min(begin, to.key)) | (is_long ? LONG_FLAG : 0);
    }
    any_long = __syncthreads_or(any_long);
    any_short = __syncthreads_or(any_short);
    for (u32 i = threadIdx.x / group; i < num; i += COUNT_THREADS / group) {
      u32 key = begins[i];
      if (key & LONG_FLAG) continue;
      u32 stop = begins[i + 1] & ~LONG_FLAG;
      if (mixed && key < stop) route = load_route(p, feature_of_row(p, row + i));
      for (key += lane_of_row; key < stop; key += 4 * group) {
        KEY raw[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          if (key + j * group < stop) raw[j] = p.keys[key + j * group];
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          if (key + j * group < stop)
            atomicAdd(&cells[route_any(route, raw[j]).owner * stride + i / 4], 1u << (i & 3) * 8);
      }
    }
    if (any_long) {
      for (u32 i = 0; i < num; i++) {
        if (!(begins[i] & LONG_FLAG)) continue;
        u32 key = begins[i] & ~LONG_FLAG, stop = begins[i + 1] & ~LONG_FLAG;
        if (mixed) route = load_route(p, feature_of_row(p, row + i));
        for (key += threadIdx.x; key < stop; key += 4 * COUNT_THREADS) {
          KEY raw[4];
#pragma unroll
          for (u32 j = 0; j < 4; j++)
            if (key + j * COUNT_THREADS < stop) raw[j] = p.keys[key + j * COUNT_THREADS];
#pragma unroll
          for (u32 j = 0; j < 4; j++)
            if (key + j * COUNT_THREADS < stop) atomicAdd(&row_counts[route_any(route, raw[j]).owner], 1);
        }
        __syncthreads();
        for (u32 rank = threadIdx.x; rank < ranks; rank += COUNT_THREADS) {
          u32 value = row_counts[rank];
          row_counts[rank] = 0;
          if (value == 0) continue;
          tile_counts[rank] += value;
          u64 cell = rank * rows + row + i;
          if (sizeof(LENGTH) == 8) atomicAdd((u64*)&p.new_lengths[cell], (u64)value);
          else atomicAdd((u32*)&p.new_lengths[cell], value);
        }
        __syncthreads();
      }
    }
    __syncthreads();
    for (u32 rank = any_short ? warp : ranks; rank < ranks; rank += COUNT_THREADS / 32) {
      u32 sum = 0;
      LENGTH* out = p.new_lengths + rank * rows + row;
      u32* words = cells + rank * stride;
      const unsigned char* bytes = (const unsigned char*)words;
      for (u32 i = lane; i < num; i += 32) {
        u32 value = bytes[i];
        sum += value;
        if (!(any_long && begins[i] & LONG_FLAG)) out[i] = (LENGTH)value;
      }
      __syncwarp();
      for (u32 i = lane; 4 * i < num; i += 32) words[i] = 0;
      sum = __reduce_add_sync(FULL, sum);
      if (lane == 0 && sum) tile_counts[rank] += sum;
    }
    __syncthreads();
    row += num;
  }
  for (u32 rank = threadIdx.x; rank < ranks; rank += COUNT_THREADS)
    p.counts[rank * p.pitch + blockIdx.x] = tile_counts[rank];
}

