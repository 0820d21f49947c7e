// The best k of a row of scores: top groups in ascending order, or a mask of the best blocks of groups.
//
// Plan. One block of 512 threads per row finds the k-th best key by radix selection (a histogram in shared memory per
// digit, 11 bits at first so that the few exponents of real scores do not share a bin), then walks the row once more
// in order and keeps what is above the k-th key and, of those equal to it, the first. A thread holds eight neighbouring
// items of each 4,096; up to eight times that many stay in registers, so a row is read once. The k-th best of the first
// 4,096 is already a lower bound: of all later items only those above it are counted, so few atomics remain. Rows with
// no more than k reachable items, all of a short context, skip the search.
//
// An item is a group, or a block of BLOCK groups whose key is its best group's. Keys are unsigned and ordered as the
// contract says: 0 not reachable, 1 reachable but no candidate, then NaN and -inf as one, then the scores.
// Macros: WIDE (float32 scores), BLOCK (0: groups; else mask of blocks), HELD (chunks of 4,096 items kept in registers,
// 0: a longer row, read for each digit), VECTOR (rows are aligned to 16 bytes).

#if WIDE
typedef u32 S;
constexpr int DIGITS = 3;
__device__ __forceinline__ int digit_bits(int digit) { return digit == 2 ? 10 : 11; }
__device__ __forceinline__ int digit_shift(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
constexpr u32 SIGN = 0x80000000u, INFINITE = 0x7F800000u, ALL = 0xFFFFFFFFu;
#else
typedef u16 S;
constexpr int DIGITS = 2;
__device__ __forceinline__ int digit_bits(int digit) { return digit == 0 ? 11 : 5; }
__device__ __forceinline__ int digit_shift(int digit) { return digit == 0 ? 5 : 0; }
constexpr u32 SIGN = 0x8000u, INFINITE = 0x7F80u, ALL = 0xFFFFu;
#endif
constexpr int THREADS = 512;
constexpr int RUN = 8, CHUNK = THREADS * RUN;  // neighbouring items of a thread; of a block
constexpr u32 NO_CANDIDATE = 1;

struct Row {
    const S* scores;
    const u8* candidates;  // null: all
    int reach;             // groups

    __device__ __forceinline__ u32 group_key(int group) const {
        if (group >= reach) return 0;
        if (candidates && !candidates[group]) return NO_CANDIDATE;
        return ordered(scores[group]);
    }
    __device__ __forceinline__ u32 ordered(u32 bits) const {
        if ((bits & ~SIGN & ALL) > INFINITE) bits = SIGN | INFINITE;  // NaN
        if (bits == SIGN) bits = 0;  // both zeros are one
        return bits & SIGN ? ~bits & ALL : bits | SIGN;
    }
    __device__ __forceinline__ void keys(int first, int items, u32 (&out)[RUN]) const {
#if BLOCK
        #pragma unroll
        for (int j = 0; j < RUN; j++) {
            const int item = first + j;
            u32 best = 0;
            if (item < items)
                for (int i = 0; i < BLOCK; i++) best = max(best, group_key(item * BLOCK + i));
            out[j] = item == items - 1 ? ALL : best;  // the block of the last group always stays
        }
#elif VECTOR
        if (first + RUN <= reach) {
            uint4 raw[sizeof(S) / 2];
            #pragma unroll
            for (int i = 0; i < sizeof(S) / 2; i++) raw[i] = ((const uint4*)(scores + first))[i];
            const u64 allowed = candidates ? *(const u64*)(candidates + first) : ~0ull;
            #pragma unroll
            for (int j = 0; j < RUN; j++)
                out[j] = (allowed >> 8 * j & 255) ? ordered(((const S*)raw)[j]) : NO_CANDIDATE;
            return;
        }
#endif
#if !BLOCK
        #pragma unroll
        for (int j = 0; j < RUN; j++) out[j] = group_key(first + j);
#endif
    }
};

// Sums over the threads before this one, and over all.
__device__ __forceinline__ int2 scan(int2 value, int2* scratch, int2& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int2 sum = value;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
        if (lane >= step) sum.x += x, sum.y += y;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    int2 warps = lane < THREADS / 32 ? scratch[lane] : make_int2(0, 0);  // every warp adds up all of them
    #pragma unroll
    for (int step = 1; step < THREADS / 32; step *= 2) {
        const int x = __shfl_up_sync(~0u, warps.x, step), y = __shfl_up_sync(~0u, warps.y, step);
        if (lane >= step) warps.x += x, warps.y += y;
    }
    total = make_int2(__shfl_sync(~0u, warps.x, THREADS / 32 - 1), __shfl_sync(~0u, warps.y, THREADS / 32 - 1));
    const int x = __shfl_sync(~0u, warps.x, max(warp - 1, 0)), y = __shfl_sync(~0u, warps.y, max(warp - 1, 0));
    return make_int2((warp ? x : 0) + sum.x - value.x, (warp ? y : 0) + sum.y - value.y);
}

extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2) select(
    const S* scores, const i64* visible, const u8* candidates, void* out, i64 groups, i64 k) {
    __shared__ u32 histogram[2048];
    __shared__ int2 scratch[THREADS / 32];
    __shared__ u32 found[2];
    const i64 r = blockIdx.x;
    Row row{scores + r * groups, candidates ? candidates + r * groups : nullptr, (int)max(0ll, min(visible[r], groups))};
#if BLOCK
    const int items = (row.reach + BLOCK - 1) / BLOCK;
    u8* mask = (u8*)out + r * groups;
    for (int i = threadIdx.x; i < groups; i += THREADS) mask[i] = items <= k && i < row.reach;
#else
    const int items = row.reach;
    i64* ids = (i64*)out + r * k;
    if (items <= k)
        for (int i = threadIdx.x; i < k; i += THREADS) ids[i] = i < items ? i : -1;
#endif
    if (items <= k) return;

    const int chunks = (items + CHUNK - 1) / CHUNK, mine = threadIdx.x * RUN;
#if HELD
    constexpr int EACH = 4 / sizeof(S);  // keys of a register
    u32 held[HELD][RUN / EACH];
    #pragma unroll
    for (int c = 0; c < HELD; c++) {
        u32 keys[RUN] = {};
        if (c < chunks) row.keys(c * CHUNK + mine, items, keys);
        #pragma unroll
        for (int j = 0; j < RUN; j += EACH) held[c][j / EACH] = EACH == 1 ? keys[j] : keys[j] | keys[j + EACH - 1] << 16;
    }
#define FOR_CHUNKS _Pragma("unroll") for (int c = 0; c < HELD; c++) if (c < chunks)
#define LOAD(keys) _Pragma("unroll") for (int j = 0; j < RUN; j++) keys[j] = EACH == 1 ? held[c][j] : held[c][j / EACH] >> 16 * (j % EACH) & 0xFFFF
#else
#define FOR_CHUNKS for (int c = 0; c < chunks; c++)
#define LOAD(keys) row.keys(c * CHUNK + mine, items, keys)
#endif

    // The k-th best key, digit by digit, and how many of its equals are kept.
    u32 threshold = 0, least = 0;  // least: the first digit of the k-th best so far
    int wanted = (int)k;
    for (int digit = 0; digit < DIGITS; digit++) {
        const int shift = digit_shift(digit), bits = digit_bits(digit);
        for (int i = threadIdx.x; i < 2048; i += THREADS) histogram[i] = 0;
        __syncthreads();
        const auto find = [&]() {  // the bin of the wanted-th best of those counted, four bins a thread, from the top
            __syncthreads();
            const int high = 2047 - 4 * threadIdx.x;
            int bin[4], sum = 0;
            #pragma unroll
            for (int i = 0; i < 4; i++) sum += bin[i] = histogram[high - i];
            int2 total;
            int before = scan(make_int2(sum, 0), scratch, total).x;
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                if (before < wanted && wanted <= before + bin[i]) found[0] = high - i, found[1] = before;
                before += bin[i];
            }
            __syncthreads();
        };
        FOR_CHUNKS {
            u32 keys[RUN];
            LOAD(keys);
            #pragma unroll
            for (int j = 0; j < RUN; j++) {
                const u32 bin = keys[j] >> shift & ((1 << bits) - 1);
                const bool counts = digit == 0 ? bin >= least : keys[j] >> (shift + bits) == threshold >> (shift + bits);
                if (counts && c * CHUNK + mine + j < items) atomicAdd(&histogram[bin], 1u);
            }
            if (digit == 0 && c == 0 && chunks > 1 && wanted <= CHUNK) {
                find();
                least = found[0];
                __syncthreads();
            }
        }
        find();
        threshold |= found[0] << shift;
        wanted -= found[1];
        __syncthreads();
    }

    int above = 0, equal = 0;  // of the items walked so far
    FOR_CHUNKS {
        u32 keys[RUN];
        LOAD(keys);
        const int first = c * CHUNK + mine;
        int2 own = make_int2(0, 0);
        #pragma unroll
        for (int j = 0; j < RUN; j++) {
            own.x += first + j < items && keys[j] > threshold;
            own.y += first + j < items && keys[j] == threshold;
        }
        int2 total;
        const int2 before = scan(own, scratch, total);
        int greater = above + before.x, same = equal + before.y;
        #pragma unroll
        for (int j = 0; j < RUN; j++) {
            const int item = first + j;
            if (item < items && (keys[j] > threshold || (keys[j] == threshold && same < wanted))) {
#if BLOCK
                for (int g = item * BLOCK; g < min(item * BLOCK + BLOCK, row.reach); g++) mask[g] = 1;
#else
                ids[greater + min(same, wanted)] = item;
#endif
            }
            greater += item < items && keys[j] > threshold;
            same += item < items && keys[j] == threshold;
        }
        above += total.x, equal += total.y;
    }
}
