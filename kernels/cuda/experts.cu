// Routed experts: two grouped products of bf16 activations with MXFP4 weights, weights streamed once.
//
// Plan. Products are computed transposed, weights x tokens. A warpgroup takes 64 weight rows as the left operand: FP4
// codes come from shared memory, are dequantised to bf16 in registers (exact) and feed wgmma from there; the tokens of
// the expert are the right operand, in shared memory, as many columns as the expert has tokens, in steps of STEP up to
// NMAX. So a product costs what its tokens cost, not a fixed tile, and at few tokens the kernel is a stream of weights.
//
// Blocks are persistent: WARPGROUPS warpgroups share the tokens of a piece of work, and a warp beside them copies weights
// and tokens ahead, 128 channels a stage, STAGES deep, on into the next piece. Everything it copies is
// contiguous, because it was laid out so: weights once (experts.py, ``pack``: 64 rows x 128 channels are 4,096 bytes of
// codes in the order of the lanes, then 256 of scales), tokens by ``gather``, in the order of their experts, eight
// tokens a group, as the core matrices that wgmma reads. A stage is a few bulk copies that complete on its barrier.
//
// In the first product gate and up rows alternate in eights, so that a lane holds both for its channel, and the 32
// channels of a tile are one FP8 block of the result: SwiGLU, the routing weight and the FP8/32 cast happen before
// anything is stored.
//
// The sum over K of a token has one order, whatever shares its tile. Macros: EXPERTS, TOPK, K (padded to 128), ROW_TILES
// (of 64 weight rows), WARPGROUPS, GATED (first product), NMAX, STEP, STAGES, OUT (row length of the output), NAN_SCALES
// (some weight scale is NaN), FEWEST and MOST (tokens of the experts that this kernel serves; others are left alone).

constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
// Registers of a lane that computes and of one that copies. Together they must be what the block was given at its
// start: a warp that asks for more waits forever.
constexpr int GIVEN = 65536 / THREADS / 8 * 8;
constexpr int COMPUTING = WARPGROUPS == 4 ? 112 : WARPGROUPS == 3 ? 160 : 240, COPYING = WARPGROUPS == 2 ? 24 : 32;
static_assert(CONSUMERS * COMPUTING + 128 * COPYING <= THREADS * GIVEN, "");
constexpr int K_TILES = K / 128, BLOCKS = (ROW_TILES + WARPGROUPS - 1) / WARPGROUPS;
constexpr int CODES = 4096, TILE = CODES + 256;
constexpr int GROUP = 2048;  // bytes of eight tokens x 128 channels
constexpr int STAGE = WARPGROUPS * TILE + NMAX / 8 * GROUP;

__device__ __forceinline__ void warpgroup_barrier(int group) {
    asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory");
}

using Slot = Ring<STAGES>;

// ---- formats -----------------------------------------------------------------------------------------------------

// What FP8/32 leaves of x under a scale, as bf16.
__device__ __forceinline__ u16 fp8_round_trip(float x, u32 scale) {
    if (scale == 0x7F800000u) return 0x7FFF;
    u16 codes;
    u32 halves;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.f), "f"(__fdiv_rn(x, __uint_as_float(scale))));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    float value;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(halves));
    return to_bf16(value * __uint_as_float(scale));
}
__device__ __forceinline__ u32 fp8_scale(u32 amax) { return power_of_two_scale(max(amax, 0x38D1B717u), 448.f); }  // 1e-4
__device__ __forceinline__ float round_bf16(float x) { return low_float(to_bf16(x)); }

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

// ---- routing -----------------------------------------------------------------------------------------------------

// One block per expert: its pairs (token, choice), in order, behind those of all lower experts. Every expert begins at
// a multiple of eight: ``begins`` [EXPERTS + 1], ``counts`` [EXPERTS].
extern "C" __global__ void __launch_bounds__(512) route(
    const i64* ids, const float* weights, int* begins, int* counts, int* order, float* sorted, i64 tokens) {
    __shared__ int all[EXPERTS];
    __shared__ int sums[16];
    // A warp takes a run of pairs, 32 at a time, so that their order is the order of lanes.
    const int expert = blockIdx.x, pairs = (int)tokens * TOPK, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = (pairs + 16 * 32 - 1) / (16 * 32) * 32, first = min(warp * run, pairs), last = min(first + run, pairs);
    for (int i = threadIdx.x; i < EXPERTS; i += 512) all[i] = 0;
    __syncthreads();
    int mine = 0;
    for (int i = first + lane; i < last; i += 32) {
        const int id = (int)ids[i];
        mine += id == expert;
        if (id >= 0 && id < expert) atomicAdd(&all[id], 1);
    }
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) mine += __shfl_xor_sync(~0u, mine, step);
    if (lane == 0) sums[warp] = mine;
    __syncthreads();
    int begin = 0, at = 0, count = 0;
    for (int e = lane; e < expert; e += 32) begin += (all[e] + 7) / 8 * 8;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) begin += __shfl_xor_sync(~0u, begin, step);
    #pragma unroll
    for (int w = 0; w < 16; w++) {
        if (w < warp) at += sums[w];
        count += sums[w];
    }
    if (threadIdx.x == 0) {
        begins[expert] = begin, counts[expert] = count;
        if (expert == EXPERTS - 1) begins[EXPERTS] = begin + (count + 7) / 8 * 8;
    }
    at += begin;
    for (int i = first; i < last; i += 32) {
        const bool here = i + lane < last && (int)ids[i + lane] == expert;
        const u32 found = __ballot_sync(~0u, here);
        if (here) {
            const int to = at + __popc(found & ((1u << lane) - 1));
            order[to] = i + lane, sorted[to] = weights[i + lane];
        }
        at += __popc(found);
    }
    if (threadIdx.x < (8 - count % 8) % 8) order[begin + count + threadIdx.x] = -1;
}

// A block per eight positions and 1,024 channels: their tokens' FP8/32 round trip, bf16, [K/8][8 tokens][8 channels].
extern "C" __global__ void __launch_bounds__(256) gather(
    const u16* x, const int* begins, const int* order, u16* out, i64 channels) {
    const int group = blockIdx.x, lane = threadIdx.x % 32;
    if (8 * group >= begins[EXPERTS]) return;
    const int pair = order[8 * group + lane % 8];
    const u16* row = x + (i64)(max(pair, 0) / TOPK) * channels;
    #pragma unroll
    for (int step = 0; step < 4; step++) {
        const int eight = blockIdx.y * 128 + step * 32 + threadIdx.x / 8;
        if (eight >= K / 8) break;  // all lanes of a block of 32 channels together
        const uint4 raw =
            pair >= 0 && 8 * eight < channels ? *(const uint4*)(row + 8 * eight) : make_uint4(0, 0, 0, 0);
        const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
        u32 amax = 0, result[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) amax = max(amax, max(pairs[i] << 16 & 0x7FFFFFFF, pairs[i] & 0x7FFF0000));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 8));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 16));
        const u32 scale = fp8_scale(amax);
        #pragma unroll
        for (int i = 0; i < 4; i++)
            result[i] = fp8_round_trip(low_float(pairs[i]), scale)
                      | (u32)fp8_round_trip(high_float(pairs[i]), scale) << 16;
        *(uint4*)(out + ((i64)group * (K / 8) + eight) * 64 + lane % 8 * 8) =
            make_uint4(result[0], result[1], result[2], result[3]);
    }
}

// ---- products ----------------------------------------------------------------------------------------------------

struct Item {  // up to NMAX tokens of an expert, from position ``first``, times the weight rows of a block
    int expert, block, first, count;
    __device__ __forceinline__ int columns() const { return (count + STEP - 1) / STEP * STEP; }
};

struct Schedule {
    const int *begins, *counts, *first_item;  // first_item [EXPERTS + 1]: pieces of work before each expert

    __device__ __forceinline__ bool has(int index) const { return index < first_item[EXPERTS]; }
    __device__ __forceinline__ Item item(int index) const {  // anything beyond the last one
        int low = 0, high = EXPERTS;  // the last expert that begins at or before index
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_item[middle] <= index) low = middle;
            else high = middle;
        }
        const int within = index - first_item[low], all = counts[low];
        const int pieces = max(1, (all + NMAX - 1) / NMAX), piece = within % pieces;
        return {low, within / pieces, begins[low] + piece * NMAX, min(NMAX, all - piece * NMAX)};
    }
};

struct Result {
    const float* factors;
    const int* order;
    const float* sorted;
    u16* out;
    float limit;
    u16 (*maxima)[4][GATED ? NMAX : 1];
};

template <int N> struct Product;
#define PRODUCT(N)                                                                                                  \
    template <> struct Product<N> {                                                                                 \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {   \
            wgmma_n##N(d, a[0], a[1], a[2], a[3], b, accumulate);                                                   \
        }                                                                                                           \
    };
FOR_EACH_WGMMA(PRODUCT)

template <int N> __device__ __forceinline__ void finish(float (&d)[N / 2], const Item& work, int tile, const Result& to) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = 2 * (lane % 4);
    const float factor = to.factors[work.expert];
#if GATED
    const int group = threadIdx.x / 128, channel = 32 * tile + 8 * warp + lane / 4;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int at = 8 * (i / 2) + column + i % 2;
        float gate = round_bf16(d[4 * (i / 2) + i % 2] * factor), up = round_bf16(d[4 * (i / 2) + 2 + i % 2] * factor);
        if (to.limit > 0.f) {
            gate = gate > to.limit ? to.limit : gate;  // comparisons let a NaN through
            up = up > to.limit ? to.limit : up < -to.limit ? -to.limit : up;
        }
        const float weight = at < work.count ? to.sorted[work.first + at] : 0.f;
        const float h = round_bf16(__fdividef(gate, 1.f + expf(-gate)) * up * weight);
        d[4 * (i / 2) + i % 2] = h;
        u32 amax = __float_as_uint(h) & 0x7FFFFFFF;
        #pragma unroll
        for (int step = 4; step < 32; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
        if (lane < 4) to.maxima[group][warp][at] = (u16)(amax >> 16);
    }
    warpgroup_barrier(group);
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int at = 8 * (i / 2) + column + i % 2;
        u32 amax = 0;
        #pragma unroll
        for (int w = 0; w < 4; w++) amax = max(amax, (u32)to.maxima[group][w][at] << 16);
        if (at < work.count)
            to.out[((i64)(work.first / 8 + at / 8) * (OUT / 8) + channel / 8) * 64 + at % 8 * 8 + channel % 8] =
                fp8_round_trip(d[4 * (i / 2) + i % 2], fp8_scale(amax));
    }
    warpgroup_barrier(group);  // the maxima have been read
#else
    const int row = 64 * tile + 16 * warp + lane / 4;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int at = 8 * (i / 2) + column + i % 2;
        if (at < work.count) {
            u16* out = to.out + (i64)to.order[work.first + at] * OUT + row;
            if (row < OUT) out[0] = to_bf16(d[4 * (i / 2) + i % 2] * factor);
            if (row + 8 < OUT) out[8] = to_bf16(d[4 * (i / 2) + 2 + i % 2] * factor);
        }
    }
#endif
}

struct Weights {  // of a lane and a stage: its two rows
    uint4 words[2];
    u32 scales[2];

    __device__ __forceinline__ void load(u32 codes) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            words[half] = load_shared16(codes + 16 * (threadIdx.x % 128) + 2048 * half);
            scales[half] = load_shared4(codes + CODES + 4 * (16 * warp + lane / 4 + 8 * half));
        }
    }
    __device__ __forceinline__ u32 word(int half, int block) const {
        return block == 0 ? words[half].x : block == 1 ? words[half].y : block == 2 ? words[half].z : words[half].w;
    }
};

// Codes of the next stage are read while this one is multiplied, and an operand is made while the one before it is
// multiplied. (Products on their way from one stage into the next would be better still; ptxas then serialises all.)
template <int N>
__device__ __forceinline__ void consume(const Item& work, Slot& slot, u32 base, u32 full, u32 empty, const Result& to) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int tile = work.block * WARPGROUPS + group;
    if (tile >= ROW_TILES) {
        for (int k = 0; k < K_TILES; k++, slot.next()) {
            barrier_wait(full + 8 * slot.index, slot.parity);
            if (lane == 0) barrier_arrive(empty + 8 * slot.index);
        }
        return;
    }
    float d[N / 2] = {};
    Weights weights;
    barrier_wait(full + 8 * slot.index, slot.parity);
    weights.load(base + slot.index * STAGE + group * TILE);
    for (int k = 0; k < K_TILES; k++) {
        // From one lane: descriptors live in registers of the warp, and only then are their sums made there too.
        const u32 tokens = __shfl_sync(~0u, base + slot.index * STAGE, 0) + WARPGROUPS * TILE;
        const u64 b = descriptor(tokens, 128, GROUP);
        const int current = slot.index;
        Weights next = weights;
        u32 a[2][2][4];
        wgmma_hold(d);
        #pragma unroll
        for (int block = 0; block < 4; block++) {
            if (block >= 2) wgmma_wait<1>();
            #pragma unroll
            for (int half = 0; half < 2; half++)
                dequantise(weights.word(half, block), weights.scales[half], block, half, a[block % 2]);
            wgmma_fence();
            #pragma unroll
            for (int step = 0; step < 2; step++)
                Product<N>::run(d, a[block % 2][step], b + (2 * block + step) * (2 * 128 / 16), 1);
            wgmma_commit();
            if (block == 1) {
                slot.next();
                if (k + 1 < K_TILES) {
                    barrier_wait(full + 8 * slot.index, slot.parity);
                    next.load(base + slot.index * STAGE + group * TILE);
                }
            }
        }
        weights = next;
        wgmma_wait<0>();
        wgmma_hold(d);
        if (lane == 0) barrier_arrive(empty + 8 * current);
    }
    finish<N>(d, work, tile, to);
}

// x and the first product's output: [groups of eight positions][channels / 8][8 positions][8 channels].
extern "C" __global__ void __launch_bounds__(THREADS, 1) product(
    const u8* weights, const float* factors, const int* begins, const int* counts, const int* order,
    const float* sorted, const u16* x, u16* out, float limit) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int first_item[EXPERTS + 1];
    __shared__ u16 maxima[GATED ? WARPGROUPS : 1][4][GATED ? NMAX : 1];  // upper halves: of bf16 values, all of them
    __shared__ u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, base = shared_address(memory);
    if (threadIdx.x < 32) {  // a scan by one warp
        int sum = 0;
        for (int base = 0; base < EXPERTS; base += 32) {
            const int expert = base + threadIdx.x;
            const int count = expert < EXPERTS ? counts[expert] : 0;
            int mine = count >= FEWEST && count <= MOST ? (count + NMAX - 1) / NMAX * BLOCKS : 0;
            const int own = mine;
            #pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, mine, step);
                if (threadIdx.x >= step) mine += other;
            }
            if (expert < EXPERTS) first_item[expert] = sum + mine - own;
            sum += __shfl_sync(~0u, mine, 31);
        }
        if (threadIdx.x == 0) first_item[EXPERTS] = sum;
    } else if (threadIdx.x < 32 + STAGES) {
        barrier_init(full + 8 * (threadIdx.x - 32), 1);
        barrier_init(empty + 8 * (threadIdx.x - 32), CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const Schedule schedule{begins, counts, first_item};
    Slot slot;
    if (threadIdx.x >= CONSUMERS) {  // copies: lanes 0..WARPGROUPS-1 weights, all lanes tokens
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPYING));
        if (threadIdx.x < CONSUMERS + 32) {
            const int lane = threadIdx.x % 32;
            slot.parity = 1;  // the first round finds every stage empty
            for (int index = blockIdx.x; schedule.has(index); index += gridDim.x) {
                const Item work = schedule.item(index);
                const int tile = work.block * WARPGROUPS, tiles = min(WARPGROUPS, ROW_TILES - tile);
                const int groups = (work.count + 7) / 8;
                const u8* from = weights + ((i64)work.expert * ROW_TILES + tile + lane) * K_TILES * TILE;
                const u8* tokens = (const u8*)x + (i64)(work.first / 8) * (K * 16);
                for (int k = 0; k < K_TILES; k++) {
                    const u32 barrier = full + 8 * slot.index, stage = base + slot.index * STAGE;
                    barrier_wait(empty + 8 * slot.index, slot.parity);
                    if (lane == 0) barrier_expect(barrier, tiles * TILE + groups * GROUP);
                    __syncwarp();
                    if (lane < tiles) bulk_copy(stage + lane * TILE, from + k * TILE, TILE, barrier);
                    for (int i = lane; i < groups; i += 32)
                        bulk_copy(stage + WARPGROUPS * TILE + i * GROUP, tokens + (i64)i * (K * 16) + k * GROUP, GROUP,
                                  barrier);
                    slot.next();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COMPUTING));
        const Result to{factors, order, sorted, out, limit, maxima};
        Item next = schedule.item(blockIdx.x);
        for (int index = blockIdx.x; schedule.has(index); index += gridDim.x) {
            const Item work = next;
            next = schedule.item(index + gridDim.x);  // long before it is needed
            const int columns = work.columns();
#define CONSUME(N) if (columns == N) consume<N>(work, slot, base, full, empty, to); else
            FOR_EACH_WGMMA(CONSUME) {}
        }
    }
}

// ---- sum ---------------------------------------------------------------------------------------------------------

// One block per token: its choices in ascending order of expert, added in float32.
extern "C" __global__ void __launch_bounds__(256) combine(const u16* down, const i64* ids, float* out, i64 channels) {
    const i64 token = blockIdx.x;
    int choice[TOPK], count = 0;
    int previous = -1;
    #pragma unroll
    for (int n = 0; n < TOPK; n++) {  // the smallest id above the last one taken
        int best = 0x7FFFFFFF, at = 0;
        #pragma unroll
        for (int j = 0; j < TOPK; j++) {
            const int id = (int)ids[token * TOPK + j];
            if (id > previous && id < best) best = id, at = j;
        }
        choice[n] = at;
        if (best != 0x7FFFFFFF) previous = best, count++;
    }
    for (int at = threadIdx.x * 4; at < channels; at += 1024) {
        float sum[4] = {};
        #pragma unroll
        for (int n = 0; n < TOPK; n++)
            if (n < count) {
                const uint2 four = *(const uint2*)(down + (token * TOPK + choice[n]) * channels + at);
                sum[0] += low_float(four.x), sum[1] += high_float(four.x);
                sum[2] += low_float(four.y), sum[3] += high_float(four.y);
            }
        *(float4*)(out + token * channels + at) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}
