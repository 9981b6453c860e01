// out [T, N] = norm(x) [T, K] @ weight [N, K] transposed + bias + residual, for up to 8 tokens.
// Dense weights only; the norm is optional.
//
// Reading the weight is the bottleneck, so nothing else may cost time. A thread loads 16 bytes of a
// weight row and passes them to the tensor cores unchanged: an mma sums over 16 columns in any
// order, as long as weight and activations use the same. Here the four threads of a row load 8
// columns each, enough for two instructions, and tokens are loaded in the same way. Nothing is
// converted, shuffled or staged.
//
//        columns  0..7   8..15  16..23  24..31          one step of a warp: 16 rows x 32 columns
//   row 0       thread 0      1       2       3
//   row 1       thread 4      5       6       7
//
// All warps of a block have the same rows and split K. Each loads its first HELD steps of weights
// before the previous kernel is complete (programmatic dependent launch), and keeps HELD steps in
// flight.
//
// With a norm, x is multiplied by the norm's weights before the mma, and the sums by 1 / rms at the
// end: bf16 has the range of float32, so nothing is lost. fp16 could overflow, so there 1 / rms is
// applied first, which reads the tokens once more while the weights are in flight.
//
// Compile-time constants: K, WARPS, ROW_TILES (of 16 rows), HELD, BLOCKS (per SM, which limits
// registers), HAS_NORM, HAS_BIAS, HAS_RESIDUAL, IS_BFLOAT, IS_OUT_FLOAT.

#include "tensor_cores.cu"

constexpr int STEP_COLUMNS = 32, TOKENS = 8, ROWS = 16 * ROW_TILES, THREADS = 32 * WARPS;
constexpr int STEPS = K / (STEP_COLUMNS * WARPS); // per warp
constexpr int HELD_STEPS = HELD < STEPS ? HELD : STEPS;
constexpr int OUTPUTS = (ROWS * TOKENS + THREADS - 1) / THREADS; // per thread
#define IS_RMS_FIRST (HAS_NORM && !IS_BFLOAT)
static_assert(K == WARPS * STEPS * STEP_COLUMNS, "every warp has the same number of steps");

// Each of the four threads of a token has the squares of a quarter of the warp's columns.
__device__ __forceinline__ void share_squares(float (&sums)[WARPS][TOKENS], float own, int warp,
                                              int lane) {
    own += __shfl_xor_sync(0xffffffffu, own, 1);
    own += __shfl_xor_sync(0xffffffffu, own, 2);
    if (lane % 4 == 0) sums[warp][lane / 4] = own;
}

__device__ __forceinline__ float inverse_rms(const float (&square_sums)[WARPS][TOKENS], int token,
                                             float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += square_sums[warp][token];
    return rsqrtf(sum / K + eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    skinny_gemm(const u16* x, const float* norm, const u16* weight, const u16* bias,
                const u16* residual, void* out, int num_tokens, int N, int x_stride,
                int residual_stride, float eps) {
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4,
              quarter = lane % 4;
    const int first_row = blockIdx.x * ROWS;
    const int first_column = warp * STEPS * STEP_COLUMNS + quarter * 8;

    const u16* own_rows[ROW_TILES][2];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(first_row + 16 * tile + 8 * half + group, N - 1);
            own_rows[tile][half] = weight + (long long)row * K + first_column;
        }
    Four held[HELD_STEPS][ROW_TILES][2];
#pragma unroll
    for (int step = 0; step < HELD_STEPS; ++step)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                held[step][tile][half] = load_once(own_rows[tile][half] + step * STEP_COLUMNS);

#if HAS_NORM
    __shared__ __align__(16) float norms[K]; // each warp writes and reads only its own columns
#pragma unroll
    for (int i = 0; i < STEPS * STEP_COLUMNS; i += 4 * 32) {
        const int column = warp * STEPS * STEP_COLUMNS + i + 4 * lane;
        if (i + 4 * lane < STEPS * STEP_COLUMNS)
            *(Four*)(norms + column) = load_again(norm + column);
    }
    __syncwarp();
#endif
    wait_for_previous();

    const u16* own_token = x + (long long)min(group, num_tokens - 1) * x_stride + first_column;
    Four next = load_again(own_token);
    float added[OUTPUTS]; // loaded early: at the end all threads would wait for it
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int place = threadIdx.x + i * THREADS, row = first_row + place % ROWS,
                  token = place / ROWS;
        added[i] = 0.0f;
        if (row < N && token < num_tokens) {
#if HAS_BIAS
            added[i] += low(bias[row]);
#endif
#if HAS_RESIDUAL
            added[i] += low(residual[(long long)token * residual_stride + row]);
#endif
        }
    }

    float sums[ROW_TILES][4] = {};
#if HAS_NORM
    __shared__ float square_sums[WARPS][TOKENS];
    float squares = 0.0f;
#endif
#if IS_RMS_FIRST
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        squares = add_squares(squares, load_again(own_token + step * STEP_COLUMNS));
    share_squares(square_sums, squares, warp, lane);
    __syncthreads();
    const float own_inverse_rms = inverse_rms(square_sums, group, eps);
#endif
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        Four token = next;
        if (step + 1 < STEPS) next = load_again(own_token + (step + 1) * STEP_COLUMNS);
#if HAS_NORM
        const float* scale = norms + first_column + step * STEP_COLUMNS;
#if !IS_RMS_FIRST
        squares = add_squares(squares, token);
        const float own_inverse_rms = 1.0f;
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i)
            token.part[i] = pack(low(token.part[i]) * own_inverse_rms * scale[2 * i],
                                 high(token.part[i]) * own_inverse_rms * scale[2 * i + 1]);
#endif
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const Four upper = held[step % HELD_STEPS][tile][0],
                       lower = held[step % HELD_STEPS][tile][1];
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                multiply(sums[tile], upper.part[i], lower.part[i], upper.part[i + 1],
                         lower.part[i + 1], token.part[i], token.part[i + 1]);
            if (step + HELD_STEPS < STEPS)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    held[step % HELD_STEPS][tile][half] =
                        load_once(own_rows[tile][half] + (step + HELD_STEPS) * STEP_COLUMNS);
        }
    }

    __shared__ float row_sums[WARPS][TOKENS][ROWS + 1];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            row_sums[warp][2 * quarter + i % 2][16 * tile + group + 8 * (i / 2)] = sums[tile][i];
#if HAS_NORM && !IS_RMS_FIRST
    share_squares(square_sums, squares, warp, lane);
#endif
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int place = threadIdx.x + i * THREADS, row = place % ROWS, token = place / ROWS;
        if (token >= num_tokens || first_row + row >= N) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += row_sums[w][token][row];
#if HAS_NORM && !IS_RMS_FIRST
        sum *= inverse_rms(square_sums, token, eps);
#endif
        sum += added[i];
        const long long stored = (long long)token * N + first_row + row;
#if IS_OUT_FLOAT
        ((float*)out)[stored] = sum;
#else
        ((u16*)out)[stored] = (u16)pack(sum, 0.0f);
#endif
    }
}
