// GEMMs of a few tokens with a bf16 weight: out[t, n] = sum over k of x[t, k] * weight[n, k].
//
// Such a GEMM is bound by reading the weight. The weight has the checkpoint's layout and is read
// once, a few rows at a time, and prefetched far ahead: the hardware prefetcher alone reaches half
// of the memory bandwidth. Sums are float32 in a fixed order, so a token has the same result in
// every batch.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using bf16 = uint16_t;
constexpr int ROWS = 4;  // of the weight at a time
constexpr int LINE = 32; // elements per cache line
constexpr int AHEAD = 32768; // elements, 64 KB: prefetched into L2
constexpr long MOST_TAKEN = 64; // blocks of ROWS rows per thread at a time
constexpr int SHARES = 4;       // minimum per thread: another program may delay one

inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline bf16 round_to_bf16(float value) {
    if (value != value) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifdef __AVX512BF16__ // multiplies pairs of bf16 directly

using Input = bf16;
using Vector = __m512bh;
using Sums = __m512;
constexpr int WIDTH = 32, TOKENS = 8;

inline Vector load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline void add_product(Sums& sums, Vector a, Vector b) { sums = _mm512_dpbf16_ps(sums, a, b); }
inline float total(Sums sums) { return _mm512_reduce_add_ps(sums); }
inline float value_of(bf16 x) { return widen(x); }

const Input* prepared(const bf16* x, long) { return x; }

#else // widened to float32 in registers

#ifdef __AVX512F__
constexpr int WIDTH = 16, TOKENS = 4;
#else
constexpr int WIDTH = 8, TOKENS = 2;
#endif
using Input = float;
using Vector = float __attribute__((vector_size(WIDTH * 4), aligned(4)));
using Sums = float __attribute__((vector_size(WIDTH * 4)));
using Bits = uint32_t __attribute__((vector_size(WIDTH * 4)));
using Halves = bf16 __attribute__((vector_size(WIDTH * 2), aligned(2)));

inline Sums load(const float* p) { return *(const Vector*)p; }
inline Sums load(const bf16* p) {
    return (Sums)(__builtin_convertvector(*(const Halves*)p, Bits) << 16);
}
inline void add_product(Sums& sums, Sums a, Sums b) { sums += a * b; }
inline float value_of(float x) { return x; }

inline float total(Sums sums) {
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

const Input* prepared(const bf16* x, long count) {
    static thread_local std::vector<float> wide;
    wide.resize(count);
    for (long i = 0; i < count; i++) wide[i] = widen(x[i]);
    return wide.data();
}

#endif

template <int rows, int tokens>
void multiply(const Input* x, const bf16* weight, long K, float* sums) { // sums [TOKENS, ROWS]
    Sums lanes[rows][tokens] = {};
    long k = 0;
    for (; k + LINE <= K; k += LINE) {
        for (int n = 0; n < rows; n++) __builtin_prefetch(weight + n * K + k + AHEAD, 0, 2);
        for (long part = k; part < k + LINE; part += WIDTH) {
            decltype(load(weight)) own[rows];
            for (int n = 0; n < rows; n++) own[n] = load(weight + n * K + part);
            for (int t = 0; t < tokens; t++) {
                auto token = load(x + t * K + part);
                for (int n = 0; n < rows; n++) add_product(lanes[n][t], own[n], token);
            }
        }
    }
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) {
            float sum = total(lanes[n][t]);
            for (long rest = k; rest < K; rest++)
                sum += widen(weight[n * K + rest]) * value_of(x[t * K + rest]);
            sums[t * ROWS + n] = sum;
        }
}

// Makes the two counts constants, so that all sums stay in registers.
template <int rows, int tokens = TOKENS>
void multiply(long num_tokens, const Input* x, const bf16* weight, long K, float* sums) {
    if (num_tokens == tokens) return multiply<rows, tokens>(x, weight, K, sums);
    if constexpr (tokens > 1) multiply<rows, tokens - 1>(num_tokens, x, weight, K, sums);
}

} // namespace

extern "C" void
skinny_gemm(const bf16* x,        // [T, K]
            const bf16* weight,   // [N, K]
            const bf16* bias,     // [N] or null
            const bf16* residual, // [T, N] or null
            void* out,            // [T, N] float if is_wide, otherwise bf16; may be the residual
            int is_wide, long T, long N, long K) {
    const Input* inputs = prepared(x, T * K);
    long num_blocks = (N + ROWS - 1) / ROWS;
    long taken = std::clamp(num_blocks / (SHARES * omp_get_max_threads()), 1l, MOST_TAKEN);
#pragma omp parallel for schedule(dynamic, taken)
    for (long block = 0; block < num_blocks; block++) {
        long first = block * ROWS, num_rows = std::min<long>(ROWS, N - first);
        const bf16* rows = weight + first * K;
        for (long start = 0; start < T; start += TOKENS) {
            long num_tokens = std::min<long>(TOKENS, T - start);
            float sums[TOKENS * ROWS];
            if (num_rows == ROWS)
                multiply<ROWS>(num_tokens, inputs + start * K, rows, K, sums);
            else
                for (long n = 0; n < num_rows; n++)
                    multiply<1>(num_tokens, inputs + start * K, rows + n * K, K, sums + n);
            for (long t = 0; t < num_tokens; t++)
                for (long n = 0; n < num_rows; n++) {
                    long at = (start + t) * N + first + n;
                    float sum = sums[t * ROWS + n];
                    if (bias) sum += widen(bias[first + n]);
                    if (residual) sum += widen(residual[at]);
                    if (is_wide)
                        ((float*)out)[at] = sum;
                    else
                        ((bf16*)out)[at] = round_to_bf16(sum);
                }
        }
    }
}
