/* SPDX-License-Identifier: Apache-2.0
 *
 * Products by cublasLt: with a bias in the same kernel, and enqueued in a fraction of the time that
 * cuBLAS takes, because what runs a shape is asked for once and kept. Rows of activations (m of a
 * product, k of a weight gradient) differ from call to call; those of one multiple of ROWS share
 * what was asked for the largest of them. BF16 operands, FP32 accumulation, no sums in an order of
 * chance.
 */
#include "cuda.h"

#include <stdlib.h>

enum { ROWS = 128, BUCKETS = 256 };

/* What the choice depends on. Only int64_t: compared as bytes. */
typedef struct light_shape {
    int64_t m, n, k, lda, ldb, ldc;
    int64_t trans_a, trans_b, c_dtype, bias;
    int64_t alignment, work; /* bytes: of all operands, to use */
} light_shape;

typedef struct light_plan light_plan;
struct light_plan {
    light_plan *next;
    light_shape shape;
    cublasLtMatmulDesc_t op;
    cublasLtMatmulAlgo_t algorithm;
    bool usable;
};

struct cuda_light {
    cublasLtHandle_t handle;
    light_plan *plans[BUCKETS];
};

/* cublasLt is column-major: it is given C^T [n, m] = op(B)^T op(A)^T. */
typedef struct light_layouts {
    cublasLtMatrixLayoutOpaque_t a, b, c;
} light_layouts;

static void describe(const light_shape *s, light_layouts *ret)
{
    uint64_t m = (uint64_t)s->m, n = (uint64_t)s->n, k = (uint64_t)s->k;
    cudaDataType_t c = s->c_dtype == MT_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    /* They only fill in what they are given. */
    (void)cublasLtMatrixLayoutInit(&ret->b, CUDA_R_16BF, s->trans_b ? k : n, s->trans_b ? n : k,
                                   s->ldb);
    (void)cublasLtMatrixLayoutInit(&ret->a, CUDA_R_16BF, s->trans_a ? m : k, s->trans_a ? k : m,
                                   s->lda);
    (void)cublasLtMatrixLayoutInit(&ret->c, c, n, m, s->ldc);
}

static bool set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t what, int32_t value)
{
    return cublasLtMatmulDescSetAttribute(op, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}

static bool make_op(light_plan *p)
{
    const light_shape *s = &p->shape;
    return cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           set(p->op, CUBLASLT_MATMUL_DESC_TRANSA, s->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N) &&
           set(p->op, CUBLASLT_MATMUL_DESC_TRANSB, s->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N) &&
           set(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE,
               s->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
}

static bool prefer(cublasLtMatmulPreference_t want, const light_shape *s)
{
    static const cublasLtMatmulPreferenceAttributes_t operands[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
    };
    const uint64_t work = (uint64_t)s->work;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
                   alignment = (uint32_t)s->alignment;
    bool ok = cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &work, sizeof work) == CUBLAS_STATUS_SUCCESS &&
              cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                   &reductions,
                                                   sizeof reductions) == CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < 4 && ok; i++)
        ok = cublasLtMatmulPreferenceSetAttribute(want, operands[i], &alignment,
                                                  sizeof alignment) == CUBLAS_STATUS_SUCCESS;
    return ok;
}

/* The library's first choice. */
static bool choose(cublasLtHandle_t handle, light_plan *p)
{
    light_layouts l;
    cublasLtMatmulPreference_t want = NULL;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    describe(&p->shape, &l);
    bool ok = cublasLtMatmulPreferenceCreate(&want) == CUBLAS_STATUS_SUCCESS &&
              prefer(want, &p->shape) &&
              cublasLtMatmulAlgoGetHeuristic(handle, p->op, &l.b, &l.a, &l.c, &l.c, want, 1, &found,
                                             &n) == CUBLAS_STATUS_SUCCESS &&
              n == 1 && found.state == CUBLAS_STATUS_SUCCESS;
    if (want)
        (void)cublasLtMatmulPreferenceDestroy(want);
    if (ok)
        p->algorithm = found.algo;
    return ok;
}

static light_plan *find(cuda_light *l, const light_shape *s)
{
    uint64_t key = (uint64_t)(s->m / ROWS + 31 * (s->n + 31 * (s->k / ROWS + 31 * s->trans_a)));
    light_plan **list = &l->plans[key % BUCKETS];
    for (light_plan *p = *list; p; p = p->next)
        if (memcmp(&p->shape, s, sizeof *s) == 0)
            return p;
    light_plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->shape = *s;
    p->usable = make_op(p) && choose(l->handle, p);
    if (!p->usable)
        mt_log(MT_LOG_DEBUG, "cublasLt has nothing for %lld x %lld x %lld%s", (long long)s->m,
               (long long)s->n, (long long)s->k, s->bias ? " with a bias" : "");
    p->next = *list;
    *list = p;
    return p;
}

/* The largest power of two that divides all addresses, at most 256. */
static int64_t alignment_of(const cuda_product *p)
{
    uintptr_t bits = 256 | (uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->c | (uintptr_t)p->bias;
    return (int64_t)(bits & (~bits + 1));
}

bool cuda_light_product(cuda_device *d, const cuda_product *p, cudaStream_t stream, void *work,
                        int64_t bytes)
{
    const float one = 1, beta = (float)p->beta;
    if (p->in_dtype != MT_BF16 || p->c_dtype == MT_F64 || p->m <= 0 || p->n <= 0 || p->k <= 0)
        return false;
    light_shape s = { .m = p->m,
                      .n = p->n,
                      .k = p->k,
                      .lda = p->lda,
                      .ldb = p->ldb,
                      .ldc = p->ldc,
                      .trans_a = p->trans_a,
                      .trans_b = p->trans_b,
                      .c_dtype = p->c_dtype,
                      .bias = p->bias != NULL,
                      .alignment = alignment_of(p),
                      .work = bytes };
    light_layouts l;
    describe(&s, &l);
    int64_t *rows = p->trans_a ? &s.k : &s.m;
    *rows = (*rows + ROWS - 1) / ROWS * ROWS;
    light_plan *plan = s.alignment >= 16 ? find(d->light, &s) : NULL;
    if (!plan || !plan->usable ||
        (p->bias && cublasLtMatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                   &p->bias, sizeof p->bias)))
        return false;
    cublasStatus_t status =
        cublasLtMatmul(d->light->handle, plan->op, &one, p->b, &l.b, p->a, &l.a, &beta, p->c, &l.c,
                       p->c, &l.c, &plan->algorithm, work, (size_t)bytes, stream);
    /* What serves the largest of these rows need not serve all. */
    return status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE &&
           cuda_blas_ok(d, status, "a GEMM");
}

mt_status cuda_light_open(cuda_device *d)
{
    d->light = calloc(1, sizeof *d->light);
    if (d->light && cublasLtCreate(&d->light->handle) == CUBLAS_STATUS_SUCCESS)
        return MT_OK;
    return mt_fail(MT_ERR_DEVICE, "CUDA device %d (%s): cublasLt does not start", d->index,
                   d->name);
}

void cuda_light_close(cuda_device *d)
{
    cuda_light *l = d->light;
    for (int i = 0; l && i < BUCKETS; i++)
        while (l->plans[i]) {
            light_plan *p = l->plans[i];
            l->plans[i] = p->next;
            if (p->op)
                (void)cublasLtMatmulDescDestroy(p->op);
            free(p);
        }
    if (l && l->handle)
        (void)cublasLtDestroy(l->handle);
    free(l);
    d->light = NULL;
}
