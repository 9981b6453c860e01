// GEMM with quantized weight rows for a few tokens. Reading the codes is the bottleneck.
//
// This file has the kernels; MODE selects the one to compile. `quantized_rows.cu` unpacks codes
// into tensor core operands, `quantized_products.cu` multiplies them. A warp processes a tile of
// 16 rows x 128 columns per step.
//
// Compile-time constants, besides those of both files: BLOCKS (per SM), HAS_BIAS, HAS_RESIDUAL.
// For experts: NUM_EXPERTS, SLOTS (experts per token, with the shared one), HAS_SHARED, PAIRS (how
// a block finds its token-expert pairs).

#define LINEAR 0     // x [T, K] -> out [T, N], or silu(gate) * up, [T, N / 2]
#define GATE_UP 1    // pairs of one expert -> silu(gate) * up
#define DOWN_PAIRS 2 // pairs of one expert -> one output per pair
#define DOWN_TOKEN 3 // all experts of one token -> weighted sum + residual
#define EXPAND 4     // dequantize all rows, or the rows with the given ids

#include "quantized_rows.cu"

#if MODE == EXPAND
// A thread's two pieces of 4 adjacent columns, numbers 2 i and 2 i + 1 of its 8 in a step.
__device__ __forceinline__ int expanded_column(int piece, int quarter) {
    return IS_NARROW      ? 16 * piece + 4 * quarter
           : IS_ROW_MAJOR ? piece / 4 * 64 + 16 * quarter + piece % 4 * 4
                          : piece / 2 * 32 + 8 * quarter + piece % 2 * 4;
}

__device__ __forceinline__ void store_pieces(u16* out, int column, int other,
                                             const u32 (&pairs)[4]) {
    constexpr bool ARE_ADJACENT = !IS_NARROW && COLUMNS % 8 == 0;
    if (ARE_ADJACENT) { // 64 bytes of a row by four threads: whole sectors of memory
        if (column < COLUMNS) store_16_bytes(out + column, pairs[0], pairs[1], pairs[2], pairs[3]);
        return;
    }
    u32 *first = (u32*)(out + column), *second = (u32*)(out + other);
    if (column < COLUMNS) first[0] = pairs[0], first[1] = pairs[1];
    if (other < COLUMNS) second[0] = pairs[2], second[1] = pairs[3];
}

// out [n, COLUMNS]: warp w of block (n, s) writes step s * WARPS + w of 16 rows or, with ids, of
// one.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    quantized(const u8* codes, const u8* records, const long long* ids, u16* out, int num_rows) {
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int step = blockIdx.y * WARPS + threadIdx.x / 32;
    if (step >= STEPS) return;
    const long long wanted = ids ? ids[blockIdx.x] : 0;
    RowTiles rows;
    rows.point(0, codes, records, ids ? wanted / 16 : blockIdx.x);
    Step held;
    rows.load(held, step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (ids && wanted % 16 != 8 * half + group) continue;
        const long long row = ids ? blockIdx.x : blockIdx.x * 16ll + 8 * half + group;
        if (!ids && row >= num_rows) continue;
        const Record& record = held.records[0][half];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 pairs[4];
#pragma unroll
            for (int piece = 2 * i; piece < 2 * i + 2; ++piece) {
                const int column = expanded_column(piece, quarter);
                const int own_group = GROUP < STEP ? column / GROUP : 0;
                const float scale = scale_of(record, own_group);
                const float offset = NEEDS_SUMS ? offset_of(record, own_group, scale) : 0.0f;
                u32 first, second;
                unpack(held.codes[0][half], piece, first, second);
                pairs[2 * (piece % 2)] = pack(fmaf(low(first) * RAISED, scale, offset),
                                              fmaf(high(first) * RAISED, scale, offset));
                pairs[2 * (piece % 2) + 1] = pack(fmaf(low(second) * RAISED, scale, offset),
                                                  fmaf(high(second) * RAISED, scale, offset));
            }
            store_pieces(out + row * COLUMNS, step * STEP + expanded_column(2 * i, quarter),
                         step * STEP + expanded_column(2 * i + 1, quarter), pairs);
        }
    }
}
#else
#include "quantized_products.cu"

#if MODE == LINEAR
constexpr int BLOCK_OUTPUTS = UP_TILES ? ROWS / 2 : ROWS;
constexpr int OUTPUTS = (BLOCK_OUTPUTS * TOKENS + THREADS - 1) / THREADS, MAX_EARLY = 4;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantized(const u16* x, const float* norm_weight, const u8* codes, const u8* records,
              const u16* plain, const u16* bias, const u16* residual, void* out, int num_tokens,
              int num_quantized, int num_plain, int out_stride, int x_stride, int residual_stride,
              float eps) {
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4,
              quarter = lane % 4;
    const int num_tiles = (num_quantized + 15) / 16;
    const int num_blocks = (num_quantized + ROWS - 1) / ROWS;
    const int column_warp = warp % SPLIT, row_warp = warp / SPLIT;
    const bool is_plain = blockIdx.x >= num_blocks;
    const int first_row = (is_plain ? blockIdx.x - num_blocks : blockIdx.x) * ROWS; // in its part
    RowTiles rows;
    Step held[HELD_STEPS];
    if (!is_plain) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
            rows.point(tile, codes, records,
                       min(first_row / 16 + row_warp * ROW_TILES + tile, num_tiles - 1));
        load_first(held, rows, column_warp);
    }
#if HAS_NORM
    __shared__ __align__(16) u16 staged[STAGED_TOKENS * STAGED_STRIDE];
    __shared__ TokenSums token_sums;
    __shared__ Squares square_sums;
    NormWeights norm;
    norm.load(norm_weight);
#endif
    wait_for_previous();
    Tokens tokens;
#if HAS_NORM
    tokens.sums = &token_sums;
#endif
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        const int token = min(8 * tile + group, num_tokens - 1);
#if HAS_NORM
        tokens.own[tile] = staged + token * STAGED_STRIDE + OWN_COLUMNS * quarter;
#else
        tokens.own[tile] = x + (long long)token * x_stride + OWN_COLUMNS * quarter;
#endif
    }
    const int first_output = is_plain ? num_quantized + first_row : first_row;
    const int num_rows = is_plain ? num_plain : num_quantized;
    const auto added_to = [&](int row, int token) {
        float sum = 0.0f;
        if (first_row + row < num_rows && token < num_tokens) {
#if HAS_BIAS
            sum += low(bias[first_output + row]);
#endif
#if HAS_RESIDUAL
            sum += low(residual[(long long)token * residual_stride + first_output + row]);
#endif
        }
        return sum;
    };
    float added[OUTPUTS]; // loaded early, if there are few: at the end, every thread would wait
                          // for them
    if constexpr (OUTPUTS <= MAX_EARLY)
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i)
            added[i] =
                added_to((threadIdx.x + i * THREADS) % ROWS, (threadIdx.x + i * THREADS) / ROWS);
#if HAS_NORM
    stage(staged, token_sums, square_sums, x, num_tokens, x_stride, norm, eps);
#endif
    Sums sums;
    clear(sums);
    if (is_plain)
        multiply_plain(sums, plain, first_row + row_warp * 16 * ROW_TILES, num_plain, tokens,
                       column_warp);
    else if (column_warp < STEPS)
        multiply_own(sums, held, rows, tokens, column_warp);
    __shared__ Shared shared;
    share_sums(shared, sums);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int place = threadIdx.x + i * THREADS;
        const int row = place % BLOCK_OUTPUTS, token = place / BLOCK_OUTPUTS;
#if HAS_NORM && !IS_RMS_FIRST
        const float scale = token < num_tokens ? inverse_rms(square_sums, token, eps) : 0.0f;
#else
        constexpr float scale = 1.0f;
#endif
#if UP_TILES
        const int output = first_row / 2 + row, gate = row / 8 * 16 + row % 8;
        if (token >= num_tokens || output >= 16 * UP_TILES) continue;
        const float value = silu(scale * whole_sum(shared, token, gate)) *
                            (scale * whole_sum(shared, token, gate + 8));
        store(out, (long long)token * out_stride + output, value);
#else
        if (token >= num_tokens || first_row + row >= num_rows) continue;
        float sum = scale * whole_sum(shared, token, row);
        sum += OUTPUTS <= MAX_EARLY ? added[i] : added_to(row, token);
        store(out, (long long)token * out_stride + first_output + row, sum);
#endif
    }
}

#elif MODE == DOWN_TOKEN
// Block (n, t) computes ROWS outputs of token t, one warp per expert of the token. The ids can be
// read before the wait: the preceding GATE_UP lets this kernel start only after its own wait.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantized(const u16* inner, const float* weights, const int* ids, const u8* codes,
              const u8* records, const u8* shared_codes, const u8* shared_records,
              const float* shared_weight, const u16* residual, u16* out, int num_tiles) {
    let_next_start();
    const int slot = threadIdx.x / 32, quarter = threadIdx.x % 4;
    const int token = blockIdx.y, width = num_tiles * 16;
    const bool is_shared = HAS_SHARED && slot == SLOTS - 1;
    constexpr int ROUTED = SLOTS - HAS_SHARED;
    const int routed = token * ROUTED + (is_shared ? 0 : slot);
    const long long expert = is_shared ? 0 : (int)load_fresh(ids + routed);
    RowTiles rows;
    Step held[HELD_STEPS];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
        rows.point(tile, is_shared ? shared_codes : codes, is_shared ? shared_records : records,
                   expert * num_tiles + min((int)blockIdx.x * ROW_TILES + tile, num_tiles - 1));
    load_first(held, rows, 0);
    wait_for_previous();
    const float weight = is_shared ? shared_weight[token] : weights[routed];
    const int place = blockIdx.x * ROWS + threadIdx.x;
    float added = 0.0f;
    if (threadIdx.x < ROWS && place < width)
        added = low(residual[(long long)token * width + place]);
    Tokens tokens;
    tokens.own[0] = inner + ((long long)token * SLOTS + slot) * COLUMNS + OWN_COLUMNS * quarter;
    Sums sums;
    clear(sums);
    multiply_own(sums, held, rows, tokens, 0);
    __shared__ float shared[WARPS][ROWS];
    const int group = threadIdx.x % 32 / 4;
    if (quarter == 0)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            shared[slot][16 * tile + group] = weight * sums[tile][0][0];
            shared[slot][16 * tile + group + 8] = weight * sums[tile][0][2];
        }
    __syncthreads();
    if (threadIdx.x < ROWS && place < width) {
#pragma unroll
        for (int i = 0; i < WARPS; ++i) added += shared[i][threadIdx.x];
        out[(long long)token * width + place] = (u16)pack(added, 0.0f);
    }
}

#else
#define EACH 0    // block i computes the i-th pair
#define SCANNED 1 // block i computes all pairs of the i-th expert chosen by any of up to 8 tokens
#define LISTED 2  // block i computes the i-th tile of pairs, listed by an earlier kernel

constexpr int GATE_TILES = ROW_TILES / 2, GATE_ROWS = 16 * GATE_TILES; // for GATE_UP
constexpr int ROUTED = SLOTS - HAS_SHARED;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ int pair_of(int routed) {
    return routed / ROUTED * SLOTS + routed % ROUTED;
}

#if PAIRS == SCANNED
constexpr int ID_WORDS = (NUM_EXPERTS + 31) / 32;

// One expert, and a mask of the choices that selected it: slot j of token t is choice
// t * ROUTED + j, at most 64 in all.
struct OwnPairs {
    int expert = NUM_EXPERTS;
    unsigned long long choices = 0;

    // Finds the i-th chosen expert, ordered by id. Every warp does this itself: lane l holds
    // choices l and 32 + l.
    __device__ __forceinline__ void scan(const int* ids, int num_choices, int i) {
        const int lane = threadIdx.x % 32;
        const int first = lane < num_choices ? (int)load_fresh(ids + lane) : NUM_EXPERTS;
        const int second = lane + 32 < num_choices ? (int)load_fresh(ids + 32 + lane) : NUM_EXPERTS;
#pragma unroll
        for (int word = 0; word < ID_WORDS; ++word) {
            u32 chosen = first / 32 == word ? 1u << first % 32 : 0u;
            chosen |= second / 32 == word ? 1u << second % 32 : 0u;
            chosen = __reduce_or_sync(ALL_LANES, chosen);
            if (32 * (word + 1) > NUM_EXPERTS) chosen &= (1u << NUM_EXPERTS % 32) - 1;
            const int rank = __popc(chosen & ((1u << lane) - 1));
            const u32 own = __ballot_sync(ALL_LANES, chosen >> lane & 1 && rank == i);
            if (own) expert = 32 * word + __ffs(own) - 1;
            i -= __popc(chosen);
        }
        choices = (unsigned long long)__ballot_sync(ALL_LANES, second == expert) << 32 |
                  __ballot_sync(ALL_LANES, first == expert);
    }

    __device__ __forceinline__ int at(int i) const {
        if (expert == NUM_EXPERTS) return i * SLOTS + ROUTED;
        unsigned long long left = choices;
        for (; i > 0; --i) left &= left - 1;
        return pair_of(__ffsll(left) - 1);
    }
};
#endif

// Block (n, i) computes the i-th pair, or tile of pairs, of one expert.
//   GATE_UP: GATE_ROWS columns of the intermediate width; row tiles of gate, then of up
//   DOWN_PAIRS: ROWS outputs
// EACH: i counts the shared expert's pairs, one per token, then slot j of token t as
// t * ROUTED + j. Ids and the list are written before GATE_UP starts, so DOWN_PAIRS, which follows
// it, reads them before its wait.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantized(const u16* x, const int* ids, const int* order, const int* tiles, const u8* codes,
              const u8* records, const u8* shared_codes, const u8* shared_records, void* out,
              int num_tokens, int num_tiles) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4,
              quarter = lane % 4;
    if (MODE != GATE_UP) let_next_start();
    const int num_shared = !HAS_SHARED || PAIRS == LISTED ? 0 : PAIRS == SCANNED ? 1 : num_tokens;
    const int index = blockIdx.y - num_shared; // negative: the shared expert
    const bool knows_rows = MODE != GATE_UP || index < 0;
    if (!knows_rows) wait_for_previous();
    int expert = NUM_EXPERTS, num_pairs = 1;
#if PAIRS == LISTED
    const int* tile = tiles + 4 * blockIdx.y;
    expert = load_fresh(tile);
    const int* own_order = order + load_fresh(tile + 1);
    const int first_row = load_fresh(tile + 2);
    num_pairs = load_fresh(tile + 3);
    const auto pair_at = [&](int i) { return own_order[i]; };
    const auto row_at = [&](int i) { return first_row + i; }; // of the intermediate tensor
#elif PAIRS == SCANNED
    OwnPairs own;
    if (index >= 0) own.scan(ids, num_tokens * ROUTED, index);
    expert = own.expert;
    // A token chooses an expert once. Only a slot of zeros may have more pairs than fit: their
    // weights are zero, and the sum over pairs skips them.
    num_pairs = index < 0 ? num_tokens : expert < NUM_EXPERTS ? __popcll(own.choices) : 0;
    num_pairs = min(num_pairs, TOKENS);
    const auto pair_at = [&](int i) { return own.at(i); };
    const auto row_at = pair_at;
#else
    if (index >= 0) expert = ids[index];
    const int own = index < 0 ? (int)blockIdx.y * SLOTS + ROUTED : pair_of(index);
    const auto pair_at = [&](int) { return own; };
    const auto row_at = pair_at;
#endif
    if (num_pairs == 0) {
        if (knows_rows) wait_for_previous();
        return;
    }
    const int own_place = min(group, num_pairs - 1);
    const long long source = MODE == GATE_UP ? pair_at(own_place) / SLOTS : row_at(own_place);
    const bool is_shared = HAS_SHARED && expert == NUM_EXPERTS;
    const u8* own_codes =
        is_shared ? shared_codes : codes + (long long)expert * num_tiles * TILE_CODES;
    const u8* own_records =
        is_shared ? shared_records : records + (long long)expert * num_tiles * TILE_RECORDS;
    RowTiles rows;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        int row_tile = min((int)blockIdx.x * ROW_TILES + tile, num_tiles - 1);
        if constexpr (MODE == GATE_UP)
            row_tile = tile / GATE_TILES * (num_tiles / 2) +
                       min((int)blockIdx.x * GATE_TILES + tile % GATE_TILES, num_tiles / 2 - 1);
        rows.point(tile, own_codes, own_records, row_tile);
    }
    Step held[HELD_STEPS];
    load_first(held, rows, warp);
    if (knows_rows) wait_for_previous();
    if (MODE == GATE_UP) let_next_start(); // the next kernel's early reads are complete now
    Tokens tokens;
    tokens.own[0] = (const u16*)x + source * COLUMNS + OWN_COLUMNS * quarter;
    Sums sums;
    clear(sums);
    if (warp < STEPS) multiply_own(sums, held, rows, tokens, warp);
    __shared__ Shared shared;
    share_sums(shared, sums);
    __syncthreads();
#if MODE == GATE_UP
    const int width = num_tiles * 8;
    for (int i = threadIdx.x; i < GATE_ROWS * num_pairs; i += THREADS) {
        const int row = i % GATE_ROWS, token = i / GATE_ROWS, place = blockIdx.x * GATE_ROWS + row;
        if (place >= width) continue;
        const float value =
            silu(whole_sum(shared, token, row)) * whole_sum(shared, token, GATE_ROWS + row);
        ((u16*)out)[(long long)row_at(token) * width + place] = (u16)pack(value, 0.0f);
    }
#else
    const int width = num_tiles * 16;
    for (int i = threadIdx.x; i < ROWS * num_pairs; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS, place = blockIdx.x * ROWS + row;
        if (place >= width) continue;
        store(out, (long long)pair_at(token) * width + place, whole_sum(shared, token, row));
    }
#endif
}
#endif
#endif
