/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs by cuBLAS. One handle with one fixed workspace and no atomics: the same product gives the
 * same bits. BF16 operands accumulate in FP32; FP32 stays FP32 (no TF32).
 */
#include "cuda.h"

bool cuda_blas_ok(cuda_device *d, cublasStatus_t s, const char *what)
{
    if (s == CUBLAS_STATUS_SUCCESS)
        return true;
    cuda_fail(d, MT_ERR_DEVICE, "CUDA device %d (%s): %s: %s", d->index, d->name, what,
              cublasGetStatusString(s));
    return false;
}

mt_status cuda_blas_handle(const cuda_device *d, cublasHandle_t *ret)
{
    cublasStatus_t s = cublasCreate(ret);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasSetAtomicsMode(*ret, CUBLAS_ATOMICS_NOT_ALLOWED);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasSetMathMode(*ret, CUBLAS_DEFAULT_MATH |
                                        CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    if (s != CUBLAS_STATUS_SUCCESS) {
        return mt_fail(MT_ERR_DEVICE, "CUDA device %d (%s): cuBLAS does not start: %s", d->index,
                       d->name, cublasGetStatusString(s));
    }
    return MT_OK;
}

bool cuda_blas_use(cuda_device *d, cublasHandle_t handle, cudaStream_t stream, void *work,
                   int64_t bytes)
{
    return cuda_blas_ok(d, cublasSetStream(handle, stream), "cuBLAS") &&
           cuda_blas_ok(d, cublasSetWorkspace(handle, work, (size_t)bytes), "cuBLAS");
}

mt_status cuda_blas_open(cuda_device *d)
{
    cuda_blas *b = &d->blas;
    mt_status st = cuda_device_alloc(d, CUDA_BLAS_WORK, &b->work);
    if (st == MT_OK)
        st = cuda_blas_handle(d, &b->handle);
    if (st != MT_OK)
        return st;
    cudaError_t e = cudaEventCreateWithFlags(&b->event, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        return mt_fail(MT_ERR_DEVICE, "CUDA device %d (%s): no event: %s", d->index, d->name,
                       cudaGetErrorString(e));
    }
    return MT_OK;
}

void cuda_blas_close(cuda_device *d)
{
    if (d->blas.handle)
        (void)cublasDestroy(d->blas.handle);
    if (d->blas.event)
        (void)cudaEventDestroy(d->blas.event);
    (void)cudaFree(d->blas.work);
}

void cuda_blas_forget(cuda_queue *q)
{
    if (q->device->blas.queue == q)
        q->device->blas.queue = NULL;
}

/* The workspace passes from queue to queue in order. */
bool cuda_blas_on(cuda_queue *q)
{
    cuda_device *d = q->device;
    cuda_blas *b = &d->blas;
    if (b->queue == q)
        return true;
    if (b->queue && !(cuda_ok(d, cudaEventRecord(b->event, b->queue->stream), "cuBLAS") &&
                      cuda_ok(d, cudaStreamWaitEvent(q->stream, b->event, 0), "cuBLAS")))
        return false;
    if (!cuda_blas_use(d, b->handle, q->stream, b->work, CUDA_BLAS_WORK))
        return false;
    b->queue = q;
    return true;
}

static cudaDataType_t data_type(mt_dtype t)
{
    return t == MT_BF16 ? CUDA_R_16BF : t == MT_F64 ? CUDA_R_64F : CUDA_R_32F;
}

void cuda_blas_product(cuda_device *d, cublasHandle_t handle, const cuda_product *p)
{
    const float one_f32 = 1, beta_f32 = (float)p->beta;
    const double one_f64 = 1;
    bool f64 = p->in_dtype == MT_F64;
    cudaDataType_t in = data_type(p->in_dtype);
    if (p->m <= 0 || p->n <= 0)
        return;
    /* cuBLAS is column-major: it is given C^T = op(B)^T op(A)^T. */
    cuda_blas_ok(
        d,
        cublasGemmEx_64(handle, p->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                        p->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, p->n, p->m, p->k,
                        f64 ? (const void *)&one_f64 : (const void *)&one_f32, p->b, in, p->ldb,
                        p->a, in, p->lda, f64 ? (const void *)&p->beta : (const void *)&beta_f32,
                        p->c, data_type(p->c_dtype), p->ldc,
                        f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "a GEMM");
}

cuda_product cuda_product_of(const mt_tensor *a, bool trans_a, const mt_tensor *b, bool trans_b,
                             const mt_tensor *c, double beta)
{
    return (cuda_product){ .trans_a = trans_a,
                           .trans_b = trans_b,
                           .m = c->rows,
                           .n = c->cols,
                           .k = trans_a ? a->rows : a->cols,
                           .in_dtype = a->dtype,
                           .c_dtype = c->dtype,
                           .a = a->data,
                           .b = b->data,
                           .c = c->data,
                           .lda = a->ld,
                           .ldb = b->ld,
                           .ldc = c->ld,
                           .beta = beta };
}

void cuda_gemm(cuda_queue *q, cuda_product p)
{
    if (p.m > 0 && p.n > 0 && cuda_blas_on(q))
        cuda_blas_product(q->device, q->device->blas.handle, &p);
}
