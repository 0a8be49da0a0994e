/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend's own border: how an operation's kernels are cut into tasks, and which
 * instruction set they run on. Devices, queues and memory are device.c's; kernels know only this.
 */
#ifndef MT_CPU_H
#define MT_CPU_H

#include <megatrain/backend.h>
#include <megatrain/report.h>

/* Instruction sets that kernels are compiled for. MEGATRAIN_CPU_FLAGS ("scalar", "avx2", "avx512")
 * caps the choice. CPU_SCALAR runs the plain C references. */
typedef enum cpu_isa { CPU_SCALAR = 0, CPU_AVX2 = 1, CPU_AVX512 = 2, CPU_ISAS = 3 } cpu_isa;

/* What the processor has, capped by MEGATRAIN_CPU_FLAGS; an unknown value there is an error. */
mt_status cpu_detect_isa(cpu_isa *ret);

/* Single-threaded row-major GEMM, C = alpha op(A) op(B) + beta C, in FP32, FP64, or BF16 operands
 * with FP32 accumulation: A and B share one dtype (in_dtype); C is c_dtype (for BF16 operands: BF16
 * or FP32; else the same as in_dtype). m x n x k; ld in elements. `work` is cpu_gemm_work bytes. */
void cpu_gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
              mt_dtype in_dtype, const void *a, int64_t lda, const void *b, int64_t ldb,
              double beta, mt_dtype c_dtype, void *c, int64_t ldc, void *work);
int64_t cpu_gemm_work(int64_t m, int64_t n, int64_t k, mt_dtype in_dtype);

/* The same in plain C, one rounding per multiplication and addition, no library. */
void cpu_gemm_reference(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
                        mt_dtype in_dtype, const void *a, int64_t lda, const void *b, int64_t ldb,
                        double beta, mt_dtype c_dtype, void *c, int64_t ldc, void *work);

typedef void cpu_gemm_fn(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
                         mt_dtype in_dtype, const void *a, int64_t lda, const void *b, int64_t ldb,
                         double beta, mt_dtype c_dtype, void *c, int64_t ldc, void *work);

/* The GEMM that kernels of `isa` use. */
static inline cpu_gemm_fn *cpu_gemm_for(cpu_isa isa)
{
    return isa == CPU_SCALAR ? cpu_gemm_reference : cpu_gemm;
}

/* How a matrix of m x n is cut into tiles, one task each: large enough for an efficient GEMM, and
 * enough of them to feed many threads. Depends on m and n only. */
typedef struct cpu_tiles {
    int64_t m, n;           /* the matrix */
    int64_t tile_m, tile_n; /* a whole tile */
    int64_t across;         /* tiles in a row of tiles */
    int64_t count;
} cpu_tiles;
enum { CPU_TILE_M = 256, CPU_TILE_N = 512 }; /* the largest tile */
cpu_tiles cpu_tiles_of(int64_t m, int64_t n);

typedef struct cpu_tile {
    int64_t row, col, rows, cols;
} cpu_tile;
cpu_tile cpu_tile_at(const cpu_tiles *t, int64_t index);

/* An operation on the CPU. It runs as phases one after the other (a barrier between them), each a
 * number of tasks that are independent of each other. How work is cut depends on shapes only,
 * never on the number of threads, so that results do not either. */
typedef struct cpu_op {
    const char *name;
    int32_t (*phases)(const mt_op_call *c, bool backward); /* NULL: one */
    int64_t (*tasks)(const mt_op_call *c, bool backward, int32_t phase);
    void (*run)(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task);
    int64_t (*workspace)(const mt_op_call *c, bool backward); /* NULL: none */
    /* Optional. An operation whose tasks need memory of their own has `scratch`, the bytes that one
     * task needs, and `run_scratch` in place of `run`; no two tasks that run at the same time get
     * the same memory. It comes out of the call's work, behind what `workspace` asks for. */
    int64_t (*scratch)(const mt_op_call *c, bool backward);
    void (*run_scratch)(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase,
                        int64_t task, void *scratch);
    /* Optional. Before forward, looks at data that only exists when the queue gets here (token
     * ids); false with a text stops the device. */
    bool (*check)(const mt_op_call *c, char *error, size_t error_size);
} cpu_op;

/* Rows of a matrix that one task of a row-wise operation takes. */
enum { CPU_ROWS_PER_TASK = 64 };

/* One table entry per file in ops/. */
#define CPU_OP_DECLARE(id) extern const cpu_op cpu_op_##id;
MT_OPERATIONS(CPU_OP_DECLARE)

#endif
