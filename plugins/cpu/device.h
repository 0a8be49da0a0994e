/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CPU backend: the device, its compute pool, its queues and their events.
 */
#ifndef MT_CPU_DEVICE_H
#define MT_CPU_DEVICE_H

#include "cpu.h"

#include <pthread.h>

/* ---- compute pool ---------------------------------------------------------------------------- */

typedef struct cpu_pool cpu_pool;

/* One task of a job. `slot` (0 .. threads - 1) is the thread's own: for scratch memory only. */
typedef void cpu_task_fn(void *context, int64_t task, int32_t slot);

mt_status cpu_pool_create(int32_t threads, cpu_pool **ret);
void cpu_pool_destroy(cpu_pool *p); /* accepts NULL */
/* Runs tasks 0 .. n - 1 and returns when all are done; the caller takes part. Jobs of several
 * callers run one after the other. [any] */
void cpu_pool_run(cpu_pool *p, int64_t n, cpu_task_fn *fn, void *context);

/* ---- device ---------------------------------------------------------------------------------- */

typedef struct cpu_queue cpu_queue;

typedef struct cpu_device {
    cpu_isa isa;
    int32_t threads;
    cpu_pool *pool;
    pthread_mutex_t lock; /* guards what follows, and every event of the device */
    cpu_queue *queues;    /* all that were ever created; retired ones are used again */
    mt_status failed;     /* the sticky failure of enqueued work */
    char failure[256];
} cpu_device;

/* The first failure wins; operations enqueued later are skipped. [any] */
void cpu_device_fail(cpu_device *d, mt_status status, const char *text);
bool cpu_device_failed(cpu_device *d);

/* ---- queues (queue.c): members of mt_backend ------------------------------------------------- */

mt_status cpu_queue_create(void *device, const char *name, void **ret_queue);
void cpu_queue_destroy(void *device, void *queue);
void cpu_queue_sync(void *device, void *queue);
void cpu_queues_free(cpu_device *d); /* the retired ones; for close */

mt_status cpu_event_create(void *device, void **ret_event);
void cpu_event_destroy(void *device, void *event);
void cpu_event_record(void *device, void *event, void *queue);
void cpu_event_wait(void *device, void *queue, void *event);
bool cpu_event_query(void *device, void *event);
void cpu_event_sync(void *device, void *event);

void cpu_copy(void *device, void *queue, void *dst, const void *src, int64_t bytes);
void cpu_fill(void *device, void *queue, void *dst, uint8_t byte, int64_t bytes);
void cpu_copy_in_join(void *device, void *queue, float *dst, const uint16_t *hi, const int16_t *lo,
                      int64_t n, void *scratch);
int64_t cpu_join_scratch(const void *device, int64_t n);
void cpu_sum_squares(void *device, void *queue, const float *x, int64_t n, double *dst,
                     void *scratch);
int64_t cpu_sum_squares_scratch(const void *device, int64_t n);
void cpu_narrow(void *device, void *queue, uint16_t *dst, float *x, int64_t n);
void cpu_timestamp(void *device, void *queue, uint64_t *host_slot);
void cpu_delay(void *device, void *queue, uint64_t ns);
void cpu_enqueue_op(void *queue, const cpu_op *op, const mt_op_call *call, bool backward);

/* Bytes of `work` that an operation needs on this device: its workspace and every thread's scratch.
 * [pure] */
int64_t cpu_op_work(const cpu_device *d, const cpu_op *op, const mt_op_call *c, bool backward);

/* ---- memory (memory.c) ----------------------------------------------------------------------- */

mt_status cpu_memory_alloc(void *device, int64_t bytes, void **ret);
void cpu_memory_free(void *device, void *p, int64_t bytes);

/* ---- what this process may use (limits.c) ---------------------------------------------------- */

/* Processors: the affinity mask, and the CPU quota of the control groups; at least 1. */
int32_t cpu_limit_threads(void);
/* Bytes: the machine's memory or the control groups' limit, whichever is less. */
void cpu_limit_memory(int64_t *ret_total, int64_t *ret_free);

/* ---- OpenBLAS (blas.c) ----------------------------------------------------------------------- */

/* Loads the library on the first call, after choosing its kernels for `isa`, and checks a small
 * product. Does nothing for CPU_SCALAR. [main] */
mt_status cpu_blas_load(cpu_isa isa);
/* Fails unless so many threads can multiply at once, and keeps the address space that this takes:
 * the library tries for ever to map what it cannot have. [main] */
mt_status cpu_blas_reserve(cpu_isa isa, int32_t threads);
/* "SkylakeX", or "none" before the library is loaded. */
const char *cpu_blas_core(void);

/* ---- kernels (kernels.c) --------------------------------------------------------------------- */

const mt_kernel *cpu_kernel(const void *device, const char *op);

extern const mt_backend cpu_backend;

#endif
