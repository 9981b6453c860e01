// The layers of a small model for a few tokens in float32: GEMMs, experts and the delta rule.
//
// The time of such a step should be the time to read its weights, but torch calls take longer than
// the arithmetic of one token, and a BLAS copies a weight before it multiplies two tokens with it.
// Here a weight is read once, in its own layout, for all tokens.
//
// The order of a sum depends only on its length, not on the number of tokens.

#include "lanes.hpp"
#include <omp.h>
#include <vector>

namespace {

constexpr int ROWS = 4, TOKENS = 4; // tile size; its sums stay in registers
constexpr long AHEAD = 4096;        // elements of a weight to prefetch
constexpr long ALONE = 1 << 18;     // elements that one thread reads as fast as several
constexpr long MOST_TOKENS = 16;
constexpr long GATES = 3; // per journal entry: log decay, beta, scale of its key

template <int rows, int tokens, class Stored>
inline void multiply_tile(const float* const* x, const Stored* weight, long K, float* sums) {
    Lanes lanes[rows][tokens] = {};
    for (long k = 0; k < K; k += LANES) {
        Lanes own[rows];
        for (int n = 0; n < rows; n++) {
            own[n] = load(weight + n * K + k);
            __builtin_prefetch(weight + n * K + k + AHEAD, 0, 2);
        }
        for (int t = 0; t < tokens; t++) {
            Lanes token = load(x[t] + k);
            for (int n = 0; n < rows; n++) lanes[n][t] += own[n] * token;
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < rows; n++) sums[t * ROWS + n] = total(lanes[n][t]);
}

template <int rows, int tokens = TOKENS, class Stored>
inline void multiply_some(long num, const float* const* x, const Stored* weight, long K,
                          float* sums) {
    if (num == tokens) return multiply_tile<rows, tokens>(x, weight, K, sums);
    if constexpr (tokens > 1) multiply_some<rows, tokens - 1>(num, x, weight, K, sums);
}

// `num_rows` rows of a weight times tokens x: sums [T, ROWS].
template <class Stored>
inline void multiply(long T, const float* const* x, const Stored* weight, long num_rows, long K,
                     float* sums) {
    for (long first = 0; first < T; first += TOKENS) {
        long num = std::min<long>(TOKENS, T - first);
        float* own = sums + first * ROWS;
        if (num_rows == ROWS)
            multiply_some<ROWS>(num, x + first, weight, K, own);
        else
            for (long n = 0; n < num_rows; n++)
                multiply_some<1>(num, x + first, weight + n * K, K, own + n);
    }
}

void norm_token(const float* x, const float* norm, float eps, long K, float* out) {
    float scale = inverse_rms(x, K, eps);
    for (long k = 0; k < K; k++) out[k] = x[k] * scale * norm[k];
}

struct Rows { // pointers to tokens, normed or not
    const float* at[MOST_TOKENS];
    std::vector<float> normed;

    Rows(const float* x, const float* norm, float eps, long T, long K) {
        if (norm) normed.resize(T * K);
        for (long t = 0; t < T; t++) {
            at[t] = x + t * K;
            if (!norm) continue;
            norm_token(x + t * K, norm, eps, K, normed.data() + t * K);
            at[t] = normed.data() + t * K;
        }
    }
};

// An expert, and its tokens.
template <class Stored> struct Expert {
    const Stored *gate_up, *down; // [2I, H], [H, I]
    long I, T = 0;
    const float* x[MOST_TOKENS];
    const float* inner_at[MOST_TOKENS];
    float weights[MOST_TOKENS];
    float* outs[MOST_TOKENS];
    float* inner; // [T, I]

    void add(const float* token, float weight, float* out) {
        x[T] = token, weights[T] = weight, outs[T] = out;
        T++;
    }
    void open(long first, long H) {
        float gates[MOST_TOKENS * ROWS], ups[MOST_TOKENS * ROWS];
        long num = std::min<long>(ROWS, I - first);
        multiply(T, x, gate_up + first * H, num, H, gates);
        multiply(T, x, gate_up + (I + first) * H, num, H, ups);
        for (long t = 0; t < T; t++)
            for (long n = 0; n < num; n++)
                inner[t * I + first + n] =
                    silu(gates[t * ROWS + n]) * ups[t * ROWS + n] * weights[t];
    }
    void close(long first, long num) const {
        float sums[MOST_TOKENS * ROWS];
        multiply(T, inner_at, down + first * I, num, I, sums);
        for (long t = 0; t < T; t++)
            for (long n = 0; n < num; n++) outs[t][first + n] += sums[t * ROWS + n];
    }
};

template <class Stored>
void multiply_all(const Stored* weight, const Rows& rows, const float* bias, const float* residual,
                  float* out, long T, long N, long K) {
    long num_blocks = (N + ROWS - 1) / ROWS;
#pragma omp parallel for if (N * K > ALONE)
    for (long block = 0; block < num_blocks; block++) {
        long first = block * ROWS, num = std::min<long>(ROWS, N - first);
        float sums[MOST_TOKENS * ROWS];
        multiply(T, rows.at, weight + first * K, num, K, sums);
        for (long t = 0; t < T; t++)
            for (long n = 0; n < num; n++) {
                float sum = sums[t * ROWS + n];
                if (bias) sum += bias[first + n];
                if (residual) sum += residual[t * N + first + n];
                out[t * N + first + n] = sum;
            }
    }
}

// Tokens, the experts of each, and the outputs.
struct Routed {
    const float *x, *weights, *residual, *shared_weight;
    const int64_t* ids;
    float* out;
    long T, k, H, I, J;
};

template <class Stored>
void run_experts(const Routed& given, const Stored* gate_up, const Stored* down,
                 const Stored* shared_gate_up, const Stored* shared_down) {
    const float *x = given.x, *weights = given.weights;
    const int64_t* ids = given.ids;
    float* out = given.out;
    long T = given.T, k = given.k, H = given.H, I = given.I, J = given.J;
    std::vector<Expert<Stored>> experts;
    experts.reserve(T * k + 1);
    std::vector<int64_t> numbers;
    for (long pair = 0; pair < T * k; pair++) {
        long place = std::find(numbers.begin(), numbers.end(), ids[pair]) - numbers.begin();
        if (place == long(numbers.size())) {
            numbers.push_back(ids[pair]);
            experts.push_back({gate_up + ids[pair] * 2 * I * H, down + ids[pair] * H * I, I});
        }
        experts[place].add(x + pair / k * H, weights[pair], out + pair / k * H);
    }
    if (J) {
        experts.push_back({shared_gate_up, shared_down, J});
        for (long t = 0; t < T; t++)
            experts.back().add(x + t * H, given.shared_weight[t], out + t * H);
    }
    std::vector<float> inner(T * (k * I + J));
    std::vector<std::pair<Expert<Stored>*, long>> blocks; // and its first intermediate row
    float* end = inner.data();
    for (Expert<Stored>& expert : experts) {
        expert.inner = end;
        for (long t = 0; t < expert.T; t++) expert.inner_at[t] = end + t * expert.I;
        end += expert.T * expert.I;
        for (long first = 0; first < expert.I; first += ROWS) blocks.push_back({&expert, first});
    }
    std::copy_n(given.residual, T * H, out);
    long num_rows = experts.size() * I * H, num_blocks = blocks.size();
#pragma omp parallel if (num_rows > ALONE)
    {
#pragma omp for
        for (long b = 0; b < num_blocks; b++) blocks[b].first->open(blocks[b].second, H);
        // Every thread owns some outputs, for all experts, so no other thread adds to them.
        long threads = omp_get_num_threads(), share = (H / threads + ROWS) / ROWS * ROWS;
        long begin = std::min(H, omp_get_thread_num() * share), stop = std::min(H, begin + share);
        for (const Expert<Stored>& expert : experts)
            for (long first = begin; first < stop; first += ROWS)
                expert.close(first, std::min<long>(ROWS, stop - first));
    }
}

struct Heads {
    long Hk, Hv, K, V;
    long channels() const { return 2 * Hk * K + Hv * V; }
    long width() const { return channels() + Hv * V + 2 * Hv; }
};

// What one token adds to a head's state, and reads from it.
struct Entry {
    const float *k, *v;
    float decay, beta;
};

// state [K, V] in place; with a query its output [V] too.
void add_token(float* state, const Entry& entry, const float* q, long K, long V, float* out) {
    for (long v = 0; v < V; v += LANES) {
        Lanes held = {}, read = {};
        for (long k = 0; k < K; k++) {
            Lanes own = load(state + k * V + v) * entry.decay;
            store(state + k * V + v, own);
            held += own * entry.k[k];
        }
        Lanes correction = (load(entry.v + v) - held) * entry.beta;
        for (long k = 0; k < K; k++) {
            Lanes own = load(state + k * V + v) + correction * entry.k[k];
            store(state + k * V + v, own);
            if (q) read += own * q[k];
        }
        if (q) store(out + v, read);
    }
}

// Silu of the convolution of the inputs [T, C] after those in the ring; then adds them to the ring.
void convolve(const float* mixed, long stride, const float* taps, long Kc, float* ring, long W,
              long C, long position, long T, float* out) {
    for (long t = 0; t < T; t++) {
        const float* inputs[MOST_TOKENS];
        long num = std::min(Kc, position + t + 1);
        for (long age = 0; age < num; age++)
            inputs[age] =
                age <= t ? mixed + (t - age) * stride : ring + (position + t - age) % W * C;
        for (long c = 0; c < C; c++) {
            float sum = inputs[0][c] * taps[(Kc - 1) * C + c];
            for (long age = 1; age < num; age++)
                sum += inputs[age][c] * taps[(Kc - 1 - age) * C + c];
            out[t * C + c] = sum;
        }
        for (long c = 0; c < C; c++) out[t * C + c] = silu(out[t * C + c]);
    }
    for (long t = 0; t < T; t++) std::copy_n(mixed + t * stride, C, ring + (position + t) % W * C);
}

} // namespace

// out [T, N] = x [T, K], normed if `norm`, times weight [N, K] (+ bias [N]) (+ residual [T, N]). A
// weight is float32 or, if `is_short`, bf16.
extern "C" void few_linear(const float* x, const float* norm, float eps, const void* weight,
                           int is_short, const float* bias, const float* residual, float* out,
                           long T, long N, long K) {
    Rows rows(x, norm, eps, T, K);
    if (is_short)
        multiply_all((const uint16_t*)weight, rows, bias, residual, out, T, N, K);
    else
        multiply_all((const float*)weight, rows, bias, residual, out, T, N, K);
}

// The k most likely of E experts for each token: normed [T, H], weights and ids [T, k], and the
// weight [T] of the shared expert if it has a gate [H].
extern "C" void few_norm_route(const float* hidden, const float* norm, float eps,
                               const float* router, const float* shared_gate, int normalize,
                               float* normed, float* weights, int64_t* ids, float* shared, long T,
                               long H, long E, long k) {
    std::vector<float> logits(E);
    for (long t = 0; t < T; t++) {
        float* x = normed + t * H;
        norm_token(hidden + t * H, norm, eps, H, x);
        float sums[ROWS];
        for (long first = 0; first < E; first += ROWS) {
            long num = std::min<long>(ROWS, E - first);
            multiply(1, &x, router + first * H, num, H, sums);
            std::copy_n(sums, num, logits.data() + first);
        }
        if (shared_gate) {
            multiply(1, &x, shared_gate, 1, H, sums);
            shared[t] = sigmoid(sums[0]);
        }
        float largest = *std::max_element(logits.begin(), logits.end()), sum = 0;
        for (long e = 0; e < E && !normalize; e++) sum += exponential(logits[e] - largest);
        for (long place = 0; place < k; place++) {
            auto best = std::max_element(logits.begin(), logits.end());
            ids[t * k + place] = best - logits.begin();
            float own = weights[t * k + place] = exponential(*best - largest);
            if (normalize) sum += own;
            *best = -INFINITY;
        }
        for (long place = 0; place < k; place++) weights[t * k + place] /= sum;
    }
}

// out [T, H] = residual + the weighted sum of each token's experts (+ the shared one, if J). All
// weights are float32 or, if `is_short`, bf16.
extern "C" void few_experts(const float* x, const float* weights, const int64_t* ids,
                            const void* gate_up, const void* down, const float* residual,
                            const float* shared_weight, const void* shared_gate_up,
                            const void* shared_down, float* out, int is_short, long T, long k,
                            long H, long I, long J) {
    Routed given = {x, weights, residual, shared_weight, ids, out, T, k, H, I, J};
    if (is_short) {
        using Stored = const uint16_t*;
        run_experts(given, (Stored)gate_up, (Stored)down, (Stored)shared_gate_up,
                    (Stored)shared_down);
    } else {
        using Stored = const float*;
        run_experts(given, (Stored)gate_up, (Stored)down, (Stored)shared_gate_up,
                    (Stored)shared_down);
    }
}

// One sequence: replays the journal's first `num_accepted` entries, then computes T tokens, of
// which the first `num_certain` are certain. The others do not change the state, and go into the
// journal.
extern "C" void few_delta_net(const float* mixed, const float* taps, const float* a_log,
                              const float* dt_bias, const float* norm, float eps, float l2_eps,
                              float* conv, float* recurrent, float* journal_keys,
                              float* journal_values, float* journal_gates, const long* sizes,
                              const long* places, float* out) {
    Heads heads = {sizes[0], sizes[1], sizes[2], sizes[3]};
    long T = sizes[4], Kc = sizes[5], W = sizes[6];
    long slot = places[0], initial = places[1], position = places[2], num_accepted = places[3];
    long keep_at = places[4], keep_slot = places[5], num_certain = places[6];
    long Hk = heads.Hk, Hv = heads.Hv, K = heads.K, V = heads.V;
    long C = heads.channels(), width = heads.width(), state_size = Hv * K * V;
    float *ring = conv + slot * W * C, *states = recurrent + slot * state_size;
    if (position == 0)
        std::fill_n(states, state_size, 0.0f);
    else if (slot != initial) {
        std::copy_n(conv + initial * W * C, W * C, ring);
        std::copy_n(recurrent + initial * state_size, state_size, states);
    }
    long num_done = position - num_accepted; // tokens in the state
    bool keeps = keep_slot > 0 && num_done <= keep_at && keep_at <= position;
    if (keeps) std::copy_n(ring, W * C, conv + keep_slot * W * C);

    std::vector<float> convolved(T * C), log_decays(T * Hv), betas(T * Hv);
    convolve(mixed, width, taps, Kc, ring, W, C, position, T, convolved.data());
    for (long t = 0; t < T; t++) {
        float* token = convolved.data() + t * C;
        for (long head = 0; head < 2 * Hk; head++) { // queries, then keys
            float* own = token + head * K;
            float scale = inverse_rms(own, K, l2_eps / K) / std::sqrt(float(K));
            for (long k = 0; k < K; k++) own[k] *= scale;
        }
        const float *b = mixed + t * width + C + Hv * V, *a = b + Hv;
        for (long h = 0; h < Hv; h++) {
            float x = a[h] + dt_bias[h];
            float soft = std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)));
            log_decays[t * Hv + h] = -std::exp(a_log[h]) * soft;
            betas[t * Hv + h] = sigmoid(b[h]);
        }
    }
#pragma omp parallel for if (state_size > ALONE)
    for (long h = 0; h < Hv; h++) {
        float* state = states + h * K * V;
        long key_head = h / (Hv / Hk);
        for (long entry = 0; entry <= num_accepted; entry++) {
            if (keeps && num_done + entry == keep_at)
                std::copy_n(state, K * V, recurrent + keep_slot * state_size + h * K * V);
            if (entry == num_accepted) break;
            long at = entry * Hv + h;
            const float* gates = journal_gates + entry * GATES * Hv;
            Entry own = {journal_keys + at * K, journal_values + at * V, std::exp(gates[h]),
                         gates[Hv + h]};
            add_token(state, own, nullptr, K, V, nullptr);
        }
        thread_local std::vector<float> guessed;
        for (long t = 0; t < T; t++) {
            const float *q = convolved.data() + t * C + key_head * K, *k = q + Hk * K;
            const float* v = convolved.data() + t * C + 2 * Hk * K + h * V;
            if (t == num_certain) { // from here on only drafts
                guessed.assign(state, state + K * V);
                state = guessed.data();
            }
            float* read = out + (t * Hv + h) * V;
            Entry own = {k, v, std::exp(log_decays[t * Hv + h]), betas[t * Hv + h]};
            add_token(state, own, q, K, V, read);
            // The scale of q, K^-0.5, passes through the norm into its epsilon.
            float scale = inverse_rms(read, V, eps * K);
            const float* z = mixed + t * width + C + h * V;
            for (long i = 0; i < V; i++) read[i] *= scale * norm[i] * silu(z[i]);
        }
    }
    for (long t = num_certain; t < T; t++)
        for (long h = 0; h < Hv; h++) {
            long entry = t - num_certain, at = entry * Hv + h;
            const float* token = convolved.data() + t * C;
            float* gates = journal_gates + entry * GATES * Hv + h;
            gates[0] = log_decays[t * Hv + h];
            gates[Hv] = betas[t * Hv + h];
            gates[2 * Hv] = 1.0f; // keys have length one
            std::copy_n(token + (Hk + h / (Hv / Hk)) * K, K, journal_keys + at * K);
            std::copy_n(token + 2 * Hk * K + h * V, V, journal_values + at * V);
        }
}
