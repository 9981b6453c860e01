// x [T, K] -> out [T, N] with quantized weight rows, for 17 to 64 tokens, on Hopper. Tensor cores,
// the instructions that unpack codes, and reads from L2 all matter here; none may wait for another.
//
// A warp group multiplies 64 rows by wgmma: the A operand are rows, which its warps unpack in
// registers, the B operand are tokens in shared memory. There are no barriers for the block:
//
//   producers   one warp group copies the block's columns of all tokens to shared memory, once, in
//               the order of columns in which codes lie, and says for each step when it is there
//   consumers   ROW_GROUPS x COLUMN_GROUPS warp groups. Every warp copies the codes of its own rows
//               DEPTH - 1 steps ahead. A thread reads what it copied itself.
//
// The COLUMN_GROUPS of a block and the CLUSTER blocks of a cluster split K: each of these PARTS
// has sums of the same rows, sends them to the parts that add them up, 8 tokens each, and receives
// what it adds up itself, in a fixed order. Blocks are persistent, so that tokens are read once.
//
// Unquantized rows are multiplied by the same warp groups, 64 at a time.
//
// Compile-time constants, besides those of `quantized_rows.cu`: ROW_GROUPS, COLUMN_GROUPS, CLUSTER,
// DEPTH, SHARED_BYTES, HAS_PLAIN, HAS_BIAS, HAS_RESIDUAL.

#include "quantized_rows.cu"

typedef unsigned long long u64;

constexpr int GROUP_ROWS = 64, GROUP_WARPS = 4, WARP_ROWS = 16;
constexpr int GROUPS_AT_WORK = ROW_GROUPS * COLUMN_GROUPS, WARPS = GROUP_WARPS * GROUPS_AT_WORK;
constexpr int PRODUCERS = IS_ARRANGED ? 0 : GROUP_WARPS; // warps, the first of the block
constexpr int THREADS = 32 * (PRODUCERS + WARPS);
constexpr int PARTS = CLUSTER * COLUMN_GROUPS;
constexpr int BLOCK_STEPS = (STEPS + CLUSTER - 1) / CLUSTER;
constexpr int SLICES = STEP / 16; // a wgmma multiplies 16 columns
constexpr int GROUP_SLICES = GROUP >= STEP ? SLICES : GROUP / 16;
constexpr int COUNT = 4 * TOKEN_TILES; // sums of a thread
static_assert(CLUSTER *(BLOCK_STEPS - 1) < STEPS && (CLUSTER - 1) * BLOCK_STEPS + COLUMN_GROUPS <=
              STEPS, "every part has columns");
static_assert(!IS_NARROW && (IS_CENTRED || !NEEDS_SUMS) && RECORD_BYTES <= 32,
              "groups have 32 columns or more, and no offsets but small integers");

// Shared memory: tokens [step, 16 columns, half of these, token, 8 columns], then for each consumer
// warp its steps in flight, then what it receives from other parts.
constexpr int SLICE_BYTES = 16 * 8 * TOKEN_TILES * 2, TOKEN_BYTES = BLOCK_STEPS * SLICES * SLICE_BYTES;
constexpr int STEP_CODES = CHUNKS * 1024, STEP_RECORDS = ARE_SCALES_LAST ? 0 : 16 * RECORD_BYTES;
constexpr int SLOT_BYTES = STEP_CODES + STEP_RECORDS, RING_BYTES = DEPTH * SLOT_BYTES;
constexpr int OWN_TILES = (TOKEN_TILES + PARTS - 1) / PARTS; // that a part adds up, at most
constexpr int MESSAGE_BYTES = 32 * 16;                       // the sums of one tile in a warp
constexpr int RECEIVED_BYTES = OWN_TILES * (PARTS - 1) * MESSAGE_BYTES;
constexpr int RECEIVED_START = TOKEN_BYTES + WARPS * RING_BYTES;
static_assert(SHARED_BYTES >= RECEIVED_START + WARPS * RECEIVED_BYTES, "as a launch gives");
static_assert(DEPTH >= 3, "a slot is filled again a step after it was read");
extern __shared__ __align__(128) u8 memory[];

constexpr int STEP_TOKENS = SLICES * SLICE_BYTES; // bytes of a step

// Registers move from producers to consumers, where a block has more threads than fit otherwise.
constexpr bool MOVES_REGISTERS = !IS_ARRANGED && GROUPS_AT_WORK > 2;
constexpr int PRODUCER_REGISTERS = GROUPS_AT_WORK == 3 ? 80 : 56;
constexpr int CONSUMER_REGISTERS = GROUPS_AT_WORK == 3 ? 144 : 104;

__device__ __forceinline__ bool is_complete(u32 barrier, u32 phase) {
    u32 is_so;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(is_so)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return is_so;
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
    while (!is_complete(barrier, phase)) {}
}

__device__ __forceinline__ void create(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and says how many bytes are still to come.
__device__ __forceinline__ void expect(u32 barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

// Arrives at the barrier at the same address in block `rank` of the cluster. Orders no memory: a
// fence would wait for all copies that are in flight.
__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
    asm volatile("{\n"
                 ".reg .u32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// Sends four sums to this address in block `rank` of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(u32 target, u32 barrier, int rank, const float* sums) {
    asm volatile("{\n"
                 ".reg .u32 there, counter;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 counter, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[there], {%3, %4, %5, %6}, [counter];\n"
                 "}" ::"r"(target),
                 "r"(barrier), "r"(rank), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3])
                 : "memory");
}

// Barrier for all threads of the block, or of the cluster if there is one.
__device__ __forceinline__ void meet() {
#if CLUSTER * SHARERS > 1
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
#else
    __syncthreads();
#endif
}

// Waits until at most the last DEPTH - 2 copies are in flight.
__device__ __forceinline__ void wait_for_copy() {
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
}

// The lower half of a wgmma descriptor is an address; this is the upper half, and what is to be
// added to the lower one, for tokens without swizzle: 128 bytes are 8 tokens x 8 columns. The next 8
// tokens follow them, the next 8 columns follow all tokens.
constexpr u32 TOKEN_STRIDES = 128 >> 4, TOKENS_START = SLICE_BYTES / 2 >> 4 << 16;
constexpr int NEXT_SLICE = SLICE_BYTES >> 4; // in a descriptor

#define SUMS16(i)                                                                                  \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]),     \
        "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7]), "+f"(sums[i + 8]),                \
        "+f"(sums[i + 9]), "+f"(sums[i + 10]), "+f"(sums[i + 11]), "+f"(sums[i + 12]),             \
        "+f"(sums[i + 13]), "+f"(sums[i + 14]), "+f"(sums[i + 15])
#define FIRST16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#if TOKEN_TILES == 4
#define SHAPE "m64n32k16"
#define ALL_SUMS SUMS16(0)
#define OPERANDS "{" FIRST16 "}, {%16, %17, %18, %19}, tokens, adds, 1, 1, 0;"
#define TOKENS_AT "%20"
#define STRIDES "%21"
#define ADDS "%22"
#elif TOKEN_TILES == 6
#define SHAPE "m64n48k16"
#define ALL_SUMS                                                                                   \
    SUMS16(0), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]),     \
        "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23])
#define OPERANDS                                                                                   \
    "{" FIRST16 ", %16, %17, %18, %19, %20, %21, %22, %23}, "                                      \
    "{%24, %25, %26, %27}, tokens, adds, 1, 1, 0;"
#define TOKENS_AT "%28"
#define STRIDES "%29"
#define ADDS "%30"
#elif TOKEN_TILES == 8
#define SHAPE "m64n64k16"
#define ALL_SUMS SUMS16(0), SUMS16(16)
#define OPERANDS                                                                                   \
    "{" FIRST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "    \
    "%31}, {%32, %33, %34, %35}, tokens, adds, 1, 1, 0;"
#define TOKENS_AT "%36"
#define STRIDES "%37"
#define ADDS "%38"
#endif
#if IS_BFLOAT
#define TYPES ".f32.bf16.bf16 "
#else
#define TYPES ".f32.f16.f16 "
#endif

// sums [64 rows, 8 x TOKEN_TILES tokens] (+)= a product over 16 columns. The thread passes its
// rows' registers as to `multiply`, and a descriptor of the tokens.
__device__ __forceinline__ void multiply_group(float (&sums)[COUNT], const u32 (&rows)[4],
                                               u32 tokens, bool adds) {
    asm volatile("{\n"
                 ".reg .pred adds;\n"
                 ".reg .b64 tokens;\n"
                 "setp.ne.b32 adds, " ADDS ", 0;\n"
                 "mov.b64 tokens, {" TOKENS_AT ", " STRIDES "};\n"
                 "wgmma.mma_async.sync.aligned." SHAPE TYPES OPERANDS "\n"
                 "}"
                 : ALL_SUMS
                 : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(tokens),
                   "r"(TOKEN_STRIDES), "r"((int)adds));
}

__device__ __forceinline__ void show_registers() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_products(float (&sums)[COUNT]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : ALL_SUMS::"memory");
}

struct Given {
    const u16* x;
    const u8 *codes, *records;
    const u16 *plain, *bias, *residual;
    void* out;
    int num_tokens, num_quantized, num_plain, out_stride, x_stride, residual_stride;
};

// Tokens to shared memory. A thread has the columns of a run of one token, which it stores as the
// halves of two slices, in the order of an A fragment: the registers of four threads are adjacent.
#if !IS_ARRANGED
constexpr int TILE_PASSES = (TOKEN_TILES + PRODUCERS - 1) / PRODUCERS; // per step and warp
constexpr int STEPS_HELD = 4 / TILE_PASSES;                            // in flight

struct Run {
    Four quarter[4];
};

__device__ __forceinline__ void load_run(Run& run, const Given& given, int step, int tile) {
    const int lane = threadIdx.x % 32, token = 8 * tile + lane % 8;
    const int column = step * STEP + run_start(lane / 8);
    const u16* p = given.x + (long long)token * given.x_stride + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool is_there = token < given.num_tokens &&
                              (IS_WHOLE || column + OWN_COLUMNS * i < COLUMNS);
        run.quarter[i] = is_there ? load_again(p + OWN_COLUMNS * i) : Four{};
    }
}

__device__ __forceinline__ void store_run(const Run& run, int place, int tile) {
    const int lane = threadIdx.x % 32;
    u8* p = memory + (place * SLICES + lane / 8 * 2) * SLICE_BYTES + tile * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        *(Four*)(p + i * (SLICE_BYTES / 2)) =
            Four{{run.quarter[0].part[i], run.quarter[1].part[i], run.quarter[2].part[i],
                  run.quarter[3].part[i]}};
}

// A fence waits for all loads in flight, so there is one for many steps.
__device__ __forceinline__ void copy_tokens(const Given& given, u32 there, int first_step,
                                            int num_steps) {
    const int warp = threadIdx.x / 32;
    const auto each = [&](int start, auto visit) {
#pragma unroll
        for (int i = 0; i < STEPS_HELD * TILE_PASSES; ++i) {
            const int step = start + i / TILE_PASSES, tile = warp + PRODUCERS * (i % TILE_PASSES);
            if (step < num_steps && tile < TOKEN_TILES) visit(i, step, tile);
        }
    };
    Run runs[STEPS_HELD * TILE_PASSES];
#pragma unroll 1
    for (int start = 0; start < num_steps; start += STEPS_HELD) {
        each(start, [&](int i, int step, int tile) {
            load_run(runs[i], given, first_step + step, tile);
        });
        each(start, [&](int i, int step, int tile) { store_run(runs[i], step, tile); });
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // wgmma reads them
        __syncwarp();
        const int step = start + threadIdx.x % 32;
        if (step < min(start + STEPS_HELD, num_steps)) arrive(there + 8 * step);
    }
}

#else
// Tokens are in memory as wgmma reads them. The SHARERS blocks of a cluster that have the same
// columns copy some steps each, for all of them.
__device__ __forceinline__ void copy_tokens(const Given& given, u32 there, int first_step,
                                            int num_steps, int rank) {
    for (int step = 0; step < num_steps; ++step) expect(there + 8 * step, STEP_TOKENS);
    const u8* source = (const u8*)given.x + (long long)first_step * STEP_TOKENS;
    for (int step = rank / CLUSTER; step < num_steps; step += SHARERS) {
        const u32 target = shared_address(memory) + step * STEP_TOKENS;
#if SHARERS > 1
        u16 sharers = 0;
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) sharers |= 1 << (i * CLUSTER + rank % CLUSTER);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(target),
                     "l"(source + step * STEP_TOKENS), "r"(STEP_TOKENS), "r"(there + 8 * step),
                     "h"(sharers)
                     : "memory");
#else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];" ::"r"(target),
                     "l"(source + step * STEP_TOKENS), "r"(STEP_TOKENS), "r"(there + 8 * step)
                     : "memory");
#endif
    }
}
#endif

// The rows of a consumer warp in one of its row tiles, at the thread's own bytes.
struct OwnRows {
    bool is_plain;
    int first; // of the warp's 16 rows, in its part
    const u8 *codes, *records;
    const u16* plain[2];
};

struct Barriers {
    u32 there, received, taken; // tokens of each step; sums for each warp; and that they were read
};

struct Consumer {
    const Given& given;
    const Barriers barriers;
    const int lane, warp, part, rank;
    const int first_step, num_steps; // of the block
    const int own_column, own_steps; // of the warp group, every COLUMN_GROUPS-th step
    const int plain_tiles, num_tiles, first_tile, next_tile; // of 64 rows
    u8* const ring;

    __device__ __forceinline__ OwnRows rows_of(int tile) const {
        OwnRows rows;
        rows.is_plain = HAS_PLAIN && tile < plain_tiles;
        const int place = rows.is_plain ? tile : tile - plain_tiles;
        rows.first = place * GROUP_ROWS + warp % GROUP_WARPS * WARP_ROWS;
        if (rows.is_plain) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = min(rows.first + 8 * half + lane / 4, given.num_plain - 1);
                rows.plain[half] =
                    given.plain + (long long)row * COLUMNS + OWN_COLUMNS * (lane % 4);
            }
        } else {
            const long long row_tile = min(rows.first / 16, (given.num_quantized + 15) / 16 - 1);
            rows.codes = given.codes + row_tile * TILE_CODES +
                         (IS_ROW_MAJOR ? lane / 4 * (STEPS * STEP) + lane % 4 * 16 : lane * 16);
            rows.records = given.records + row_tile * TILE_RECORDS;
        }
        return rows;
    }

    // Turns of a warp at one row tile: its steps, or CHUNKS runs of unquantized rows each.
    __device__ __forceinline__ int turns_of(bool is_plain) const {
        return is_plain ? own_steps * (RUNS / CHUNKS) : own_steps;
    }

    __device__ __forceinline__ int place_of(int step) const { // in the block's tokens
        return step * COLUMN_GROUPS + own_column;
    }

    __device__ __forceinline__ void load(const OwnRows& rows, int turn, u8* slot) const {
        const u32 target = shared_address(slot) + lane * 16;
        if (rows.is_plain) {
            const int step = first_step + place_of(turn / (RUNS / CHUNKS));
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int run = turn % (RUNS / CHUNKS) * CHUNKS + chunk;
                const int column = step * STEP + run_start(run);
                const bool is_there = IS_WHOLE || column + OWN_COLUMNS * (lane % 4) < COLUMNS;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    copy(target + (chunk * 2 + half) * 512,
                         rows.plain[half] + (is_there ? column : 0), is_there);
            }
            return;
        }
        const int step = first_step + place_of(turn);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                copy(target + (chunk * 2 + half) * 512,
                     rows.codes + RowTiles::place_of(step, chunk, half));
        if (!ARE_SCALES_LAST && lane < RECORD_BYTES)
            copy(target + STEP_CODES, rows.records + step * STEP_RECORDS + lane * 16);
    }

    __device__ __forceinline__ Four held(const u8* slot, int chunk, int half) const {
        return *(const Four*)(slot + (chunk * 2 + half) * 512 + lane * 16);
    }

    // Multiplies a step of quantized rows.
    __device__ __forceinline__ void multiply_codes(float (&sums)[COUNT], const u8* slot,
                                                   u32 tokens) const {
        Codes codes[2];
        Record records[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                codes[half].chunk[chunk] = held(slot, chunk, half);
            if constexpr (!ARE_SCALES_LAST)
                records[half] =
                    shared_record(slot + STEP_CODES + (half * 8 + lane / 4) * RECORD_BYTES);
        }
        float of_group[COUNT];
        float(&raw)[COUNT] = ARE_SCALES_LAST ? sums : of_group;
        u32 zeros[2], rows[SLICES][4];
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            const int group = i / GROUP_SLICES;
            if constexpr (IS_CENTRED)
                if (i % GROUP_SLICES == 0)
                    zeros[0] = negative_zeros(records[0], group),
                    zeros[1] = negative_zeros(records[1], group);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 &first = rows[i][half], &second = rows[i][half + 2];
                unpack(codes[half], i, first, second);
                if constexpr (IS_CENTRED)
                    first = fma_pair(first, ONES, zeros[half]),
                    second = fma_pair(second, ONES, zeros[half]);
            }
            if (i % 2 == 0) continue; // one half of a run
            show_registers();
#pragma unroll
            for (int slice = i - 1; slice <= i; ++slice)
                multiply_group(raw, rows[slice], tokens + slice * NEXT_SLICE,
                               ARE_SCALES_LAST || slice % GROUP_SLICES != 0);
            if ((i + 1) % GROUP_SLICES != 0) continue;
            wait_for_products(raw);
            if constexpr (!ARE_SCALES_LAST) {
                const float scales[2] = {scale_of(records[0], group), scale_of(records[1], group)};
#pragma unroll
                for (int j = 0; j < COUNT; ++j)
                    sums[j] = fmaf(scales[j / 2 % 2], raw[j], sums[j]);
            }
        }
    }

    // Multiplies CHUNKS runs of unquantized rows.
    __device__ __forceinline__ void multiply_plain(float (&sums)[COUNT], const u8* slot,
                                                   u32 tokens) const {
        u32 rows[2 * CHUNKS][4];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const Four upper = held(slot, chunk, 0), lower = held(slot, chunk, 1);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rows[2 * chunk + i / 2][i % 2 * 2] = upper.part[i];
                rows[2 * chunk + i / 2][i % 2 * 2 + 1] = lower.part[i];
            }
        }
        show_registers();
#pragma unroll
        for (int slice = 0; slice < 2 * CHUNKS; ++slice)
            multiply_group(sums, rows[slice], tokens + slice * NEXT_SLICE, true);
        wait_for_products(sums);
    }

    // Writes the sums of four rows and tokens: two rows of the thread, two tokens of its quarter.
    __device__ __forceinline__ void store_sums(const OwnRows& rows, int tile,
                                               const float* sums) const {
        const int num_rows = rows.is_plain ? given.num_plain : given.num_quantized;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = rows.first + i / 2 * 8 + lane / 4;
            const int token = 8 * tile + lane % 4 * 2 + i % 2;
            if (row >= num_rows || token >= given.num_tokens) continue;
            const int output = rows.is_plain ? given.num_quantized + row : row;
            float sum = sums[i];
#if HAS_BIAS
            sum += low(given.bias[output]);
#endif
#if HAS_RESIDUAL
            sum += low(given.residual[(long long)token * given.residual_stride + output]);
#endif
            store(given.out, (long long)token * given.out_stride + output, sum);
        }
    }

    // Where warp `warp` of a block receives the sums of another part, in its own shared memory.
    static __device__ __forceinline__ u8* received(int warp, int place, int sender) {
        return memory + RECEIVED_START + warp * RECEIVED_BYTES +
               (place * (PARTS - 1) + sender) * MESSAGE_BYTES + threadIdx.x % 32 * 16;
    }

    // The warp with the same rows in another part of the same block or of another one.
    __device__ __forceinline__ int warp_of(int other) const {
        const int group = warp / GROUP_WARPS / COLUMN_GROUPS * COLUMN_GROUPS;
        return (group + other % COLUMN_GROUPS) * GROUP_WARPS + warp % GROUP_WARPS;
    }

    __device__ __forceinline__ int block_of(int other) const { // in the cluster
        return rank / CLUSTER * CLUSTER + other / COLUMN_GROUPS;
    }

    // Adds up the sums of all parts and writes them. `round`: how many row tiles came before.
    __device__ __forceinline__ void finish(const OwnRows& rows, const float (&sums)[COUNT],
                                           int round, bool is_last) const {
        if constexpr (PARTS == 1) {
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j) store_sums(rows, j, sums + 4 * j);
            return;
        }
        const u32 own_received = barriers.received + 8 * warp;
        const int own_tiles = (TOKEN_TILES - part + PARTS - 1) / PARTS;
        if (lane == 0) expect(own_received, own_tiles * (PARTS - 1) * MESSAGE_BYTES);
        if (round > 0) wait_for(barriers.taken + 8 * warp, (round - 1) % 2);
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            const int owner = j % PARTS, target = warp_of(owner);
            if (owner == part) continue;
            send(shared_address(received(target, j / PARTS, part - (part > owner))),
                 barriers.received + 8 * target, block_of(owner), sums + 4 * j);
        }
        wait_for(own_received, round % 2);
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            if (j % PARTS != part) continue;
            float all[4] = {};
#pragma unroll
            for (int other = 0; other < PARTS; ++other) {
                __align__(16) float sent[4];
                const int sender = min(max(other - (other > part), 0), PARTS - 2);
                *(Four*)sent = *(const Four*)received(warp, j / PARTS, sender);
#pragma unroll
                for (int i = 0; i < 4; ++i) all[i] += other == part ? sums[4 * j + i] : sent[i];
            }
            store_sums(rows, j, all);
        }
        __syncwarp();
        if (!is_last && lane < PARTS && lane != part)
            arrive_at(barriers.taken + 8 * warp_of(lane), block_of(lane));
    }

    __device__ __forceinline__ void run() const {
        // Copies run ahead of the products, into the next row tile.
        int ahead = first_tile, ahead_turn = 0, slot = 0, round = 0;
        OwnRows ahead_rows = rows_of(ahead);
        const auto load_next = [&](int slot) {
            if (ahead < num_tiles) {
                load(ahead_rows, ahead_turn, ring + slot * SLOT_BYTES);
                if (++ahead_turn == turns_of(ahead_rows.is_plain)) {
                    ahead += next_tile, ahead_turn = 0;
                    if (ahead < num_tiles) ahead_rows = rows_of(ahead);
                }
            }
            end_stage(); // an empty group too: waits count groups
        };
        for (int i = 0; i < DEPTH - 1; ++i) load_next(i);
        wait_for_previous();
#if IS_ARRANGED
        if (warp == 0 && lane == 0)
            copy_tokens(given, barriers.there, first_step, num_steps, rank);
        __syncwarp();
#endif
        const u32 tokens = (shared_address(memory) >> 4 & 0x3fff) + TOKENS_START;
#pragma unroll 1
        for (int tile = first_tile; tile < num_tiles; tile += next_tile, ++round) {
            const OwnRows rows = rows_of(tile);
            Record row_records[2];
            if constexpr (ARE_SCALES_LAST)
                if (!rows.is_plain)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        row_records[half] =
                            load_record(rows.records + (half * 8 + lane / 4) * RECORD_BYTES);
            float sums[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) sums[i] = 0.0f;
            const int turns = turns_of(rows.is_plain);
#pragma unroll 1
            for (int turn = 0; turn < turns; ++turn) {
                wait_for_copy();
                __syncwarp();
                load_next(slot == 0 ? DEPTH - 1 : slot - 1);
                const u8* own = ring + slot * SLOT_BYTES;
                const int place = place_of(rows.is_plain ? turn / (RUNS / CHUNKS) : turn);
                if (round == 0) wait_for(barriers.there + 8 * place, 0);
                const u32 at = tokens + place * (SLICES * NEXT_SLICE);
                if (rows.is_plain)
                    multiply_plain(sums, own,
                                   at + turn % (RUNS / CHUNKS) * (2 * CHUNKS * NEXT_SLICE));
                else
                    multiply_codes(sums, own, at);
                slot = slot + 1 == DEPTH ? 0 : slot + 1;
            }
            if constexpr (ARE_SCALES_LAST)
                if (!rows.is_plain)
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) sums[i] *= scale_of(row_records[i / 2 % 2], 0);
            finish(rows, sums, round, tile + next_tile >= num_tiles);
        }
#if IS_ARRANGED
        // A block may not exit before what was to come has come, even if it has no rows.
        if (warp == 0)
            for (int step = 0; step < num_steps; ++step) wait_for(barriers.there + 8 * step, 0);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER * SHARERS > 1
    __cluster_dims__(CLUSTER * SHARERS, 1, 1)
#endif
        quantized_wide(const u16* x, const u8* codes, const u8* records, const u16* plain,
                       const u16* bias, const u16* residual, void* out, int num_tokens,
                       int num_quantized, int num_plain, int out_stride, int x_stride,
                       int residual_stride) {
    __shared__ u64 memory_of_barriers[BLOCK_STEPS + 2 * WARPS];
    const u32 there = shared_address(memory_of_barriers);
    const u32 received = there + 8 * BLOCK_STEPS, taken = received + 8 * WARPS;
    let_next_start();
    for (int i = threadIdx.x; i < BLOCK_STEPS + 2 * WARPS; i += THREADS)
        if (i < BLOCK_STEPS || PARTS > 1)
            create(there + 8 * i, i < BLOCK_STEPS           ? max(PRODUCERS, 1)
                                  : i < BLOCK_STEPS + WARPS ? 1
                                                            : PARTS - 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    meet();
    const Given given{x,          codes,         records,   plain,      bias,     residual,       out,
                      num_tokens, num_quantized, num_plain, out_stride, x_stride, residual_stride};
    const int rank = blockIdx.x % (CLUSTER * SHARERS);
    const int first_step = rank % CLUSTER * BLOCK_STEPS;
    const int num_steps = min(BLOCK_STEPS, STEPS - first_step);
    if (threadIdx.x < 32 * PRODUCERS) {
#if !IS_ARRANGED
        if constexpr (MOVES_REGISTERS)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        wait_for_previous();
        copy_tokens(given, there, first_step, num_steps);
#endif
        return;
    }
    if constexpr (MOVES_REGISTERS)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int warp = threadIdx.x / 32 - PRODUCERS, group = warp / GROUP_WARPS;
    const int column = group % COLUMN_GROUPS;
    const int plain_tiles = HAS_PLAIN ? (num_plain + GROUP_ROWS - 1) / GROUP_ROWS : 0;
    // Row tiles are distributed over sets of blocks that have all columns together.
    const int num_sets = gridDim.x / CLUSTER;
    const int set = blockIdx.x / (CLUSTER * SHARERS) * SHARERS + rank / CLUSTER;
    const Consumer consumer{
        given,
        {there, received, taken},
        (int)threadIdx.x % 32,
        warp,
        rank % CLUSTER * COLUMN_GROUPS + column,
        rank,
        first_step,
        num_steps,
        column,
        (num_steps - column + COLUMN_GROUPS - 1) / COLUMN_GROUPS,
        plain_tiles,
        plain_tiles + (num_quantized + GROUP_ROWS - 1) / GROUP_ROWS,
        group / COLUMN_GROUPS * num_sets + set,
        num_sets * ROW_GROUPS,
        memory + TOKEN_BYTES + warp * RING_BYTES,
    };
    consumer.run();
}
