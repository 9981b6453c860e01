// The experts that a GPU misses, for a few tokens, in the tile layout of its kernels, on all cores.
//
// A tile is 16 rows x 128 columns of 4-bit codes (ops/tiles.py); a row of it is 64 bytes, one
// vector. In a vector's 32-bit lane 4 * q + w, the nibbles are columns 32 * w + 8 * q + 0, 2, 4, 6,
// 1, 3, 5, 7 from the lowest up. Inputs become 16-bit integers with one scale per step of 128
// columns, in two bytes that are multiplied with the codes separately: the products are exact, and
// only the inputs are rounded, to 1 / 65024 of their step's range. The intermediate activations are
// rounded to the model's dtype, as on the GPU.
//
// Our own threads wait for work by spinning for a while: a step calls once per layer, and waking a
// thread takes as long as an expert.
//
// Compile-time constants: IS_BFLOAT, or else float16; SCALE_TYPE of ops/tiles.py.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using u8 = uint8_t;
using s8 = int8_t;
using u16 = uint16_t;
constexpr int STEP = 128, ROWS = 16, LANES = 16, TILE_BYTES = 1024, ZERO = 8;
constexpr int AHEAD = 4096; // bytes
constexpr auto LONGEST_SPIN = std::chrono::milliseconds(2);
constexpr auto LONGEST_SLEEP = std::chrono::microseconds(500);

struct Spin {
    int count = 0;
    void wait() {
        _mm_pause();
        if (++count % 1024 == 0) std::this_thread::yield(); // another thread may need the core
    }
};

// Threads that join open calls. A thread that the system delays holds up only the task it has
// taken.
struct Crew {
    static constexpr uint64_t OPEN = 1ull << 31, MEMBERS = OPEN - 1;
    std::atomic<uint64_t> state{0}; // call number, open flag, number of participants
    std::atomic<int> asleep{0};
    std::mutex mutex;
    std::condition_variable wake;
    void (*work)(void*) = nullptr;
    void* given = nullptr;
    int size = 1;

    void hire(int wanted) {
        for (; size < wanted; size++)
            std::thread([this, seen = state.load() >> 32] { take_calls(seen); }).detach();
    }
    void take_calls(uint64_t seen) {
        for (;;) {
            uint64_t now = wait_for_call(seen);
            seen = now >> 32;
            while (now >> 32 == seen && now & OPEN)
                if (state.compare_exchange_weak(now, now + 1)) {
                    work(given);
                    state.fetch_sub(1);
                    break;
                }
        }
    }
    uint64_t wait_for_call(uint64_t seen) {
        auto started = std::chrono::steady_clock::now();
        uint64_t now;
        for (long i = 1; (now = state.load(std::memory_order_acquire)) >> 32 == seen; i++) {
            _mm_pause();
            if (i % 256 == 0 && std::chrono::steady_clock::now() - started > LONGEST_SPIN) {
                std::unique_lock<std::mutex> lock(mutex);
                asleep++;
                wake.wait(lock, [&] { return state.load() >> 32 != seen; });
                asleep--;
            }
        }
        return now;
    }
    void run(void (*what)(void*), void* with) {
        work = what, given = with;
        {
            std::lock_guard<std::mutex> lock(mutex); // no thread falls asleep meanwhile
            state.store(((state.load() >> 32) + 1) << 32 | OPEN);
        }
        if (asleep.load()) wake.notify_all();
        what(with);
        state.fetch_and(~OPEN); // late threads join the next call
        for (Spin spin; state.load(std::memory_order_acquire) & MEMBERS;) spin.wait();
    }
};

Crew& crew() {
    static Crew* one = new Crew; // its threads are never joined
    return *one;
}
std::mutex one_at_a_time;

inline float widen(u16 number, bool is_bfloat) {
    if (is_bfloat) {
        uint32_t bits = uint32_t(number) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    return _cvtsh_ss(number);
}

inline float rounded(float value) { // to the model's dtype
#if IS_BFLOAT
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, 4);
    return value;
#else
    return _cvtsh_ss(_cvtss_sh(value, 0));
#endif
}

inline float scale_at(const u8* records, long place) {
#if SCALE_TYPE == 0
    float value;
    std::memcpy(&value, records + 4 * place, 4);
    return value;
#else
    u16 value;
    std::memcpy(&value, records + 2 * place, 2);
    return widen(value, SCALE_TYPE == 1);
#endif
}
constexpr int SCALE_BYTES = SCALE_TYPE == 0 ? 4 : 2;

// A token's 128 columns as integers, in the order of the codes.
struct alignas(64) Columns {
    s8 upper[2][64], lower[2][64]; // for the low nibbles of bytes, and for the high ones
    int32_t start[LANES];          // correction for the codes' zero
    float scale;

    void set(const float* x) {
        float largest = 0;
        for (int i = 0; i < STEP; i++) largest = std::max(largest, std::fabs(x[i]));
        scale = largest / 32512;
        float inverse = largest > 0 ? 32512 / largest : 0;
        constexpr int ORDER[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
        for (int lane = 0; lane < LANES; lane++) {
            const float* own = x + lane % 4 * 32 + lane / 4 * 8;
            int sum = 0;
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 4; i++) {
                    int value = int(std::lrintf(own[ORDER[half][i]] * inverse));
                    int high = (value + 128) >> 8;
                    upper[half][4 * lane + i] = s8(high);
                    lower[half][4 * lane + i] = s8(value - 256 * high);
                    sum += value;
                }
            start[lane] = -ZERO * sum;
        }
    }
};

#ifdef __AVX512BW__
inline __m512i dot(__m512i sums, __m512i codes, __m512i x) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sums, codes, x);
#else
    __m512i pairs = _mm512_maddubs_epi16(codes, x);
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

inline __m512 load_scales(const u8* records) {
#if SCALE_TYPE == 0
    return _mm512_loadu_ps(records);
#else
    __m256i pairs = _mm256_loadu_si256((const __m256i*)records);
    if (SCALE_TYPE == 2) return _mm512_cvtph_ps(pairs);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(pairs), 16));
#endif
}

// 16 rows times one token: sums[16]
void multiply_tile(const u8* codes, const u8* records, const Columns* x, long steps, float* sums) {
    __m512 lanes[ROWS];
    for (int row = 0; row < ROWS; row++) lanes[row] = _mm512_setzero_ps();
    const __m512i mask = _mm512_set1_epi8(15);
    for (long step = 0; step < steps; step++, codes += TILE_BYTES) {
        const Columns& own = x[step];
        __m512i upper_0 = _mm512_load_si512(own.upper[0]);
        __m512i upper_1 = _mm512_load_si512(own.upper[1]);
        __m512i lower_0 = _mm512_load_si512(own.lower[0]);
        __m512i lower_1 = _mm512_load_si512(own.lower[1]);
        __m512i start = _mm512_load_si512(own.start);
        alignas(64) float scales[ROWS];
        __m512 given = load_scales(records + step * ROWS * SCALE_BYTES);
        _mm512_store_ps(scales, _mm512_mul_ps(given, _mm512_set1_ps(own.scale)));
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            _mm_prefetch((const char*)codes + row * 64 + AHEAD, _MM_HINT_T1);
            __m512i both = _mm512_loadu_si512(codes + row * 64);
            __m512i low = _mm512_and_si512(both, mask);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            __m512i sum = dot(dot(_mm512_setzero_si512(), low, upper_0), high, upper_1);
            sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), start);
            sum = dot(dot(sum, low, lower_0), high, lower_1);
            lanes[row] =
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scales[row]), lanes[row]);
        }
    }
    for (int row = 0; row < ROWS; row++) sums[row] = _mm512_reduce_add_ps(lanes[row]);
}
#else
void multiply_tile(const u8* codes, const u8* records, const Columns* x, long steps, float* sums) {
    float lanes[ROWS][LANES] = {};
    for (long step = 0; step < steps; step++, codes += TILE_BYTES) {
        const Columns& own = x[step];
        for (int row = 0; row < ROWS; row++) {
            const u8* bytes = codes + row * 64;
            float scale = scale_at(records, step * ROWS + row) * own.scale;
            for (int lane = 0; lane < LANES; lane++) {
                int upper = 0, lower = own.start[lane];
                for (int i = 4 * lane; i < 4 * lane + 4; i++) {
                    int low = bytes[i] & 15, high = bytes[i] >> 4;
                    upper += low * own.upper[0][i] + high * own.upper[1][i];
                    lower += low * own.lower[0][i] + high * own.lower[1][i];
                }
                lanes[row][lane] += float(256 * upper + lower) * scale;
            }
        }
    }
    for (int row = 0; row < ROWS; row++) {
        sums[row] = 0;
        for (float lane : lanes[row]) sums[row] += lane;
    }
}
#endif

struct Pair {
    long token;
    float weight;
    int expert; // its index among those in use
};

} // namespace

extern "C" {

struct Job {
    long num_tokens, k, width, inner_width; // T, k, H, I
    const u16* x;                           // [T, H]
    const int32_t* ids;                     // [T, k]
    const float* weights;                   // [T, k]  0: skipped
    float* out;                             // [T, H]  the weighted sum
    const u8 *gate_up, *gate_up_records, *down, *down_records; // of expert 0
    int64_t* spent; // nanoseconds, bytes, calls: added to
};

int hire_threads(int wanted) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    crew().hire(wanted);
    return crew().size;
}
}

namespace {

struct Work {
    const Job& job;
    std::vector<Pair> pairs;   // by expert
    std::vector<long> experts, first; // first pair of each expert
    std::vector<Columns> x, inner_columns; // [T, steps], [pairs, steps]
    std::vector<float> inner;              // [pairs, I]
    std::atomic<long> next[4], done[4]; // tasks of each phase

    long steps() const { return job.width / STEP; }
    long inner_steps() const { return job.inner_width / STEP; }
    long tile_bytes(long steps) const { return steps * TILE_BYTES; }
    long record_bytes(long steps) const { return steps * ROWS * SCALE_BYTES; }

    // Takes tasks until there are none left, then waits for those of other threads.
    template <typename Do> void share(int phase, long count, Do&& one) {
        for (long i; (i = next[phase].fetch_add(1, std::memory_order_relaxed)) < count;) {
            one(i);
            done[phase].fetch_add(1, std::memory_order_acq_rel);
        }
        for (Spin spin; done[phase].load(std::memory_order_acquire) < count;) spin.wait();
    }

    void run() {
        share(0, job.num_tokens * steps(), [&](long i) {
            float own[STEP];
            for (int j = 0; j < STEP; j++) own[j] = widen(job.x[i * STEP + j], IS_BFLOAT);
            x[i].set(own);
        });
        long inner_tiles = job.inner_width / ROWS;
        share(1, long(experts.size()) * inner_tiles,
              [&](long i) { gate_and_up(i / inner_tiles, i % inner_tiles); });
        share(2, long(pairs.size()) * inner_steps(),
              [&](long i) { inner_columns[i].set(&inner[i * STEP]); });
        share(3, job.width / ROWS, [&](long tile) { down(tile); });
    }

    void gate_and_up(long number, long tile) {
        long inner_tiles = job.inner_width / ROWS, expert = experts[number];
        long gate_tile = expert * 2 * inner_tiles + tile, up_tile = gate_tile + inner_tiles;
        for (long pair = first[number]; pair < first[number + 1]; pair++) {
            const Columns* own = &x[pairs[pair].token * steps()];
            float sums[2][ROWS], *gate = sums[0], *up = sums[1];
            for (int half = 0; half < 2; half++) {
                long own_tile = half ? up_tile : gate_tile;
                multiply_tile(job.gate_up + own_tile * tile_bytes(steps()),
                              job.gate_up_records + own_tile * record_bytes(steps()), own,
                              steps(), sums[half]);
            }
            float* target = &inner[pair * job.inner_width + tile * ROWS];
            for (int row = 0; row < ROWS; row++)
                target[row] = rounded(gate[row] / (1.0f + std::exp(-gate[row])) * up[row]);
        }
    }

    void down(long tile) {
        for (long token = 0; token < job.num_tokens; token++)
            std::fill_n(job.out + token * job.width + tile * ROWS, ROWS, 0.0f);
        for (size_t number = 0; number < experts.size(); number++) {
            long own_tile = experts[number] * (job.width / ROWS) + tile;
            for (long pair = first[number]; pair < first[number + 1]; pair++) {
                float sums[ROWS], *out = job.out + pairs[pair].token * job.width + tile * ROWS;
                multiply_tile(job.down + own_tile * tile_bytes(inner_steps()),
                              job.down_records + own_tile * record_bytes(inner_steps()),
                              &inner_columns[pair * inner_steps()], inner_steps(), sums);
                for (int row = 0; row < ROWS; row++) out[row] += pairs[pair].weight * sums[row];
            }
        }
    }
};

} // namespace

// Called by a stream, in order.
extern "C" void run_experts(void* given) {
    const Job& job = *(const Job*)given;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    auto started = std::chrono::steady_clock::now();
    std::vector<std::pair<int32_t, Pair>> found;
    for (long token = 0; token < job.num_tokens; token++)
        for (long i = token * job.k; i < (token + 1) * job.k; i++)
            if (job.weights[i] != 0) found.push_back({job.ids[i], {token, job.weights[i], 0}});
    if (found.empty()) {
        std::fill_n(job.out, job.num_tokens * job.width, 0.0f);
        return;
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    static Work* work = nullptr; // its memory is kept from call to call
    delete work;
    work = new Work{job};
    for (const auto& [expert, pair] : found) {
        if (work->experts.empty() || work->experts.back() != expert) {
            work->experts.push_back(expert);
            work->first.push_back(long(work->pairs.size()));
        }
        work->pairs.push_back(pair);
    }
    work->first.push_back(long(work->pairs.size()));
    work->x.resize(job.num_tokens * work->steps());
    work->inner_columns.resize(work->pairs.size() * work->inner_steps());
    work->inner.resize(work->pairs.size() * job.inner_width);
    crew().run([](void* own) { ((Work*)own)->run(); }, work);
    auto spent = std::chrono::steady_clock::now() - started;
    long tiles = 3 * (job.width / STEP) * (job.inner_width / ROWS); // down's, in another shape
    long each = tiles * (TILE_BYTES + ROWS * SCALE_BYTES);
    job.spent[0] += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
    job.spent[1] += each * long(work->experts.size());
    job.spent[2] += 1;
}

// Answers the calls of a GPU's stream (ops/cuda/host_calls.cu), in its own thread. It spins while
// calls come, one per layer, and sleeps increasingly long while none do.
struct HostWorker {
    const std::atomic<uint64_t>* calls; // [num_calls]  number << 16 | job
    std::atomic<uint64_t>* answered;    // [jobs]
    void* const* jobs;
    uint64_t num_calls;
    std::atomic<bool> is_wanted{true};
    std::thread thread;

    void serve() {
        for (uint64_t number = 1;; number++) {
            const std::atomic<uint64_t>& place = calls[number % num_calls];
            uint64_t call = 0;
            auto started = std::chrono::steady_clock::now();
            for (long i = 1; (call = place.load(std::memory_order_acquire)) >> 16 != number; i++) {
                _mm_pause();
                if (i % 256 != 0) continue;
                if (!is_wanted.load(std::memory_order_relaxed)) return;
                auto waited = std::chrono::steady_clock::now() - started;
                if (waited > LONGEST_SPIN)
                    std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(
                        waited / 100, std::chrono::microseconds(20), LONGEST_SLEEP));
            }
            run_experts(jobs[call & 0xffff]);
            answered[call & 0xffff].store(number, std::memory_order_release);
        }
    }
};

extern "C" void* start_worker(void* calls, void* answered, void* jobs, uint64_t num_calls) {
    auto* worker = new HostWorker{(const std::atomic<uint64_t>*)calls,
                                  (std::atomic<uint64_t>*)answered,
                                  (void* const*)jobs, num_calls};
    worker->thread = std::thread([worker] { worker->serve(); });
    return worker;
}

extern "C" void stop_worker(void* given) {
    auto* worker = (HostWorker*)given;
    worker->is_wanted = false;
    worker->thread.join();
    delete worker;
}
