/* SPDX-License-Identifier: Apache-2.0
 *
 * Interface "megatrain.backend/1": a compute device as the engine sees it. Memory, in-order queues,
 * events, copies, and a table of kernels. The core validates every argument; a backend need not.
 *
 * Queues execute asynchronously and in order; events order them against each other. Functions with
 * a `queue` argument only enqueue and copy whatever they are given by pointer before they return
 * (tensors' data stays where it is, and must stay valid until the queue has passed). Failures of
 * enqueued work are sticky and reported by `error`.
 */
#ifndef MEGATRAIN_BACKEND_H
#define MEGATRAIN_BACKEND_H

#include "base.h"
#include "template.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_BACKEND_INTERFACE "megatrain.backend/1"

typedef int32_t mt_pass;
enum {
    MT_PASS_TRAIN = 0,   /* forward that a backward will follow */
    MT_PASS_EVAL = 1,    /* loss only */
    MT_PASS_PREFILL = 2, /* the start of one document; fills states; logits of the asked rows */
    MT_PASS_DECODE = 3   /* its next token, or a few; reads and extends states */
};

/* A packed micro-batch on the device. Pointers are device pointers unless stated. */
typedef struct mt_batch {
    int64_t tokens;            /* T */
    int64_t documents;         /* n */
    int64_t max_document;      /* tokens of the longest document */
    const int32_t *ids;        /* [T] token ids */
    const int32_t *rows;       /* [T] row of each token in a gathered table (MT_OP_GATHERS_ROWS), in
                                * backward in its gradient */
    const int32_t *targets;    /* [T] token ids, -100: ignored */
    const int32_t *positions;  /* [T], restart at 0 in every document */
    const int32_t *doc_starts; /* [n + 1], cumulative, doc_starts[n] == T */
    const int32_t *host_doc_starts; /* the same in host memory; valid until the queue has passed */
    double loss_scale; /* factor on every target's loss gradient: 1 / targets of the whole step */
    /* prefill and decode only */
    void *logits;              /* [n_logit_rows, vocab] in the statistics dtype */
    const int32_t *logit_rows; /* [n_logit_rows] rows of x whose logits are wanted */
    int64_t n_logit_rows;
} mt_batch;

/* One call of an operation's kernel. Absent tensors have data == NULL. */
typedef struct mt_op_call {
    uint32_t struct_size;
    mt_pass pass;
    const void *attr; /* as in the template; lives as long as the template */
    uint32_t n_in, n_out, n_aux;
    uint32_t d_accumulate; /* bit i: add to d_in[i]; else overwrite it */
    mt_tensor in[MT_OP_MAX_IN];
    mt_tensor out[MT_OP_MAX_OUT];
    mt_tensor aux[MT_OP_MAX_AUX];
    /* backward: gradients of the outputs (each in its value's dtype; none for int32) and where
     * those of the operands go: activations in their own dtype, parameters in the statistics dtype;
     * data NULL: not wanted. Operands and outputs that the shape rule did not ask for (backward_in,
     * backward_out) have data NULL. In the forward of an MT_OP_GRAD_IN_FORWARD op in a train pass,
     * d_in of the parameters is set. d_in never overlaps d_out or another d_in. */
    mt_tensor d_out[MT_OP_MAX_OUT];
    mt_tensor d_in[MT_OP_MAX_IN];
    void *work; /* at least workspace() bytes, 256-byte aligned */
    int64_t work_bytes;
    mt_batch batch;
    /* Generation; data NULL outside of it: what the operation's shape rule keeps (mt_op_shape),
     * rows adjacent. Prefill finds anything in it, decode what the call before left. Attention has
     * keys and values here, row i of them token i: [context, kv_heads * qk_dim] and
     * [context, kv_heads * v_dim]. */
    mt_tensor state[MT_OP_MAX_STATE];
    int64_t used; /* tokens of the document before this call's */
    /* Training and evaluation, where the shape rule asks for one: sums of this micro-batch over the
     * units (mt_op_shape::tally), on the device. All 0 before the first unit's forward; forward
     * adds the unit's part; complete when the last unit's has run, so in every backward, which must
     * leave it as it is. */
    double *tally;
} mt_op_call;

typedef struct mt_kernel {
    uint32_t struct_size;
    uint32_t reserved;
    const char *op;
    void (*forward)(void *device, void *queue, const mt_op_call *call);  /* [main], enqueues */
    void (*backward)(void *device, void *queue, const mt_op_call *call); /* [main], enqueues */
    /* Bytes of `work` that forward (backward false) or backward needs for any call whose tensors
     * and batch are no larger than those of `call` (pointers in it are not looked at, except that
     * NULL data means absent). NULL: none. [pure] */
    int64_t (*workspace)(const void *device, const mt_op_call *call, bool backward);
} mt_kernel;

typedef struct mt_device_info {
    uint32_t struct_size;
    uint32_t compute_threads;
    char name[128];       /* "Intel Xeon ...", "NVIDIA H200" */
    char details[128];    /* instruction set, libraries: for logs */
    int64_t memory_total; /* bytes of device memory; for a CPU what this process may use */
    int64_t memory_free;
    uint32_t compute_dtypes; /* bit MT_F32, MT_BF16, MT_F64 */
    uint32_t unified;        /* 1: device memory is host memory (CPU) */
    mt_dtype default_compute;
    int32_t reserved;
} mt_device_info;

typedef struct mt_backend {
    uint32_t struct_size;
    uint32_t reserved;
    const char *kind; /* "cpu", "cuda": what `device:` in a run manifest names */

    /* Is there a usable device? MT_ERR_NOT_FOUND with a one-line reason otherwise. [main] */
    mt_status (*probe)(void);
    /* `threads` <= 0: all that this process may use. [main] */
    mt_status (*open)(int32_t index, int32_t threads, void **ret_device);
    void (*close)(void *device); /* accepts NULL [main] */
    void (*info)(const void *device, mt_device_info *ret);

    /* Memory. Device memory is zero-filled or not, as the device likes; 256-byte aligned. Host
     * memory is what copies run fastest from: pinned for a GPU, huge pages for a CPU. [main] */
    mt_status (*device_alloc)(void *device, int64_t bytes, void **ret);
    void (*device_free)(void *device, void *p, int64_t bytes);
    mt_status (*host_alloc)(void *device, int64_t bytes, void **ret);
    void (*host_free)(void *device, void *p, int64_t bytes);

    /* Queues and events. [main]; recording, waiting and querying are [any], one thread per queue at
     * a time: gradients leave on a queue that a thread of its own feeds. An event that was never
     * recorded counts as done; a wait means the record before it, not a later one. */
    mt_status (*queue_create)(void *device, const char *name, void **ret_queue);
    void (*queue_destroy)(void *device, void *queue);
    void (*queue_sync)(void *device, void *queue); /* blocks until the queue is empty */
    mt_status (*event_create)(void *device, void **ret_event);
    void (*event_destroy)(void *device, void *event);
    void (*event_record)(void *device, void *event, void *queue);
    void (*event_wait)(void *device, void *queue, void *event); /* the queue waits */
    bool (*event_query)(void *device, void *event);             /* done? [any] */
    void (*event_sync)(void *device, void *event);              /* the caller waits [any] */
    /* The sticky failure of enqueued work, if any; sets the error text. [any] */
    mt_status (*error)(void *device);

    /* Enqueued data movement. [any], one thread per queue at a time */
    void (*copy_in)(void *device, void *queue, void *dst, const void *host_src, int64_t bytes);
    void (*copy_out)(void *device, void *queue, void *host_dst, const void *src, int64_t bytes);
    void (*copy)(void *device, void *queue, void *dst, const void *src, int64_t bytes);
    void (*fill)(void *device, void *queue, void *dst, uint8_t byte, int64_t bytes);
    /* Brings n master weights to the device as FP32 from their two planes in host memory. `scratch`
     * is join_scratch(n) bytes of device memory. */
    void (*copy_in_join)(void *device, void *queue, float *dst, const uint16_t *host_hi,
                         const int16_t *host_lo, int64_t n, void *scratch);
    int64_t (*join_scratch)(const void *device, int64_t n);
    /* *dst (device, double) = sum of squares of x[0..n), in a fixed order; scratch of
     * sum_squares_scratch(n) bytes. */
    void (*sum_squares)(void *device, void *queue, const float *x, int64_t n, double *dst,
                        void *scratch);
    int64_t (*sum_squares_scratch)(const void *device, int64_t n);
    /* Writes the time (CLOCK_MONOTONIC, ns) at which the queue gets here to *host_slot, which lies
     * in memory from host_alloc: a GPU writes it by itself. */
    void (*timestamp)(void *device, void *queue, uint64_t *host_slot);
    /* Holds the queue up for about `ns`: what --chaos does. */
    void (*delay)(void *device, void *queue, uint64_t ns);

    /* The kernels of operation `op`; NULL when the backend has none. [any] */
    const mt_kernel *(*kernel)(const void *device, const char *op);

    /* dst[i] = x[i] rounded to BF16 (nearest, ties to even; NaN stays NaN), and x[i] becomes what
     * dst[i] now says; device pointers. `memory.gradient_dtype: bf16` needs it; a backend whose
     * struct_size ends before it, or that has NULL here, trains with FP32 gradients only. [main],
     * enqueues */
    void (*narrow)(void *device, void *queue, uint16_t *dst, float *x, int64_t n);

    /* May results differ in their last bits from run to run where that is faster? Not after open().
     * Called before any workspace() whose call will run so. A backend whose struct_size ends before
     * it, or that has NULL here, has nothing to gain: its results repeat either way. [main] */
    void (*set_deterministic)(void *device, bool on);
} mt_backend;

#ifdef __cplusplus
}
#endif
#endif
