// One block a rank; the last block to finish places the ranks behind each other.
extern "C" __global__ void __launch_bounds__(TILE_THREADS) scan_tiles(const __grid_constant__ Params p) {
  __shared__ u32 warp_sums[TILE_THREADS / 32];
  __shared__ bool last;
  u32* counts = p.counts + blockIdx.x * p.pitch;
  u32 carry = 0, total;
  for (u32 base = 0; base < p.num_tiles; base += 4 * TILE_THREADS) {
    u32 at = base + 4 * threadIdx.x;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (at < p.num_tiles) value = *(uint4*)(counts + at);
    if (at + 1 >= p.num_tiles) value.y = 0;
    if (at + 2 >= p.num_tiles) value.z = 0;
    if (at + 3 >= p.num_tiles) value.w = 0;
    u32 before = carry + block_exclusive<TILE_THREADS / 32>(value.x + value.y + value.z + value.w, warp_sums, total);
    uint4 sums = make_uint4(before, before + value.x, before + value.x + value.y, before + value.x + value.y + value.z);
    if (at < p.num_tiles) *(uint4*)(counts + at) = sums;
    carry += total;
  }
  if (threadIdx.x == 0) {
    p.totals[blockIdx.x] = carry;
    __threadfence();
    last = atomicAdd(p.tickets + 1, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  carry = 0;
  for (u32 base = 0; base < RANKS; base += TILE_THREADS) {
    u32 rank = base + threadIdx.x;
    u32 value = rank < RANKS ? ((volatile u32*)p.totals)[rank] : 0;
    u32 before = block_exclusive<TILE_THREADS / 32>(value, warp_sums, total);
    if (rank < RANKS) p.bases[rank] = carry + before;
    carry += total;
  }
}

