// The CUDA keywords that the kernels of plugins/ use, as plain C++: the same .cu runs on the host.
//
// Blocks run one after another in random order. The threads of a block are coroutines: which one goes on is drawn at
// every barrier and at some accesses, so between two barriers they run in every order. Every access through __ldcg and
// __stcg is counted and checked: inside a known buffer, aligned to its size, and free of races (two threads, at least
// one writing, the same byte, no barrier between them; threads of two blocks have none).
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(threads)

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct dim3 { unsigned int x = 1, y = 1, z = 1; };
using std::min;

static dim3 gridDim, blockDim, blockIdx, threadIdx;
uint4 dynamic_shared[48 * 1024 / sizeof(uint4)];

namespace cuda_host {

struct Touch { int block = -1, epoch = -1, thread = -1; };

struct Buffer {
    const char* begin;
    int64_t bytes;
    bool writable;
    std::vector<Touch> writes, reads;  // the last of each byte

    Buffer(const void* begin, int64_t bytes, bool writable)
        : begin(static_cast<const char*>(begin)), bytes(bytes), writable(writable), writes(bytes), reads(bytes) {}
};

struct Report {
    int64_t bytes_read = 0, bytes_written = 0;
    int64_t narrow = 0;      // accesses of fewer than 16 bytes
    int64_t stray = 0;       // outside every buffer, or written where only reads are allowed
    int64_t misaligned = 0;
    int64_t races = 0;
    int64_t divergent = 0;   // a thread ended while others waited at a barrier
    int64_t shared_overrun = 0;
};

struct Thread {
    enum { kReady, kWaiting, kDone } state = kReady;
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(16 * 1024);
};

struct Machine {
    std::mt19937 random;
    std::vector<Buffer> buffers;
    Report report;
    std::vector<Thread> threads = std::vector<Thread>(256);
    ucontext_t scheduler;
    void (*body)() = nullptr;
    int block = 0, epoch = 0, current = 0;
};

static Machine machine;

inline void pause(int state) {
    Thread& thread = machine.threads[machine.current];
    thread.state = static_cast<decltype(thread.state)>(state);
    swapcontext(&thread.context, &machine.scheduler);
}

inline void enter() {
    machine.body();
    machine.threads[machine.current].state = Thread::kDone;
}

inline void run_block(int count) {
    for (int i = 0; i < count; ++i) {
        Thread& thread = machine.threads[i];
        thread.state = Thread::kReady;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = &machine.scheduler;
        makecontext(&thread.context, enter, 0);
    }
    machine.epoch = 0;
    std::vector<int> ready;
    for (;;) {
        ready.clear();
        int waiting = 0;
        for (int i = 0; i < count; ++i) {
            if (machine.threads[i].state == Thread::kWaiting) {
                machine.threads[i].state = Thread::kReady;
                ++waiting;
            }
            if (machine.threads[i].state == Thread::kReady) ready.push_back(i);
        }
        if (ready.empty()) return;
        if (waiting != 0 && waiting != count) ++machine.report.divergent;
        ++machine.epoch;
        while (!ready.empty()) {
            const size_t drawn = machine.random() % ready.size();
            machine.current = ready[drawn];
            threadIdx = {static_cast<unsigned int>(machine.current), 0, 0};
            swapcontext(&machine.scheduler, &machine.threads[machine.current].context);
            if (machine.threads[machine.current].state != Thread::kReady) {
                ready[drawn] = ready.back();
                ready.pop_back();
            }
        }
    }
}

// Counts and checks one access; false for one that must not be carried out.
inline bool touch(const void* address, int size, bool write) {
    Report& report = machine.report;
    (write ? report.bytes_written : report.bytes_read) += size;
    report.narrow += size < 16;
    report.misaligned += reinterpret_cast<uintptr_t>(address) % size != 0;
    const Touch now{machine.block, machine.epoch, machine.current};
    const auto races = [&](const Touch& before) {
        return before.block >= 0
            && (before.block != now.block || (before.epoch == now.epoch && before.thread != now.thread));
    };
    for (Buffer& buffer : machine.buffers) {
        const int64_t at = static_cast<const char*>(address) - buffer.begin;
        if (at < 0 || at + size > buffer.bytes) continue;
        if (write && !buffer.writable) break;
        bool raced = false;
        for (int64_t i = at; i < at + size; ++i) {
            raced |= races(buffer.writes[i]) || (write && races(buffer.reads[i]));
            (write ? buffer.writes : buffer.reads)[i] = now;
        }
        report.races += raced;
        return true;
    }
    ++report.stray;
    return false;
}

// Runs `body` for every thread of the grid. The shared memory beyond `shared_bytes` must stay as it is.
inline void launch(dim3 grid, int threads, int shared_bytes, void (*body)()) {
    constexpr int kPattern = 0xA5;
    gridDim = grid;
    blockDim = {static_cast<unsigned int>(threads), 1, 1};
    machine.body = body;
    std::vector<int> order(grid.x * grid.y * grid.z);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), machine.random);
    const int guarded = min<int>(shared_bytes + 1024, sizeof(dynamic_shared));
    for (int block : order) {
        machine.block = block;
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        std::memset(dynamic_shared, kPattern, guarded);
        run_block(threads);
        const auto* shared = reinterpret_cast<const unsigned char*>(dynamic_shared);
        for (int i = shared_bytes; i < guarded; ++i) machine.report.shared_overrun += shared[i] != kPattern;
    }
}

}  // namespace cuda_host

inline void __syncthreads() { cuda_host::pause(cuda_host::Thread::kWaiting); }

template <typename T>
T __ldcg(const T* address) {
    if (cuda_host::machine.random() % 4 == 0) cuda_host::pause(cuda_host::Thread::kReady);
    return cuda_host::touch(address, sizeof(T), false) ? *address : T{};
}

template <typename T>
void __stcg(T* address, T value) {
    if (cuda_host::machine.random() % 4 == 0) cuda_host::pause(cuda_host::Thread::kReady);
    if (cuda_host::touch(address, sizeof(T), true)) *address = value;
}
