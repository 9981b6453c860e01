// The pipeline of `quantized_gemm.cu` and `quantized_experts.cu`: copies rounds of columns to
// shared memory and multiplies them. Knows no grid, no bias and no experts.
//
// cp.async copies codes, records and tokens to shared memory, in a pipeline of STAGES rounds of
// columns. Codes keep their layout, 16 bytes per thread (`quantized_rows.cu`). The warps of a block
// are a grid of
//
//   ROW_WARPS     each computes ROW_TILES tiles of 16 rows
//   TOKEN_WARPS   each computes TOKEN_TILES tiles of 8 tokens
//   COLUMN_WARPS  split-K in the block: each takes every COLUMN_WARPS-th step of 128 columns, and
//                 their sums are added at the end
//
// The zero point of 4-bit codes is subtracted before the mma, which is exact. The alternative, sums
// of tokens as in `quantized_products.cu`, costs more here because each warp has few rows. Only
// offsets that are not small integers need it.
//
// Compile-time constants, besides those of `quantized_rows.cu`: ROW_WARPS, TOKEN_WARPS,
// COLUMN_WARPS, WARP_STEPS (per warp and round), STAGES, CLUSTER (blocks that split K), BLOCKS (per
// SM), SHARED_BYTES (per block), HAS_EMPTY_TILES (tiles of tokens may be empty, and are skipped).

#include "quantized_rows.cu"

constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS * COLUMN_WARPS;
constexpr int TILES = ROW_TILES * ROW_WARPS, ROWS = 16 * TILES; // per block
constexpr int WARP_TOKENS = 8 * TOKEN_TILES, TOKENS = WARP_TOKENS * TOKEN_WARPS;
constexpr int OWN_STEPS = (STEPS + CLUSTER - 1) / CLUSTER; // per block
constexpr int ROUND_STEPS = COLUMN_WARPS * WARP_STEPS;     // between two barriers
constexpr int ROUNDS = (OWN_STEPS + ROUND_STEPS - 1) / ROUND_STEPS;
constexpr bool HAS_ALL_STEPS = STEPS % CLUSTER == 0 && OWN_STEPS % ROUND_STEPS == 0;

// Layout of a stage in bytes: [tokens | codes [tile, step] | records [tile, step]]. TOKEN_STRIDE is
// padded so that the tokens that a warp reads together start in different banks.
constexpr int STEP_CODES = CHUNKS * 1024, STEP_RECORDS = 16 * RECORD_BYTES;
constexpr int TOKEN_STRIDE = 2 * STEP * ROUND_STEPS + (IS_NARROW ? 32 : IS_ROW_MAJOR ? 16 : 64);
constexpr int CODES_START = TOKENS * TOKEN_STRIDE;
constexpr int RECORDS_START = CODES_START + TILES * ROUND_STEPS * STEP_CODES;
constexpr int STAGE_BYTES = RECORDS_START + TILES * ROUND_STEPS * STEP_RECORDS;
constexpr int SUM_STRIDE = ROWS + 4; // a warp writes to different banks

// One scale per row: it multiplies the complete sums.
constexpr bool ARE_SCALES_LAST = GROUP >= COLUMNS && OFFSET_KIND == NO_OFFSETS;
// A 4-bit zero point is at most 16, so bf16 represents MAGIC + zero and code - zero exactly.
constexpr bool IS_CENTRED =
    BITS == 4 && (OFFSET_KIND == NO_OFFSETS || (OFFSET_KIND == ZEROS && OFFSET_TYPE == UINT8));
constexpr bool ADDS_OFFSETS = NEEDS_SUMS && !IS_CENTRED;
constexpr u32 ONES = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;

static_assert(TOKEN_TILES > 1, "codes of a single tile of tokens are not raised");
static_assert(SHARED_BYTES >= STAGES * STAGE_BYTES &&
                  SHARED_BYTES >= 4 * COLUMN_WARPS * TOKENS * SUM_STRIDE,
              "stages and sums have the memory that a launch gives");
extern __shared__ __align__(16) u8 memory[]; // STAGES stages, later reused for sums

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Copies 16 bytes to shared memory, bypassing L1; writes zeros if `is_there` is false.
__device__ __forceinline__ void copy(u32 target, const void* source, bool is_there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last STAGES - 2 copies are in flight.
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
}

// 16-byte copies of a token, and of all tokens by one thread.
constexpr int TOKEN_PIECES = STEP * ROUND_STEPS / 8;
constexpr int TOKEN_PASSES = (TOKENS * TOKEN_PIECES + THREADS - 1) / THREADS;

__device__ __forceinline__ int copied_token(int pass) {
    return (pass * THREADS + threadIdx.x) / TOKEN_PIECES;
}

// A step of a round; past the last one, any that is there.
__device__ __forceinline__ int step_at(int first_step, int i) {
    return HAS_ALL_STEPS ? first_step + i : min(first_step + i, STEPS - 1);
}

// The operands of a block: its rows of weights and its tokens.
//   RowTile: the place of the block's i-th row tile among all
//   Token: the first column of the block's i-th token; the thread copies it in pass `pass`
template <class RowTile, class Token> struct Operands {
    const u8 *codes, *records;
    RowTile row_tile;
    Token token;
    int num_tokens;

    __device__ __forceinline__ void stage_codes(int stage, int first_step) const {
        const u32 target = shared_address(memory) + stage * STAGE_BYTES;
        constexpr int PIECES = STEP_CODES / 16, COUNT = TILES * ROUND_STEPS * PIECES;
#pragma unroll
        for (int start = 0; start < COUNT; start += THREADS) {
            const int place = start + threadIdx.x;
            if (COUNT % THREADS != 0 && place >= COUNT) break;
            const int piece = place % PIECES, tile = place / PIECES / ROUND_STEPS;
            const int step = step_at(first_step, place / PIECES % ROUND_STEPS);
            int within = step * STEP_CODES + piece * 16;
            if (IS_ROW_MAJOR) // from row-major to the order of a tile
                within = (piece / 32 % 2 * 8 + piece % 32 / 4) * (STEPS * STEP) + step * STEP +
                         piece / 64 * 64 + piece % 4 * 16;
            copy(target + CODES_START + place * 16, codes + row_tile(tile) * TILE_CODES + within);
        }
        if constexpr (!ARE_SCALES_LAST) {
            constexpr int RECORDS = TILES * ROUND_STEPS * RECORD_BYTES; // 16-byte copies
#pragma unroll
            for (int start = 0; start < RECORDS; start += THREADS) {
                const int place = start + threadIdx.x;
                if (RECORDS % THREADS != 0 && place >= RECORDS) break;
                const int piece = place % RECORD_BYTES, tile = place / RECORD_BYTES / ROUND_STEPS;
                const int step = step_at(first_step, place / RECORD_BYTES % ROUND_STEPS);
                copy(target + RECORDS_START + place * 16,
                     records + row_tile(tile) * TILE_RECORDS + step * STEP_RECORDS + piece * 16);
            }
        }
    }

    // Tokens that are not there keep what the memory held: no result of theirs is stored.
    __device__ __forceinline__ void stage_tokens(int stage, int first_step) const {
        const u32 target = shared_address(memory) + stage * STAGE_BYTES;
#pragma unroll
        for (int pass = 0; pass < TOKEN_PASSES; ++pass) {
            const int i = copied_token(pass), piece = (pass * THREADS + threadIdx.x) % TOKEN_PIECES;
            if (i >= num_tokens) break;
            const int column = first_step * STEP + 8 * piece;
            const bool is_there = column < COLUMNS;
            copy(target + i * TOKEN_STRIDE + 16 * piece, token(pass, i) + (is_there ? column : 0),
                 is_there);
        }
    }

    // Codes of the first rounds, which may be read before the previous kernel is complete.
    __device__ __forceinline__ void start_codes(int first_step) const {
#pragma unroll
        for (int round = 0; round < STAGES - 1 && round < ROUNDS; ++round)
            stage_codes(round, first_step + round * ROUND_STEPS);
    }

    // Tokens of the first rounds, which complete their stages.
    __device__ __forceinline__ void start_tokens(int first_step) const {
#pragma unroll
        for (int round = 0; round < STAGES - 1; ++round) {
            if (round < ROUNDS) stage_tokens(round, first_step + round * ROUND_STEPS);
            end_stage();
        }
    }

    // Waits for a round of columns, and starts copies into the stage that the last round used.
    __device__ __forceinline__ const u8* next_stage(int round, int first_step,
                                                    bool has_codes) const {
        wait_for_stage();
        __syncthreads();
        const int later = round + STAGES - 1;
        if (later < ROUNDS) {
            const int step = first_step + later * ROUND_STEPS;
            if (has_codes) stage_codes(later % STAGES, step);
            stage_tokens(later % STAGES, step);
        }
        end_stage(); // commits an empty group too: the wait counts groups
        return memory + round % STAGES * STAGE_BYTES;
    }
};
template <class RowTile, class Token>
Operands(const u8*, const u8*, RowTile, Token, int) -> Operands<RowTile, Token>;

__device__ __forceinline__ void store_four(void* out, long long place, const float (&values)[4]) {
#if IS_OUT_FLOAT
    *(float4*)((float*)out + place) = float4{values[0], values[1], values[2], values[3]};
#else
    *(uint2*)((u16*)out + place) = uint2{pack(values[0], values[1]), pack(values[2], values[3])};
#endif
}

// Loads the tokens of a run. `tokens` points to the thread's own columns of a step.
__device__ __forceinline__ void load_tokens(Four (&values)[TOKEN_TILES], const u8* tokens, int run,
                                            int num_tiles) {
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
        if (HAS_EMPTY_TILES && i >= num_tiles) break;
        const u8* p = tokens + 8 * i * TOKEN_STRIDE + 2 * run_start(run);
        if constexpr (IS_NARROW) {
            const uint2 first = *(const uint2*)p, second = *(const uint2*)(p + 32);
            values[i] = Four{{first.x, first.y, second.x, second.y}};
        } else {
            values[i] = *(const Four*)p;
        }
    }
}

__device__ __forceinline__ Record shared_record(const u8* p) {
    Record record;
    if constexpr (RECORD_BYTES == 2) {
        record.word[0] = *(const u16*)p;
    } else {
#pragma unroll
        for (int i = 0; i < RECORD_WORDS; ++i) record.word[i] = ((const u32*)p)[i];
    }
    return record;
}

// -(MAGIC + zero) as a pair of bf16 or fp16, built from its bits. Added to codes to centre them.
__device__ __forceinline__ u32 negative_zeros(const Record& record, int group) {
    if constexpr (OFFSET_KIND == ZEROS) {
        const int byte = OFFSET_START + group;
        return __byte_perm(record.word[byte / 4], IS_BFLOAT ? 0xc3c3c3c3u : 0xe4e4e4e4u,
                           0x4040 + 0x0101 * (byte % 4));
    }
    return ((IS_BFLOAT ? 0xc300u : 0xe400u) + ZERO) * 0x10001u;
}

// Multiplies one step of the warp's rows, at `codes` and `records` in shared memory, for its first
// `num_tiles` tiles of tokens.
__device__ __forceinline__ void multiply_step(Sums& sums, const u8* codes, const u8* records,
                                              const u8* tokens, int num_tiles) {
    const int lane = threadIdx.x % 32;
    Codes held[ROW_TILES][2];
    Record record[ROW_TILES][2];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                held[tile][half].chunk[chunk] =
                    *(const Four*)(codes + tile * ROUND_STEPS * STEP_CODES +
                                   (chunk * 2 + half) * 512 + lane * 16);
            if constexpr (!ARE_SCALES_LAST)
                record[tile][half] = shared_record(records + tile * ROUND_STEPS * STEP_RECORDS +
                                                   (half * 8 + lane / 4) * RECORD_BYTES);
        }
    Sums of_group;
    Sums& raw = ARE_SCALES_LAST ? sums : of_group;
    float x_sums[TOKEN_TILES][4];
    u32 zeros[ROW_TILES][2];
    constexpr int GROUP_PAIRS = GROUP >= STEP ? 2 * RUNS : GROUP / 16; // mma instructions per group
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        Four token[TOKEN_TILES];
        load_tokens(token, tokens, run, num_tiles);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int i = 2 * run + side, group = i / GROUP_PAIRS;
            if (i % GROUP_PAIRS == 0) {
                if constexpr (IS_CENTRED)
#pragma unroll
                    for (int j = 0; j < ROW_TILES * 2; ++j)
                        zeros[j / 2][j % 2] = negative_zeros(record[j / 2][j % 2], group);
            }
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                u32 a0, a1, a2, a3;
                unpack(held[tile][0], i, a0, a2);
                unpack(held[tile][1], i, a1, a3);
                if constexpr (IS_CENTRED) {
                    a0 = fma_pair(a0, ONES, zeros[tile][0]);
                    a1 = fma_pair(a1, ONES, zeros[tile][1]);
                    a2 = fma_pair(a2, ONES, zeros[tile][0]);
                    a3 = fma_pair(a3, ONES, zeros[tile][1]);
                }
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
                    if (!HAS_EMPTY_TILES || j < num_tiles)
                        multiply(raw[tile][j], a0, a1, a2, a3, token[j].part[2 * side],
                                 token[j].part[2 * side + 1],
                                 !ARE_SCALES_LAST && i % GROUP_PAIRS == 0);
            }
            if constexpr (ADDS_OFFSETS)
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
                    if (!HAS_EMPTY_TILES || j < num_tiles)
                        multiply(x_sums[j], ONES, ONES, ONES, ONES, token[j].part[2 * side],
                                 token[j].part[2 * side + 1], i % GROUP_PAIRS == 0);
            if (ARE_SCALES_LAST || (i + 1) % GROUP_PAIRS != 0) continue;
            apply_scales<ADDS_OFFSETS>(sums, of_group, x_sums, record, group);
        }
    }
}

// The warp's place in the block.
struct Place {
    int row, token, column;
};

__device__ __forceinline__ Place own_place() {
    const int warp = threadIdx.x / 32;
    return {warp / (COLUMN_WARPS * TOKEN_WARPS), warp / COLUMN_WARPS % TOKEN_WARPS,
            warp % COLUMN_WARPS};
}

// The thread's first token of a stage, at its own columns.
__device__ __forceinline__ int token_start(Place own) {
    const int lane = threadIdx.x % 32;
    return (own.token * WARP_TOKENS + lane / 4) * TOKEN_STRIDE + 2 * OWN_COLUMNS * (lane % 4);
}

// Calls `multiply(stage, place of the step in it, step)` for the warp's own steps.
template <class Operands, class Multiply>
__device__ __forceinline__ void for_own_steps(const Operands& operands, int first_step,
                                              int end_step, bool has_codes, Multiply multiply) {
    const int column = own_place().column;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        const u8* stage = operands.next_stage(round, first_step, has_codes);
#pragma unroll
        for (int i = 0; i < WARP_STEPS; ++i) {
            const int place = i * COLUMN_WARPS + column;
            const int step = first_step + round * ROUND_STEPS + place;
            if (HAS_ALL_STEPS || step < end_step) multiply(stage, place, step);
        }
    }
}

// sums += the block's rows times its tokens, over columns whose first stages have been started.
template <class Operands>
__device__ __forceinline__ void multiply_all(Sums& sums, const Operands& operands, int first_step,
                                             int end_step, int num_tiles = TOKEN_TILES) {
    const Place own = own_place();
    Record row_records[ROW_TILES][2];
    if constexpr (ARE_SCALES_LAST)
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; ++i)
            row_records[i / 2][i % 2] = load_record(
                operands.records + operands.row_tile(own.row * ROW_TILES + i / 2) * TILE_RECORDS +
                (i % 2 * 8 + threadIdx.x % 32 / 4) * RECORD_BYTES);
    const int own_token = token_start(own);
    for_own_steps(operands, first_step, end_step, true, [&](const u8* stage, int place, int) {
        const int tile_step = own.row * ROW_TILES * ROUND_STEPS + place;
        multiply_step(sums, stage + CODES_START + tile_step * STEP_CODES,
                      stage + RECORDS_START + tile_step * STEP_RECORDS,
                      stage + own_token + 2 * STEP * place, num_tiles);
    });
    if constexpr (ARE_SCALES_LAST)
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; ++i) {
            const float scale = scale_of(row_records[i / 2][i % 2], 0);
#pragma unroll
            for (int j = 0; j < TOKEN_TILES * 2; ++j)
                sums[i / 2][j / 2][i % 2 * 2 + j % 2] *= scale;
        }
}

// Writes sums to [COLUMN_WARPS, TOKENS, SUM_STRIDE], in the memory of the stages. Returns it.
__device__ __forceinline__ const float* share_sums(const Sums& sums) {
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const Place own = own_place();
    float* shared = (float*)memory;
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = own.token * WARP_TOKENS + 8 * j + 2 * quarter + i % 2;
                const int row = (own.row * ROW_TILES + tile) * 16 + group + 8 * (i / 2);
                shared[(own.column * TOKENS + token) * SUM_STRIDE + row] = sums[tile][j][i];
            }
    return shared;
}
