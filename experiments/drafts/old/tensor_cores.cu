// Primitives shared by the tensor core kernels: 16-byte loads, programmatic dependent launch, pairs
// of bf16 or fp16, and the mma instruction. Knows no layout of weights or activations.
//
// Compile-time constants: IS_BFLOAT.

typedef unsigned int u32;
typedef unsigned short u16;

struct __align__(16) Four { // aligned, so that a copy is one instruction
    u32 part[4];            // two elements each
};

#define LOAD(name, instruction)                                                                    \
    __device__ __forceinline__ Four name(const void* p) {                                          \
        Four v;                                                                                    \
        asm volatile(instruction " {%0, %1, %2, %3}, [%4];"                                        \
                     : "=r"(v.part[0]), "=r"(v.part[1]), "=r"(v.part[2]), "=r"(v.part[3])          \
                     : "l"(p));                                                                    \
        return v;                                                                                  \
    }
// For weights, which must not evict other data from L1. Not .nc: ptxas would move such a load after
// the wait for the previous kernel.
LOAD(load_once, "ld.global.L1::no_allocate.v4.u32")
LOAD(load_again, "ld.global.v4.u32")

// 16 bytes in one instruction: the compiler may split the store of a struct.
__device__ __forceinline__ void store_16_bytes(void* p, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float low(u32 pair) {
#if IS_BFLOAT
    return __uint_as_float(pair << 16);
#else
    float f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(pair));
    return f;
#endif
}

__device__ __forceinline__ float high(u32 pair) {
#if IS_BFLOAT
    return __uint_as_float(pair & 0xffff0000u);
#else
    float f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(pair));
    return f;
#endif
}

__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
#if IS_BFLOAT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

// sums [16 rows, 8 tokens] += a product over 16 columns, or = the first product. The thread passes
// two registers for each of its two rows (a0 and a2, a1 and a3) and two for its token.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1, bool is_first = false) {
#if IS_BFLOAT
#define INSTRUCTION "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define INSTRUCTION "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
    if (is_first) // zeros take no registers
        asm(INSTRUCTION "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
    else
        asm(INSTRUCTION "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

__device__ __forceinline__ float add_squares(float sum, const Four& token) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float first = low(token.part[i]), second = high(token.part[i]);
        sum = fmaf(first, first, fmaf(second, second, sum));
    }
    return sum;
}
