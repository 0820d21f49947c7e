// Sparse attention of 64 heads x 512 channels: a block goes over rows, and over all the keys of a row.
//
// Plan. Keys are unpacked once for all heads, 64 at a time (the contract's softmax block), into bf16 tiles that serve
// as keys of one product and as values of the other:
//
//     8 warps unpack:        words, gathered a stage ahead  ->  keys [64, 512] in one of two tiles
//     2 x 4 warps multiply:  S = q keys^T  ->  P  ->  out[:, own half of the channels] += P keys
//
// The two warpgroups take turns with S, the softmax and P, which is handed over in the fragments of the tensor cores:
// while one is in the softmax of a block, the other multiplies. Each has 64 x 256 float32 accumulators, 128 registers a
// lane, in two products: with 512 threads the assembler has no room for one of 256 columns. Half a tile is free again
// as soon as both have multiplied it, and is filled while they do the other half.
//
// A tile is 8 panels of 64 channels; in a panel a key has a line of 128 bytes, whose 16-byte chunks are swizzled by the
// key: the layout that wgmma reads both ways, along channels (S) and along keys (P keys), without bank conflicts.
//
// Nothing of a row depends on another: the blocks of even and of odd number are summed up apart, whichever warpgroup
// has them.
//
// grid (rows, or as many blocks as there are multiprocessors; heads / 64). Macros: SHARED_BYTES of a block, MOST_CHOSEN
// (selected places of a row).

constexpr int D = 512, HEADS = 64, KEYS = 64;
constexpr int CHUNKS = D / 8;  // of 16 bytes, in a key
constexpr u32 LINE = 128;      // bytes of 64 channels of a key
constexpr u32 PANEL = KEYS * LINE, TILE = D / 64 * PANEL, GIVEN = HEADS * KEYS * 2;
constexpr float LOG2_E = 1.4426950408889634f, EMPTY_TOP = -1e30f;
constexpr int MULTIPLYING = 256, UNPACKING = 256;

// Shared memory, from a multiple of 1024 on.
constexpr u32 QUERIES = 0, TILES = TILE, GIVENS = 3 * TILE;
constexpr u32 TOPS = GIVENS + 2 * GIVEN;    // float [2, HEADS]: running maxima after a block
constexpr u32 SUMS = TOPS + 2 * HEADS * 4;  // float [2, HEADS]: of a warpgroup
constexpr u32 MARKS = SUMS + 2 * HEADS * 4;  // of each tile: u64 which keys are there, u64 whether it is a row's last
constexpr u32 FULL = MARKS + 32, EMPTY = FULL + 16, READY = EMPTY + 32;  // barriers [tile], [tile, half], [tile]
constexpr u32 CHOSEN = READY + 16, USED = CHOSEN + MOST_CHOSEN * 8;  // int2 [MOST_CHOSEN]; int [unpacking warps]
static_assert(USED + UNPACKING / 8 == SHARED_BYTES, "what is launched with");

struct Call {
    const u16* q;
    const u8* window;
    const i64 *positions, *fresh, *row_slots, *window_floor;
    const u8* ring;
    const u8 *latent, *latent_scale;
    const i64 *page_table, *requests, *selected;
    const float* sink;
    const i64* block_future;
    u16* out;
    int rows, heads, window_len, ring_len, groups, chosen;
    i64 window_row, ring_slot, ring_row, latent_page, latent_group, scale_page, scale_group;
    i64 table_row, table_page, selected_row, selected_place;
    float scale;
};

__device__ __forceinline__ uint4 load_once(const u8* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ void store_shared16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <typename T> __device__ __forceinline__ T* shared_pointer(u32 offset) {
    extern __shared__ __align__(1024) u8 memory[];
    return (T*)(memory + offset);
}
__device__ __forceinline__ float exp2_(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---- unpacking -----------------------------------------------------------------------------------------------------
//
// A warp unpacks eight keys of a tile, a lane 16 bytes at a time: eight lanes next to each other do the same channels
// of eight keys, which lie in different banks. A stage is what a lane holds at once: its 64 bytes of a latent, or of
// half the channels of a window key. The next one is loaded as soon as it is unpacked, to arrive while tiles are used.

// Eight nibbles of e2m1 times the factor, in order: a magnitude selects the two bytes of its bf16 from tables of eight.
__device__ __forceinline__ uint4 unpack_e2m1(u32 word, u32 factor) {
    u32 pair[4];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 magnitude = (word & 0x77777777u) >> 16 * i;
        u32 high = select_bytes(0x3F3F3F00, 0x40404040, magnitude);
        const u32 low = select_bytes(0xC0800000, 0xC0804000, magnitude);
        high |= select_bytes(word, word << 4, i ? 0x3726 : 0x1504) & 0x80808080u;  // signs
        pair[2 * i] = mul_bf16x2(select_bytes(low, high, 0x5140), factor);
        pair[2 * i + 1] = mul_bf16x2(select_bytes(low, high, 0x7362), factor);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

__device__ __forceinline__ uint4 unpack_e4m3(u32 left, u32 right, float factor) {
    u32 pair[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = from_e4m3((i < 2 ? left : right) >> 16 * (i % 2));
        pair[i] = pack_bf16(two.x * factor, two.y * factor);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

__device__ __forceinline__ float from_e8m0(u32 byte) {
    return __uint_as_float(byte == 255 ? 0x7FFFFFFF : byte ? byte << 23 : 1u << 22);
}

__device__ __forceinline__ void unpackers_together() { asm volatile("bar.sync 2, %0;" :: "n"(UNPACKING) : "memory"); }

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }  // into a register of the warp
__device__ __forceinline__ i64 uniform(i64 x) {
    return (i64)(u32)uniform((int)x) | (i64)uniform((int)(x >> 32)) << 32;
}

__device__ __forceinline__ void unpack_rows(const Call& call, u32 base) {
    const int thread = threadIdx.x % UNPACKING, warp = uniform(thread / 32), lane = thread % 32;
    const int sub = lane % 8, side = lane / 8 % 2, end = lane / 16, own = 8 * warp + sub;  // own: key of a tile
    const u32 line = base + TILES + end * (4 * PANEL) + own * LINE;
    int2* chosen = shared_pointer<int2>(CHOSEN);
    int* used = shared_pointer<int>(USED);
    u32 tile = 0, parity = 1;

    for (int row = blockIdx.x; row < call.rows; row += gridDim.x) {
        // Window: slot i of the row holds position first + i; the batch holds the slots from ``ready`` on.
        const i64 position = call.positions[row], floor = call.window_floor[row], fresh = call.fresh[row];
        const i64 first = call.block_future ? floor : position - call.window_len + 1;
        const i64 last = call.block_future ? position + call.block_future[row] : position;
        const int count = uniform((int)max(last - first + 1, 0ll));
        const int lowest = uniform((int)min(max(max(first, floor), 0ll) - first, (i64)count));
        const int ready = uniform((int)min(max(position - first - fresh, 0ll), (i64)count));
        const u32 first_low = uniform((int)first);
        const int begin = lowest / KEYS * KEYS;
        const int windows = 2 * max((count - begin + KEYS - 1) / KEYS, 1);  // a row without keys has one block
        const i64 batch = uniform((row - (position - first)) * call.window_row);
        const i64 ring = uniform(call.row_slots[row] * call.ring_slot);

        uint4 words[4], scales;
        bool present;
        auto load = [&](int stage) {
            const u8 *codes, *scale;
            if (stage < windows) {
                const int slot = begin + stage / 2 * KEYS + own;
                present = slot >= lowest && slot < count;
                codes = slot >= ready ? call.window + batch + slot * call.window_row
                                      : call.ring + ring + (first_low + slot) % (u32)call.ring_len * call.ring_row;
                scale = codes + D;
                codes += 16 * side + 256 * end + stage % 2 * 128;
            } else {
                const int2 at = chosen[(stage - windows) * KEYS + own];
                present = at.y >= 0;
                codes = call.latent + at.x * call.latent_page + at.y * call.latent_group + 16 * side + 128 * end;
                scale = call.latent_scale + at.x * call.scale_page + at.y * call.scale_group + 16 * end;
            }
            const uint4 zero = make_uint4(0, 0, 0, 0);
            #pragma unroll
            for (int i = 0; i < 4; i++) words[i] = present ? load_once(codes + 32 * i) : zero;
            scales = present ? load_once(scale) : zero;
        };
        load(0);

        // Page and group in it of every selected place, behind the first loads.
        unpackers_together();  // nobody reads those of the last row any more
        const i64* selected = call.selected + row * call.selected_row;
        const i64* table = call.chosen ? call.page_table + call.requests[row] * call.table_row : nullptr;
        int reach = 0;
        for (int start = 0; start < call.chosen; start += 2 * UNPACKING) {
            int id[2], page[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int place = start + i * UNPACKING + thread;
                id[i] = place < call.chosen ? (int)selected[place * call.selected_place] : -1;
            }
            #pragma unroll
            for (int i = 0; i < 2; i++) page[i] = id[i] < 0 ? 0 : (int)table[id[i] / call.groups * call.table_page];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int place = start + i * UNPACKING + thread;
                if (id[i] >= 0) reach = place + 1;
                chosen[place] = make_int2(page[i], id[i] < 0 ? -1 : id[i] % call.groups);
            }
        }
        reach = __reduce_max_sync(~0u, reach);
        if (lane == 0) used[warp] = reach;
        unpackers_together();
        #pragma unroll
        for (int i = 0; i < UNPACKING / 32; i++) reach = max(reach, used[i]);
        const int stages = windows + uniform((reach + KEYS - 1) / KEYS);

        for (int stage = 0; stage < stages; stage++) {
            const bool window = stage < windows;
            const u32 keys = line + tile * TILE;
            u8* marks = shared_pointer<u8>(MARKS + 16 * tile);
            if (!window || stage % 2 == 0) barrier_wait(base + EMPTY + 16 * tile + 8 * (warp / 4), parity);
            const u32 there = __ballot_sync(~0u, present);
            if (lane == 0) marks[warp] = (u8)there;
            if (window) {
                const int part = stage % 2;  // of the channels
                const u32 chunk = 16 * (2 * side ^ sub), place = keys + part * (2 * PANEL);
                const u32 bytes = end ? (part ? scales.w : scales.z) : part ? scales.y : scales.x;
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float factor = from_e8m0(bytes >> 8 * i & 0xFF);
                    const u32 panel = place + i / 2 * PANEL;
                    const u32 left = chunk ^ 64 * (i % 2), right = left ^ 16;
                    store_shared16(panel + left, unpack_e4m3(words[i].x, words[i].y, factor));
                    store_shared16(panel + right, unpack_e4m3(words[i].z, words[i].w, factor));
                }
            } else {
                const u32 chunk = 16 * (4 * side ^ sub);
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 four = i == 0 ? scales.x : i == 1 ? scales.y : i == 2 ? scales.z : scales.w;
                    const float2 two = from_e4m3(four >> 16 * side);
                    const u32 left = pack_bf16(two.x, two.x), right = pack_bf16(two.y, two.y), panel = keys + i * PANEL;
                    store_shared16(panel + chunk, unpack_e2m1(words[i].x, left));
                    store_shared16(panel + (chunk ^ 16), unpack_e2m1(words[i].y, left));
                    store_shared16(panel + (chunk ^ 32), unpack_e2m1(words[i].z, right));
                    store_shared16(panel + (chunk ^ 48), unpack_e2m1(words[i].w, right));
                }
            }
            if (!window || stage % 2) {
                if (lane == 0 && warp == 0) *(u64*)(marks + 8) = stage == stages - 1;
                fence_async();
                __syncwarp();
                if (lane == 0) barrier_arrive(base + FULL + 8 * tile);
                tile ^= 1, parity ^= tile == 0;
            }
            if (stage + 1 < stages) load(stage + 1);
        }
    }
}

// ---- multiplying ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void together() { asm volatile("bar.sync 1, %0;" :: "n"(MULTIPLYING) : "memory"); }

// Lines of 128 swizzled bytes, groups of eight of them neighbours; ``panels``: bytes to the next 64 channels, of an
// operand that lies along them.
__device__ __forceinline__ u64 swizzled(u32 address, u32 panels) {
    return descriptor(address, panels, 8 * LINE) | 1ull << 62;
}

// Queries of a row into their tile.
__device__ __forceinline__ void load_queries(const Call& call, i64 row, u32 tile) {
    const int chunk = threadIdx.x % CHUNKS;
    #pragma unroll
    for (int i = 0; i < HEADS * CHUNKS / MULTIPLYING; i++) {
        const int head = threadIdx.x / CHUNKS + MULTIPLYING / CHUNKS * i;
        const u16* from = call.q + (row * call.heads + blockIdx.y * HEADS + head) * D + chunk * 8;
        const u32 to = tile + chunk / 8 * PANEL + head * LINE + (chunk % 8 ^ head % 8) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
    }
}

__device__ __forceinline__ void multiply_rows(const Call& call, u32 base) {
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int head = thread / 32 * 16 + lane / 4;  // and head + 8
    const u64 queries = swizzled(base + QUERIES, 16);
    const float factor = call.scale * LOG2_E;
    u32 tile = 0, parity = 0;
    float out[2][64];  // of 128 channels each
    const float* sinks = call.sink + blockIdx.y * HEADS + head;
    const float sink[2] = {sinks[0] * LOG2_E, sinks[8] * LOG2_E};

    auto release = [&](u32 tile, int half) {
        if (lane == 0) barrier_arrive(base + EMPTY + 16 * tile + 8 * half);
    };
    auto hold_out = [&] {
        wgmma_hold(out[0]);
        wgmma_hold(out[1]);
    };
    // out += P keys of a tile, either half of its keys a group of its own.
    auto weigh = [&](const u32 (&p)[16], u32 tile, const float (&shrink)[2]) {
        #pragma unroll
        for (int i = 0; i < 128; i++) out[i / 64][i % 64] *= shrink[i / 2 % 2];
        hold_out();
        wgmma_fence();
        const u64 values = swizzled(base + TILES + tile * TILE + warpgroup * (4 * PANEL), PANEL);
        #pragma unroll
        for (int step = 0; step < 4; step++) {
            #pragma unroll
            for (int part = 0; part < 2; part++)
                wgmma_across_n128(out[part], p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                  values + (step * (16 * LINE) + part * (2 * PANEL)) / 16, 1);
            if (step % 2) wgmma_commit();
        }
    };

    if (blockIdx.x < call.rows) load_queries(call, blockIdx.x, base + QUERIES);
    for (i64 row = blockIdx.x; row < call.rows; row += gridDim.x) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async();
        together();
        float top[2] = {EMPTY_TOP, EMPTY_TOP}, sum[2] = {0.f, 0.f};  // times log2(e); over the lane's keys
        #pragma unroll
        for (int i = 0; i < 128; i++) out[i / 64][i % 64] = 0.f;

        bool last = false;
        // S of a tile, which is still under way afterwards.
        auto score = [&](float (&s)[32]) {
            barrier_wait(base + FULL + 8 * tile, parity);
            const u64 keys = swizzled(base + TILES + tile * TILE, 16);
            wgmma_fence();
            #pragma unroll
            for (int step = 0; step < D / 16; step++) {
                const u32 along = (step / 4 * PANEL + step % 4 * 32) / 16;
                wgmma_shared_n64(s, queries + along, keys + along, step > 0);
            }
            wgmma_commit();
        };
        // S -> P, which goes to the other warpgroup with the maxima.
        auto soften = [&](float (&s)[32], u32 (&p)[16], float (&shrink)[2]) {
            const u64* marks = shared_pointer<u64>(MARKS + 16 * tile);
            const u64 there = marks[0];
            last = marks[1];
            if (~there) {
                const u64 mine = there >> 2 * (lane % 4);
                #pragma unroll
                for (int i = 0; i < 32; i++)
                    if (!(mine >> (i / 4 * 8 + i % 2) & 1)) s[i] = __uint_as_float(0xFF800000u);
            }
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = s[2 * half];
                #pragma unroll
                for (int i = 0; i < 8; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                most = fmaxf(top[half], most * factor);
                shrink[half] = exp2_(top[half] - most);
                top[half] = most, sum[half] *= shrink[half];
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float left = exp2_(fmaf(s[4 * i + 2 * half], factor, -most));
                    const float right = exp2_(fmaf(s[4 * i + 2 * half + 1], factor, -most));
                    sum[half] += left + right;
                    p[2 * i + half] = pack_bf16(left, right);
                }
                if (lane % 4 == 0) shared_pointer<float>(TOPS)[tile * HEADS + head + 8 * half] = most;
            }
            #pragma unroll
            for (int i = 0; i < 4; i++)
                store_shared16(base + GIVENS + tile * GIVEN + thread * 16 + i * 2048,
                               make_uint4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]));
            __syncwarp();
            if (lane == 0) barrier_arrive(base + READY + 8 * tile);
        };
        // P of the other warpgroup.
        auto receive = [&](u32 tile, u32 parity, u32 (&p)[16], float (&shrink)[2]) {
            barrier_wait(base + READY + 8 * tile, parity);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 part = load_shared16(base + GIVENS + tile * GIVEN + thread * 16 + i * 2048);
                p[4 * i] = part.x, p[4 * i + 1] = part.y, p[4 * i + 2] = part.z, p[4 * i + 3] = part.w;
            }
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const float most = shared_pointer<float>(TOPS)[tile * HEADS + head + 8 * half];
                shrink[half] = exp2_(top[half] - most);
                top[half] = most, sum[half] *= shrink[half];
            }
        };
        auto next_queries = [&] {  // nobody multiplies those of this row any more
            if (row + gridDim.x < call.rows) load_queries(call, row + gridDim.x, base + QUERIES);
        };
        // Waits for the product with a tile, of which nothing else is under way.
        auto finish = [&](u32 tile) {
            wgmma_wait<1>();
            release(tile, 0);
            wgmma_wait<0>();
            release(tile, 1);
            hold_out();
        };
        auto turn = [&] { tile ^= 1, parity ^= tile == 0; };

        u32 p[16];
        float s[32], shrink[2];
        if (tile == warpgroup) {
            score(s);
            wgmma_wait<0>();
            wgmma_hold(s);
            soften(s, p, shrink);
            weigh(p, tile, shrink);
            if (last) next_queries();
            finish(tile);
            turn();
        }
        while (!last) {
            receive(tile, parity, p, shrink);
            last = shared_pointer<u64>(MARKS + 16 * tile)[1];
            weigh(p, tile, shrink);
            if (last) {
                next_queries();
                finish(tile);
                turn();
                break;
            }
            turn();
            score(s);
            wgmma_wait<2>();
            release(tile ^ 1, 0);
            wgmma_wait<1>();
            release(tile ^ 1, 1);
            wgmma_wait<0>();
            hold_out();
            wgmma_hold(s);
            soften(s, p, shrink);
            weigh(p, tile, shrink);
            if (last) next_queries();
            finish(tile);
            turn();
        }

        // The sink is a key without a value. It may be far above every logit, so both are relative to the larger.
        float* sums = shared_pointer<float>(SUMS);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
            sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
            if (lane % 4 == 0) sums[warpgroup * HEADS + head + 8 * half] = sum[half];
        }
        together();
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = head + 8 * half;
            const float highest = fmaxf(top[half], sink[half]), shrink = exp2_(top[half] - highest);
            const float drained = sink[half] >= top[half] ? 1.f : exp2_(sink[half] - highest);
            const float total = (sums[at] + sums[HEADS + at]) * shrink + drained;
            const float share = total == 0.f ? 0.f : shrink / total;
            u16* to = call.out + (row * call.heads + blockIdx.y * HEADS + at) * D + warpgroup * (D / 2) + lane % 4 * 8;
            #pragma unroll
            for (int i = 0; i < 8; i++) {  // four lanes have eight channels each of four chunks: a chunk to each
                u32 r[4];
                #pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int n = 16 * (i % 4) + 4 * k + 2 * half;
                    r[k] = pack_bf16(out[i / 4][n] * share, out[i / 4][n + 1] * share);
                }
                #pragma unroll
                for (int step = 1; step < 4; step *= 2) {
                    const bool upper = lane & step;
                    #pragma unroll
                    for (int k = 0; k < 2; k++) {
                        u32 &low = r[step == 1 ? 2 * k : k], &high = r[step == 1 ? 2 * k + 1 : k + 2];
                        const u32 got = __shfl_xor_sync(~0u, upper ? low : high, step);
                        (upper ? low : high) = got;
                    }
                }
                *(uint4*)(to + 32 * i) = make_uint4(r[0], r[1], r[2], r[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(MULTIPLYING + UNPACKING, 1) sparse_attention(
    const u16* q, const u8* window, const i64* positions, const i64* fresh, const i64* row_slots,
    const i64* window_floor, const u8* ring, const u8* latent, const u8* latent_scale, const i64* page_table,
    const i64* requests, const i64* selected, const float* sink, const i64* block_future, u16* out,
    i64 rows, i64 heads, i64 window_len, i64 ring_len, i64 groups, i64 chosen,
    i64 window_row, i64 ring_slot, i64 ring_row, i64 latent_page, i64 latent_group, i64 scale_page, i64 scale_group,
    i64 table_row, i64 table_page, i64 selected_row, i64 selected_place, float scale) {
    const Call call{q, window, positions, fresh, row_slots, window_floor, ring, latent, latent_scale, page_table,
                    requests, selected, sink, block_future, out,
                    (int)rows, (int)heads, (int)window_len, (int)ring_len, (int)groups, (int)chosen,
                    window_row, ring_slot, ring_row, latent_page, latent_group, scale_page, scale_group,
                    table_row, table_page, selected_row, selected_place, scale};
    const u32 base = shared_address(shared_pointer<u8>(0));
    if (threadIdx.x == 0) {
        for (int tile = 0; tile < 2; tile++) {
            barrier_init(base + FULL + 8 * tile, UNPACKING / 32);
            barrier_init(base + EMPTY + 16 * tile, MULTIPLYING / 32);
            barrier_init(base + EMPTY + 16 * tile + 8, MULTIPLYING / 32);
            barrier_init(base + READY + 8 * tile, MULTIPLYING / 64);
        }
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLYING) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");  // 256 * (48 + 208) registers are all there are
        unpack_rows(call, base);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        multiply_rows(call, base);
    }
}
