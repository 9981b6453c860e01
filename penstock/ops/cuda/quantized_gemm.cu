// x [T, K] -> out [T, N] with quantized weight rows, for 17 to 64 tokens. Arithmetic and L2 reads
// are the bottleneck here, not only the bytes of the codes. Knows no norm and no experts.
//
// A block computes many rows for all tokens, so it reads tokens from L2 once for all its rows.
// cp.async copies codes, records and tokens to shared memory, in a pipeline of STAGES rounds of
// columns. Codes keep their layout, 16 bytes per thread (`quantized_rows.cu`). The warps of a block
// are a grid of
//
//   ROW_WARPS     each computes ROW_TILES tiles of 16 rows
//   TOKEN_WARPS   each computes TOKEN_TILES tiles of 8 tokens
//   COLUMN_WARPS  split-K in the block: each takes every COLUMN_WARPS-th step of 128 columns, and
//                 their sums are added at the end
//
// On Hopper, a cluster of CLUSTER blocks with the same rows splits K further; its blocks read each
// other's sums from shared memory. An SM then computes more rows over fewer columns, and reads
// fewer bytes of tokens. The order of additions is fixed.
//
// The zero point of 4-bit codes is subtracted before the mma, which is exact. The alternative, sums
// of tokens as in `quantized_products.cu`, costs more here because each warp has few rows. Only
// offsets that are not small integers need it.
//
// Compile-time constants, besides those of `quantized_rows.cu`: ROW_WARPS, TOKEN_WARPS,
// COLUMN_WARPS, WARP_STEPS (per warp and round), STAGES, CLUSTER, BLOCKS (per SM), SHARED_BYTES
// (per block), HAS_PLAIN, HAS_BIAS, HAS_RESIDUAL.

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
constexpr int SUM_STRIDE = ROWS + 4;       // a warp writes to different banks
constexpr int ADDED_ROWS = ROWS / CLUSTER; // rows that a block adds up, four per thread at once
constexpr int OUTPUTS = (TOKENS * ADDED_ROWS / 4 + THREADS - 1) / THREADS; // per thread

// One scale per row: it multiplies the complete sums.
constexpr bool ARE_SCALES_LAST = GROUP >= COLUMNS && OFFSET_KIND == NO_OFFSETS;
// A 4-bit zero point is at most 16, so bf16 represents MAGIC + zero and code - zero exactly.
constexpr bool IS_CENTRED =
    BITS == 4 && (OFFSET_KIND == NO_OFFSETS || (OFFSET_KIND == ZEROS && OFFSET_TYPE == UINT8));
constexpr bool ADDS_OFFSETS = NEEDS_SUMS && !IS_CENTRED;
constexpr u32 ONES = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;

static_assert(TOKEN_TILES > 1, "codes of a single tile of tokens are not raised");
static_assert(ROWS % (4 * CLUSTER) == 0 && STEPS >= CLUSTER,
              "every block has columns and sums to add");
static_assert(SHARED_BYTES >= STAGES * STAGE_BYTES &&
                  SHARED_BYTES >= 4 * COLUMN_WARPS * TOKENS * SUM_STRIDE,
              "stages and sums have the memory that a launch gives");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
static_assert(CLUSTER == 1, "blocks of older cards do not read each other's shared memory");
#endif

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

__device__ __forceinline__ void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Barrier for all threads of the block, or of the cluster if there is one.
__device__ __forceinline__ void meet() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
#else
    __syncthreads();
#endif
}

// Adds the sums of four rows of a token, from the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void add_sums(float (&sums)[4], const float* p, int rank) {
    float found[4];
#if CLUSTER > 1
    asm volatile("{.reg .u32 own, there;\n"
                 "cvt.u32.u64 own, %4;\n"
                 "mapa.shared::cluster.u32 there, own, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
                 : "=f"(found[0]), "=f"(found[1]), "=f"(found[2]), "=f"(found[3])
                 : "l"(__cvta_generic_to_shared(p)), "r"(rank));
#else
    *(Four*)found = *(const Four*)p;
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += found[i];
}

__device__ __forceinline__ void stage_codes(int stage, const u8* codes, const u8* records,
                                            int first_tile, int num_tiles, int first_step) {
    const u32 target = shared_address(memory) + stage * STAGE_BYTES;
    constexpr int PIECES = STEP_CODES / 16, COUNT = TILES * ROUND_STEPS * PIECES;
#pragma unroll
    for (int start = 0; start < COUNT; start += THREADS) {
        const int place = start + threadIdx.x;
        if (COUNT % THREADS != 0 && place >= COUNT) break;
        const int piece = place % PIECES, tile = place / PIECES / ROUND_STEPS;
        const int step = min(first_step + place / PIECES % ROUND_STEPS, STEPS - 1);
        int within = step * STEP_CODES + piece * 16;
        if (IS_ROW_MAJOR) // from row-major to the order of a tile
            within = (piece / 32 % 2 * 8 + piece % 32 / 4) * (STEPS * STEP) + step * STEP +
                     piece / 64 * 64 + piece % 4 * 16;
        const long long row_tile = min(first_tile + tile, num_tiles - 1);
        copy(target + CODES_START + place * 16, codes + row_tile * TILE_CODES + within);
    }
    if constexpr (!ARE_SCALES_LAST) {
        constexpr int RECORDS = TILES * ROUND_STEPS * RECORD_BYTES; // 16-byte copies
#pragma unroll
        for (int start = 0; start < RECORDS; start += THREADS) {
            const int place = start + threadIdx.x;
            if (RECORDS % THREADS != 0 && place >= RECORDS) break;
            const int piece = place % RECORD_BYTES, tile = place / RECORD_BYTES / ROUND_STEPS;
            const int step = min(first_step + place / RECORD_BYTES % ROUND_STEPS, STEPS - 1);
            const long long row_tile = min(first_tile + tile, num_tiles - 1);
            copy(target + RECORDS_START + place * 16,
                 records + row_tile * TILE_RECORDS + step * STEP_RECORDS + piece * 16);
        }
    }
}

__device__ __forceinline__ void stage_tokens(int stage, const u16* x, int num_tokens, int x_stride,
                                             int first_step) {
    const u32 target = shared_address(memory) + stage * STAGE_BYTES;
    constexpr int PIECES = STEP * ROUND_STEPS / 8, COUNT = TOKENS * PIECES;
#pragma unroll
    for (int start = 0; start < COUNT; start += THREADS) {
        const int place = start + threadIdx.x;
        if (COUNT % THREADS != 0 && place >= COUNT) break;
        const int token = place / PIECES, piece = place % PIECES;
        const int column = first_step * STEP + 8 * piece;
        const bool is_there = token < num_tokens && column < COLUMNS;
        copy(target + token * TOKEN_STRIDE + 16 * piece,
             is_there ? x + (long long)token * x_stride + column : x, is_there);
    }
}

__device__ __forceinline__ void store_four(void* out, long long place, const float (&values)[4]) {
#if IS_OUT_FLOAT
    *(float4*)((float*)out + place) = float4{values[0], values[1], values[2], values[3]};
#else
    *(uint2*)((u16*)out + place) = uint2{pack(values[0], values[1]), pack(values[2], values[3])};
#endif
}

// Loads the tokens of a run. `tokens` points to the thread's own columns of a step.
__device__ __forceinline__ void load_tokens(Four (&values)[TOKEN_TILES], const u8* tokens,
                                            int run) {
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
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

// Multiplies one step of the warp's rows, at `codes` and `records` in shared memory.
__device__ __forceinline__ void multiply_step(Sums& sums, const u8* codes, const u8* records,
                                              const u8* tokens) {
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
        load_tokens(token, tokens, run);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int i = 2 * run + side, group = i / GROUP_PAIRS;
            if (i % GROUP_PAIRS == 0) {
                if constexpr (!ARE_SCALES_LAST) clear(of_group);
                if constexpr (ADDS_OFFSETS)
#pragma unroll
                    for (int j = 0; j < TOKEN_TILES * 4; ++j) (&x_sums[0][0])[j] = 0.0f;
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
                    multiply(raw[tile][j], a0, a1, a2, a3, token[j].part[2 * side],
                             token[j].part[2 * side + 1]);
            }
            if constexpr (ADDS_OFFSETS)
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
                    multiply(x_sums[j], ONES, ONES, ONES, ONES, token[j].part[2 * side],
                             token[j].part[2 * side + 1]);
            if (ARE_SCALES_LAST || (i + 1) % GROUP_PAIRS != 0) continue;
            apply_scales<ADDS_OFFSETS>(sums, of_group, x_sums, record, group);
        }
    }
}

#if HAS_PLAIN
// Unquantized rows are row-major. A block prefetches all of its rows into L2, then loads them into
// registers AHEAD runs before they are multiplied.
constexpr int AHEAD = 2;

struct PlainRows {
    const u16* own[ROW_TILES][2]; // at the thread's own columns
    Four ahead[AHEAD][ROW_TILES][2];

    __device__ __forceinline__ void load(int step, int run) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; ++i)
            ahead[run % AHEAD][i / 2][i % 2] = load_columns(own[i / 2][i % 2], step, run);
    }

    __device__ __forceinline__ void start(const u16* plain, int first_row, int num_plain,
                                          int step) {
        const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; ++i) {
            const int row = min(first_row + 8 * i + group, num_plain - 1);
            own[i / 2][i % 2] = plain + (long long)row * COLUMNS + OWN_COLUMNS * quarter;
        }
#pragma unroll
        for (int run = 0; run < AHEAD; ++run) load(step, run);
    }

    // Prefetches the rows of a block for its steps, a cache line of 64 columns at a time.
    static __device__ __forceinline__ void prefetch(const u16* plain, int first_row, int num_plain,
                                                    int first_step) {
        const int num_rows = min(ROWS, num_plain - first_row);
        for (int i = threadIdx.x; i < num_rows * OWN_STEPS * 2; i += THREADS) {
            const int row = first_row + i / (OWN_STEPS * 2);
            const int column = first_step * STEP + i % (OWN_STEPS * 2) * 64;
            if (column < COLUMNS) prefetch_l2(plain + (long long)row * COLUMNS + column);
        }
    }

    // Multiplies one step, whose first runs are loaded, and loads the first runs of the next.
    __device__ __forceinline__ void multiply_step(Sums& sums, const u8* tokens, int step,
                                                  int next_step) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            Four token[TOKEN_TILES];
            load_tokens(token, tokens, run);
#pragma unroll
            for (int side = 0; side < 2; ++side)
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; ++tile) {
                    const Four &upper = ahead[run % AHEAD][tile][0],
                               &lower = ahead[run % AHEAD][tile][1];
#pragma unroll
                    for (int j = 0; j < TOKEN_TILES; ++j)
                        multiply(sums[tile][j], upper.part[2 * side], lower.part[2 * side],
                                 upper.part[2 * side + 1], lower.part[2 * side + 1],
                                 token[j].part[2 * side], token[j].part[2 * side + 1]);
                }
            const int later = run + AHEAD;
            load(later < RUNS ? step : next_step, later % RUNS);
        }
    }
};
#endif

// Block n computes row block n / CLUSTER over part n % CLUSTER of the columns. Unquantized rows
// come last.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        quantized_gemm(const u16* x, const u8* codes, const u8* records, const u16* plain,
                       const u16* bias, const u16* residual, void* out, int num_tokens,
                       int num_quantized, int num_plain, int out_stride, int x_stride,
                       int residual_stride) {
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4,
              quarter = lane % 4;
    const int column_warp = warp % COLUMN_WARPS, token_warp = warp / COLUMN_WARPS % TOKEN_WARPS,
              row_warp = warp / (COLUMN_WARPS * TOKEN_WARPS);
    const int num_tiles = (num_quantized + 15) / 16;
    const int num_blocks = (num_quantized + ROWS - 1) / ROWS;
    const int rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER;
    const bool is_plain = HAS_PLAIN && block >= num_blocks;
    const int first_row = (is_plain ? block - num_blocks : block) * ROWS; // in its part
    const int first_step = rank * OWN_STEPS, end_step = min(first_step + OWN_STEPS, STEPS);
    Sums sums;
    clear(sums);

    // Weights are loaded before the previous kernel is complete, tokens after it.
    if (!is_plain)
#pragma unroll
        for (int round = 0; round < STAGES - 1 && round < ROUNDS; ++round)
            stage_codes(round, codes, records, first_row / 16, num_tiles,
                        first_step + round * ROUND_STEPS);
    const int first_own = first_row + 16 * ROW_TILES * row_warp;
    Record row_records[ROW_TILES][2];
    if constexpr (ARE_SCALES_LAST) {
        if (!is_plain)
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; ++i) {
                const long long tile = min(first_own / 16 + i / 2, num_tiles - 1);
                row_records[i / 2][i % 2] =
                    load_record(records + tile * TILE_RECORDS + (i % 2 * 8 + group) * RECORD_BYTES);
            }
    }
#if HAS_PLAIN
    PlainRows plain_rows;
    if (is_plain) {
        plain_rows.prefetch(plain, first_row, num_plain, first_step);
        plain_rows.start(plain, first_own, num_plain, min(first_step + column_warp, STEPS - 1));
    }
#endif
    wait_for_previous();
#pragma unroll
    for (int round = 0; round < STAGES - 1; ++round) {
        if (round < ROUNDS)
            stage_tokens(round, x, num_tokens, x_stride, first_step + round * ROUND_STEPS);
        end_stage();
    }

    // Waits for a round of columns, and starts copies into the stage that the last round used.
    const auto next_stage = [&](int round) {
        wait_for_stage();
        __syncthreads();
        const int later = round + STAGES - 1;
        if (later < ROUNDS) {
            const int step = first_step + later * ROUND_STEPS;
            if (!is_plain)
                stage_codes(later % STAGES, codes, records, first_row / 16, num_tiles, step);
            stage_tokens(later % STAGES, x, num_tokens, x_stride, step);
        }
        end_stage(); // commits an empty group too: the wait counts groups
        return memory + round % STAGES * STAGE_BYTES;
    };
    const int own_token =
        (token_warp * WARP_TOKENS + group) * TOKEN_STRIDE + 2 * OWN_COLUMNS * quarter;
#if HAS_PLAIN
    if (is_plain) {
#pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            const u8* stage = next_stage(round);
#pragma unroll 1
            for (int i = 0; i < WARP_STEPS; ++i) {
                const int place = i * COLUMN_WARPS + column_warp;
                const int step = first_step + round * ROUND_STEPS + place;
                if (HAS_ALL_STEPS || step < end_step)
                    plain_rows.multiply_step(sums, stage + own_token + 2 * STEP * place, step,
                                             min(step + COLUMN_WARPS, STEPS - 1));
            }
        }
    } else
#endif
    {
#pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            const u8* stage = next_stage(round);
#pragma unroll
            for (int i = 0; i < WARP_STEPS; ++i) {
                const int place = i * COLUMN_WARPS + column_warp;
                const int step = first_step + round * ROUND_STEPS + place;
                const int tile_step = row_warp * ROW_TILES * ROUND_STEPS + place;
                if (HAS_ALL_STEPS || step < end_step)
                    multiply_step(sums, stage + CODES_START + tile_step * STEP_CODES,
                                  stage + RECORDS_START + tile_step * STEP_RECORDS,
                                  stage + own_token + 2 * STEP * place);
            }
        }
        if constexpr (ARE_SCALES_LAST)
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; ++i) {
                const float scale = scale_of(row_records[i / 2][i % 2], 0);
#pragma unroll
                for (int j = 0; j < TOKEN_TILES * 2; ++j)
                    sums[i / 2][j / 2][i % 2 * 2 + j % 2] *= scale;
            }
    }

    // [COLUMN_WARPS, TOKENS, SUM_STRIDE], in the memory of the stages.
    float* shared = (float*)memory;
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = token_warp * WARP_TOKENS + 8 * j + 2 * quarter + i % 2;
                const int row = (row_warp * ROW_TILES + tile) * 16 + group + 8 * (i / 2);
                shared[(column_warp * TOKENS + token) * SUM_STRIDE + row] = sums[tile][j][i];
            }
    meet();
    // Each block of a cluster adds up some of the rows. All remote loads are issued before the
    // first output is written, because their latency is high.
    const int num_rows = is_plain ? num_plain : num_quantized;
    const int first_output = is_plain ? num_quantized + first_row : first_row;
    float found[OUTPUTS][4] = {};
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int place = threadIdx.x + i * THREADS;
        const int row = rank * ADDED_ROWS + place % (ADDED_ROWS / 4) * 4;
        const int token = place / (ADDED_ROWS / 4);
        const float* own = shared + min(token, TOKENS - 1) * SUM_STRIDE + row;
#pragma unroll
        for (int part = 0; part < CLUSTER * COLUMN_WARPS; ++part)
            add_sums(found[i], own + part % COLUMN_WARPS * TOKENS * SUM_STRIDE,
                     part / COLUMN_WARPS);
#if HAS_BIAS || HAS_RESIDUAL
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (token < num_tokens && first_row + row + j < num_rows) {
                const int output = first_output + row + j;
#if HAS_BIAS
                found[i][j] += low(bias[output]);
#endif
#if HAS_RESIDUAL
                found[i][j] += low(residual[(long long)token * residual_stride + output]);
#endif
            }
#endif
    }
    const bool is_aligned = (unsigned long long)out % (IS_OUT_FLOAT ? 16 : 8) == 0 &&
                            out_stride % 4 == 0 && first_output % 4 == 0;
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int place = threadIdx.x + i * THREADS;
        const int row = rank * ADDED_ROWS + place % (ADDED_ROWS / 4) * 4;
        const int token = place / (ADDED_ROWS / 4), left = num_rows - first_row - row;
        const long long target = (long long)token * out_stride + first_output + row;
        if (token >= num_tokens) break;
        if (is_aligned && left >= 4)
            store_four(out, target, found[i]);
        else
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (j < left) store(out, target + j, found[i][j]);
    }
#if CLUSTER > 1
    meet(); // a block may not exit before the others have read its memory
#endif
}
