// Products of bf16 activations, cast FP8/32, with FP8 weights (32x32 scales), fast class: FP8 tensor cores. How:
// fp8_linear.cuh.
//
// A stage is 128 channels, and both operands are e4m3 in shared memory. All scales are powers of two. A token has one
// scale there instead of four, the largest, and so have 32 weight rows: the values under the others are rounded to
// multiples of 2^-9 of the common one, an error below 2^-17 of the largest value there. So a stage is a plain product.
//
// These tensor cores align the products of a sum to its largest and keep some 14 bits. So the sum of a stage is all
// they make; it is multiplied by the two scales and added in float32.
//
// Macro: COLUMNS, half of WIDTH where both sums of all columns would not fit into registers.

constexpr int CHANNELS = 128;
constexpr int CODES = 8192;                              // of a warpgroup: 64 rows x 128 channels
constexpr int TILE = 2 * CODES + 16;                     // with scales, float32 [4 x 32 rows]
constexpr int TOKENS = WIDTH * (CHANNELS + 4);           // with scales, float32
constexpr int N = COLUMNS, PARTS = WIDTH / N;
constexpr int SUMS = WIDTH / 2 * (1 + LOOPS) + N / 2, SWIZZLED = 1;
#include "fp8_linear.cuh"
#define WGMMA(n) JOIN(wgmma_fp8_shared_n, n)

// ---- tokens --------------------------------------------------------------------------------------------------------

// x [tokens, groups, channels] -> [groups][channels / 128][pieces]: e4m3 [WIDTH][128], swizzled, and float32 scales
// [WIDTH], NaN where a value is missing or infinite. A warp: 8 tokens x 128 channels, a lane: a block of 32. Tokens
// that are not there stay what they are.
extern "C" __global__ void __launch_bounds__(256) arrange(
    const u16* x, u8* out, i64 tokens, i64 padded, i64 channels, i64 cast) {
    const int lane = threadIdx.x % 32, group = blockIdx.z, tiles = ((int)channels + 127) / 128;
    const int tile = blockIdx.y * 8 + threadIdx.x / 32, channel = 128 * tile + lane / 8 * 32;
    launch_dependents();
    wait_for_previous();
    if (tile >= tiles) return;
    const i64 token = 8 * (i64)blockIdx.x + lane % 8;
    const uint4* from = (const uint4*)(x + (token * gridDim.z + group) * channels + channel);
    u32 pairs[16], amax = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 raw = token < tokens && channel < channels ? from[i] : make_uint4(0, 0, 0, 0);
        pairs[4 * i] = raw.x, pairs[4 * i + 1] = raw.y, pairs[4 * i + 2] = raw.z, pairs[4 * i + 3] = raw.w;
    }
    #pragma unroll
    for (int i = 0; i < 16; i++) amax = max(amax, max(pairs[i] << 16 & 0x7FFFFFFF, pairs[i] & 0x7FFF0000));
    u32 whole = max(amax, __shfl_xor_sync(~0u, amax, 8));
    whole = max(whole, __shfl_xor_sync(~0u, whole, 16));
    const u32 least = 0x38D1B717u;  // 1e-4
    const u32 scale = power_of_two_scale(max(amax, least), 448.f);
    const u32 common = power_of_two_scale(max(whole, least), 448.f);
    const float inverse = __uint_as_float((254u << 23) - scale);
    const float ratio = __uint_as_float(scale) * __uint_as_float((254u << 23) - common);
    u32 words[8];
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 left = from_e4m3(to_e4m3(low_float(pairs[i]) * inverse, high_float(pairs[i]) * inverse));
        const u32 codes = to_e4m3(left.x * ratio, left.y * ratio);
        words[i / 2] = i % 2 ? words[i / 2] | codes << 16 : codes;
    }
    const int piece = 8 * blockIdx.x / WIDTH, within = 8 * blockIdx.x % WIDTH;
    u8* to = out + ((i64)(group * tiles + tile) * (padded / WIDTH) + piece) * TOKENS;
    #pragma unroll
    for (int i = 0; i < 2; i++)
        *(uint4*)(to + (within + lane % 8) * 128 + ((lane / 8 * 2 + i) ^ lane % 8) * 16) =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    if (lane < 8) ((u32*)(to + WIDTH * 128))[within + lane] = common == 0x7F800000u ? 0x7FFFFFFFu : common;
}

// ---- products ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void accumulate(float (&sum)[WIDTH / 2], int tiles, Slot& slot, const Pipeline& pipeline) {
    const int mine = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the warpgroup
    float d[N / 2] = {};
    #pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) sum[i] = 0.f;
    for (; tiles > 0; tiles--, slot.next()) {
        barrier_wait(pipeline.full + 8 * slot.index, slot.parity);
        const u32 stage = __shfl_sync(~0u, pipeline.base + slot.index * STAGE, 0);  // descriptors stay uniform
        const u64 a = swizzled(stage + WEIGHTS + mine * CODES);
        const u32 scales = stage + WIDTH * 128 + 8 * (threadIdx.x % 4);
        const u32 row_scale = load_shared4(stage + WEIGHTS + 2 * CODES + 4 * (threadIdx.x / 64));
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const u64 b = swizzled(stage + part * (N * 128));
            wgmma_hold(d);
            wgmma_fence();
            #pragma unroll
            for (int step = 0; step < 4; step++)
                WGMMA(COLUMNS)(d, a + step * (32 / 16), b + step * (32 / 16), step > 0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(d);
            float* to = sum + part * (N / 2);
            #pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const float2 columns = load_shared8(scales + part * (4 * N) + 32 * i);
                const float x = __uint_as_float(row_scale) * columns.x, y = __uint_as_float(row_scale) * columns.y;
                to[4 * i] += d[4 * i] * x, to[4 * i + 1] += d[4 * i + 1] * y;
                to[4 * i + 2] += d[4 * i + 2] * x, to[4 * i + 3] += d[4 * i + 3] * y;
            }
        }
        wgmma_hold(sum);  // the scales have been read
        __syncwarp();
        pipeline.release(slot.index);
    }
}
