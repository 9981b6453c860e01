// Quantized experts of prompts: the tiles of pairs (a token with one of its experts) that an
// earlier kernel listed, two launches for each layer. Routes nothing and weighs nothing.
//
//   IS_DOWN 0: x [T, H] -> out [pairs by expert, I], silu(gate) * up. The first half of a block's
//              row tiles are gates, the second half the ups of the same columns.
//   IS_DOWN 1: x [pairs by expert, I] -> out [T * SLOTS, H], one output per pair
//
// Block (n, i) computes row block n of the expert of tile i, for up to TOKENS pairs. Codes are
// dequantized in registers (`quantized_stages.cu`); an expert of many pairs has several tiles,
// which are adjacent, so that its codes are read from memory once.
//
// Compile-time constants, besides those of `quantized_stages.cu`: IS_DOWN, NUM_TILES (of rows, per
// expert), NUM_EXPERTS, SLOTS (experts of a token, with the shared one), HAS_SHARED.

#define HAS_EMPTY_TILES 1
#include "quantized_stages.cu"

static_assert(TOKEN_WARPS == 1, "few pairs fill the first tiles of tokens alone");
static_assert(CLUSTER == 1 && TILES % 2 == 0, "a block has gates and their ups");

constexpr int OUT_ROWS = IS_DOWN ? ROWS : ROWS / 2; // columns of `out` per block
constexpr int WIDTH = NUM_TILES * (IS_DOWN ? 16 : 8);

// Four adjacent rows of a token, added up over the warps that split K.
__device__ __forceinline__ void whole_sums(float (&sums)[4], const float* shared, int token,
                                           int row) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = 0.0f;
#pragma unroll
    for (int part = 0; part < COLUMN_WARPS; ++part) {
        const Four own = *(const Four*)(shared + (part * TOKENS + token) * SUM_STRIDE + row);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] += __uint_as_float(own.part[j]);
    }
}

// The list is complete before the kernel of gates starts, and that kernel lets this one of the down
// projection start after its own wait: the latter reads the list, and codes, before its wait.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantized_experts(const u16* x, const int* order, const int* tiles, const u8* codes,
                      const u8* records, const u8* shared_codes, const u8* shared_records,
                      u16* out) {
    if (!IS_DOWN) wait_for_previous();
    let_next_start();
    const int* tile = tiles + 4 * blockIdx.y;
    const int expert = load_fresh(tile), first_pair = load_fresh(tile + 2),
              num_pairs = load_fresh(tile + 3);
    const int* own_order = order + load_fresh(tile + 1);
    if (num_pairs == 0) {
        if (IS_DOWN) wait_for_previous();
        return;
    }
    const bool is_shared = HAS_SHARED && expert == NUM_EXPERTS;
    const long long first_tile = is_shared ? 0 : (long long)expert * NUM_TILES;
    const auto row_tile = [&](int i) {
        constexpr int PARTS = IS_DOWN ? 1 : 2, OWN = TILES / PARTS, ALL = NUM_TILES / PARTS;
        int tile = blockIdx.x * OWN + i % OWN; // of the gates, or of the ups
        if (ALL % OWN != 0) tile = min(tile, ALL - 1);
        return first_tile + i / OWN * ALL + tile;
    };
    int rows[TOKEN_PASSES]; // of x, which the thread copies
#pragma unroll
    for (int pass = 0; pass < TOKEN_PASSES; ++pass) {
        const int i = min(copied_token(pass), num_pairs - 1);
        rows[pass] = IS_DOWN ? first_pair + i : (int)load_fresh(own_order + i) / SLOTS;
    }
    const auto token = [&](int pass, int) { return x + (long long)rows[pass] * COLUMNS; };
    const Operands operands{is_shared ? shared_codes : codes, is_shared ? shared_records : records,
                            row_tile, token, num_pairs};
    operands.start_codes(0);
    if (IS_DOWN) wait_for_previous();
    operands.start_tokens(0);
    Sums sums;
    clear(sums);
    multiply_all(sums, operands, 0, STEPS, (num_pairs + 7) / 8);
    const float* shared = share_sums(sums);
    __syncthreads();
    for (int i = threadIdx.x; i < num_pairs * (OUT_ROWS / 4); i += THREADS) {
        const int own = i / (OUT_ROWS / 4), row = i % (OUT_ROWS / 4) * 4;
        const int column = blockIdx.x * OUT_ROWS + row;
        if (WIDTH % OUT_ROWS != 0 && column >= WIDTH) continue;
        float values[4];
        whole_sums(values, shared, own, row);
        if (!IS_DOWN) {
            float ups[4];
            whole_sums(ups, shared, own, OUT_ROWS + row);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[j] = silu(values[j]) * ups[j];
        }
        const long long target = IS_DOWN ? (int)load_fresh(own_order + own) : first_pair + own;
        store_four(out, target * WIDTH + column, values);
    }
}
