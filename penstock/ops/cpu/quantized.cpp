// GEMMs of a few tokens with quantized rows: out[t, n] = sum over k of x[t, k] * weight[n, k], with
// fused operations: norm or activation before, bias and residual after.
//
// The layout is that of ops/quantized.py: the codes of a block's even columns are 64 bytes, and so
// are those of its odd columns. Inputs become 16-bit integers with one scale per block, in two
// bytes that are multiplied with the codes separately: the products are exact, and only the inputs
// are rounded, to 1 / 65024 of their block's range. Eight columns of a lane share a scale, so a
// block is scaled once. Offsets of a group are multiplied with the sum of its inputs. FP8 codes are
// multiplied as float32. A row is read once for all tokens and is prefetched far ahead, as in
// skinny_gemm.cpp. Sums have a fixed order, so a token's result does not depend on the others.
//
// Compile-time constants, one set per format: BITS of a code, UNIT columns that share a scale (16,
// 32, 64 or 128), HAS_TABLE if codes map to other bytes, IS_FP8.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <vector>

namespace {

using u8 = uint8_t;
using s8 = int8_t;
constexpr int LANES = 16, BLOCK = 128, HALF = BLOCK / 2, UNITS = BLOCK / UNIT, TOKENS = 4, ROWS = 4;
constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1, HIGH = BITS - LOW;
constexpr bool IS_WIDE = BITS == 8 || HAS_TABLE; // pairs of products do not fit 16 bits
constexpr int AHEAD = 12288;    // bytes to prefetch into L2
constexpr long PREPARED = 16;   // rows whose scales are expanded at a time
constexpr long MOST_TAKEN = 16; // of these blocks per thread at a time
constexpr int SHARES = 4;       // minimum per thread: another program may delay one

#ifdef __AVX512BW__

struct Bytes {
    __m512i v;
};
struct Floats {
    __m512 v;
};

inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes right(Bytes a, int n) { return {(__m512i)((__v16su)a.v >> n)}; }
inline Bytes left(Bytes a, int n) { return {(__m512i)((__v16su)a.v << n)}; }
inline Bytes mask(Bytes a, uint32_t bits) {
    return {_mm512_and_si512(a.v, _mm512_set1_epi32(bits))};
}
inline Bytes either(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Bytes plus(Bytes a, Bytes b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Bytes nothing() { return {_mm512_setzero_si512()}; }
inline Bytes look_up(Bytes table, Bytes codes) { return {_mm512_shuffle_epi8(table.v, codes.v)}; }
inline Bytes load_table(const u8* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))};
}

// sums + products of four unsigned and four signed bytes in each lane
inline Bytes dot(Bytes sums, Bytes codes, Bytes x) {
#ifdef __AVX512VNNI__
    return {_mm512_dpbusd_epi32(sums.v, codes.v, x.v)};
#else
    __m512i low = _mm512_set1_epi16(0xff);
    if constexpr (IS_WIDE) {
        __m512i even = _mm512_madd_epi16(_mm512_and_si512(codes.v, low),
                                         _mm512_srai_epi16(_mm512_slli_epi16(x.v, 8), 8));
        __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(codes.v, 8), _mm512_srai_epi16(x.v, 8));
        return {_mm512_add_epi32(sums.v, _mm512_add_epi32(even, odd))};
    }
    return {_mm512_add_epi32(
        sums.v, _mm512_madd_epi16(_mm512_maddubs_epi16(codes.v, x.v), _mm512_set1_epi16(1)))};
#endif
}

inline Floats convert(Bytes a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Floats as_floats(Bytes a) { return {_mm512_castsi512_ps(a.v)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats all(float x) { return {_mm512_set1_ps(x)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline float total(Floats a) { return _mm512_reduce_add_ps(a.v); }

// UNITS numbers, each broadcast to the lanes of its columns
inline Floats spread(const float* p) {
    if constexpr (UNITS == 1) return all(*p);
    constexpr int EACH = LANES / UNITS;
    alignas(64) static const int places[16] = {
        0 / EACH, 1 / EACH, 2 / EACH,  3 / EACH,  4 / EACH,  5 / EACH,  6 / EACH,  7 / EACH,
        8 / EACH, 9 / EACH, 10 / EACH, 11 / EACH, 12 / EACH, 13 / EACH, 14 / EACH, 15 / EACH};
    __m512 own = _mm512_castps256_ps512(_mm256_loadu_ps(p));
    return {_mm512_permutexvar_ps(_mm512_load_si512(places), own)};
}

#else

struct Bytes {
    __m256i a, b;
};
struct Floats {
    __m256 a, b;
};

inline Bytes load_bytes(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Bytes right(Bytes x, int n) {
    return {(__m256i)((__v8su)x.a >> n), (__m256i)((__v8su)x.b >> n)};
}
inline Bytes left(Bytes x, int n) {
    return {(__m256i)((__v8su)x.a << n), (__m256i)((__v8su)x.b << n)};
}
inline Bytes mask(Bytes x, uint32_t bits) {
    __m256i m = _mm256_set1_epi32(bits);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Bytes either(Bytes x, Bytes y) {
    return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
inline Bytes plus(Bytes x, Bytes y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline Bytes nothing() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Bytes look_up(Bytes t, Bytes x) {
    return {_mm256_shuffle_epi8(t.a, x.a), _mm256_shuffle_epi8(t.b, x.b)};
}
inline Bytes load_table(const u8* p) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return {t, t};
}
inline __m256i dot_one(__m256i sums, __m256i codes, __m256i x) {
    if constexpr (IS_WIDE) {
        __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
        __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
        return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
    }
    return _mm256_add_epi32(
        sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
inline Bytes dot(Bytes s, Bytes c, Bytes x) {
    return {dot_one(s.a, c.a, x.a), dot_one(s.b, c.b, x.b)};
}

inline Floats convert(Bytes x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats as_floats(Bytes x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline float total(Floats x) {
    float lanes[8], sum = 0;
    _mm256_storeu_ps(lanes, _mm256_add_ps(x.a, x.b));
    for (float lane : lanes) sum += lane;
    return sum;
}
inline Floats spread(const float* p) {
    if constexpr (UNITS == 1) return all(*p);
    constexpr int EACH_LANES = LANES / UNITS;
    alignas(64) float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = p[i / EACH_LANES];
    return load(lanes);
}

#endif

constexpr uint32_t in_each_byte(int bits) { return ((1u << bits) - 1) * 0x01010101u; }

// Bytes per row of a plane, and the `bits` of each code of a block's even (0) or odd (1) columns.
inline long bytes_of(long blocks, int bits) {
    return bits == 8 ? blocks * BLOCK : (blocks * bits + 3) / 4 * HALF;
}

constexpr int blocks_in(int bits) {
    return bits >= 4 ? 1 : 4 / bits;
} // that share 64 bytes of a plane
constexpr int STEP = std::max(blocks_in(LOW), HIGH ? blocks_in(HIGH ? HIGH : 4) : 1);

// Of block `first + part`, where `first` is a multiple of STEP; `to`: the lowest bit of the fields
// here.
template <int bits> inline Bytes fields(const u8* row, long first, int part, int odd, int to) {
    if constexpr (bits == 8) return load_bytes(row + (2 * (first + part) + odd) * HALF);
    Bytes own = load_bytes(row + (first + part) / blocks_in(bits) * HALF);
    int from = bits * (2 * (part % blocks_in(bits)) + odd);
    return mask(from > to ? right(own, from - to) : left(own, to - from), in_each_byte(bits) << to);
}

struct Rows {
    const u8 *low, *high;
    long low_bytes, high_bytes; // per row

    Bytes codes(long n, long first, int part, int odd) const {
        Bytes code = fields<LOW>(low + n * low_bytes, first, part, odd, 0);
        if constexpr (HIGH > 0)
            code =
                either(code, fields<HIGH ? HIGH : 1>(high + n * high_bytes, first, part, odd, LOW));
        return code;
    }
};

// E4M3 of every fourth byte: sign to the top, the rest to float32's position, with E4M3's bias.
inline Floats widen_fp8(Bytes codes, int byte) {
    Bytes one = right(codes, 8 * byte);
    return mul(as_floats(either(left(mask(one, 0x80), 24), left(mask(one, 0x7f), 20))),
               all(0x1p120f));
}

enum Type { NONE, UINT8, INT8, FLOAT16, BFLOAT16, FLOAT32 };

struct Numbers { // one per group of columns: [N, groups]
    const void *fine, *coarse;
    int type, coarse_type, repeat; // coarse: FLOAT16 or FLOAT32

    // Numbers `first` to `first + count`, in float32. Several rows at once are faster, if they are
    // aligned.
    void expand(long first, long count, long first_coarse, float* __restrict out) const {
        const float* own = (const float*)coarse + first_coarse;
        if (!coarse)
            own = nullptr;
        else if (coarse_type == FLOAT16)
            own = widened((const uint16_t*)coarse + first_coarse, (count + repeat - 1) / repeat);
        switch (type) {
        case UINT8:
            widen((const u8*)fine + first, count, own, out);
            break;
        case INT8:
            widen((const s8*)fine + first, count, own, out);
            break;
        case FLOAT16:
            widen((const _Float16*)fine + first, count, own, out);
            break;
        case BFLOAT16: {
            const uint16_t* halves = (const uint16_t*)fine + first;
            for (long g = 0; g < count; g++) ((uint32_t*)out)[g] = uint32_t(halves[g]) << 16;
            if (own)
                for (long g = 0; g < count; g++) out[g] = own[g / repeat] * out[g];
            break;
        }
        case FLOAT32:
            widen((const float*)fine + first, count, own, out);
            break;
        }
    }
    // All at once: converting them one by one would take longer than the GEMM.
    static const float* widened(const uint16_t* halves, long count) {
        thread_local std::vector<float> wide;
        wide.resize(count);
        long i = 0;
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(wide.data() + i,
                             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(halves + i))));
        for (; i < count; i++) wide[i] = _cvtsh_ss(halves[i]);
        return wide.data();
    }
    template <typename T>
    void widen(const T* __restrict from, long count, const float* __restrict by,
               float* __restrict out) const {
        if (by && repeat == 8) return widen_each<8>(from, count, by, out);
        if (by && repeat == 16) return widen_each<16>(from, count, by, out);
        for (long g = 0; g < count; g++) out[g] = float(from[g]);
        if (by)
            for (long g = 0; g < count; g++) out[g] = by[g / repeat] * out[g];
    }
    template <int each, typename T>
    static void widen_each(const T* __restrict from, long count, const float* __restrict by,
                           float* __restrict out) {
        long c = 0;
        for (; (c + 1) * each <= count; c++)
            for (int g = 0; g < each; g++) out[c * each + g] = by[c] * float(from[c * each + g]);
        for (long g = c * each; g < count; g++) out[g] = by[c] * float(from[g]);
    }
    void expand_row(long n, long groups, float* out) const {
        expand(n * groups, groups, n * ((groups + repeat - 1) / repeat), out);
    }
};

struct Weight {
    Rows rows;
    Numbers scales, offsets; // offsets: type NONE if there are none
    bool are_zeros;
    long group, K, groups, blocks;

    long units() const { return blocks * UNITS; }
    long stride() const {
        return (units() + LANES - 1) / LANES * LANES;
    } // stride of a row's numbers: whole vectors

    // One number per UNIT columns of some rows; columns past the end get zero weight.
    void prepare(long first, long count, float* scale, float* offset) const {
        spread_units(scales, first, count, scale);
        if (!offset) return;
        spread_units(offsets, first, count, offset);
        if (are_zeros)
            for (long u = 0; u < count * stride(); u++) offset[u] = -offset[u] * scale[u];
    }
    void spread_units(const Numbers& from, long first, long count, float* out) const {
        if (groups == stride() && groups % from.repeat == 0)
            return from.expand(first * groups, count * groups, first * groups / from.repeat, out);
        thread_local std::vector<float> by_group;
        by_group.resize(groups);
        long each = group / UNIT;
        for (long n = 0; n < count; n++, out += stride()) {
            long u = std::min(units(), groups * each);
            if (each == 1)
                from.expand_row(first + n, groups, out);
            else {
                from.expand_row(first + n, groups, by_group.data());
                for (long i = 0; i < u; i++) out[i] = by_group[i / each];
            }
            std::fill(out + u, out + stride(), 0.0f);
        }
    }
};

// e^x, to 2 units in the last place within float32's range. Its loop vectorizes.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;   // the nearest integer
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f; // ln 2 in two parts
    float p = 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    int32_t bits = (int32_t(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

// Preparation of a token before its GEMM: none, an RMS norm, or silu(gate) * up of its two halves.
struct Before {
    const float* norm;
    float eps;
    bool is_swiglu;

    long inputs(long K) const { return is_swiglu ? 2 * K : K; }
    void apply(const float* __restrict x, long K, float* __restrict out) const {
        if (is_swiglu) {
            for (long i = 0; i < K; i++) out[i] = x[i] / (1.0f + exponential(-x[i])) * x[K + i];
        } else if (norm) {
            float lanes[LANES] = {}, sum = 0;
            for (long i = 0; i < K; i++) lanes[i % LANES] += x[i] * x[i];
            for (float lane : lanes) sum += lane;
            float scale = 1.0f / std::sqrt(sum / K + eps);
            for (long i = 0; i < K; i++) out[i] = x[i] * scale * norm[i];
        } else
            std::copy(x, x + K, out);
    }
};

// Tokens in the kernels' layout: even columns of a block, then odd ones.
struct Inputs {
    std::vector<s8> high, low; // [T, blocks, 2, 64]  bytes of integers
    std::vector<float> scales; // [T, blocks]
    std::vector<float> wide;   // [T, blocks, 2, 4, 16]  for FP8, by lane
    std::vector<float> sums;   // [T, stride]  of rounded inputs, by unit

    Inputs(const float* x, const Before& before, long T, long K, long blocks, long stride) {
        long padded = blocks * BLOCK;
        if (IS_FP8)
            wide.resize(T * padded);
        else
            high.resize(T * padded), low.resize(T * padded), scales.resize(T * blocks);
        sums.resize(T * stride);
#pragma omp parallel for if (T > 1)
        for (long t = 0; t < T; t++) {
            thread_local std::vector<float> row;
            row.assign(padded, 0.0f);
            before.apply(x + t * before.inputs(K), K, row.data());
            for (long block = 0; block < blocks; block++) {
                float *own = row.data() + block * BLOCK, *out = &sums[t * stride + block * UNITS];
                long at = t * padded + block * BLOCK;
                if (IS_FP8) {
                    spread_lanes(own, wide.data() + at);
                    for (int u = 0; u < UNITS; u++) {
                        out[u] = 0;
                        for (int i = 0; i < UNIT; i++) out[u] += own[u * UNIT + i];
                    }
                } else
                    round(own, at, scales[t * blocks + block], out);
            }
        }
    }
    static void spread_lanes(const float* own, float* out) {
        for (int odd = 0; odd < 2; odd++)
            for (int byte = 0; byte < 4; byte++)
                for (int lane = 0; lane < LANES; lane++) *out++ = own[8 * lane + 2 * byte + odd];
    }
    // Integer loops, which vectorize: their sums have no order.
    void round(const float* own, long at, float& scale, float* sums_of_units) {
        int32_t bits[BLOCK], values[BLOCK], largest_bits = 0;
        std::memcpy(bits, own, sizeof bits);
        for (int i = 0; i < BLOCK; i++)
            largest_bits = std::max(largest_bits, bits[i] & 0x7fffffff);
        float largest;
        std::memcpy(&largest, &largest_bits, sizeof largest);
        scale = largest / 32512;
        float inverse = largest > 0 ? 32512 / largest : 0, shifted[BLOCK];
        for (int i = 0; i < BLOCK; i++) shifted[i] = own[i] * inverse + 12582912.0f;
        std::memcpy(values, shifted, sizeof values); // the last bits are the nearest integer
        for (int i = 0; i < BLOCK; i++) values[i] -= 0x4b400000;
        for (int odd = 0; odd < 2; odd++)
            for (int i = 0; i < HALF; i++) {
                int value = values[2 * i + odd], upper = (value + 128) >> 8;
                high[at + odd * HALF + i] = s8(upper);
                low[at + odd * HALF + i] = s8(value - 256 * upper);
            }
        for (int u = 0; u < UNITS; u++) {
            int32_t sum = 0;
            for (int i = 0; i < UNIT; i++) sum += values[u * UNIT + i];
            sums_of_units[u] = float(sum) * scale;
        }
    }
};

// The parameters of some rows' codes: a code is (value + bias) / unit.
struct Sides {
    const float *scales, *offsets; // offsets: or null
    float bias, unit;

    Sides from(long row) const {
        return {scales + row, offsets ? offsets + row : nullptr, bias, unit};
    }

    // Bias and offsets enter a row's sums through the sums of the inputs, lane by lane.
    void add(Floats& lanes, long row, const float* sums_of_x, long count) const {
        if (bias != 0)
            for (long i = 0; i < count; i += LANES)
                lanes = fma(mul(load(scales + row + i), all(-bias)), load(sums_of_x + i), lanes);
        if (unit != 1) lanes = mul(lanes, all(unit));
        if (offsets)
            for (long i = 0; i < count; i += LANES)
                lanes = fma(load(offsets + row + i), load(sums_of_x + i), lanes);
    }
};

// Adds the products of one block of one row to the lanes of each token.
template <int tokens>
inline void add_block(const Weight& w, Bytes table, const Inputs& x, long token, long row,
                      long step, int part, const float* scales, Floats* lanes) {
    long block = step + part;
    Bytes even = w.rows.codes(row, step, part, 0), odd = w.rows.codes(row, step, part, 1);
    if (HAS_TABLE) even = look_up(table, even), odd = look_up(table, odd);
    Floats scale = spread(scales + block * UNITS), values[IS_FP8 ? 8 : 1];
    if constexpr (IS_FP8)
        for (int i = 0; i < 8; i++) values[i] = widen_fp8(i < 4 ? even : odd, i % 4);
    for (int t = 0; t < tokens; t++) {
        long at = (token + t) * w.blocks + block;
        if constexpr (IS_FP8) {
            Floats sum = zero();
            for (int i = 0; i < 8; i++)
                sum = fma(values[i], load(x.wide.data() + at * BLOCK + i * LANES), sum);
            lanes[t] = fma(sum, scale, lanes[t]);
        } else {
            const s8 *high = x.high.data() + at * BLOCK, *low = x.low.data() + at * BLOCK;
            Bytes upper = dot(dot(nothing(), even, load_bytes(high)), odd, load_bytes(high + HALF));
            Bytes lower =
                dot(dot(left(upper, 8), even, load_bytes(low)), odd, load_bytes(low + HALF));
            lanes[t] = fma(convert(lower), mul(scale, all(x.scales[at])), lanes[t]);
        }
    }
}

template <int rows, int tokens>
void multiply(const Weight& w, Bytes table, const Inputs& x, long token, long first,
              const Sides& sides, float* sums) {
    Floats lanes[rows][tokens];
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) lanes[n][t] = zero();
    for (long step = 0; step < w.blocks; step += STEP)
#pragma GCC unroll 4
        for (int part = 0; part < STEP; part++) {
            if (STEP > 1 && step + part >= w.blocks) break;
            for (int n = 0; n < rows; n++) {
                __builtin_prefetch(w.rows.low + (first + n) * w.rows.low_bytes +
                                       (step + part) * BLOCK * LOW / 8 + AHEAD,
                                   0, 2);
                if (HIGH && part == 0)
                    __builtin_prefetch(w.rows.high + (first + n) * w.rows.high_bytes +
                                           step * BLOCK * HIGH / 8 + AHEAD,
                                       0, 2);
                add_block<tokens>(w, table, x, token, first + n, step, part,
                                  sides.scales + n * w.stride(), lanes[n]);
            }
        }
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) {
            sides.add(lanes[n][t], n * w.stride(), x.sums.data() + (token + t) * w.stride(),
                      w.stride());
            sums[t * ROWS + n] = total(lanes[n][t]);
        }
}

// Makes the two counts constants, so that all sums stay in registers.
template <int rows, int tokens = TOKENS, typename... Given>
void multiply_some(long num_tokens, const Given&... given) {
    if (num_tokens == tokens) return multiply<rows, tokens>(given...);
    if constexpr (tokens > 1) multiply_some<rows, tokens - 1>(num_tokens, given...);
}

Weight weight_of(const u8* low, const u8* high, const void* scale, int scale_type,
                 const void* scale_coarse, int scale_coarse_type, int scale_repeat,
                 const void* offset, int offset_type, const void* offset_coarse,
                 int offset_coarse_type, int offset_repeat, int are_zeros, long group, long K) {
    long blocks = (K + BLOCK - 1) / BLOCK;
    return {{low, high, bytes_of(blocks, LOW), HIGH ? bytes_of(blocks, HIGH) : 0},
            {scale, scale_coarse, scale_type, scale_coarse_type, scale_repeat},
            {offset, offset_coarse, offset_type, offset_coarse_type, offset_repeat},
            bool(are_zeros),
            group,
            K,
            (K + group - 1) / group,
            blocks};
}

} // namespace

#define WEIGHT                                                                                     \
    const u8 *low, const u8 *high, const void *scale, int scale_type, const void *scale_coarse,    \
        int scale_coarse_type, int scale_repeat, const void *offset, int offset_type,              \
        const void *offset_coarse, int offset_coarse_type, int offset_repeat, int are_zeros,       \
        long group, long K
#define GIVEN                                                                                      \
    low, high, scale, scale_type, scale_coarse, scale_coarse_type, scale_repeat, offset,           \
        offset_type, offset_coarse, offset_coarse_type, offset_repeat, are_zeros, group, K

// x [T, K], or [T, 2K] of swiglu; out and residual [T, stride]; rows 0 to N. A code, or the byte
// that the table has for it, is (value + zero) / unit. Norm, bias and residual may be null.
extern "C" void multiply_quantized(WEIGHT, const u8* bytes, float zero, float unit, const float* x,
                                   const float* norm, float eps, int is_swiglu, const float* bias,
                                   const float* residual, float* out, long T, long N, long stride) {
    Weight w = weight_of(GIVEN);
    bool has_offsets = offset_type != NONE;
    Inputs inputs(x, {norm, eps, bool(is_swiglu)}, T, K, w.blocks, w.stride());
    u8 no_table[16] = {};
    Bytes table = load_table(bytes ? bytes : no_table);
    long num_blocks = (N + PREPARED - 1) / PREPARED, row_stride = w.stride();
    long taken = std::clamp(num_blocks / (SHARES * omp_get_max_threads()), 1l, MOST_TAKEN);
#pragma omp parallel
    {
        // spread() reads past the end
        std::vector<float> scales(PREPARED * row_stride + LANES),
            offsets(has_offsets ? PREPARED * row_stride : 0);
        Sides sides = {scales.data(), has_offsets ? offsets.data() : nullptr, zero, unit};
#pragma omp for schedule(dynamic, taken)
        for (long block = 0; block < num_blocks; block++) {
            long begin = block * PREPARED, end = std::min(N, begin + PREPARED);
            w.prepare(begin, end - begin, scales.data(), has_offsets ? offsets.data() : nullptr);
            for (long start = 0; start < T; start += TOKENS) {
                long num_tokens = std::min<long>(TOKENS, T - start);
                for (long first = begin; first < end; first += ROWS) {
                    long num_rows = std::min<long>(ROWS, end - first);
                    float sums[TOKENS * ROWS];
                    Sides own = sides.from((first - begin) * row_stride);
                    if (num_rows == ROWS)
                        multiply_some<ROWS>(num_tokens, w, table, inputs, start, first, own,
                                            (float*)sums);
                    else
                        for (long n = 0; n < num_rows; n++)
                            multiply_some<1>(num_tokens, w, table, inputs, start, first + n,
                                             own.from(n * row_stride), sums + n);
                    for (long t = 0; t < num_tokens; t++)
                        for (long n = 0; n < num_rows; n++) {
                            long at = (start + t) * stride + first + n;
                            float sum = sums[t * ROWS + n] + (bias ? bias[first + n] : 0.0f);
                            out[at] = sum + (residual ? residual[at] : 0.0f);
                        }
                }
            }
        }
    }
}

// out [count, K]: rows `first` to `first + count` in float32, rounded as ops/quantized.py rounds
// them. A code is levels[code], or code - bias where there are none.
extern "C" void expand_quantized(WEIGHT, const float* levels, int bias, float* out, long first,
                                 long count) {
    Weight w = weight_of(GIVEN);
#pragma omp parallel for
    for (long row = 0; row < count; row++) {
        thread_local std::vector<float> scales, offsets;
        scales.resize(w.groups), offsets.assign(w.groups, 0.0f);
        w.scales.expand_row(first + row, w.groups, scales.data());
        if (offset_type != NONE) w.offsets.expand_row(first + row, w.groups, offsets.data());
        for (long block = 0; block < w.blocks; block++) {
            u8 codes[BLOCK];
            for (int odd = 0; odd < 2; odd++) {
                Bytes own = w.rows.codes(first + row, block / STEP * STEP, int(block % STEP), odd);
                std::memcpy(codes + odd * HALF, &own, HALF);
            }
            u8 ordered[BLOCK];
            for (int i = 0; i < HALF; i++)
                ordered[2 * i] = codes[i], ordered[2 * i + 1] = codes[HALF + i];
            long begin = block * BLOCK, end = std::min(K, begin + BLOCK);
            for (long k = begin; k < end; k += UNIT) {
                float scale = scales[k / group], offset = offsets[k / group],
                      *own = out + row * K + k;
                const u8* code = ordered + (k - begin);
                int count = int(std::min<long>(UNIT, end - k));
                float values[UNIT];
                if (levels)
                    for (int i = 0; i < count; i++) values[i] = levels[code[i]];
                else
                    for (int i = 0; i < count; i++) values[i] = float(int(code[i]) - bias);
                if (offset_type == NONE)
                    for (int i = 0; i < count; i++) own[i] = values[i] * scale;
                else if (are_zeros)
                    for (int i = 0; i < count; i++) own[i] = (values[i] - offset) * scale;
                else
                    for (int i = 0; i < count; i++) own[i] = values[i] * scale + offset;
            }
        }
    }
}
