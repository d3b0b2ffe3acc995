// medusa::CompactAppendKV for the keys and the values of one layer, in place:
//
//     present[P + j]     = past[P + pending_rows[j]]    j < G
//     present[P + G + u] = appended[u]                  u < N
//
// A block owns one slice of the columns of one head: blockIdx = (slice, head, 0 for keys or 1 for values). No other
// block touches its bytes, so one barrier orders the block's reads before its writes and nothing orders blocks.
// P, G and the pending rows are read from device memory: a captured launch stays right when they change.
// Geometry, shared memory and entry name: kernel.py. Plain C++ but for the CUDA keywords: the tests run it on the host.

constexpr int kSliceBytes = 64;  // a multiple of every lane

extern __shared__ uint4 dynamic_shared[];  // [slots, kSliceBytes]: pending rows between their read and their write

struct State {
    long long past_length;          // P
    const long long* pending_rows;  // [slots]
    int pending_count;              // G, within 0...slots
    int cache_rows;                 // S_max
    int new_rows;                   // N
    int row_bytes;
};

template <typename Lane>
__device__ void compact_append(const char* past, const char* appended, char* present, int slice_bytes, State s) {
    Lane* staged = reinterpret_cast<Lane*>(dynamic_shared);
    const int lanes = slice_bytes / static_cast<int>(sizeof(Lane));
    const auto in_cache = [&](long long row) { return row >= 0 && row < s.cache_rows; };
    const auto moves = [&](int slot) {  // a row already in place is neither read nor written
        const long long source = s.past_length + s.pending_rows[slot];
        return s.pending_rows[slot] != slot && in_cache(source) && in_cache(s.past_length + slot);
    };

    for (int i = threadIdx.x; i < s.pending_count * lanes; i += blockDim.x) {
        const int slot = i / lanes;
        if (moves(slot)) {
            const long long source = s.past_length + s.pending_rows[slot];
            staged[i] = __ldcg(reinterpret_cast<const Lane*>(past + source * s.row_bytes) + i % lanes);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < s.pending_count * lanes; i += blockDim.x) {
        const int slot = i / lanes;
        if (moves(slot)) {
            char* row = present + (s.past_length + slot) * s.row_bytes;
            __stcg(reinterpret_cast<Lane*>(row) + i % lanes, staged[i]);
        }
    }
    const long long first = s.past_length + s.pending_count;
    for (int i = threadIdx.x; i < s.new_rows * lanes; i += blockDim.x) {
        const long long source = i / lanes;
        if (in_cache(first + source)) {
            char* row = present + (first + source) * s.row_bytes;
            const Lane value = __ldcg(reinterpret_cast<const Lane*>(appended + source * s.row_bytes) + i % lanes);
            __stcg(reinterpret_cast<Lane*>(row) + i % lanes, value);
        }
    }
}

// past_*, present_*  [heads, cache_rows, row_bytes]   the same memory
// new_*              [heads, new_rows, row_bytes]
// The order is tensorrt.plugin's: inputs, extra scalars, outputs.
extern "C" __global__ void __launch_bounds__(256)
compact_append_kv(const char* past_key, const char* past_value, const char* new_key, const char* new_value,
                  const long long* past_length, const long long* pending_rows, const long long* pending_count,
                  int cache_rows, int new_rows, int row_bytes, int slots, char* present_key, char* present_value) {
    const bool is_key = blockIdx.z == 0;
    const int begin = blockIdx.x * kSliceBytes;
    const int slice_bytes = min(kSliceBytes, row_bytes - begin);
    const long long head = blockIdx.y;
    const char* past = (is_key ? past_key : past_value) + head * cache_rows * row_bytes + begin;
    const char* appended = (is_key ? new_key : new_value) + head * new_rows * row_bytes + begin;
    char* present = (is_key ? present_key : present_value) + head * cache_rows * row_bytes + begin;
    const long long count = *pending_count;
    State s{*past_length, pending_rows, 0, cache_rows, new_rows, row_bytes};
    s.pending_count = count < 0 ? 0 : count > slots ? slots : static_cast<int>(count);

    // 16 bytes per access wherever the rows allow it (every head_dim of 16-bit numbers that is a multiple of 8).
    const unsigned long long alignment = reinterpret_cast<unsigned long long>(past)
                                       | reinterpret_cast<unsigned long long>(appended)
                                       | reinterpret_cast<unsigned long long>(present) | row_bytes;
    if (alignment % 16 == 0) {
        compact_append<uint4>(past, appended, present, slice_bytes, s);
    } else if (alignment % 8 == 0) {
        compact_append<uint2>(past, appended, present, slice_bytes, s);
    } else if (alignment % 4 == 0) {
        compact_append<unsigned int>(past, appended, present, slice_bytes, s);
    } else {
        compact_append<unsigned short>(past, appended, present, slice_bytes, s);
    }
}
