/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA device: finding, opening, describing and closing it, its sticky failure, and the
 * interface table.
 */
#include "dnn.h"

#include <stdio.h>
#include <stdlib.h>

enum { OLDEST_CAPABILITY = 80 }; /* BF16 tensor cores and asynchronous copies */

void cuda_use(const cuda_device *d)
{
    static _Thread_local int current = -1;
    if (current != d->index && cudaSetDevice(d->index) == cudaSuccess)
        current = d->index;
}

/* ---- failures -------------------------------------------------------------------------------- */

void cuda_fail(cuda_device *d, mt_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&d->lock);
    if (d->failed == MT_OK) {
        d->failed = status;
        vsnprintf(d->failure, sizeof d->failure, fmt, args);
    }
    pthread_mutex_unlock(&d->lock);
    va_end(args);
}

bool cuda_ok(cuda_device *d, cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return true;
    cuda_fail(d, MT_ERR_DEVICE, "CUDA device %d (%s): %s: %s", d->index, d->name, what,
              cudaGetErrorString(e));
    return false;
}

bool cuda_launched(cuda_device *d, const char *what)
{
    return cuda_ok(d, cudaGetLastError(), what);
}

static void take_fault(cuda_device *d)
{
    const cuda_fault *f = d->fault;
    long long index = f->index, value = f->value, limit = f->limit;
    switch (f->kind) {
    case CUDA_FAULT_EMBEDDING_ROW:
        cuda_fail(d, MT_ERR_INVALID,
                  "embedding: token %lld has row %lld of a table of %lld rows; do tokenizer and "
                  "model fit?",
                  index, value, limit);
        break;
    case CUDA_FAULT_TARGET:
        cuda_fail(d, MT_ERR_INVALID,
                  "linear_cross_entropy: target %lld is token %lld, the vocabulary has %lld; do "
                  "tokenizer and model fit?",
                  index, value, limit);
        break;
    case CUDA_FAULT_LOGIT_ROW:
        cuda_fail(d, MT_ERR_INVALID,
                  "linear_cross_entropy: logits of row %lld are wanted of %lld rows", value, limit);
        break;
    default:
        break;
    }
}

static mt_status device_error(void *device)
{
    cuda_device *d = device;
    char text[sizeof d->failure];
    cuda_use(d);
    take_fault(d);
    /* A kernel that failed makes every later call fail: ask about a stream that is idle. */
    cudaError_t e = cudaStreamQuery(d->clock.stream);
    if (e != cudaErrorNotReady)
        cuda_ok(d, e, "a kernel failed");
    pthread_mutex_lock(&d->lock);
    mt_status status = d->failed;
    memcpy(text, d->failure, sizeof text);
    pthread_mutex_unlock(&d->lock);
    return status == MT_OK ? status : mt_fail(status, "%s", text);
}

/* ---- open and close -------------------------------------------------------------------------- */

static mt_status check_device(int index, struct cudaDeviceProp *ret)
{
    int devices = 0, driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return mt_fail(MT_ERR_NOT_FOUND,
                       "no NVIDIA driver: libcuda.so.1 is not there or does not start");
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || devices == 0) {
        (void)cudaGetLastError();
        return mt_fail(MT_ERR_NOT_FOUND,
                       "no CUDA device: %s (driver for CUDA %d.%d, this plugin needs %d.%d)",
                       e != cudaSuccess ? cudaGetErrorString(e) : "none is visible", driver / 1000,
                       driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    }
    if (index < 0 || index >= devices)
        return mt_fail(MT_ERR_NOT_FOUND, "CUDA device %d does not exist: %d are visible", index,
                       devices);
    e = cudaGetDeviceProperties(ret, index);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return mt_fail(MT_ERR_NOT_FOUND, "CUDA device %d: %s", index, cudaGetErrorString(e));
    }
    if (ret->major * 10 + ret->minor < OLDEST_CAPABILITY)
        return mt_fail(MT_ERR_NOT_FOUND,
                       "CUDA device %d (%s) has compute capability %d.%d, at least %d.%d is needed",
                       index, ret->name, ret->major, ret->minor, OLDEST_CAPABILITY / 10,
                       OLDEST_CAPABILITY % 10);
    int direct = 0;
    e = cudaDeviceGetAttribute(&direct, cudaDevAttrCanUseHostPointerForRegisteredMem, index);
    if (e != cudaSuccess || !direct)
        return mt_fail(MT_ERR_NOT_FOUND,
                       "CUDA device %d (%s) cannot use the addresses of pinned host memory", index,
                       ret->name);
    return MT_OK;
}

static mt_status device_probe(void)
{
    struct cudaDeviceProp p;
    return check_device(0, &p);
}

static void device_close(void *device)
{
    cuda_device *d = device;
    if (!d)
        return;
    cuda_use(d);
    (void)cudaDeviceSynchronize();
    dnn_close(d);
    cuda_lanes_close(d);
    cuda_light_close(d);
    cuda_blas_close(d);
    cuda_clock_close(d);
    (void)cudaFreeHost(d->fault);
    (void)cudaFree(d->fault_claim);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static mt_status open_parts(cuda_device *d)
{
    cudaError_t e = cudaHostAlloc((void **)&d->fault, sizeof *d->fault, cudaHostAllocMapped);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&d->fault_claim, sizeof *d->fault_claim);
    if (e == cudaSuccess)
        e = cudaMemset(d->fault_claim, 0, sizeof *d->fault_claim);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return mt_fail(e == cudaErrorMemoryAllocation ? MT_ERR_NOMEM : MT_ERR_DEVICE,
                       "CUDA device %d (%s) does not start: %s", d->index, d->name,
                       cudaGetErrorString(e));
    }
    *d->fault = (cuda_fault){ 0 };
    mt_status st = cuda_clock_open(d);
    if (st == MT_OK)
        st = cuda_blas_open(d);
    if (st == MT_OK)
        st = cuda_lanes_open(d);
    if (st == MT_OK)
        st = cuda_light_open(d);
    if (st == MT_OK)
        dnn_open(d);
    return st;
}

/* Without it, or with MEGATRAIN_WGMMA=0, experts are multiplied as on other devices. */
static void *tensor_map_encoder(const cuda_device *d)
{
    const char *value = getenv("MEGATRAIN_WGMMA");
    enum cudaDriverEntryPointQueryResult found;
    void *fn = NULL;
    if (d->capability != 90 || (value && strcmp(value, "0") == 0))
        return NULL;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault,
                                         &found) == cudaSuccess &&
        found == cudaDriverEntryPointSuccess)
        return fn;
    (void)cudaGetLastError();
    mt_log(MT_LOG_DEBUG, "CUDA device %d (%s): the driver has no cuTensorMapEncodeTiled", d->index,
           d->name);
    return NULL;
}

static mt_status device_open(int32_t index, int32_t threads, void **ret_device)
{
    struct cudaDeviceProp p;
    mt_status st = check_device(index, &p);
    (void)threads; /* the device's own are all used */
    if (st != MT_OK)
        return st;
    cuda_device *d = calloc(1, sizeof *d);
    if (!d)
        return mt_fail(MT_ERR_NOMEM, "out of memory for a CUDA device");
    d->index = index;
    d->capability = p.major * 10 + p.minor;
    d->multiprocessors = p.multiProcessorCount;
    d->shared_bytes = (int64_t)p.sharedMemPerBlockOptin;
    d->memory_total = (int64_t)p.totalGlobalMem;
    snprintf(d->name, sizeof d->name, "%.*s", (int)sizeof d->name - 1, p.name);
    int driver = 0;
    (void)cudaDriverGetVersion(&driver);
    snprintf(d->details, sizeof d->details,
             "compute capability %d.%d, %d multiprocessors, driver for CUDA %d.%d, runtime %d.%d",
             p.major, p.minor, p.multiProcessorCount, driver / 1000, driver % 1000 / 10,
             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    pthread_mutex_init(&d->lock, NULL);
    pthread_mutex_init(&d->clock.lock, NULL);
    cuda_use(d);
    d->overlaps_launches = d->capability >= 90 && cuda_overlaps_launches();
    d->tensor_map_encoder = tensor_map_encoder(d);
    st = open_parts(d);
    if (st != MT_OK) {
        device_close(d);
        return st;
    }
    *ret_device = d;
    return MT_OK;
}

static void device_info(const void *device, mt_device_info *ret)
{
    const cuda_device *d = device;
    size_t available = 0, total = 0;
    cuda_use(d);
    (void)cudaMemGetInfo(&available, &total);
    *ret = (mt_device_info){ .struct_size = sizeof *ret,
                             .compute_threads = (uint32_t)d->multiprocessors,
                             .memory_total = d->memory_total,
                             .memory_free = (int64_t)available,
                             .compute_dtypes = 1u << MT_F32 | 1u << MT_BF16 | 1u << MT_F64,
                             .default_compute = MT_BF16 };
    memcpy(ret->name, d->name, sizeof ret->name);
    memcpy(ret->details, d->details, sizeof ret->details);
}

static void set_deterministic(void *device, bool on)
{
    cuda_device *d = device;
    d->any_order = !on;
}

const mt_backend cuda_backend = {
    .struct_size = sizeof(mt_backend),
    .kind = "cuda",
    .probe = device_probe,
    .open = device_open,
    .close = device_close,
    .info = device_info,
    .device_alloc = cuda_device_alloc,
    .device_free = cuda_device_free,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .queue_create = cuda_queue_create,
    .queue_destroy = cuda_queue_destroy,
    .queue_sync = cuda_queue_sync,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_query = cuda_event_query,
    .event_sync = cuda_event_sync,
    .error = device_error,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .copy_in_join = cuda_copy_in_join,
    .join_scratch = cuda_join_scratch,
    .sum_squares = cuda_sum_squares,
    .sum_squares_scratch = cuda_sum_squares_scratch,
    .timestamp = cuda_timestamp,
    .delay = cuda_delay,
    .kernel = cuda_kernel,
    .narrow = cuda_narrow,
    .set_deterministic = set_deterministic,
};
