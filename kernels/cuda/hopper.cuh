// What all kernels share: wgmma plumbing, barriers of a pipeline, dependent launch, number formats. Put in front of
// every kernel file by the compiler driver.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- wgmma -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Keeps the compiler from moving reads and writes of accumulators across the place where it stands.
template <int N> __device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
// Shared memory written by plain stores becomes visible to the tensor cores (then a barrier).
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint4 load_shared16(u32 address) {
    uint4 r;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
    return r;
}
__device__ __forceinline__ float2 load_shared8(u32 address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address));
    return r;
}
__device__ __forceinline__ u32 load_shared4(u32 address) {
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}

// A K-major operand without swizzle is made of 8 x 16-byte core matrices, each 128 contiguous bytes; ``along_k`` and
// ``along_n`` are the bytes from one to the next.
__device__ __forceinline__ u64 descriptor(u32 address, u32 along_k, u32 along_n) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(along_k >> 4) << 16 | (u64)(along_n >> 4) << 32;
}

// ---- barriers of the pipeline --------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" :: "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

template <int COUNT> struct Ring {  // a stage of a ring, with the parity of its current use
    int index = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == COUNT) index = 0, parity ^= 1;
    }
};

// ---- clusters ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- programmatic dependent launch (a kernel that is launched with ``overlap``) -------------------------------------

// Everything the kernels before have written is there. Before the first read or write of memory that they touch. What
// they write must not be const __restrict__ here: the compiler may then read it earlier (a test looks for that).
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may begin what it does before it waits.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- formats -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// Two values as e4m3, saturating, and back.
__device__ __forceinline__ u16 to_e4m3(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}
__device__ __forceinline__ float2 from_e4m3(u16 two) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    float2 r;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(r.x), "=f"(r.y) : "r"(halves));
    return r;
}
// __byte_perm without the mask of the selector.
__device__ __forceinline__ u32 select_bytes(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u16 to_bf16(float x) { return (u16)pack_bf16(x, 0.f); }

// 2^ceil(log2(amax / largest)) as float32 bits; a NaN or an infinity gives infinity. ``bits`` of a non-negative float.
__device__ __forceinline__ u32 power_of_two_scale(u32 bits, float largest) {
    u32 q = __float_as_uint(__fdiv_rn(__uint_as_float(bits), largest)) & 0x7FFFFFFF;
    return (min(q, 0x7F800000u) + 0x7FFFFFu) & 0x7F800000u;
}

// Magnitude of the nearest e2m1 value, ties to even codes, saturating at 6.
__device__ __forceinline__ float e2m1_round(float x) {
    return x > 5.f ? 6.f : x >= 3.5f ? 4.f : x > 2.5f ? 3.f : x >= 1.75f ? 2.f : x > 1.25f ? 1.5f
         : x >= 0.75f ? 1.f : x > 0.25f ? 0.5f : 0.f;
}

// Eight e2m1 codes -> four bf16 pairs, times 2^-126: pair i holds codes i (low half) and i + 4.
__device__ __forceinline__ void e2m1_pairs(u32 codes, u32 (&pair)[4]) {
    pair[0] = (codes << 12) & 0x80008000u | (codes << 6) & 0x01C001C0u;
    pair[1] = (codes << 8) & 0x80008000u | (codes << 2) & 0x01C001C0u;
    pair[2] = (codes << 4) & 0x80008000u | (codes >> 2) & 0x01C001C0u;
    pair[3] = codes & 0x80008000u | (codes >> 6) & 0x01C001C0u;
}

// UE8M0 times 2^126, as a pair of bf16: what turns e2m1_pairs into values. Scales above 2 do not fit: those need
// ``excess``, a second factor.
__device__ __forceinline__ u32 e2m1_scale(u32 byte) {
    u32 bits = byte == 255 ? 0x7FFF : (min(byte, 128u) + 126) << 7;
    return bits | bits << 16;
}
__device__ __forceinline__ u32 e2m1_excess(u32 byte) {
    u32 bits = byte == 255 ? 0x7FFF : (max(byte, 128u) - 1) << 7;  // 2^(byte - 128), or 1
    return bits | bits << 16;
}
