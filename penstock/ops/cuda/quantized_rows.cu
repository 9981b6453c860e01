// Loads and unpacks quantized weight rows, for `quantized.cu` and `quantized_gemm.cu`. Bit
// operations turn codes into pairs of bf16 or fp16, exactly. Multiplies nothing.
//
// Codes are stored in the order in which the threads of a warp load them (`ops/tiles.py`). The 16
// bytes of a thread are its part of the A fragment, for row lane / 4 and the row 8 below it.
//
//   a run is two mma instructions:  columns 0..31, then 32..63, ...
//   threads 0 to 3 hold of a run:   columns 0..7, 8..15, 16..23, 24..31
//
// With a group size of 16, a thread holds 4 columns of each 16, so that no instruction spans two
// groups. E4M3 codes may be row-major (IS_ROW_MAJOR) if the group size is at least 64; a thread
// then holds 16 columns of each 64.
//
// A record holds the scales of one row for one step of 128 columns: coarse scales, then the scales
// of its groups, then zero points or offsets, in the dtypes of the file.
//
// Compile-time constants: COLUMNS (K), ROW_TILES (of 16 rows), TOKEN_TILES (of 8 tokens), BITS,
// IS_FLOAT8, IS_ROW_MAJOR, ZERO, GROUP, RECORD_BYTES, SCALE_TYPE, COARSE_TYPE, OFFSET_TYPE,
// OFFSET_COARSE_TYPE, OFFSET_KIND, IS_BFLOAT, IS_OUT_FLOAT. UP_TILES, if not 0: row tiles of gate,
// followed by as many of up.

#include "tensor_cores.cu"

#ifndef UP_TILES
#define UP_TILES 0
#endif

typedef unsigned char u8;

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
constexpr int GROUPS = GROUP < STEP ? STEP / GROUP : 1; // per step, each with its own scale
constexpr int TILE_CODES = STEPS * CHUNKS * 1024, TILE_RECORDS = STEPS * 16 * RECORD_BYTES; // bytes
constexpr int RECORD_WORDS = (RECORD_BYTES + 3) / 4;
constexpr bool IS_NARROW = GROUP == 16; // a thread holds 4 adjacent columns
constexpr bool IS_WHOLE = COLUMNS % STEP == 0;
// A 4-bit code in the mantissa below a fixed exponent is the number MAGIC + code.
constexpr int MAGIC = BITS != 4 ? 0 : IS_BFLOAT ? 128 : 1024;
constexpr bool NEEDS_SUMS = OFFSET_KIND != 0 || BITS == 4;
constexpr bool ARE_RAISED = IS_FLOAT8 && IS_BFLOAT && TOKEN_TILES == 1; // tokens; if not, codes
constexpr float RAISED = ARE_RAISED ? 0x1p60f : 1.0f;
constexpr float SCALED = ARE_RAISED ? 0x1p60f : IS_FLOAT8 && !IS_BFLOAT ? 256.0f : 1.0f;
static_assert(GROUP % 16 == 0 && (STEP % GROUP == 0 || GROUP % STEP == 0),
              "groups are parts of steps");

__device__ __forceinline__ u32 load_word(const void* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Bypasses L1, to read what other SMs wrote.
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

// byte - zero, by an addition: faster than a conversion.
__device__ __forceinline__ float from_byte(u32 word, int place, int zero) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + place)) - (8388608.0f + zero);
}

// The thread's codes of one row in one step. `unpack` gives the two pairs of mma i (0..7).
struct Codes {
    Four chunk[CHUNKS];
};

#if BITS == 4
__device__ __forceinline__ u32 four_bit_pair(u32 word) {
    u32 pair; // (word & mask) | exponent; the compiler would use two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(pair)
        : "r"(word), "n"(0x000f000f), "n"(IS_BFLOAT ? 0x43004300 : 0x64006400));
    return pair;
}
#elif IS_FLOAT8
// Moves exponent and mantissa of E4M3 to where bf16 or fp16 have theirs. The result is too small by
// 2^120 or 2^8. For bf16 with one token tile, tokens and scales are multiplied by 2^60 each, so
// that no sum leaves the range of float32; with more, codes are multiplied by 2^120.
__device__ __forceinline__ u32 float8_pair(u32 word) { // the upper bytes of both halves
    constexpr int SHIFT = IS_BFLOAT ? 4 : 1;
    constexpr u32 kept = (0x7f00u >> SHIFT) * 0x10001u;
    const u32 pair = (word >> SHIFT & kept) | (word & 0x80008000u);
    return IS_BFLOAT && !ARE_RAISED ? fma_pair(pair, 0x7b807b80u, 0x80008000u) : pair;
}
#else
// Two bytes minus the zero. An fp16 mantissa holds all 8 bits, a bf16 mantissa only 7. If the zero
// is 128 (signed bytes), the eighth bit of bf16 selects what is subtracted. Otherwise each byte is
// converted.
__device__ __forceinline__ u32 byte_pair(u32 word, int first) {
    constexpr int OWN_ZERO = NEEDS_SUMS ? 0 : ZERO;
    constexpr u32 ONES = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;
    const int places = 0x4140 + 0x0202 * (first / 2);
    if constexpr (!IS_BFLOAT) {
        const u32 pair = __byte_perm(word, 0x64646464u, places); // 1024 + byte
        return fma_pair(pair, ONES, (0xe400u + OWN_ZERO) * 0x10001u);
    } else if constexpr (OWN_ZERO == 128) {
        const u32 bytes = __byte_perm(word, 0, places);
        u32 pair; // 128 + seven bits, as in four_bit_pair
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"
            : "=r"(pair)
            : "r"(bytes), "n"(0x7f007f), "n"(0x43004300));
        return fma_pair(pair, ONES, (bytes & 0x00800080u) ^ 0xc380c380u); // -256, or -128
    }
    return pack(from_byte(word, first, OWN_ZERO), from_byte(word, first + 1, OWN_ZERO));
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
    first = byte_pair(word, 0);
    second = byte_pair(word, 2);
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

// The term added to `scale * code`, for a code returned by `unpack`.
__device__ __forceinline__ float offset_of(const Record& record, int group, float scale) {
    if constexpr (OFFSET_KIND == NO_OFFSETS) return -(MAGIC + ZERO) * scale;
    float raw = field<OFFSET_TYPE>(record, OFFSET_START + group * bytes_of(OFFSET_TYPE));
    if constexpr (OFFSET_KIND == ZEROS) return -(MAGIC + raw) * scale;
    if constexpr (OFFSET_COARSE_TYPE != NONE) raw *= field<OFFSET_COARSE_TYPE>(record, COARSE_END);
    return fmaf(-(MAGIC + ZERO), scale, raw);
}

// One step of the thread's rows, in registers or in flight.
struct Step {
    Codes codes[ROW_TILES][2];
    Record records[ROW_TILES][2];
};

// From the upper 8 rows of a tile to the lower ones, in bytes. With UP_TILES a tile is made of 8
// rows of gate and the same 8 of up, so a thread has the sums of both.
constexpr int LOWER_CODES = IS_ROW_MAJOR ? 8 * STEPS * STEP : 512, LOWER_RECORDS = 8 * RECORD_BYTES;
constexpr long long NEXT_CODES = UP_TILES ? UP_TILES * (long long)TILE_CODES : LOWER_CODES;
constexpr long long NEXT_RECORDS = UP_TILES ? UP_TILES * (long long)TILE_RECORDS : LOWER_RECORDS;

struct RowTiles {
    const u8* codes[ROW_TILES]; // at the thread's own bytes
    const u8* records[ROW_TILES];

    __device__ __forceinline__ void point(int tile, const u8* all_codes, const u8* all_records,
                                          long long row_tile) {
        const int lane = threadIdx.x % 32;
        const int half = UP_TILES ? row_tile % 2 : 0;
        if (UP_TILES) row_tile /= 2;
        codes[tile] = all_codes + row_tile * TILE_CODES + half * LOWER_CODES +
                      (IS_ROW_MAJOR ? lane / 4 * (STEPS * STEP) + lane % 4 * 16 : lane * 16);
        records[tile] = all_records + row_tile * TILE_RECORDS + half * LOWER_RECORDS +
                        lane / 4 * RECORD_BYTES;
    }

    static __device__ __forceinline__ int place_of(int index, int chunk) {
        return IS_ROW_MAJOR ? index * STEP + chunk * 64 : (index * CHUNKS + chunk) * 1024;
    }

    __device__ __forceinline__ void load(Step& step, int index) const {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    step.codes[tile][half].chunk[chunk] =
                        load_once(codes[tile] + half * NEXT_CODES + place_of(index, chunk));
                step.records[tile][half] = load_record(records[tile] + half * NEXT_RECORDS +
                                                       index * (16 * RECORD_BYTES));
            }
    }
};

constexpr int OWN_COLUMNS = IS_NARROW      ? 4
                            : IS_ROW_MAJOR ? 16
                                           : 8; // adjacent columns held by a thread

// The first column of a run.
__device__ constexpr int run_start(int run) {
    return IS_ROW_MAJOR ? run / 2 * 64 + run % 2 * 8 : run * 32;
}

// The thread's columns of a run: 8, or 4 of each 16. `p` points to its first column.
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

__device__ __forceinline__ void store(void* out, long long place, float value) {
#if IS_OUT_FLOAT
    ((float*)out)[place] = value;
#else
    ((u16*)out)[place] = (u16)pack(value, 0.0f);
#endif
}

typedef float Sums[ROW_TILES][TOKEN_TILES][4];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * TOKEN_TILES * 4; ++i) (&sums[0][0][0])[i] = 0.0f;
}

// sums += scale * raw + offset * x_sums, for one group of columns.
template <bool ADDS_OFFSETS>
__device__ __forceinline__ void apply_scales(Sums& sums, const Sums& raw,
                                             const float (&x_sums)[TOKEN_TILES][4],
                                             const Record (&records)[ROW_TILES][2], int group) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = scale_of(records[tile][half], group);
            float offset = 0.0f;
            if constexpr (ADDS_OFFSETS) offset = offset_of(records[tile][half], group, scale);
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    float& sum = sums[tile][i][2 * half + odd];
                    sum = fmaf(scale, raw[tile][i][2 * half + odd], sum);
                    if constexpr (ADDS_OFFSETS) sum = fmaf(offset, x_sums[i][odd], sum);
                }
        }
}
