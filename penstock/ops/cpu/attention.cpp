// Attention of a token, and of drafts after it, over its pages; and, for any number of tokens, the
// steps before it: head norms, rope, and storing keys and values. All in float32, and heads are
// whole vectors. A step of one token is a few microseconds of arithmetic; as torch calls it takes
// ten times that, because caches are cold after a layer's weights have passed through them.
//
// The query heads that share a key head are computed together, so a key is read once. Long contexts
// use one thread per key head.

#include "lanes.hpp"
#include <vector>

namespace {

constexpr long ALONE = 1 << 17; // key elements that one thread reads as fast as several
constexpr int MOST_QUERIES = 8;

// Rotates one head in place by [2, half] cosines and sines, rounding like torch: a prompt's last
// token may be computed alone, and must have the same bits as among others.
void turn(float* head, const float* angles, long half, bool interleaved) {
    long apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    for (long j = 0; j < half; j++) {
        float &a = head[j * step], &b = head[j * step + apart];
        float cosine = angles[j], sine = angles[half + j], first = a;
        a = std::fma(-b, sine, first * cosine);
        b = std::fma(first, sine, b * cosine);
    }
}

void scale_head(float* head, const float* norm, float eps, long D) {
    float scale = inverse_rms(head, D, eps);
    for (long d = 0; d < D; d++) head[d] = head[d] * scale * norm[d];
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
        if constexpr (G > 1) attend_some<G - 1>(pages, q, head, queries, first, end, scale, out);
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

// q [T, Hq, D], k and v [T, Hkv, D] -> turned [T, Hq, D]; stores keys and values in the cache.
// `strides` are elements between tokens of q, k and v; the norms [D] are both null or both set.
extern "C" void rope_and_store(const float* q, const float* k, const float* v, const long* strides,
                               const float* q_norm, const float* k_norm, float eps,
                               const float* table, long half, int interleaved,
                               const int64_t* positions, const int64_t* places, long T,
                               long q_heads, long kv_heads, long D, float* turned, float* keys,
                               float* values) {
#pragma omp parallel for if (T * (q_heads + kv_heads) * D > ALONE)
    for (long t = 0; t < T; t++) {
        const float* angles = table + positions[t] * 2 * half;
        float *query = turned + t * q_heads * D, *key = keys + places[t] * kv_heads * D;
        std::copy_n(q + t * strides[0], q_heads * D, query);
        std::copy_n(k + t * strides[1], kv_heads * D, key);
        std::copy_n(v + t * strides[2], kv_heads * D, values + places[t] * kv_heads * D);
        for (long h = 0; h < q_heads; h++) {
            if (q_norm) scale_head(query + h * D, q_norm, eps, D);
            turn(query + h * D, angles, half, interleaved);
        }
        for (long h = 0; h < kv_heads; h++) {
            if (k_norm) scale_head(key + h * D, k_norm, eps, D);
            turn(key + h * D, angles, half, interleaved);
        }
    }
}

// q [T, Hq, D] -> out [T, Hq, D], each token over the positions up to its own, or with a window the
// last of them; `end` is one past the last token. With `gate` [T, Hq * D], times its sigmoid.
extern "C" void attend(const float* q, const float* keys, const float* values, const int32_t* table,
                       long page_size, long T, long q_heads, long kv_heads, long D, long end,
                       long window, float scale, const float* gate, long gate_stride, float* out) {
    Pages pages = {keys, values, table, page_size, kv_heads, D};
    long G = q_heads / kv_heads, width = q_heads * D;
#pragma omp parallel for if (T * end * kv_heads * D > ALONE)
    for (long item = 0; item < T * kv_heads; item++) {
        long head = item / T, t = item % T, stop = end - T + 1 + t;
        long first = window ? std::max(0l, stop - window) : 0, at = t * width + head * G * D;
        attend_some<MOST_QUERIES>(pages, q + at, head, G, first, stop, scale, out + at);
        if (gate)
            for (long i = 0; i < G * D; i++)
                out[at + i] *= sigmoid(gate[t * gate_stride + head * G * D + i]);
    }
}
