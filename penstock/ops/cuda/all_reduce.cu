// An all-reduce of a few kB between GPUs that map each other's memory, in one launch and without a
// barrier: every rank stores its values into the buffer of every rank, and adds what arrives in its
// own. A word that has not arrived is EMPTY, so data needs no flag, and crosses the link once.
//
//   rank 0   values --> buffer of 0, 1, 2, ...        buffer [turn][from rank][vectors of 16 bytes]
//   rank 1   values --> buffer of 0, 1, 2, ...        each rank: wait for all, add in rank order
//
// A buffer has three turns. In launch n all ranks write turn n % 3, and each clears the turn of
// launch n - 1 in its own buffer. The next data there is that of launch n + 2, which a rank sends
// after launch n + 1: then it has values that every other rank sent after the end of its launch n.
//
// Sums are float32, in rank order, so all ranks have the same bits, at any position in a tensor of
// any size. `out` may be `values`. All ranks launch the same sizes in the same order; the counters
// are in device memory, so a CUDA graph can contain launches.
//
// Compile-time constants: RANKS, KIND (what a word holds), IS_BFLOAT.

#include "tensor_cores.cu"

constexpr int PAIRS = 0, FLOATS = 1, KEYS = 2; // two 16-bit floats, a float, half an int64
constexpr u32 EMPTY = 0x80000000u;             // a float's -0.0
constexpr u32 TURNS = 3, POLLS = 1 << 12;

struct Buffers {
    char* of[RANKS];
};

struct State {
    u32 turn, num_done, num_last; // launches so far; blocks that are done; vectors of the last one
};

LOAD(load_arrived, "ld.volatile.global.v4.u32")

__device__ __forceinline__ u32 load_word(const u32* p) {
    u32 v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_for_rank(void* p, const Four& v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.part[0]),
                 "r"(v.part[1]), "r"(v.part[2]), "r"(v.part[3])
                 : "memory");
}

__device__ __forceinline__ bool has_arrived(const Four& v) {
    return v.part[0] != EMPTY && v.part[1] != EMPTY && v.part[2] != EMPTY && v.part[3] != EMPTY;
}

// The same value, in other bits: zero for floats, and for keys that of another NaN.
__device__ __forceinline__ u32 not_empty(u32 word) {
    return word != EMPTY ? word : KIND == KEYS ? EMPTY + 1 : 0u;
}

struct Total {
    float first[4], second[4]; // PAIRS: both; FLOATS: the first
    long long key[2];

    __device__ __forceinline__ void add(const Four& v, bool is_first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (KIND == PAIRS) {
                first[i] = is_first ? low(v.part[i]) : first[i] + low(v.part[i]);
                second[i] = is_first ? high(v.part[i]) : second[i] + high(v.part[i]);
            } else if (KIND == FLOATS) {
                const float own = __uint_as_float(v.part[i]);
                first[i] = is_first ? own : first[i] + own;
            } else if (i < 2) {
                const long long own =
                    (long long)((unsigned long long)v.part[2 * i + 1] << 32 | v.part[2 * i]);
                key[i] = is_first || own > key[i] ? own : key[i];
            }
        }
    }

    __device__ __forceinline__ u32 word(int i) const {
        if (KIND == PAIRS) return pack(first[i], second[i]);
        if (KIND == FLOATS) return __float_as_uint(first[i]);
        return (u32)((unsigned long long)key[i / 2] >> 32 * (i % 2));
    }
};

extern "C" __global__ void all_reduce(const Four* values, Four* out, int num_vectors, int capacity,
                                      int rank, Buffers buffers, State* state, const u32* stop) {
    let_next_start();
    wait_for_previous();
    const u32 turn = load_word(&state->turn), num_last = load_word(&state->num_last);
    const int start = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    const size_t turn_bytes = (size_t)RANKS * capacity * sizeof(Four);
    const size_t here = turn % TURNS * turn_bytes, last = (turn + TURNS - 1) % TURNS * turn_bytes;

    for (int i = start; i < num_vectors; i += stride) {
        Four own = load_again(values + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) own.part[j] = not_empty(own.part[j]);
        const size_t place = here + ((size_t)rank * capacity + i) * sizeof(Four);
#pragma unroll
        for (int r = 0; r < RANKS; ++r) // not all to the same rank first
            store_for_rank(buffers.of[(rank + r) % RANKS] + place, own);
    }
    char* mine = buffers.of[rank];
    for (int i = start; i < (int)num_last * RANKS; i += stride) { // while the others' data comes
        const size_t vector = (size_t)(i / num_last) * capacity + i % num_last;
        store_for_rank(mine + last + vector * sizeof(Four), {EMPTY, EMPTY, EMPTY, EMPTY});
    }
    for (int i = start; i < num_vectors; i += stride) {
        Total total;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const char* p = mine + here + ((size_t)r * capacity + i) * sizeof(Four);
            Four found = load_arrived(p);
            for (u32 poll = 1; !has_arrived(found); ++poll) {
                if (poll % POLLS == 0 && load_word(stop)) break; // a rank is lost: end somehow
                found = load_arrived(p);
            }
            total.add(found, r == 0);
        }
        store_16_bytes(out + i, total.word(0), total.word(1), total.word(2), total.word(3));
    }

    __syncthreads(); // all threads have read the state
    if (threadIdx.x == 0 && atomicAdd(&state->num_done, 1u) == gridDim.x - 1) {
        state->num_done = 0;
        state->num_last = num_vectors;
        state->turn = turn + 1;
    }
}
