// What both classes of the routed experts share (experts.cu, the exact one, and experts_fp8.cu, the fast one): routing,
// the pieces of work, the ring of stages and the thread that fills it, the sum over a token's experts.
//
// A product is computed transposed, weights x tokens. A warpgroup takes 64 weight rows as the left operand: FP4 codes
// come from shared memory, are dequantised in registers and feed wgmma from there; the tokens of the expert are the
// right operand, in shared memory, as many columns as the expert has tokens, in steps of STEP up to NMAX. So a product
// costs what its tokens cost, not a fixed tile, and at few tokens the kernel is a stream of weights.
//
// Blocks are persistent: WARPGROUPS warpgroups share the tokens of a piece of work, and a thread beside them copies
// weights and tokens ahead, 128 channels a stage, STAGES deep, on into the next piece. What a stage takes is
// contiguous, because it was laid out so: one bulk copy of weights and one of tokens, which complete on its barrier. (A
// copy costs its thread some 130 cycles. With one for each tile and each group of tokens it was the bottleneck.)
//
// One kernel does both products, so that weights of the second stream while the last pieces of the first are computed.
// Blocks draw pieces from a counter, those of the first product before those of the second, expert by expert. So who
// waits for tokens of the second product waits for blocks that run and do not wait; by then they are mostly there.
//
// Weights, laid out once by ``pack``: [expert][4 tiles][128 channels][tile]; a tile of 64 rows is 4,096 bytes of codes
// in the order of the lanes, then 256 of scales. Tokens, by ``gather`` and by the first product: [expert]
// [128 channels][group of eight tokens], a group as the core matrices that wgmma reads.
//
// In the first product gate and up rows alternate in eights, so that a lane holds both for its channel, and the 32
// channels of a tile are one FP8 block of the result: SwiGLU, the routing weight and the FP8/32 cast happen before
// anything is stored. The sum over K of a token has one order, whatever shares its tile.
//
// Macros: EXPERTS, TOPK, HIDDEN and INNER (channels), WARPGROUPS, NMAX, STEP, STAGES. ``fewest`` and ``most``: tokens
// of the experts that a launch serves; others are left alone. The class defines TOKEN, the bytes of a channel of a
// token, SCALED, whether tokens have a float32 scale for each stage: [expert][128 channels][token], EACH, the tiles of
// a warpgroup in a piece of work, and MULTIPLY, its wgmma of N columns.

constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
// Registers of a lane that computes and of one that copies. Together they must be what the block was given at its
// start: a warp that asks for more waits forever.
constexpr int GIVEN = 65536 / THREADS / 8 * 8;
constexpr int COMPUTING = WARPGROUPS == 4 ? 112 : 240, COPYING = WARPGROUPS == 4 ? 32 : 24;
static_assert(CONSUMERS * COMPUTING + 128 * COPYING <= THREADS * GIVEN, "");
constexpr int TILES = WARPGROUPS * EACH;  // of a piece of work
static_assert(4 % TILES == 0, "four tiles lie together");
constexpr int HIDDEN_TILES = (HIDDEN + 127) / 128, INNER_TILES = (INNER + 127) / 128;  // of 128 channels
template <bool GATED> struct Shape {  // of the first product, gate and up, or of the second
    static constexpr int K_TILES = GATED ? HIDDEN_TILES : INNER_TILES;
    static constexpr int ROW_TILES = GATED ? 4 * INNER_TILES : (HIDDEN + 255) / 256 * 4;  // of 64 weight rows
    static constexpr int BLOCKS = ROW_TILES / TILES;
};
constexpr int CODES = 4096, TILE = CODES + 256;
constexpr int GROUP = 8 * 128 * TOKEN;  // bytes of eight tokens x 128 channels
constexpr int TOKENS = TILES * TILE, SCALES = TOKENS + NMAX / 8 * GROUP;  // where they are in a stage
constexpr int STAGE = SCALES + SCALED * NMAX * 4;

using Slot = Ring<STAGES>;
using Turn = Ring<STAGES + 1>;  // of pieces: while one is finished, at most STAGES have been begun behind it

// ---- formats -----------------------------------------------------------------------------------------------------

constexpr u32 MAGNITUDES = 0x7FFF7FFFu;  // of two bf16 values
__device__ __forceinline__ u32 max_each(u32 a, u32 b) {
    u32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 min_each(u32 a, u32 b) {
    u32 r;
    asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// FP8/32 scales, 2^ceil(log2(max(amax, 1e-4) / 448)), of two largest magnitudes; all of them bf16. 448 is 1.75 x 2^8,
// and 1e-4 has the scale of 448 x 2^-22. A NaN or an infinity gives 2^120, the largest: who asks has to look.
__device__ __forceinline__ u32 fp8_scales(u32 amax) {
    return (min_each(max_each(amax, 0x38E038E0u), 0x7F807F80u) + 0x001F001Fu & 0x7F807F80u) - 0x04000400u;
}
__device__ __forceinline__ bool low_is_number(u32 amax) { return (amax & 0xFFFF) < 0x7F80; }
__device__ __forceinline__ bool high_is_number(u32 amax) { return amax < 0x7F800000u; }
__device__ __forceinline__ float or_nan(bool number, float x) { return number ? x : __uint_as_float(0x7FFFFFFFu); }
// Of a scale in the upper half of a word.
__device__ __forceinline__ float reciprocal(u32 scale) { return __uint_as_float(0x7F000000u - scale); }
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// ---- routing -----------------------------------------------------------------------------------------------------

// One block per expert: its pairs (token, choice), in order, behind those of all lower experts. Every expert begins at
// a multiple of eight: ``begins`` [EXPERTS + 1], ``counts`` [EXPERTS]. ``experts`` [groups]: whose a group of eight is.
// ``progress`` [2 + groups] begins at zero: pieces that the two kernels of products have drawn; of the piece that
// begins with a group, blocks of the first product that are stored.
static_assert(TOPK <= 32, "combine has a lane for each");
constexpr int ROUTE_WARPS = 32;
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) route(
    const i64* __restrict__ ids, const float* __restrict__ weights, int* __restrict__ begins, int* __restrict__ counts,
    int* __restrict__ order, float* __restrict__ sorted, int* __restrict__ experts, int* __restrict__ progress,
    i64 tokens) {
    __shared__ int all[EXPERTS];
    __shared__ int sums[ROUTE_WARPS];
    // A warp takes a run of pairs, 32 at a time, so that their order is the order of lanes.
    const int expert = blockIdx.x, pairs = (int)tokens * TOPK, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = (pairs + 32 * ROUTE_WARPS - 1) / (32 * ROUTE_WARPS) * 32;
    const int first = min(warp * run, pairs), last = min(first + run, pairs);
    for (int i = threadIdx.x; i < EXPERTS; i += 32 * ROUTE_WARPS) all[i] = 0;
    __syncthreads();
    wait_for_previous();
    launch_dependents();
    int mine = 0;
    for (int i = first + lane; i < last; i += 32 * 16) {
        int id[16];  // loads of all before the first is needed
        #pragma unroll
        for (int j = 0; j < 16; j++) id[j] = i + 32 * j < last ? (int)ids[i + 32 * j] : -1;
        #pragma unroll
        for (int j = 0; j < 16; j++) {
            mine += id[j] == expert;
            if (id[j] >= 0 && id[j] < expert) atomicAdd(&all[id[j]], 1);
        }
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
    for (int w = 0; w < ROUTE_WARPS; w++) {
        if (w < warp) at += sums[w];
        count += sums[w];
    }
    if (threadIdx.x == 0) {
        begins[expert] = begin, counts[expert] = count;
        if (expert == 0) progress[0] = progress[1] = 0;
        if (expert == EXPERTS - 1) begins[EXPERTS] = begin + (count + 7) / 8 * 8;
    }
    at += begin;
    for (int i = first + lane; i - lane < last; i += 32 * 8) {
        bool here[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) here[j] = i + 32 * j < last && (int)ids[i + 32 * j] == expert;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 found = __ballot_sync(~0u, here[j]);
            if (here[j]) {
                const int to = at + __popc(found & ((1u << lane) - 1));
                order[to] = i + 32 * j, sorted[to] = weights[i + 32 * j];
            }
            at += __popc(found);
        }
    }
    if (threadIdx.x < (8 - count % 8) % 8)
        order[begin + count + threadIdx.x] = -1, sorted[begin + count + threadIdx.x] = 0.f;
    for (int i = threadIdx.x; 8 * i < count; i += 32 * ROUTE_WARPS)
        experts[begin / 8 + i] = expert, progress[2 + begin / 8 + i] = 0;
}

// ---- pieces of work -----------------------------------------------------------------------------------------------

// Tokens of an expert: where they begin, in groups of eight, and how many groups they are.
struct Run {
    int begin, groups;
    Run() = default;
    __device__ __forceinline__ Run(int begin, int count) : begin(begin / 8), groups((count + 7) / 8) {}
    // Of ``tiles`` times 128 channels: the place of a group of the whole batch.
    __device__ __forceinline__ i64 place(int tiles, int tile, int group) const {
        return (i64)begin * tiles + tile * groups + (group - begin);
    }
};

struct Item {  // up to NMAX tokens of an expert, from position ``first``, times the weight rows of a block
    bool gated;
    int expert, block, first, count;
    Run run;
    __device__ __forceinline__ int columns() const { return (count + STEP - 1) / STEP * STEP; }
};

struct Schedule {
    const int *begins, *counts, *first_piece;  // first_piece [EXPERTS + 1]: pieces of tokens before each expert

    __device__ __forceinline__ bool has(int index) const {
        return index < first_piece[EXPERTS] * (Shape<true>::BLOCKS + Shape<false>::BLOCKS);
    }
    __device__ __forceinline__ Item item(int index) const {
        const int gated = first_piece[EXPERTS] * Shape<true>::BLOCKS;
        const int blocks = index < gated ? Shape<true>::BLOCKS : Shape<false>::BLOCKS;
        const int at = index < gated ? index : index - gated;
        int low = 0, high = EXPERTS;  // the last expert that begins at or before it
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_piece[middle] * blocks <= at) low = middle;
            else high = middle;
        }
        const int within = at - first_piece[low] * blocks, all = counts[low];
        const int pieces = (all + NMAX - 1) / NMAX, piece = within % pieces;
        return {index < gated, low, within / pieces, begins[low] + piece * NMAX, min(NMAX, all - piece * NMAX),
                Run(begins[low], all)};
    }
};

template <int N> struct Product;
#define PRODUCT(N)                                                                                                  \
    template <> struct Product<N> {                                                                                 \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {   \
            MULTIPLY(N)(d, a[0], a[1], a[2], a[3], b, accumulate);                                                  \
        }                                                                                                           \
    };
FOR_EACH_WGMMA(PRODUCT)

// ---- the pipeline ------------------------------------------------------------------------------------------------

struct Pipeline {  // in shared memory: barriers of full and of empty stages, the stages, pieces of work
    u32 full, empty, base;
    Item* items;

    __device__ __forceinline__ u32 wait(const Slot& slot) const {  // the stage, filled
        barrier_wait(full + 8 * slot.index, slot.parity);
        return base + slot.index * STAGE;
    }
    // Descriptor of a stage's tokens. From one lane: it lives in registers of the warp, and so do sums with it.
    __device__ __forceinline__ u64 tokens(int index) const {
        return descriptor(__shfl_sync(~0u, base + index * STAGE + TOKENS, 0), 128, GROUP);
    }
    __device__ __forceinline__ void release(int index) const {
        __syncwarp();  // other lanes have read it too
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * index);
    }
};

// Before anything else: barriers, and how many pieces of tokens there are before each expert.
__device__ __forceinline__ void start(
    const Pipeline& pipeline, const int* counts, int* first_piece, i64 fewest, i64 most) {
    if (threadIdx.x >= 32 && threadIdx.x < 32 + STAGES) {
        barrier_init(pipeline.full + 8 * (threadIdx.x - 32), 1);
        barrier_init(pipeline.empty + 8 * (threadIdx.x - 32), CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    wait_for_previous();
    launch_dependents();  // after the wait, also in route and gather: combine reads ids before its own
    if (threadIdx.x < 32) {  // a scan by one warp
        int sum = 0;
        for (int base = 0; base < EXPERTS; base += 32) {
            const int expert = base + threadIdx.x;
            const int count = expert < EXPERTS ? counts[expert] : 0;
            int mine = count >= fewest && count <= most ? (count + NMAX - 1) / NMAX : 0;
            const int own = mine;
            #pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, mine, step);
                if (threadIdx.x >= step) mine += other;
            }
            if (expert < EXPERTS) first_piece[expert] = sum + mine - own;
            sum += __shfl_sync(~0u, mine, 31);
        }
        if (threadIdx.x == 0) first_piece[EXPERTS] = sum;
    }
    __syncthreads();
}

// All that the first product has for these tokens is there, also for bulk copies.
__device__ __forceinline__ void wait_for_first(const int* stored) {
    int blocks;
    do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(blocks) : "l"(stored) : "memory");
    while (blocks < Shape<true>::BLOCKS);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Weights are read once; they are not to drive the tokens, which are read often, from the second-level cache.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_copy_once(u32 to, const void* from, int bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

template <bool GATED> struct Operands {
    const u8 *weights, *tokens;
    const float* scales;  // of the tokens

    __device__ __forceinline__ void copy(const Pipeline& pipeline, Slot& slot, int turn, const Item& work) const {
        constexpr int K_TILES = Shape<GATED>::K_TILES;
        const int tile = work.block * TILES, groups = (work.count + 7) / 8;
        const i64 row = (i64)work.expert * Shape<GATED>::ROW_TILES + tile / 4 * 4;
        const u8* from = weights + row * (K_TILES * TILE) + tile % 4 * TILE;
        const int stride = work.run.groups;
        int place = (int)work.run.place(K_TILES, 0, work.first / 8);
        const u64 policy = evict_first();
        barrier_wait(pipeline.empty + 8 * slot.index, slot.parity);
        pipeline.items[turn] = work;
        #pragma unroll 1  // this thread has few registers
        for (int k = 0; k < K_TILES; k++, slot.next()) {
            const u32 barrier = pipeline.full + 8 * slot.index, stage = pipeline.base + slot.index * STAGE;
            barrier_wait(pipeline.empty + 8 * slot.index, slot.parity);
            barrier_expect(barrier, TILES * TILE + groups * (GROUP + SCALED * 32));
            bulk_copy_once(stage, from, TILES * TILE, barrier, policy);
            bulk_copy(stage + TOKENS, tokens + (i64)place * GROUP, groups * GROUP, barrier);
            if (SCALED) bulk_copy(stage + SCALES, scales + place * 8, groups * 32, barrier);
            from += 4 * TILE, place += stride;
        }
    }
};

// An increment, because the compiler would share the result of an addition within the warp, and wait for it at once.
__device__ __forceinline__ int draw(int* drawn) {
    int index;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(index) : "l"(drawn), "r"(0x7FFFFFFF) : "memory");
    return index;
}

// The copying thread.
__device__ __forceinline__ void copy_ahead(
    const Pipeline& pipeline, const Schedule& schedule, int* drawn, const int* stored, const Operands<true>& first,
    const Operands<false>& second) {
    Slot slot;
    slot.parity = 1;  // the first round finds every stage empty
    Turn turn;
    int index = draw(drawn);
    for (; schedule.has(index); turn.next()) {
        const Item work = schedule.item(index);
        index = draw(drawn);
        if (work.gated) {
            first.copy(pipeline, slot, turn.index, work);
        } else {
            wait_for_first(stored + work.first / 8);
            second.copy(pipeline, slot, turn.index, work);
        }
    }
    barrier_wait(pipeline.empty + 8 * slot.index, slot.parity);
    pipeline.items[turn.index].count = 0;  // the end
    barrier_arrive(pipeline.full + 8 * slot.index);
}

// A warp that says of every piece of the first product that it is stored: to fence what others wrote takes long.
struct Finished {
    int* pieces;  // in shared memory [2]: first group, taking turns

    // All that compute: what they had to store and to read is done.
    __device__ __forceinline__ void meet(int odd, int group) const {
        if (threadIdx.x == 0) pieces[odd] = group;
        barrier();
    }
    __device__ __forceinline__ void publish(int* stored) const {
        for (int odd = 0;; odd ^= 1) {
            barrier();
            const int group = pieces[odd];
            if (group < 0) return;
            if (threadIdx.x % 32 == 0)
                asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(stored + group) : "memory");
        }
    }
    static __device__ __forceinline__ void barrier() {
        asm volatile("bar.sync %0, %1;" :: "n"(WARPGROUPS + 1), "n"(CONSUMERS + 32) : "memory");
    }
};

// A class says where results go, and what becomes of a piece of either product with N columns.
struct Result;
template <bool GATED, int N> __device__ void consume(
    const Item& work, Slot& slot, const Pipeline& pipeline, const Result& to, int odd);

// What the computing warps do.
__device__ __forceinline__ void compute(const Pipeline& pipeline, const Finished& finished, const Result& to) {
    Slot slot;
    Turn turn;
    int odd = 0;
    for (;; turn.next()) {
        pipeline.wait(slot);
        const Item& work = pipeline.items[turn.index];
        if (!work.count) break;
        const int columns = work.columns();
#define CONSUME(N)                                                                                                  \
        if (columns == N) {                                                                                         \
            if (work.gated) consume<true, N>(work, slot, pipeline, to, odd);                                        \
            else consume<false, N>(work, slot, pipeline, to, odd);                                                  \
        } else
        FOR_EACH_WGMMA(CONSUME) {}
        odd ^= work.gated;
    }
    finished.meet(odd, -1);
}

// ---- weights -----------------------------------------------------------------------------------------------------

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

// ---- sum ---------------------------------------------------------------------------------------------------------

// One or more blocks per token, a thread for eight channels: its choices in ascending order of expert, added in
// float32.
extern "C" __global__ void __launch_bounds__(320) combine(
    const u16* __restrict__ down, const i64* __restrict__ ids, float* __restrict__ out) {
    const i64 token = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    // Routing has waited for whoever made the ids, the products for routing, and this kernel starts after that.
    const int lane = threadIdx.x % 32, id = lane < TOPK ? (int)ids[token * TOPK + lane] : -1;
    int choice[TOPK], count = 0;
    #pragma unroll
    for (int n = 0, previous = -1; n < TOPK; n++) {  // the smallest id above the last one taken
        const u32 next = __reduce_min_sync(~0u, id > previous ? (u32)id : ~0u);
        if (next == ~0u) break;
        choice[n] = __ffs(__ballot_sync(~0u, id == (int)next)) - 1;
        previous = (int)next, count++;
    }
    wait_for_previous();
    launch_dependents();
    if (at >= HIDDEN) return;
    float sum[8] = {};
    #pragma unroll
    for (int n = 0; n < TOPK; n++)
        if (n < count) {
            const uint4 eight = *(const uint4*)(down + (token * TOPK + choice[n]) * HIDDEN + at);
            const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
            #pragma unroll
            for (int i = 0; i < 4; i++) sum[2 * i] += low_float(pairs[i]), sum[2 * i + 1] += high_float(pairs[i]);
        }
    float4* to = (float4*)(out + token * HIDDEN + at);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}
