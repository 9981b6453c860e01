// Sixteen numbers at a time, and functions of them that the kernels of this folder share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(64)));

inline Lanes load(const float* p) {
    Lanes own;
    std::memcpy(&own, p, sizeof own);
    return own;
}
// Of bf16, whose bits are the upper half of a float's.
inline Lanes load(const uint16_t* p) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    typedef uint32_t Bits __attribute__((vector_size(64)));
    Halves own;
    std::memcpy(&own, p, sizeof own);
    return (Lanes)(__builtin_convertvector(own, Bits) << 16);
}
inline void store(float* p, Lanes own) { std::memcpy(p, &own, sizeof own); }
inline float total(Lanes own) {
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    Half halves[2];
    std::memcpy(halves, &own, sizeof halves);
    Half half = halves[0] + halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, &half, sizeof quarters);
    Quarter quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

inline float bits_as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// e^x for x <= 0, to 2 units in the last place; below 2^-126 it is zero. A loop of it is vectors.
inline float exponential(float x) {
    float y = x * 1.44269504f, whole = (y + 12582912.0f) - 12582912.0f; // the nearest integer
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;      // ln 2 in two parts
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float power = bits_as_float((int32_t(std::max(whole, -126.0f)) + 127) << 23);
    return whole < -126.0f ? 0.0f : p * power;
}

inline float sigmoid(float x) {
    float small = exponential(-std::fabs(x));
    return (x < 0 ? small : 1.0f) / (1.0f + small);
}

inline float silu(float x) { return x * sigmoid(x); }

// 1 / sqrt(mean of squares + eps); `count` is a multiple of LANES.
inline float inverse_rms(const float* x, long count, float eps) {
    Lanes sums = {};
    for (long i = 0; i < count; i += LANES) sums += load(x + i) * load(x + i);
    return 1.0f / std::sqrt(total(sums) / count + eps);
}

} // namespace
