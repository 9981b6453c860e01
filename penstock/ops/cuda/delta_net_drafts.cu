// The DeltaNet mixer for rows of a token and its drafts: convolution, gates, delta rule and gated
// norm. `ops/triton/delta_net_drafts.py` does the same for batches and with `deterministic`; with a
// few rows it waits for one token after the other, in a few SMs, and this kernel does not.
//
// A cluster of CLUSTER blocks has a value head of a row, a block COLUMNS columns of its state
// [K, V], in registers. A thread has two columns, and one of PARTS parts of the keys, so a sum over
// keys stays within a warp. With 8 parts, a warp has eight columns:
//
//   lane:  part of the keys 0, 0, 0, 0, 1, 1, ... 7    pair of columns 0, 1, 2, 3, 0, 1, ...
//
// Tokens do not wait for each other. With S the state before them and e_j what token j adds,
// decayed up to token t,
//
//   q_t S_t = decays (q_t S) + sum over j of (q_t k_j) e_j        and k_t the same
//
// so all tokens read S at once, and only the e_j are computed one after the other. The blocks of a
// cluster share nothing but the squares that the norm needs.
//
// State, backlog, journal and ring are read before the preceding projection is complete. All blocks
// of a cluster read the journal's keys and one writes them: not before the others have read.
//
// Compile-time constants: WIDTH (most tokens of a row), KEY_DIM, VALUE_DIM, KEY_HEADS, HEADS, TAPS,
// RING, ENTRIES (of a journal's row), MOST_LATE, CLUSTER, PARTS, IS_BFLOAT;
// MIXED_STRIDE (of a token), CONV_STRIDE, RECURRENT_STRIDE (of a slot).

#include "tensor_cores.cu"

constexpr int COLUMNS = VALUE_DIM / CLUSTER; // of a block
constexpr int THREADS = COLUMNS / 2 * PARTS, WARPS = THREADS / 32;
constexpr int OWN_KEYS = KEY_DIM / PARTS;
constexpr int PAIRS = 32 / PARTS, GROUP = 2 * PAIRS; // pairs of columns of a warp, and columns
constexpr int KEY_SIZE = KEY_HEADS * KEY_DIM, VALUE_SIZE = HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * KEY_SIZE + VALUE_SIZE, SHARERS = HEADS / KEY_HEADS;
constexpr int BLOCK_CHANNELS = 2 * KEY_DIM + COLUMNS; // of the convolution: query, key, value
constexpr int OWN_CHANNELS = (BLOCK_CHANNELS / 2 + THREADS - 1) / THREADS; // pairs
// In the end, a group of lanes has the columns of a warp for one token, or for several.
constexpr int GROUPS = 32 / GROUP, OWN_TOKENS = (WIDTH + GROUPS - 1) / GROUPS;
constexpr int PAST_SIZE = KEY_DIM + COLUMNS, SQUARES = CLUSTER * WARPS;
constexpr float L2_EPS = 1e-6f;
static_assert(VALUE_DIM % (4 * CLUSTER) == 0 && THREADS % 32 == 0 && KEY_DIM % (4 * PARTS) == 0 &&
                  GROUP >= CLUSTER,
              "16 bytes of keys and values, whole warps");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
static_assert(CLUSTER == 1, "older cards have no clusters");
#endif

struct __align__(8) Pair {
    float x, y;
};

struct __align__(16) Quad {
    float x, y, z, w;
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

// The drafts that were accepted: the state does not have them yet.
struct Past {
    __align__(16) float numbers[ENTRIES][PAST_SIZE]; // key, value
    float decay[ENTRIES], beta[ENTRIES], scale[ENTRIES];
};

struct Tokens {
    __align__(16) float convolved[WIDTH][BLOCK_CHANNELS]; // query, key, value
    float log_decay[WIDTH], decay[WIDTH], beta[WIDTH];
    float q_scale[WIDTH], k_scale[WIDTH]; // 1 / norm
    Pair products[WIDTH][WIDTH];          // of a token's query and key with an earlier key
};

__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int part() { return lane() / PAIRS; }
__device__ __forceinline__ int group() { return lane() / GROUP; }
__device__ __forceinline__ bool has_odd_column() { return part() % 2; } // of its two
__device__ __forceinline__ int first_column() { return warp() * GROUP + lane() % PAIRS * 2; }
__device__ __forceinline__ int head() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ int rank() { return blockIdx.x % CLUSTER; }

// The barrier of the cluster, in two halves: what comes in between does not wait. It orders no
// memory, which would take longer: what a thread has read before is already in its registers.
__device__ __forceinline__ void arrive_at_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Sums of squares that every warp of the cluster sends to every block. They arrive at a barrier in
// the block's memory, which counts their bytes: faster than a barrier of the cluster.
struct Squares {
    float parts[GROUPS * OWN_TOKENS][SQUARES]; // by token and warp
    unsigned long long barrier;

#if CLUSTER > 1
    static __device__ __forceinline__ u32 address(const void* p) {
        return (u32)__cvta_generic_to_shared(p);
    }

    static __device__ __forceinline__ u32 address_in(int block, const void* p) {
        u32 there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(there)
            : "r"(address(p)), "r"(block));
        return there;
    }

    // Before the cluster's barrier: nothing may arrive earlier.
    __device__ __forceinline__ void start() {
        if (threadIdx.x > 0) return;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(1));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                         address(&barrier)),
                     "r"((u32)sizeof(parts))
                     : "memory");
    }

    __device__ __forceinline__ void send(int token, float sum) {
        const int block = lane() % GROUP;
        if (block >= CLUSTER) return;
        float* p = &parts[token][rank() * WARPS + warp()];
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::
                         "r"(address_in(block, p)),
                     "r"(__float_as_uint(sum)), "r"(address_in(block, &barrier))
                     : "memory");
    }

    __device__ __forceinline__ void wait() {
        u32 is_done = 0;
        while (!is_done)
            asm volatile("{.reg .pred done;\n"
                         "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n"
                         "selp.u32 %0, 1, 0, done;}"
                         : "=r"(is_done)
                         : "r"(address(&barrier))
                         : "memory");
    }
#else
    __device__ __forceinline__ void start() {}
    __device__ __forceinline__ void send(int token, float sum) { parts[token][warp()] = sum; }
    __device__ __forceinline__ void wait() { __syncthreads(); }
#endif
};

__device__ __forceinline__ float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

__device__ __forceinline__ float quick_silu(float x) {
    float power; // few instructions: no subnormal numbers
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.44269504f * x));
    return __fdividef(x, 1.0f + power);
}

__device__ __forceinline__ float exchange(float own, int distance) {
    return __shfl_xor_sync(0xffffffffu, own, distance);
}

// The same number, computed here: without the shuffle, the compiler computes an address where it is
// used, after the wait for the previous kernel.
__device__ __forceinline__ int early(int own) { return __shfl_xor_sync(0xffffffffu, own, 0); }

template <int FIRST, int END> __device__ __forceinline__ float sum_over_lanes(float own) {
#pragma unroll
    for (int distance = FIRST; distance < END; distance *= 2) own += exchange(own, distance);
    return own;
}

// Adds the parts of the keys. Of its two columns, a thread gets the sum of one.
__device__ __forceinline__ float sum_over_parts(Pair own) {
    const float sent = has_odd_column() ? own.x : own.y, kept = has_odd_column() ? own.y : own.x;
    return sum_over_lanes<GROUP, 32>(kept + exchange(sent, PAIRS));
}

// The numbers of both columns of the thread.
__device__ __forceinline__ Pair both(float own) {
    const float other = exchange(own, PAIRS);
    return has_odd_column() ? Pair{other, own} : Pair{own, other};
}

__device__ __forceinline__ int key_of(int own) {
    return 4 * (part() + own / 4 * PARTS) + own % 4; // neighbouring parts have neighbouring banks
}

__device__ __forceinline__ void load_keys(float (&own)[OWN_KEYS], const float* keys) {
#pragma unroll
    for (int j = 0; j < OWN_KEYS; j += 4) {
        const Quad four = *(const Quad*)(keys + key_of(j));
        own[j] = four.x, own[j + 1] = four.y, own[j + 2] = four.z, own[j + 3] = four.w;
    }
}

struct State {
    Pair own[OWN_KEYS];

    static __device__ __forceinline__ long long place(int j) {
        return (long long)(head() * KEY_DIM + key_of(j)) * VALUE_DIM + rank() * COLUMNS +
               first_column();
    }

    __device__ __forceinline__ void load(const float* p, bool is_there) {
#pragma unroll
        for (int j = 0; j < OWN_KEYS; ++j)
            own[j] = is_there ? *(const Pair*)(p + place(j)) : Pair{0.0f, 0.0f};
    }

    __device__ __forceinline__ void store(float* p) const {
#pragma unroll
        for (int j = 0; j < OWN_KEYS; ++j) *(Pair*)(p + place(j)) = own[j];
    }

    // state = decay * state + key x added
    __device__ __forceinline__ void add(const float* keys, float decay, Pair added) {
        float key[OWN_KEYS];
        load_keys(key, keys);
#pragma unroll
        for (int j = 0; j < OWN_KEYS; ++j) {
            own[j].x = fmaf(decay, own[j].x, key[j] * added.x);
            own[j].y = fmaf(decay, own[j].y, key[j] * added.y);
        }
    }

    __device__ __forceinline__ float read(const float* keys) const { // of one column
        float key[OWN_KEYS];
        load_keys(key, keys);
        Pair sum = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < OWN_KEYS; ++j) {
            sum.x = fmaf(key[j], own[j].x, sum.x);
            sum.y = fmaf(key[j], own[j].y, sum.y);
        }
        return sum_over_parts(sum);
    }
};

// The pairs of channels that a thread convolves.
struct Channels {
    int own[OWN_CHANNELS], channel[OWN_CHANNELS]; // the first of a pair, in the block and in all
    float taps[OWN_CHANNELS][TAPS][2];
    u32 inputs[OWN_CHANNELS][TAPS - 1 + WIDTH]; // those of the tokens come last

    __device__ __forceinline__ Channels() {
        const int shared = head() / SHARERS * KEY_DIM;
        const int value = 2 * KEY_SIZE + head() * VALUE_DIM + rank() * COLUMNS;
#pragma unroll
        for (int i = 0; i < OWN_CHANNELS; ++i) {
            const int at = own[i] = 2 * (threadIdx.x + i * THREADS);
            channel[i] = at < KEY_DIM       ? shared + at
                         : at < 2 * KEY_DIM ? KEY_SIZE + shared + at - KEY_DIM
                                            : value + min(at - 2 * KEY_DIM, COLUMNS - 2);
        }
    }

    // Whether it writes the channel to a ring: once, though heads and blocks share keys.
    __device__ __forceinline__ bool writes_ring(int i) const {
        const bool is_first = rank() == 0 && head() % SHARERS == 0;
        return own[i] >= (is_first ? 0 : 2 * KEY_DIM) && own[i] < BLOCK_CHANNELS;
    }

    __device__ __forceinline__ void load_past(const u16* weight, const u16* ring, int start) {
#pragma unroll
        for (int i = 0; i < OWN_CHANNELS; ++i) {
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) {
                const u32 both = *(const u32*)(weight + tap * CHANNELS + channel[i]);
                taps[i][tap][0] = low(both), taps[i][tap][1] = high(both);
            }
#pragma unroll
            for (int at = 0; at < TAPS - 1; ++at) {
                const int position = start - (TAPS - 1 - at);
                const u16* p = ring + position % RING * CHANNELS + channel[i];
                inputs[i][at] = position >= 0 ? *(const u32*)p : 0;
            }
        }
    }

    __device__ __forceinline__ void load(const u16* mixed, const int (&places)[OWN_CHANNELS],
                                         int num_tokens) {
#pragma unroll
        for (int i = 0; i < OWN_CHANNELS; ++i)
#pragma unroll
            for (int t = 0; t < WIDTH; ++t)
                inputs[i][TAPS - 1 + t] =
                    t < num_tokens ? *(const u32*)(mixed + places[i] + t * MIXED_STRIDE) : 0;
    }

    // Nothing is used of tokens that the row does not have.
    __device__ __forceinline__ void convolve(Tokens& tokens) const {
#pragma unroll
        for (int i = 0; i < OWN_CHANNELS; ++i) {
            if (own[i] >= BLOCK_CHANNELS) break;
#pragma unroll
            for (int t = 0; t < WIDTH; ++t) {
                Pair sum = {0.0f, 0.0f};
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) {
                    sum.x = fmaf(low(inputs[i][t + tap]), taps[i][tap][0], sum.x);
                    sum.y = fmaf(high(inputs[i][t + tap]), taps[i][tap][1], sum.y);
                }
                *(Pair*)(tokens.convolved[t] + own[i]) = {quick_silu(sum.x), quick_silu(sum.y)};
            }
        }
    }

    // A ring has room for what was read and what is written now. `place`: of the first token.
    __device__ __forceinline__ void store(u16* ring, int place, int num_tokens) const {
#pragma unroll
        for (int i = 0; i < OWN_CHANNELS; ++i) {
            if (!writes_ring(i)) continue;
            int at = place * CHANNELS + channel[i];
#pragma unroll
            for (int t = 0; t < WIDTH; ++t) {
                if (t < num_tokens) *(u32*)(ring + at) = inputs[i][TAPS - 1 + t];
                at += at + CHANNELS < RING * CHANNELS ? CHANNELS : CHANNELS - RING * CHANNELS;
            }
        }
    }

    __device__ __forceinline__ void copy(u16* target, const u16* ring) const {
#pragma unroll
        for (int i = 0; i < OWN_CHANNELS; ++i)
            if (writes_ring(i))
#pragma unroll 1
                for (int at = channel[i]; at < RING * CHANNELS; at += CHANNELS)
                    *(u32*)(target + at) = *(const u32*)(ring + at);
    }
};

// The journal of a row, for the head and columns of a block.
struct Entries {
    float *keys, *values, *gates;

    __device__ __forceinline__ Entries(const Journal& journal, int row) {
        const long long first = journal.rows[row] * ENTRIES;
        keys = journal.keys + (first * HEADS + head()) * KEY_DIM;
        values = journal.values + (first * HEADS + head()) * VALUE_DIM + rank() * COLUMNS;
        gates = journal.gates + first * (3 * HEADS) + head();
    }

    __device__ __forceinline__ float* place(int entry, int at) const {
        return at < KEY_DIM ? keys + entry * (HEADS * KEY_DIM) + at
                            : values + entry * VALUE_SIZE + at - KEY_DIM;
    }

    __device__ __forceinline__ void load(Past& past, int num_right) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < num_right * (PAST_SIZE / 4); i += THREADS) {
            const int entry = i / (PAST_SIZE / 4), at = i % (PAST_SIZE / 4) * 4;
            *(Quad*)(past.numbers[entry] + at) = *(const Quad*)place(entry, at);
        }
        if (threadIdx.x < num_right) {
            const float* gate = gates + threadIdx.x * (3 * HEADS);
            past.decay[threadIdx.x] = expf(gate[0]);
            past.beta[threadIdx.x] = gate[HEADS];
            past.scale[threadIdx.x] = gate[2 * HEADS];
        }
    }

    // Drafts, which may be accepted: the row's own token is in its state.
    __device__ __forceinline__ void store(const Tokens& tokens, int num_tokens) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < (num_tokens - 1) * (PAST_SIZE / 4); i += THREADS) {
            const int entry = i / (PAST_SIZE / 4), at = i % (PAST_SIZE / 4) * 4;
            if (at < KEY_DIM && rank() > 0) continue; // one block writes the keys
            *(Quad*)place(entry, at) = *(const Quad*)(tokens.convolved[entry + 1] + KEY_DIM + at);
        }
    }

    __device__ __forceinline__ void store_gates(const Tokens& tokens, int num_tokens) const {
        const int t = threadIdx.x;
        if (rank() > 0 || t == 0 || t >= num_tokens) return;
        float* gate = gates + (t - 1) * (3 * HEADS);
        gate[0] = tokens.log_decay[t], gate[HEADS] = tokens.beta[t];
        gate[2 * HEADS] = tokens.k_scale[t];
    }
};

// Adds what plain steps left beside a state.
__device__ __forceinline__ void add_backlog(State& state, const Backlog& backlog, long long slot) {
#if MOST_LATE
    const int num_late = backlog.counts[slot * HEADS + head()];
#pragma unroll 1
    for (int entry = 0; entry < num_late; ++entry) {
        const long long at = (slot * MOST_LATE + entry) * HEADS + head();
        const float* added = backlog.corrections + at * VALUE_DIM + rank() * COLUMNS;
        state.add(backlog.keys + at * KEY_DIM, backlog.decays[at],
                  *(const Pair*)(added + first_column()));
    }
#endif
}

__device__ __forceinline__ void clear_backlog(const Backlog& backlog, long long slot) {
#if MOST_LATE
    if (rank() == 0 && threadIdx.x == 0) backlog.counts[slot * HEADS + head()] = 0;
#endif
}

// Adds an accepted draft.
__device__ __forceinline__ void replay(State& state, const Past& past, int entry) {
    const float *key = past.numbers[entry], *value = key + KEY_DIM;
    const float decay = past.decay[entry], scale = past.scale[entry];
    const float held = state.read(key);
    const float own = value[first_column() + has_odd_column()];
    state.add(key, decay, both(scale * past.beta[entry] * (own - decay * scale * held)));
}

// Multiplies tokens with each other; a warp multiplies one with PAIRS others.
__device__ __forceinline__ void multiply_tokens(Tokens& tokens) {
    constexpr int OTHERS = (WIDTH + PAIRS - 1) / PAIRS;
#pragma unroll 1
    for (int i = warp(); i < WIDTH * OTHERS; i += WARPS) {
        const int t = i / OTHERS, j = min(i % OTHERS * PAIRS + lane() % PAIRS, t);
        float q[OWN_KEYS], k[OWN_KEYS], earlier[OWN_KEYS];
        load_keys(q, tokens.convolved[t]);
        load_keys(k, tokens.convolved[t] + KEY_DIM);
        load_keys(earlier, tokens.convolved[j] + KEY_DIM);
        float q_k = 0.0f, k_k = 0.0f, q_q = 0.0f;
#pragma unroll
        for (int at = 0; at < OWN_KEYS; ++at) {
            q_k = fmaf(q[at], earlier[at], q_k);
            k_k = fmaf(k[at], earlier[at], k_k);
            q_q = fmaf(q[at], q[at], q_q);
        }
        q_k = sum_over_lanes<PAIRS, 32>(q_k), k_k = sum_over_lanes<PAIRS, 32>(k_k);
        q_q = sum_over_lanes<PAIRS, 32>(q_q);
        if (part() == 0) tokens.products[t][j] = {q_k, k_k};
        if (part() == 0 && j == t) {
            tokens.k_scale[t] = rsqrtf(k_k + L2_EPS);
            tokens.q_scale[t] = rsqrtf((q_q + L2_EPS) * KEY_DIM);
        }
    }
}

// What the tokens read from a column, given what they hold of the state before all of them.
// Returns what the first adds to it.
__device__ __forceinline__ float read_column(float (&reads)[WIDTH], const float (&q_held)[WIDTH],
                                             const float (&k_held)[WIDTH], const Tokens& tokens) {
    const int column = first_column() + has_odd_column();
    float added[WIDTH], first = 0.0f, lasting = 1.0f; // of the state before all tokens
#pragma unroll
    for (int t = 0; t < WIDTH; ++t) {
        const float decay = tokens.decay[t], k_scale = tokens.k_scale[t];
        float q_sum = lasting * q_held[t], k_sum = lasting * k_held[t];
#pragma unroll
        for (int j = 0; j < t; ++j) {
            const Pair product = tokens.products[t][j];
            q_sum = fmaf(product.x, added[j], q_sum);
            k_sum = fmaf(product.y, added[j], k_sum);
            added[j] *= decay;
        }
        const float value = tokens.convolved[t][2 * KEY_DIM + column];
        added[t] = k_scale * tokens.beta[t] * (value - decay * k_scale * k_sum);
        reads[t] =
            tokens.q_scale[t] * fmaf(decay, q_sum, tokens.products[t][t].x * added[t]);
        lasting *= decay;
        if (t == 0) first = added[0];
    }
    return first;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        delta_net_drafts(const u16* mixed, const u16* conv_weight, const float* a_log,
                         const float* dt_bias, const float* norm_weight, u16* conv,
                         float* recurrent, Slots slots, Journal journal, Backlog backlog, u16* out,
                         float eps) {
    let_next_start();
    const int row = blockIdx.y;
    const long long first = slots.query_start[row];
    const int num_tokens = (int)(slots.query_start[row + 1] - first);
    const int start = (int)slots.context_lens[row] - num_tokens;
    const long long state_slot = slots.state[row], initial_slot = slots.initial[row];
    const long long keep_slot = journal.keep_slots[row];
    const int num_right = (int)journal.num_accepted[row];
    const Entries entries(journal, row);
    const u16* old_ring = conv + initial_slot * CONV_STRIDE;
    u16* ring = conv + state_slot * CONV_STRIDE;
    float* own_recurrent = recurrent + state_slot * RECURRENT_STRIDE;
    const int own_column = rank() * COLUMNS + first_column() + has_odd_column(); // of the head
    const int first_place = (int)first * MIXED_STRIDE + CHANNELS;
    const int z_place =
        early(first_place + group() * MIXED_STRIDE + head() * VALUE_DIM + own_column);
    const int gates_place = early(first_place + lane() * MIXED_STRIDE + VALUE_SIZE + head());
    const bool has_gates = warp() == WARPS - 1 && lane() < num_tokens; // this warp convolves least

    __shared__ Past past;
    __shared__ Tokens tokens;
    __shared__ Squares squares;
    State state;
    state.load(recurrent + initial_slot * RECURRENT_STRIDE, start > 0);
    Channels channels;
    channels.load_past(conv_weight, old_ring, start);
    int places[OWN_CHANNELS];
#pragma unroll
    for (int i = 0; i < OWN_CHANNELS; ++i)
        places[i] = early((int)first * MIXED_STRIDE + channels.channel[i]);
    entries.load(past, num_right);
    squares.start();
    const float norm = norm_weight[own_column];
    const float rate = -expf(a_log[head()]), bias = dt_bias[head()];
    if (start > 0) add_backlog(state, backlog, initial_slot);
    __syncthreads();
    arrive_at_cluster(); // it has read what another block writes, and squares may arrive
    if (keep_slot > 0) wait_for_previous(); // nothing is written before
#pragma unroll 1
    for (int entry = 0; entry <= num_right; ++entry) {
        if (keep_slot > 0 && start - num_right + entry == journal.keep_at[row]) {
            // With its ring: the inputs before it are still there.
            state.store(recurrent + keep_slot * RECURRENT_STRIDE);
            channels.copy(conv + keep_slot * CONV_STRIDE, old_ring);
            clear_backlog(backlog, keep_slot);
        }
        if (entry < num_right) replay(state, past, entry);
    }

    wait_for_previous();
    channels.load(mixed, places, num_tokens);
    const u16 beta = has_gates ? mixed[gates_place] : 0;
    const u16 decay = has_gates ? mixed[gates_place + HEADS] : 0;
    u16 z[OWN_TOKENS];
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; ++i)
        z[i] = group() + i * GROUPS < num_tokens ? mixed[z_place + i * GROUPS * MIXED_STRIDE] : 0;
    wait_for_cluster();
    if (has_gates) {
        const float log_decay = rate * softplus(low(decay) + bias);
        tokens.beta[lane()] = __fdividef(1.0f, 1.0f + __expf(-low(beta)));
        tokens.log_decay[lane()] = log_decay;
        tokens.decay[lane()] = expf(log_decay);
    }
    channels.convolve(tokens);
    float gate[OWN_TOKENS];
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; ++i) gate[i] = quick_silu(low(z[i])) * norm;
    __syncthreads();

    float q_held[WIDTH], k_held[WIDTH], reads[WIDTH];
#pragma unroll
    for (int t = 0; t < WIDTH; ++t) {
        q_held[t] = state.read(tokens.convolved[t]);
        k_held[t] = state.read(tokens.convolved[t] + KEY_DIM);
    }
    multiply_tokens(tokens);
    __syncthreads();
    const float added = read_column(reads, q_held, k_held, tokens);
    float own[OWN_TOKENS] = {};
#pragma unroll
    for (int t = 0; t < WIDTH; ++t)
        if (t % GROUPS == group()) own[t / GROUPS] = reads[t];
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; ++i) {
        const float square = sum_over_lanes<1, GROUP>(own[i] * own[i]);
        squares.send(group() + i * GROUPS, square);
    }
    // After the row's own token: what follows may be wrong.
    state.add(tokens.convolved[0] + KEY_DIM, tokens.decay[0], both(added));
    state.store(own_recurrent);
    clear_backlog(backlog, state_slot);
    if (initial_slot != state_slot) channels.copy(ring, old_ring);
    channels.store(ring, start % RING, num_tokens);
    entries.store(tokens, num_tokens);
    entries.store_gates(tokens, num_tokens);
    squares.wait();
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; ++i) {
        const int t = group() + i * GROUPS;
        float square = 0.0f;
#pragma unroll
        for (int at = lane() % GROUP; at < SQUARES; at += GROUP) square += squares.parts[t][at];
        square = sum_over_lanes<1, GROUP>(square);
        const float normed = own[i] * rsqrtf(square / VALUE_DIM + eps);
        if (t < num_tokens)
            out[(first + t) * VALUE_SIZE + head() * VALUE_DIM + own_column] =
                (u16)pack(normed * gate[i], 0.0f);
    }
}
