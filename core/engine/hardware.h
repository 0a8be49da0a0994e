/* SPDX-License-Identifier: Apache-2.0
 *
 * What a machine can do: measured once with care (`megatrain bench hardware`), kept in a file, and
 * used by the plan and as the ceilings of `bench step`. Rates are bytes/s and FLOP/s.
 */
#ifndef MT_CORE_HARDWARE_H
#define MT_CORE_HARDWARE_H

#include "plan.h"

enum {
    HARDWARE_COPIES = 2,
    HARDWARE_THREADS = 3,
    HARDWARE_GEMMS = 8,
    HARDWARE_ATTENTIONS = 4,
    HARDWARE_SCANS = 2
};

/* Between host and device; `both_` while the other direction runs too. */
typedef struct hardware_copy {
    int64_t bytes; /* of one copy */
    double in, out, both_in, both_out;
} hardware_copy;

/* Host memory, by that many threads. */
typedef struct hardware_host {
    int64_t threads;
    double copy;   /* bytes read and written by a plain copy */
    double update; /* the same of a stream that touches 28 bytes a parameter as AdamW does */
} hardware_host;

/* y [rows, cols] = x [rows, inner] w^T, and its two gradients. */
typedef struct hardware_gemm {
    mt_dtype dtype;
    int64_t rows, cols, inner;
    double forward, input_gradient, weight_gradient;
} hardware_gemm;

/* Causal FLOPs; a backward has 2.5 times those of a forward. */
typedef struct hardware_attention {
    mt_dtype dtype;
    int64_t document, tokens, heads, kv_heads, head_dim;
    double forward, backward;
    double any_order; /* backward where sums may have any order; 0: no different */
} hardware_attention;

/* A gated delta rule; FLOPs as mt_op_shape has them, of backward twice those of forward. */
typedef struct hardware_scan {
    mt_dtype dtype;
    int64_t document, tokens, k_heads, v_heads, head_dim;
    double forward, backward;
} hardware_scan;

typedef struct hardware {
    char host[128];      /* name of the machine */
    char megatrain[32];  /* version that measured */
    int64_t measured_at; /* Unix time */
    char kind[32];       /* of the backend */
    mt_device_info device;
    int64_t cpus, host_memory; /* bytes that the process could use */
    int32_t n_copies, n_threads, n_gemms, n_attentions;
    int32_t n_scans; /* 0: the backend has no recurrence */
    hardware_copy copy[HARDWARE_COPIES];
    hardware_host memory[HARDWARE_THREADS]; /* by ascending threads */
    double device_copy;                     /* device memory to itself, bytes read and written */
    double pin;                             /* bytes/s at which host memory for copies is made */
    hardware_gemm gemm[HARDWARE_GEMMS];
    hardware_attention attention[HARDWARE_ATTENTIONS];
    hardware_scan scan[HARDWARE_SCANS];
    double disk_read, disk_write; /* 0: not measured */
    bool disk_direct;             /* past the page cache */
} hardware;

typedef struct hardware_options {
    bool quick;       /* rough, in a second or two: for tests */
    const char *disk; /* folder whose disk is measured; NULL: none */
    void (*progress)(const char *what);
} hardware_options;

/* Measures the open device and the machine. A disk without room is left out with a warning.
 * [main] */
mt_status hardware_measure(const mt_backend *b, void *device, const hardware_options *options,
                           hardware *ret);

/* The cost model's figures for documents of up to `document` tokens. Fails with
 * MT_ERR_UNSUPPORTED where nothing was measured in `compute`. [pure] but for the error text */
mt_status hardware_profile(const hardware *h, mt_dtype compute, int64_t document,
                           plan_profile *ret);

/* Must results of the open device repeat bit for bit? False where that changes nothing. [main] */
bool hardware_set_deterministic(const mt_backend *b, void *device, bool on);

/* ---- hardware_host.c: used by hardware_measure ----------------------------------------------- */

/* Fills cpus, host_memory, memory[] and, where the backend allocates it, pin. */
mt_status hardware_measure_host(const mt_backend *b, void *device, const hardware_options *options,
                                hardware *h);
/* Bytes/s of hardware_host::update by all processors, roughly, in little memory. [main] */
mt_status hardware_time_update(const mt_backend *b, void *device, double *ret);
/* Fills disk_*. */
mt_status hardware_measure_disk(const hardware_options *options, hardware *h);

#endif
