// Rows of quantized weights as ops/quantized.py stores them: planes of codes, scales and offsets.
//
// The codes of a block's even columns are 64 bytes, and so are those of its odd columns. Eight
// columns of a lane share a scale.
//
// Compile-time constants, one set per format: BITS of a code, UNIT columns that share a scale (16,
// 32, 64 or 128), HAS_TABLE if codes map to other bytes, IS_FP8.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <new>
#include <omp.h>
#include <type_traits>
#include <vector>

namespace {

using u8 = uint8_t;
using s8 = int8_t;
constexpr int LANES = 16, BLOCK = 128, HALF = BLOCK / 2, UNITS = BLOCK / UNIT;
constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1, HIGH = BITS - LOW;
constexpr bool IS_WIDE = BITS == 8 || HAS_TABLE; // pairs of products do not fit 16 bits

// A vector that begins at a cache line: a load of 64 bytes across two lines takes twice as long.
template <typename T> struct AtLine {
    using value_type = T;

    T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const AtLine&) const { return true; }
    bool operator!=(const AtLine&) const { return false; }
};
template <typename T> using Array = std::vector<T, AtLine<T>>;

// What a thread takes at a time of some items: of several shares, because another program may delay
// a thread; of few, because the items after the last are prefetched in vain.
inline long share_of(long num_items) {
    return std::max(num_items / (4 * omp_get_max_threads()), 1l);
}

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
inline Bytes nothing() { return {_mm512_setzero_si512()}; }
inline Bytes each(int32_t word) { return {_mm512_set1_epi32(word)}; }
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

// sums + products of two signed 16-bit integers in each lane
inline Bytes dot_pairs(Bytes sums, Bytes codes, Bytes x) {
#ifdef __AVX512VNNI__
    return {_mm512_dpwssd_epi32(sums.v, codes.v, x.v)};
#else
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(codes.v, x.v))};
#endif
}

inline Floats convert(Bytes a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Floats as_floats(Bytes a) { return {_mm512_castsi512_ps(a.v)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats all(float x) { return {_mm512_set1_ps(x)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }

// The sums over lanes of 16 vectors, each in the same order.
inline Floats totals(const Floats* v) {
    __m512 fours[4], pairs[2];
    for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i].v, v[4 * i + 1].v),
                                 _mm512_unpackhi_ps(v[4 * i].v, v[4 * i + 1].v));
        __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i + 2].v, v[4 * i + 3].v),
                                 _mm512_unpackhi_ps(v[4 * i + 2].v, v[4 * i + 3].v));
        fours[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    for (int i = 0; i < 2; i++)
        pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88),
                          _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd))};
}

// UNITS numbers, each broadcast to the lanes of its columns
inline Floats spread(const float* p) {
    if constexpr (UNITS == 1) return all(*p);
    constexpr int EACH = LANES / UNITS;
    alignas(64) static const int places[16] = {
        0 / EACH, 1 / EACH, 2 / EACH,  3 / EACH,  4 / EACH,  5 / EACH,  6 / EACH,  7 / EACH,
        8 / EACH, 9 / EACH, 10 / EACH, 11 / EACH, 12 / EACH, 13 / EACH, 14 / EACH, 15 / EACH};
    __m512 own = UNITS == 8   ? _mm512_castps256_ps512(_mm256_loadu_ps(p))
                 : UNITS == 4 ? _mm512_castps128_ps512(_mm_loadu_ps(p))
                              : _mm512_castpd_ps(_mm512_castpd128_pd512(_mm_load_sd((double*)p)));
    return {_mm512_permutexvar_ps(_mm512_load_si512(places), own)};
}

// Of 16 vectors of 16 lanes: lane i of vector j becomes lane j of vector i.
inline void transpose(Bytes* v) {
    __m512i pairs[LANES], fours[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(v[i].v, v[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_epi32(v[i].v, v[i + 1].v);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) { // quarters of four vectors, which hold lanes j, j + 4, ...
        __m512i a = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(fours[j + 8], fours[j + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(fours[j + 8], fours[j + 12], 0xdd);
        v[j].v = _mm512_shuffle_i32x4(a, c, 0x88);
        v[j + 8].v = _mm512_shuffle_i32x4(a, c, 0xdd);
        v[j + 4].v = _mm512_shuffle_i32x4(b, d, 0x88);
        v[j + 12].v = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
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
inline Bytes nothing() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Bytes each(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
inline Bytes look_up(Bytes t, Bytes x) {
    return {_mm256_shuffle_epi8(t.a, x.a), _mm256_shuffle_epi8(t.b, x.b)};
}
inline Bytes load_table(const u8* p) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return {t, t};
}
inline __m256i dot_one(__m256i sums, __m256i codes, __m256i x) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sums, codes, x);
#endif
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
inline __m256i dot_pairs_one(__m256i sums, __m256i codes, __m256i x) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sums, codes, x);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(codes, x));
#endif
}
inline Bytes dot_pairs(Bytes s, Bytes c, Bytes x) {
    return {dot_pairs_one(s.a, c.a, x.a), dot_pairs_one(s.b, c.b, x.b)};
}

inline Floats convert(Bytes x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats as_floats(Bytes x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }

// The sums over lanes of 16 vectors, each in the same order.
inline Floats totals(const Floats* v) {
    __m256 fours[4];
    for (int i = 0; i < 4; i++) {
        __m256 rows[4];
        for (int n = 0; n < 4; n++) rows[n] = _mm256_add_ps(v[4 * i + n].a, v[4 * i + n].b);
        fours[i] = _mm256_hadd_ps(_mm256_hadd_ps(rows[0], rows[1]),
                                  _mm256_hadd_ps(rows[2], rows[3]));
    }
    __m256 eights[2];
    for (int i = 0; i < 2; i++)
        eights[i] = _mm256_add_ps(_mm256_permute2f128_ps(fours[2 * i], fours[2 * i + 1], 0x20),
                                  _mm256_permute2f128_ps(fours[2 * i], fours[2 * i + 1], 0x31));
    return {eights[0], eights[1]};
}
inline Floats spread(const float* p) {
    if constexpr (UNITS == 1) return all(*p);
    constexpr int EACH_LANES = LANES / UNITS;
    alignas(64) float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = p[i / EACH_LANES];
    return load(lanes);
}

inline void transpose_eight(__m256i* v) {
    __m256i pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        v[j] = _mm256_permute2x128_si256(fours[j], fours[j + 4], 0x20);
        v[j + 4] = _mm256_permute2x128_si256(fours[j], fours[j + 4], 0x31);
    }
}

// Of 16 vectors of 16 lanes: lane i of vector j becomes lane j of vector i.
inline void transpose(Bytes* v) {
    __m256i quarters[4][8]; // lanes 0 to 7 of vectors 0 to 7, then 8 to 15; the other lanes
    for (int i = 0; i < LANES; i++)
        quarters[i / 8][i % 8] = v[i].a, quarters[2 + i / 8][i % 8] = v[i].b;
    for (auto& quarter : quarters) transpose_eight(quarter);
    for (int i = 0; i < LANES; i++)
        v[i] = {quarters[i / 8 * 2][i % 8], quarters[i / 8 * 2 + 1][i % 8]};
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
constexpr int MORE = HIGH ? HIGH : 4; // a number of bits in any case
constexpr int STEP = std::max(blocks_in(LOW), blocks_in(MORE));

// Where the codes of some columns of a block are in a row of a plane.
template <int bits> inline long place_of(long block, int odd) {
    return (bits == 8 ? 2 * block + odd : block / blocks_in(bits)) * HALF;
}

// These codes, out of the bytes there; `to`: the lowest bit of the fields here. `part`: a block's
// place in its STEP.
template <int bits> inline Bytes fields(Bytes own, int part, int odd, int to) {
    if constexpr (bits == 8) return own;
    int from = bits * (2 * (part % blocks_in(bits)) + odd);
    return mask(from > to ? right(own, from - to) : left(own, to - from), in_each_byte(bits) << to);
}

struct Rows {
    const u8 *low, *high;
    long low_bytes, high_bytes; // per row

    // Of block `first + part`, where `first` is a multiple of STEP.
    Bytes codes(long n, long first, int part, int odd) const {
        Bytes own = load_bytes(low + n * low_bytes + place_of<LOW>(first + part, odd)), upper = own;
        if (HIGH) upper = load_bytes(high + n * high_bytes + place_of<MORE>(first + part, odd));
        return join(own, upper, part, odd);
    }
    static Bytes join(Bytes own, Bytes upper, int part, int odd) {
        Bytes code = fields<LOW>(own, part, odd, 0);
        return HIGH ? either(code, fields<MORE>(upper, part, odd, LOW)) : code;
    }
};

// E4M3 of every fourth byte: sign to the top, the rest to float32's position, with E4M3's bias.
inline Floats widen_fp8(Bytes codes, int byte) {
    Bytes one = right(codes, 8 * byte);
    return mul(as_floats(either(left(mask(one, 0x80), 24), left(mask(one, 0x7f), 20))),
               all(0x1p120f));
}

struct Bfloat16 {
    uint16_t bits;

    explicit operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};

// 16 numbers in float32
#ifdef __AVX512BW__
inline Floats load_wide(const u8* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline Floats load_wide(const s8* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline Floats load_wide(const _Float16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline Floats load_wide(const Bfloat16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

// Each of two numbers in half of the lanes.
inline Floats load_halves(const _Float16* p) {
    int32_t two;
    std::memcpy(&two, p, sizeof two);
    __m256i places = _mm256_set_m128i(_mm_set1_epi16(0x0302), _mm_set1_epi16(0x0100));
    return {_mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(two), places))};
}
#else
inline __m256 widen_eight(const u8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline __m256 widen_eight(const s8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline __m256 widen_eight(const _Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline __m256 widen_eight(const Bfloat16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
template <typename T> inline Floats load_wide(const T* p) {
    return {widen_eight(p), widen_eight(p + 8)};
}

// Each of two numbers in half of the lanes.
inline Floats load_halves(const _Float16* p) {
    return {_mm256_set1_ps(float(p[0])), _mm256_set1_ps(float(p[1]))};
}
#endif
inline Floats load_wide(const float* p) { return load(p); }

enum Type { NONE, UINT8, INT8, FLOAT16, BFLOAT16, FLOAT32 };

struct Numbers { // one per group of columns: [N, groups]
    const void *fine, *coarse;
    int type, coarse_type, repeat; // coarse: FLOAT16 or FLOAT32

    // Numbers `first` to `first + count`, in float32. Several rows at once are faster, if they are
    // aligned.
    void expand(long first, long count, long first_coarse, float* out) const {
        switch (type) {
        case UINT8:
            return widen((const u8*)fine + first, count, first_coarse, out);
        case INT8:
            return widen((const s8*)fine + first, count, first_coarse, out);
        case FLOAT16:
            return widen((const _Float16*)fine + first, count, first_coarse, out);
        case BFLOAT16:
            return widen((const Bfloat16*)fine + first, count, first_coarse, out);
        case FLOAT32:
            return widen((const float*)fine + first, count, first_coarse, out);
        }
    }
    template <typename T>
    void widen(const T* from, long count, long first_coarse, float* out) const {
        long g = 0;
        if (!coarse)
            for (; g + LANES <= count; g += LANES) store(out + g, load_wide(from + g));
        else if (repeat == LANES / 2 && coarse_type == FLOAT16)
            for (; g + LANES <= count; g += LANES) {
                const _Float16* two = (const _Float16*)coarse + first_coarse + g / (LANES / 2);
                store(out + g, mul(load_halves(two), load_wide(from + g)));
            }
        else if (repeat == LANES)
            for (; g + LANES <= count; g += LANES)
                store(out + g, mul(all(coarse_at(first_coarse + g / LANES)), load_wide(from + g)));
        for (; g < count; g++)
            out[g] =
                coarse ? coarse_at(first_coarse + g / repeat) * float(from[g]) : float(from[g]);
    }
    float coarse_at(long c) const {
        return coarse_type == FLOAT16 ? float(((const _Float16*)coarse)[c]) : ((float*)coarse)[c];
    }
    void expand_row(long n, long groups, float* out) const {
        expand(n * groups, groups, n * coarse_groups(groups), out);
    }
    long coarse_groups(long groups) const { return (groups + repeat - 1) / repeat; }

    void prefetch(long first, long count, long groups) const {
        prefetch_bytes(fine, type, first * groups, count * groups);
        long less = coarse_groups(groups);
        if (coarse) prefetch_bytes(coarse, coarse_type, first * less, count * less);
    }
    static void prefetch_bytes(const void* numbers, int type, long first, long count) {
        static const int sizes[] = {0, 1, 1, 2, 2, 4};
        const u8* own = (const u8*)numbers + first * sizes[type];
        for (long i = 0; i < count * sizes[type]; i += HALF) __builtin_prefetch(own + i, 0, 2);
    }
};

// Some tokens, all for the same rows: those of a matrix of a stack.
struct Group {
    long row, token, num_tokens; // first row, first token
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

    // What `prepare` will read.
    void prefetch_numbers(long first, long count) const {
        scales.prefetch(first, count, groups);
        if (offsets.type != NONE) offsets.prefetch(first, count, groups);
    }
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
        thread_local Array<float> by_group;
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

} // namespace
