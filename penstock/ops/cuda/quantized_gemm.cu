// x [T, K] -> out [T, N] with quantized weight rows, for 17 to 64 tokens. Arithmetic and L2 reads
// are the bottleneck here, not only the bytes of the codes. Knows no norm and no experts.
//
// A block computes many rows for all tokens, so it reads tokens from L2 once for all its rows. On
// Hopper, a cluster of CLUSTER blocks with the same rows splits K; its blocks read each other's
// sums from shared memory. An SM then computes more rows over fewer columns, and reads fewer bytes
// of tokens. The order of additions is fixed.
//
// Compile-time constants, besides those of `quantized_stages.cu`: HAS_PLAIN, HAS_BIAS,
// HAS_RESIDUAL.

#define HAS_EMPTY_TILES 0
#include "quantized_stages.cu"

constexpr int ADDED_ROWS = ROWS / CLUSTER; // rows that a block adds up, four per thread at once
constexpr int OUTPUTS = (TOKENS * ADDED_ROWS / 4 + THREADS - 1) / THREADS; // per thread
static_assert(ROWS % (4 * CLUSTER) == 0 && STEPS >= CLUSTER,
              "every block has columns and sums to add");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
static_assert(CLUSTER == 1, "blocks of older cards do not read each other's shared memory");
#endif

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
    __align__(16) float found[4];
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
            load_tokens(token, tokens, run, TOKEN_TILES);
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
    const int num_tiles = (num_quantized + 15) / 16;
    const int num_blocks = (num_quantized + ROWS - 1) / ROWS;
    const int rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER;
    const bool is_plain = HAS_PLAIN && block >= num_blocks;
    const int first_row = (is_plain ? block - num_blocks : block) * ROWS; // in its part
    const int first_step = rank * OWN_STEPS, end_step = min(first_step + OWN_STEPS, STEPS);
    const auto row_tile = [&](int tile) -> long long {
        return min(first_row / 16 + tile, num_tiles - 1);
    };
    const auto token = [&](int, int i) { return x + (long long)i * x_stride; };
    const Operands operands{codes, records, row_tile, token, num_tokens};
    Sums sums;
    clear(sums);

    // Weights are loaded before the previous kernel is complete, tokens after it.
    if (!is_plain) operands.start_codes(first_step);
#if HAS_PLAIN
    PlainRows plain_rows;
    if (is_plain) {
        const Place own = own_place();
        plain_rows.prefetch(plain, first_row, num_plain, first_step);
        plain_rows.start(plain, first_row + 16 * ROW_TILES * own.row, num_plain,
                         min(first_step + own.column, STEPS - 1));
    }
#endif
    wait_for_previous();
    operands.start_tokens(first_step);
#if HAS_PLAIN
    if (is_plain) {
        const int own_token = token_start(own_place());
        for_own_steps(operands, first_step, end_step, false,
                      [&](const u8* stage, int place, int step) {
                          plain_rows.multiply_step(sums, stage + own_token + 2 * STEP * place, step,
                                                   min(step + COLUMN_WARPS, STEPS - 1));
                      });
    } else
#endif
        multiply_all(sums, operands, first_step, end_step);
    const float* shared = share_sums(sums);
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
