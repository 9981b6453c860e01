// Tokens as the kernels of quantized rows read them: normed or activated, and rounded to 16-bit
// integers with one scale per block of 128 columns.

#pragma once

#include "packed_rows.hpp"

namespace {

// e^x, to 2 units in the last place within float32's range. Its loop vectorizes.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;   // the nearest integer
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f; // ln 2 in two parts
    float p = 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    int32_t bits = (int32_t(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

// Preparation of a token before its GEMM: none, an RMS norm, or silu(gate) * up of its two halves.
struct Before {
    const float* norm;
    float eps;
    bool is_swiglu;

    long inputs(long K) const { return is_swiglu ? 2 * K : K; }
    void apply(const float* __restrict x, long K, float* __restrict out) const {
        if (is_swiglu) {
            for (long i = 0; i < K; i++) out[i] = x[i] / (1.0f + exponential(-x[i])) * x[K + i];
        } else if (norm) {
            float lanes[LANES] = {}, sum = 0;
            for (long i = 0; i < K; i++) lanes[i % LANES] += x[i] * x[i];
            for (float lane : lanes) sum += lane;
            float scale = 1.0f / std::sqrt(sum / K + eps);
            for (long i = 0; i < K; i++) out[i] = x[i] * scale * norm[i];
        } else
            std::copy(x, x + K, out);
    }
};

// Where a GEMM's sums go, and what is added to them: a bias [N] and a residual [T, stride], or
// null.
struct After {
    const float *bias, *residual;
    float* out; // [T, stride]
    long stride;

    void store(long t, long n, float sum) const {
        long at = t * stride + n;
        sum += bias ? bias[n] : 0.0f;
        out[at] = sum + (residual ? residual[at] : 0.0f);
    }
};

// The integers of a block of a token, and their scale. Integer loops, which vectorize: their sums
// have no order.
inline float round_block(const float* own, int32_t* values) {
    int32_t bits[BLOCK], largest_bits = 0;
    std::memcpy(bits, own, sizeof bits);
    for (int i = 0; i < BLOCK; i++) largest_bits = std::max(largest_bits, bits[i] & 0x7fffffff);
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    float inverse = largest > 0 ? 32512 / largest : 0, shifted[BLOCK];
    for (int i = 0; i < BLOCK; i++) shifted[i] = own[i] * inverse + 12582912.0f;
    std::memcpy(values, shifted, BLOCK * sizeof *values); // the last bits are the nearest integer
    for (int i = 0; i < BLOCK; i++) values[i] -= 0x4b400000;
    return largest / 32512;
}

template <typename Number> inline void add_units(const Number* values, Number* sums) {
    for (int u = 0; u < UNITS; u++) {
        sums[u] = 0;
        for (int i = 0; i < UNIT; i++) sums[u] += values[u * UNIT + i];
    }
}

// For a kernel whose lanes are columns: even columns of a block, then odd ones.
struct Inputs {
    Array<s8> high, low; // [T, blocks, 2, 64]  bytes of integers
    Array<float> scales; // [T, blocks]
    Array<float> wide;   // [T, blocks, 2, 4, 16]  for FP8, by lane
    Array<float> sums;   // [T, stride]  of rounded inputs, by unit

    Inputs(const float* x, const Before& before, long T, long K, long blocks, long stride) {
        long padded = blocks * BLOCK;
        if (IS_FP8)
            wide.resize(T * padded);
        else
            high.resize(T * padded), low.resize(T * padded), scales.resize(T * blocks);
        sums.resize(T * stride);
#pragma omp parallel for if (T > 1)
        for (long t = 0; t < T; t++) {
            thread_local Array<float> row;
            row.assign(padded, 0.0f);
            before.apply(x + t * before.inputs(K), K, row.data());
            for (long block = 0; block < blocks; block++) {
                float *own = row.data() + block * BLOCK, *out = &sums[t * stride + block * UNITS];
                long at = t * padded + block * BLOCK;
                if (IS_FP8) {
                    spread_lanes(own, wide.data() + at);
                    add_units(own, out);
                } else
                    round(own, at, scales[t * blocks + block], out);
            }
        }
    }
    static void spread_lanes(const float* own, float* out) {
        for (int odd = 0; odd < 2; odd++)
            for (int byte = 0; byte < 4; byte++)
                for (int lane = 0; lane < LANES; lane++) *out++ = own[8 * lane + 2 * byte + odd];
    }
    void round(const float* own, long at, float& scale, float* sums_of_units) {
        int32_t values[BLOCK], sums[UNITS];
        scale = round_block(own, values);
        for (int odd = 0; odd < 2; odd++)
            for (int i = 0; i < HALF; i++) {
                int value = values[2 * i + odd], upper = (value + 128) >> 8;
                high[at + odd * HALF + i] = s8(upper);
                low[at + odd * HALF + i] = s8(value - 256 * upper);
            }
        add_units(values, sums);
        for (int u = 0; u < UNITS; u++) sums_of_units[u] = float(sums[u]) * scale;
    }
};

constexpr int WORDS = IS_FP8 ? BLOCK : BLOCK / 2; // per block, of four bytes

// For a kernel whose lanes are rows: a word is a float32 column for FP8, and otherwise two 16-bit
// columns that lie 4 columns apart.
struct Words {
    Array<int32_t> words;  // [blocks, T, WORDS]
    Array<float> scales;   // [blocks, T]
    Array<int32_t> starts; // [blocks, T, UNITS]  what the codes' bias adds to sums
    Array<float> sums;     // [blocks, T, UNITS]  of words

    Words(const float* x, const Before& before, long T, long K, long blocks, int bias)
        : words(blocks * T * WORDS), scales(blocks * T), starts(blocks * T * UNITS),
          sums(blocks * T * UNITS) {
#pragma omp parallel for
        for (long t = 0; t < T; t++) {
            thread_local Array<float> row;
            row.assign(blocks * BLOCK, 0.0f);
            before.apply(x + t * before.inputs(K), K, row.data());
            for (long block = 0; block < blocks; block++) {
                long at = block * T + t;
                const float* own = row.data() + block * BLOCK;
                if (IS_FP8)
                    keep(own, at);
                else
                    round(own, at, bias);
            }
        }
    }
    void keep(const float* own, long at) {
        static const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
        scales[at] = 1;
        add_units(own, &sums[at * UNITS]);
        for (int i = 0; i < BLOCK; i++)
            std::memcpy(&words[at * WORDS + i], own + i / 8 * 8 + order[i % 8], sizeof(float));
    }
    void round(const float* own, long at, int bias) {
        static const int order[8] = {0, 4, 2, 6, 1, 5, 3, 7};
        int32_t values[BLOCK], of_units[UNITS];
        scales[at] = round_block(own, values);
        add_units(values, of_units);
        for (int u = 0; u < UNITS; u++) {
            starts[at * UNITS + u] = -bias * of_units[u];
            sums[at * UNITS + u] = float(of_units[u]);
        }
        int16_t pairs[BLOCK];
        for (int i = 0; i < BLOCK; i++) pairs[i] = int16_t(values[i / 8 * 8 + order[i % 8]]);
        std::memcpy(&words[at * WORDS], pairs, sizeof pairs);
    }
};

} // namespace
