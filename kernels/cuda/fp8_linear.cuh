// What both classes of the products with FP8 weights share (fp8_linear.cu, fp8_linear_fast.cu): who multiplies what,
// how it gets into shared memory, and how sums get out. Weights are streamed once.
//
// Products are computed transposed, weights x tokens, as in experts.cu: a warpgroup takes 64 weight rows, and up to 256
// tokens are the WIDTH columns of the right operand. Two warpgroups share the tokens of a stage, and a warp beside them
// copies weights and tokens ahead, STAGES deep, on into the next piece of work. Both were laid out so that a stage is a
// contiguous run: weights once (fp8_linear.py), tokens by ``arrange``, which also casts them. Tokens that need no cast
// are copied from where they are, by a tensor map (MAPPED).
//
// Weights are there since they were loaded: the first stages of them are copied while ``arrange`` still runs.
//
// 256 tokens x 128 rows would read more from the second-level cache than it can give. So CLUSTER blocks, neighbours in
// weight rows, are a cluster: each copies its part of the tokens of a stage into the shared memory of all. A stage is
// free when the warps of all have left it.
//
// Few rows alone do not fill the GPU, so K is split, by shape only. With few tokens the sums of a split go through
// memory in the order of lanes, and ``reduce`` adds them; with many, a block runs all splits of its piece and adds them
// in registers (LOOPS). An output is the same chain of steps and the same sum of splits either way, and whatever WIDTH
// is.
//
// Macros: WIDTH (columns, a multiple of 8), STAGES, LOOPS, MAPPED. The class defines
// CHANNELS of a stage, TOKENS and TILE, bytes of tokens and of weights of a stage, SUMS that a lane
// holds, and whether operands are SWIZZLED.

constexpr int WARPGROUPS = 2, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
// Registers: as few as will do, so that the next kernel's blocks find room beside this one's last. BOUND threads could
// have what a thread is given; COMPUTING and COPYING are what they make of it.
constexpr int BOUND = SUMS < 64 ? 768 : SUMS <= 128 && WIDTH <= 192 ? 512 : THREADS;
constexpr int COMPUTING = BOUND == 768 ? 104 : BOUND == 512 ? 176 : 232, COPYING = BOUND == THREADS ? 40 : 32;
static_assert(CONSUMERS * COMPUTING + 128 * COPYING == THREADS * (65536 / BOUND / 8 * 8), "or a warp waits forever");
constexpr int ALIGNED = SWIZZLED ? 1024 : 128;
constexpr int WEIGHTS = (TOKENS + ALIGNED - 1) / ALIGNED * ALIGNED;  // where they are in a stage
constexpr int STAGE = (WEIGHTS + TILE + ALIGNED - 1) / ALIGNED * ALIGNED;
constexpr int BAND = 4;                         // pieces of tokens that run side by side
using Slot = Ring<STAGES>;
#define JOIN(a, b) a##b

constexpr int CLUSTER = 2;
constexpr u16 ALL = (1 << CLUSTER) - 1;  // blocks of a cluster
constexpr int UNIT = 128 / CHANNELS;     // stages that no split divides, whatever a stage is

// ---- clusters -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_barrier() { cluster_arrive(); cluster_wait(); }
// At the barrier of the block ``rank`` of the cluster that lies where ``barrier`` does here.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, int rank) {
    asm volatile("{.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];}" :: "r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void bulk_copy_to_all(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(ALL) : "memory");
}

#if MAPPED
struct __align__(64) TensorMap { u64 words[16]; };
using Tokens = TensorMap;
// A box into the shared memory of all blocks: 64 channels of a part of the rows, or of all where a stage has 128.
constexpr int BOXES = CHANNELS / 64;
static_assert(BOXES == 1 || BOXES == CLUSTER, "a box for each block");
__device__ __forceinline__ void map_copy_to_all(u32 to, const TensorMap& map, int channel, int token, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(&map), "r"(channel), "r"(token), "r"(barrier), "h"(ALL) : "memory");
}
#else
using Tokens = const u8*;
#endif

// Descriptor of a K-major operand whose rows are 128 bytes, each of their 16-byte pieces p at place p ^ row % 8.
__device__ __forceinline__ u64 swizzled(u32 address) { return descriptor(address, 16, 1024) | 1ull << 62; }

// ---- results -------------------------------------------------------------------------------------------------------

struct Shape {
    int tokens, outputs, groups, blocks, k_tiles, splits;  // outputs, blocks of 128, k tiles of CHANNELS: of a group
    __device__ __forceinline__ int pieces() const { return (tokens + WIDTH - 1) / WIDTH; }
    __device__ __forceinline__ int clusters() const { return (blocks + CLUSTER - 1) / CLUSTER; }  // of a group
    __device__ __forceinline__ int chunk() const { return (k_tiles / UNIT + splits - 1) / splits * UNIT; }
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
    launch_dependents();
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

// ---- pieces of work -------------------------------------------------------------------------------------------------

struct Item {
    int piece, block, group, split;
};

// Of this block of a cluster.
__device__ __forceinline__ Item item(const Shape& shape, int index, int rank) {
    const int parts = LOOPS ? 1 : shape.splits;
    const int band = shape.clusters() * shape.groups * parts * BAND, first = index / band * BAND;
    const int wide = min(BAND, shape.pieces() - first);
    index %= band;
    const int piece = first + index % wide;
    index /= wide;
    const int cluster = index % shape.clusters();
    index /= shape.clusters();
    return {piece, CLUSTER * cluster + rank, index % shape.groups, index / shape.groups};
}

// The sums of a warpgroup become outputs, or one of the splits of them.
__device__ __forceinline__ void finish(
    const float (&d)[WIDTH / 2], u16* out, float* parts, const Shape& shape, const Item& work) {
    if (work.block >= shape.blocks) return;
    const int tile = WARPGROUPS * work.block + threadIdx.x / 128;
    if (!LOOPS && shape.splits > 1) {
        const i64 whose = ((i64)work.split * shape.pieces() + work.piece) * shape.groups + work.group;
        float* to = parts + (whose * WARPGROUPS * shape.blocks + tile) * (WIDTH * 64) + threadIdx.x % 128 * 4;
        #pragma unroll
        for (int i = 0; i < WIDTH / 8; i++)
            *(float4*)(to + i * 512) = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
        return;
    }
    #pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) store(out, shape, d + 4 * i, work.group, tile, work.piece * WIDTH + 8 * i);
}

// ---- the pipeline --------------------------------------------------------------------------------------------------

struct Pipeline {  // in shared memory: barriers of full and of empty stages, and the stages
    u32 full, empty, base;

    // By the warps of all blocks; a stage that no lane of this warp reads any more.
    __device__ __forceinline__ void release(int index) const {
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_at(empty + 8 * index, threadIdx.x % 32);
    }
};

__device__ __forceinline__ void start(const Pipeline& pipeline) {
    if (threadIdx.x < STAGES) {
        barrier_init(pipeline.full + 8 * threadIdx.x, 1);
        barrier_init(pipeline.empty + 8 * threadIdx.x, CLUSTER * CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");  // the fence was enough
    launch_dependents();
}

// The copying thread. Twice over its stages: first the weights of the first STAGES, then everything else.
__device__ __forceinline__ void copy_ahead(
    const Pipeline& pipeline, const Shape& shape, const u8* weights, const Tokens& x, int rank, int items) {
    #pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        Slot slot;
        slot.parity = 1;  // the first round finds every stage empty
        int early = STAGES;
        if (pass) wait_for_previous();
        for (int index = blockIdx.x / CLUSTER; index < items && (pass || early > 0); index += gridDim.x / CLUSTER) {
            const Item work = item(shape, index, rank);
            const bool real = work.block < shape.blocks;  // else copies for the others only
            const int first = work.split * shape.chunk();
            const int last = LOOPS ? shape.k_tiles : min(first + shape.chunk(), shape.k_tiles);
            const i64 block = work.group * shape.blocks + work.block;
            const u8* from = weights + (block * shape.k_tiles + first) * TILE;
            for (int k = first; k < last && (pass || early > 0); k++, from += TILE, early--, slot.next()) {
                const u32 barrier = pipeline.full + 8 * slot.index, stage = pipeline.base + slot.index * STAGE;
                if (early <= 0) barrier_wait(pipeline.empty + 8 * slot.index, slot.parity);
                if (!pass || early <= 0) {
                    barrier_expect(barrier, TOKENS + (real ? TILE : 0));
                    if (real) bulk_copy(stage + WEIGHTS, from, TILE, barrier);
                }
                if (!pass) continue;
                const u32 to = stage + rank * (TOKENS / CLUSTER);
                const int tile = work.group * shape.k_tiles + k;
#if MAPPED
                const int channel = BOXES > 1 ? rank * 64 : 0, row = BOXES > 1 ? 0 : rank * (WIDTH / CLUSTER);
                map_copy_to_all(to, x, tile * CHANNELS + channel, work.piece * WIDTH + row, barrier);
#else
                const u8* tokens = x + ((i64)tile * shape.pieces() + work.piece) * TOKENS;
                bulk_copy_to_all(to, tokens + rank * (TOKENS / CLUSTER), TOKENS / CLUSTER, barrier);
#endif
            }
        }
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

// d = the products of so many stages, by a warpgroup: what makes a class.
__device__ __forceinline__ void accumulate(float (&d)[WIDTH / 2], int tiles, Slot& slot, const Pipeline& pipeline);

// x as from ``arrange``, or a map of [tokens, groups * channels]; weights [groups][blocks][k tiles][TILE].
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BOUND, 1) product(
    const u8* weights, const __grid_constant__ Tokens x, u16* out, float* parts, i64 tokens,
    i64 outputs, i64 groups, i64 blocks, i64 k_tiles, i64 splits) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers);
    const u32 base = (shared_address(memory) + ALIGNED - 1) / ALIGNED * ALIGNED;
    const Pipeline pipeline{full, full + 8 * STAGES, base};
    const Shape shape{(int)tokens, (int)outputs, (int)groups, (int)blocks, (int)k_tiles, (int)splits};
    const int rank = cluster_rank();
    const int items = shape.pieces() * shape.clusters() * shape.groups * (LOOPS ? 1 : shape.splits);
    start(pipeline);
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPYING));
        if (threadIdx.x == CONSUMERS) copy_ahead(pipeline, shape, weights, x, rank, items);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COMPUTING));
        const int loops = LOOPS ? shape.splits : 1;
        Slot slot;
        wait_for_previous();  // somebody may still read the memory of ``parts`` and ``out``
        for (int index = blockIdx.x / CLUSTER; index < items; index += gridDim.x / CLUSTER) {
            const Item work = item(shape, index, rank);
#if LOOPS
            float total[WIDTH / 2];
#endif
            for (int loop = 0; loop < loops; loop++) {
                const int first = (work.split + loop) * shape.chunk(), last = min(first + shape.chunk(), shape.k_tiles);
                float d[WIDTH / 2];
                accumulate(d, last - first, slot, pipeline);
#if LOOPS
                #pragma unroll
                for (int i = 0; i < WIDTH / 2; i++) d[i] = total[i] = loop ? total[i] + d[i] : d[i];
                if (loop < loops - 1) continue;
#endif
                finish(d, out, parts, shape, work);
            }
        }
    }
    cluster_barrier();  // a block that ends could no longer be written to
}
