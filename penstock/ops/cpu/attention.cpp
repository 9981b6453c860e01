// Attention of one token over its pages, and what comes before it: the rotation, and its key and
// value into their place. All in float32, and heads are whole vectors. A step of one token is a few
// microseconds of arithmetic, and as calls of torch ten times that: caches are cold, since a
// layer's weights have passed through them.
//
// The query heads that share a key head are computed together, so a key is read once. Long contexts
// take a thread for each key head.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long ALONE = 1 << 17; // numbers of keys that one thread reads as quickly as several

constexpr int LANES = 16, MOST_QUERIES = 8;
typedef float Lanes __attribute__((vector_size(64)));

inline Lanes load(const float* p) {
    Lanes own;
    std::memcpy(&own, p, sizeof own);
    return own;
}
inline void store(float* p, Lanes own) { std::memcpy(p, &own, sizeof own); }
inline float total(Lanes own) {
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    Half halves[2];
    std::memcpy(halves, &own, sizeof halves);
    Half half = halves[0] + halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, &half, sizeof quarters);
    Quarter quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

inline float bits_as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// e^x for x <= 0, to 2 units in the last place; below 2^-126 it is zero. A loop of it is vectors.
inline float exponential(float x) {
    float y = x * 1.44269504f, whole = (y + 12582912.0f) - 12582912.0f; // the nearest integer
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;      // ln 2 in two parts
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float power = bits_as_float((int32_t(std::max(whole, -126.0f)) + 127) << 23);
    return whole < -126.0f ? 0.0f : p * power;
}

// Rotates one head in place by [2, half] cosines and sines, and rounds as torch does: a prompt's
// last token may come alone, and must have the bits that it has among others.
void turn(float* head, const float* angles, long half, bool interleaved) {
    long apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    for (long j = 0; j < half; j++) {
        float &a = head[j * step], &b = head[j * step + apart];
        float cosine = angles[j], sine = angles[half + j], first = a;
        a = std::fma(-b, sine, first * cosine);
        b = std::fma(first, sine, b * cosine);
    }
}

struct Pages {
    const float *keys, *values; // [pages, page_size, Hkv, D]
    const int32_t* table;
    long page_size, kv_heads, D;

    long at(long position, long head) const {
        long token = table[position / page_size] * page_size + position % page_size;
        return (token * kv_heads + head) * D;
    }
};

// Queries [G, D] of one key head over positions `first` to `end`; sums stay in registers.
template <int G> struct Queries {
    const Pages& pages;
    long head, first, count;

    void score(const float* q, float scale, float* scores) const {
        for (long i = 0; i < count; i++) {
            const float* key = pages.keys + pages.at(first + i, head);
            Lanes sums[G] = {};
            for (long d = 0; d < pages.D; d += LANES)
                for (int g = 0; g < G; g++) sums[g] += load(q + g * pages.D + d) * load(key + d);
            for (int g = 0; g < G; g++) scores[g * count + i] = total(sums[g]) * scale;
        }
    }
    void mix(const float* weights, const float* sums, float* out) const {
        for (long d = 0; d < pages.D; d += LANES) {
            Lanes mixed[G] = {};
            for (long i = 0; i < count; i++) {
                Lanes value = load(pages.values + pages.at(first + i, head) + d);
                for (int g = 0; g < G; g++) mixed[g] += weights[g * count + i] * value;
            }
            for (int g = 0; g < G; g++) store(out + g * pages.D + d, mixed[g] / sums[g]);
        }
    }
};

// Becomes e^(score - largest); returns their sum.
float soften(float* scores, long count) {
    float largest = scores[0], sum = 0;
#pragma omp simd reduction(max : largest)
    for (long i = 0; i < count; i++) largest = std::max(largest, scores[i]);
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += scores[i] = exponential(scores[i] - largest);
    return sum;
}

template <int G>
void attend_some(const Pages& pages, const float* q, long head, long queries, long first, long end,
                 float scale, float* out) {
    if (queries < G) {
        if constexpr (G > 1)
            attend_some<G - 1>(pages, q, head, queries, first, end, scale, out);
        return;
    }
    thread_local std::vector<float> scores;
    scores.resize(G * (end - first));
    Queries<G> own = {pages, head, first, end - first};
    own.score(q, scale, scores.data());
    float sums[G];
    for (int g = 0; g < G; g++) sums[g] = soften(scores.data() + g * own.count, own.count);
    own.mix(scores.data(), sums, out);
    long done = G * pages.D;
    attend_some<G>(pages, q + done, head, queries - G, first, end, scale, out + done);
}

} // namespace

// q [Hq, D], k and v [Hkv, D] -> turned [Hq, D]; the key and the value into their place in the
// cache.
extern "C" void rope_and_store(const float* q, const float* k, const float* v, const float* table,
                               long half, int interleaved, const int64_t* position,
                               const int64_t* place, long q_heads, long kv_heads, long D,
                               float* turned, float* keys, float* values) {
    const float* angles = table + *position * 2 * half;
    float* key = keys + *place * kv_heads * D;
    std::copy(q, q + q_heads * D, turned);
    std::copy(k, k + kv_heads * D, key);
    std::copy(v, v + kv_heads * D, values + *place * kv_heads * D);
    for (long h = 0; h < q_heads; h++) turn(turned + h * D, angles, half, interleaved);
    for (long h = 0; h < kv_heads; h++) turn(key + h * D, angles, half, interleaved);
}

// q [Hq, D] -> out [Hq, D] over positions `first` to `end` of the pages.
extern "C" void attend(const float* q, const float* keys, const float* values, const int32_t* table,
                       long page_size, long q_heads, long kv_heads, long D, long first, long end,
                       float scale, float* out) {
    Pages pages = {keys, values, table, page_size, kv_heads, D};
    long G = q_heads / kv_heads;
#pragma omp parallel for if ((end - first) * kv_heads * D > ALONE)
    for (long head = 0; head < kv_heads; head++)
        attend_some<MOST_QUERIES>(pages, q + head * G * D, head, G, first, end, scale,
                                  out + head * G * D);
}
