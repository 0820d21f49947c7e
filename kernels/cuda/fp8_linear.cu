// Products of bf16 activations with FP8 weights (32x32 scales), weights streamed once: exact products, float32 sums.
//
// Plan. Products are computed transposed, weights x tokens, as in experts.cu: a warpgroup takes 64 weight rows as the
// left operand, e4m3 from shared memory, made bf16 in registers (exact); up to 256 tokens are the right one, in shared
// memory, WIDTH columns. Two warpgroups share the tokens of a stage (64 channels), and a warp beside them copies
// weights and tokens ahead, STAGES deep, on into the next piece of work. Both were laid out so that a stage is a
// contiguous run: weights once (fp8_linear.py), tokens by ``arrange``, which also casts them.
//
// 256 tokens x 128 rows would read more from the second-level cache than it can give. So two blocks, neighbours in
// weight rows, are a cluster: each copies half of the tokens of a stage into the shared memory of both. A stage is
// free when the warps of both have left it.
//
// Few rows alone do not fill the GPU, so K is split, by shape only. With few tokens the sums of a split go through
// memory in the order of lanes, and ``reduce`` adds them; with many, a block runs all splits of its piece and adds them
// in registers (LOOPS). An output is the same chain of steps and the same sum of splits either way, and whatever WIDTH
// is.
//
// Macros: WIDTH (columns, a multiple of 8), STAGES, LOOPS.

constexpr int WARPGROUPS = 2, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int COMPUTING = 232, COPYING = 40;  // registers; together what the block is given
constexpr int CODES = 4096;                     // of a warpgroup: 64 rows x 64 channels
constexpr int TILE = WARPGROUPS * CODES + 16;   // with scales, bf16 [4 x 32 rows][2 x 32 channels]
constexpr int TOKENS = WIDTH * 128;             // bytes of a stage
constexpr int STAGE = (TOKENS + TILE + 127) / 128 * 128;
constexpr int BAND = 4;                         // pieces of tokens that run side by side
using Slot = Ring<STAGES>;
#define JOIN(a, b) a##b
#define WGMMA(n) JOIN(wgmma_n, n)

// ---- clusters of two -----------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// At the barrier of the block ``rank`` of the cluster that lies where ``barrier`` does here.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, int rank) {
    asm volatile("{.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];}" :: "r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void bulk_copy_to_both(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)3) : "memory");
}

// ---- tokens --------------------------------------------------------------------------------------------------------

// What FP8/32 leaves of two values under a power of two, bf16.
__device__ __forceinline__ u32 fp8_round_trip2(u32 pair, u32 scale) {
    if (scale == 0x7F800000u) return 0x7FFF7FFFu;
    const float inverse = __uint_as_float((254u << 23) - scale), back = __uint_as_float(scale);
    const float high = high_float(pair) * inverse;
    const float2 left = from_e4m3(to_e4m3(low_float(pair) * inverse, high));
    return pack_bf16(left.x * back, left.y * back);
}

// x [tokens, groups, channels] -> [groups][channels / 64][tokens of all pieces / 8][8 octets][8 tokens][8 channels],
// cast FP8/32 and back if ``cast``. A warp: 8 tokens x 64 channels. Tokens that are not there stay what they are.
extern "C" __global__ void __launch_bounds__(256) arrange(
    const u16* x, u16* out, i64 tokens, i64 padded, i64 channels, i64 cast) {
    const int lane = threadIdx.x % 32, octet = lane % 8, group = blockIdx.z;
    const int tiles = ((int)channels + 63) / 64, tile = blockIdx.y * 8 + threadIdx.x / 32;
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
        const i64 at = ((i64)(group * tiles + tile) * (padded / 8) + blockIdx.x) * 512 + octet * 64 + within * 8;
        *(uint4*)(out + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// ---- results -------------------------------------------------------------------------------------------------------

struct Shape {
    int tokens, outputs, groups, blocks, k_tiles, splits;  // outputs, blocks (of 128), k tiles (of 64): of a group
    __device__ __forceinline__ int pieces() const { return (tokens + WIDTH - 1) / WIDTH; }
    __device__ __forceinline__ int pairs() const { return (blocks + 1) / 2; }
    __device__ __forceinline__ int chunk() const { return (k_tiles + splits - 1) / splits; }
};

// Four sums of a lane: rows lane / 4 and + 8 of its warp, columns 8 i + 2 (lane % 4) and + 1. Weight rows lie in an
// order in which, transposed, a lane has four outputs of one token side by side.
__device__ __forceinline__ void store(u16* out, const Shape& shape, const float* d, int group, int tile, int token) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, output = 64 * tile + 16 * warp + 4 * (lane % 4);
    u32 low = pack_bf16(d[0], d[1]), high = pack_bf16(d[2], d[3]);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(low));  // all lanes: before any leaves
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(high));
    token += lane / 4;
    if (token >= shape.tokens || output >= shape.outputs) return;
    *(uint2*)(out + ((i64)token * shape.groups + group) * shape.outputs + output) = make_uint2(low, high);
}

// parts [splits][pieces][groups][blocks][warpgroups][WIDTH / 8][128 lanes][4]
extern "C" __global__ void __launch_bounds__(128) reduce(
    const float* parts, u16* out, i64 tokens, i64 outputs, i64 groups, i64 blocks, i64 splits) {
    const Shape shape{(int)tokens, (int)outputs, (int)groups, (int)blocks, 0, (int)splits};
    const int tiles = WARPGROUPS * shape.blocks, group = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const i64 one = (i64)shape.pieces() * gridDim.x * (WIDTH * 64);
    const float* from = parts + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * (WIDTH * 64) + 4 * threadIdx.x;
    const int i = blockIdx.z;
    float d[4] = {};
    wait_for_previous();
    for (int split = 0; split < shape.splits; split += 4) {  // loads of four at a time, added in order
        float4 more[4];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (split + j < shape.splits) more[j] = *(const float4*)(from + (split + j) * one + i * 512);
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (split + j < shape.splits) {
                d[0] = split + j ? d[0] + more[j].x : more[j].x, d[1] = split + j ? d[1] + more[j].y : more[j].y;
                d[2] = split + j ? d[2] + more[j].z : more[j].z, d[3] = split + j ? d[3] + more[j].w : more[j].w;
            }
    }
    store(out, shape, d, group, tile, blockIdx.y * WIDTH + 8 * i);
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

struct Item {
    int piece, block, group, split;
};

// Of this block of a cluster.
__device__ __forceinline__ Item item(const Shape& shape, int index, int rank) {
    const int parts = LOOPS ? 1 : shape.splits;
    const int band = shape.pairs() * shape.groups * parts * BAND, first = index / band * BAND;
    const int wide = min(BAND, shape.pieces() - first);
    index %= band;
    const int piece = first + index % wide;
    index /= wide;
    const int pair = index % shape.pairs();
    index /= shape.pairs();
    return {piece, 2 * pair + rank, index % shape.groups, index / shape.groups};
}

__device__ __forceinline__ void products(float (&d)[WIDTH / 2], const u32 (&a)[2][4], u64 b) {
    wgmma_fence();
    #pragma unroll
    for (int step = 0; step < 2; step++)
        WGMMA(WIDTH)(d, a[step][0], a[step][1], a[step][2], a[step][3], b + step * (2 * 128 / 16), 1);
    wgmma_commit();
}

// x as from ``arrange``; weights [groups][blocks][k tiles][TILE].
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) product(
    const u8* weights, const u16* x, u16* out, float* parts, i64 tokens, i64 outputs, i64 groups, i64 blocks,
    i64 k_tiles, i64 splits) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, base = shared_address(memory);
    const Shape shape{(int)tokens, (int)outputs, (int)groups, (int)blocks, (int)k_tiles, (int)splits};
    const int rank = cluster_rank();
    if (threadIdx.x < STAGES) {
        barrier_init(full + 8 * threadIdx.x, 1);
        barrier_init(empty + 8 * threadIdx.x, 2 * CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_barrier();
    launch_dependents();
    const int loops = LOOPS ? shape.splits : 1;
    const int items = shape.pieces() * shape.pairs() * shape.groups * (LOOPS ? 1 : shape.splits), step = gridDim.x / 2;
    Slot slot;
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPYING));
        if (threadIdx.x == CONSUMERS) {
            slot.parity = 1;  // the first round finds every stage empty
            wait_for_previous();
            const i64 row = (i64)shape.pieces() * TOKENS;
            for (int index = blockIdx.x / 2; index < items; index += step) {
                const Item work = item(shape, index, rank);
                const bool real = work.block < shape.blocks;  // else copies for the neighbour only
                const int first = work.split * shape.chunk();
                const int last = LOOPS ? shape.k_tiles : min(first + shape.chunk(), shape.k_tiles);
                const i64 block = work.group * shape.blocks + work.block;
                const u8* from = weights + (block * shape.k_tiles + first) * TILE;
                const u8* left = (const u8*)x + ((i64)work.group * shape.k_tiles + first) * row
                               + (i64)work.piece * TOKENS + rank * (TOKENS / 2);
                for (int k = first; k < last; k++, from += TILE, left += row, slot.next()) {
                    const u32 barrier = full + 8 * slot.index, stage = base + slot.index * STAGE;
                    barrier_wait(empty + 8 * slot.index, slot.parity);
                    barrier_expect(barrier, TOKENS + (real ? TILE : 0));
                    if (real) bulk_copy(stage + TOKENS, from, TILE, barrier);
                    bulk_copy_to_both(stage + rank * (TOKENS / 2), left, TOKENS / 2, barrier);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COMPUTING));
        const int lane = threadIdx.x % 32, in_group = threadIdx.x % 128;
        const int mine = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the warpgroup
        wait_for_previous();  // somebody may still read the memory of ``parts`` and ``out``
        for (int index = blockIdx.x / 2; index < items; index += step) {
            const Item work = item(shape, index, rank);
#if LOOPS
            float total[WIDTH / 2];
#endif
            for (int loop = 0; loop < loops; loop++) {
                const int first = (work.split + loop) * shape.chunk(), last = min(first + shape.chunk(), shape.k_tiles);
                float d[WIDTH / 2];
                #pragma unroll
                for (int i = 0; i < WIDTH / 2; i++) d[i] = 0.f;
                u32 a[2][2][4];
                int before = -1;
                for (int k = first; k < last; k++) {
                    barrier_wait(full + 8 * slot.index, slot.parity);
                    const u32 stage = __shfl_sync(~0u, base + slot.index * STAGE, 0);  // descriptors stay uniform
                    const u32 codes = stage + TOKENS + 16 * threadIdx.x + mine * (CODES - 128 * 16);
                    const u64 b = descriptor(stage, 128, 1024);
                    const uint4 words[2] = {load_shared16(codes), load_shared16(codes + CODES / 2)};
                    const u32 scales = load_shared4(stage + TOKENS + WARPGROUPS * CODES + 4 * (threadIdx.x / 64));
                    // Products are on their way from one stage into the next: of two blocks of 32 channels, one is
                    // made while the other is multiplied.
                    #pragma unroll
                    for (int block = 0; block < 2; block++) {
                        const u32 scale = __byte_perm(scales, 0, block ? 0x3232 : 0x1010);
                        wgmma_wait<1>();  // these registers have been read
                        if (block == 1 && before >= 0 && lane < 2) barrier_arrive_at(empty + 8 * before, lane);
                        dequantise(words[block].x, scale, a[block][0][0], a[block][0][2]);
                        dequantise(words[block].y, scale, a[block][0][1], a[block][0][3]);
                        dequantise(words[block].z, scale, a[block][1][0], a[block][1][2]);
                        dequantise(words[block].w, scale, a[block][1][1], a[block][1][3]);
                        products(d, a[block], b + block * (4 * 128 / 16));
                    }
                    before = slot.index;
                    slot.next();
                }
                wgmma_wait<0>();
                wgmma_hold(d);
                if (before >= 0 && lane < 2) barrier_arrive_at(empty + 8 * before, lane);
#if LOOPS
                #pragma unroll
                for (int i = 0; i < WIDTH / 2; i++) d[i] = total[i] = loop ? total[i] + d[i] : d[i];
                if (loop < loops - 1) continue;
#endif
                if (work.block >= shape.blocks) continue;
                const int tile = WARPGROUPS * work.block + mine;
                if (!LOOPS && shape.splits > 1) {
                    const i64 whose = ((i64)work.split * shape.pieces() + work.piece) * shape.groups + work.group;
                    float* to = parts + (whose * WARPGROUPS * shape.blocks + tile) * (WIDTH * 64) + 4 * in_group;
                    #pragma unroll
                    for (int i = 0; i < WIDTH / 8; i++)
                        *(float4*)(to + i * 512) = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
                    continue;
                }
                #pragma unroll
                for (int i = 0; i < WIDTH / 8; i++)
                    store(out, shape, d + 4 * i, work.group, tile, work.piece * WIDTH + 8 * i);
            }
        }
    }
    cluster_barrier();  // a block that ends could no longer be written to
}
