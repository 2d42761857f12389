extern "C" __global__ void __launch_bounds__(SCATTER_THREADS, SCATTER_BLOCKS) scatter_tile(const __grid_constant__ Params p) {
  extern __shared__ u64 shared_wide[];
  __shared__ u32 warp_sums[SCATTER_WARPS];
  const u32 ranks = RANKS;
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  KEY* sorted = (KEY*)shared_wide;
  u32* deltas = (u32*)(sorted + MAX_TILE_KEYS);
  u16* owners = (u16*)(deltas + ranks);
  u16* warp_counts = owners + MAX_TILE_KEYS;
  u32 first_origin = threadIdx.x < ranks ? p.counts[threadIdx.x * p.pitch + blockIdx.x] + p.bases[threadIdx.x] : 0;
  for (u32 i = threadIdx.x; i < SCATTER_WARPS * ranks; i += SCATTER_THREADS) warp_counts[i] = 0;
  Point from = tile_start(p, blockIdx.x), to = tile_start(p, blockIdx.x + 1);
  u32 num = to.key > from.key ? min(to.key - from.key, (u32)MAX_TILE_KEYS) : 0;
  if (num == 0) return;
  u32 end_row = to.inside ? to.row + 1 : to.row, low = from.feature, high = to.feature;
  Route route = load_route(p, low);
  u32 rounds = (num + SCATTER_THREADS - 1) / SCATTER_THREADS, segment = warp * rounds * 32 + lane;
  u32 limit = min(num, (warp + 1) * rounds * 32);
  KEY sent[ROUNDS];
  u32 place[ROUNDS];  // owner, then with the rank among the warp's keys of that owner in the high half
#pragma unroll
  for (u32 j = 0; j < ROUNDS; j++)
    if (segment + j * 32 < limit) sent[j] = p.keys[from.key + segment + j * 32];
  if (low != high) {
#pragma unroll
    for (u32 j = 0; j < ROUNDS; j++) {
      place[j] = 0;
      if (segment + j * 32 < limit) {
        Routed routed = route_in_features(p, from.key + segment + j * 32, low, high, sent[j]);
        place[j] = routed.owner;
        sent[j] = routed.sent;
      }
    }
  } else if (route.kind == NARROW) {
    route_round<NARROW>(route, sent, place, segment, limit);
  } else if (route.kind == WIDE) {
    route_round<WIDE>(route, sent, place, segment, limit);
  } else if (route.kind == HASH) {
    route_round<HASH>(route, sent, place, segment, limit);
  } else {
    route_round<MODULO>(route, sent, place, segment, limit);
  }
  __syncthreads();
  u16* mine = warp_counts + warp * ranks;
#pragma unroll
  for (u32 j = 0; j < ROUNDS; j++) {
    bool valid = segment + j * 32 < limit;
    u32 owner = place[j];
    u32 peers = __ballot_sync(FULL, valid);
    if (!peers) break;
#ifdef MATCH_ANY
    peers &= __match_any_sync(FULL, owner);
#else
#pragma unroll
    for (u32 b = 0; b < BITS; b++) {
      bool one = owner >> b & 1;
      u32 ones = __ballot_sync(FULL, one);
      peers &= one ? ones : ~ones;
    }
#endif
    u32 old = valid ? mine[owner] : 0, before = __popc(peers & ((1u << lane) - 1));
    __syncwarp();
    if (valid && before == 0) mine[owner] = (u16)(old + __popc(peers));
    __syncwarp();
    place[j] = owner | (old + before) << 16;
  }
  __syncthreads();
  u32 carry = 0, total;
  for (u32 base = 0; base < ranks; base += SCATTER_THREADS) {
    u32 rank = base + threadIdx.x, sum = 0, values[SCATTER_WARPS];
    if (rank < ranks) {
#pragma unroll
      for (u32 w = 0; w < SCATTER_WARPS; w++) sum += values[w] = warp_counts[w * ranks + rank];
    }
    u32 start = carry + block_exclusive<SCATTER_WARPS>(sum, warp_sums, total);
    carry += total;
    if (rank < ranks) {
      deltas[rank] = (base ? p.bases[rank] + p.counts[rank * p.pitch + blockIdx.x] : first_origin) - start;
#pragma unroll
      for (u32 w = 0; w < SCATTER_WARPS; w++) {
        warp_counts[w * ranks + rank] = (u16)start;
        start += values[w];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (u32 j = 0; j < ROUNDS; j++) {
    u32 at = segment + j * 32;
    if (at >= limit) break;
    u32 owner = place[j] & 0xffff, local = mine[owner] + (place[j] >> 16), slot = deltas[owner] + local;
    u32 key = from.key + at;
    sorted[local] = sent[j];
    owners[local] = (u16)owner;
    if (p.slots) p.slots[key] = (KEY)slot;
    if (p.weights) p.new_weights[slot] = p.weights[key];
    if (p.positions) {
      u32 left = from.row, right = end_row;
      while (right - left > 1) {
        u32 middle = (left + right) / 2;
        if (p.offsets[middle] <= key) left = middle; else right = middle;
      }
      p.positions[slot] = (KEY)(key - p.offsets[left]);
    }
  }
  __syncthreads();
  for (u32 local = threadIdx.x; local < num; local += SCATTER_THREADS)
    p.new_keys[deltas[owners[local]] + local] = sorted[local];
}
