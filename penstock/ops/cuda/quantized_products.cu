// The inner product of `quantized.cu`: loads a warp's tokens, multiplies them with unpacked codes
// and accumulates over the columns. Knows no grid and no experts.
//
// Scales multiply the accumulators of a group of columns, not its weights. A term added to the
// codes of a group (a zero point, an offset, MAGIC) multiplies the sum of the token's values in
// that group. An mma whose A operand is all ones computes this sum; where only one row tile would
// use it, staging computes it. Products are exact; only float32 accumulation rounds.
//
// With HAS_NORM every block norms the tokens itself, in shared memory, and multiplies the sums by
// 1 / rms at the end: bf16 has the range of float32, so nothing is lost. fp16 could overflow, so
// there 1 / rms is applied first, which reads the tokens once more.
//
// Compile-time constants, besides those of `quantized_rows.cu`: MODE, WARPS, ROW_WARPS (warps with
// different rows), HELD (steps in flight), STAGED_TOKENS, HAS_NORM, IS_OUT_FLOAT.

constexpr int TOKENS = 8 * TOKEN_TILES, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS;                  // per block
constexpr int SPLIT = MODE == DOWN_TOKEN ? 1 : WARPS / ROW_WARPS; // split-K over warps
static_assert(MODE == LINEAR || ROW_WARPS == 1, "only there are tokens so many");
constexpr int OWN = (STEPS + SPLIT - 1) / SPLIT; // steps per warp
constexpr int HELD_STEPS = HELD < OWN ? HELD : OWN;
constexpr int AHEAD = TOKEN_TILES == 1 ? 4 : 1; // runs of tokens in flight

#define IS_RMS_FIRST (HAS_NORM && !IS_BFLOAT)
static_assert(!HAS_NORM || (TOKEN_TILES == 1 && STAGED_TOKENS <= 8),
              "more tokens are prepared by others");

// Padded so that tokens start in different banks.
constexpr int STAGED_STRIDE = STEPS * STEP + (IS_ROW_MAJOR ? 8 : 32);

constexpr bool STAGES_SUMS = NEEDS_SUMS && HAS_NORM && ROW_TILES == 1;
#if HAS_NORM
constexpr int SUMMED = GROUP < STEP ? GROUP : STEP; // columns per offset
struct TokenSums {
    float of[STAGED_TOKENS][STAGES_SUMS ? STEPS * STEP / SUMMED : 1];
};
#endif

// The thread's token of each tile of 8, in global memory or staged in shared memory.
struct Tokens {
    const u16* own[TOKEN_TILES];
#if HAS_NORM
    const TokenSums* sums;
#endif

    __device__ __forceinline__ void load(Four (&values)[TOKEN_TILES], int step, int run) const {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#if HAS_NORM
            const u16* p = own[tile] + step * STEP + run_start(run);
            if constexpr (IS_NARROW) {
                const u32 *q = (const u32*)p, *r = (const u32*)(p + 16);
                values[tile] = Four{{q[0], q[1], r[0], r[1]}};
            } else {
                values[tile] = *(const Four*)p;
            }
#else
            values[tile] = load_columns(own[tile], step, run);
#endif
        }
    }
};

// Multiplies by 2^60, exactly.
__device__ __forceinline__ u32 raised(u32 pair) { return fma_pair(pair, 0x5d805d80u, 0x80008000u); }

#if HAS_NORM
// Sums a token's values over each group, across threads; `values` are 8 columns of one thread.
__device__ __forceinline__ void share_token_sum(TokenSums& shared, const Four& values, int token,
                                                int column) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += low(values.part[i]) + high(values.part[i]);
    const u32 lanes = 0xffffu << (threadIdx.x & 16); // 128 columns: other lanes may be done
#pragma unroll
    for (int distance = SUMMED / 16; distance; distance /= 2)
        sum += __shfl_xor_sync(lanes, sum, distance);
    if (column % SUMMED == 0) shared.of[token][column / SUMMED] = sum;
}

typedef float Squares[WARPS][STAGED_TOKENS];

__device__ __forceinline__ void share_squares(Squares& shared, float own, int token) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2)
        own += __shfl_xor_sync(0xffffffffu, own, distance);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][token] = own;
}

__device__ __forceinline__ float inverse_rms(const Squares& shared, int token, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += shared[warp][token];
    return rsqrtf(sum / COLUMNS + eps);
}

constexpr int STRIDE = 8 * THREADS,
              PASSES = (STEPS * STEP + STRIDE - 1) / STRIDE; // of a block, per token

// The norm's weights. A thread processes the same columns of every token.
struct NormWeights {
    Four part[PASSES][2];

    __device__ __forceinline__ void load(const float* weights) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int column = pass * STRIDE + 8 * threadIdx.x;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                part[pass][i] = column < COLUMNS ? load_again(weights + column + 4 * i) : Four{};
        }
    }

    __device__ __forceinline__ float at(int pass, int i) const {
        return __uint_as_float(part[pass][i / 4].part[i % 4]);
    }
};

// Writes the B operand to shared memory: the normed tokens, for bf16 without the factor 1 / rms.
__device__ __forceinline__ void stage(u16* staged, TokenSums& token_sums, Squares& square_sums,
                                      const u16* x, int num_tokens, int x_stride,
                                      const NormWeights& norm, float eps) {
#if IS_RMS_FIRST
#pragma unroll
    for (int token = 0; token < STAGED_TOKENS; ++token) {
        float squares = 0.0f;
        for (int column = 8 * threadIdx.x; column < COLUMNS; column += STRIDE)
            squares = add_squares(
                squares, load_again(x + (long long)min(token, num_tokens - 1) * x_stride + column));
        share_squares(square_sums, squares, token);
    }
    __syncthreads();
#endif
#pragma unroll
    for (int token = 0; token < STAGED_TOKENS; ++token) {
        const u16* own = x + (long long)min(token, num_tokens - 1) * x_stride;
        float squares = 0.0f, factor = RAISED;
#if IS_RMS_FIRST
        factor *= inverse_rms(square_sums, token, eps);
#endif
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int column = pass * STRIDE + 8 * threadIdx.x;
            if (column >= STEPS * STEP) break;
            Four values = column < COLUMNS ? load_again(own + column) : Four{};
            squares = add_squares(squares, values);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values.part[i] = pack(low(values.part[i]) * factor * norm.at(pass, 2 * i),
                                      high(values.part[i]) * factor * norm.at(pass, 2 * i + 1));
            *(Four*)(staged + token * STAGED_STRIDE + column) = values;
            if constexpr (STAGES_SUMS) share_token_sum(token_sums, values, token, column);
        }
#if !IS_RMS_FIRST
        share_squares(square_sums, squares, token);
#endif
    }
    __syncthreads();
}
#endif

// Multiplies one step of 128 columns. `ahead` holds the first runs of the tokens; on return, those
// of the next step.
__device__ __forceinline__ void multiply_step(Sums& sums, const Step& held, const Tokens& tokens,
                                              Four (&ahead)[AHEAD][TOKEN_TILES], int step,
                                              int next_step) {
    Sums raw;
    float x_sums[TOKEN_TILES][4];
    constexpr u32 ONES = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;
    constexpr int RUNS_TO_APPLY = GROUP >= STEP ? RUNS : GROUP >= 32 ? GROUP / 32 : 1;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        Four token[TOKEN_TILES];
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; ++i) token[i] = ahead[run % AHEAD][i];
        const int later = run + AHEAD;
        tokens.load(ahead[run % AHEAD], later < RUNS ? step : next_step, later % RUNS);
#if !HAS_NORM
        if (ARE_RAISED)
#pragma unroll
            for (int i = 0; i < TOKEN_TILES * 4; ++i)
                token[i / 4].part[i % 4] = raised(token[i / 4].part[i % 4]);
#endif
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (IS_NARROW || (side == 0 && run % RUNS_TO_APPLY == 0)) {
                clear(raw);
#pragma unroll
                for (int i = 0; i < TOKEN_TILES * 4; ++i) (&x_sums[0][0])[i] = 0.0f;
            }
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                u32 a0, a1, a2, a3;
                unpack(held.codes[tile][0], 2 * run + side, a0, a2);
                unpack(held.codes[tile][1], 2 * run + side, a1, a3);
#pragma unroll
                for (int i = 0; i < TOKEN_TILES; ++i)
                    multiply(raw[tile][i], a0, a1, a2, a3, token[i].part[2 * side],
                             token[i].part[2 * side + 1]);
            }
            if constexpr (NEEDS_SUMS && !STAGES_SUMS)
#pragma unroll
                for (int i = 0; i < TOKEN_TILES; ++i)
                    multiply(x_sums[i], ONES, ONES, ONES, ONES, token[i].part[2 * side],
                             token[i].part[2 * side + 1]);
            if (!IS_NARROW && (side == 0 || (run + 1) % RUNS_TO_APPLY != 0)) continue;
            const int group = IS_NARROW ? 2 * run + side : GROUP >= STEP ? 0 : run / RUNS_TO_APPLY;
#if HAS_NORM
            if constexpr (STAGES_SUMS)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int token = min(2 * ((int)threadIdx.x % 4) + odd, STAGED_TOKENS - 1);
                    x_sums[0][odd] = tokens.sums->of[token][step * GROUPS + group];
                }
#endif
            apply_scales<NEEDS_SUMS>(sums, raw, x_sums, held.records, group);
        }
    }
}

__device__ __forceinline__ void load_first(Step (&held)[HELD_STEPS], const RowTiles& rows,
                                           int first) {
#pragma unroll
    for (int i = 0; i < HELD_STEPS; ++i) {
        const int step = first + i * SPLIT;
        rows.load(held[i], STEPS % SPLIT == 0 ? step : min(step, STEPS - 1));
    }
}

// Multiplies the warp's own steps: first, first + SPLIT, ...
__device__ __forceinline__ void multiply_own(Sums& sums, Step (&held)[HELD_STEPS],
                                             const RowTiles& rows, const Tokens& tokens,
                                             int first) {
    Four ahead[AHEAD][TOKEN_TILES];
#pragma unroll
    for (int run = 0; run < AHEAD; ++run) tokens.load(ahead[run], min(first, STEPS - 1), run);
#pragma unroll 1
    for (int start = 0; start < OWN; start += HELD_STEPS) {
#pragma unroll
        for (int i = 0; i < HELD_STEPS; ++i) {
            const int step = first + (start + i) * SPLIT;
            if (OWN % HELD_STEPS != 0 || STEPS % SPLIT != 0)
                if (start + i >= OWN || step >= STEPS) break;
            multiply_step(sums, held[i], tokens, ahead, step, min(step + SPLIT, STEPS - 1));
            const int later = step + HELD_STEPS * SPLIT;
            if (OWN > HELD_STEPS && later < STEPS) rows.load(held[i], later);
        }
    }
}

#if MODE == LINEAR
// Multiplies the unquantized rows, which follow the quantized ones: [num_plain, COLUMNS],
// row-major.
__device__ __forceinline__ void multiply_plain(Sums& sums, const u16* plain, int first_row,
                                               int num_plain, const Tokens& tokens, int first) {
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
#pragma unroll 1
    for (int step = first; step < STEPS; step += SPLIT) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            Four rows[ROW_TILES][2], token[TOKEN_TILES];
            tokens.load(token, step, run);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = min(first_row + 16 * tile + 8 * half + group, num_plain - 1);
                    rows[tile][half] = load_columns(
                        plain + (long long)row * COLUMNS + OWN_COLUMNS * quarter, step, run);
                }
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
                    for (int side = 0; side < 2; ++side)
                        multiply(sums[tile][i], rows[tile][0].part[2 * side],
                                 rows[tile][1].part[2 * side], rows[tile][0].part[2 * side + 1],
                                 rows[tile][1].part[2 * side + 1], token[i].part[2 * side],
                                 token[i].part[2 * side + 1]);
        }
    }
#if HAS_NORM
#pragma unroll
    for (int i = 0; i < ROW_TILES * TOKEN_TILES * 4; ++i) (&sums[0][0][0])[i] /= RAISED;
#endif
}
#endif

// Partial sums of the block's tokens and rows, per split.
typedef float Shared[SPLIT][TOKENS][ROWS + 1];

__device__ __forceinline__ void share_sums(Shared& shared, const Sums& sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4,
              quarter = lane % 4;
    const int first_row = warp / SPLIT * 16 * ROW_TILES;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int token = 0; token < TOKEN_TILES; ++token)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                shared[warp % SPLIT][8 * token + 2 * quarter + i % 2]
                      [first_row + 16 * tile + group + 8 * (i / 2)] = sums[tile][token][i];
}

__device__ __forceinline__ float whole_sum(const Shared& shared, int token, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < SPLIT; ++warp) sum += shared[warp][token][row];
    return sum;
}
