// A site of the hyper-connections, in two launches: the residual streams take in the output of the sub-layer before
// (expand), the next sub-layer's input is taken out of them (collapse, RMSNorm), and the mixing weights of what follows
// come from products with all their channels.
//
// Plan. ``enter``: a block is 64 rows x 64 channels of all four streams, a warp 16 of the rows. A lane has 2 x 8
// channels of two rows of every stream, read once, in the very registers in which wgmma takes its left operand: they
// are expanded in place, written, collapsed, and multiplied with fn as they are. fn is float32; three bf16 that add up
// to it are three times 24 columns of the right operand, so products are exact. Sums of squares are taken on the way.
// ``finish``: a block is a row. It adds the pieces of 64 channels, in the same order whatever the batch; one warp runs
// the Sinkhorn rounds in registers while the others normalise the input.
//
// Macros: HIDDEN (a multiple of 64), EXPAND (0: there is no output to take in).

constexpr int STREAMS = 4, MIXES = 24, ROWS = 64, CHANNELS = 64;
constexpr int PIECES = HIDDEN / CHANNELS, PART = 32;  // floats of a row's piece: mixes, squares, those of x
constexpr int COLUMNS = 3 * MIXES, CORES = COLUMNS / 8 * 128;  // bytes of eight channels of the right operand

// A volatile one stays where it stands: the compiler would put off half of them.
__device__ __forceinline__ uint4 load(const u16* from) {
    uint4 r;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from));
    return r;
}
struct Two {
    float low, high;
};
__device__ __forceinline__ Two floats(u32 pair) { return {low_float(pair), high_float(pair)}; }
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The first eight significant bits of two values as bf16, cut, not rounded; what is left of them stays.
__device__ __forceinline__ u32 cut(float& a, float& b) {
    const u32 first = __float_as_uint(a), second = __float_as_uint(b);
    a -= __uint_as_float(first & 0xFFFF0000u), b -= __uint_as_float(second & 0xFFFF0000u);
    return select_bytes(first, second, 0x7632);
}

// fn of a piece -> right operand, a step of 16 channels after the other: [stream][32 channels][step]. Of a step, eight
// channels after the other are what the lanes q = 0..3 of a row hold: 4q, 4q + 1, then 4q + 2, 4q + 3 (of 8q ..).
__device__ __forceinline__ void load_factors(const float* fn, int piece, u8* to) {
    const int lane = threadIdx.x % 32, stream = threadIdx.x / 32, n = lane / 4, q = lane % 4;
    float4 v[2][3][2];  // [32 channels][8 columns][step]
    #pragma unroll
    for (int unit = 0; unit < 2; unit++)
        #pragma unroll
        for (int tile = 0; tile < 3; tile++) {
            const float* from = fn + (8 * tile + n) * (STREAMS * HIDDEN) + stream * HIDDEN
                              + CHANNELS * piece + 32 * unit + 8 * q;
            v[unit][tile][0] = *(const float4*)from, v[unit][tile][1] = *(const float4*)(from + 4);
        }
    #pragma unroll
    for (int unit = 0; unit < 2; unit++)
        #pragma unroll
        for (int step = 0; step < 2; step++)
            #pragma unroll
            for (int tile = 0; tile < 3; tile++) {
                float4 rest = v[unit][tile][step];
                u8* at = to + ((stream * 2 + unit) * 2 + step) * (2 * CORES) + tile * 128 + n * 16 + q * 4;
                #pragma unroll
                for (int third = 0; third < 3; third++, at += MIXES / 8 * 128) {
                    *(u32*)at = cut(rest.x, rest.y);
                    *(u32*)(at + CORES) = cut(rest.z, rest.w);
                }
            }
    fence_async();
}

__device__ __forceinline__ float part(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

extern "C" __global__ void __launch_bounds__(128, 3) enter(
    const u16* out, const u16* streams, const float4* pre, const float4* post, const float4* comb, const float* fn,
    u16* expanded, u16* x, float* parts, i64 rows) {
    __shared__ __align__(128) u8 factors[4 * STREAMS * 2 * CORES];
    __shared__ __align__(16) float4 weights[6][ROWS];  // pre and post, then [row][source] of comb
    __shared__ u64 barrier;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const i64 first = (i64)blockIdx.y * ROWS;
    launch_dependents();
    load_factors(fn, blockIdx.x, factors);  // weights: nothing that runs just before writes them
    wait_for_previous();
    const u32 there = shared_address(&barrier);
    if (threadIdx.x == 0) {
        const int bytes = (int)min(rows - first, (i64)ROWS) * 16;
        barrier_init(there, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(there, bytes * (EXPAND ? 6 : 1));
        bulk_copy(shared_address(weights[0]), pre + first, bytes, there);
#if EXPAND
        bulk_copy(shared_address(weights[1]), post + first, bytes, there);
        bulk_copy(shared_address(weights[2]), comb + 4 * first, 4 * bytes, there);
#endif
    }

    const int channel = CHANNELS * (int)blockIdx.x + 8 * q;
    uint4 s[2][2][STREAMS];  // [row g, g + 8][32 channels]
#if EXPAND
    uint4 given[2][2];
#endif
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = min(first + 16 * warp + g + 8 * half, rows - 1);  // what is not there is not stored
        #pragma unroll
        for (int unit = 0; unit < 2; unit++) {
            #pragma unroll
            for (int j = 0; j < STREAMS; j++)
                s[half][unit][j] = load(streams + (row * STREAMS + j) * HIDDEN + channel + 32 * unit);
#if EXPAND
            given[half][unit] = load(out + row * HIDDEN + channel + 32 * unit);
#endif
        }
    }
    __syncthreads();
    barrier_wait(there, 0);

    float squares[2] = {}, squares_x[2] = {};
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = first + 16 * warp + g + 8 * half;
        const int at = 16 * warp + g + 8 * half;
        const float4 collapse = weights[0][at];
#if EXPAND
        const float4 release = weights[1][at], *mix = &weights[2][0] + 4 * at;
#endif
        #pragma unroll
        for (int unit = 0; unit < 2; unit++) {
            u32 result[4], fresh[STREAMS][4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                Two sum{0.f, 0.f};
#if EXPAND
                const Two added = floats(word(given[half][unit], i));
#endif
                #pragma unroll
                for (int k = 0; k < STREAMS; k++) {
                    fresh[k][i] = word(s[half][unit][k], i);
#if EXPAND
                    Two mixed{0.f, 0.f};
                    #pragma unroll
                    for (int j = 0; j < STREAMS; j++) {
                        const Two old = floats(word(s[half][unit][j], i));
                        const float weight = part(mix[j], k);
                        mixed.low = j ? fmaf(weight, old.low, mixed.low) : weight * old.low;
                        mixed.high = j ? fmaf(weight, old.high, mixed.high) : weight * old.high;
                    }
                    const float weight = part(release, k);
                    fresh[k][i] = pack_bf16(fmaf(weight, added.low, mixed.low), fmaf(weight, added.high, mixed.high));
#endif
                    const Two value = floats(fresh[k][i]);
                    squares[half] = fmaf(value.low, value.low, squares[half]);
                    squares[half] = fmaf(value.high, value.high, squares[half]);
                    const float share = part(collapse, k);
                    sum.low = k ? fmaf(share, value.low, sum.low) : share * value.low;
                    sum.high = k ? fmaf(share, value.high, sum.high) : share * value.high;
                }
                result[i] = pack_bf16(sum.low, sum.high);
                const Two value = floats(result[i]);
                squares_x[half] = fmaf(value.low, value.low, squares_x[half]);
                squares_x[half] = fmaf(value.high, value.high, squares_x[half]);
            }
            #pragma unroll
            for (int k = 0; k < STREAMS; k++)
                s[half][unit][k] = make_uint4(fresh[k][0], fresh[k][1], fresh[k][2], fresh[k][3]);
            if (row >= rows) continue;
#if EXPAND
            #pragma unroll
            for (int k = 0; k < STREAMS; k++)
                *(uint4*)(expanded + (row * STREAMS + k) * HIDDEN + channel + 32 * unit) = s[half][unit][k];
#endif
            *(uint4*)(x + row * HIDDEN + channel + 32 * unit) = make_uint4(result[0], result[1], result[2], result[3]);
        }
    }

    float d[COLUMNS / 2] = {};
    const u64 right = descriptor(shared_address(factors), CORES, 128);
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < STREAMS; k++)
        #pragma unroll
        for (int unit = 0; unit < 2; unit++)
            #pragma unroll
            for (int step = 0; step < 2; step++)
                wgmma_n72(d, word(s[0][unit][k], 2 * step), word(s[1][unit][k], 2 * step),
                          word(s[0][unit][k], 2 * step + 1), word(s[1][unit][k], 2 * step + 1),
                          right + ((k * 2 + unit) * 2 + step) * (2 * CORES / 16), 1);
    wgmma_commit();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        #pragma unroll
        for (int other = 1; other < 4; other *= 2) {
            squares[half] += __shfl_xor_sync(~0u, squares[half], other);
            squares_x[half] += __shfl_xor_sync(~0u, squares_x[half], other);
        }
    }
    wgmma_wait<0>();
    wgmma_hold(d);
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = first + 16 * warp + g + 8 * half;
        if (row >= rows) continue;
        float* to = parts + (row * PIECES + blockIdx.x) * PART + 2 * q;
        #pragma unroll
        for (int tile = 0; tile < 3; tile++) {
            const float* sum = d + 4 * tile + 2 * half;  // of the largest third; the smallest are added first
            *(float2*)(to + 8 * tile) = make_float2(sum[0] + (sum[12] + sum[24]), sum[1] + (sum[13] + sum[25]));
        }
        if (q == 0) *(float2*)(to + MIXES) = make_float2(squares[half], squares_x[half]);
    }
}

// ---- a row ----------------------------------------------------------------------------------------------------------

constexpr int THREADS = 256, WARPS = THREADS / 32, NORMALISING = THREADS - 32;
constexpr int EACH = (HIDDEN / 8 + NORMALISING - 1) / NORMALISING;

__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / sqrt of the mean square of ``count`` values, whose float32 sum of squares is ``squares``; where that is infinite
// it is taken once more in float64. NaN if a value is not finite. All threads of the block.
__device__ __forceinline__ float inverse_rms(float squares, const u16* values, int count, float eps) {
    if (squares != __uint_as_float(0x7F800000)) return rsqrtf(fmaf(squares, 1.f / count, eps));
    __shared__ double exact[WARPS];
    double sum = 0.;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const double value = low_float(values[i]);
        sum += value * value;
    }
    for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    __syncthreads();
    if (threadIdx.x % 32 == 0) exact[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.;
    for (int i = 0; i < WARPS; i++) sum += exact[i];
    const float inverse = (float)(1. / sqrt(sum / count + eps));
    return sum - sum == 0. ? inverse : __uint_as_float(0x7FFFFFFF);
}

// [sources][targets] logits -> weights whose sums over sources and, nearly, over targets are 1.
__device__ __forceinline__ void sinkhorn(float (&w)[4][4], float eps, int iters) {
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const float largest = fmaxf(fmaxf(w[j][0], w[j][1]), fmaxf(w[j][2], w[j][3]));
        #pragma unroll
        for (int k = 0; k < 4; k++) w[j][k] = expf(w[j][k] - largest);
        const float by = reciprocal((w[j][0] + w[j][1]) + (w[j][2] + w[j][3]));
        #pragma unroll
        for (int k = 0; k < 4; k++) w[j][k] = fmaf(w[j][k], by, eps);
    }
    for (int iter = 0; iter < iters; iter++) {
        if (iter) {
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const float by = reciprocal((w[j][0] + w[j][1]) + (w[j][2] + w[j][3]) + eps);
                #pragma unroll
                for (int k = 0; k < 4; k++) w[j][k] *= by;
            }
        }
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            const float by = reciprocal((w[0][k] + w[1][k]) + (w[2][k] + w[3][k]) + eps);
            #pragma unroll
            for (int j = 0; j < 4; j++) w[j][k] *= by;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) finish(
    const u16* streams, const float* parts, const float* base, const float* scale, const u16* norm, u16* x, float* pre,
    float* post, float4* comb, float norm_eps, float hc_eps, i64 iters) {
    __shared__ float sums[WARPS][PART];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 row = blockIdx.x;
    launch_dependents();
    wait_for_previous();
    const float* from = parts + row * PIECES * PART + lane;
    float each[PIECES / WARPS + 1];
    #pragma unroll
    for (int i = 0; i <= PIECES / WARPS; i++)
        each[i] = warp + i * WARPS < PIECES ? from[(warp + i * WARPS) * PART] : 0.f;
    uint4 own[EACH], by[EACH];
    u16* mine = x + row * HIDDEN;
    if (warp)
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = 8 * (threadIdx.x - 32 + i * NORMALISING);
            if (at < HIDDEN) own[i] = *(const uint4*)(mine + at), by[i] = *(const uint4*)(norm + at);
        }
    #pragma unroll
    for (int i = 1; i <= PIECES / WARPS; i++) each[0] += each[i];
    sums[warp][lane] = each[0];
    __syncthreads();
    float total = sums[0][lane];
    #pragma unroll
    for (int other = 1; other < WARPS; other++) total += sums[other][lane];
    const float squares = __shfl_sync(~0u, total, MIXES), squares_x = __shfl_sync(~0u, total, MIXES + 1);
    const float inverse_x = inverse_rms(squares_x, mine, HIDDEN, norm_eps);
    const i64 all = STREAMS * HIDDEN;
    total *= inverse_rms(squares, streams + row * all, all, norm_eps);
    if (warp == 0) {
        float w[4][4];
        #pragma unroll
        for (int i = 0; i < 16; i++)
            w[i / 4][i % 4] = fmaf(__shfl_sync(~0u, total, 8 + i), scale[2], base[8 + i]);
        sinkhorn(w, hc_eps, (int)iters);
        if (lane == 0)
            #pragma unroll
            for (int j = 0; j < 4; j++) comb[row * 4 + j] = make_float4(w[j][0], w[j][1], w[j][2], w[j][3]);
        return;
    }
    if (warp == 1 && lane < 8) {
        const float gate = 1.f / (1.f + expf(-fmaf(total, scale[lane / 4], base[lane])));
        if (lane < 4) pre[row * 4 + lane] = gate + hc_eps;
        else post[row * 4 + lane - 4] = 2.f * gate;
    }
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = 8 * (threadIdx.x - 32 + i * NORMALISING);
        if (at >= HIDDEN) continue;
        u32 result[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const Two value = floats(word(own[i], j)), weight = floats(word(by[i], j));
            result[j] = pack_bf16(value.low * inverse_x * weight.low, value.high * inverse_x * weight.high);
        }
        *(uint4*)(mine + at) = make_uint4(result[0], result[1], result[2], result[3]);
    }
}
