// Products of bf16 activations with FP8 weights (32x32 scales), exact class: exact products, float32 sums. How:
// fp8_linear.cuh.
//
// Weights are the left operand, e4m3 from shared memory, made bf16 in registers (exact); tokens are the right one, in
// shared memory. A stage is one tile of 64 channels, or, where a tile is little to copy and to multiply, two.
//
// Macro: DEPTH, tiles of a stage.

constexpr int CHANNELS = 64 * DEPTH, TOKENS = WIDTH * 128 * DEPTH;
constexpr int CODES = 4096;                     // of a warpgroup: 64 rows x 64 channels
constexpr int BOTH = 2 * CODES + 16;            // with scales, bf16 [4 x 32 rows][2 x 32 channels]
constexpr int TILE = DEPTH * BOTH;
constexpr int SUMS = WIDTH / 2 * (1 + LOOPS), SWIZZLED = MAPPED;
#include "fp8_linear.cuh"
#define WGMMA(n) JOIN(wgmma_n, n)

// ---- tokens --------------------------------------------------------------------------------------------------------

// What FP8/32 leaves of two values under a power of two, bf16.
__device__ __forceinline__ u32 fp8_round_trip2(u32 pair, u32 scale) {
    if (scale == 0x7F800000u) return 0x7FFF7FFFu;
    const float inverse = __uint_as_float((254u << 23) - scale), back = __uint_as_float(scale);
    const float high = high_float(pair) * inverse;
    const float2 left = from_e4m3(to_e4m3(low_float(pair) * inverse, high));
    return pack_bf16(left.x * back, left.y * back);
}

// x [tokens, groups, channels] -> [groups][stages][pieces][DEPTH][WIDTH / 8][8 octets][8 tokens][8 channels], cast
// FP8/32 and back if ``cast``. A warp: 8 tokens x 64 channels. Tokens that are not there stay what they are.
extern "C" __global__ void __launch_bounds__(256) arrange(
    const u16* x, u16* out, i64 tokens, i64 padded, i64 channels, i64 cast) {
    const int lane = threadIdx.x % 32, octet = lane % 8, group = blockIdx.z;
    const int tiles = ((int)channels + 127) / 128 * 2, tile = blockIdx.y * 8 + threadIdx.x / 32;
    const int channel = 64 * tile + 8 * octet;
    launch_dependents();
    wait_for_previous();
    if (tile >= tiles) return;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int within = lane / 8 + 4 * half;
        const i64 token = 8 * (i64)blockIdx.x + within;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (token < tokens && channel < channels)
            raw = *(const uint4*)(x + (token * gridDim.z + group) * channels + channel);
        u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
        if (cast) {
            u32 amax = 0;
            #pragma unroll
            for (int i = 0; i < 4; i++) amax = max(amax, max(pairs[i] << 16 & 0x7FFFFFFF, pairs[i] & 0x7FFF0000));
            amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
            amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
            const u32 scale = power_of_two_scale(max(amax, 0x38D1B717u), 448.f);  // 1e-4
            #pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = fp8_round_trip2(pairs[i], scale);
        }
        const i64 stage = (i64)(group * tiles + tile) / DEPTH * (padded / WIDTH) + 8 * blockIdx.x / WIDTH;
        const i64 eight = (stage * DEPTH + tile % DEPTH) * (WIDTH / 8) + blockIdx.x % (WIDTH / 8);
        const i64 at = eight * 512 + octet * 64 + within * 8;
        *(uint4*)(out + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

// One word: channels 2q, 2q + 1, 2q + 8, 2q + 9 (q: lane % 4) of a row, e4m3 -> bf16 times a scale. A NaN's tile has a
// NaN scale.
__device__ __forceinline__ void dequantise(u32 word, u32 scale, u32& low, u32& high) {
    const u32 first = __byte_perm(word, 0, 0x1404), second = __byte_perm(word, 0, 0x3424);
    low = first & 0x80008000u | first >> 4 & 0x07F007F0u;  // times 2^-120
    high = second & 0x80008000u | second >> 4 & 0x07F007F0u;
    low = mul_bf16x2(mul_bf16x2(low, 0x7B807B80u), scale);
    high = mul_bf16x2(mul_bf16x2(high, 0x7B807B80u), scale);
}

constexpr int STEP = (MAPPED ? 32 : 2 * 128) / 16;  // of 16 channels, in a descriptor

__device__ __forceinline__ void products(float (&d)[WIDTH / 2], const u32 (&a)[2][4], u64 b) {
    wgmma_fence();
    #pragma unroll
    for (int step = 0; step < 2; step++)
        WGMMA(WIDTH)(d, a[step][0], a[step][1], a[step][2], a[step][3], b + step * STEP, 1);
    wgmma_commit();
}

__device__ __forceinline__ void accumulate(float (&d)[WIDTH / 2], int tiles, Slot& slot, const Pipeline& pipeline) {
    const int mine = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the warpgroup
    #pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) d[i] = 0.f;
    u32 a[2][2][4];
    int read = -1;
    for (; tiles > 0; tiles--) {
        barrier_wait(pipeline.full + 8 * slot.index, slot.parity);
        const u32 stage = __shfl_sync(~0u, pipeline.base + slot.index * STAGE, 0);  // descriptors stay uniform
        #pragma unroll
        for (int tile = 0; tile < DEPTH; tile++) {
            const u32 weights = stage + WEIGHTS + tile * BOTH;
            const u32 codes = weights + 16 * threadIdx.x + mine * (CODES - 128 * 16);
            const u32 tokens = stage + tile * (WIDTH * 128);
            const u64 b = MAPPED ? swizzled(tokens) : descriptor(tokens, 128, 1024);
            const uint4 words[2] = {load_shared16(codes), load_shared16(codes + CODES / 2)};
            const u32 scales = load_shared4(weights + WARPGROUPS * CODES + 4 * (threadIdx.x / 64));
            // Products are on their way from one tile into the next: of two blocks of 32 channels, one is made while
            // the other is multiplied.
            #pragma unroll
            for (int block = 0; block < 2; block++) {
                const u32 scale = __byte_perm(scales, 0, block ? 0x3232 : 0x1010);
                wgmma_wait<1>();  // these registers have been read
                if (tile == 0 && block == 1 && read >= 0) pipeline.release(read);
                dequantise(words[block].x, scale, a[block][0][0], a[block][0][2]);
                dequantise(words[block].y, scale, a[block][0][1], a[block][0][3]);
                dequantise(words[block].z, scale, a[block][1][0], a[block][1][2]);
                dequantise(words[block].w, scale, a[block][1][1], a[block][1][3]);
                products(d, a[block], b + block * (2 * STEP));
            }
        }
        read = slot.index;
        slot.next();
    }
    wgmma_wait<0>();
    wgmma_hold(d);
    if (read >= 0) pipeline.release(read);
}
