// compact_append_kv.cu behind a C function, for ctypes. KERNEL names the source.
#include "cuda_host.h"

#include KERNEL

struct Arguments {
    const char *past_key, *past_value, *new_key, *new_value;
    const long long *past_length, *pending_rows, *pending_count;
    int cache_rows, new_rows, row_bytes, slots;
    char *present_key, *present_value;
};

static Arguments a;

static void body() {
    compact_append_kv(a.past_key, a.past_value, a.new_key, a.new_value, a.past_length, a.pending_rows, a.pending_count,
                      a.cache_rows, a.new_rows, a.row_bytes, a.slots, a.present_key, a.present_value);
}

extern "C" void run(const Arguments* arguments, int heads, const unsigned int* grid, int threads, int shared_bytes,
                    unsigned int seed, cuda_host::Report* report) {
    a = *arguments;
    const int64_t cache = int64_t{heads} * a.cache_rows * a.row_bytes;
    const int64_t appended = int64_t{heads} * a.new_rows * a.row_bytes;
    auto& machine = cuda_host::machine;
    machine.random.seed(seed);
    machine.report = {};
    machine.buffers.clear();
    machine.buffers.emplace_back(a.present_key, cache, true);
    machine.buffers.emplace_back(a.present_value, cache, true);
    machine.buffers.emplace_back(a.new_key, appended, false);
    machine.buffers.emplace_back(a.new_value, appended, false);
    cuda_host::launch({grid[0], grid[1], grid[2]}, threads, shared_bytes, body);
    *report = machine.report;
}
