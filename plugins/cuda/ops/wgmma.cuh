/* SPDX-License-Identifier: Apache-2.0
 *
 * Compute capability 9.0a: products of BF16 by a warpgroup (4 warps), boxes that the copy engine
 * brings into shared memory, and the barriers in shared memory that tie the two.
 *
 * A box is 64 x 64 elements, 64 rows of 128 bytes whose 16-byte pieces are permuted by the row
 * (CU_TENSOR_MAP_SWIZZLE_128B), and starts at a multiple of 1024 bytes. Operands are boxes in a
 * row: along the rows of C, or of B's columns, whichever way their depth runs inside of a box.
 */
#ifndef MT_CUDA_WGMMA_CUH
#define MT_CUDA_WGMMA_CUH

#include "mma.cuh"

#include <cudaTypedefs.h>

enum { BOX = 64, BOX_BYTES = BOX * BOX * 2 };

/* ---- barriers --------------------------------------------------------------------------------
 */

/* A phase ends with `arrivals` arrivals and all bytes that were announced. */
__device__ __forceinline__ void barrier_init(uint64_t *b, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(shared_address(b)), "r"(arrivals));
}

/* Makes barriers that were initialised known to the copy engine. */
__device__ __forceinline__ void barriers_ready(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(b)) : "memory");
}

/* As so many arrivals. */
__device__ __forceinline__ void barrier_arrive_as(uint64_t *b, int arrivals)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(b)), "r"(arrivals)
                 : "memory");
}

/* Arrives, and announces bytes that copies will bring. */
__device__ __forceinline__ void barrier_expect(uint64_t *b, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(b)), "r"(bytes)
                 : "memory");
}

/* Waits for the end of a phase; they count from 0, and `parity` is the lowest bit of that. */
__device__ __forceinline__ void barrier_wait(uint64_t *b, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n"
                 :
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
}

/* ---- copies ----------------------------------------------------------------------------------
 */

/* The box at column x and row y of matrix z; what lies outside of the matrix becomes zero. */
__device__ __forceinline__ void load_box(void *to, const CUtensorMap *map, uint64_t *arrived, int x,
                                         int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 :
                 : "r"(shared_address(to)), "l"(map), "r"(shared_address(arrived)), "r"(x), "r"(y),
                   "r"(z)
                 : "memory");
}

/* Makes what this thread wrote into shared memory known to the copy engine and to wgmma. */
__device__ __forceinline__ void publish(void)
{
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

/* `bytes` from shared to device memory, or FP32 that are added to what is there. All of them are
 * multiples of 16. */
__device__ __forceinline__ void bulk_store(void *to, const void *from, int bytes, bool add)
{
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     :
                     : "l"(to), "r"(shared_address(from)), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :
                     : "l"(to), "r"(shared_address(from)), "r"(bytes)
                     : "memory");
}

__device__ __forceinline__ void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

/* Until this thread's stores have read shared memory; have reached device memory. */
__device__ __forceinline__ void bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}

__device__ __forceinline__ void bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

/* ---- products --------------------------------------------------------------------------------
 */

/* An operand that starts at `p` (PTX ISA, "Matrix descriptor"): from one 8 rows of 128 bytes to the
 * next are 1024 bytes; deep operands find the next 64 of their rows of C a box further on. */
template <bool DEEP> __device__ __forceinline__ uint64_t operand_at(const void *p)
{
    const uint64_t next_box = DEEP ? BOX_BYTES / 16 : 1, next_rows = 1024 / 16, swizzle_128 = 1;
    return (uint64_t)(shared_address(p) & 0x3ffffu) / 16 | next_box << 16 | next_rows << 32 |
           swizzle_128 << 62;
}

/* What to add for the next 16 of the depth: so many rows of a box, or bytes in each. */
template <bool DEEP> __device__ __forceinline__ uint64_t next_depth(void)
{
    return DEEP ? 16 * 128 / 16 : 16 * 2 / 16;
}

__device__ __forceinline__ void wgmma_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

__device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

/* Until all but the last N groups of products are done. */
template <int N> __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

/* Keeps the compiler from reading sums while products are in flight: it would have these run one by
 * one. */
template <int N> __device__ __forceinline__ void settle(float *sum)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(sum[i]) : : "memory");
}

#define SUMS_64                                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128                                                                                   \
    SUMS_64 ", "                                                                                   \
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "     \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
            "%110, %111, "                                                                         \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
            "%126, %127"
#define OUT_8(i)                                                                                   \
    "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]),          \
        "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define OUT_64(i)                                                                                  \
    OUT_8(i), OUT_8(i + 8), OUT_8(i + 16), OUT_8(i + 24), OUT_8(i + 32), OUT_8(i + 40),            \
        OUT_8(i + 48), OUT_8(i + 56)

/* sum += A B^T, 64 x COLS x 16. Thread t of the warpgroup has, for every 8 columns j, elements
 * sum[4 j ..]: (row t / 32 * 16 + t % 32 / 4, columns t % 4 * 2 and the next), then the same 8 rows
 * below. */
template <int COLS, bool A_DEEP, bool B_DEEP> struct wgmma;

template <bool A_DEEP, bool B_DEEP> struct wgmma<128, A_DEEP, B_DEEP> {
    static __device__ __forceinline__ void add(float *sum, uint64_t a, uint64_t b)
    {
        asm volatile("{\n"
                     ".reg .pred sums;\n"
                     "setp.ne.b32 sums, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 "}, "
                     "%64, %65, sums, 1, 1, %67, %68;\n"
                     "}\n"
                     : OUT_64(0)
                     : "l"(a), "l"(b), "r"(1), "n"(A_DEEP), "n"(B_DEEP));
    }
};

template <bool A_DEEP, bool B_DEEP> struct wgmma<256, A_DEEP, B_DEEP> {
    static __device__ __forceinline__ void add(float *sum, uint64_t a, uint64_t b)
    {
        asm volatile("{\n"
                     ".reg .pred sums;\n"
                     "setp.ne.b32 sums, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SUMS_128 "}, "
                     "%128, %129, sums, 1, 1, %131, %132;\n"
                     "}\n"
                     : OUT_64(0), OUT_64(64)
                     : "l"(a), "l"(b), "r"(1), "n"(A_DEEP), "n"(B_DEEP));
    }
};

#undef SUMS_64
#undef SUMS_128
#undef OUT_8
#undef OUT_64

#endif
