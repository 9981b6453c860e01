// The next token of each row of logits. The largest of `logit / temperature + Gumbel noise` is a
// draw from their softmax; the noise is a function of seed, position and token. Filters keep the
// tokens near the largest logit, as many as a row needs, and only these are sorted.

#include "lanes.hpp"
#include <limits>
#include <vector>

namespace {

constexpr long CHUNK = 1024;     // logits at a time: they stay in L1
constexpr float NEAREST = 4;     // kept tokens are sought this far below the largest first
constexpr float FURTHEST = 1000; // then twice as far, up to here; then all are
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

inline uint32_t scramble(uint32_t x) { // MurmurHash3's finalizer
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// ln x of a normal x > 0, to 2 units in the last place: x is a power of two times 1 + f, and
// ln(1 + f) = 2 artanh(f / (2 + f)). A loop of it is vectors.
inline float logarithm(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    int32_t power = (bits - 0x3f3504f3) >> 23; // 1 + f is between sqrt(1/2) and sqrt(2)
    float f = bits_as_float(bits - (power << 23)) - 1.0f, s = f / (2.0f + f), q = s * s;
    float series = q * (1.0f / 3 + q * (1.0f / 5 + q * (1.0f / 7 + q * (1.0f / 9))));
    return float(power) * 0.693147181f + (2.0f * s + 2.0f * s * series);
}

// 23 bits plus a half: the largest value is the float below 1, so neither logarithm is infinite.
inline float noise(uint32_t key, int32_t token) {
    int32_t bits = int32_t(scramble(key + uint32_t(token) * 0x9E3779B9u) >> 9);
    return -logarithm(-logarithm((float(bits) + 0.5f) * 0x1p-23f));
}

inline float largest(const float* own, long count) {
    Lanes lanes = LOWEST - Lanes{};
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes some = load(own + i);
        lanes = some > lanes ? some : lanes;
    }
    float found = LOWEST;
    for (int lane = 0; lane < LANES; lane++) found = std::max(found, lanes[lane]);
    for (; i < count; i++) found = std::max(found, own[i]);
    return found;
}

struct Token {
    float score;
    int32_t id;

    bool operator<(const Token& other) const { // of equal ones, the lower id is first
        return score != other.score ? score > other.score : id < other.id;
    }
};

// Keeps the best of several chunks.
struct Best {
    float score = LOWEST;
    long token = 0;

    void see(const float* scores, long first, long count) {
        float found = largest(scores, count);
        if (!(found > score)) return;
        score = found;
        token = first + (std::find(scores, scores + count, found) - scores);
    }
};

struct Filters {
    long top_k; // 0: all tokens
    float top_p, min_p;

    bool keep_all() const { return top_k <= 0 && top_p >= 1 && min_p <= 0; }
};

class Row {
public:
    Row(const float* logits, long vocab, float temperature, uint32_t key)
        : logits(logits), vocab(vocab), temperature(temperature), key(key),
          tops((vocab + CHUNK - 1) / CHUNK) {
        for (long first = 0; first < vocab; first += CHUNK) {
            long count = std::min(CHUNK, vocab - first);
            greedy.see(logits + first, first, count);
            tops[first / CHUNK] = largest(logits + first, count);
        }
    }

    long draw(const Filters& filters) {
        if (!(temperature > 0) || !std::isfinite(greedy.score)) return greedy.token;
        top = greedy.score / temperature;
        return filters.keep_all() ? draw_of_all() : draw_of(keep(filters));
    }

private:
    const float* logits;
    long vocab;
    float temperature, top = 0; // the largest scaled logit
    uint32_t key;
    std::vector<float> tops; // the largest logit of each chunk
    Best greedy;

    long draw_of_all() const {
        Best best;
        float scores[CHUNK];
        for (long first = 0; first < vocab; first += CHUNK) {
            long count = std::min(CHUNK, vocab - first);
            for (long i = 0; i < count; i++)
                scores[i] = logits[first + i] / temperature + noise(key, int32_t(first + i));
            best.see(scores, first, count);
        }
        return best.token;
    }

    long draw_of(const std::vector<Token>& kept) const {
        Best best;
        for (const Token& token : kept) {
            float score = token.score + noise(key, token.id);
            best.see(&score, token.id, 1);
        }
        return best.token;
    }

    // top_k first, then top_p of the rest, then min_p; the likeliest token always stays. In order.
    std::vector<Token> keep(const Filters& filters) const {
        bool has_top_k = filters.top_k > 0;
        bool has_top_p = filters.top_p < 1;
        double total = has_top_p && !has_top_k ? total_of_all() : 1;
        std::vector<Token> near;
        for (float reach = NEAREST;; reach = reach < FURTHEST ? 2 * reach : INFINITY) {
            near = within(reach);
            bool is_cut_by_min_p = exponential(-reach) < filters.min_p;
            if (reach == INFINITY || (has_top_k && long(near.size()) >= filters.top_k)) break;
            if (is_cut_by_min_p && (!has_top_k || !has_top_p)) break;
            if (!has_top_k && has_top_p && mass_of(near) >= filters.top_p * total) break;
        }
        if (has_top_k && long(near.size()) > filters.top_k) {
            std::nth_element(near.begin(), near.begin() + filters.top_k, near.end());
            near.resize(filters.top_k);
        }
        std::sort(near.begin(), near.end());
        if (has_top_k) total = mass_of(near);
        double before = 0; // of those that are likelier
        size_t count = 0;
        for (; count < near.size(); count++) {
            float mass = exponential(near[count].score - top);
            bool is_cut = (has_top_p && before >= filters.top_p) || mass < filters.min_p;
            if (count && is_cut) break;
            before += mass / total;
        }
        near.resize(count);
        return near;
    }

    std::vector<Token> within(float reach) const {
        std::vector<Token> found;
        float least = std::max(top - reach, std::numeric_limits<float>::lowest());
        for (long first = 0; first < vocab; first += CHUNK) {
            if (!(tops[first / CHUNK] / temperature >= least)) continue;
            for (long i = first; i < std::min(first + CHUNK, vocab); i++) {
                float score = logits[i] / temperature;
                if (score >= least) found.push_back({score, int32_t(i)});
            }
        }
        return found;
    }

    // e^(score - top), summed
    double mass_of(const std::vector<Token>& tokens) const {
        double sum = 0;
        for (const Token& token : tokens) sum += exponential(token.score - top);
        return sum;
    }
    double total_of_all() const {
        double sum = 0;
        float masses[CHUNK];
        for (long first = 0; first < vocab; first += CHUNK) {
            long count = std::min(CHUNK, vocab - first);
            for (long i = 0; i < count; i++)
                masses[i] = exponential(logits[first + i] / temperature - top);
            std::fill(masses + count, masses + CHUNK, 0.0f);
            Lanes lanes = {};
            for (long i = 0; i < CHUNK; i += LANES) lanes += load(masses + i);
            sum += ::total(lanes);
        }
        return sum;
    }
};

} // namespace

// All but logits: [rows]; a row of logits begins every `stride`.
extern "C" void sample(const float* logits, long stride, const float* temperatures,
                       const int64_t* top_k, const float* top_p, const float* min_p,
                       const int64_t* seeds, const int64_t* positions, int filtered,
                       int64_t* token_ids, long rows, long vocab) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        uint64_t seed = uint64_t(seeds[row]);
        uint32_t key = scramble(uint32_t(positions[row])) ^ uint32_t(seed);
        key = scramble(scramble(key) ^ uint32_t(seed >> 32));
        Filters filters = {0, 1, 0};
        if (filtered) filters = {top_k[row], top_p[row], min_p[row]};
        token_ids[row] = Row(logits + row * stride, vocab, temperatures[row], key).draw(filters);
    }
}
