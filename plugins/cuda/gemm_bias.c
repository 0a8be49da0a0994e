/* SPDX-License-Identifier: Apache-2.0
 *
 * x w^T + bias as one kernel, by cublasLt. What runs a shape is asked for once and kept; a shape
 * that the library has nothing for is left to the caller. BF16, FP32 accumulation, one rounding.
 */
#include "cuda.h"

#include <stdlib.h>

typedef struct gemm_shape {
    int64_t rows, cols, inner, ld_x, ld_w, ld_y;
    int64_t alignment; /* bytes, of all operands */
} gemm_shape;

struct cuda_gemm_plan {
    cuda_gemm_plan *next;
    gemm_shape shape;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t x, w, y;
    cublasLtMatmulAlgo_t algorithm;
    bool usable;
};

static void destroy(cuda_gemm_plan *p)
{
    if (p->op)
        (void)cublasLtMatmulDescDestroy(p->op);
    if (p->x)
        (void)cublasLtMatrixLayoutDestroy(p->x);
    if (p->w)
        (void)cublasLtMatrixLayoutDestroy(p->w);
    if (p->y)
        (void)cublasLtMatrixLayoutDestroy(p->y);
    free(p);
}

void cuda_gemm_plans_close(cuda_device *d)
{
    while (d->blas.plans) {
        cuda_gemm_plan *p = d->blas.plans;
        d->blas.plans = p->next;
        destroy(p);
    }
    if (d->blas.light)
        (void)cublasLtDestroy(d->blas.light);
    d->blas.light = NULL;
}

/* cublasLt is column-major: it is given y^T [cols, rows] = w x^T, with a bias a row. */
static bool describe(cuda_gemm_plan *p)
{
    const gemm_shape *s = &p->shape;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    return cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                          sizeof transposed) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias,
                                          sizeof bias) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutCreate(&p->w, CUDA_R_16BF, (uint64_t)s->inner, (uint64_t)s->cols,
                                      s->ld_w) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutCreate(&p->x, CUDA_R_16BF, (uint64_t)s->inner, (uint64_t)s->rows,
                                      s->ld_x) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutCreate(&p->y, CUDA_R_16BF, (uint64_t)s->cols, (uint64_t)s->rows,
                                      s->ld_y) == CUBLAS_STATUS_SUCCESS;
}

/* The library's first choice within the one workspace, without sums in an order of chance. */
static bool choose(cuda_device *d, cuda_gemm_plan *p)
{
    static const cublasLtMatmulPreferenceAttributes_t operands[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
    };
    const uint64_t work = CUDA_BLAS_WORK;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
                   alignment = (uint32_t)p->shape.alignment;
    cublasLtMatmulPreference_t want = NULL;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    bool ok = cublasLtMatmulPreferenceCreate(&want) == CUBLAS_STATUS_SUCCESS &&
              cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &work, sizeof work) == CUBLAS_STATUS_SUCCESS &&
              cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                   &reductions,
                                                   sizeof reductions) == CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < 4 && ok; i++)
        ok = cublasLtMatmulPreferenceSetAttribute(want, operands[i], &alignment,
                                                  sizeof alignment) == CUBLAS_STATUS_SUCCESS;
    ok = ok &&
         cublasLtMatmulAlgoGetHeuristic(d->blas.light, p->op, p->w, p->x, p->y, p->y, want, 1,
                                        &found, &n) == CUBLAS_STATUS_SUCCESS &&
         n == 1 && found.state == CUBLAS_STATUS_SUCCESS;
    if (want)
        (void)cublasLtMatmulPreferenceDestroy(want);
    if (ok)
        p->algorithm = found.algo;
    return ok;
}

static cuda_gemm_plan *find(cuda_device *d, const gemm_shape *s)
{
    for (cuda_gemm_plan *p = d->blas.plans; p; p = p->next)
        if (memcmp(&p->shape, s, sizeof *s) == 0)
            return p;
    cuda_gemm_plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->shape = *s;
    p->usable = (d->blas.light || cublasLtCreate(&d->blas.light) == CUBLAS_STATUS_SUCCESS) &&
                describe(p) && choose(d, p);
    if (!p->usable)
        cuda_log(MT_LOG_DEBUG, "cublasLt has nothing for %lld x %lld x %lld with a bias",
                 (long long)s->rows, (long long)s->cols, (long long)s->inner);
    p->next = d->blas.plans;
    d->blas.plans = p;
    return p;
}

static int64_t alignment_of(const mt_tensor *const *t, int n)
{
    uintptr_t bits = 256;
    for (int i = 0; i < n; i++)
        bits |= (uintptr_t)t[i]->data;
    return (int64_t)(bits & (~bits + 1));
}

bool cuda_gemm_bias(cuda_queue *q, const mt_tensor *x, const mt_tensor *w, const mt_tensor *bias,
                    const mt_tensor *y)
{
    cuda_device *d = q->device;
    const mt_tensor *const all[] = { x, w, bias, y };
    const float one = 1, zero = 0;
    gemm_shape s = { y->rows, y->cols, x->cols, x->ld, w->ld, y->ld, alignment_of(all, 4) };
    if (y->dtype != MT_BF16 || s.alignment < 16 || !cuda_blas_on(q))
        return false;
    const cuda_gemm_plan *p = find(d, &s);
    return p && p->usable &&
           cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias->data,
                                          sizeof bias->data) == CUBLAS_STATUS_SUCCESS &&
           cuda_blas_ok(d,
                        cublasLtMatmul(d->blas.light, p->op, &one, w->data, p->w, x->data, p->x,
                                       &zero, y->data, p->y, y->data, p->y, &p->algorithm,
                                       d->blas.work, CUDA_BLAS_WORK, q->stream),
                        "a GEMM with a bias");
}
