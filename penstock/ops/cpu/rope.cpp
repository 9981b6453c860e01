// What comes before attention, for any number of tokens: head norms, rope, and storing keys and
// values. In float32, and heads are whole vectors. Compiled without fused multiply-adds but those
// named here: a prompt's last token may be computed alone, and must have the same bits as in it.

#include "lanes.hpp"

namespace {

constexpr long ALONE = 1 << 17; // elements that one thread turns as fast as several

// Rotates one head in place by [2, half] cosines and sines, rounding like torch.
void turn(float* head, const float* angles, long half, bool interleaved) {
    long apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    for (long j = 0; j < half; j++) {
        float &a = head[j * step], &b = head[j * step + apart];
        float cosine = angles[j], sine = angles[half + j], first = a;
        a = std::fma(-b, sine, first * cosine);
        b = std::fma(first, sine, b * cosine);
    }
}

void scale_head(float* head, const float* norm, float eps, long D) {
    float scale = inverse_rms(head, D, eps);
    for (long d = 0; d < D; d++) head[d] = head[d] * scale * norm[d];
}

} // namespace

// q [T, Hq, D], k and v [T, Hkv, D] -> turned [T, Hq, D]; stores keys and values in the cache.
// `strides` are elements between tokens of q, k and v; the norms [D] are both null or both set.
extern "C" void rope_and_store(const float* q, const float* k, const float* v, const long* strides,
                               const float* q_norm, const float* k_norm, float eps,
                               const float* table, long half, int interleaved,
                               const int64_t* positions, const int64_t* places, long T,
                               long q_heads, long kv_heads, long D, float* turned, float* keys,
                               float* values) {
#pragma omp parallel for if (T * (q_heads + kv_heads) * D > ALONE)
    for (long t = 0; t < T; t++) {
        const float* angles = table + positions[t] * 2 * half;
        float *query = turned + t * q_heads * D, *key = keys + places[t] * kv_heads * D;
        std::copy_n(q + t * strides[0], q_heads * D, query);
        std::copy_n(k + t * strides[1], kv_heads * D, key);
        std::copy_n(v + t * strides[2], kv_heads * D, values + places[t] * kv_heads * D);
        for (long h = 0; h < q_heads; h++) {
            if (q_norm) scale_head(query + h * D, q_norm, eps, D);
            turn(query + h * D, angles, half, interleaved);
        }
        for (long h = 0; h < kv_heads; h++) {
            if (k_norm) scale_head(key + h * D, k_norm, eps, D);
            turn(key + h * D, angles, half, interleaved);
        }
    }
}
