// Runs CUDA C++ on a CPU, one block at a time: every thread is a coroutine that runs until it needs
// what others have. Instructions in PTX become calls of functions in `ptx`, named after them
// (`cuda_emulator.py`); one that is not here does not compile. Slow, and meant for small shapes.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static // blocks run one after the other
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace emulator {
constexpr int LANES = 32, WORDS = 8, STACK_BYTES = 256 * 1024;
typedef uint32_t word;

struct Index {
    int x, y, z;
};

// Copies to shared memory happen when a thread waits for them, so that one who reads too early
// reads something else.
struct Copy {
    char* target;
    const void* source;
    int num_bytes; // of 16; the others become zeros
};

struct Thread {
    ucontext_t context;
    Index index;
    bool is_done = false;
    std::vector<std::vector<Copy>> copies = {{}}; // by group; the last one is still open
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
};

// Lanes of a warp, by mask, or all threads of a block: how many wait, and how often all have.
struct Meeting {
    int num_waiting = 0;
    long round = 0;
};

struct Warp {
    std::map<word, Meeting> meetings;
    word values[2][LANES][WORDS]; // of even and of odd rounds: some lanes may still read the last
};

static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Meeting block_meeting;
static ucontext_t scheduler;
static Thread* current;
static long num_events; // without one in a turn of all threads, they wait for each other
static std::function<void()> body;

static void wait_until(const std::function<bool()>& is_over) {
    while (!is_over()) swapcontext(&current->context, &scheduler);
}

// Every thread that calls this comes back after `expected` have called it.
static long meet(Meeting& meeting, const std::function<int()>& expected) {
    const long round = meeting.round;
    ++meeting.num_waiting, ++num_events;
    wait_until([&] {
        if (meeting.round == round && meeting.num_waiting >= expected())
            meeting.num_waiting = 0, ++meeting.round, ++num_events;
        return meeting.round != round;
    });
    return round;
}

static int num_running() {
    int count = 0;
    for (const Thread& thread : threads) count += !thread.is_done;
    return count;
}

static Warp& own_warp() { return warps[current->index.x / LANES]; }

// The values of all lanes: [LANES][WORDS].
template <int COUNT>
static const word (*share(word mask, const word (&own)[COUNT])) [WORDS] {
    Warp& warp = own_warp();
    Meeting& meeting = warp.meetings[mask];
    auto& values = warp.values[meeting.round % 2];
    for (int i = 0; i < COUNT; ++i) values[current->index.x % LANES][i] = own[i];
    meet(meeting, [&] { return __builtin_popcount(mask); });
    return values;
}

static void run_thread() {
    body();
    current->is_done = true, ++num_events;
    swapcontext(&current->context, &scheduler);
}

static bool run_block(int num_threads) {
    threads = std::vector<Thread>(num_threads);
    warps = std::vector<Warp>((num_threads + LANES - 1) / LANES);
    block_meeting = Meeting();
    for (int i = 0; i < num_threads; ++i) {
        Thread& thread = threads[i];
        thread.index = {i, 0, 0};
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
    }
    while (num_running()) {
        const long before = num_events;
        for (Thread& thread : threads) {
            if (thread.is_done) continue;
            current = &thread;
            swapcontext(&scheduler, &thread.context);
        }
        if (num_events == before) return false;
    }
    return true;
}
static char shared_anchor; // an address in shared memory is the distance from here
} // namespace emulator

struct uint2 {
    unsigned int x, y;
};

static emulator::Index blockIdx, gridDim;
#define threadIdx (emulator::current->index)

static void __syncthreads() { emulator::meet(emulator::block_meeting, emulator::num_running); }

static void __syncwarp(uint32_t mask = 0xffffffffu) { emulator::share<1>(mask, {0}); }

template <class T> static T __shfl_xor_sync(uint32_t mask, T own, int distance) {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    std::memcpy(&bits, &own, 4);
    const uint32_t other =
        emulator::share<1>(mask, {bits})[threadIdx.x % emulator::LANES ^ distance][0];
    std::memcpy(&own, &other, 4);
    return own;
}

static uint32_t __reduce_or_sync(uint32_t mask, uint32_t own) {
    const auto values = emulator::share<1>(mask, {own});
    uint32_t all = 0;
    for (int lane = 0; lane < emulator::LANES; ++lane)
        if (mask >> lane & 1) all |= values[lane][0];
    return all;
}

static uint32_t __ballot_sync(uint32_t mask, bool own) {
    return __reduce_or_sync(mask, (uint32_t)own << threadIdx.x % emulator::LANES);
}

static size_t __cvta_generic_to_shared(const void* p) {
    return (const char*)p - &emulator::shared_anchor;
}

static int __popc(uint32_t v) { return __builtin_popcount(v); }
static int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static int __ffsll(long long v) { return __builtin_ffsll(v); }
#define __expf expf // libc has one of the same name
static float __fdividef(float a, float b) { return a / b; }
static float rsqrtf(float v) { return 1.0f / sqrtf(v); }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

static float __uint_as_float(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t places) {
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const int place = places >> 4 * i & 15;
        uint32_t byte = both >> 8 * (place & 7) & 255;
        if (place & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

namespace ptx {
typedef uint32_t u32;
typedef uint16_t u16;

// A float with the given number of mantissa bits, rounded to nearest even.
static double rounded(double v, int bits) {
    if (v == 0.0 || !std::isfinite(v)) return v;
    int exponent;
    const double mantissa = frexp(v, &exponent);
    return ldexp(nearbyint(ldexp(mantissa, bits)), exponent - bits);
}

static float from_bfloat(u32 half) { return __uint_as_float(half << 16); }
static u32 to_bfloat(double v) {
    const float f = (float)rounded(v, 8); // exact, but for subnormals
    u32 bits;
    std::memcpy(&bits, &f, 4);
    return bits >> 16;
}
static float from_half(u32 half) {
    const u16 bits = (u16)half;
    _Float16 v;
    std::memcpy(&v, &bits, 2);
    return (float)v;
}
static u32 to_half(double v) {
    const _Float16 half = (_Float16)v;
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

static void griddepcontrol_launch_dependents() {}
static void griddepcontrol_wait() {}

static void check_aligned(const void* p) {
    if ((uintptr_t)p % 16) {
        fprintf(stderr, "a copy of 16 bytes is not aligned\n");
        abort();
    }
}
static void st_global_v4_u32_0_1_2_3_4(void* p, u32 a, u32 b, u32 c, u32 d) {
    const u32 words[4] = {a, b, c, d};
    check_aligned(p);
    std::memcpy(p, words, 16);
}
static void load_four(u32& a, u32& b, u32& c, u32& d, const void* p) {
    u32 words[4];
    check_aligned(p);
    std::memcpy(words, p, 16);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
#define LOAD_FOUR(name)                                                                            \
    static void name(u32& a, u32& b, u32& c, u32& d, const void* p) { load_four(a, b, c, d, p); }
LOAD_FOUR(ld_global_L1_no_allocate_v4_u32_0_1_2_3_4)
LOAD_FOUR(ld_global_v4_u32_0_1_2_3_4)

static void ld_global_u32_0_1(u32& v, const void* p) { std::memcpy(&v, p, 4); }
static void ld_global_cg_u32_0_1(u32& v, const void* p) { std::memcpy(&v, p, 4); }
static void ld_global_u16_0_1(u16& v, const void* p) { std::memcpy(&v, p, 2); }

static void reg_b16_a_b_mov_b32_a_b_1_cvt_f32_f16_0_a(float& f, u32 pair) { f = from_half(pair); }
static void reg_b16_a_b_mov_b32_a_b_1_cvt_f32_f16_0_b(float& f, u32 pair) {
    f = from_half(pair >> 16);
}
static void cvt_rn_bf16x2_f32_0_1_2(u32& pair, float upper, float lower) {
    pair = to_bfloat(upper) << 16 | to_bfloat(lower);
}
static void cvt_rn_f16x2_f32_0_1_2(u32& pair, float upper, float lower) {
    pair = to_half(upper) << 16 | to_half(lower);
}
static void fma_rn_bf16x2_0_1_2_3(u32& d, u32 a, u32 b, u32 c) {
    const auto one = [&](int shift) {
        const double product =
            (double)from_bfloat(a >> shift & 0xffff) * from_bfloat(b >> shift & 0xffff);
        return to_bfloat(product + from_bfloat(c >> shift & 0xffff));
    };
    d = one(16) << 16 | one(0);
}
static void fma_rn_f16x2_0_1_2_3(u32& d, u32 a, u32 b, u32 c) {
    const auto one = [&](int shift) {
        return to_half((double)from_half(a >> shift) * from_half(b >> shift) +
                       from_half(c >> shift));
    };
    d = one(16) << 16 | one(0);
}
static void lop3_b32_0_1_2_3_0xea(u32& d, u32 a, u32 b, u32 c) { d = (a & b) | c; }

static void cp_async_cg_shared_global_0_1_16_2(u32 target, const void* source, int num_bytes) {
    emulator::current->copies.back().push_back(
        {&emulator::shared_anchor + (int32_t)target, source, num_bytes});
}
static void cp_async_commit_group() { emulator::current->copies.emplace_back(); }
static void cp_async_wait_group_0(int num_left) {
    auto& groups = emulator::current->copies;
    while ((int)groups.size() - 1 > num_left) {
        for (const emulator::Copy& copy : groups.front()) {
            std::memset(copy.target, 0, 16);
            std::memcpy(copy.target, copy.source, copy.num_bytes);
        }
        groups.erase(groups.begin());
    }
}
static void prefetch_global_L2_0(const void*) {}

// sums [16, 8] += a [16, 16] b [16, 8]; products are exact, sums float32.
template <class Convert>
static void multiply_matrices(float* const (&sums)[4], const u32 (&own)[6], Convert from) {
    const auto all = emulator::share<6>(0xffffffffu, own);
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = group + 8 * (i / 2), column = 2 * quarter + i % 2;
        double sum = *sums[i];
        for (int k = 0; k < 16; ++k) {
            const u32 a = all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const u32 b = all[column * 4 + k % 8 / 2][4 + k / 8];
            sum += (double)from(a >> 16 * (k % 2) & 0xffff) * from(b >> 16 * (k % 2) & 0xffff);
        }
        *sums[i] = (float)sum;
    }
}
// The second form begins with a constant.
#define MULTIPLY(name, from)                                                                       \
    static void name##_0_1_2_3(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, \
                               u32 a3, u32 b0, u32 b1) {                                           \
        multiply_matrices({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}, from);                   \
    }                                                                                              \
    static void name##_10_10_10_10(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,     \
                                   u32 a2, u32 a3, u32 b0, u32 b1, float c) {                      \
        d0 = d1 = d2 = d3 = c;                                                                     \
        multiply_matrices({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}, from);                   \
    }
MULTIPLY(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32_0_1_2_3_4_5_6_7_8_9, from_bfloat)
MULTIPLY(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32_0_1_2_3_4_5_6_7_8_9, from_half)
} // namespace ptx
