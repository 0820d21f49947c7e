// What TileLang emits for kernels on a whole core, one cube and two vector units: three coroutines that share L1 and
// wait for each other. As in device.h our reading of the emitted code; the order of pipelines inside a unit is that of
// the text. What shows beside what device.h sees: units that wait for each other for ever, memory outside L1 or L0C.
#pragma once
#include "device.h"
#include <sys/mman.h>

#define __mix__(cubes, vectors)
#define __cbuf__
#define __cc__
#define __ca__
#define __cb__
#define ASC_IS_AIC (unit == CUBE)
#define ASC_IS_AIV (unit != CUBE)
using asc_dual_dst_mode = int;
using asc_unit_flag_mode = int;
using asc_quant_mode = int;
using asc_relu_pre_mode = int;

static constexpr size_t L1_SIZE = 512 << 10, L0_SIZE = 64 << 10, L0C_SIZE = 256 << 10, BLOCK = 32;  // bytes
static constexpr int CUBE = 0, UNITS = 3, FRACTAL = 16;                        // rows and bf16 columns of a fractal

struct Unit {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[1 << 20]};
    bool done;
    int flags[8][8][16];
    int arrived[32];
    uint8_t *ub;
};
static Unit units[UNITS];
static int unit;
static long progress;  // of all units, to see that none of them makes any
static ucontext_t core_context;
static std::function<void()> unit_body;
alignas(64) static uint8_t L1[L1_SIZE], L0A[L0_SIZE], L0B[L0_SIZE], L0C[L0C_SIZE];
static int fractal_rows;  // of the next copy into L1

inline int asc_get_sub_block_id() { return unit - 1; }
inline void asc_sync_pipe(pipe_t) {}  // what was given to a pipeline before is done: so it is, in the order of the text

// ---- units wait for each other -------------------------------------------------------------------------------------

inline void asc_sync_intra_arrive(pipe_t, int id) {
    // The cube names a vector unit by 16; a vector unit's flags come to the cube the same way.
    Unit &to = unit == CUBE ? units[1 + id / 16] : units[CUBE];
    ++to.arrived[unit == CUBE ? id % 16 : id + 16 * (unit - 1)];
    ++progress;
}
inline void asc_sync_intra_wait(pipe_t, int id) {
    while (!units[unit].arrived[id]) swapcontext(&units[unit].context, &core_context);
    --units[unit].arrived[id];
    ++progress;
}
inline void unit_main() {
    unit_body();
    units[unit].done = true;
    ++progress;
    swapcontext(&units[unit].context, &core_context);
}

// A buffer between pages that nothing may touch, its end at the end of its pages.
inline uint8_t *guarded_buffer() {
    const size_t page = 4096, size = (UB_SIZE + page - 1) / page * page;
    auto *area = (uint8_t *)mmap(nullptr, size + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(area, page, PROT_NONE);
    mprotect(area + page + size, page, PROT_NONE);
    return area + page + size - UB_SIZE;
}

inline void run_core(int core, uint8_t *first_ub, std::function<void()> kernel) {
    static uint8_t *second_ub = guarded_buffer();
    unit_body = kernel;
    block_idx = core;
    std::memset(L1, 0xAB, sizeof L1);
    std::memset(L0A, 0xAB, sizeof L0A);
    std::memset(L0B, 0xAB, sizeof L0B);
    std::memset(L0C, 0xAB, sizeof L0C);
    for (int i = 0; i < UNITS; ++i) {
        Unit &u = units[i];
        u.done = false;
        u.ub = i == 2 ? second_ub : first_ub;  // the cube names places in the vector units' buffers by the first
        std::memset(u.flags, 0, sizeof u.flags);
        std::memset(u.arrived, 0, sizeof u.arrived);
        std::memset(u.ub, 0xAB, UB_SIZE);
        getcontext(&u.context);
        u.context.uc_stack.ss_sp = u.stack.get();
        u.context.uc_stack.ss_size = 1 << 20;
        u.context.uc_link = nullptr;
        makecontext(&u.context, unit_main, 0);
    }
    for (int left = UNITS; left;) {
        const long before = progress;
        for (unit = left = 0; unit < UNITS; ++unit) {
            if (units[unit].done) continue;
            ++left;
            UB = units[unit].ub;
            flags = units[unit].flags;
            swapcontext(&core_context, &units[unit].context);
        }
        if (left && progress == before) fault("units wait for each other");
    }
    for (auto &u : units) {
        flags = u.flags;
        end_core();
        for (int count : u.arrived)
            if (count) fault("leaves a flag that nobody waits for");
    }
}

// ---- memory of the cube --------------------------------------------------------------------------------------------

inline void check_within(const void *p, size_t n, const uint8_t *memory, size_t size, const char *what) {
    if ((const uint8_t *)p < memory || (const uint8_t *)p + n > memory + size) fault(what);
}

// Row-major rows of bf16 into fractals: 16 columns of all rows, then the next 16.
inline void asc_set_gm2l1_nz_para(int, int, int rows, int) { fractal_rows = rows; }
inline void asc_copy_gm2l1_nd2nz(bfloat16_t *to, const bfloat16_t *from, int64_t row_bytes, int, int rows, int columns,
                                 int, int) {
    check_within(to, size_t(fractal_rows) * columns * 2, L1, L1_SIZE, "transfer outside L1");
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c)
            to[(c / FRACTAL * fractal_rows + r) * FRACTAL + c % FRACTAL] = from[r * row_bytes / 2 + c];
}
// The same inside a unified buffer; a fractal column is followed by one empty block.
template <int ROWS, int COLUMNS, class S, class D> void ascend_nd2nz_scatter(const S *from, D *to) {
    static_assert(sizeof(S) == 2 && sizeof(D) == 2);
    check((uint8_t *)to, size_t(ROWS + 1) * COLUMNS * 2);
    check((uint8_t *)from, size_t(ROWS) * COLUMNS * 2);
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            to[(c / FRACTAL * (ROWS + 1) + r) * FRACTAL + c % FRACTAL] = from[r * COLUMNS + c];
}
inline void asc_copy_ub2l1(void *to, const void *from, int bursts, int blocks, int from_gap, int to_gap) {
    for (int i = 0; i < bursts; ++i) {
        auto *source = (const uint8_t *)from + size_t(i) * (blocks + from_gap) * BLOCK;
        auto *target = (uint8_t *)to + size_t(i) * (blocks + to_gap) * BLOCK;
        check(source, blocks * BLOCK);
        check_within(target, blocks * BLOCK, L1, L1_SIZE, "transfer outside L1");
        std::memcpy(target, source, blocks * BLOCK);
    }
}
// a [M, K] times b [N, K] transposed, fractals of M or N rows, into float32 fractals of M rows.
inline void multiply(float *to, const bfloat16_t *a, const bfloat16_t *b, int M, int K, int N, bool clear) {
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            float &sum = to[(n / FRACTAL * M + m) * FRACTAL + n % FRACTAL];
            if (clear) sum = 0;
            for (int k = 0; k < K; ++k) {
                const int column = k / FRACTAL, at = k % FRACTAL;
                sum += float(a[(column * M + m) * FRACTAL + at]) * float(b[(column * N + n) * FRACTAL + at]);
            }
        }
}
// Both operands in L1, the result in L0C.
template <int M, int K, int N, int, bool TRANSPOSED, class In, class Out>
void ascend_gemm_l1(Out *to, const In *a, const In *b, int clear, int, int) {
    static_assert(TRANSPOSED && sizeof(In) == 2);
    check_within(a, size_t(M) * K * 2, L1, L1_SIZE, "operand outside L1");
    check_within(b, size_t(N) * K * 2, L1, L1_SIZE, "operand outside L1");
    check_within(to, size_t(M) * N * 4, L0C, L0C_SIZE, "result outside L0C");
    multiply(to, a, b, M, K, N, clear);
}
// The same by hand: fractals of L1 to the operands of the cube, one product of those. A fractal is 16 x 16 bf16; in L1
// fractal (m, k) lies at k * stride + m. Operands keep the reduced channels outside: a at k * rows + m, b at
// k * columns + n, the fractals of both with a row for each m or n.
inline void copy_fractals(bfloat16_t *to, const uint8_t *memory, const bfloat16_t *from, int m0, int k0, int m_count,
                          int k_count, int from_stride, int to_stride, bool transpose) {
    const int size = FRACTAL * FRACTAL;
    for (int k = 0; k < k_count; ++k)
        for (int m = 0; m < m_count; ++m) {
            auto *source = from + ((k0 + k) * from_stride + m0 + m) * size;
            auto *target = to + (transpose ? m * to_stride + k : k * to_stride + m) * size;
            check_within(source, size * 2, L1, L1_SIZE, "operand outside L1");
            check_within(target, size * 2, memory, L0_SIZE, "operand outside L0");
            for (int i = 0; i < size; ++i) target[transpose ? i % FRACTAL * FRACTAL + i / FRACTAL : i] = source[i];
        }
}
inline void asc_copy_l12l0a(bfloat16_t *to, const bfloat16_t *from, int m0, int k0, int m, int k, int from_stride,
                            int to_stride) {
    copy_fractals(to, L0A, from, m0, k0, m, k, from_stride, to_stride, false);
}
inline void asc_copy_l12l0b(bfloat16_t *to, const bfloat16_t *from, int n0, int k0, int n, int k, int from_stride,
                            int to_stride) {
    copy_fractals(to, L0B, from, n0, k0, n, k, from_stride, to_stride, false);
}
// Rows of L1 are the reduced channels: each fractal is turned.
inline void asc_copy_l12l0b_transpose(bfloat16_t *to, const bfloat16_t *from, int k0, int n0, int k, int n,
                                      int from_stride, int to_stride) {
    copy_fractals(to, L0B, from, k0, n0, k, n, from_stride, to_stride, true);
}
inline void asc_mmad(float *to, const bfloat16_t *a, const bfloat16_t *b, int M, int K, int N, int, bool, bool,
                     bool clear) {
    check_within(a, size_t(M) * K * 2, L0A, L0_SIZE, "operand outside L0");
    check_within(b, size_t(N) * K * 2, L0B, L0_SIZE, "operand outside L0");
    check_within(to, size_t(M) * N * 4, L0C, L0C_SIZE, "result outside L0C");
    multiply(to, a, b, M, K, N, clear);
}
// Row-major again, the first half of the rows to the first vector unit, the others to the second.
inline void asc_set_l0c_copy_nz_para(int, int, int) {}
inline void asc_copy_l0c2ub(float *to, const float *from, int columns, int rows, int to_row, int from_rows, int,
                            int halves, int, int, int, int, int, int, int) {
    if (halves != 1) fault("a copy to the vector units that this emulation does not know");
    check_within(from, size_t(from_rows) * columns * 4, L0C, L0C_SIZE, "transfer outside L0C");
    check((uint8_t *)to, size_t(rows / 2) * to_row * 4);
    for (int r = 0; r < rows; ++r) {
        auto *target = (float *)(units[1 + r / (rows / 2)].ub + ((uint8_t *)to - UB)) + r % (rows / 2) * to_row;
        for (int c = 0; c < columns; ++c) target[c] = from[(c / FRACTAL * from_rows + r) * FRACTAL + c % FRACTAL];
    }
}
