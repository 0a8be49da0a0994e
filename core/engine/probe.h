/* SPDX-License-Identifier: Apache-2.0
 *
 * Timing what a device's queue does: shared by the short measurement of the plan and the long one
 * of `bench hardware`.
 */
#ifndef MT_CORE_PROBE_H
#define MT_CORE_PROBE_H

#include <megatrain/backend.h>

typedef struct probe {
    const mt_backend *b;
    void *device, *queue;
    uint64_t *ns; /* [2] when the queue began and ended, written by itself */
} probe;

/* [main] */
mt_status probe_open(const mt_backend *b, void *device, probe *ret);
void probe_close(probe *p); /* accepts { 0 } */

/* Seconds that the queue spends on what `enqueue` puts there: the least of several times, since on
 * a machine that does other work too a single one can take many times as long as those of a run do
 * on average. [main] */
double probe_best(const probe *p, void (*enqueue)(const probe *p, const void *arg),
                  const void *arg);

/* Numbers in +-1 for what is multiplied: zeros would run faster than real data, and cooler. */
enum { PROBE_NOISE_BYTES = 4 << 20 };

/* Host memory of the backend's with PROBE_NOISE_BYTES of them, in a compute dtype. [main] */
mt_status probe_make_noise(const probe *p, mt_dtype dtype, void **ret);
void probe_free_noise(const probe *p, void *noise); /* accepts NULL */
/* Enqueues copies of it that fill `bytes` of device memory. [main] */
void probe_put_noise(const probe *p, const void *noise, void *to, int64_t bytes);

/* A kernel call for probe_best. */
typedef struct probe_kernel {
    const mt_kernel *kernel;
    mt_op_call call;
    bool backward;
} probe_kernel;

void probe_enqueue_kernel(const probe *p, const void *kernel_call);

/* A gated delta rule over documents of equal length. */
typedef struct probe_recurrence {
    mt_dtype dtype;
    int64_t tokens, document, k_heads, v_heads, dim;
} probe_recurrence;

/* Seconds of its forward and its backward. MT_ERR_NOT_FOUND, without a text, where the backend has
 * no kernels for it. [main] */
mt_status probe_time_recurrence(const probe *p, const probe_recurrence *r, double ret_seconds[2]);

/* FLOPs of its forward; backward counts twice (mt_op_shape). [pure] */
double probe_recurrence_flops(const probe_recurrence *r);

double probe_now(void); /* seconds of the monotonic clock */

#endif
