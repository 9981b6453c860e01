// The DeltaNet mixer for rows of a token and its drafts: convolution, gates, delta rule and gated
// norm. `ops/triton/delta_net_drafts.py` does the same for batches and with `deterministic`; with a
// few rows it waits for one token after the other, in a few SMs, and this kernel does not.
//
// Block (h, r) has value head h of row r, with its state [K, V] in registers. A warp has 8 columns,
// a thread two of them and an eighth of the keys, so a sum over keys stays within a warp:
//
//   lane:  part of the keys 0, 0, 0, 0, 1, 1, 1, 1, ... 7    pair of columns 0, 1, 2, 3, 0, 1, ...
//
// Tokens do not wait for each other. With S the state before them and e_j what token j adds,
// decayed up to token t,
//
//   q_t S_t = decays (q_t S) + sum over j of (q_t k_j) e_j        and k_t the same
//
// so all tokens read S at once, and only the e_j, vectors of V, are computed one after the other.
// State, backlog, journal and ring are read before the preceding projection is complete.
//
// Compile-time constants: WIDTH (most tokens of a row), KEY_DIM, VALUE_DIM, KEY_HEADS, HEADS, TAPS,
// RING, ENTRIES (of a journal's row), MOST_LATE, IS_BFLOAT.

#include "tensor_cores.cu"

constexpr int THREADS = 4 * VALUE_DIM, WARPS = THREADS / 32, PARTS = 8;
constexpr int VALUE_WARPS = (VALUE_DIM + 31) / 32; // with a thread per column
constexpr int OWN_KEYS = KEY_DIM / PARTS;
constexpr int KEY_SIZE = KEY_HEADS * KEY_DIM, VALUE_SIZE = HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * KEY_SIZE + VALUE_SIZE, SHARERS = HEADS / KEY_HEADS;
constexpr int HEAD_CHANNELS = 2 * KEY_DIM + VALUE_DIM; // of the convolution: query, key, value
constexpr int OWN_CHANNELS = (HEAD_CHANNELS + THREADS - 1) / THREADS;
constexpr int OWN_GATES = (WIDTH + 3) / 4;
constexpr int MOST_PAST = MOST_LATE + ENTRIES, PAST_SIZE = KEY_DIM + VALUE_DIM;
constexpr float L2_EPS = 1e-6f;
static_assert(KEY_DIM % 32 == 0 && VALUE_DIM % 8 == 0, "16 bytes of a key, whole warps");

struct __align__(8) Pair {
    float x, y;
};

struct Slots {
    const long long *query_start, *context_lens, *state, *initial;
};

struct Journal {
    float *keys, *values, *gates; // [rows, n, Hv, K], [rows, n, Hv, V], [rows, n, 3, Hv]
    const long long *rows, *num_accepted, *keep_at, *keep_slots;
};

struct Backlog {
    int* counts; // [slots, Hv]
    float *keys, *corrections, *decays;
};

// What earlier steps left beside the state: tokens of the backlog, then accepted drafts.
struct Past {
    float keys[MOST_PAST][KEY_DIM], values[MOST_PAST][VALUE_DIM];
    float decay[MOST_PAST], beta[MOST_PAST], scale[MOST_PAST];
};

struct Tokens {
    __align__(16) float convolved[WIDTH][HEAD_CHANNELS]; // query, key, value
    float gate[WIDTH][VALUE_DIM], q_held[WIDTH][VALUE_DIM], k_held[WIDTH][VALUE_DIM];
    float added[VALUE_DIM]; // by the first
    float log_decay[WIDTH], decay[WIDTH], beta[WIDTH];
    float q_square[WIDTH], q_k[WIDTH][WIDTH], k_k[WIDTH][WIDTH];
    float squares[WIDTH][VALUE_WARPS]; // of what was read
};

__device__ __forceinline__ float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

__device__ __forceinline__ float sum_over_parts(float own) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        own += __shfl_xor_sync(0xffffffffu, own, distance);
    return own;
}

__device__ __forceinline__ float sum_over_lanes(float own) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
        own += __shfl_xor_sync(0xffffffffu, own, distance);
    return own;
}

__device__ __forceinline__ void load_keys(float (&own)[OWN_KEYS], const float* keys) {
    const float* p = keys + threadIdx.x % 32 / 4 * OWN_KEYS;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) own[j] = p[j];
}

// state = decay * state + key x (x, y)
__device__ __forceinline__ void add(Pair (&state)[OWN_KEYS], const float (&key)[OWN_KEYS],
                                    float decay, float x, float y) {
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) {
        state[j].x = fmaf(decay, state[j].x, key[j] * x);
        state[j].y = fmaf(decay, state[j].y, key[j] * y);
    }
}

__device__ __forceinline__ Pair read(const Pair (&state)[OWN_KEYS], const float (&key)[OWN_KEYS]) {
    Pair sum = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) {
        sum.x = fmaf(key[j], state[j].x, sum.x);
        sum.y = fmaf(key[j], state[j].y, sum.y);
    }
    return {sum_over_parts(sum.x), sum_over_parts(sum.y)};
}

__device__ __forceinline__ void store_state(float* p, const Pair (&state)[OWN_KEYS]) {
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) *(Pair*)(p + j * VALUE_DIM) = state[j];
}

// The channel of the convolution with this number among those of a head.
__device__ __forceinline__ int channel_of(int own, int head) {
    const int shared = head / SHARERS * KEY_DIM;
    return own < KEY_DIM       ? shared + own
           : own < 2 * KEY_DIM ? KEY_SIZE + shared + own - KEY_DIM
                               : 2 * KEY_SIZE + head * VALUE_DIM + own - 2 * KEY_DIM;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_net_drafts(const u16* mixed, const u16* conv_weight, const float* a_log,
                     const float* dt_bias, const float* norm_weight, u16* conv, float* recurrent,
                     Slots slots, Journal journal, Backlog backlog, u16* out, float eps,
                     long long mixed_stride, long long conv_stride, long long recurrent_stride) {
    let_next_start();
    const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32, part = lane / 4;
    const int column = 8 * warp + 2 * (lane % 4);
    const long long first = slots.query_start[row];
    const int num_tokens = (int)(slots.query_start[row + 1] - first);
    const int start = (int)slots.context_lens[row] - num_tokens;
    const long long state_slot = slots.state[row], initial_slot = slots.initial[row];
    const long long keep_slot = journal.keep_slots[row];
    const int num_right = (int)journal.num_accepted[row];
    const long long entries = journal.rows[row] * ENTRIES;
    float* keys = journal.keys + (entries * HEADS + head) * KEY_DIM;
    float* values = journal.values + (entries * HEADS + head) * VALUE_DIM;
    float* gates = journal.gates + entries * (3 * HEADS) + head;
    const u16* old_ring = conv + initial_slot * conv_stride;
    u16* ring = conv + state_slot * conv_stride;
    const long long place = (long long)(head * KEY_DIM + part * OWN_KEYS) * VALUE_DIM + column;

    Pair state[OWN_KEYS];
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j)
        state[j] = start > 0 ? *(const Pair*)(recurrent + initial_slot * recurrent_stride + place +
                                              j * VALUE_DIM)
                             : Pair{0.0f, 0.0f};
    float taps[OWN_CHANNELS][TAPS];
    u16 past_inputs[OWN_CHANNELS][TAPS]; // the oldest first; the last place is the token's own
#pragma unroll
    for (int i = 0; i < OWN_CHANNELS; ++i) {
        const int own = min(thread + i * THREADS, HEAD_CHANNELS - 1);
        const int channel = channel_of(own, head);
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            const int position = start - (TAPS - 1 - tap);
            taps[i][tap] = low(conv_weight[tap * CHANNELS + channel]);
            past_inputs[i][tap] = tap < TAPS - 1 && position >= 0
                                      ? old_ring[position % RING * CHANNELS + channel]
                                      : 0;
        }
    }

    const float rate = -expf(a_log[head]), bias = dt_bias[head];
    const float norm = norm_weight[thread % VALUE_DIM];

    __shared__ Past past;
    __shared__ Tokens tokens;
    int num_late = 0;
#if MOST_LATE
    if (start > 0) num_late = backlog.counts[initial_slot * HEADS + head];
#endif
    const int num_past = num_late + num_right;
#pragma unroll 1
    for (int i = thread; i < num_past * PAST_SIZE; i += THREADS) {
        const int entry = i / PAST_SIZE, at = i % PAST_SIZE;
        const bool is_key = at < KEY_DIM;
        const float* p = is_key ? keys + at : values + at - KEY_DIM;
        const int size = is_key ? KEY_DIM : VALUE_DIM;
        float number;
        if (entry < num_late) {
            const float* late = is_key ? backlog.keys + at : backlog.corrections + at - KEY_DIM;
            number = late[((initial_slot * MOST_LATE + entry) * HEADS + head) * size];
        } else {
            number = p[(long long)(entry - num_late) * HEADS * size];
        }
        (is_key ? past.keys[entry][at] : past.values[entry][at - KEY_DIM]) = number;
    }
    if (thread < num_past) {
        if (thread < num_late) {
            past.decay[thread] =
                backlog.decays[(initial_slot * MOST_LATE + thread) * HEADS + head];
        } else {
            const float* gate = gates + (thread - num_late) * (3 * HEADS);
            past.decay[thread] = expf(gate[0]);
            past.beta[thread] = gate[HEADS];
            past.scale[thread] = gate[2 * HEADS];
        }
    }
    __syncthreads();
    float key[OWN_KEYS];
#pragma unroll 1
    for (int entry = 0; entry < num_late; ++entry) {
        load_keys(key, past.keys[entry]);
        add(state, key, past.decay[entry], past.values[entry][column],
            past.values[entry][column + 1]);
    }
    if (keep_slot > 0) wait_for_previous(); // nothing is written before
#pragma unroll 1
    for (int entry = num_late; entry <= num_past; ++entry) {
        if (keep_slot > 0 && start - num_past + entry == journal.keep_at[row]) {
            // With its ring: the inputs before it are still there.
            store_state(recurrent + keep_slot * recurrent_stride + place, state);
#pragma unroll 1
            for (int i = 0; i < RING * OWN_CHANNELS; ++i) {
                const int own = thread + i % OWN_CHANNELS * THREADS;
                const int channel = i / OWN_CHANNELS * CHANNELS + channel_of(own, head);
                if (own < HEAD_CHANNELS && (own >= 2 * KEY_DIM || head % SHARERS == 0))
                    conv[keep_slot * conv_stride + channel] = old_ring[channel];
            }
#if MOST_LATE
            if (thread == 0) backlog.counts[keep_slot * HEADS + head] = 0;
#endif
        }
        if (entry == num_past) break;
        load_keys(key, past.keys[entry]);
        const Pair held = read(state, key);
        const float decay = past.decay[entry], scale = past.scale[entry];
        const float* value = past.values[entry] + column;
        const float x = past.beta[entry] * (value[0] - decay * scale * held.x);
        const float y = past.beta[entry] * (value[1] - decay * scale * held.y);
        add(state, key, decay, scale * x, scale * y);
    }

    wait_for_previous();
    const u16* own_mixed = mixed + first * mixed_stride;
    u16 inputs[OWN_CHANNELS][WIDTH];
#pragma unroll
    for (int i = 0; i < OWN_CHANNELS; ++i) {
        const u16* p = own_mixed + channel_of(min(thread + i * THREADS, HEAD_CHANNELS - 1), head);
#pragma unroll
        for (int t = 0; t < WIDTH; ++t) inputs[i][t] = t < num_tokens ? p[t * mixed_stride] : 0;
    }
    u16 z[OWN_GATES]; // of the thread's value column, for every fourth token
#pragma unroll
    for (int i = 0; i < OWN_GATES; ++i) {
        const int t = thread / VALUE_DIM + 4 * i;
        const u16* p = own_mixed + CHANNELS + head * VALUE_DIM + thread % VALUE_DIM;
        z[i] = t < num_tokens ? p[t * mixed_stride] : 0;
    }
    if (warp == WARPS - 1 && lane < num_tokens) { // of the last warp, which convolves least
        const u16* p = own_mixed + lane * mixed_stride + CHANNELS + VALUE_SIZE + head;
        const float log_decay = rate * softplus(low(p[HEADS]) + bias);
        tokens.beta[lane] = 1.0f / (1.0f + __expf(-low(p[0])));
        tokens.log_decay[lane] = log_decay;
        tokens.decay[lane] = expf(log_decay);
    }
#pragma unroll
    for (int i = 0; i < OWN_CHANNELS; ++i) {
        const int own = thread + i * THREADS;
        if (own >= HEAD_CHANNELS) break;
        const bool is_value = own >= 2 * KEY_DIM, is_in_journal = own >= KEY_DIM;
        const bool writes_ring = is_value || head % SHARERS == 0; // heads that share a key: once
        float* entry = is_value ? values + own - 2 * KEY_DIM : keys + own - KEY_DIM;
        u16* own_ring = ring + channel_of(own, head);
        if (initial_slot != state_slot && writes_ring)
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; ++tap) {
                const int position = start - (TAPS - 1 - tap);
                if (position >= 0) own_ring[position % RING * CHANNELS] = past_inputs[i][tap];
            }
        int place_in_ring = start % RING; // it has room for what was read and what is written now
#pragma unroll
        for (int t = 0; t < WIDTH; ++t) {
            if (t >= num_tokens) break;
            past_inputs[i][TAPS - 1] = inputs[i][t];
            float sum = 0.0f;
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap)
                sum = fmaf(low(past_inputs[i][tap]), taps[i][tap], sum);
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; ++tap) past_inputs[i][tap] = past_inputs[i][tap + 1];
            const float number = silu(sum);
            tokens.convolved[t][own] = number;
            if (t > 0 && is_in_journal)
                entry[(t - 1) * (is_value ? VALUE_SIZE : HEADS * KEY_DIM)] = number;
            if (writes_ring) own_ring[place_in_ring * CHANNELS] = inputs[i][t];
            place_in_ring = place_in_ring + 1 == RING ? 0 : place_in_ring + 1;
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_GATES; ++i) {
        const int t = thread / VALUE_DIM + 4 * i;
        if (t < num_tokens) tokens.gate[t][thread % VALUE_DIM] = silu(low(z[i])) * norm;
    }
    __syncthreads();

#pragma unroll
    for (int t = 0; t < WIDTH; ++t) {
        if (t >= num_tokens) break;
        load_keys(key, tokens.convolved[t]);
        const Pair q_held = read(state, key);
        load_keys(key, tokens.convolved[t] + KEY_DIM);
        const Pair k_held = read(state, key);
        if (part == 0) *(Pair*)(tokens.q_held[t] + column) = q_held;
        if (part == 1) *(Pair*)(tokens.k_held[t] + column) = k_held;
    }
#pragma unroll 1
    for (int i = warp; i < WIDTH * WIDTH; i += WARPS) { // products of two tokens
        const int t = i / WIDTH, j = i % WIDTH;
        if (t >= num_tokens || j > t) continue;
        const float *q = tokens.convolved[t], *k = q + KEY_DIM,
                    *earlier = tokens.convolved[j] + KEY_DIM;
        float q_k = 0.0f, k_k = 0.0f, q_square = 0.0f;
#pragma unroll
        for (int at = lane; at < KEY_DIM; at += 32) {
            q_k = fmaf(q[at], earlier[at], q_k);
            k_k = fmaf(k[at], earlier[at], k_k);
            q_square = fmaf(q[at], q[at], q_square);
        }
        q_k = sum_over_lanes(q_k), k_k = sum_over_lanes(k_k), q_square = sum_over_lanes(q_square);
        if (lane == 0) tokens.q_k[t][j] = q_k, tokens.k_k[t][j] = k_k;
        if (lane == 0 && j == t) tokens.q_square[t] = q_square;
    }
    __syncthreads();

    float reads[WIDTH];
    if (warp < VALUE_WARPS) {
        const int own = min(thread, VALUE_DIM - 1); // a column
        float added[WIDTH], lasting = 1.0f;         // of the state before all tokens
#pragma unroll
        for (int t = 0; t < WIDTH; ++t) {
            if (t >= num_tokens) break;
            const float decay = tokens.decay[t], beta = tokens.beta[t];
            const float k_scale = rsqrtf(tokens.k_k[t][t] + L2_EPS);
            const float q_scale = rsqrtf((tokens.q_square[t] + L2_EPS) * KEY_DIM);
            float q_sum = lasting * tokens.q_held[t][own], k_sum = lasting * tokens.k_held[t][own];
#pragma unroll
            for (int j = 0; j < t; ++j) {
                q_sum = fmaf(tokens.q_k[t][j], added[j], q_sum);
                k_sum = fmaf(tokens.k_k[t][j], added[j], k_sum);
                added[j] *= decay;
            }
            const float value = tokens.convolved[t][2 * KEY_DIM + own];
            added[t] = k_scale * beta * (value - decay * k_scale * k_sum);
            reads[t] = q_scale * fmaf(decay, q_sum, tokens.q_k[t][t] * added[t]);
            lasting *= decay;
            if (t == 0) {
                tokens.added[own] = added[0];
            } else if (thread == 0) {
                float* gate = gates + (t - 1) * (3 * HEADS);
                gate[0] = tokens.log_decay[t], gate[HEADS] = beta, gate[2 * HEADS] = k_scale;
            }
            const float square = sum_over_lanes(thread < VALUE_DIM ? reads[t] * reads[t] : 0.0f);
            if (lane == 0) tokens.squares[t][warp] = square;
        }
    }
    __syncthreads();
    if (thread < VALUE_DIM)
#pragma unroll
        for (int t = 0; t < WIDTH; ++t) {
            if (t >= num_tokens) break;
            float square = 0.0f;
#pragma unroll
            for (int i = 0; i < VALUE_WARPS; ++i) square += tokens.squares[t][i];
            const float normed = reads[t] * rsqrtf(square / VALUE_DIM + eps);
            out[(first + t) * VALUE_SIZE + head * VALUE_DIM + thread] =
                (u16)pack(normed * tokens.gate[t][thread], 0.0f);
        }
    // After the row's own token: what follows may be wrong.
    load_keys(key, tokens.convolved[0] + KEY_DIM);
    add(state, key, tokens.decay[0], tokens.added[column], tokens.added[column + 1]);
    store_state(recurrent + state_slot * recurrent_stride + place, state);
#if MOST_LATE
    if (thread == 0) backlog.counts[state_slot * HEADS + head] = 0;
#endif
}
