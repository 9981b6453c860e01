// Products of a few tokens with quantised rows: out[t, n] = sum over k of x[t, k] * weight[n, k].
//
// The layout is that of ops/quantized.py. Codes become float32 in registers: one shift of 16 words gives 16
// neighbouring columns, and codes of up to 5 bits are looked up in a table that registers hold. A row is read
// once for all tokens, and is asked for long before it is needed, as in few_rows.cpp. What is added to a group's
// values is multiplied with the sum of its inputs. Sums come in one order, so a token has the same result
// whatever stands beside it.
//
// Compiled for one kind of rows: BITS of a code, UNIT columns that share a scale (16, 32 or 128), IS_FP8.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <vector>

namespace {

constexpr int LANES = 16, BLOCK = 128, PIECES = BLOCK / LANES, UNITS = BLOCK / UNIT;
constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1, HIGH = BITS - LOW;
constexpr bool HAS_TABLE = BITS <= 5;
constexpr bool SCALES_SUMS = UNIT >= 32; // once a group; values of the shortest are scaled themselves
constexpr int AHEAD = 32768;    // bytes: on their way to the second cache while these are multiplied
constexpr long MOST_TAKEN = 64; // blocks of rows by a thread at a time
constexpr int SHARES = 4;       // of a thread, at least: another program may hold one thread up

#ifdef __AVX512F__

constexpr int TOKENS = 4, ROWS = 4;
struct Floats { __m512 v; };
struct Words { __m512i v; };

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats all(float x) { return {_mm512_set1_ps(x)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline float total(Floats a) { return _mm512_reduce_add_ps(a.v); }

inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words right(Words a, int n) { return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(n))}; }
inline Words left(Words a, int n) { return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(n))}; }
inline Words mask(Words a, int bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(bits))}; }
inline Words either(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Words minus(Words a, int n) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(n))}; }
inline Floats convert(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Floats as_floats(Words a) { return {_mm512_castsi512_ps(a.v)}; }

struct Table {
    __m512 low, high;
    Table(const float* levels)
        : low(_mm512_loadu_ps(levels)), high(BITS == 5 ? _mm512_loadu_ps(levels + 16) : low) {}
    Floats operator[](Words codes) const { // looks at no other bits than those of an index
        if constexpr (BITS == 5) return {_mm512_permutex2var_ps(low, codes.v, high)};
        return {_mm512_permutexvar_ps(codes.v, low)};
    }
};

#else

constexpr int TOKENS = 4, ROWS = 2;
struct Floats { __m256 a, b; };
struct Words { __m256i a, b; };

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline float total(Floats x) {
    float lanes[8], sum = 0;
    _mm256_storeu_ps(lanes, _mm256_add_ps(x.a, x.b));
    for (float lane : lanes) sum += lane;
    return sum;
}

inline Words load_words(const uint32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline Words right(Words x, int n) {
    __m128i by = _mm_cvtsi32_si128(n);
    return {_mm256_srl_epi32(x.a, by), _mm256_srl_epi32(x.b, by)};
}
inline Words left(Words x, int n) {
    __m128i by = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.a, by), _mm256_sll_epi32(x.b, by)};
}
inline Words mask(Words x, int bits) {
    __m256i m = _mm256_set1_epi32(bits);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Words either(Words x, Words y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Words minus(Words x, int n) {
    __m256i by = _mm256_set1_epi32(n);
    return {_mm256_sub_epi32(x.a, by), _mm256_sub_epi32(x.b, by)};
}
inline Floats convert(Words x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

struct Table { // eights of the levels; the upper bits of a code choose one
    __m256 part[4];
    Table(const float* levels) {
        for (int i = 0; i < (BITS == 5 ? 4 : 2); i++) part[i] = _mm256_loadu_ps(levels + 8 * i);
    }
    __m256 one(__m256i codes) const {
        __m256 by_bit_3 = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
        __m256 found = _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(part[0], codes), _mm256_permutevar8x32_ps(part[1], codes), by_bit_3);
        if constexpr (BITS < 5) return found;
        __m256 upper = _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(part[2], codes), _mm256_permutevar8x32_ps(part[3], codes), by_bit_3);
        return _mm256_blendv_ps(found, upper, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 27)));
    }
    Floats operator[](Words x) const { return {one(x.a), one(x.b)}; }
};

#endif

// Words in a row of a plane of so many bits, and the 16 of them that hold a block's piece.
inline long words_of(long K, int bits) { return (K + 512 / bits - 1) / (512 / bits) * LANES; }

template <int bits> inline Words plane(const uint32_t* row, long block, int piece) {
    constexpr int IN_WORD = 32 / bits;
    long at = block * PIECES + piece;
    return right(load_words(row + at / IN_WORD * LANES), bits * int(at % IN_WORD));
}

struct Rows {
    const uint32_t *low, *high;
    const float* levels; // of codes that are looked up
    int bias;
    long low_words, high_words;

    Floats values(const Table& table, long n, long block, int piece) const {
        Words code = plane<LOW>(low + n * low_words, block, piece);
        if constexpr (IS_FP8) { // E4M3: sign to the top, the rest where float32 has it, but for its bias
            Words sign = left(mask(code, 0x80), 24), rest = left(mask(code, 0x7f), 20);
            return mul(as_floats(either(sign, rest)), all(0x1p120f));
        }
        if constexpr (HIGH > 0) {
            Words upper = plane<HIGH>(high + n * high_words, block, piece);
            code = either(mask(code, (1 << LOW) - 1), left(mask(upper, (1 << HIGH) - 1), LOW));
        } else if constexpr (BITS < 4 || !HAS_TABLE) code = mask(code, (1 << BITS) - 1);
        if constexpr (HAS_TABLE) return table[code];
        return convert(minus(code, bias));
    }
};

enum Type { NONE, UINT8, INT8, FLOAT16, BFLOAT16, FLOAT32 };

struct Blocks { // [N, groups]
    const void* fine;
    const float* coarse;
    int type, repeat;

    // Numbers `first` to `first + count`, in float32. Several rows at once are quicker, where they are aligned.
    void expand(long first, long count, long first_coarse, float* __restrict out) const {
        switch (type) {
        case UINT8: widen((const uint8_t*)fine + first, count, out); break;
        case INT8: widen((const int8_t*)fine + first, count, out); break;
        case FLOAT16: widen((const _Float16*)fine + first, count, out); break;
        case BFLOAT16: {
            const uint16_t* own = (const uint16_t*)fine + first;
            for (long g = 0; g < count; g++) ((uint32_t*)out)[g] = uint32_t(own[g]) << 16;
            break;
        }
        case FLOAT32: widen((const float*)fine + first, count, out); break;
        }
        if (!coarse) return;
        const float* own = coarse + first_coarse;
        if (repeat == 8) scale<8>(own, count, out);
        else if (repeat == 16) scale<16>(own, count, out);
        else
            for (long g = 0; g < count; g++) out[g] = own[g / repeat] * out[g];
    }
    template <typename T> static void widen(const T* __restrict from, long count, float* __restrict out) {
        for (long g = 0; g < count; g++) out[g] = float(from[g]);
    }
    template <int each> static void scale(const float* __restrict by, long count, float* __restrict out) {
        long c = 0;
        for (; (c + 1) * each <= count; c++)
            for (int g = 0; g < each; g++) out[c * each + g] = by[c] * out[c * each + g];
        for (long g = c * each; g < count; g++) out[g] = by[c] * out[g];
    }
    void expand_row(long n, long groups, float* out) const {
        expand(n * groups, groups, n * ((groups + repeat - 1) / repeat), out);
    }
};

struct Weight {
    Rows rows;
    Blocks scales, offsets; // offsets: type NONE where there are none
    bool are_zeros;
    long group, K, groups, units;

    // A number for each UNIT columns of some rows; columns past the end count nothing.
    void prepare(long first, long count, float* scale, float* offset) const {
        spread(scales, first, count, scale);
        if (!offset) return;
        spread(offsets, first, count, offset);
        if (are_zeros)
            for (long u = 0; u < count * units; u++) offset[u] = -offset[u] * scale[u];
    }
    void spread(const Blocks& from, long first, long count, float* out) const {
        if (groups == units && groups % from.repeat == 0)
            return from.expand(first * groups, count * groups, first * groups / from.repeat, out);
        thread_local std::vector<float> by_group;
        by_group.resize(groups);
        long each = group / UNIT;
        for (long n = 0; n < count; n++, out += units) {
            from.expand_row(first + n, groups, by_group.data());
            long u = 0;
            for (long g = 0; g < groups; g++)
                for (long end = std::min(units, u + each); u < end; u++) out[u] = by_group[g];
            std::fill(out + u, out + units, 0.0f);
        }
    }
};

template <int rows, int tokens>
void multiply(const Weight& w, const Table& table, const float* x, long stride, long first, const float* scales, float* sums) {
    Floats lanes[rows][tokens];
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) lanes[n][t] = zero();
    long blocks = w.units / UNITS;
    for (long block = 0; block < blocks; block++) {
        for (int n = 0; n < rows; n++)
            __builtin_prefetch((const char*)(w.rows.low + (first + n) * w.rows.low_words) + block * BLOCK * LOW / 8 + AHEAD, 0, 2);
#pragma GCC unroll 8
        for (int unit = 0; unit < UNITS; unit++) {
            Floats scale[rows], group[rows][tokens];
            for (int n = 0; n < rows; n++) {
                scale[n] = all(scales[n * w.units + block * UNITS + unit]);
                for (int t = 0; t < tokens; t++) group[n][t] = zero();
            }
#pragma GCC unroll 8
            for (int i = 0; i < UNIT / LANES; i++) {
                int piece = unit * (UNIT / LANES) + i;
                const float* column = x + block * BLOCK + piece * LANES;
                for (int n = 0; n < rows; n++) {
                    Floats values = w.rows.values(table, first + n, block, piece);
                    if constexpr (!SCALES_SUMS) values = mul(values, scale[n]);
                    for (int t = 0; t < tokens; t++) {
                        Floats& sum = SCALES_SUMS ? group[n][t] : lanes[n][t];
                        sum = fma(values, load(column + t * stride), sum);
                    }
                }
            }
            if constexpr (SCALES_SUMS)
                for (int n = 0; n < rows; n++)
                    for (int t = 0; t < tokens; t++) lanes[n][t] = fma(group[n][t], scale[n], lanes[n][t]);
        }
    }
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) sums[t * ROWS + n] = total(lanes[n][t]);
}

// The two counts become constants, so that all sums stay in registers.
template <int rows, int tokens = TOKENS, typename... Given>
void multiply_some(long num_tokens, const Given&... given) {
    if (num_tokens == tokens) return multiply<rows, tokens>(given...);
    if constexpr (tokens > 1) multiply_some<rows, tokens - 1>(num_tokens, given...);
}

float dot(const float* a, const float* b, long count) {
    Floats sums = zero();
    long i = 0;
    for (; i + LANES <= count; i += LANES) sums = fma(load(a + i), load(b + i), sums);
    float sum = total(sums);
    for (; i < count; i++) sum += a[i] * b[i];
    return sum;
}

Weight weight_of(
    const uint32_t* low, const uint32_t* high, const float* levels, int bias,
    const void* scale, int scale_type, const float* scale_coarse, int scale_repeat,
    const void* offset, int offset_type, const float* offset_coarse, int offset_repeat,
    int are_zeros, long group, long K) {
    long units = (K + BLOCK - 1) / BLOCK * UNITS, high_words = HIGH ? words_of(K, HIGH ? HIGH : 1) : 0;
    return {{low, high, levels, bias, words_of(K, LOW), high_words},
            {scale, scale_coarse, scale_type, scale_repeat},
            {offset, offset_coarse, offset_type, offset_repeat},
            bool(are_zeros), group, K, (K + group - 1) / group, units};
}

} // namespace

#define WEIGHT                                                                                                        \
    const uint32_t *low, const uint32_t *high, const float *levels, int bias, const void *scale, int scale_type,      \
        const float *scale_coarse, int scale_repeat, const void *offset, int offset_type, const float *offset_coarse, \
        int offset_repeat, int are_zeros, long group, long K
#define GIVEN                                                                                              \
    low, high, levels, bias, scale, scale_type, scale_coarse, scale_repeat, offset, offset_type, offset_coarse, \
        offset_repeat, are_zeros, group, K

// x [T, stride] with zeros after K, out [T, out_stride]; rows 0 to N.
extern "C" void multiply_quantized(WEIGHT, const float* x, float* out, long T, long N, long stride, long out_stride) {
    Weight w = weight_of(GIVEN);
    bool has_offsets = offset_type != NONE;
    std::vector<float> sums_of_x;
    if (has_offsets) {
        sums_of_x.resize(T * w.units);
        for (long t = 0; t < T; t++)
            for (long u = 0; u < w.units; u++) {
                float sum = 0;
                for (int i = 0; i < UNIT; i++) sum += x[t * stride + u * UNIT + i];
                sums_of_x[t * w.units + u] = sum;
            }
    }
    Table table(HAS_TABLE ? levels : (const float*)x);
    long num_blocks = (N + ROWS - 1) / ROWS;
    long taken = std::clamp(num_blocks / (SHARES * omp_get_max_threads()), 1l, MOST_TAKEN);
#pragma omp parallel for schedule(dynamic, taken)
    for (long block = 0; block < num_blocks; block++) {
        long first = block * ROWS, num_rows = std::min<long>(ROWS, N - first);
        thread_local std::vector<float> scales, offsets;
        scales.resize(ROWS * w.units), offsets.resize(ROWS * w.units);
        w.prepare(first, num_rows, scales.data(), has_offsets ? offsets.data() : nullptr);
        for (long start = 0; start < T; start += TOKENS) {
            long num_tokens = std::min<long>(TOKENS, T - start);
            float sums[TOKENS * ROWS];
            const float* own = x + start * stride;
            if (num_rows == ROWS) multiply_some<ROWS>(num_tokens, w, table, own, stride, first, scales.data(), (float*)sums);
            else
                for (long n = 0; n < num_rows; n++)
                    multiply_some<1>(num_tokens, w, table, own, stride, first + n, scales.data() + n * w.units, sums + n);
            for (long t = 0; t < num_tokens; t++)
                for (long n = 0; n < num_rows; n++) {
                    float sum = sums[t * ROWS + n];
                    if (has_offsets) sum += dot(offsets.data() + n * w.units, sums_of_x.data() + (start + t) * w.units, w.units);
                    out[(start + t) * out_stride + first + n] = sum;
                }
        }
    }
}

// out [count, K]: rows `first` to `first + count` in float32, rounded as ops/quantized.py rounds them.
extern "C" void expand_quantized(WEIGHT, float* out, long first, long count) {
    Weight w = weight_of(GIVEN);
    float nothing[32] = {};
    Table table(HAS_TABLE ? levels : nothing);
#pragma omp parallel for
    for (long row = 0; row < count; row++) {
        thread_local std::vector<float> scales, offsets;
        scales.resize(w.groups), offsets.resize(w.groups);
        w.scales.expand_row(first + row, w.groups, scales.data());
        if (offset_type != NONE) w.offsets.expand_row(first + row, w.groups, offsets.data());
        for (long k = 0; k < K; k += LANES) {
            Floats values = w.rows.values(table, first + row, k / BLOCK, int(k % BLOCK / LANES));
            Floats scale = all(scales[k / group]), offset = all(offset_type != NONE ? offsets[k / group] : 0.0f);
            if (offset_type == NONE) values = mul(values, scale);
            else if (are_zeros) values = mul(sub(values, offset), scale);
            else values = add(mul(values, scale), offset);
            if (k + LANES <= K) store(out + row * K + k, values);
            else {
                float last[LANES];
                store(last, values);
                std::copy(last, last + K - k, out + row * K + k);
            }
        }
    }
}
