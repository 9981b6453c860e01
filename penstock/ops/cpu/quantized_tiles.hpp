// GEMM of many tokens with quantized rows. A block of some rows is widened, with a row in each
// lane: to 16-bit codes, two columns of a row in a lane, or to float32 for FP8. It stays in L1
// while all tokens are multiplied with it.
//
// Products of codes and their sums over UNIT columns are exact integers, with the codes' bias;
// their scales and offsets are applied once per UNIT columns, a token's own scale once per block.

#pragma once

#include "quantized_tokens.hpp"

namespace {

#ifdef __AVX512BW__
constexpr int PANELS = 2, TILE_TOKENS = 6; // as many sums as registers hold
#else
constexpr int PANELS = 1, TILE_TOKENS = IS_FP8 ? 6 : 3;
#endif
constexpr int TILE = PANELS * LANES;
constexpr long MOST_SUMMED = 252; // tokens whose sums stay in L1
constexpr long LEAST_SUMMED = 48; // for which widening a tile is worthwhile

using Values = std::conditional_t<IS_FP8, Floats, Bytes>;

inline Bytes multiply_add(Bytes sums, Bytes codes, Bytes x) { return dot_pairs(sums, codes, x); }
inline Floats multiply_add(Floats sums, Floats values, Bytes x) {
    return fma(values, as_floats(x), sums);
}
inline void start_at(Bytes& sums, int32_t start) { sums = each(start); }
inline void start_at(Floats& sums, int32_t) { sums = zero(); }
inline Floats convert(Floats sums) { return sums; }

// One block of TILE rows, ready to be multiplied.
struct Tile {
    alignas(64) Values values[PANELS][WORDS]; // columns in the order of Words

    void widen(const Weight& w, Bytes table, long first, long last, long block) {
        const Rows& rows = w.rows;
        int part = int(block % STEP);
        for (int p = 0; p < PANELS; p++, first += LANES) {
            Bytes low[LANES], high[LANES];
            if (HIGH) turn<MORE>(rows.high, rows.high_bytes, first, last, block, 0, high);
            for (int odd = 0; odd < 2; odd++) {
                if (LOW == 8 || !odd)
                    turn<LOW>(rows.low, rows.low_bytes, first, last, block, odd, low);
                for (int i = 0; i < LANES; i++) {
                    Bytes codes = Rows::join(low[i], HIGH ? high[i] : low[i], part, odd);
                    if (HAS_TABLE) codes = look_up(table, codes);
                    widen_codes(codes, &values[p][(2 * i + odd) * WORDS / (2 * LANES)]);
                }
            }
        }
    }
    static void widen_codes(Bytes codes, Bytes* out) {
        out[0] = mask(codes, 0x00ff00ff);
        out[1] = mask(right(codes, 8), 0x00ff00ff);
    }
    static void widen_codes(Bytes codes, Floats* out) {
        for (int byte = 0; byte < 4; byte++) out[byte] = widen_fp8(codes, byte);
    }
    // Bytes of a plane: four bytes of every row in a vector, instead of a row's.
    template <int bits>
    static void turn(const u8* plane, long bytes, long first, long last, long block, int odd,
                     Bytes* own) {
        for (int n = 0; n < LANES; n++) {
            const u8* at = plane + std::min(first + n, last) * bytes + place_of<bits>(block, odd);
            own[n] = load_bytes(at);
            __builtin_prefetch(at + TILE * bytes, 0, 2); // of the next tile
        }
        transpose(own);
    }
};

// A row's numbers are contiguous; here those of a unit are. [units, TILE]
struct ByUnit {
    Array<float> rows, units;

    ByUnit(long stride) : rows(TILE * stride), units(TILE * stride) {}
    void turn(long stride, float factor) {
        for (int p = 0; p < PANELS; p++)
            for (long u = 0; u < stride; u += LANES) {
                Bytes own[LANES];
                for (int n = 0; n < LANES; n++)
                    own[n] = load_bytes(&rows[(p * LANES + n) * stride + u]);
                transpose(own);
                for (int i = 0; i < LANES; i++)
                    store(&units[(u + i) * TILE + p * LANES], mul(as_floats(own[i]), all(factor)));
            }
    }
};

// Adds the products of a tile's block and some tokens to sums [tokens, TILE].
template <int tokens>
void multiply_tile(const Tile& tile, const float* scales, const float* offsets, const Words& x,
                   long at, float* sums) {
    const int32_t* words = x.words.data() + at * WORDS;
    const int32_t* starts = x.starts.data() + at * UNITS;
    const float* sums_of_x = x.sums.data() + at * UNITS;
    Floats total[PANELS][tokens];
    for (int p = 0; p < PANELS; p++)
        for (int t = 0; t < tokens; t++) total[p][t] = zero();
    for (int u = 0; u < UNITS; u++) {
        Values own[PANELS][tokens];
        for (int t = 0; t < tokens; t++)
            for (int p = 0; p < PANELS; p++) start_at(own[p][t], starts[t * UNITS + u]);
#pragma GCC unroll 4
        for (int i = u * WORDS / UNITS; i < (u + 1) * WORDS / UNITS; i++)
            for (int t = 0; t < tokens; t++) {
                Bytes word = each(words[t * WORDS + i]);
                for (int p = 0; p < PANELS; p++)
                    own[p][t] = multiply_add(own[p][t], tile.values[p][i], word);
            }
        for (int p = 0; p < PANELS; p++) {
            Floats scale = load(scales + u * TILE + p * LANES);
            for (int t = 0; t < tokens; t++)
                total[p][t] = fma(convert(own[p][t]), scale, total[p][t]);
            if (!offsets) continue;
            Floats offset = load(offsets + u * TILE + p * LANES);
            for (int t = 0; t < tokens; t++)
                total[p][t] = fma(all(sums_of_x[t * UNITS + u]), offset, total[p][t]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int p = 0; p < PANELS; p++) {
            float* out = sums + t * TILE + p * LANES;
            store(out, fma(total[p][t], all(x.scales[at + t]), load(out)));
        }
}

// Makes the count a constant, so that all sums stay in registers.
template <int tokens = TILE_TOKENS, typename... Given>
void multiply_tile_by(long num_tokens, const Given&... given) {
    if (num_tokens == tokens) return multiply_tile<tokens>(given...);
    if constexpr (tokens > 1) multiply_tile_by<tokens - 1>(num_tokens, given...);
}

// Tiles of rows, each with some tokens of its group.
inline void multiply_tiles(const Weight& w, Bytes table, float unit, const Words& x,
                           const After& after, const std::vector<Group>& groups, long T, long N) {
    long num_tiles = (N + TILE - 1) / TILE, stride = w.stride();
    long piece = std::clamp(share_of(T * num_tiles), LEAST_SUMMED, MOST_SUMMED);
    std::vector<Group> pieces; // of about equal size
    for (const Group& group : groups) {
        long count = (group.num_tokens + piece - 1) / piece * TILE_TOKENS;
        long size = (group.num_tokens + count - 1) / count * TILE_TOKENS;
        for (long t = 0; t < group.num_tokens; t += size)
            pieces.push_back({group.row, group.token + t, std::min(size, group.num_tokens - t)});
    }
    long num_pieces = pieces.size(), num_all = num_tiles * num_pieces;
    long taken = share_of(num_all);
    bool has_offsets = w.offsets.type != NONE;
#pragma omp parallel
    {
        Tile tile;
        ByUnit scales(stride), offsets(has_offsets ? stride : 0);
        Array<float> sums((piece + TILE_TOKENS) * TILE);
#pragma omp for schedule(dynamic, taken)
        for (long i = 0; i < num_all; i++) {
            const Group& group = pieces[i / num_tiles];
            long begin = i % num_tiles * TILE, count = std::min<long>(TILE, N - begin);
            long row = group.row + begin, ahead = std::min<long>(TILE, N - begin - count);
            w.prefetch_numbers(row + count, ahead);
            w.prepare(row, count, scales.rows.data(), has_offsets ? offsets.rows.data() : nullptr);
            scales.turn(stride, unit);
            if (has_offsets) offsets.turn(stride, 1);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (long block = 0; block < w.blocks; block++) {
                tile.widen(w, table, row, row + count - 1, block);
                const float* own = &scales.units[block * UNITS * TILE];
                const float* offset = has_offsets ? &offsets.units[block * UNITS * TILE] : nullptr;
                for (long t = 0; t < group.num_tokens; t += TILE_TOKENS)
                    multiply_tile_by(std::min<long>(TILE_TOKENS, group.num_tokens - t), tile, own,
                                     offset, x, block * T + group.token + t, &sums[t * TILE]);
            }
            for (long t = 0; t < group.num_tokens; t++)
                for (long n = 0; n < count; n++)
                    after.store(group.token + t, begin + n, sums[t * TILE + n]);
        }
    }
}

} // namespace
