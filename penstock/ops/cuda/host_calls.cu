// A kernel asks the CPU for something, and a later one takes the answer: both in the stream, so
// that a graph can hold them, and neither with the driver's help.
//
//   GPU   ask_host: inputs -> the host's memory, then the call's number      ... add_answer
//   CPU            a thread sees the number, works, writes its sums, then the number   ^
//
// All memory between them is the host's, pinned. A call's place in `calls` is its number modulo
// NUM_CALLS; the place holds number << 16 | job, so one store of 8 bytes tells both. `answered` has
// the number of each job's last call that is complete.
//
// Given when it is compiled: NUM_CALLS, IS_BFLOAT.

#include "tensor_cores.cu"

typedef unsigned long long u64;

struct Asked {
    const uint4* x;        // [T, H]  2 bytes each
    const u32* ids;        // [T, k]
    const u32* weights;    // [T, k]
    uint4* host_x;         // the same, for the CPU
    u32 *host_ids, *host_weights;
    u64* calls;            // [NUM_CALLS]
    u64* num_calls;        // [1]  so far, on the device
    u64* number_of;        // [jobs]  of a job's last call, on the device
    int num_x, num_pairs, job;
};

__device__ __forceinline__ void store_for_all(u64* p, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_of_all(const u64* p) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}

// One block.
extern "C" __global__ void ask_host(Asked given) {
    wait_for_previous();
    for (int i = threadIdx.x; i < given.num_x; i += blockDim.x) given.host_x[i] = given.x[i];
    for (int i = threadIdx.x; i < given.num_pairs; i += blockDim.x) {
        given.host_ids[i] = given.ids[i];
        given.host_weights[i] = given.weights[i];
    }
    __threadfence_system(); // each thread's own stores come before the number
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 number = atomicAdd(given.num_calls, 1ull) + 1;
        given.number_of[given.job] = number;
        store_for_all(given.calls + number % NUM_CALLS, number << 16 | (u64)given.job);
    }
}

struct Answer {
    u32* out;            // [T, H]  pairs of numbers; added to
    const float* sums;   // [T, H]  the CPU's
    const u64* answered; // [jobs]
    const u64* number_of;
    int num_pairs, job; // of numbers
};

extern "C" __global__ void add_answer(Answer given) {
    wait_for_previous();
    if (threadIdx.x == 0) {
        const u64 number = given.number_of[given.job];
        while (load_of_all(given.answered + given.job) < number) __nanosleep(100);
    }
    __syncthreads();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= given.num_pairs) return;
    const float2 sums = __ldcv((const float2*)given.sums + i); // nothing may have kept old ones
    const u32 own = given.out[i];
    given.out[i] = pack(low(own) + sums.x, high(own) + sums.y);
}
