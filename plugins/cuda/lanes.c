/* SPDX-License-Identifier: Apache-2.0
 *
 * Lanes: streams beside a queue for products that are too small to fill the device one by one. They
 * fork from the queue and join it again; which product takes which lane depends on its index only,
 * and every lane has a handle and a workspace of its own, so results repeat bit for bit.
 *
 * Also how the host learns what only the device knows: how many rows each expert was given.
 */
#include "cuda.h"

#include <stdlib.h>

struct cuda_lanes {
    bool ready;
    cudaStream_t stream[CUDA_LANES];
    cublasHandle_t handle[CUDA_LANES];
    cudaEvent_t done[CUDA_LANES];
    cudaEvent_t begin;   /* the queue has come to the fork */
    cudaEvent_t arrived; /* `numbers` are there; waiting for it sleeps */
    int32_t *numbers;    /* [CUDA_NUMBERS] host memory */
    char *work;          /* of the present fork */
};

static void clear(cuda_lanes *l)
{
    for (int i = 0; i < CUDA_LANES; i++) {
        if (l->handle[i])
            (void)cublasDestroy(l->handle[i]);
        if (l->done[i])
            (void)cudaEventDestroy(l->done[i]);
        if (l->stream[i])
            (void)cudaStreamDestroy(l->stream[i]);
    }
    if (l->begin)
        (void)cudaEventDestroy(l->begin);
    if (l->arrived)
        (void)cudaEventDestroy(l->arrived);
    (void)cudaFreeHost(l->numbers);
    *l = (cuda_lanes){ 0 };
}

void cuda_lanes_close(cuda_device *d)
{
    if (d->lanes)
        clear(d->lanes);
    free(d->lanes);
    d->lanes = NULL;
}

mt_status cuda_lanes_open(cuda_device *d)
{
    d->lanes = calloc(1, sizeof *d->lanes);
    if (d->lanes)
        return MT_OK;
    return mt_fail(MT_ERR_NOMEM, "out of memory for a CUDA device");
}

static mt_status create(const cuda_device *d, cuda_lanes *l)
{
    cudaError_t e = cudaHostAlloc((void **)&l->numbers, CUDA_NUMBERS * sizeof *l->numbers,
                                  cudaHostAllocDefault);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&l->begin, cudaEventDisableTiming);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&l->arrived, cudaEventDisableTiming | cudaEventBlockingSync);
    for (int i = 0; i < CUDA_LANES && e == cudaSuccess; i++) {
        e = cudaStreamCreateWithFlags(&l->stream[i], cudaStreamNonBlocking);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&l->done[i], cudaEventDisableTiming);
    }
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return mt_fail(MT_ERR_DEVICE, "CUDA device %d (%s): no streams: %s", d->index, d->name,
                       cudaGetErrorString(e));
    }
    mt_status st = MT_OK;
    for (int i = 0; i < CUDA_LANES && st == MT_OK; i++)
        st = cuda_blas_handle(d, &l->handle[i]);
    return st;
}

mt_status cuda_lanes_prepare(const cuda_device *d)
{
    cuda_lanes *l = d->lanes;
    if (l->ready)
        return MT_OK;
    cuda_use(d);
    mt_status st = create(d, l);
    if (st == MT_OK)
        l->ready = true;
    else
        clear(l);
    return st;
}

static bool prepared(cuda_device *d)
{
    if (cuda_lanes_prepare(d) == MT_OK)
        return true;
    cuda_fail(d, MT_ERR_DEVICE, "CUDA device %d (%s): no streams for experts", d->index, d->name);
    return false;
}

const int32_t *cuda_read_numbers(cuda_queue *q, const int32_t *numbers, int64_t n)
{
    cuda_device *d = q->device;
    cuda_lanes *l = d->lanes;
    if (n > CUDA_NUMBERS || !prepared(d))
        return NULL;
    bool good = cuda_ok(d,
                        cudaMemcpyAsync(l->numbers, numbers, (size_t)n * sizeof *numbers,
                                        cudaMemcpyDeviceToHost, q->stream),
                        "reading numbers") &&
                cuda_ok(d, cudaEventRecord(l->arrived, q->stream), "reading numbers") &&
                cuda_ok(d, cudaEventSynchronize(l->arrived), "reading numbers");
    return good ? l->numbers : NULL;
}

bool cuda_lanes_fork(cuda_queue *q, void *work)
{
    cuda_device *d = q->device;
    cuda_lanes *l = d->lanes;
    bool good = cuda_ok(d, cudaEventRecord(l->begin, q->stream), "lanes");
    l->work = work;
    for (int i = 0; i < CUDA_LANES && good; i++)
        good = cuda_ok(d, cudaStreamWaitEvent(l->stream[i], l->begin, 0), "lanes") &&
               cuda_blas_use(d, l->handle[i], l->stream[i], l->work + i * (int64_t)CUDA_LANE_BYTES,
                             CUDA_LANE_BYTES);
    return good;
}

void cuda_lanes_gemm(cuda_queue *q, int64_t index, const cuda_product *p)
{
    cuda_device *d = q->device;
    cuda_lanes *l = d->lanes;
    int i = (int)(index % CUDA_LANES);
    if (cuda_light_product(d, p, l->stream[i], l->work + i * (int64_t)CUDA_LANE_BYTES,
                           CUDA_LANE_BYTES))
        return;
    cuda_product rest = *p;
    if (p->bias) {
        cuda_launch_bias(l->stream[i], p->c_dtype, p->bias, p->c, p->ldc, p->m, p->n);
        rest.beta = 1;
    }
    cuda_blas_product(d, l->handle[i], &rest);
}

void cuda_lanes_join(cuda_queue *q)
{
    cuda_device *d = q->device;
    cuda_lanes *l = d->lanes;
    for (int i = 0; i < CUDA_LANES; i++)
        if (!cuda_ok(d, cudaEventRecord(l->done[i], l->stream[i]), "lanes") ||
            !cuda_ok(d, cudaStreamWaitEvent(q->stream, l->done[i], 0), "lanes"))
            return;
}
