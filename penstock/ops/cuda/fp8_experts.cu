// Grouped GEMM of the chosen experts for many tokens, both operands in E4M3, on Hopper: gate and
// up, with E4M3 output, or down. Does not route, sort pairs or quantize its input.
// `ops/triton/moe_fp8_gemm.py` is the same kernel in Triton.
//
// The kernel is persistent and warp-specialized. A block processes one piece of work after another:
// up to 128 token-expert pairs of one expert x 256 of its rows. Four producer warps load 128
// columns at a time into one of STAGES slots of shared memory, and run ahead into the next piece.
// Two consumer warp groups multiply 64 pairs each. While one group scales and accumulates its
// result for a block of 128 columns, the other uses the tensor cores.
//
//               slot: 128 pairs x 128 bytes | 256 rows x 128 bytes | their scales
//   producers   wait for `empty`, copy; each thread's copies arrive at `full`
//   consumers   wait for `full`, issue 2 x 4 wgmma of 64 x 128 x 32, arrive at `empty`
//
// Rows of a slot are 128 bytes, in the 128-byte swizzle that wgmma reads without bank conflicts.
// The order of rows in a slot is free. It is chosen so that a thread's sums are adjacent in the
// result, and so that the result of gate and up has the column order of `down`.
//
// Compile-time constants: K, N (rows per matrix), E, SLOTS (pairs per token), IS_DOWN, HAS_SHARED
// (expert E has its own matrix), STAGES, IS_BFLOAT.

#include "tensor_cores.cu"

constexpr int PAIRS = 128, HALF_ROWS = 128, ROWS = 2 * HALF_ROWS, STEP = 128, STEPS = K / STEP;
constexpr int TILE_ROWS = 16, TILE_BYTES = TILE_ROWS * STEP;
constexpr int COLUMNS = IS_DOWN ? N : N / 2;                                // of the output
constexpr int PIECES = N / ROWS;                                            // per expert
constexpr int PAIR_BYTES = PAIRS * STEP, SCALES = PAIR_BYTES + ROWS * STEP; // offsets in a slot
constexpr int SLOT_BYTES = SCALES + 1024; // one scale per pair and per half of the rows
constexpr int LOADING = 128, THREADS = LOADING + 256;
constexpr float LARGEST = 448.0f, LEAST = 1e-12f;
static_assert(K % STEP == 0 && N % ROWS == 0, "whole blocks");

typedef unsigned long long u64;

struct Piece {
    int expert, place, row, count; // one entry of the list of tiles
};

__device__ __forceinline__ Piece load_piece(const int* tiles, int num_tiles, int work) {
    Piece piece = {0, 0, 0, 0};
    const int tile = work / PIECES;
    if (tile < num_tiles) {
        const Four four = load_again(tiles + 4 * tile);
        piece = {(int)four.part[0], (int)four.part[1], (int)four.part[2], (int)four.part[3]};
    }
    return piece;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_scale(u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float load_scale(u32 from) {
    float scale;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(from) : "memory");
    return scale;
}

__device__ __forceinline__ void copy(u32 to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}

// The place in a slot of row 16 i + r of 128 is place_of(r) + distance_of(i). A thread has the sums
// of places 8 j + 2 quarter + {0, 1}. For `down` these are columns 32 (j / 4) + 8 quarter +
// 2 (j % 4) + {0, 1}, so that the four threads of a pair write 64 bytes at a time. For gate and up
// they are columns 32 quarter + 2 j + {0, 1}, in the column order of a tile of `down` (`tiles.py`:
// `_order`).
__device__ __forceinline__ int place_of(int r) {
    if constexpr (IS_DOWN) return r % 8 / 2 * 8 + r / 8 * 2 + r % 2;
    const int in_four = r % 4 == 0 ? 1 : r % 4 == 1 ? 3 : r % 4 == 2 ? 0 : 2;
    const int column = r / 8 * 16 + r % 8 / 4 * 4 + in_four;
    return column / 2 * 8 + column % 2;
}

__device__ constexpr int swap_of(int i) { // also changes the row's swizzle
    return IS_DOWN ? i % 2 * 4 : i / 4 * 4 + i % 2 * 2;
}

__device__ constexpr int distance_of(int i) {
    return (IS_DOWN ? i / 2 * 32 : i / 2 % 2 * 32) + swap_of(i);
}

// wgmma descriptor: rows of 128 bytes, 1,024 bytes between groups of eight rows, 128-byte swizzle.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define SUMS8(i)                                                                                   \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]),     \
        "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])

// sums [64 pairs, 128 rows] (+)= 32 columns
__device__ __forceinline__ void multiply_group(float (&sums)[64], u64 pairs, u64 rows, int adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, adds, 1, 1;\n"
        "}"
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40), SUMS8(48), SUMS8(56)
        : "l"(pairs), "l"(rows), "r"(adds));
}

__device__ __forceinline__ u32 to_codes(float first, float second, float third, float fourth) {
    u32 codes;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(codes)
        : "f"(first), "f"(second), "f"(third), "f"(fourth));
    return codes;
}

struct Given {
    const unsigned char* source;  // [T, K] or [pairs, K] codes
    const float* source_scales;   // [STEPS, source_count]
    const int* order;             // pairs, ordered by expert
    const int* tiles;             // [num_tiles, 4]
    const unsigned char* experts; // [E, tiles, STEPS, 16 x 128]
    const float* expert_scales;   // [E, N / 128, STEPS]
    const unsigned char* shared;
    const float* shared_scales;
    void* result;         // [pairs, N], or codes [pairs, N / 2] ordered by expert
    float* result_scales; // [N / 2 / 128, num_pairs]
    int source_count, num_pairs, num_tiles;
};

__device__ __forceinline__ void load_pieces(const Given& given, u32 slots, u32 full, u32 empty) {
    // One warp per scheduler loads. A copy must need few instructions, or they limit the speed.
    const int own_row = threadIdx.x / 8, own_piece = threadIdx.x % 8;
    const int own_place = place_of(own_row);
    const u32 own_pair = own_row * STEP + ((own_piece ^ own_row % 8) << 4);
    u32 to_rows[4]; // for each swizzle
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to_rows[i] = slots + PAIR_BYTES + own_place * STEP +
                     ((own_piece ^ own_place % 8 ^ 2 * i) << 4);
    int slot = 0;
    u32 phase = 0;
    for (int work = blockIdx.x;; work += gridDim.x) {
        const Piece piece = load_piece(given.tiles, given.num_tiles, work);
        if (piece.count == 0) return;
        const bool is_shared = HAS_SHARED && piece.expert == E;
        const unsigned char* rows =
            is_shared ? given.shared : given.experts + (u64)piece.expert * N * K;
        rows += own_piece / 4 * (TILE_BYTES / 2) + own_row * 64 + own_piece % 4 * 16;
        rows += (u64)(work % PIECES) * (IS_DOWN ? ROWS : HALF_ROWS) * K;
        const unsigned char* others = rows + (u64)(IS_DOWN ? HALF_ROWS : N / 2) * K;
        const int count = (piece.count + 15) / 16;
        const unsigned char* source = given.source + own_piece * 16;
        u32 pairs[PAIRS / 16];
#pragma unroll
        for (int i = 0; i < PAIRS / 16; ++i) {
            const int pair = min(16 * i + own_row, piece.count - 1);
            pairs[i] = (IS_DOWN ? piece.row + pair : given.order[piece.place + pair] / SLOTS) * K;
        }
        const int scaled = min((int)threadIdx.x, piece.count - 1);
        const float* pair_scale =
            given.source_scales +
            (IS_DOWN ? piece.row + scaled : given.order[piece.place + scaled] / SLOTS);
        const float* row_scale = // one per half: the first two threads copy them
            is_shared ? given.shared_scales
                      : given.expert_scales + (u64)piece.expert * (N / STEP * STEPS);
        row_scale += work % PIECES * (IS_DOWN ? 2 : 1) * STEPS;
        if (threadIdx.x % 2) row_scale += (IS_DOWN ? 1 : N / 2 / STEP) * STEPS;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            wait_for(empty + 8 * slot, phase ^ 1);
            const u32 at = slot * SLOT_BYTES;
#pragma unroll
            for (int i = 0; i < HALF_ROWS / 16; ++i) {
                const u32 to = to_rows[swap_of(i) / 2] + at + distance_of(i) * STEP;
                copy(to, rows + i * TILE_ROWS * K);
                copy(to + HALF_ROWS * STEP, others + i * TILE_ROWS * K);
            }
#pragma unroll
            for (int i = 0; i < PAIRS / 16; ++i)
                if (i < count) copy(slots + at + own_pair + 16 * i * STEP, source + pairs[i]);
            copy_scale(slots + at + SCALES + 4 * threadIdx.x, pair_scale);
            if (threadIdx.x < 2)
                copy_scale(slots + at + SCALES + 4 * (PAIRS + threadIdx.x), row_scale + step);
            pair_scale += given.source_count;
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full +
                                                                                      8 * slot)
                         : "memory");
            rows += TILE_BYTES, others += TILE_BYTES, source += STEP;
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
    }
}

__device__ __forceinline__ float swiglu(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Stores one of the thread's two pairs: sums `first` and `first` + 1 of each four.
__device__ __forceinline__ void store_pair(const Given& given, const Piece& piece,
                                           float (&sums)[2][64], int first, int pair, int listed,
                                           int piece_id, int quarter) {
    if constexpr (IS_DOWN) {
        u16* out = (u16*)given.result + (u64)listed * COLUMNS + piece_id * ROWS + quarter * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 64; i += 16) {
                const float* own = &sums[half][i + first];
                store_16_bytes(out + half * HALF_ROWS + 2 * i, pack(own[0], own[1]),
                               pack(own[4], own[5]), pack(own[8], own[9]),
                               pack(own[12], own[13]));
            }
    } else {
        float most = LEAST;
#pragma unroll
        for (int i = first; i < 64; i += 4)
#pragma unroll
            for (int j = i; j < i + 2; ++j) {
                sums[0][j] = swiglu(sums[0][j], sums[1][j]);
                most = fmaxf(most, fabsf(sums[0][j]));
            }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const float scale = most / LARGEST, inverse = LARGEST / most;
        if (pair >= piece.count) return;
        const u64 row = piece.row + pair;
        unsigned char* out =
            (unsigned char*)given.result + row * COLUMNS + piece_id * HALF_ROWS + quarter * 32;
#pragma unroll
        for (int i = 0; i < 64; i += 32) {
            u32 codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* own = &sums[0][i + 8 * j + first];
                codes[j] = to_codes(own[0] * inverse, own[1] * inverse, own[4] * inverse,
                                    own[5] * inverse);
            }
            store_16_bytes(out + i / 2, codes[0], codes[1], codes[2], codes[3]);
        }
        if (quarter == 0) given.result_scales[(u64)piece_id * given.num_pairs + row] = scale;
    }
}

__device__ __forceinline__ void multiply_pieces(const Given& given, u32 slots, u32 full,
                                                u32 empty) {
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first_pair = 64 * group + 16 * warp + lane / 4;
    int slot = 0;
    u32 phase = 0;
    Piece next = load_piece(given.tiles, given.num_tiles, blockIdx.x);
    for (int work = blockIdx.x;; work += gridDim.x) {
        const Piece piece = next;
        if (piece.count == 0) return;
        // Prefetches the next piece.
        next = load_piece(given.tiles, given.num_tiles, work + gridDim.x);
        int listed[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (IS_DOWN && first_pair + 8 * i < piece.count)
                listed[i] = given.order[piece.place + first_pair + 8 * i];
        const bool has_pairs = 64 * group < piece.count;
        const int piece_id = work % PIECES;
        float total[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = 0.0f;
        for (int step = 0; step < STEPS; ++step) {
            wait_for(full + 8 * slot, phase);
            if (has_pairs) {
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                const u32 at = slots + slot * SLOT_BYTES;
                const float own = load_scale(at + SCALES + 4 * first_pair);
                const float other = load_scale(at + SCALES + 4 * (first_pair + 8));
                const float rows[2] = {load_scale(at + SCALES + 4 * PAIRS),
                                       load_scale(at + SCALES + 4 * (PAIRS + 1))};
                const float scales[2][2] = {{own * rows[0], other * rows[0]},
                                            {own * rows[1], other * rows[1]}};
                const u64 pairs = descriptor(at + group * (64 * STEP));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u64 some = descriptor(at + PAIR_BYTES + half * (HALF_ROWS * STEP));
                    float sums[64];
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int i = 0; i < STEP / 32; ++i) // 32 bytes per instruction
                        multiply_group(sums, pairs + 2 * i, some + 2 * i, i > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    asm volatile("wgmma.wait_group.sync.aligned 0;"
                                 : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40),
                                   SUMS8(48), SUMS8(56)::"memory");
                    if (half == 1 && lane == 0) arrive(empty + 8 * slot);
#pragma unroll
                    for (int i = 0; i < 64; ++i)
                        total[half][i] = fmaf(sums[i], scales[half][i / 2 % 2], total[half][i]);
                }
            } else if (lane == 0)
                arrive(empty + 8 * slot);
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
        if (has_pairs)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (!IS_DOWN || first_pair + 8 * i < piece.count)
                    store_pair(given, piece, total, 2 * i, first_pair + 8 * i, listed[i], piece_id,
                               lane % 4);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_experts(const Given given) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 slots = (shared_address(memory) + 1023) / 1024 * 1024;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + 8 * i),
                         "r"(LOADING));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"(8));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x < LOADING) {
        // Registers move from producers to consumers. Of 168 each, 128 threads release 128 and 256
        // threads take 64 more; if fewer were released, the consumers would wait forever.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        load_pieces(given, slots, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply_pieces(given, slots, full, empty);
    }
}
