// Calls from the GPU to the CPU: one kernel submits a job, a later one adds the result. Both run in
// the stream, so a CUDA graph can contain them, and the driver is not involved. Does not know what
// a job computes.
//
//   GPU   ask_host: inputs -> host memory, then the call's number            ... add_answer
//   CPU            a thread sees the number, works, writes its sums, then the number   ^
//
// All shared memory between them is pinned host memory. A call is stored in `calls` at its number
// modulo NUM_CALLS, as number << 16 | job, so that one 8-byte store publishes both. `answered` has
// the number of the last complete call of each job.
//
// Compile-time constants: NUM_CALLS, IS_BFLOAT.

#include "tensor_cores.cu"

typedef unsigned long long u64;

struct Asked {
    const uint4* x;     // [T, H]  2 bytes per element
    const u32* ids;     // [T, k]
    const u32* weights; // [T, k]
    uint4* host_x;      // copies for the CPU
    u32 *host_ids, *host_weights;
    u64* calls;     // [NUM_CALLS]
    u64* num_calls; // [1]  count so far, in device memory
    u64* number_of; // [jobs]  last call of each job, in device memory
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

// Launched with one block.
extern "C" __global__ void ask_host(Asked given) {
    wait_for_previous();
    for (int i = threadIdx.x; i < given.num_x; i += blockDim.x) given.host_x[i] = given.x[i];
    for (int i = threadIdx.x; i < given.num_pairs; i += blockDim.x) {
        given.host_ids[i] = given.ids[i];
        given.host_weights[i] = given.weights[i];
    }
    __threadfence_system(); // each thread's stores become visible before the number
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 number = atomicAdd(given.num_calls, 1ull) + 1;
        given.number_of[given.job] = number;
        store_for_all(given.calls + number % NUM_CALLS, number << 16 | (u64)given.job);
    }
}

struct Answer {
    u32* out;            // [T, H]  pairs of elements; accumulated in place
    const float* sums;   // [T, H]  written by the CPU
    const u64* answered; // [jobs]
    const u64* number_of;
    int num_pairs, job; // pairs of elements
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
    const float2 sums = __ldcv((const float2*)given.sums + i); // caches may hold old sums
    const u32 own = given.out[i];
    given.out[i] = pack(low(own) + sums.x, high(own) + sums.y);
}
