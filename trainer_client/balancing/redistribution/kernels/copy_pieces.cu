// Copies pieces of fields: one warp an item, an item being one piece of one field.
//
// A piece counts in units (rows of a jagged field, samples of a dense one), so fields of one jagged column share their
// pieces. See `Copies` in copies.py for the arrays.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Params {
  const i64 *unit_bytes, *item_begin, *first_piece, *source, *target;
  const int4* pieces;
  i64 items, fields, source_stride, target_stride;
};

template <typename WORD, int UNROLL>
__device__ void copy_words(const char* from, char* to, u32 count, u32 lane) {
  const WORD* source = (const WORD*)from;
  WORD* target = (WORD*)to;
  u32 i = lane;
  for (; i + 32 * (UNROLL - 1) < count; i += 32 * UNROLL) {
    WORD words[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) words[k] = source[i + 32 * k];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) target[i + 32 * k] = words[k];
  }
  for (; i < count; i += 32) target[i] = source[i];
}

// Words as wide as the two addresses can both be aligned to; single bytes before the first and after the last word.
__device__ void copy_bytes(const char* from, char* to, u64 size, u32 lane) {
  u32 apart = ((u32)(u64)from ^ (u32)(u64)to) & 15;
  u32 width = apart == 0 ? 16 : (apart & 7) == 0 ? 8 : (apart & 3) == 0 ? 4 : (apart & 1) == 0 ? 2 : 1;
  u32 head = (u32)(-(u64)to) & (width - 1);
  if (head > size) head = (u32)size;
  u32 count = (u32)((size - head) / width);
  u64 tail = head + (u64)count * width;
  if (lane < head) to[lane] = from[lane];
  if (tail + lane < size) to[tail + lane] = from[tail + lane];
  from += head;
  to += head;
  if (width == 16)
    copy_words<uint4, 4>(from, to, count, lane);
  else if (width == 8)
    copy_words<u64, 8>(from, to, count, lane);
  else if (width == 4)
    copy_words<u32, 8>(from, to, count, lane);
  else if (width == 2)
    copy_words<unsigned short, 8>(from, to, count, lane);
  else
    copy_words<char, 8>(from, to, count, lane);
}

extern "C" __global__ void __launch_bounds__(1024) copy_pieces(Params job) {
  u32 lane = threadIdx.x & 31;
  i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) >> 5, warps = gridDim.x * (i64)(blockDim.x >> 5);
  for (i64 item = first; item < job.items; item += warps) {
    u32 field = 0, end = (u32)job.fields;  // the last one that begins at the item or before
    while (end - field > 1) {
      u32 middle = (field + end) / 2;
      if (job.item_begin[middle] <= item)
        field = middle;
      else
        end = middle;
    }
    int4 piece = job.pieces[job.first_piece[field] + item - job.item_begin[field]];
    i64 unit = job.unit_bytes[field];
    i64 from = job.source[piece.w * job.source_stride + field] + piece.x * unit;
    i64 to = job.target[piece.w * job.target_stride + field] + piece.y * unit;
    copy_bytes((const char*)from, (char*)to, (u64)(piece.z * unit), lane);
  }
}
