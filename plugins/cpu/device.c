/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU device: opening, describing and closing it, its sticky failure, and the interface table.
 */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const isa_name[CPU_ISAS] = { "plain C", "AVX2", "AVX-512" };

void cpu_device_fail(cpu_device *d, mt_status status, const char *text)
{
    pthread_mutex_lock(&d->lock);
    if (d->failed == MT_OK) {
        d->failed = status;
        snprintf(d->failure, sizeof d->failure, "%s", text);
    }
    pthread_mutex_unlock(&d->lock);
}

bool cpu_device_failed(cpu_device *d)
{
    pthread_mutex_lock(&d->lock);
    bool failed = d->failed != MT_OK;
    pthread_mutex_unlock(&d->lock);
    return failed;
}

static mt_status device_error(void *device)
{
    cpu_device *d = device;
    char text[sizeof d->failure];
    pthread_mutex_lock(&d->lock);
    mt_status status = d->failed;
    memcpy(text, d->failure, sizeof text);
    pthread_mutex_unlock(&d->lock);
    return status == MT_OK ? MT_OK : mt_fail(status, "%s", text);
}

static mt_status device_probe(void)
{
    cpu_isa isa;
    return cpu_detect_isa(&isa);
}

static void device_close(void *device)
{
    cpu_device *d = device;
    if (!d)
        return;
    cpu_queues_free(d);
    cpu_pool_destroy(d->pool);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static mt_status device_open(int32_t index, int32_t threads, void **ret_device)
{
    cpu_isa isa;
    if (index != 0)
        return mt_fail(MT_ERR_NOT_FOUND, "there is no CPU device %d; the only one is 0",
                       (int)index);
    mt_status status = cpu_detect_isa(&isa);
    if (status != MT_OK)
        return status;
    status = cpu_blas_reserve(isa, 1); /* for the product that loading checks */
    if (status == MT_OK)
        status = cpu_blas_load(isa);
    if (status != MT_OK)
        return status;
    cpu_device *d = calloc(1, sizeof *d);
    if (!d)
        return mt_fail(MT_ERR_NOMEM, "out of memory for a CPU device");
    d->isa = isa;
    d->threads = threads > 0 ? threads : cpu_limit_threads();
    pthread_mutex_init(&d->lock, NULL);
    status = cpu_pool_create(d->threads, &d->pool);
    if (status == MT_OK)
        status = cpu_blas_reserve(isa, d->threads);
    if (status != MT_OK) {
        device_close(d);
        return status;
    }
    *ret_device = d;
    return MT_OK;
}

static void processor_name(char *ret, size_t size)
{
    snprintf(ret, size, "CPU");
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f)
        return;
    char line[512];
    while (fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        colon += 1 + strspn(colon + 1, " \t");
        colon[strcspn(colon, "\n")] = 0;
        snprintf(ret, size, "%s", colon);
        break;
    }
    fclose(f);
}

static void device_info(const void *device, mt_device_info *ret)
{
    const cpu_device *d = device;
    *ret = (mt_device_info){ .struct_size = sizeof *ret,
                             .compute_threads = (uint32_t)d->threads,
                             .compute_dtypes = 1u << MT_F32 | 1u << MT_BF16 | 1u << MT_F64,
                             .unified = 1,
                             .default_compute = MT_F32 };
    processor_name(ret->name, sizeof ret->name);
    snprintf(ret->details, sizeof ret->details, "%s, OpenBLAS: %s", isa_name[d->isa],
             d->isa == CPU_SCALAR ? "not used" : cpu_blas_core());
    cpu_limit_memory(&ret->memory_total, &ret->memory_free);
}

const mt_backend cpu_backend = {
    .struct_size = sizeof(mt_backend),
    .kind = "cpu",
    .probe = device_probe,
    .open = device_open,
    .close = device_close,
    .info = device_info,
    .device_alloc = cpu_memory_alloc,
    .device_free = cpu_memory_free,
    .host_alloc = cpu_memory_alloc,
    .host_free = cpu_memory_free,
    .queue_create = cpu_queue_create,
    .queue_destroy = cpu_queue_destroy,
    .queue_sync = cpu_queue_sync,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .event_wait = cpu_event_wait,
    .event_query = cpu_event_query,
    .event_sync = cpu_event_sync,
    .error = device_error,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy,
    .copy = cpu_copy,
    .fill = cpu_fill,
    .copy_in_join = cpu_copy_in_join,
    .join_scratch = cpu_join_scratch,
    .sum_squares = cpu_sum_squares,
    .sum_squares_scratch = cpu_sum_squares_scratch,
    .timestamp = cpu_timestamp,
    .delay = cpu_delay,
    .kernel = cpu_kernel,
    .narrow = cpu_narrow,
};
