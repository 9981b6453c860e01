// Products with quantised rows, for a few tokens: the codes' bytes set the pace.
//
// A warp takes 16 rows x 128 columns at a time, a step. Codes lie in memory as its threads read
// them (`ops/tiles.py`): 16 bytes of a thread hold what its part of the tensor cores' operand
// needs, of row lane / 4 and of the row 8 below it. They become pairs of bf16 or fp16 by bit
// operations, exactly, and scales multiply the sums of a group of columns, not its weights.
//
//   a run, two instructions:  columns 0..31, then 32..63, ...
//   of it, threads 0 to 3:    columns 0..7, 8..15, 16..23, 24..31
//
// With groups of 16 columns a thread takes 4 of each 16, so that no instruction spans two groups.
// E4M3 codes may lie row by row (IS_ROW_MAJOR), if no group is smaller than 64 columns: of each 64
// a thread takes 16.
//
// What is added to a group's codes (a zero point, an offset, what 4 bits are made a number with)
// multiplies the sum of its tokens' values, which an instruction with a left side of ones gives.
//
// A norm or an activation before the product is done once by a block, in shared memory (IS_STAGED),
// and a norm's 1 / rms multiplies the sums at the end: bf16 has float32's range, so nothing is
// lost. fp16 may overflow there, so with it 1 / rms comes first, which reads the tokens once more.
//
// A record holds the scales of one row in one step: coarse ones, then those of its groups, then
// zeros or offsets, in the types of the file. Products are exact up to float32's rounding of sums.
//
// Given when it is compiled: MODE, COLUMNS, WARPS, ROW_WARPS (with rows of their own), ROW_TILES
// (of 16), TOKEN_TILES (of 8), HELD (steps on their way), BLOCKS (on a multiprocessor),
// STAGED_TOKENS, BITS, IS_FLOAT8, IS_ROW_MAJOR, ZERO, GROUP, RECORD_BYTES, SCALE_TYPE,
// COARSE_TYPE, OFFSET_TYPE, OFFSET_COARSE_TYPE, OFFSET_KIND, HAS_NORM, IS_SWIGLU, HAS_BIAS,
// HAS_RESIDUAL, IS_BFLOAT, IS_OUT_FLOAT, and of experts NUM_EXPERTS, SLOTS (of a token, the shared
// expert's included), HAS_SHARED, IS_LISTED.

typedef unsigned char u8;

#define LINEAR 0     // x [T, K] -> out [T, N]
#define GATE_UP 1    // of an expert's pairs: silu(gate) * up
#define DOWN_PAIRS 2 // of an expert's pairs, an output each
#define DOWN_TOKEN 3 // of all experts of one token, by their weights, and the residual
#define EXPAND 4     // the rows themselves, or those of some ids

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define UINT8 3
#define INT8 4
#define NONE 5

#define NO_OFFSETS 0
#define ZEROS 1
#define OFFSETS 2

constexpr int STEP = 128, RUNS = 4, CHUNKS = BITS / 4;
constexpr int STEPS = (COLUMNS + STEP - 1) / STEP;
constexpr int GROUPS = GROUP < STEP ? STEP / GROUP : 1; // with scales of their own, in a step
constexpr int TILE_CODES = STEPS * CHUNKS * 1024, TILE_RECORDS = STEPS * 16 * RECORD_BYTES; // bytes
constexpr int RECORD_WORDS = (RECORD_BYTES + 3) / 4;
constexpr bool IS_NARROW = GROUP == 16; // a thread takes 4 columns at a time
constexpr bool IS_WHOLE = COLUMNS % STEP == 0;
// What 4-bit codes are added to by an exponent.
constexpr int MAGIC = BITS != 4 ? 0 : IS_BFLOAT ? 128 : 1024;
constexpr bool NEEDS_SUMS = OFFSET_KIND != 0 || BITS == 4;
constexpr bool ARE_RAISED = IS_FLOAT8 && IS_BFLOAT && TOKEN_TILES == 1; // tokens; else codes are
constexpr float RAISED = ARE_RAISED ? 0x1p60f : 1.0f;
constexpr float SCALED = ARE_RAISED ? 0x1p60f : IS_FLOAT8 && !IS_BFLOAT ? 256.0f : 1.0f;
static_assert(GROUP % 16 == 0 && (STEP % GROUP == 0 || GROUP % STEP == 0),
              "groups are parts of steps");

__device__ __forceinline__ u32 load_word(const void* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Past the first-level cache: what other multiprocessors wrote.
__device__ __forceinline__ u32 load_fresh(const void* p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 load_half(const void* p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ float from_float16(u32 pair) {
    float f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(pair));
    return f;
}

__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
#if IS_BFLOAT
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
    return d;
}

// byte - zero: as an addition, which is quicker than a conversion.
__device__ __forceinline__ float from_byte(u32 word, int place, int zero) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + place)) - (8388608.0f + zero);
}

// The codes of a row in one step, and the two pairs that instruction i (0..7) of it takes.
struct Codes {
    Four chunk[CHUNKS];
};

#if BITS == 4
__device__ __forceinline__ u32 four_bit_pair(u32 word) {
    u32 pair; // (word & mask) | exponent, which the compiler would do in two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(pair)
        : "r"(word), "n"(0x000f000f), "n"(IS_BFLOAT ? 0x43004300 : 0x64006400));
    return pair;
}
#elif IS_FLOAT8
// The byte's exponent and mantissa, where bf16 or fp16 have theirs: too small by a power of two,
// 2^120 or 2^8. Half of the first multiplies tokens, the rest the scales, so that no sum leaves
// float32's range; of many tokens, all of it the codes.
__device__ __forceinline__ u32 float8_pair(u32 word) { // the upper bytes of both halves
    constexpr int SHIFT = IS_BFLOAT ? 4 : 1;
    constexpr u32 kept = (0x7f00u >> SHIFT) * 0x10001u;
    const u32 pair = (word >> SHIFT & kept) | (word & 0x80008000u);
    return IS_BFLOAT && !ARE_RAISED ? fma_pair(pair, 0x7b807b80u, 0x80008000u) : pair;
}
#else
__device__ __forceinline__ float byte_value(u32 word, int place) {
    return from_byte(word, place, NEEDS_SUMS ? 0 : ZERO);
}
#endif

__device__ __forceinline__ void unpack(const Codes& codes, int i, u32& first, u32& second) {
#if BITS == 4
    const u32 word = codes.chunk[0].part[i / 2] >> 8 * (i % 2);
    first = four_bit_pair(word);
    second = four_bit_pair(word >> 4);
#else
    const u32 word = codes.chunk[i / 4].part[i % 4];
#if IS_FLOAT8
    first = float8_pair(IS_ROW_MAJOR ? __byte_perm(word, 0, 0x1100) : word);
    second = float8_pair(IS_ROW_MAJOR ? __byte_perm(word, 0, 0x3322) : word << 8);
#else
    first = pack(byte_value(word, 0), byte_value(word, 1));
    second = pack(byte_value(word, 2), byte_value(word, 3));
#endif
#endif
}

struct Record {
    u32 word[RECORD_WORDS];
};

__device__ __forceinline__ Record load_record(const u8* p) {
    Record record;
    if constexpr (RECORD_BYTES == 2) {
        record.word[0] = load_half(p);
    } else {
#pragma unroll
        for (int i = 0; i < RECORD_WORDS; ++i) record.word[i] = load_word(p + 4 * i);
    }
    return record;
}

__device__ constexpr int bytes_of(int type) {
    return type == FLOAT32 ? 4 : type == BFLOAT16 || type == FLOAT16 ? 2 : type == NONE ? 0 : 1;
}

template <int TYPE> __device__ __forceinline__ float field(const Record& record, int byte) {
    const u32 word = record.word[byte / 4] >> 8 * (byte % 4);
    if constexpr (TYPE == FLOAT32) return __uint_as_float(word);
    if constexpr (TYPE == BFLOAT16) return __uint_as_float(word << 16);
    if constexpr (TYPE == FLOAT16) return from_float16(word);
    if constexpr (TYPE == UINT8) return from_byte(record.word[byte / 4], byte % 4, 0);
    if constexpr (TYPE == INT8)
        return from_byte(record.word[byte / 4] ^ 0x80808080u, byte % 4, 128);
    return 0.0f;
}

constexpr int COARSE_END = bytes_of(COARSE_TYPE),
              FINE_START = COARSE_END + bytes_of(OFFSET_COARSE_TYPE);
constexpr int OFFSET_START = FINE_START + GROUPS * bytes_of(SCALE_TYPE);

__device__ __forceinline__ float scale_of(const Record& record, int group) {
    float scale = field<SCALE_TYPE>(record, FINE_START + group * bytes_of(SCALE_TYPE));
    if constexpr (COARSE_TYPE != NONE) scale *= field<COARSE_TYPE>(record, 0);
    return scale * SCALED;
}

// What is added to `scale * code`, for codes as `unpack` gives them.
__device__ __forceinline__ float offset_of(const Record& record, int group, float scale) {
    if constexpr (OFFSET_KIND == NO_OFFSETS) return -(MAGIC + ZERO) * scale;
    float raw = field<OFFSET_TYPE>(record, OFFSET_START + group * bytes_of(OFFSET_TYPE));
    if constexpr (OFFSET_KIND == ZEROS) return -(MAGIC + raw) * scale;
    if constexpr (OFFSET_COARSE_TYPE != NONE) raw *= field<OFFSET_COARSE_TYPE>(record, COARSE_END);
    return fmaf(-(MAGIC + ZERO), scale, raw);
}

// One step of a thread's rows, on its way.
struct Step {
    Codes codes[ROW_TILES][2];
    Record records[ROW_TILES][2];
};

struct RowTiles {
    const u8* codes[ROW_TILES]; // the thread's own
    const u8* records[ROW_TILES];

    __device__ __forceinline__ void point(int tile, const u8* all_codes, const u8* all_records,
                                          long long row_tile) {
        const int lane = threadIdx.x % 32;
        codes[tile] = all_codes + row_tile * TILE_CODES +
                      (IS_ROW_MAJOR ? lane / 4 * (STEPS * STEP) + lane % 4 * 16 : lane * 16);
        records[tile] = all_records + row_tile * TILE_RECORDS + lane / 4 * RECORD_BYTES;
    }

    static __device__ __forceinline__ int place_of(int index, int chunk, int half) {
        return IS_ROW_MAJOR ? half * 8 * STEPS * STEP + index * STEP + chunk * 64
                            : ((index * CHUNKS + chunk) * 2 + half) * 512;
    }

    __device__ __forceinline__ void load(Step& step, int index) const {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    step.codes[tile][half].chunk[chunk] =
                        load_once(codes[tile] + place_of(index, chunk, half));
                step.records[tile][half] =
                    load_record(records[tile] + (index * 16 + half * 8) * RECORD_BYTES);
            }
    }
};

#if MODE == EXPAND
// out [n, COLUMNS]: block (n, s) writes 16 rows, or one of some ids, in step s.
extern "C" __global__ void __launch_bounds__(32)
    quantized(const u8* codes, const u8* records, const long long* ids, u16* out, int num_rows) {
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x, group = lane / 4, quarter = lane % 4, step = blockIdx.y;
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
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = IS_NARROW      ? 16 * i + 4 * quarter
                               : IS_ROW_MAJOR ? i / 4 * 64 + 16 * quarter + i % 4 * 4
                                              : i / 2 * 32 + 8 * quarter + i % 2 * 4;
            const int own_group = GROUP < STEP ? column / GROUP : 0;
            const Record& record = held.records[0][half];
            const float scale = scale_of(record, own_group);
            const float offset = NEEDS_SUMS ? offset_of(record, own_group, scale) : 0.0f;
            u32 first, second;
            unpack(held.codes[0][half], i, first, second);
            if (step * STEP + column >= COLUMNS) continue;
            u32* target = (u32*)(out + row * COLUMNS + step * STEP + column);
            target[0] = pack(fmaf(low(first) * RAISED, scale, offset),
                             fmaf(high(first) * RAISED, scale, offset));
            target[1] = pack(fmaf(low(second) * RAISED, scale, offset),
                             fmaf(high(second) * RAISED, scale, offset));
        }
    }
}
#else

constexpr int TOKENS = 8 * TOKEN_TILES, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS;                  // of a block
constexpr int SPLIT = MODE == DOWN_TOKEN ? 1 : WARPS / ROW_WARPS; // warps that share the columns
static_assert(MODE == LINEAR || ROW_WARPS == 1, "only there are tokens so many");
constexpr int OWN = (STEPS + SPLIT - 1) / SPLIT; // steps of one warp
constexpr int HELD_STEPS = HELD < OWN ? HELD : OWN;
constexpr int AHEAD = TOKEN_TILES == 1 ? 4 : 1; // runs of the tokens that are on their way

#define IS_STAGED (HAS_NORM || IS_SWIGLU)
#define IS_RMS_FIRST (HAS_NORM && !IS_BFLOAT)
static_assert(!IS_STAGED || (TOKEN_TILES == 1 && STAGED_TOKENS <= 8),
              "more tokens are prepared by others");

constexpr int OWN_COLUMNS = IS_NARROW      ? 4
                            : IS_ROW_MAJOR ? 16
                                           : 8; // of a thread, one after the other

// The first column of a run.
__device__ constexpr int run_start(int run) {
    return IS_ROW_MAJOR ? run / 2 * 64 + run % 2 * 8 : run * 32;
}

// The thread's columns of a run: 8, or twice 4 of each 16. `p` is at its first ones.
__device__ __forceinline__ Four load_columns(const u16* p, int step, int run) {
    const int column = step * STEP + run_start(run), own = OWN_COLUMNS * (threadIdx.x % 4);
    Four v = {};
    if constexpr (IS_NARROW) {
        if (IS_WHOLE || column + own < COLUMNS)
            v.part[0] = load_word(p + column), v.part[1] = load_word(p + column + 2);
        if (IS_WHOLE || column + 16 + own < COLUMNS)
            v.part[2] = load_word(p + column + 16), v.part[3] = load_word(p + column + 18);
    } else {
        if (IS_WHOLE || column + own < COLUMNS) v = load_again(p + column);
    }
    return v;
}

// Tokens start in different banks.
constexpr int STAGED_STRIDE = STEPS * STEP + (IS_ROW_MAJOR ? 8 : 32);

// The thread's own token of each tile of 8: in memory, or staged.
struct Tokens {
    const u16* own[TOKEN_TILES];

    __device__ __forceinline__ void load(Four (&values)[TOKEN_TILES], int step, int run) const {
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#if IS_STAGED
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

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// An exact product with a power of two.
__device__ __forceinline__ u32 raised(u32 pair) { return fma_pair(pair, 0x5d805d80u, 0x80008000u); }

#if IS_STAGED
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
              PASSES = (STEPS * STEP + STRIDE - 1) / STRIDE; // of a block, by tokens

// Its norm's weights, of which a thread has the same columns of every token.
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

// Writes what the product multiplies: the tokens normed (but for 1 / rms), or activated.
__device__ __forceinline__ void stage(u16* staged, Squares& square_sums, const u16* x,
                                      int num_tokens, int x_stride, const NormWeights& norm,
                                      float eps) {
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
#if HAS_NORM
            squares = add_squares(squares, values);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values.part[i] = pack(low(values.part[i]) * factor * norm.at(pass, 2 * i),
                                      high(values.part[i]) * factor * norm.at(pass, 2 * i + 1));
#else
            const Four up = column < COLUMNS ? load_again(own + COLUMNS + column) : Four{};
#pragma unroll
            for (int i = 0; i < 4; ++i) // rounded first, as an activation in memory would be
                values.part[i] = pack(silu(low(values.part[i])) * low(up.part[i]),
                                      silu(high(values.part[i])) * high(up.part[i]));
            if (RAISED != 1.0f)
#pragma unroll
                for (int i = 0; i < 4; ++i) values.part[i] = raised(values.part[i]);
#endif
            *(Four*)(staged + token * STAGED_STRIDE + column) = values;
        }
#if HAS_NORM && !IS_RMS_FIRST
        share_squares(square_sums, squares, token);
#endif
    }
    __syncthreads();
}
#endif

typedef float Sums[ROW_TILES][TOKEN_TILES][4];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * TOKEN_TILES * 4; ++i) (&sums[0][0][0])[i] = 0.0f;
}

// sums += scale * raw + offset * x_sums, for one group of columns.
__device__ __forceinline__ void apply_scales(Sums& sums, const Sums& raw,
                                             const float (&x_sums)[TOKEN_TILES][4],
                                             const Step& step, int group) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = scale_of(step.records[tile][half], group);
            float offset = 0.0f;
            if constexpr (NEEDS_SUMS) offset = offset_of(step.records[tile][half], group, scale);
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    float& sum = sums[tile][i][2 * half + odd];
                    sum = fmaf(scale, raw[tile][i][2 * half + odd], sum);
                    if constexpr (NEEDS_SUMS) sum = fmaf(offset, x_sums[i][odd], sum);
                }
        }
}

// One step of 128 columns; `ahead` holds the tokens' first runs and is filled with those of the
// next step.
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
#if !IS_STAGED
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
            if constexpr (NEEDS_SUMS)
#pragma unroll
                for (int i = 0; i < TOKEN_TILES; ++i)
                    multiply(x_sums[i], ONES, ONES, ONES, ONES, token[i].part[2 * side],
                             token[i].part[2 * side + 1]);
            if (IS_NARROW)
                apply_scales(sums, raw, x_sums, held, 2 * run + side);
            else if (side == 1 && (run + 1) % RUNS_TO_APPLY == 0)
                apply_scales(sums, raw, x_sums, held, GROUP >= STEP ? 0 : run / RUNS_TO_APPLY);
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

// The product with the warp's own steps: first, first + SPLIT, ...
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
// Rows that are not quantised, after those that are: [num_plain, COLUMNS], as in memory as on
// paper.
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
#if IS_STAGED
#pragma unroll
    for (int i = 0; i < ROW_TILES * TOKEN_TILES * 4; ++i) (&sums[0][0][0])[i] /= RAISED;
#endif
}
#endif

// Of the block's tokens and rows, what each warp found.
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

__device__ __forceinline__ void store(void* out, long long place, float value) {
#if IS_OUT_FLOAT
    ((float*)out)[place] = value;
#else
    ((u16*)out)[place] = (u16)pack(value, 0.0f);
#endif
}

#if MODE == LINEAR
constexpr int OUTPUTS = (ROWS * TOKENS + THREADS - 1) / THREADS, MAX_EARLY = 4; // of one thread

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
    const int first_row = (is_plain ? blockIdx.x - num_blocks : blockIdx.x) * ROWS; // of its kind
    RowTiles rows;
    Step held[HELD_STEPS];
    if (!is_plain) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
            rows.point(tile, codes, records,
                       min(first_row / 16 + row_warp * ROW_TILES + tile, num_tiles - 1));
        load_first(held, rows, column_warp);
    }
#if IS_STAGED
    __shared__ __align__(16) u16 staged[STAGED_TOKENS * STAGED_STRIDE];
    __shared__ Squares square_sums;
    NormWeights norm;
#if HAS_NORM
    norm.load(norm_weight);
#endif
#endif
    wait_for_previous();
    Tokens tokens;
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        const int token = min(8 * tile + group, num_tokens - 1);
#if IS_STAGED
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
    float added[OUTPUTS]; // asked for early, if they are few: at the end every thread would wait
                          // for them
    if constexpr (OUTPUTS <= MAX_EARLY)
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i)
            added[i] =
                added_to((threadIdx.x + i * THREADS) % ROWS, (threadIdx.x + i * THREADS) / ROWS);
#if IS_STAGED
    stage(staged, square_sums, x, num_tokens, x_stride, norm, eps);
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
        const int place = threadIdx.x + i * THREADS, row = place % ROWS, token = place / ROWS;
        if (token >= num_tokens || first_row + row >= num_rows) continue;
        float sum = whole_sum(shared, token, row);
#if HAS_NORM && !IS_RMS_FIRST
        sum *= inverse_rms(square_sums, token, eps);
#endif
        sum += OUTPUTS <= MAX_EARLY ? added[i] : added_to(row, token);
        store(out, (long long)token * out_stride + first_output + row, sum);
    }
}

#elif MODE == DOWN_TOKEN
// Block (n, t): ROWS outputs of token t. A warp takes one of the token's experts. Which ones is
// known before the wait: the kernel before, GATE_UP, lets this one start after its own.
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
// Block (n, i): of the i-th pair, or tile of pairs, of one expert.
//   GATE_UP: 16 columns of the inner width; row tile 0 is the gate's, 1 the up's
//   DOWN_PAIRS: ROWS outputs
// Pairs that are not listed: the shared expert's, one a token, then slot j of token t at t * routed
// + j. The list is older than GATE_UP, so DOWN_PAIRS, which follows it, reads it before its wait.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantized(const u16* x, const int* ids, const int* order, const int* tiles, const u8* codes,
              const u8* records, const u8* shared_codes, const u8* shared_records, void* out,
              int num_tokens, int num_tiles) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4,
              quarter = lane % 4;
    constexpr int ROUTED = SLOTS - HAS_SHARED;
    if (MODE != GATE_UP) let_next_start();
    const bool knows_rows =
        MODE != GATE_UP || (HAS_SHARED && !IS_LISTED && (int)blockIdx.y < num_tokens);
    if (!knows_rows) wait_for_previous();
    int expert, num_pairs = 1, first_row = 0, pair = 0; // a row of what lies between the products
    const int* own_order = order;
    if (IS_LISTED) {
        const int* tile = tiles + 4 * blockIdx.y;
        expert = load_fresh(tile), own_order += load_fresh(tile + 1);
        first_row = load_fresh(tile + 2), num_pairs = load_fresh(tile + 3);
        if (num_pairs == 0) {
            if (knows_rows) wait_for_previous();
            return;
        }
        if (MODE == GATE_UP) pair = own_order[min(group, num_pairs - 1)];
    } else {
        const int num_shared = HAS_SHARED ? num_tokens : 0;
        const bool is_shared = (int)blockIdx.y < num_shared;
        const int routed = blockIdx.y - num_shared;
        expert = is_shared ? NUM_EXPERTS : ids[routed];
        pair = is_shared ? blockIdx.y * SLOTS + ROUTED : routed / ROUTED * SLOTS + routed % ROUTED;
        first_row = pair;
    }
    const bool is_shared = HAS_SHARED && expert == NUM_EXPERTS;
    const u8* own_codes =
        is_shared ? shared_codes : codes + (long long)expert * num_tiles * TILE_CODES;
    const u8* own_records =
        is_shared ? shared_records : records + (long long)expert * num_tiles * TILE_RECORDS;
    RowTiles rows;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        const int row_tile = MODE == GATE_UP
                                 ? blockIdx.x + tile * (num_tiles / 2)
                                 : min((int)blockIdx.x * ROW_TILES + tile, num_tiles - 1);
        rows.point(tile, own_codes, own_records, row_tile);
    }
    Step held[HELD_STEPS];
    load_first(held, rows, warp);
    if (knows_rows) wait_for_previous();
    if (MODE == GATE_UP) let_next_start(); // what it reads before its own wait is complete now
    Tokens tokens;
    const long long source = MODE == GATE_UP ? pair / SLOTS : first_row + min(group, num_pairs - 1);
    tokens.own[0] = (const u16*)x + source * COLUMNS + OWN_COLUMNS * quarter;
    Sums sums;
    clear(sums);
    if (warp < STEPS) multiply_own(sums, held, rows, tokens, warp);
    __shared__ Shared shared;
    share_sums(shared, sums);
    __syncthreads();
#if MODE == GATE_UP
    const int width = num_tiles * 8;
    for (int i = threadIdx.x; i < 16 * num_pairs; i += THREADS) {
        const int row = i % 16, token = i / 16;
        const float value =
            silu(whole_sum(shared, token, row)) * whole_sum(shared, token, 16 + row);
        ((u16*)out)[(long long)(first_row + token) * width + blockIdx.x * 16 + row] =
            (u16)pack(value, 0.0f);
    }
#else
    const int width = num_tiles * 16;
    for (int i = threadIdx.x; i < ROWS * num_pairs; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS, place = blockIdx.x * ROWS + row;
        if (place >= width) continue;
        const int target = IS_LISTED ? own_order[token] : first_row;
        store(out, (long long)target * width + place, whole_sum(shared, token, row));
    }
#endif
}
#endif
#endif
