// Attention of rows of a few tokens over their pages, in float32; heads are whole vectors. The
// query heads that share a key head are computed together, so a key is read once.
//
// A context is cut into segments at fixed positions, which threads take in any order. Each segment
// gives its largest score, and the sums of its weights and of its weighted values; these are joined
// in order. So a row's result depends neither on other rows nor on the number of threads.

#include "lanes.hpp"
#include <array>
#include <memory>
#include <vector>

namespace {

constexpr long SEGMENT = 256;   // positions; their keys and values of one head stay in L2
constexpr long ALONE = 1 << 17; // key elements that one thread reads as fast as several
constexpr int MOST_QUERIES = 8, VALUES = 8; // at a time
constexpr long AHEAD = 16;                  // positions whose keys are prefetched
#ifdef __AVX512F__
constexpr int MOST_SUMS = 16; // vectors that registers hold beside what they are made of
#else
constexpr int MOST_SUMS = 4;
#endif

struct Pages {
    const float *keys, *values; // [pages, page_size, Hkv, D]
    long page_size, kv_heads, D;

    long at(const int32_t* table, long position, long head) const {
        long token = table[position / page_size] * page_size + position % page_size;
        return (token * kv_heads + head) * D;
    }
};

// A token's query heads [G, D] that share a key head, over `count` positions of a segment.
struct Queries {
    const Pages& pages;
    const long* places; // of the positions, in keys and values
    long count;

    template <int G> void score(const float* q, float scale, float* scores) const {
        constexpr int KEYS = std::max(1, MOST_SUMS / G);
        long i = 0;
        for (; i + KEYS <= count; i += KEYS) {
            for (int n = 0; n < KEYS; n++) {
                prefetch(pages.keys + places[std::min(i + n + AHEAD, count - 1)]);
                prefetch(pages.values + places[i + n]);
            }
            score_some<G, KEYS>(q, scale, i, scores);
        }
        for (; i < count; i++) score_some<G, 1>(q, scale, i, scores);
    }
    void prefetch(const float* head) const {
        for (long d = 0; d < pages.D; d += LANES) __builtin_prefetch(head + d, 0, 2);
    }
    template <int G, int KEYS>
    void score_some(const float* q, float scale, long i, float* scores) const {
        Lanes sums[KEYS][G] = {};
        for (long d = 0; d < pages.D; d += LANES) {
            Lanes keys[KEYS];
            for (int n = 0; n < KEYS; n++) keys[n] = load(pages.keys + places[i + n] + d);
            for (int g = 0; g < G; g++) {
                Lanes query = load(q + g * pages.D + d);
                for (int n = 0; n < KEYS; n++) sums[n][g] += query * keys[n];
            }
        }
        for (int n = 0; n < KEYS; n++)
            for (int g = 0; g < G; g++) scores[g * SEGMENT + i + n] = total(sums[n][g]) * scale;
    }

    template <int G> void mix(const float* weights, float* out) const {
        std::fill_n(out, G * pages.D, 0.0f);
        long i = 0;
        for (; i + VALUES <= count; i += VALUES) mix_some<G, VALUES>(weights, i, out);
        for (; i < count; i++) mix_some<G, 1>(weights, i, out);
    }
    template <int G, int COUNT> void mix_some(const float* weights, long i, float* out) const {
        for (long d = 0; d < pages.D; d += LANES) {
            Lanes mixed[G];
            for (int g = 0; g < G; g++) mixed[g] = load(out + g * pages.D + d);
            for (int n = 0; n < COUNT; n++) {
                Lanes value = load(pages.values + places[i + n] + d);
                for (int g = 0; g < G; g++) mixed[g] += weights[g * SEGMENT + i + n] * value;
            }
            for (int g = 0; g < G; g++) store(out + g * pages.D + d, mixed[g]);
        }
    }
};

// Scores become e^(score - largest); returns the largest and the sum.
std::array<float, 2> soften(float* scores, long count) {
    float largest = scores[0], sum = 0;
#pragma omp simd reduction(max : largest)
    for (long i = 0; i < count; i++) largest = std::max(largest, scores[i]);
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += scores[i] = exponential(scores[i] - largest);
    return {largest, sum};
}

// Of some queries: sums [queries, D], and the largest score and the sum of weights of each.
template <int G>
void attend_segment(const Queries& own, const float* q, long queries, float scale, float* sums,
                    std::array<float, 2>* scales) {
    if (queries < G) {
        if constexpr (G > 1) attend_segment<G - 1>(own, q, queries, scale, sums, scales);
        return;
    }
    float scores[G * SEGMENT];
    own.score<G>(q, scale, scores);
    for (int g = 0; g < G; g++) scales[g] = soften(scores + g * SEGMENT, own.count);
    own.mix<G>(scores, sums);
    long done = G * own.pages.D;
    attend_segment<G>(own, q + done, queries - G, scale, sums + done, scales + G);
}

struct Row {
    const int32_t* table;
    long token, num_tokens, end; // the first token, and one past the last one's position
    long first_segment, num_segments, first_part;
};

struct Item {
    long row, segment, head;
};

} // namespace

// q [T, Hq, D] -> out [T, Hq, D], each token over the positions up to its own, or with a window the
// last of them. A row has `counts` tokens, of which the last is at position `ends` - 1, and a table
// of pages every `stride`. With `gate` [T, Hq * D], times its sigmoid.
extern "C" void attend(const float* q, const float* keys, const float* values, const int32_t* table,
                       long stride, const int64_t* counts, const int64_t* ends, long num_rows,
                       long page_size, long q_heads, long kv_heads, long D, long window,
                       float scale, const float* gate, long gate_stride, float* out) {
    Pages pages = {keys, values, page_size, kv_heads, D};
    long G = q_heads / kv_heads, width = q_heads * D;
    std::vector<Row> rows;
    std::vector<Item> items; // by segment: rows may share pages
    long T = 0, num_parts = 0, most_segments = 0, work = 0;
    for (long r = 0; r < num_rows; T += counts[r++]) {
        long oldest = window ? std::max(0l, ends[r] - counts[r] + 1 - window) : 0;
        long first = oldest / SEGMENT, segments = (ends[r] + SEGMENT - 1) / SEGMENT - first;
        rows.push_back({table + r * stride, T, counts[r], ends[r], first, segments, num_parts});
        num_parts += segments * counts[r];
        most_segments = std::max(most_segments, segments);
        work += counts[r] * (ends[r] - oldest) * kv_heads * D;
    }
    for (long s = 0; s < most_segments; s++)
        for (long h = 0; h < kv_heads; h++)
            for (long r = 0; r < num_rows; r++)
                if (s < rows[r].num_segments) items.push_back({r, s, h});
    // A part is a token's segment; parts of a row are by token, then by segment.
    std::unique_ptr<float[]> sums(new float[num_parts * width]); // written by their segments
    std::vector<std::array<float, 2>> scales(num_parts * q_heads);

#pragma omp parallel if (work > ALONE)
    {
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < items.size(); i++) {
            const Row& row = rows[items[i].row];
            long head = items[i].head, begin = (row.first_segment + items[i].segment) * SEGMENT;
            long end = std::min(begin + SEGMENT, row.end);
            long places[SEGMENT];
            for (long n = begin; n < end; n++) places[n - begin] = pages.at(row.table, n, head);
            for (long t = 0; t < row.num_tokens; t++) {
                long stop = row.end - row.num_tokens + 1 + t; // one past its position
                long first = window ? std::max(0l, stop - window) : 0;
                long from = std::max(begin, first) - begin, to = std::min(end, stop) - begin;
                long part = row.first_part + t * row.num_segments + items[i].segment;
                auto* own_scales = &scales[part * q_heads + head * G];
                if (from >= to) { // it sees none of them
                    std::fill_n(own_scales, G, std::array<float, 2>{-INFINITY, 0});
                    continue;
                }
                Queries own = {pages, places + from, to - from};
                const float* queries = q + (row.token + t) * width + head * G * D;
                attend_segment<MOST_QUERIES>(own, queries, G, scale,
                                             &sums[part * width + head * G * D], own_scales);
            }
        }
#pragma omp for schedule(dynamic)
        for (long i = 0; i < T * q_heads; i++) {
            long token = i / q_heads, head = i % q_heads;
            long r = num_rows - 1;
            while (rows[r].token > token) r--;
            const Row& row = rows[r];
            long first = row.first_part + (token - row.token) * row.num_segments;
            float largest = -INFINITY, sum = 0;
            for (long part = first; part < first + row.num_segments; part++)
                largest = std::max(largest, scales[part * q_heads + head][0]);
            float* own = out + token * width + head * D;
            std::fill_n(own, D, 0.0f);
            for (long part = first; part < first + row.num_segments; part++) {
                auto [score, weights] = scales[part * q_heads + head];
                if (weights == 0) continue;
                float factor = exponential(score - largest);
                sum += factor * weights;
                for (long d = 0; d < D; d++) own[d] += factor * sums[part * width + head * D + d];
            }
            for (long d = 0; d < D; d++) {
                own[d] /= sum;
                if (gate) own[d] *= sigmoid(gate[token * gate_stride + head * D + d]);
            }
        }
    }
}
