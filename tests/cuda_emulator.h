// Runs CUDA C++ on a CPU, one cluster of blocks at a time: every thread is a coroutine that runs
// until it needs data of others. Instructions in PTX become calls of functions in `ptx`, named
// after them (`cuda_emulator.py`); one without a function here does not compile. Slow, and meant
// for small shapes.

// Compiling this header once took two thirds of a test's time: it needs only C's standard library.
// It makes no system call when it switches threads.

#undef _FORTIFY_SOURCE // its longjmp refuses to switch stacks
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#define __device__
#define __global__
#define __forceinline__ inline
// Holds the memory of one block at a time; the other blocks of its cluster are saved elsewhere.
#define __shared__ static __attribute__((section("block_memory")))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace emulator {
constexpr int LANES = 32, WORDS = 8, STACK_BYTES = 256 * 1024;
constexpr int MAX_THREADS = 1024, MAX_MASKS = 8, MAX_COPIES = 1024, MAX_CLUSTER = 8;
constexpr int SHARED_BYTES = 228 * 1024;
typedef uint32_t word;

static void check(bool is_so, const char* otherwise) {
    if (is_so) return;
    fprintf(stderr, "%s\n", otherwise);
    abort();
}

struct Index {
    int x, y, z;
};

// Copies to shared memory happen when a thread waits for them, so that a thread which reads too
// early reads old data.
struct Copy {
    char* target;
    const void* source;
    int num_bytes; // of 16; the others become zeros
    int group;
};

struct Thread {
    jmp_buf place; // where it goes on
    char* stack;   // null until the first block that has so many threads
    Index index;
    bool is_done;
    long cluster_round; // of the barrier of the cluster at which it arrived last
    Copy* copies; // those that have not happened, in order
    int num_copies, num_groups; // groups that are closed
};

// Lanes of a warp, by mask, or all threads of a block or cluster: how many wait, and how often all
// have.
struct Meeting {
    word mask;
    int num_waiting;
    long round;
};

struct Warp {
    Meeting meetings[MAX_MASKS];
    int num_masks;
    word values[2][LANES][WORDS]; // of even and of odd rounds: some lanes may still read the last
};

struct Block {
    Thread threads[MAX_THREADS];
    Warp warps[MAX_THREADS / LANES];
    Meeting meeting;
    Index index;
    int num_running;
    bool has_started;
    alignas(1024) char memory[SHARED_BYTES]; // while another block runs
};

static Block blocks[MAX_CLUSTER];
static Block* block; // the one that runs
static int num_blocks, num_running; // of the cluster, and its threads
static Meeting cluster_meeting;
static jmp_buf scheduler;
static Thread* current;
static long num_events; // without one in a turn of all threads, they wait for each other
static void call_kernel();

static void go_to(jmp_buf& place, jmp_buf& own) {
    if (!_setjmp(own)) _longjmp(place, 1);
}

static long arrive(Meeting& meeting) {
    ++meeting.num_waiting, ++num_events;
    return meeting.round;
}

// Returns after all expected threads have arrived.
static void wait(Meeting& meeting, long round) {
    for (;;) {
        const int of_all = &meeting == &cluster_meeting ? num_running : block->num_running;
        const int expected = meeting.mask ? __builtin_popcount(meeting.mask) : of_all;
        if (meeting.round == round && meeting.num_waiting >= expected)
            meeting.num_waiting = 0, ++meeting.round, ++num_events;
        if (meeting.round != round) return;
        go_to(scheduler, current->place);
    }
}

static long meet(Meeting& meeting) {
    const long round = arrive(meeting);
    wait(meeting, round);
    return round;
}

static Meeting& meeting_of(Warp& warp, word mask) {
    for (int i = 0; i < warp.num_masks; ++i)
        if (warp.meetings[i].mask == mask) return warp.meetings[i];
    check(mask && warp.num_masks < MAX_MASKS, "a warp has too many masks, or one without lanes");
    warp.meetings[warp.num_masks] = {mask, 0, 0};
    return warp.meetings[warp.num_masks++];
}

// The values of all lanes: [LANES][WORDS].
template <int COUNT>
static const word (*share(word mask, const word (&own)[COUNT])) [WORDS] {
    Warp& warp = block->warps[current->index.x / LANES];
    Meeting& meeting = meeting_of(warp, mask);
    auto& values = warp.values[meeting.round % 2];
    for (int i = 0; i < COUNT; ++i) values[current->index.x % LANES][i] = own[i];
    meet(meeting);
    return values;
}

// Threads are reused for the next block: their stacks and coroutines stay.
static void run_thread() {
    for (;;) {
        call_kernel();
        current->is_done = true, --block->num_running, --num_running, ++num_events;
        go_to(scheduler, current->place);
    }
}

static void make_thread(Thread& thread) {
    ucontext_t first, here;
    thread.stack = (char*)malloc(STACK_BYTES);
    thread.copies = (Copy*)malloc(MAX_COPIES * sizeof(Copy));
    getcontext(&first);
    first.uc_stack.ss_sp = thread.stack;
    first.uc_stack.ss_size = STACK_BYTES;
    first.uc_link = nullptr;
    makecontext(&first, run_thread, 0);
    if (!_setjmp(scheduler)) swapcontext(&here, &first);
}

static void start_block(Block& own, Index index, int num_threads) {
    for (Warp& warp : own.warps) warp.num_masks = 0;
    own.meeting = {0, 0, 0};
    own.index = index;
    own.num_running = num_threads;
    own.has_started = false;
    for (int i = 0; i < num_threads; ++i) {
        Thread& thread = own.threads[i];
        thread.index = {i, 0, 0};
        thread.is_done = false;
        thread.num_copies = thread.num_groups = 0;
    }
}

// Defined by the linker; null if a kernel has no shared memory.
extern "C" __attribute__((weak)) char __start_block_memory[], __stop_block_memory[];

// A block runs until all its threads wait for other blocks: one that does not wait runs far ahead.
static void run_block(Block& own, int num_threads) {
    const size_t num_bytes = __stop_block_memory - __start_block_memory;
    check(num_bytes <= SHARED_BYTES, "a block has too much shared memory");
    block = &own, own.has_started = true;
    if (num_blocks > 1) memcpy(__start_block_memory, own.memory, num_bytes);
    for (long before = -1; before != num_events;) {
        before = num_events;
        for (int i = 0; i < num_threads; ++i) {
            current = &own.threads[i];
            if (current->is_done) continue;
            if (current->stack)
                go_to(current->place, scheduler);
            else
                make_thread(*current);
        }
    }
    if (num_blocks > 1) memcpy(own.memory, __start_block_memory, num_bytes);
}

static bool run_cluster(Index first, int num_threads) {
    check(num_threads <= MAX_THREADS && num_blocks <= MAX_CLUSTER, "a cluster is too large");
    num_running = num_blocks * num_threads;
    cluster_meeting = {0, 0, 0};
    for (int i = 0; i < num_blocks; ++i)
        start_block(blocks[i], {first.x + i, first.y, 0}, num_threads);
    while (num_running) {
        const long before = num_events;
        for (int i = 0; i < num_blocks; ++i)
            if (blocks[i].num_running) run_block(blocks[i], num_threads);
        if (num_events == before) {
            for (Block& one : blocks) // they are stuck: make others
                for (Thread& thread : one.threads) thread.stack = nullptr;
            return false;
        }
    }
    return true;
}
static char shared_anchor; // an address in shared memory is the distance from here
} // namespace emulator

struct uint2 {
    unsigned int x, y;
};

static emulator::Index blockDim, gridDim;
#define blockIdx (emulator::block->index)
#define threadIdx (emulator::current->index)

static void __syncthreads() { emulator::meet(emulator::block->meeting); }

static void __syncwarp(uint32_t mask = 0xffffffffu) { emulator::share<1>(mask, {0}); }

template <class T> static T __shfl_xor_sync(uint32_t mask, T own, int distance) {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    memcpy(&bits, &own, 4);
    const uint32_t other =
        emulator::share<1>(mask, {bits})[threadIdx.x % emulator::LANES ^ distance][0];
    memcpy(&own, &other, 4);
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
    memcpy(&v, &bits, 4);
    return v;
}

static uint32_t __float_as_uint(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}

static uint32_t atomicAdd(uint32_t* p, uint32_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
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
    if (v == 0.0 || !isfinite(v)) return v;
    int exponent;
    const double mantissa = frexp(v, &exponent);
    return ldexp(nearbyint(ldexp(mantissa, bits)), exponent - bits);
}

static float from_bfloat(u32 half) { return __uint_as_float(half << 16); }
static u32 to_bfloat(double v) {
    const float f = (float)rounded(v, 8); // exact, but for subnormals
    u32 bits;
    memcpy(&bits, &f, 4);
    return bits >> 16;
}
static float from_half(u32 half) {
    const u16 bits = (u16)half;
    _Float16 v;
    memcpy(&v, &bits, 2);
    return (float)v;
}
static u32 to_half(double v) {
    const _Float16 half = (_Float16)v;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}

static void griddepcontrol_launch_dependents() {}
static void griddepcontrol_wait() {}

static void barrier_cluster_arrive_relaxed() {
    emulator::current->cluster_round = emulator::arrive(emulator::cluster_meeting);
}
static void barrier_cluster_wait() {
    emulator::wait(emulator::cluster_meeting, emulator::current->cluster_round);
}
static void mapa_shared_cluster_u32_0_1_2(u32& there, u32 own, u32 rank) {
    emulator::Block& other = emulator::blocks[rank];
    emulator::check((int)rank < emulator::num_blocks, "there is no such block in the cluster");
    emulator::check(other.has_started && other.num_running, "a block that does not run is used");
    const char* p = &emulator::shared_anchor + (int32_t)own;
    if (&other != emulator::block) p = other.memory + (p - emulator::__start_block_memory);
    there = (u32)(p - &emulator::shared_anchor);
}

// A barrier in shared memory, used once: what it waits for.
struct Barrier {
    int num_threads, num_bytes;
};
static Barrier& barrier_at(u32 there) {
    return *(Barrier*)(&emulator::shared_anchor + (int32_t)there);
}
static void mbarrier_init_shared_cta_b64_0_1(u32 there, u32 num_threads) {
    barrier_at(there) = {(int)num_threads, 0};
}
static void fence_mbarrier_init_release_cluster() {}
static void mbarrier_arrive_expect_tx_shared_cta_b64_0_1(u32 there, u32 num_bytes) {
    --barrier_at(there).num_threads, barrier_at(there).num_bytes += num_bytes;
}
static void st_async_shared_cluster_mbarrier_complete_tx_bytes_u32_0_1_2(u32 there, u32 v,
                                                                         u32 barrier) {
    memcpy(&emulator::shared_anchor + (int32_t)there, &v, 4);
    barrier_at(barrier).num_bytes -= 4, ++emulator::num_events;
}
static void reg_pred_done_mbarrier_try_wait_parity_shared_cta_b64_done_1_0_selp_u32_0_1_0_done(
    u32& is_done, u32 there) {
    const Barrier& barrier = barrier_at(there);
    is_done = barrier.num_threads == 0 && barrier.num_bytes == 0;
    if (!is_done) emulator::go_to(emulator::scheduler, emulator::current->place);
}
static void ex2_approx_ftz_f32_0_1(float& power, float v) { power = exp2f(v); }

static void check_aligned(const void* p) {
    emulator::check((uintptr_t)p % 16 == 0, "a copy of 16 bytes is not aligned");
}
static void st_global_v4_u32_0_1_2_3_4(void* p, u32 a, u32 b, u32 c, u32 d) {
    const u32 words[4] = {a, b, c, d};
    check_aligned(p);
    memcpy(p, words, 16);
}
static void load_four(u32& a, u32& b, u32& c, u32& d, const void* p) {
    u32 words[4];
    check_aligned(p);
    memcpy(words, p, 16);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
#define LOAD_FOUR(name)                                                                            \
    static void name(u32& a, u32& b, u32& c, u32& d, const void* p) { load_four(a, b, c, d, p); }
LOAD_FOUR(ld_global_L1_no_allocate_v4_u32_0_1_2_3_4)
LOAD_FOUR(ld_global_v4_u32_0_1_2_3_4)

// Words that the emulator of another rank, in another thread of the CPU, may write meanwhile.
static void ld_volatile_global_u32_0_1(u32& v, const u32* p) {
    v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static void ld_volatile_global_v4_u32_0_1_2_3_4(u32& a, u32& b, u32& c, u32& d, const void* p) {
    const u32* words = (const u32*)p;
    check_aligned(p);
    ld_volatile_global_u32_0_1(a, words), ld_volatile_global_u32_0_1(b, words + 1);
    ld_volatile_global_u32_0_1(c, words + 2), ld_volatile_global_u32_0_1(d, words + 3);
    ++emulator::num_events; // it may be polled, so others come first
    if (threadIdx.x == 0) sched_yield();
    emulator::go_to(emulator::scheduler, emulator::current->place);
}
static int store_delay_us; // of every word
static void st_volatile_global_v4_u32_0_1_2_3_4(void* p, u32 a, u32 b, u32 c, u32 d) {
    const u32 words[4] = {a, b, c, d};
    check_aligned(p);
    for (int i = 0; i < 4; ++i) {
        if (store_delay_us) usleep(store_delay_us);
        __atomic_store_n((u32*)p + i, words[i], __ATOMIC_RELEASE);
    }
}

static void ld_global_u32_0_1(u32& v, const void* p) { memcpy(&v, p, 4); }
static void ld_global_cg_u32_0_1(u32& v, const void* p) { memcpy(&v, p, 4); }
static void ld_global_u16_0_1(u16& v, const void* p) { memcpy(&v, p, 2); }

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
    emulator::Thread& own = *emulator::current;
    emulator::check(own.num_copies < emulator::MAX_COPIES, "too many copies are not waited for");
    char* place = &emulator::shared_anchor + (int32_t)target;
    own.copies[own.num_copies++] = {place, source, num_bytes, own.num_groups};
}
static void cp_async_commit_group() { ++emulator::current->num_groups; }
static void cp_async_wait_group_0(int num_left) {
    emulator::Thread& own = *emulator::current;
    int num_done = 0;
    for (; num_done < own.num_copies; ++num_done) {
        const emulator::Copy& copy = own.copies[num_done];
        if (copy.group >= own.num_groups - num_left) break;
        memset(copy.target, 0, 16);
        memcpy(copy.target, copy.source, copy.num_bytes);
    }
    own.num_copies -= num_done;
    memmove(own.copies, own.copies + num_done, own.num_copies * sizeof(emulator::Copy));
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
// The second form starts with a constant.
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

extern "C" void delay_stores(int microseconds) { ptx::store_delay_us = microseconds; }
