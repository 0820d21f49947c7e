// Routed experts, fast class: products of e4m3 tokens with MXFP4 weights on FP8 tensor cores. How: experts.cuh.
//
// All scales are powers of two, so nothing has to be multiplied every 32 channels. An e2m1 code times the scale of its
// block is an e4m3 value, exactly, over 12 binades, which end at the largest scale of the row (experts_fp8.py rounds
// what is below). Dequantisation looks it up: eight e4m3 magnitudes, two registers, are a linear function of the
// exponent. A token has one scale for 128 channels, the largest of its FP8/32 scales there: exact again, but for what
// falls below 2^-9 of it; the error is less than 2^-17 of the largest value. So a stage of 128 channels is a plain
// product.
//
// These tensor cores align the products of a sum to its largest and keep some 14 bits. So the sum of a stage is all
// they make; it is multiplied by the tokens' scales and added in float32.
//
// The four tiles of a block are 128 channels of the second product: they agree on one scale per token.

constexpr int TOKEN = 1, SCALED = 1, EACH = 4 / WARPGROUPS;
#define MULTIPLY(N) wgmma_fp8_n##N
#include "experts.cuh"

__device__ __forceinline__ void consumers_barrier() { asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory"); }

// ---- formats -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// What FP8/32 leaves of two values, given in units of their scales, as e4m3 under scales that are coarser by ``ratio``.
__device__ __forceinline__ u16 fp8_pair(float low, float high, u32 ratio) {
    u16 codes = to_e4m3(low, high);
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(ratio));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(halves));
    return codes;
}

// One word: eight codes of a row under one scale, half of the left operand of a wgmma step. A nibble's lower three bits
// are a magnitude, the first four codes in the lower half. The sign bits of these lie where bytes have theirs, those of
// the other four a shift away. ``scale``: exponent above the least, 0 to 11; where it is missing the row's factor is NaN.
__device__ __forceinline__ void dequantise(u32 word, u32 scales, int block, u32& low, u32& high) {
    const u32 scale = __byte_perm(scales, 0, 0x4440 + block);
    const u32 small = 0x14100800u + scale * 0x08080800u, large = 0x24201C18u + scale * 0x08080808u;
    const u32 magnitudes = word & 0x77777777u;
    low = select_bytes(small, large, magnitudes) | word & 0x80808080u;
    high = select_bytes(small, large, magnitudes >> 16) | word << 4 & 0x80808080u;
}

// ---- tokens ------------------------------------------------------------------------------------------------------

// A warp per group of eight positions and 128 channels, a lane per position and 32 channels: e4m3 and a scale.
constexpr int GATHER_PARTS = (HIDDEN_TILES + 7) / 8;  // of a group, a block each
extern "C" __global__ void __launch_bounds__(256) gather(
    const u16* __restrict__ x, const int* __restrict__ begins, const int* __restrict__ counts,
    const int* __restrict__ order, const int* __restrict__ experts, u8* __restrict__ out, float* __restrict__ scales) {
    const int lane = threadIdx.x % 32;
    wait_for_previous();
    launch_dependents();
    const int units = begins[EXPERTS] / 8 * GATHER_PARTS;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int group = unit / GATHER_PARTS, tile = unit % GATHER_PARTS * 8 + threadIdx.x / 32;
        if (tile >= HIDDEN_TILES) continue;
        const int pair = order[8 * group + lane % 8], channel = 128 * tile + lane / 8 * 32;
        const bool any = pair >= 0 && channel < HIDDEN;
        const uint4* row = (const uint4*)(x + (i64)(pair / TOPK) * HIDDEN + channel);
        const int expert = experts[group];
        const i64 place = Run(begins[expert], counts[expert]).place(HIDDEN_TILES, tile, group);
        u32 pairs[16], amax = 0;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 raw = any ? row[i] : make_uint4(0, 0, 0, 0);
            pairs[4 * i] = raw.x, pairs[4 * i + 1] = raw.y, pairs[4 * i + 2] = raw.z, pairs[4 * i + 3] = raw.w;
        }
        #pragma unroll
        for (int i = 0; i < 16; i++) amax = max_each(amax, pairs[i] & MAGNITUDES);
        amax = max(amax << 16, amax & 0xFFFF0000u);
        u32 whole = max(amax, __shfl_xor_sync(~0u, amax, 8));
        whole = max(whole, __shfl_xor_sync(~0u, whole, 16));
        const u32 scale = fp8_scales(amax) & 0xFFFF0000u, whole_scale = fp8_scales(whole) & 0xFFFF0000u;
        const float inverse = reciprocal(scale), finer = __uint_as_float(scale) * reciprocal(whole_scale);
        const u32 ratio = halves(finer, finer);
        u32 words[8];
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 codes = fp8_pair(low_float(pairs[i]) * inverse, high_float(pairs[i]) * inverse, ratio);
            words[i / 2] = i % 2 ? words[i / 2] | codes << 16 : codes;
        }
        #pragma unroll
        for (int i = 0; i < 2; i++)
            *(uint4*)(out + place * GROUP + (lane / 8 * 2 + i) * 128 + lane % 8 * 16) =
                make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        if (lane < 8) scales[place * 8 + lane] = or_nan(high_is_number(whole), __uint_as_float(whole_scale));
    }
}

// ---- products ----------------------------------------------------------------------------------------------------

struct Result {
    const float* factors[2];  // of the second product's weights, of the first's
    const int* order;
    const float* sorted;
    float limit;
    u8* h;  // what the first product makes, its scales, and what the second does
    float* scales;
    u16* out;
    u32 (*maxima)[16];  // of two tokens, in each warp
    Finished finished;
};

// gate and up of two tokens -> SwiGLU times the tokens' weights; pairs of bf16. The exponential and the reciprocal are
// good to 2^-20, of which bf16 keeps 2^-9.
__device__ __forceinline__ u32 swiglu(u32 gates, u32 ups, float2 weights, float limit) {
    const float gate[2] = {low_float(gates), high_float(gates)}, up[2] = {low_float(ups), high_float(ups)};
    float h[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float least = min_or_nan(gate[i], limit), power = least * -1.442695041f;
        float inverse;
        asm("{.reg .f32 e; ex2.approx.ftz.f32 e, %1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 %0, e;}"
            : "=f"(inverse) : "f"(power));
        h[i] = least * inverse * max_or_nan(min_or_nan(up[i], limit), -limit);
    }
    return pack_bf16(h[0] * weights.x, h[1] * weights.y);
}

// The first product. ``odd``: of ``Finished``.
template <int N> __device__ __forceinline__ void finish_first(
    const float (&d)[EACH][N / 2], const float2 (&factors)[EACH], const Item& work, const Result& to, int odd) {
    const int warp = threadIdx.x / 128 * (4 * EACH) + threadIdx.x / 32 % 4;  // of 16, in the first tile
    const int lane = threadIdx.x % 32, column = 2 * (lane % 4);
    u32 h[EACH][N / 8];
    #pragma unroll
    for (int i = 0; i < N / 8; i++) {  // two tokens
        const bool any = STEP == 8 || 8 * i < work.count;  // columns are a multiple of STEP
        const float2 weights = any ? *(const float2*)(to.sorted + work.first + 8 * i + column) : make_float2(0.f, 0.f);
        #pragma unroll
        for (int tile = 0; tile < EACH; tile++) {
            h[tile][i] = swiglu(
                pack_bf16(d[tile][4 * i] * factors[tile].x, d[tile][4 * i + 1] * factors[tile].x),
                pack_bf16(d[tile][4 * i + 2] * factors[tile].y, d[tile][4 * i + 3] * factors[tile].y),
                weights, to.limit);
            u32 amax = h[tile][i] & MAGNITUDES;
            #pragma unroll
            for (int step = 4; step < 32; step *= 2) amax = max_each(amax, __shfl_xor_sync(~0u, amax, step));
            if (lane < 4) to.maxima[4 * i + lane][warp + 4 * tile] = amax;
        }
    }
    consumers_barrier();
    const i64 place = work.run.place(INNER_TILES, work.block, work.first / 8);
    #pragma unroll
    for (int i = 0; i < N / 8; i++) {
        if (STEP > 8 && 8 * i >= work.count) break;
        const u32* maxima = to.maxima[4 * i + lane % 4];
        const uint2 two = *(const uint2*)(maxima + lane / 4 * 2);
        u32 whole = max_each(two.x, two.y);
        #pragma unroll
        for (int step = 4; step < 32; step *= 2) whole = max_each(whole, __shfl_xor_sync(~0u, whole, step));
        const u32 whole_scale = fp8_scales(whole);
        #pragma unroll
        for (int tile = 0; tile < EACH; tile++) {
            const uint4 four = *(const uint4*)(maxima + warp / 4 * 4 + 4 * tile);  // of a tile: of 32 channels
            const u32 scale = fp8_scales(max_each(max_each(four.x, four.y), max_each(four.z, four.w)));
            const u32 codes = fp8_pair(
                low_float(h[tile][i]) * reciprocal(scale << 16),
                high_float(h[tile][i]) * reciprocal(scale & 0xFFFF0000u),
                halves(low_float(scale) * reciprocal(whole_scale << 16),
                       high_float(scale) * reciprocal(whole_scale & 0xFFFF0000u)));
            const int channel = 8 * (warp + 4 * tile) + lane / 4;  // of 128
            u8* h_out = to.h + (place + i) * GROUP + channel / 16 * 128 + column * 16 + channel % 16;
            h_out[0] = (u8)codes, h_out[16] = (u8)(codes >> 8);
        }
        // A NaN or an infinity makes all results of its token NaN. So the scale is the NaN.
        if (threadIdx.x < 4)
            *(float2*)(to.scales + (place + i) * 8 + column) =
                make_float2(or_nan(low_is_number(whole), low_float(whole_scale)),
                            or_nan(high_is_number(whole), high_float(whole_scale)));
    }
    to.finished.meet(odd, work.first / 8);
}

// The second product. ``row``: the first of a lane, in the first tile.
template <int N> __device__ __forceinline__ void finish_second(
    const float (&d)[EACH][N / 2], const float2 (&factors)[EACH], const Item& work, int row, const Result& to) {
    const int column = 2 * (threadIdx.x % 4);
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int at = 8 * (i / 2) + column + i % 2;
        if (at < work.count) {
            u16* out = to.out + (i64)to.order[work.first + at] * HIDDEN + row;
            #pragma unroll
            for (int tile = 0; tile < EACH; tile++) {
                const float* two = &d[tile][4 * (i / 2) + i % 2];
                if (row + 64 * tile < HIDDEN) out[64 * tile] = to_bf16(two[0] * factors[tile].x);
                if (row + 64 * tile + 8 < HIDDEN) out[64 * tile + 8] = to_bf16(two[2] * factors[tile].y);
            }
        }
    }
}

struct Operand {  // the left one of a lane, for 64 channels
    u32 a[2][4];

    __device__ __forceinline__ void make(const Weights& weights, int part) {
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int half = 0; half < 2; half++)
                dequantise(
                    weights.word(half, 2 * part + i), weights.scales[half], 2 * part + i, a[i][half], a[i][half + 2]);
    }
    template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 b, int part) const {
        wgmma_hold(d);
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < 2; i++)
            Product<N>::run(d, a[i], b + (2 * part + i) * (2 * 128 / 16), part + i > 0);
        wgmma_commit();
    }
};

// Of two operands, one is made while the other is multiplied, on into the next tile and the next stage.
template <int K_TILES, int N> __device__ __forceinline__ void multiply(
    float (&sum)[EACH][N / 2], Slot& slot, const Pipeline& pipeline, u32 tiles) {
    float d[N / 2] = {};
    Weights weights;
    Operand first, second;
    u32 stage = pipeline.wait(slot);
    weights.load(stage + tiles);
    first.make(weights, 0);
    for (int k = 0; k < K_TILES; k++) {
        const u64 b = pipeline.tokens(slot.index);
        const u32 scales = stage + SCALES + 8 * (threadIdx.x % 4);
        const int current = slot.index;
        #pragma unroll
        for (int tile = 0; tile < EACH; tile++) {
            first.multiply<N>(d, b, 0);
            second.make(weights, 1);
            second.multiply<N>(d, b, 1);
            bool more = true;
            if (tile + 1 < EACH) {
                weights.load(stage + tiles + (tile + 1) * TILE);
            } else {
                slot.next();
                more = k + 1 < K_TILES;
                if (more) stage = pipeline.wait(slot);
                if (more) weights.load(stage + tiles);
            }
            wgmma_wait<1>();
            if (more) first.make(weights, 0);
            wgmma_wait<0>();
            wgmma_hold(d);
            #pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const float2 scale = load_shared8(scales + 32 * i);
                float* four = &sum[tile][4 * i];
                four[0] += d[4 * i] * scale.x, four[1] += d[4 * i + 1] * scale.y;
                four[2] += d[4 * i + 2] * scale.x, four[3] += d[4 * i + 3] * scale.y;
            }
            wgmma_hold(sum[tile]);  // the scales have been read
        }
        pipeline.release(current);
    }
}

template <bool GATED, int N> __device__ __forceinline__ void consume(
    const Item& work, Slot& slot, const Pipeline& pipeline, const Result& to, int odd) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int row = 64 * (work.block * TILES + group * EACH) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float* factors = to.factors[GATED] + (i64)work.expert * (64 * Shape<GATED>::ROW_TILES) + row;
    float2 factor[EACH];  // of a lane's two rows
    #pragma unroll
    for (int tile = 0; tile < EACH; tile++) factor[tile] = make_float2(factors[64 * tile], factors[64 * tile + 8]);
    float sum[EACH][N / 2] = {};
    multiply<Shape<GATED>::K_TILES, N>(sum, slot, pipeline, group * EACH * TILE);
    if constexpr (GATED) finish_first<N>(sum, factor, work, to, odd);
    else finish_second<N>(sum, factor, work, row, to);
}

// A group of x and of h, what the first product makes: [8][8 tokens][16 channels].
extern "C" __global__ void __launch_bounds__(THREADS, 1) products(
    const u8* gate_up, const float* gate_up_factors, const u8* down, const float* down_factors, const int* begins,
    const int* counts, const int* order, const float* sorted, int* drawn, int* stored, const u8* x,
    const float* x_scales, u8* h, float* h_scales, u16* out, i64 fewest,
    i64 most, float limit) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int first_piece[EXPERTS + 1], finished_pieces[2];
    __shared__ __align__(16) u32 maxima[NMAX / 2][16];
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
            copy_ahead(pipeline, schedule, drawn, stored, {gate_up, x, x_scales}, {down, h, h_scales});
        else if (threadIdx.x / 32 == CONSUMERS / 32 + 1) finished.publish(stored);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COMPUTING));
        const Result to{{down_factors, gate_up_factors}, order, sorted, limit, h, h_scales, out, maxima, finished};
        compute(pipeline, finished, to);
    }
}
