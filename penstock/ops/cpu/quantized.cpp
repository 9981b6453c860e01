// GEMMs with quantized rows: out[t, n] = sum over k of x[t, k] * weight[n, k], with fused
// operations: norm or activation before, bias and residual after. Here those of a few tokens;
// quantized_tiles.hpp has those of many.
//
// The layout is that of ops/quantized.py: the codes of a block's even columns are 64 bytes, and so
// are those of its odd columns. Inputs become 16-bit integers with one scale per block, in two
// bytes that are multiplied with the codes separately: the products are exact, and only the inputs
// are rounded, to 1 / 65024 of their block's range. Eight columns of a lane share a scale, so a
// block is scaled once. Offsets of a group are multiplied with the sum of its inputs. FP8 codes are
// multiplied as float32. A row is read once for all tokens and is prefetched far ahead, as in
// skinny_gemm.cpp. Sums have a fixed order, so a token's result does not depend on the others.
//
// Compile-time constants, one set per format: BITS of a code, UNIT columns that share a scale (16,
// 32, 64 or 128), HAS_TABLE if codes map to other bytes, IS_FP8.

#include "packed_rows.hpp"
#include "quantized_tokens.hpp"
#include "quantized_tiles.hpp"

namespace {

constexpr int TOKENS = 4, ROWS = 2;
constexpr int AHEAD = 9216;   // bytes to prefetch into L1
constexpr long PREPARED = 16; // rows whose scales are expanded at a time

// The parameters of some rows' codes: a code is (value + bias) / unit.
struct Sides {
    const float *scales, *offsets; // offsets: or null
    float bias, unit;

    Sides from(long row) const {
        return {scales + row, offsets ? offsets + row : nullptr, bias, unit};
    }

    // Bias and offsets enter a row's sums through the sums of the inputs, lane by lane.
    void add(Floats& lanes, long row, const float* sums_of_x, long count) const {
        if (bias != 0)
            for (long i = 0; i < count; i += LANES)
                lanes = fma(mul(load(scales + row + i), all(-bias)), load(sums_of_x + i), lanes);
        if (unit != 1) lanes = mul(lanes, all(unit));
        if (offsets)
            for (long i = 0; i < count; i += LANES)
                lanes = fma(load(offsets + row + i), load(sums_of_x + i), lanes);
    }
};

// Adds the products of one block of one row to the lanes of each token.
template <int tokens>
inline void add_block(const Weight& w, Bytes table, const Inputs& x, long token, long row,
                      long step, int part, const float* scales, Floats* lanes) {
    long block = step + part;
    Bytes even = w.rows.codes(row, step, part, 0), odd = w.rows.codes(row, step, part, 1);
    if (HAS_TABLE) even = look_up(table, even), odd = look_up(table, odd);
    Floats scale = spread(scales + block * UNITS), values[IS_FP8 ? 8 : 1];
    if constexpr (IS_FP8)
        for (int i = 0; i < 8; i++) values[i] = widen_fp8(i < 4 ? even : odd, i % 4);
    for (int t = 0; t < tokens; t++) {
        long at = (token + t) * w.blocks + block;
        if constexpr (IS_FP8) {
            Floats sum = zero();
            for (int i = 0; i < 8; i++)
                sum = fma(values[i], load(x.wide.data() + at * BLOCK + i * LANES), sum);
            lanes[t] = fma(sum, scale, lanes[t]);
        } else {
            const s8 *high = x.high.data() + at * BLOCK, *low = x.low.data() + at * BLOCK;
            Bytes upper = dot(dot(nothing(), even, load_bytes(high)), odd, load_bytes(high + HALF));
            Bytes lower =
                dot(dot(left(upper, 8), even, load_bytes(low)), odd, load_bytes(low + HALF));
            lanes[t] = fma(convert(lower), mul(scale, all(x.scales[at])), lanes[t]);
        }
    }
}

template <int rows, int tokens>
void multiply(const Weight& w, Bytes table, const Inputs& x, long token, long first,
              const Sides& sides, float* sums) {
    Floats lanes[rows][tokens];
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) lanes[n][t] = zero();
    for (long step = 0; step < w.blocks; step += STEP)
#pragma GCC unroll 4
        for (int part = 0; part < STEP; part++) {
            if (STEP > 1 && step + part >= w.blocks) break;
            for (int n = 0; n < rows; n++) {
                __builtin_prefetch(w.rows.low + (first + n) * w.rows.low_bytes +
                                       (step + part) * BLOCK * LOW / 8 + AHEAD,
                                   0, 0);
                if (HIGH && part == 0)
                    __builtin_prefetch(w.rows.high + (first + n) * w.rows.high_bytes +
                                           step * BLOCK * HIGH / 8 + AHEAD,
                                       0, 0);
                add_block<tokens>(w, table, x, token, first + n, step, part,
                                  sides.scales + n * w.stride(), lanes[n]);
            }
        }
    for (int n = 0; n < rows; n++)
        for (int t = 0; t < tokens; t++) {
            sides.add(lanes[n][t], n * w.stride(), x.sums.data() + (token + t) * w.stride(),
                      w.stride());
            sums[t * ROWS + n] = total(lanes[n][t]);
        }
}

// Makes the two counts constants, so that all sums stay in registers.
template <int rows, int tokens = TOKENS, typename... Given>
void multiply_some(long num_tokens, const Given&... given) {
    if (num_tokens == tokens) return multiply<rows, tokens>(given...);
    if constexpr (tokens > 1) multiply_some<rows, tokens - 1>(num_tokens, given...);
}

// Blocks of rows, each with all tokens of its group.
void multiply_rows(const Weight& w, Bytes table, int bias, float unit, const Inputs& inputs,
                   const After& after, const std::vector<Group>& groups, long N) {
    bool has_offsets = w.offsets.type != NONE;
    long num_blocks = (N + PREPARED - 1) / PREPARED, stride = w.stride();
    long num_all = num_blocks * long(groups.size());
    long taken = share_of(num_all);
#pragma omp parallel
    {
        // spread() reads past the end
        std::vector<float> scales(PREPARED * stride + LANES),
            offsets(has_offsets ? PREPARED * stride : 0);
        Sides sides = {scales.data(), has_offsets ? offsets.data() : nullptr, float(bias), unit};
#pragma omp for schedule(dynamic, taken)
        for (long i = 0; i < num_all; i++) {
            const Group& group = groups[i / num_blocks];
            long begin = i % num_blocks * PREPARED, count = std::min(PREPARED, N - begin);
            long row = group.row + begin, ahead = std::min(PREPARED, N - begin - count);
            w.prefetch_numbers(row + count, ahead);
            w.prepare(row, count, scales.data(), has_offsets ? offsets.data() : nullptr);
            for (long t = 0; t < group.num_tokens; t += TOKENS) {
                long num_tokens = std::min<long>(TOKENS, group.num_tokens - t);
                long token = group.token + t;
                for (long n = 0; n < count; n += ROWS) {
                    long num_rows = std::min<long>(ROWS, count - n);
                    float sums[TOKENS * ROWS];
                    Sides own = sides.from(n * stride);
                    if (num_rows == ROWS)
                        multiply_some<ROWS>(num_tokens, w, table, inputs, token, row + n, own,
                                            (float*)sums);
                    else // one row is left
                        multiply_some<1>(num_tokens, w, table, inputs, token, row + n, own,
                                         (float*)sums);
                    for (long i = 0; i < num_tokens; i++)
                        for (long j = 0; j < num_rows; j++)
                            after.store(token + i, begin + n + j, sums[i * ROWS + j]);
                }
            }
        }
    }
}

} // namespace

// Matrices [N, K] of a stack, and for each the number of its tokens, in their order; x [T, K], or
// [T, 2K] of swiglu; out and residual [T, stride]. Offsets may be of type NONE. A code, or the byte
// that the table has for it, is value / unit + bias_of_codes. Norm, bias and residual may be null.
// `by_tile`: for many tokens, with sums in another order.
extern "C" void multiply_quantized(const u8* low, const u8* high, const void* scale, int scale_type,
                                   const void* scale_coarse, int scale_coarse_type,
                                   int scale_repeat, const void* offset, int offset_type,
                                   const void* offset_coarse, int offset_coarse_type,
                                   int offset_repeat, int are_zeros, long group, long K,
                                   const u8* bytes, int bias_of_codes, float unit, const float* x,
                                   const float* norm, float eps, int is_swiglu, const float* bias,
                                   const float* residual, float* out, const int32_t* matrices,
                                   const int32_t* counts, long num_matrices, long N, long stride,
                                   int by_tile) {
    long blocks = (K + BLOCK - 1) / BLOCK;
    Rows rows = {low, high, bytes_of(blocks, LOW), HIGH ? bytes_of(blocks, HIGH) : 0};
    Numbers scales = {scale, scale_coarse, scale_type, scale_coarse_type, scale_repeat};
    Numbers offsets = {offset, offset_coarse, offset_type, offset_coarse_type, offset_repeat};
    Weight w = {rows, scales, offsets, bool(are_zeros), group, K, (K + group - 1) / group, blocks};
    Before before = {norm, eps, bool(is_swiglu)};
    After after = {bias, residual, out, stride};
    std::vector<Group> groups;
    long T = 0;
    for (long i = 0; i < num_matrices; T += counts[i++])
        groups.push_back({matrices[i] * N, T, counts[i]});
    u8 no_table[16] = {};
    Bytes table = load_table(bytes ? bytes : no_table);
    if (by_tile) {
        Words words(x, before, T, K, blocks, bias_of_codes);
        multiply_tiles(w, table, unit, words, after, groups, T, N);
    } else {
        Inputs inputs(x, before, T, K, blocks, w.stride());
        multiply_rows(w, table, bias_of_codes, unit, inputs, after, groups, N);
    }
}
