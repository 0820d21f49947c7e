// The part of AscendC that TileLang emits for SIMT vector kernels, as one host process sees it: our reading of the
// emitted code, not of the device. Order is sequential, so races between pipelines cannot show; what does show is memory
// outside a buffer, a transfer that is not aligned, a wait for a flag that nobody sets, a flag that nobody waits for.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <functional>
#include <memory>
#include <vector>

#define __simt_vf__
#define __simt_callee__
#define __launch_bounds__(n)
#define __ubuf__
#define __gm__
#define __global__
#define __vector__
#define __aicore__
using std::max;
using std::min;

static constexpr size_t UB_SIZE = EMULATED_UB;  // bytes of unified buffer that a kernel with SIMT functions has
static constexpr size_t ALIGNMENT = 32;

[[noreturn]] inline void fault(const char *what) {
    std::fprintf(stderr, "emulation: %s\n", what);
    std::_Exit(86);
}

// ---- types ---------------------------------------------------------------------------------------------------------

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float x) {
        uint32_t u;
        std::memcpy(&u, &x, 4);
        bits = x != x ? 0x7FC0 : uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
    }
    explicit operator float() const {
        uint32_t u = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &u, 4);
        return x;
    }
};
struct bfloat16x2_t { bfloat16_t x, y; };
struct uint1 { uint32_t x; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 operator*(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 __bfloat1622float2(bfloat16x2_t v) { return {float(v.x), float(v.y)}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }

// ---- one core ------------------------------------------------------------------------------------------------------

struct Lane { unsigned x = 0, y = 0, z = 0; };
static Lane threadIdx;
static int block_idx;
static uint8_t *UB;  // has guard pages on both sides: an access outside it ends the process

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX };
using event_t = int;
using asc_load_l2_cache_mode = int;
using asc_store_l2_cache_mode = int;
static int flag_table[8][8][16], (*flags)[8][16] = flag_table;

inline void asc_init() {}

// Lanes are coroutines of one thread: each runs up to the next barrier, then the one after it.
struct Coroutine {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[64 << 10]};
    bool done = false;
};
static ucontext_t scheduler;
static Coroutine *running;
static std::function<void()> lane_body;

inline void asc_syncthreads() { swapcontext(&running->context, &scheduler); }
inline void lane_main() {
    lane_body();
    running->done = true;
    swapcontext(&running->context, &scheduler);
}
inline void asc_sync_notify(pipe_t from, pipe_t to, event_t e) { ++flags[from][to][e]; }
inline void asc_sync_wait(pipe_t from, pipe_t to, event_t e) {
    if (--flags[from][to][e] < 0) fault("waits for a flag that nobody set");
}

inline void check(const uint8_t *p, size_t n) {
    if (p < UB || p + n > UB + UB_SIZE) fault("transfer outside the unified buffer");
    if ((p - UB) % ALIGNMENT) fault("transfer not aligned to 32 bytes");
}
inline void asc_copy_gm2ub_align(uint8_t *to, const uint8_t *from, int bursts, int bytes, int, int, int, int,
                                 int64_t from_stride, int64_t to_stride) {
    for (int i = 0; i < bursts; ++i) {
        check(to + i * to_stride, bytes);
        std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
    }
}
inline void asc_copy_ub2gm_align(uint8_t *to, const uint8_t *from, int bursts, int bytes, int, int64_t to_stride,
                                 int64_t from_stride) {
    for (int i = 0; i < bursts; ++i) {
        check(from + i * from_stride, bytes);
        std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
    }
}

namespace cce {
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
}  // namespace cce

template <auto F, class... A>
void asc_vf_call(cce::dim3 shape, A... arguments) {
    const unsigned n = shape.x * shape.y * shape.z;
    lane_body = [&] { F(arguments...); };
    std::vector<Coroutine> lanes(n);
    for (auto &lane : lanes) {
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.get();
        lane.context.uc_stack.ss_size = 64 << 10;
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, lane_main, 0);
    }
    for (unsigned ended = 0; ended < n;) {
        ended = 0;
        for (unsigned i = 0; i < n; ++i) {
            running = &lanes[i];
            threadIdx = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
            swapcontext(&scheduler, &running->context);
            ended += running->done;
        }
        if (ended && ended < n) fault("some lanes end while others wait at a barrier");
    }
}

inline void start_core(int core) {
    block_idx = core;
    std::memset(flag_table, 0, sizeof flag_table);
    std::memset(UB, 0xAB, UB_SIZE);  // a NaN in every format, if it is read before it is written
}
inline void end_core() {
    for (int from = 0; from < 8; ++from)
        for (auto &to : flags[from])
            for (int count : to)
                if (count) fault("leaves a flag that nobody waits for");
}
