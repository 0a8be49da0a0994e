/* SPDX-License-Identifier: Apache-2.0
 *
 * Queues and events of the CPU device. A queue is a thread with a ring of commands that it carries
 * out in order. An event that was recorded is a point in a queue: "command number n has passed";
 * whoever waits for it keeps that point by value, so recording the event again changes nothing for
 * earlier waits.
 */
#include "convert.h"
#include "device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { QUEUE_COMMANDS = 256 };

typedef struct queue_point {
    cpu_queue *queue; /* NULL: done */
    uint64_t number;  /* done when the queue has passed this many commands */
} queue_point;

typedef struct cpu_event {
    queue_point point; /* under the device's lock */
} cpu_event;

typedef enum command_kind {
    COMMAND_OP,
    COMMAND_WAIT,
    COMMAND_COPY,
    COMMAND_FILL,
    COMMAND_JOIN,
    COMMAND_SUM_SQUARES,
    COMMAND_NARROW,
    COMMAND_TIMESTAMP,
    COMMAND_DELAY
} command_kind;

typedef struct command {
    command_kind kind;
    union {
        struct {
            const cpu_op *op;
            bool backward;
            mt_op_call call;
        } op;
        queue_point wait;
        struct {
            void *dst;
            const void *src;
            int64_t bytes;
            uint8_t byte;
        } copy;
        struct {
            float *dst;
            const uint16_t *hi;
            const int16_t *lo;
            int64_t n;
        } join;
        struct {
            const float *x;
            double *dst;
            double *partial;
            int64_t n;
        } sum;
        struct {
            uint16_t *dst;
            float *x;
            int64_t n;
        } narrow;
        uint64_t *timestamp;
        uint64_t delay_ns;
    } u;
} command;

struct cpu_queue {
    cpu_device *device;
    cpu_queue *next; /* in the device's list */
    bool live;       /* under the device's lock */
    pthread_t thread;
    char name[16];

    pthread_mutex_t lock;
    pthread_cond_t work;     /* the queue's thread waits for commands or `stop` */
    pthread_cond_t progress; /* others wait for `passed` */
    bool stop;
    /* Commands ever enqueued and ever passed. They go on counting when a retired queue is used
     * again, so that an event recorded in its earlier life stays done. */
    uint64_t enqueued;
    uint64_t passed;
    command *ring; /* command number i is at i % QUEUE_COMMANDS */
};

/* ---- carrying out ---------------------------------------------------------------------------- */

typedef struct op_job {
    cpu_isa isa;
    const cpu_op *op;
    const mt_op_call *call;
    bool backward;
    int32_t phase;
    char *scratch;
    int64_t scratch_bytes; /* of one thread */
} op_job;

static int64_t round_up_256(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

int64_t cpu_op_work(const cpu_device *d, const cpu_op *op, const mt_op_call *c, bool backward)
{
    int64_t bytes = op->workspace ? round_up_256(op->workspace(c, backward)) : 0;
    if (op->scratch)
        bytes += d->threads * round_up_256(op->scratch(c, backward));
    return bytes;
}

static void run_task(void *context, int64_t task, int32_t slot)
{
    const op_job *j = context;
    if (j->op->run_scratch)
        j->op->run_scratch(j->isa, j->call, j->backward, j->phase, task,
                           j->scratch + slot * j->scratch_bytes);
    else
        j->op->run(j->isa, j->call, j->backward, j->phase, task);
}

static void run_op(cpu_device *d, const cpu_op *op, const mt_op_call *c, bool backward)
{
    if (cpu_device_failed(d))
        return;
    char text[200];
    if (!backward && op->check && !op->check(c, text, sizeof text)) {
        char full[256];
        snprintf(full, sizeof full, "%s: %s", op->name, text);
        cpu_device_fail(d, MT_ERR_INVALID, full);
        return;
    }
    op_job job = { .isa = d->isa, .op = op, .call = c, .backward = backward };
    if (op->scratch) {
        job.scratch_bytes = round_up_256(op->scratch(c, backward));
        job.scratch = c->work;
        if (op->workspace)
            job.scratch += round_up_256(op->workspace(c, backward));
        int64_t need = cpu_op_work(d, op, c, backward);
        if (c->work_bytes < need) {
            snprintf(text, sizeof text, "%s needs %lld bytes of work, the call brings %lld",
                     op->name, (long long)need, (long long)c->work_bytes);
            cpu_device_fail(d, MT_ERR_INTERNAL, text);
            return;
        }
    }
    int32_t phases = op->phases ? op->phases(c, backward) : 1;
    for (job.phase = 0; job.phase < phases; job.phase++)
        cpu_pool_run(d->pool, op->tasks(c, backward, job.phase), run_task, &job);
}

/* The sum of squares is taken in blocks of this many numbers, each in SUM_LANES running sums. */
enum { SUM_BLOCK = 1 << 16, SUM_LANES = 8 };

static int64_t sum_blocks(int64_t n)
{
    return (n + SUM_BLOCK - 1) / SUM_BLOCK;
}

static void sum_task(void *context, int64_t task, int32_t slot)
{
    (void)slot;
    const command *c = context;
    const float *x = c->u.sum.x + task * SUM_BLOCK;
    int64_t n = c->u.sum.n - task * SUM_BLOCK;
    if (n > SUM_BLOCK)
        n = SUM_BLOCK;
    double lane[SUM_LANES] = { 0 };
    int64_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int k = 0; k < SUM_LANES; k++)
            lane[k] += (double)x[i + k] * x[i + k];
    for (int k = 0; i + k < n; k++)
        lane[k] += (double)x[i + k] * x[i + k];
    double sum = 0;
    for (int k = 0; k < SUM_LANES; k++)
        sum += lane[k];
    c->u.sum.partial[task] = sum;
}

static void run_sum(cpu_device *d, command *c)
{
    int64_t blocks = sum_blocks(c->u.sum.n);
    cpu_pool_run(d->pool, blocks, sum_task, c);
    double sum = 0;
    for (int64_t i = 0; i < blocks; i++)
        sum += c->u.sum.partial[i];
    *c->u.sum.dst = sum;
}

enum { NARROW_BLOCK = 1 << 16 };

static void narrow_task(void *context, int64_t task, int32_t slot)
{
    (void)slot;
    const command *c = context;
    int64_t first = task * NARROW_BLOCK, n = c->u.narrow.n - first;
    n = n < NARROW_BLOCK ? n : NARROW_BLOCK;
    convert_to_bf16(c->u.narrow.dst + first, c->u.narrow.x + first, n);
    convert_to_f32(c->u.narrow.x + first, c->u.narrow.dst + first, n);
}

static void wait_for(queue_point p)
{
    cpu_queue *q = p.queue;
    if (!q)
        return;
    pthread_mutex_lock(&q->lock);
    while (q->passed < p.number)
        pthread_cond_wait(&q->progress, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

static void run_command(cpu_device *d, command *c)
{
    switch (c->kind) {
    case COMMAND_OP:
        run_op(d, c->u.op.op, &c->u.op.call, c->u.op.backward);
        break;
    case COMMAND_WAIT:
        wait_for(c->u.wait);
        break;
    case COMMAND_COPY:
        memmove(c->u.copy.dst, c->u.copy.src, (size_t)c->u.copy.bytes);
        break;
    case COMMAND_FILL:
        memset(c->u.copy.dst, c->u.copy.byte, (size_t)c->u.copy.bytes);
        break;
    case COMMAND_JOIN:
        convert_join(c->u.join.dst, c->u.join.hi, c->u.join.lo, c->u.join.n);
        break;
    case COMMAND_SUM_SQUARES:
        run_sum(d, c);
        break;
    case COMMAND_NARROW:
        cpu_pool_run(d->pool, (c->u.narrow.n + NARROW_BLOCK - 1) / NARROW_BLOCK, narrow_task, c);
        break;
    case COMMAND_TIMESTAMP: {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        *c->u.timestamp = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
        break;
    }
    case COMMAND_DELAY: {
        struct timespec t = { (time_t)(c->u.delay_ns / 1000000000u),
                              (long)(c->u.delay_ns % 1000000000u) };
        while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR)
            ;
        break;
    }
    }
}

static void *queue_main(void *arg)
{
    cpu_queue *q = arg;
    pthread_setname_np(pthread_self(), q->name);
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (q->passed == q->enqueued && !q->stop)
            pthread_cond_wait(&q->work, &q->lock);
        if (q->passed == q->enqueued)
            break;
        command *c = &q->ring[q->passed % QUEUE_COMMANDS];
        pthread_mutex_unlock(&q->lock);
        run_command(q->device, c);
        pthread_mutex_lock(&q->lock);
        q->passed++;
        pthread_cond_broadcast(&q->progress);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* ---- queues ---------------------------------------------------------------------------------- */

static cpu_queue *queue_new(cpu_device *d)
{
    cpu_queue *q = calloc(1, sizeof *q);
    if (!q)
        return NULL;
    q->device = d;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->work, NULL);
    pthread_cond_init(&q->progress, NULL);
    return q;
}

mt_status cpu_queue_create(void *device, const char *name, void **ret_queue)
{
    cpu_device *d = device;
    command *ring = malloc(QUEUE_COMMANDS * sizeof *ring);
    pthread_mutex_lock(&d->lock);
    cpu_queue *q = d->queues;
    while (q && q->live)
        q = q->next;
    if (!q && (q = queue_new(d))) {
        q->next = d->queues;
        d->queues = q;
    }
    if (q && ring)
        q->live = true;
    pthread_mutex_unlock(&d->lock);
    if (!q || !ring) {
        free(ring);
        return mt_fail(MT_ERR_NOMEM, "out of memory for queue '%s'", name);
    }
    snprintf(q->name, sizeof q->name, "%s", name);
    q->ring = ring;
    q->stop = false;
    int rc = pthread_create(&q->thread, NULL, queue_main, q);
    if (rc != 0) {
        free(q->ring);
        q->ring = NULL;
        pthread_mutex_lock(&d->lock);
        q->live = false;
        pthread_mutex_unlock(&d->lock);
        return mt_fail(MT_ERR_NOMEM, "cannot start a thread for queue '%s': %s", name,
                       strerror(rc));
    }
    *ret_queue = q;
    return MT_OK;
}

void cpu_queue_destroy(void *device, void *queue)
{
    cpu_device *d = device;
    cpu_queue *q = queue;
    if (!q)
        return;
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    free(q->ring);
    q->ring = NULL;
    pthread_mutex_lock(&d->lock);
    q->live = false;
    pthread_mutex_unlock(&d->lock);
}

void cpu_queues_free(cpu_device *d)
{
    while (d->queues) {
        cpu_queue *q = d->queues;
        d->queues = q->next;
        pthread_cond_destroy(&q->progress);
        pthread_cond_destroy(&q->work);
        pthread_mutex_destroy(&q->lock);
        free(q);
    }
}

/* Appends a copy of *c and returns its point. Blocks while the ring is full; that ends, since a
 * command waits only for commands that were enqueued before it. */
static queue_point enqueue(cpu_queue *q, const command *c)
{
    pthread_mutex_lock(&q->lock);
    while (q->enqueued - q->passed == QUEUE_COMMANDS)
        pthread_cond_wait(&q->progress, &q->lock);
    q->ring[q->enqueued % QUEUE_COMMANDS] = *c;
    queue_point p = { q, ++q->enqueued };
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&q->lock);
    return p;
}

void cpu_queue_sync(void *device, void *queue)
{
    (void)device;
    cpu_queue *q = queue;
    pthread_mutex_lock(&q->lock);
    queue_point p = { q, q->enqueued };
    pthread_mutex_unlock(&q->lock);
    wait_for(p);
}

/* ---- events ---------------------------------------------------------------------------------- */

mt_status cpu_event_create(void *device, void **ret_event)
{
    (void)device;
    cpu_event *e = calloc(1, sizeof *e);
    if (!e)
        return mt_fail(MT_ERR_NOMEM, "out of memory for an event");
    *ret_event = e;
    return MT_OK;
}

void cpu_event_destroy(void *device, void *event)
{
    (void)device;
    free(event);
}

static queue_point event_point(cpu_device *d, cpu_event *e)
{
    pthread_mutex_lock(&d->lock);
    queue_point p = e->point;
    pthread_mutex_unlock(&d->lock);
    return p;
}

void cpu_event_record(void *device, void *event, void *queue)
{
    cpu_device *d = device;
    cpu_event *e = event;
    cpu_queue *q = queue;
    /* Everything enqueued so far, without a command of its own. */
    pthread_mutex_lock(&q->lock);
    queue_point p = { q, q->enqueued };
    pthread_mutex_unlock(&q->lock);
    pthread_mutex_lock(&d->lock);
    e->point = p;
    pthread_mutex_unlock(&d->lock);
}

void cpu_event_wait(void *device, void *queue, void *event)
{
    queue_point p = event_point(device, event);
    if (p.queue && p.queue != queue)
        enqueue(queue, &(command){ .kind = COMMAND_WAIT, .u.wait = p });
}

bool cpu_event_query(void *device, void *event)
{
    queue_point p = event_point(device, event);
    if (!p.queue)
        return true;
    pthread_mutex_lock(&p.queue->lock);
    bool done = p.queue->passed >= p.number;
    pthread_mutex_unlock(&p.queue->lock);
    return done;
}

void cpu_event_sync(void *device, void *event)
{
    wait_for(event_point(device, event));
}

/* ---- commands -------------------------------------------------------------------------------- */

void cpu_enqueue_op(void *queue, const cpu_op *op, const mt_op_call *call, bool backward)
{
    command c = { .kind = COMMAND_OP, .u.op = { op, backward, *call } };
    enqueue(queue, &c);
}

void cpu_copy(void *device, void *queue, void *dst, const void *src, int64_t bytes)
{
    (void)device;
    enqueue(queue, &(command){ .kind = COMMAND_COPY,
                               .u.copy = { .dst = dst, .src = src, .bytes = bytes } });
}

void cpu_fill(void *device, void *queue, void *dst, uint8_t byte, int64_t bytes)
{
    (void)device;
    enqueue(queue, &(command){ .kind = COMMAND_FILL,
                               .u.copy = { .dst = dst, .byte = byte, .bytes = bytes } });
}

void cpu_copy_in_join(void *device, void *queue, float *dst, const uint16_t *hi, const int16_t *lo,
                      int64_t n, void *scratch)
{
    (void)device;
    (void)scratch;
    enqueue(queue, &(command){ .kind = COMMAND_JOIN, .u.join = { dst, hi, lo, n } });
}

int64_t cpu_join_scratch(const void *device, int64_t n)
{
    (void)device;
    (void)n;
    return 0;
}

void cpu_sum_squares(void *device, void *queue, const float *x, int64_t n, double *dst,
                     void *scratch)
{
    (void)device;
    enqueue(queue, &(command){ .kind = COMMAND_SUM_SQUARES, .u.sum = { x, dst, scratch, n } });
}

int64_t cpu_sum_squares_scratch(const void *device, int64_t n)
{
    (void)device;
    return sum_blocks(n) * (int64_t)sizeof(double);
}

void cpu_narrow(void *device, void *queue, uint16_t *dst, float *x, int64_t n)
{
    (void)device;
    enqueue(queue, &(command){ .kind = COMMAND_NARROW, .u.narrow = { dst, x, n } });
}

void cpu_timestamp(void *device, void *queue, uint64_t *host_slot)
{
    (void)device;
    enqueue(queue, &(command){ .kind = COMMAND_TIMESTAMP, .u.timestamp = host_slot });
}

void cpu_delay(void *device, void *queue, uint64_t ns)
{
    (void)device;
    enqueue(queue, &(command){ .kind = COMMAND_DELAY, .u.delay_ns = ns });
}
