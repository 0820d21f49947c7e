// Which slot computes which row's expert, where an expert lies in several: the reference's numbers, to the bit.
//
// Plan. One cluster of eight blocks. Each counts its part of the pairs of a row and an expert, warp by warp, so that a
// pair learns how many of its expert its warp has seen before it. Blocks read each other's counts once; from then on
// each works out the same division by itself, which is quicker than sending it, and assigns its own pairs. In a round
// of the division four threads add up the weights of an expert's ranks and divide, then four add up a rank's rows and
// move its weight: two barriers, of no more warps than that takes. What they add up they keep a list of, in registers.
// Sums are integers, so their order is free.
// Macros: EXPERTS, SHARED (rows of slots), RANKS.

constexpr int BLOCKS = 8, THREADS = 512, WARPS = THREADS / 32, FOUR = 4;
constexpr int AT_ONCE = 4;  // pairs of a lane whose loads are under way together
// What a thread has in registers: of an expert's ranks, and of a rank's experts twice as many as it has on average.
constexpr int LISTED_RANKS = 2, LISTED_EXPERTS = SHARED <= RANKS ? 2 : SHARED <= 4 * RANKS ? 4 : 8;
constexpr int RANK_WORDS = (RANKS + 31) / 32, EXPERT_WORDS = (SHARED + 31) / 32;
constexpr int BITS = 12, POINT = 32, EVEN = 16 << BITS, HIGHEST = 24 << BITS, FAR = 3 << BITS;
constexpr int STEP = 24, FASTEST = 128, MOMENTUM = 192, RISING = 9;  // turns until the momentum is full
constexpr int WORKERS = FOUR * (SHARED > RANKS ? SHARED : RANKS);
constexpr int BUSY = WORKERS >= THREADS ? THREADS : (WORKERS + 31) / 32 * 32;  // threads that take part in rounds

__device__ __forceinline__ void busy_barrier() { asm volatile("bar.sync 1, %0;" :: "n"(BUSY) : "memory"); }
// Says nothing about what was written.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ u32 load_from_block(const u32* here, u32 block) {
    u32 value;
    asm volatile("{.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %1, %2;\n"
                 "ld.shared::cluster.u32 %0, [there];}" : "=r"(value) : "r"(shared_address(here)), "r"(block) : "memory");
    return value;
}

__device__ __forceinline__ int exp2_of(int log) {
    const int fraction = log & ((1 << BITS) - 1);
    const u32 mantissa = (1 << BITS) + (fraction * (2688 + (fraction * 1408 >> BITS)) >> BITS);
    return (int)((u64)mantissa << (log >> BITS) >> BITS);
}
__device__ __forceinline__ int log2_of(float x) {
    const int bits = __float_as_int(x) >> (23 - BITS), fraction = bits & ((1 << BITS) - 1);
    return bits - fraction + (fraction * (5504 - (fraction * 1408 >> BITS)) >> BITS);
}
// Rows of an expert for a weight of 1, with POINT bits behind the point.
__device__ __forceinline__ i64 part_of(int rows, int total) {
    return (i64)(__fdiv_rn((float)rows, (float)max(total, 1)) * 4294967296.0f);
}
// Where the rows of the ranks up to one end, if these have ``upto`` of the weights.
__device__ __forceinline__ int end_of(int upto, int total, i64 part, int rows) {
    return upto == total ? rows : min((int)(upto * part + (1ll << (POINT - 1)) >> POINT), rows);
}
template <typename T> __device__ __forceinline__ T sum_of_four(T x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The bits of words, all (STEP 1) or every fourth from ``first`` on: do(bit) until it says true.
template <int WORDS, int STEP, typename F> __device__ __forceinline__ void for_bits(const u32* words, int first, F&& act) {
    #pragma unroll
    for (int word = 0; word < WORDS; word++)
        for (u32 left = words[word] & (STEP == 1 ? ~0u : 0x11111111u << first); left; left &= left - 1)
            if (act(word * 32 + __ffs(left) - 1)) return;
}
// Every fourth of the bits of words, to add up what they stand for; ``none``: a place that is always 0.
template <int WORDS, int LISTED> struct List {
    const u32* words;
    int member, length, at[LISTED];

    __device__ __forceinline__ void make(const u32* bits, int which, int none) {
        words = bits, member = which, length = 0;
        #pragma unroll
        for (int i = 0; i < LISTED; i++) at[i] = none;
        if (bits) for_bits<WORDS, FOUR>(bits, which, [&](int bit) {
            #pragma unroll
            for (int i = LISTED - 1; i > 0; i--) at[i] = at[i - 1];
            at[0] = bit;
            length++;
            return false;
        });
    }
    template <typename T> __device__ __forceinline__ T sum(const T* of) const {
        T sum = 0;
        if (length <= LISTED) {
            #pragma unroll
            for (int i = 0; i < LISTED; i++) sum += of[at[i]];
        } else {
            for_bits<WORDS, FOUR>(words, member, [&](int bit) { sum += of[bit]; return false; });
        }
        return sum_of_four(sum);
    }
};

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) assign_slots(
    const i64* ids, const i64* home, const int* shared, const int* slots, i64* out, i64* counts, i64 pairs,
    i64 per_rank, i64 rounds) {
    extern __shared__ u32 seen[];  // [WARPS][EXPERTS] pairs of each expert in a warp, then before it
    __shared__ u32 own[EXPERTS], earlier[EXPERTS];  // pairs of each expert in this block, in the blocks before
    __shared__ int total[EXPERTS], place[EXPERTS];
    __shared__ u32 ranks_of[SHARED][RANK_WORDS], experts_of[RANKS][EXPERT_WORDS];
    __shared__ int sharing[SHARED];  // the expert of each row of slots
    // The even division in front, the best one behind.
    __shared__ i64 part[2][SHARED + 1];
    __shared__ int weights_of[2][SHARED], power[2][RANKS + 1], taken[2][RANKS];
    __shared__ int fixed[RANKS], movable, live, momentum[RISING + 1];
    __shared__ int weight_sum[4], highest[4];  // of a round, its number modulo 4
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, member = thread % FOUR;
    const u32 block = cluster_rank();

    launch_dependents();
    for (int i = thread; i < WARPS * EXPERTS; i += THREADS) seen[i] = 0;
    for (int i = thread; i < RANKS * EXPERT_WORDS; i += THREADS) experts_of[0][i] = 0;
    for (int i = thread; i < SHARED * RANK_WORDS; i += THREADS) ranks_of[0][i] = 0;
    for (int i = thread; i < RANKS; i += THREADS)
        fixed[i] = taken[0][i] = taken[1][i] = 0, power[0][i] = power[1][i] = exp2_of(EVEN);
    if (thread < 4) highest[thread] = 0, weight_sum[thread] = thread ? 0 : RANKS * EVEN;
    if (thread <= RISING) momentum[thread] = min(MOMENTUM, 256 * thread / (thread + 3));
    if (thread == 0) movable = live = power[1][RANKS] = part[1][SHARED] = 0;
    wait_for_previous();

    // Pairs of this block and warp, and where experts lie.
    const int each = (int)((pairs + BLOCKS * WARPS - 1) / (BLOCKS * WARPS));
    const i64 first = min((i64)(block * WARPS + warp) * each, pairs);
    const int number = (int)(min(first + each, pairs) - first);
    int id[AT_ONCE];
    const auto load_ids = [&](int start) {
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = start + 32 * j + lane;
            const i64 expert = i < number ? ids[first + i] : -1;
            id[j] = (u64)expert < EXPERTS ? (int)expert : -1;
        }
    };
    load_ids(0);
    const int lies = thread < EXPERTS ? (int)home[thread] : 0, which_expert = thread < SHARED ? shared[thread] : 0;
    const int slot = thread < SHARED * RANKS ? slots[thread] : -1;
    __syncthreads();
    for (int i = thread; i < EXPERTS; i += THREADS) place[i] = i == thread ? lies : (int)home[i];
    for (int i = thread; i < SHARED; i += THREADS) sharing[i] = i == thread ? which_expert : shared[i];
    for (int i = thread; i < SHARED * RANKS; i += THREADS)
        if ((i == thread ? slot : slots[i]) >= 0) {
            const int k = i / RANKS, r = i % RANKS;
            atomicOr(&ranks_of[k][r / 32], 1u << r % 32);
            atomicOr(&experts_of[r][k / 32], 1u << k % 32);
        }
    u32* before = seen + warp * EXPERTS;
    i64 held[AT_ONCE];  // the first pairs of a lane: the expert and how many of it came before; later ones wait in out
    for (int start = 0; start < number; start += 32 * AT_ONCE) {
        if (start) load_ids(start);
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const u32 same = __match_any_sync(~0u, id[j]), lower = __popc(same & ((1u << lane) - 1));
            const u32 nth = (id[j] >= 0 ? before[id[j]] : 0) + lower;
            __syncwarp();
            if (start == 0) held[j] = (i64)nth << 32 | (u32)id[j];
            else if (start + 32 * j + lane < number) out[first + start + 32 * j + lane] = (i64)nth << 32 | (u32)id[j];
            if (id[j] >= 0 && lower == 0) before[id[j]] = nth + __popc(same);
            __syncwarp();
        }
    }
    __syncthreads();
    for (int e = thread; e < EXPERTS; e += THREADS) {
        u32 found[WARPS], sum = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) found[w] = seen[w * EXPERTS + e];
        #pragma unroll
        for (int w = 0; w < WARPS; w++) seen[w * EXPERTS + e] = sum, sum += found[w];
        own[e] = sum;
    }
    cluster_arrive();
    constexpr int GROUPS = BUSY / FOUR, EXPERTS_EACH = (SHARED + GROUPS - 1) / GROUPS;
    const int r = thread / FOUR;
    const bool ranked = r < RANKS;
    List<RANK_WORDS, LISTED_RANKS> ranks[EXPERTS_EACH];
    List<EXPERT_WORDS, LISTED_EXPERTS> experts;
    #pragma unroll
    for (int i = 0; i < EXPERTS_EACH; i++) {
        const int k = r + i * GROUPS;
        ranks[i].make(k < SHARED ? ranks_of[k] : nullptr, member, RANKS);
    }
    experts.make(ranked ? experts_of[r] : nullptr, member, SHARED);
    cluster_wait();
    for (int e = thread; e < EXPERTS; e += THREADS) {
        u32 found[BLOCKS], lower = 0, sum = 0;
        #pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) found[b] = load_from_block(own + e, b);
        #pragma unroll
        for (u32 b = 0; b < BLOCKS; b++) lower += b < block ? found[b] : 0, sum += found[b];
        earlier[e] = lower;
        total[e] = (int)sum;
        atomicAdd(&live, (int)sum);
        if (place[e] >= 0) atomicAdd(&fixed[place[e] / (int)per_rank], (int)sum);
        else atomicAdd(&movable, (int)sum);
        if (block == 0) counts[e] = sum;
    }
    cluster_arrive_relaxed();  // a block may end when all have read its counts
    __syncthreads();

    if (thread < BUSY) {
        int rows[EXPERTS_EACH];
        #pragma unroll
        for (int i = 0; i < EXPERTS_EACH; i++) {
            const int k = r + i * GROUPS, e = k < SHARED ? sharing[k] : -1;
            rows[i] = e >= 0 ? total[e] : 0;
        }
        const int mean = log2_of((float)(((i64)live << POINT) / RANKS));
        const int step = (int)min((i64)STEP * live / max(movable, 1), (i64)FASTEST);
        const i64 base = ranked ? (i64)fixed[r] << POINT : 0;
        int weight = EVEN, own_power = exp2_of(EVEN), best = EVEN, velocity = 0, lowest = 0x7F800000;
        for (int turn = 0; turn < rounds; turn++) {
            #pragma unroll
            for (int i = 0; i < EXPERTS_EACH; i++) {
                const int sum = ranks[i].sum(power[1]), k = r + i * GROUPS;
                if (member == 0 && k < SHARED) part[1][k] = part_of(rows[i], sum);
            }
            busy_barrier();
            const int middle = weight_sum[turn % 4] / RANKS, pull = velocity * momentum[min(turn, RISING)] >> 8;
            const float load = (float)(base + own_power * experts.sum(part[1]));
            const int off = min(max(log2_of(load) - mean, -FAR), FAR), looked_at = weight;
            velocity = pull - (off * step >> 4);
            weight = min(max(weight + velocity + EVEN - middle, 0), HIGHEST);
            own_power = exp2_of(weight);
            if (ranked && member == 0) power[1][r] = own_power;
            // Of the warp first: atomics at one address follow each other.
            const int most = __reduce_max_sync(~0u, ranked ? __float_as_int(load) : 0);
            const int weights = __reduce_add_sync(~0u, ranked && member == 0 ? weight : 0);
            if (lane == 0) atomicMax(&highest[turn % 4], most), atomicAdd(&weight_sum[(turn + 1) % 4], weights);
            busy_barrier();
            const int peak = highest[turn % 4];
            if (peak < lowest) lowest = peak, best = looked_at;
            if (thread == 0) highest[(turn + 2) % 4] = weight_sum[(turn + 3) % 4] = 0;
        }
        if (ranked && member == 0) power[1][r] = exp2_of(best);
        busy_barrier();
        for (int i = thread; i < 2 * SHARED; i += BUSY) {
            const int which = i / SHARED, k = i % SHARED, all = sharing[k] >= 0 ? total[sharing[k]] : 0;
            int sum = 0, upto = 0, end = 0;
            for_bits<RANK_WORDS, 1>(ranks_of[k], 0, [&](int r) { sum += power[which][r]; return false; });
            const i64 each = part_of(all, sum);
            weights_of[which][k] = sum, part[which][k] = each;
            for_bits<RANK_WORDS, 1>(ranks_of[k], 0, [&](int r) {
                upto += power[which][r];
                const int next = end_of(upto, sum, each, all);
                atomicAdd(&taken[which][r], next - end);
                end = next;
                return false;
            });
        }
    }
    __syncthreads();

    // In whole rows, the even division may be the better one.
    int peaks[2] = {};
    for (int i = lane; i < RANKS; i += 32)
        peaks[0] = max(peaks[0], fixed[i] + taken[0][i]), peaks[1] = max(peaks[1], fixed[i] + taken[1][i]);
    const int which = __reduce_max_sync(~0u, peaks[1]) < __reduce_max_sync(~0u, peaks[0]);
    for (int start = 0; start < number; start += 32 * AT_ONCE) {
        i64 pair[AT_ONCE];
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = start + 32 * j + lane;
            pair[j] = i >= number ? -1 : start == 0 ? held[j] : out[first + i];
        }
        int at[AT_ONCE];
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int e = (int)pair[j];
            at[j] = e < 0 ? 0 : place[e];
            if (at[j] < 0) {  // the first rank whose rows, with those of the ranks before it, cover this one
                const int k = -1 - at[j], nth = (int)(pair[j] >> 32) + (int)(before[e] + earlier[e]);
                const int sum = weights_of[which][k], all = total[e];
                const i64 each = part[which][k];
                int upto = 0, found = 0;
                for_bits<RANK_WORDS, 1>(ranks_of[k], 0, [&](int r) {
                    found = r;
                    upto += power[which][r];
                    return nth < end_of(upto, sum, each, all);
                });
                at[j] = -1 - (k * RANKS + found);
            }
        }
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (at[j] < 0) at[j] = slots[-1 - at[j]];
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (pair[j] >= 0) out[first + start + 32 * j + lane] = (int)pair[j] < 0 ? -1 : at[j];  // -1: of no expert
    }
    cluster_wait();
}
