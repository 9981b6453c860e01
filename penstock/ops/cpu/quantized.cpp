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

constexpr int TOKENS = 4;
constexpr int AHEAD = 9216;       // bytes to prefetch into L1
constexpr long MOST_SCALES = 512; // expanded at a time, while no codes are read; L1 keeps them

// The parameters of some rows' codes: a code is (value + bias) / unit.
struct Sides {
    const float *scales, *offsets; // offsets: or null
    float bias, unit;

    Sides from(long row) const {
        return {scales + row, offsets ? offsets + row : nullptr, bias, unit};
    }

    // Where a row's sums over lanes start, in units: bias and offsets are multiplied with the sums
    // of the inputs. At the end of a row they would wait for its last product.
    Floats start(const float* sums_of_x, long count) const {
        Floats lanes = zero();
        if (offsets) {
            for (long i = 0; i < count; i += LANES)
                lanes = fma(load(offsets + i), load(sums_of_x + i), lanes);
            if (unit != 1) lanes = mul(lanes, all(1 / unit));
        }
        if (bias != 0)
            for (long i = 0; i < count; i += LANES)
                lanes = fma(mul(load(scales + i), all(-bias)), load(sums_of_x + i), lanes);
        return lanes;
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

// A row times some tokens, up to the sum over lanes. One row at a time: with two, memory is read a
// quarter slower.
template <int tokens>
void multiply(const Weight& w, Bytes table, const Inputs& x, long token, long row,
              const Sides& sides, Floats* out) { // [tokens, LANES], of which it writes the first
    Floats lanes[tokens];
    for (int t = 0; t < tokens; t++)
        lanes[t] = sides.start(x.sums.data() + (token + t) * w.stride(), w.stride());
    const u8* low = w.rows.low + row * w.rows.low_bytes + AHEAD;
    const u8* high = HIGH ? w.rows.high + row * w.rows.high_bytes + AHEAD : nullptr;
    for (long step = 0; step < w.blocks; step += STEP) {
        if (HIGH) __builtin_prefetch(high + step * BLOCK * HIGH / 8, 0, 0);
#pragma GCC unroll 4
        for (int part = 0; part < STEP; part++) {
            if (STEP > 1 && step + part >= w.blocks) break;
            __builtin_prefetch(low + (step + part) * BLOCK * LOW / 8, 0, 0);
            add_block<tokens>(w, table, x, token, row, step, part, sides.scales, lanes);
        }
    }
    for (int t = 0; t < tokens; t++) out[t * LANES] = lanes[t];
}

// Up to LANES rows times some tokens; row `first` of the stack is row n of its matrix.
template <int tokens>
void multiply_chunk(const Weight& w, Bytes table, const Inputs& x, long token, long first, long n,
                    long count, const Sides& sides, const After& after) {
    Floats lanes[tokens][LANES];
    for (long i = 0; i < count; i++)
        multiply<tokens>(w, table, x, token, first + i, sides.from(i * w.stride()), &lanes[0][i]);
    for (int t = 0; t < tokens; t++) {
        for (long rest = count; rest < LANES; rest++) lanes[t][rest] = zero();
        float sums[LANES];
        store(sums, mul(totals(lanes[t]), all(sides.unit)));
        for (long i = 0; i < count; i++) after.store(token + t, n + i, sums[i]);
    }
}

// Makes the count a constant, so that all sums stay in registers.
template <int tokens = TOKENS, typename... Given>
void multiply_chunk_by(long num_tokens, const Given&... given) {
    if (num_tokens == tokens) return multiply_chunk<tokens>(given...);
    if constexpr (tokens > 1) multiply_chunk_by<tokens - 1>(num_tokens, given...);
}

// Chunks of rows, each with all tokens of its group.
void multiply_rows(const Weight& w, Bytes table, int bias, float unit, const Inputs& inputs,
                   const After& after, const std::vector<Group>& groups, long N) {
    bool has_offsets = w.offsets.type != NONE;
    long stride = w.stride(), chunk = std::clamp(MOST_SCALES / stride, 1l, long(LANES));
    long num_chunks = (N + chunk - 1) / chunk, num_all = num_chunks * long(groups.size());
    long taken = share_of(num_all);
#pragma omp parallel
    {
        Array<float> scales(chunk * stride), offsets(has_offsets ? chunk * stride : 0);
        Sides sides = {scales.data(), has_offsets ? offsets.data() : nullptr, float(bias), unit};
#pragma omp for schedule(dynamic, taken)
        for (long i = 0; i < num_all; i++) {
            const Group& group = groups[i / num_chunks];
            long n = i % num_chunks * chunk, count = std::min(chunk, N - n);
            long row = group.row + n, ahead = std::min(chunk, N - n - count);
            w.prefetch_numbers(row + count, ahead);
            w.prepare(row, count, scales.data(), has_offsets ? offsets.data() : nullptr);
            for (long t = 0; t < group.num_tokens; t += TOKENS)
                multiply_chunk_by(std::min<long>(TOKENS, group.num_tokens - t), w, table, inputs,
                                  group.token + t, row, n, count, sides, after);
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
