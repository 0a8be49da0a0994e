/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CUDA backend: the device, its queues, and what the files share. The C side (.c) talks
 * to the runtime and to cuBLAS; the .cu side launches kernels. Nothing here throws or exits: what
 * goes wrong on a queue becomes the device's sticky failure.
 */
#ifndef MT_CUDA_H
#define MT_CUDA_H

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <megatrain/backend.h>
#include <megatrain/report.h>
#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- device ---------------------------------------------------------------------------------- */

/* Data that only exists once the queue gets there (token ids, targets, rows) may be out of range. A
 * kernel that finds it so writes here, once, and goes on with row 0. Host memory that the device
 * reaches; `kind` is written last. */
typedef int32_t cuda_fault_kind;
enum {
    CUDA_FAULT_NONE = 0,
    CUDA_FAULT_EMBEDDING_ROW = 1, /* value: the row, limit: rows of the table */
    CUDA_FAULT_TARGET = 2,        /* value: the token, limit: the vocabulary */
    CUDA_FAULT_LOGIT_ROW = 3      /* value: the row, limit: rows of x */
};

typedef struct cuda_fault {
    volatile int32_t kind;
    int32_t value;
    int64_t index;
    int64_t limit;
} cuda_fault;

typedef struct cuda_queue cuda_queue;

/* cuBLAS runs on one queue at a time with one workspace, so that results repeat bit for bit. */
enum { CUDA_BLAS_WORK = 64 << 20 }; /* bytes */
typedef struct cuda_blas {
    cublasHandle_t handle;
    void *work;
    cuda_queue *queue; /* the last one that used it */
    cudaEvent_t event; /* orders a new queue behind it */
} cuda_blas;

/* Device time (globaltimer, ns) + offset = CLOCK_MONOTONIC. */
typedef struct cuda_clock {
    pthread_mutex_t lock;
    cudaStream_t stream;
    volatile uint64_t *slot; /* host memory that the device reaches */
    int64_t offset;
    uint64_t set_at;
} cuda_clock;

typedef struct cuda_dnn cuda_dnn;     /* dnn.c */
typedef struct cuda_lanes cuda_lanes; /* lanes.c */
typedef struct cuda_light cuda_light; /* gemm_light.c */

typedef struct cuda_device {
    int index;
    int capability; /* 90: compute capability 9.0 */
    int multiprocessors;
    int64_t shared_bytes;   /* of a block, at most */
    bool overlaps_launches; /* kernels wait for the one ahead themselves (common.cuh) */
    bool any_order;         /* sums may be formed in any order: results need not repeat */
    /* cuTensorMapEncodeTiled of the driver where kernels for compute capability 9.0a run, else
     * NULL. */
    void *tensor_map_encoder;
    char name[128];
    char details[128];
    int64_t memory_total;
    cuda_fault *fault;    /* host memory */
    int32_t *fault_claim; /* device memory: 0 until the first fault */
    cuda_blas blas;
    cuda_lanes *lanes;
    cuda_light *light;
    cuda_dnn *dnn; /* NULL: attention runs on own kernels */
    cuda_clock clock;
    pthread_mutex_t lock; /* guards what follows */
    mt_status failed;     /* the sticky failure of enqueued work */
    char failure[256];
} cuda_device;

struct cuda_queue {
    cuda_device *device;
    cudaStream_t stream;
    char name[16];
};

/* Makes the device current in the calling thread. [any] */
void cuda_use(const cuda_device *d);

/* The first failure wins. [any] */
void cuda_fail(cuda_device *d, mt_status status, const char *fmt, ...) MT_PRINTF(3, 4);

/* Records a failure of the runtime or of a launch; true when there was none. [any] */
bool cuda_ok(cuda_device *d, cudaError_t e, const char *what);
/* Checks the launches of operation `what` that were just made. [any] */
bool cuda_launched(cuda_device *d, const char *what);

/* ---- memory (memory.c) ----------------------------------------------------------------------- */

/* Registrations of host memory, and copies, never cross a multiple of this address: one copy must
 * lie inside one registration. */
enum { CUDA_HOST_CHUNK = 1 << 30 };

mt_status cuda_device_alloc(void *device, int64_t bytes, void **ret);
void cuda_device_free(void *device, void *p, int64_t bytes);
mt_status cuda_host_alloc(void *device, int64_t bytes, void **ret);
void cuda_host_free(void *device, void *p, int64_t bytes);

/* ---- queues, events, copies (queue.c) -------------------------------------------------------- */

mt_status cuda_queue_create(void *device, const char *name, void **ret_queue);
void cuda_queue_destroy(void *device, void *queue);
void cuda_queue_sync(void *device, void *queue);
mt_status cuda_event_create(void *device, void **ret_event);
void cuda_event_destroy(void *device, void *event);
void cuda_event_record(void *device, void *event, void *queue);
void cuda_event_wait(void *device, void *queue, void *event);
bool cuda_event_query(void *device, void *event);
void cuda_event_sync(void *device, void *event);
void cuda_copy_in(void *device, void *queue, void *dst, const void *src, int64_t bytes);
void cuda_copy_out(void *device, void *queue, void *dst, const void *src, int64_t bytes);
void cuda_copy(void *device, void *queue, void *dst, const void *src, int64_t bytes);
void cuda_fill(void *device, void *queue, void *dst, uint8_t byte, int64_t bytes);
void cuda_copy_in_join(void *device, void *queue, float *dst, const uint16_t *hi, const int16_t *lo,
                       int64_t n, void *scratch);
int64_t cuda_join_scratch(const void *device, int64_t n);
void cuda_sum_squares(void *device, void *queue, const float *x, int64_t n, double *dst,
                      void *scratch);
int64_t cuda_sum_squares_scratch(const void *device, int64_t n);
void cuda_narrow(void *device, void *queue, uint16_t *dst, float *x, int64_t n);
void cuda_timestamp(void *device, void *queue, uint64_t *host_slot);
void cuda_delay(void *device, void *queue, uint64_t ns);

mt_status cuda_clock_open(cuda_device *d);
void cuda_clock_close(cuda_device *d);

/* ---- cuBLAS (gemm.c) ------------------------------------------------------------------------- */

mt_status cuda_blas_open(cuda_device *d);
void cuda_blas_close(cuda_device *d);
void cuda_blas_forget(cuda_queue *q); /* before a queue goes away */
/* Hands the one workspace to the queue, in order. False when the device has failed. */
bool cuda_blas_on(cuda_queue *q);
/* Records a failure of the library; true when there was none. */
bool cuda_blas_ok(cuda_device *d, cublasStatus_t s, const char *what);

/* Row-major C[m, n] = op(A) op(B) + beta C, FP32, FP64, or BF16 operands with FP32 accumulation
 * into BF16 or FP32. ld in elements. */
typedef struct cuda_product {
    bool trans_a, trans_b;
    int64_t m, n, k;
    mt_dtype in_dtype, c_dtype;
    const void *a, *b;
    void *c;
    const void *bias; /* [n], added to every row, in C's dtype; NULL: none */
    int64_t lda, ldb, ldc;
    double beta;
} cuda_product;

/* The product of whole tensors, without a bias. */
cuda_product cuda_product_of(const mt_tensor *a, bool trans_a, const mt_tensor *b, bool trans_b,
                             const mt_tensor *c, double beta);
/* p.bias is left out. */
void cuda_gemm(cuda_queue *q, cuda_product p);

/* A handle without atomics and TF32; its stream and workspace; a product on it. */
mt_status cuda_blas_handle(const cuda_device *d, cublasHandle_t *ret);
bool cuda_blas_use(cuda_device *d, cublasHandle_t handle, cudaStream_t stream, void *work,
                   int64_t bytes);
/* p->bias is left out. */
void cuda_blas_product(cuda_device *d, cublasHandle_t handle, const cuda_product *p);

/* ---- cublasLt (gemm_light.c) ----------------------------------------------------------------- */

mt_status cuda_light_open(cuda_device *d);
void cuda_light_close(cuda_device *d);
/* Enqueues the product, rounded once with its bias, with `bytes` of work at `work`; false where
 * nothing was enqueued: other operands than BF16, rows that are not aligned, shapes that the
 * library has nothing for. [main] */
bool cuda_light_product(cuda_device *d, const cuda_product *p, cudaStream_t stream, void *work,
                        int64_t bytes);

/* ---- products side by side (lanes.c) --------------------------------------------------------- */

enum { CUDA_LANES = 4, CUDA_LANE_BYTES = 8 << 20, CUDA_NUMBERS = 1 << 12 };

mt_status cuda_lanes_open(cuda_device *d);
void cuda_lanes_close(cuda_device *d);
/* Makes the streams and handles, which take device memory, unless they are there. [main] */
mt_status cuda_lanes_prepare(const cuda_device *d);
/* Between fork and join, products with different results may run at the same time. `work`:
 * CUDA_LANES * CUDA_LANE_BYTES of device memory. [main] */
bool cuda_lanes_fork(cuda_queue *q, void *work);
void cuda_lanes_gemm(cuda_queue *q, int64_t index, const cuda_product *p);
void cuda_lanes_join(cuda_queue *q);
/* Waits until the queue gets here and returns n numbers of device memory, valid until the next
 * call; NULL for more than CUDA_NUMBERS and after a failure. [main] */
const int32_t *cuda_read_numbers(cuda_queue *q, const int32_t *numbers, int64_t n);

/* ---- kernels of the interface itself (basic.cu) ---------------------------------------------- */

void cuda_launch_join(cudaStream_t s, float *dst, const uint16_t *hi, const int16_t *lo, int64_t n);
void cuda_launch_sum_squares(cudaStream_t s, const float *x, int64_t n, double *dst,
                             double *partial);
int64_t cuda_sum_blocks(int64_t n);
void cuda_launch_narrow(cudaStream_t s, uint16_t *dst, float *x, int64_t n);
/* Are the kernels that run on the current device built so that launches can overlap? */
bool cuda_overlaps_launches(void);
/* Every row of C [rows, cols] = bias [cols]. */
void cuda_launch_bias(cudaStream_t s, mt_dtype dtype, const void *bias, void *c, int64_t ld,
                      int64_t rows, int64_t cols);
void cuda_launch_timestamp(cudaStream_t s, volatile uint64_t *slot, int64_t offset);
void cuda_launch_delay(cudaStream_t s, uint64_t ns);

/* ---- operations: one file each in ops/ ------------------------------------------------------- */

typedef void cuda_op_fn(cuda_device *d, cuda_queue *q, const mt_op_call *c);
typedef int64_t cuda_work_fn(const cuda_device *d, const mt_op_call *c, bool backward);

typedef struct cuda_op {
    cuda_op_fn *forward, *backward;
    cuda_work_fn *workspace; /* what a call needs at least; NULL: none */
    /* While planning: makes ready what calls within these bounds will use, and returns the work
     * they then want, no less than workspace(). NULL: nothing to make ready. */
    cuda_work_fn *plan;
} cuda_op;

/* C++ gives constants internal linkage unless they were declared so. */
extern const cuda_op cuda_op_embedding, cuda_op_linear, cuda_op_exact_linear, cuda_op_attention,
    cuda_op_linear_cross_entropy, cuda_op_rmsnorm, cuda_op_rope, cuda_op_act, cuda_op_glu,
    cuda_op_add, cuda_op_mul, cuda_op_scale, cuda_op_router, cuda_op_dispatch,
    cuda_op_grouped_linear, cuda_op_combine, cuda_op_slice, cuda_op_concat, cuda_op_causal_conv,
    cuda_op_log_decay, cuda_op_gated_delta, cuda_op_balance_loss;

const mt_kernel *cuda_kernel(const void *device, const char *op);

extern const mt_backend cuda_backend;

#ifdef __cplusplus
}
#endif
#endif
