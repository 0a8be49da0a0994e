/* SPDX-License-Identifier: Apache-2.0
 *
 * OpenBLAS: choosing its kernels, loading it, checking it, and the GEMM on top of it. It is called
 * single-threaded, on tiles; threads are the compute pool's.
 */
#include "convert.h"
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { BLAS_ROW_MAJOR = 101, BLAS_NO_TRANS = 111, BLAS_TRANS = 112 };

/* cblas.h with 32-bit integers, as Debian's libopenblas0 has it. */
typedef void sgemm_fn(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                      const float *a, int lda, const float *b, int ldb, float beta, float *c,
                      int ldc);
typedef void dgemm_fn(int order, int trans_a, int trans_b, int m, int n, int k, double alpha,
                      const double *a, int lda, const double *b, int ldb, double beta, double *c,
                      int ldc);

/* Loaded once for the whole process, by the first device. */
static struct {
    void *library;
    sgemm_fn *sgemm;
    dgemm_fn *dgemm;
    char core[32];
} blas;

const char *cpu_blas_core(void)
{
    return blas.library ? blas.core : "none";
}

/* Symbols are objects to dlsym; memcpy is how C turns one into a function pointer. */
static bool blas_symbol(void *library, const char *name, void *ret_function)
{
    void *p = dlsym(library, name);
    if (p)
        memcpy(ret_function, &p, sizeof p);
    return p != NULL;
}

/* A product of odd sizes, every transposition, against plain C. */
static bool blas_check(sgemm_fn *sgemm, dgemm_fn *dgemm)
{
    enum { M = 37, N = 29, K = 131, LD = 137 };
    static float fa[LD * LD], fb[LD * LD], fc[M * N], fr[M * N];
    static double da[LD * LD], db[LD * LD], dc[M * N], dr[M * N];
    uint32_t seed = 1;
    for (int i = 0; i < LD * LD; i++) {
        seed = seed * 1664525u + 1013904223u;
        da[i] = fa[i] = (float)(seed >> 8) / (1 << 23) - 1.0f;
        seed = seed * 1664525u + 1013904223u;
        db[i] = fb[i] = (float)(seed >> 8) / (1 << 23) - 1.0f;
    }
    for (int t = 0; t < 4; t++) {
        bool ta = t & 1, tb = t & 2;
        for (int i = 0; i < M * N; i++)
            dc[i] = dr[i] = fc[i] = fr[i] = (float)i / (M * N);
        cpu_gemm_reference(ta, tb, M, N, K, 0.5, MT_F32, fa, LD, fb, LD, 1, MT_F32, fr, N, NULL);
        cpu_gemm_reference(ta, tb, M, N, K, 0.5, MT_F64, da, LD, db, LD, 1, MT_F64, dr, N, NULL);
        sgemm(BLAS_ROW_MAJOR, ta ? BLAS_TRANS : BLAS_NO_TRANS, tb ? BLAS_TRANS : BLAS_NO_TRANS, M,
              N, K, 0.5f, fa, LD, fb, LD, 1.0f, fc, N);
        dgemm(BLAS_ROW_MAJOR, ta ? BLAS_TRANS : BLAS_NO_TRANS, tb ? BLAS_TRANS : BLAS_NO_TRANS, M,
              N, K, 0.5, da, LD, db, LD, 1.0, dc, N);
        for (int i = 0; i < M * N; i++)
            if (!(fabsf(fc[i] - fr[i]) <= 1e-4f) || !(fabs(dc[i] - dr[i]) <= 1e-12))
                return false;
    }
    return true;
}

/* What OpenBLAS maps for every thread that multiplies, and how many it can have for certain. */
#define BLAS_BUFFER ((size_t)128 << 20)
enum { BLAS_BUFFERS = 48 };

/* Maps so many buffers as OpenBLAS would, and lets go of them. Returns how many there is room for;
 * errno says why not all. */
static int32_t room_for_buffers(void **buffers, int32_t threads)
{
    int32_t n = 0;
    while (n < threads) {
        void *p =
            mmap(NULL, BLAS_BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            break;
        buffers[n++] = p;
    }
    int e = errno;
    for (int32_t i = 0; i < n; i++)
        munmap(buffers[i], BLAS_BUFFER);
    errno = e;
    return n;
}

/* Has the library map its buffers now, where this version lets it be asked: what is allocated
 * later may take the room. It keeps them. */
static void take_buffers(void **buffers, int32_t threads)
{
    void *(*take)(int);
    void (*give)(void *);
    int32_t n = threads < BLAS_BUFFERS ? threads : BLAS_BUFFERS;
    if (!blas_symbol(blas.library, "blas_memory_alloc", &take) ||
        !blas_symbol(blas.library, "blas_memory_free", &give))
        return;
    for (int32_t i = 0; i < n; i++)
        buffers[i] = take(0);
    for (int32_t i = 0; i < n; i++)
        give(buffers[i]);
}

mt_status cpu_blas_reserve(cpu_isa isa, int32_t threads)
{
    if (isa == CPU_SCALAR)
        return MT_OK;
    void **buffers = calloc((size_t)threads, sizeof *buffers);
    if (!buffers)
        return mt_fail_nomem();
    int32_t n = room_for_buffers(buffers, threads);
    int e = errno;
    if (n == threads && blas.library)
        take_buffers(buffers, threads);
    free(buffers);
    if (n == threads)
        return MT_OK;
    return mt_fail(MT_ERR_NOMEM,
                   "OpenBLAS needs %zu MiB of address space for each of %d threads, and there is "
                   "room for %d: %s; raise the limit (ulimit -v), set fewer threads, or run plain "
                   "C kernels with MEGATRAIN_CPU_FLAGS=scalar",
                   BLAS_BUFFER >> 20, (int)threads, (int)n, strerror(e));
}

mt_status cpu_blas_load(cpu_isa isa)
{
    if (isa == CPU_SCALAR || blas.library)
        return MT_OK;
    /* OpenBLAS does not know every new processor and then falls back to kernels of 2004; it reads
     * both variables while it is loaded. A user's choice wins. */
    setenv("OPENBLAS_CORETYPE", isa == CPU_AVX512 ? "SkylakeX" : "Haswell", 0);
    setenv("OPENBLAS_NUM_THREADS", "1", 0);
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return mt_fail(MT_ERR_NOT_FOUND,
                       "cannot load OpenBLAS: %s; install Debian's libopenblas0, or run plain C "
                       "kernels with MEGATRAIN_CPU_FLAGS=scalar",
                       dlerror());
    sgemm_fn *sgemm;
    dgemm_fn *dgemm;
    void (*set_threads)(int);
    char *(*core_name)(void);
    if (!blas_symbol(library, "cblas_sgemm", &sgemm) ||
        !blas_symbol(library, "cblas_dgemm", &dgemm) ||
        !blas_symbol(library, "openblas_set_num_threads", &set_threads) ||
        !blas_symbol(library, "openblas_get_corename", &core_name)) {
        mt_status status =
            mt_fail(MT_ERR_NOT_FOUND,
                    "libopenblas.so.0 lacks a function that OpenBLAS has: %s; install Debian's "
                    "libopenblas0",
                    dlerror());
        dlclose(library);
        return status;
    }
    set_threads(1);
    char core[sizeof blas.core];
    snprintf(core, sizeof core, "%s", core_name());
    if (!blas_check(sgemm, dgemm)) {
        const char *type = getenv("OPENBLAS_CORETYPE");
        mt_status status =
            mt_fail(MT_ERR_DEVICE,
                    "OpenBLAS (%s) computes a wrong product on this processor; "
                    "OPENBLAS_CORETYPE is %s: try OPENBLAS_CORETYPE=Haswell or =Sandybridge, or "
                    "MEGATRAIN_CPU_FLAGS=scalar",
                    core, type ? type : "not set");
        dlclose(library);
        return status;
    }
    blas.library = library;
    blas.sgemm = sgemm;
    blas.dgemm = dgemm;
    memcpy(blas.core, core, sizeof core);
    return MT_OK;
}

/* ---- GEMM ------------------------------------------------------------------------------------ */

/* BF16 operands are converted in panels of this depth, which stay in the cache. */
enum { PANEL_DEPTH = 512 };

int64_t cpu_gemm_work(int64_t m, int64_t n, int64_t k, mt_dtype in_dtype)
{
    if (in_dtype != MT_BF16)
        return 0;
    int64_t depth = k < PANEL_DEPTH ? k : PANEL_DEPTH;
    return ((m + n) * depth + m * n) * (int64_t)sizeof(float);
}

static void to_f32_rows(float *dst, const uint16_t *src, int64_t ld, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        convert_to_f32(dst + i * cols, src + i * ld, cols);
}

static void gemm_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                      const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, float beta,
                      mt_dtype c_dtype, void *c, int64_t ldc, float *work)
{
    int64_t depth = k < PANEL_DEPTH ? k : PANEL_DEPTH;
    float *pa = work, *pb = pa + m * depth, *sum = c;
    int64_t ld = ldc;
    if (c_dtype == MT_BF16) {
        sum = pb + n * depth;
        ld = n;
        if (beta != 0)
            to_f32_rows(sum, c, ldc, m, n);
    }
    for (int64_t p = 0; p < k; p += depth) {
        int64_t d = k - p < depth ? k - p : depth;
        int64_t ld_a = trans_a ? m : d, ld_b = trans_b ? d : n;
        if (trans_a)
            to_f32_rows(pa, a + p * lda, lda, d, m);
        else
            to_f32_rows(pa, a + p, lda, m, d);
        if (trans_b)
            to_f32_rows(pb, b + p, ldb, n, d);
        else
            to_f32_rows(pb, b + p * ldb, ldb, d, n);
        blas.sgemm(BLAS_ROW_MAJOR, trans_a ? BLAS_TRANS : BLAS_NO_TRANS,
                   trans_b ? BLAS_TRANS : BLAS_NO_TRANS, (int)m, (int)n, (int)d, alpha, pa,
                   (int)ld_a, pb, (int)ld_b, p == 0 ? beta : 1.0f, sum, (int)ld);
    }
    if (c_dtype == MT_BF16)
        for (int64_t i = 0; i < m; i++)
            convert_to_bf16((uint16_t *)c + i * ldc, sum + i * n, n);
}

void cpu_gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
              mt_dtype in_dtype, const void *a, int64_t lda, const void *b, int64_t ldb,
              double beta, mt_dtype c_dtype, void *c, int64_t ldc, void *work)
{
    int ta = trans_a ? BLAS_TRANS : BLAS_NO_TRANS, tb = trans_b ? BLAS_TRANS : BLAS_NO_TRANS;
    if (m == 0 || n == 0)
        return;
    if (in_dtype == MT_F32)
        blas.sgemm(BLAS_ROW_MAJOR, ta, tb, (int)m, (int)n, (int)k, (float)alpha, a, (int)lda, b,
                   (int)ldb, (float)beta, c, (int)ldc);
    else if (in_dtype == MT_F64)
        blas.dgemm(BLAS_ROW_MAJOR, ta, tb, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb,
                   beta, c, (int)ldc);
    else
        gemm_bf16(trans_a, trans_b, m, n, k, (float)alpha, a, lda, b, ldb, (float)beta, c_dtype, c,
                  ldc, work);
}
