// Routed experts, exact class: products of bf16 activations, which hold FP8/32 values exactly, with MXFP4 weights,
// dequantised to bf16 in registers, exactly too. Sums are float32. How it works: experts.cuh. One more macro: NAN_SCALES
// (some weight scale is NaN).

constexpr int TOKEN = 2, SCALED = 0, EACH = 1;
#define MULTIPLY(N) wgmma_n##N
#include "experts.cuh"

__device__ __forceinline__ void warpgroup_barrier(int group) {
    asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory");
}

// ---- formats -----------------------------------------------------------------------------------------------------

// What FP8/32 leaves of two values, of blocks with these largest magnitudes; all of them bf16.
__device__ __forceinline__ u32 fp8_round_trip(u32 values, u32 amax) {
    const u32 scales = fp8_scales(amax);
    const float high = high_float(values) * reciprocal(scales & 0xFFFF0000u);
    const float2 left = from_e4m3(to_e4m3(low_float(values) * reciprocal(scales << 16), high));
    return pack_bf16(or_nan(low_is_number(amax), left.x * low_float(scales)),
                     or_nan(high_is_number(amax), left.y * high_float(scales)));
}

// One word: eight codes of a row under one scale, the left operand of two wgmma steps. Codes of a half-word lie where
// few shifts bring them to the sign, exponent and top mantissa bits of a bf16 (times 2^-126, which the scale makes up
// for).
__device__ __forceinline__ void dequantise(u32 word, u32 scales, int block, int half, u32 (&a)[2][4]) {
    const u32 scale = __byte_perm(scales, 0, 0x4040 + 0x0101 * block);  // the byte, in both halves
    u32 factor = scale << 7;
#if NAN_SCALES
    if (scale == 0x00FF00FFu) factor = 0x7FFF7FFFu;
#endif
    a[0][half] = mul_bf16x2(word & 0x81C081C0u, factor);
    a[0][half + 2] = mul_bf16x2(word << 3 & 0x81C081C0u, factor);
    a[1][half] = mul_bf16x2(word << 6 & 0x81C081C0u, factor);
    a[1][half + 2] =
        mul_bf16x2(word << 1 & 0x80008000u | word >> 5 & 0x01000100u | word >> 4 & 0x00C000C0u, factor);
}

// ---- tokens ------------------------------------------------------------------------------------------------------

// A block per group of eight positions and 1,024 channels: the FP8/32 round trip of their tokens, in bf16.
constexpr int GATHER_PARTS = (HIDDEN_TILES + 7) / 8;  // of a group, a block each
extern "C" __global__ void __launch_bounds__(256) gather(
    const u16* __restrict__ x, const int* __restrict__ begins, const int* __restrict__ counts,
    const int* __restrict__ order, const int* __restrict__ experts, u16* __restrict__ out) {
    const int lane = threadIdx.x % 32;
    wait_for_previous();
    launch_dependents();
    const int units = begins[EXPERTS] / 8 * GATHER_PARTS;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int group = unit / GATHER_PARTS, pair = order[8 * group + lane % 8];
        const u16* row = x + (i64)(max(pair, 0) / TOPK) * HIDDEN;
        const int expert = experts[group];
        const Run run(begins[expert], counts[expert]);
        uint4 raws[4];
        #pragma unroll
        for (int step = 0; step < 4; step++) {
            const int eight = unit % GATHER_PARTS * 128 + step * 32 + threadIdx.x / 8;
            raws[step] = pair >= 0 && 8 * eight < HIDDEN ? *(const uint4*)(row + 8 * eight) : make_uint4(0, 0, 0, 0);
        }
        #pragma unroll
        for (int step = 0; step < 4; step++) {
            const int eight = unit % GATHER_PARTS * 128 + step * 32 + threadIdx.x / 8;
            if (eight >= HIDDEN_TILES * 16) break;  // all lanes of a block of 32 channels together
            const u32 pairs[4] = {raws[step].x, raws[step].y, raws[step].z, raws[step].w};
            u32 amax = 0, result[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) amax = max_each(amax, pairs[i] & MAGNITUDES);
            amax = max_each(amax, __funnelshift_l(amax, amax, 16));
            amax = max_each(amax, __shfl_xor_sync(~0u, amax, 8));
            amax = max_each(amax, __shfl_xor_sync(~0u, amax, 16));
            #pragma unroll
            for (int i = 0; i < 4; i++) result[i] = fp8_round_trip(pairs[i], amax);
            *(uint4*)(out + run.place(HIDDEN_TILES, eight / 16, group) * (GROUP / 2) + eight % 16 * 64 + lane % 8 * 8) =
                make_uint4(result[0], result[1], result[2], result[3]);
        }
    }
}

// ---- products ----------------------------------------------------------------------------------------------------

struct Result {
    const float* factors[2];  // of the second product's weights, of the first's
    const int* order;
    const float* sorted;
    float limit;
    u16 *h, *out;  // what the first product makes, and what the second does
    u32 (*maxima)[NMAX / 2][4];  // of two tokens, in each warp
    Finished finished;
};

// gate and up of two tokens -> SwiGLU times the tokens' weights; pairs of bf16.
__device__ __forceinline__ u32 swiglu(u32 gates, u32 ups, float2 weights, float limit) {
    const float gate[2] = {low_float(gates), high_float(gates)}, up[2] = {low_float(ups), high_float(ups)};
    float h[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float least = min_or_nan(gate[i], limit);
        h[i] = __fdividef(least, 1.f + expf(-least)) * max_or_nan(min_or_nan(up[i], limit), -limit);
    }
    return pack_bf16(h[0] * weights.x, h[1] * weights.y);
}

// The first product. ``odd``: of ``Finished``.
template <int N> __device__ __forceinline__ void finish_first(
    float (&d)[N / 2], const Item& work, int tile, const Result& to, int odd) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = 2 * (lane % 4);
    const float factor = to.factors[1][work.expert];
    const int group = threadIdx.x / 128, channel = 32 * tile + 8 * warp + lane / 4;
    u32 h[N / 8];
    #pragma unroll
    for (int i = 0; i < N / 8; i++) {  // two tokens
        const bool any = 8 * i < work.count;  // columns are a multiple of STEP
        const float2 weights = any ? *(const float2*)(to.sorted + work.first + 8 * i + column) : make_float2(0.f, 0.f);
        h[i] = swiglu(pack_bf16(d[4 * i] * factor, d[4 * i + 1] * factor),
                      pack_bf16(d[4 * i + 2] * factor, d[4 * i + 3] * factor), weights, to.limit);
        u32 amax = h[i] & MAGNITUDES;
        #pragma unroll
        for (int step = 4; step < 32; step *= 2) amax = max_each(amax, __shfl_xor_sync(~0u, amax, step));
        if (lane < 4) to.maxima[group][4 * i + lane][warp] = amax;
    }
    warpgroup_barrier(group);
    u16* out = to.h + work.run.place(INNER_TILES, channel / 128, work.first / 8) * (GROUP / 2) + channel % 128 / 8 * 64
             + column * 8 + channel % 8;
    #pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const uint4 four = *(const uint4*)to.maxima[group][4 * i + lane % 4];
        const u32 amax = max_each(max_each(four.x, four.y), max_each(four.z, four.w));
        const u32 values = fp8_round_trip(h[i], amax);
        if (8 * i < work.count) {
            out[i * (GROUP / 2)] = (u16)values;
            out[i * (GROUP / 2) + 8] = (u16)(values >> 16);
        }
    }
    to.finished.meet(odd, work.first / 8);
}

// The second product.
template <int N> __device__ __forceinline__ void finish_second(
    const float (&d)[N / 2], const Item& work, int tile, const Result& to) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = 2 * (lane % 4);
    const float factor = to.factors[0][work.expert];
    const int row = 64 * tile + 16 * warp + lane / 4;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int at = 8 * (i / 2) + column + i % 2;
        if (at < work.count) {
            u16* out = to.out + (i64)to.order[work.first + at] * HIDDEN + row;
            if (row < HIDDEN) out[0] = to_bf16(d[4 * (i / 2) + i % 2] * factor);
            if (row + 8 < HIDDEN) out[8] = to_bf16(d[4 * (i / 2) + 2 + i % 2] * factor);
        }
    }
}

struct Operand {  // the left one of a lane, for 64 channels
    u32 a[2][2][4];

    __device__ __forceinline__ void make(const Weights& weights, int part) {
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int half = 0; half < 2; half++)
                dequantise(weights.word(half, 2 * part + i), weights.scales[half], 2 * part + i, half, a[i]);
    }
    template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 b, int part) const {
        wgmma_hold(d);
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < 4; i++) Product<N>::run(d, a[i / 2][i % 2], b + (4 * part + i) * (2 * 128 / 16), 1);
        wgmma_commit();
    }
};

// Of two operands, one is made while the other is multiplied, on into the next stage.
template <bool GATED, int N> __device__ __forceinline__ void consume(
    const Item& work, Slot& slot, const Pipeline& pipeline, const Result& to, int odd) {
    constexpr int K_TILES = Shape<GATED>::K_TILES;
    const int group = threadIdx.x / 128, tile = work.block * WARPGROUPS + group;
    float d[N / 2] = {};
    Weights weights;
    Operand first, second;
    weights.load(pipeline.wait(slot) + group * TILE);
    first.make(weights, 0);
    for (int k = 0; k < K_TILES; k++) {
        const u64 b = pipeline.tokens(slot.index);
        const int current = slot.index;
        first.multiply<N>(d, b, 0);
        second.make(weights, 1);
        second.multiply<N>(d, b, 1);
        slot.next();
        const bool more = k + 1 < K_TILES;
        if (more) weights.load(pipeline.wait(slot) + group * TILE);
        wgmma_wait<1>();
        if (more) first.make(weights, 0);
        wgmma_wait<0>();
        wgmma_hold(d);
        pipeline.release(current);
    }
    if constexpr (GATED) finish_first<N>(d, work, tile, to, odd);
    else finish_second<N>(d, work, tile, to);
}

// A group of x and of h, what the first product makes: [16][8 tokens][8 channels].
extern "C" __global__ void __launch_bounds__(THREADS, 1) products(
    const u8* gate_up, const float* gate_up_factors, const u8* down, const float* down_factors, const int* begins,
    const int* counts, const int* order, const float* sorted, int* drawn, int* stored, const u16* x, u16* h, u16* out,
    i64 fewest, i64 most, float limit) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int first_piece[EXPERTS + 1], finished_pieces[2];
    __shared__ __align__(16) u32 maxima[WARPGROUPS][NMAX / 2][4];
    __shared__ u64 barriers[2 * STAGES];
    __shared__ Item items[STAGES + 1];
    const u32 full = shared_address(barriers);
    const Pipeline pipeline{full, full + 8 * STAGES, shared_address(memory), items};
    const Finished finished{finished_pieces};
    start(pipeline, counts, first_piece, fewest, most);
    const Schedule schedule{begins, counts, first_piece};
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPYING));
        if (threadIdx.x == CONSUMERS)
            copy_ahead(pipeline, schedule, drawn, stored, {gate_up, (const u8*)x}, {down, (const u8*)h});
        else if (threadIdx.x / 32 == CONSUMERS / 32 + 1) finished.publish(stored);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COMPUTING));
        const Result to{{down_factors, gate_up_factors}, order, sorted, limit, h, out, maxima, finished};
        compute(pipeline, finished, to);
    }
}
