// Index scores: for every row and reachable group, sum over heads of weight * relu(query . key), on FP4 keys.
//
// Plan. The product is computed transposed, keys x queries: a warpgroup takes 64 keys as the left operand, in
// registers, and all heads of ROWS query rows of one request (4 x 32 = 128 columns, say) as the right operand, which
// stays in shared memory. So keys go from the page pool to the tensor cores without touching shared memory, are read
// and dequantised once for all verified rows of a request, and the sum over heads runs along an accumulator row:
// in registers, then over the four lanes that share it.
//
// A lane owns D/4 neighbouring channels of its two keys: one 16-byte load at D = 128, all under one scale. The order
// of channels in a product is free, so the queries are stored in the order in which lanes unpack their nibbles
// (``prepare_queries`` below: cast to FP4, dequantised to bf16, which is exact, and laid out as wgmma reads them).
//
// grid (splits of the groups, rows); only the first of each ROWS rows of a request works, the others leave at once.
// Macros: D, HEADS (a multiple of 8), SOURCE_HEADS (before padding), ROWS (a multiple of 4), GROUPS (per page),
// LOW (round dot, product and sum to bf16), WIDE (float32 weights and scores), ALIGNED (16-byte loads of keys).

#if WIDE
typedef float T;
__device__ __forceinline__ float load(const T* p) { return *p; }
__device__ __forceinline__ T store(float x) { return x; }
#else
typedef u16 T;
__device__ __forceinline__ float load(const T* p) { return __uint_as_float((u32)*p << 16); }
__device__ __forceinline__ T store(float x) { return to_bf16(x); }
#endif

constexpr int COLUMNS = ROWS * HEADS;
constexpr int STEPS = D / 16;                // wgmma instructions of a tile
constexpr int WORDS = D / 32;                // of eight codes, per lane and key
constexpr int ROW_BYTES = HEADS * D * 2;     // of one row's queries
constexpr int PREPARE = 512;                 // threads of prepare_queries
constexpr int CORE = 128;                    // bytes of a core matrix: 8 columns x 8 channels
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

// ---- queries -----------------------------------------------------------------------------------------------------
//
// One block per row. image [R, HEADS/8, D/8, 8 heads, 8 channels] bf16; padded weights [R, HEADS];
// leads [R]: 1 for the first of each ROWS rows of a request.

extern "C" __global__ void __launch_bounds__(PREPARE) prepare_queries(
    const T* query, const T* weight, const i64* requests, u16* image, T* padded, int* leads, i64 count) {
    __shared__ __align__(16) u16 tile[HEADS * D];
    __shared__ int start;
    const i64 row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int block = warp; block < HEADS * WORDS; block += PREPARE / 32) {
        const int head = block / WORDS, channel = block % WORDS * 32 + lane;
        float x = head < SOURCE_HEADS ? load(query + (row * SOURCE_HEADS + head) * D + channel) : 0.f;
        u32 amax = __float_as_uint(x) & 0x7FFFFFFF;  // as integers, so that a NaN wins
        #pragma unroll
        for (int step = 16; step; step /= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
        const u32 scale = power_of_two_scale(max(amax, 0x01C00000u), 6.f);  // at least 6 * 2^-126
        float value = e2m1_round(__fdiv_rn(fabsf(x), __uint_as_float(scale))) * __uint_as_float(scale);
        if (scale == 0x7F800000u) value = __uint_as_float(0x7FFFFFFF);
        // Channel lane * (D/4) + 8w + n of a lane's word w is nibble n; pairs (n, n + 4) go to steps 2w and 2w + 1.
        const int owner = channel / (D / 4), inside = channel % (D / 4), word = inside / 8, nibble = inside % 8;
        const int step = 2 * word + nibble % 4 / 2;
        const int k = 16 * step + 2 * owner + nibble / 4 + 8 * (nibble % 2);
        const u16 bits = (u16)(__float_as_uint(copysignf(value, x)) >> 16);
        tile[head / 8 * (8 * D) + k / 8 * 64 + head % 8 * 8 + k % 8] = bits;
    }
    for (int head = threadIdx.x; head < HEADS; head += PREPARE)
        padded[row * HEADS + head] = head < SOURCE_HEADS ? weight[row * SOURCE_HEADS + head] : (T)0;

    // Where the row's request begins: the last row before it that belongs to another, looked for PREPARE at a time.
    if (threadIdx.x == 0) start = -1;
    __syncthreads();
    const i64 request = requests[row];
    for (i64 end = row; end > 0; end -= PREPARE) {
        const i64 other = end - 1 - threadIdx.x;
        const int last = other >= 0 && requests[other] != request ? (int)other : -1;
        if (last >= 0) atomicMax(&start, last);
        if (__syncthreads_or(last >= 0)) break;
    }
    if (threadIdx.x == 0) leads[row] = (row - (start + 1)) % ROWS == 0;
    for (int i = threadIdx.x; i < ROW_BYTES / 16; i += PREPARE)
        ((uint4*)(image + row * (HEADS * D)))[i] = ((const uint4*)tile)[i];
}

// ---- scores ------------------------------------------------------------------------------------------------------

// Loads run ahead of the product: page ids by two tiles, keys by one. Groups out of reach read the last one in reach,
// which is always there; nobody reads their scores.

struct Pages {  // of a lane's two keys
    i64 id[2];
};
struct Keys {
    u32 codes[2][WORDS];
    u32 scales[2][ALIGNED ? 1 : WORDS];
};
struct Pool {
    const u8 *key, *scale;
    i64 key_page, key_group, scale_page, scale_group;
};

__device__ __forceinline__ int lane_group(i64 first, int half, int last) {
    return min((int)first + (int)(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) + 8 * half, last);
}

__device__ __forceinline__ void load_pages(Pages& pages, const i64* table, i64 first, int last) {
    pages.id[0] = table[lane_group(first, 0, last) / GROUPS];
    pages.id[1] = GROUPS % 16 ? table[lane_group(first, 1, last) / GROUPS] : pages.id[0];
}

__device__ __forceinline__ void load_keys(Keys& keys, const Pages& pages, const Pool& pool, i64 first, int last) {
    const int owner = threadIdx.x % 4;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int group = lane_group(first, half, last) % GROUPS;
        const u8* codes = pool.key + pages.id[half] * pool.key_page + group * pool.key_group + owner * (D / 8);
        const u8* scales = pool.scale + pages.id[half] * pool.scale_page + group * pool.scale_group;
#if ALIGNED
        static_assert(D == 128, "");
        const uint4 all = *(const uint4*)codes;
        keys.codes[half][0] = all.x, keys.codes[half][1] = all.y;
        keys.codes[half][2] = all.z, keys.codes[half][3] = all.w;
        keys.scales[half][0] = scales[owner];
#else
        #pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const u8* p = codes + 4 * w;
            keys.codes[half][w] = p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24;
            keys.scales[half][w] = scales[(owner * (D / 4) + 8 * w) / 32];
        }
#endif
    }
}

// a[step][register] of the left operand: registers 0 and 2 are the lane's first key, 1 and 3 its second.
__device__ __forceinline__ void dequantise(const Keys& keys, u32 (&a)[STEPS][4]) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        #pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 pair[4];
            e2m1_pairs(keys.codes[half][w], pair);
            const u32 byte = keys.scales[half][ALIGNED ? 0 : w], scale = e2m1_scale(byte);
            #pragma unroll
            for (int i = 0; i < 4; i++) a[2 * w + i / 2][half + 2 * (i % 2)] = mul_bf16x2(pair[i], scale);
        }
    }
    u32 largest = 0;
    #pragma unroll
    for (int half = 0; half < 2; half++)
        #pragma unroll
        for (int w = 0; w < (ALIGNED ? 1 : WORDS); w++) largest = max(largest, keys.scales[half][w]);
    if (largest > 128) {  // rare: scales beyond what one factor holds
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            #pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const u32 excess = e2m1_excess(keys.scales[half][ALIGNED ? 0 : w]);
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32& value = a[2 * w + i / 2][half + 2 * (i % 2)];
                    value = mul_bf16x2(value, excess);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, COLUMNS <= 128 ? 3 : 2) index_scores(
    const u16* image, const T* padded, const int* leads, const u8* key, const u8* key_scale, const i64* page_table,
    const i64* requests, const i64* visible, T* out, i64 count, i64 table_width, i64 tiles_per_block, i64 key_page,
    i64 key_group, i64 scale_page, i64 scale_group) {
    extern __shared__ __align__(128) u8 queries[];
    const i64 row = blockIdx.y;
    if (!leads[row]) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, owner = lane % 4;
    const i64 request = requests[row], width = table_width * GROUPS;
    const i64* pages = page_table + request * table_width;
    const i64 begin = blockIdx.x * tiles_per_block * 64;
    const i64 end = min(begin + tiles_per_block * 64, width);

    int rows = 1;
    while (rows < ROWS && row + rows < count && requests[row + rows] == request) rows++;
    i64 reach = 0, mine[ROWS / 4];  // of all rows; of the rows whose sums end up in this lane
    for (int t = 0; t < rows; t++) reach = max(reach, visible[row + t]);
    reach = min(reach, width);
    #pragma unroll
    for (int n = 0; n < ROWS / 4; n++) mine[n] = 4 * n + owner < rows ? visible[row + 4 * n + owner] : 0;

    auto write = [&](i64 first, int n, int half, float sum) {
        const i64 group = first + 16 * warp + lane / 4 + 8 * half;
        if (4 * n + owner < rows && group < end)
            out[(row + 4 * n + owner) * width + group] = store(group < mine[n] ? sum : MINUS_INFINITY);
    };

    i64 first = begin;
    if (begin < reach) {
        const Pool pool{key, key_scale, key_page, key_group, scale_page, scale_group};
        const int last = (int)min(reach, end) - 1;
        Pages ahead;
        Keys keys;
        load_pages(ahead, pages, first, last);
        load_keys(keys, ahead, pool, first, last);
        load_pages(ahead, pages, first + 64, last);
        const uint4* source = (const uint4*)(image + row * (HEADS * D));
        for (int i = threadIdx.x; i < rows * (ROW_BYTES / 16); i += 128) ((uint4*)queries)[i] = source[i];
        fence_async();
        __syncthreads();
        const u64 b = descriptor(shared_address(queries), CORE, D / 8 * CORE);

#if LOW
        u32 weight[COLUMNS / 8];
#else
        float weight[COLUMNS / 4];
#endif
        #pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            const int t = 8 * i / HEADS;
            const T* w = padded + (row + t) * HEADS + 8 * i % HEADS + 2 * owner;
#if LOW
            weight[i] = t < rows ? *(const u32*)w : 0;
#else
            weight[2 * i] = t < rows ? load(w) : 0.f;
            weight[2 * i + 1] = t < rows ? load(w + 1) : 0.f;
#endif
        }

        for (; first <= last; first += 64) {
            u32 a[STEPS][4];
            dequantise(keys, a);
            load_keys(keys, ahead, pool, first + 64, last);
            load_pages(ahead, pages, first + 128, last);
            float dot[COLUMNS / 2];
            wgmma_fence();
            #pragma unroll
            for (int step = 0; step < STEPS; step++)
                PASTE(wgmma_n, WGMMA)(dot, a[step][0], a[step][1], a[step][2], a[step][3], b + step * (2 * CORE / 16),
                                      step > 0);
            wgmma_commit();
            wgmma_wait<0>();
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum[ROWS];
                #pragma unroll
                for (int t = 0; t < ROWS; t++) {
                    sum[t] = 0.f;
                    #pragma unroll
                    for (int i = t * HEADS / 8; i < (t + 1) * HEADS / 8; i++) {
                        const float left = dot[4 * i + 2 * half], right = dot[4 * i + 2 * half + 1];
#if LOW
                        u32 pair;
                        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(right), "f"(left));
                        pair = mul_bf16x2(pair, weight[i]);
                        sum[t] += low_float(pair);
                        sum[t] += high_float(pair);
#else
                        float l, r;
                        asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(l) : "f"(left));
                        asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(right));
                        sum[t] = fmaf(l, weight[2 * i], sum[t]);
                        sum[t] = fmaf(r, weight[2 * i + 1], sum[t]);
#endif
                    }
                }
                // Lane o of a quad ends with the sums of rows o, o + 4, ...; the order of additions is the same in all.
                #pragma unroll
                for (int t = 0; t < ROWS; t += 2) {
                    const bool odd = owner & 1;
                    const float given = __shfl_xor_sync(~0u, odd ? sum[t] : sum[t + 1], 1);
                    sum[t / 2] = (odd ? sum[t + 1] : sum[t]) + given;
                }
                #pragma unroll
                for (int t = 0; t < ROWS / 2; t += 2) {
                    const bool upper = owner & 2;
                    const float given = __shfl_xor_sync(~0u, upper ? sum[t] : sum[t + 1], 2);
                    write(first, t / 2, half, (upper ? sum[t + 1] : sum[t]) + given);
                }
            }
        }
    }
    for (; first < end; first += 64)
        for (int n = 0; n < ROWS / 4; n++)
            for (int half = 0; half < 2; half++) write(first, n, half, MINUS_INFINITY);
}
