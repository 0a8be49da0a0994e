/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute pool: threads that take the tasks of one job at a time off a shared counter. Which
 * thread runs a task is a matter of chance, so tasks may not depend on it.
 */
#include "device.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* A worker looks for the next job this many times before it sleeps: about ten microseconds, the
 * gap between two phases of an operation. */
enum { POOL_SPINS = 200 };

struct cpu_pool {
    int32_t threads; /* the caller's included */
    pthread_t *workers;
    pthread_mutex_t job_lock; /* held by the thread whose job is running */
    pthread_mutex_t lock;
    pthread_cond_t new_job;
    pthread_cond_t job_done;
    int32_t sleepers; /* under lock */
    bool stop;        /* under lock */

    /* Number of the job in the high half, next task in the low half. A worker claims a task by
     * replacing exactly the value it has seen: this can only succeed while that job still has tasks
     * to hand out, so what it read of the job before belongs to the same job. */
    _Atomic uint64_t ticket;
    _Atomic int64_t n;
    _Atomic(cpu_task_fn *) fn;
    _Atomic(void *) context;
    _Atomic int64_t done;
};

typedef struct pool_start {
    cpu_pool *pool;
    int32_t slot;
} pool_start;

static inline void pool_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    sched_yield();
#endif
}

/* Runs tasks of the current job until there is none left to claim. */
static void pool_work(cpu_pool *p, int32_t slot)
{
    for (;;) {
        uint64_t seen = atomic_load_explicit(&p->ticket, memory_order_acquire);
        int64_t n = atomic_load_explicit(&p->n, memory_order_acquire);
        cpu_task_fn *fn = atomic_load_explicit(&p->fn, memory_order_relaxed);
        void *context = atomic_load_explicit(&p->context, memory_order_relaxed);
        int64_t task = (int64_t)(seen & 0xffffffffu);
        if (task >= n)
            return;
        if (!atomic_compare_exchange_strong_explicit(&p->ticket, &seen, seen + 1,
                                                     memory_order_acq_rel, memory_order_acquire))
            continue;
        fn(context, task, slot);
        if (atomic_fetch_add_explicit(&p->done, 1, memory_order_acq_rel) + 1 == n) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_broadcast(&p->job_done);
            pthread_mutex_unlock(&p->lock);
        }
    }
}

static bool pool_has_work(cpu_pool *p)
{
    uint64_t seen = atomic_load_explicit(&p->ticket, memory_order_acquire);
    return (int64_t)(seen & 0xffffffffu) < atomic_load_explicit(&p->n, memory_order_relaxed);
}

static void *pool_worker(void *arg)
{
    pool_start start = *(pool_start *)arg;
    free(arg);
    cpu_pool *p = start.pool;
    char name[16];
    snprintf(name, sizeof name, "compute %d", (int)start.slot);
    pthread_setname_np(pthread_self(), name);
    for (;;) {
        pool_work(p, start.slot);
        int spins = 0;
        while (spins < POOL_SPINS && !pool_has_work(p)) {
            pool_pause();
            spins++;
        }
        if (spins < POOL_SPINS)
            continue;
        pthread_mutex_lock(&p->lock);
        p->sleepers++;
        while (!p->stop && !pool_has_work(p))
            pthread_cond_wait(&p->new_job, &p->lock);
        p->sleepers--;
        bool stop = p->stop;
        pthread_mutex_unlock(&p->lock);
        if (stop)
            return NULL;
    }
}

/* The 32-bit task counter wraps into the job number after this many tasks. */
static const int64_t pool_max_tasks = INT32_MAX;

static void pool_run_part(cpu_pool *p, int64_t n, cpu_task_fn *fn, void *context)
{
    uint64_t job = atomic_load_explicit(&p->ticket, memory_order_relaxed) >> 32;
    /* A late worker that sees the new `n` beside the old ticket must not find tasks left in it. */
    atomic_store_explicit(&p->ticket, job << 32 | UINT32_MAX, memory_order_relaxed);
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_store_explicit(&p->n, n, memory_order_release);
    atomic_store_explicit(&p->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&p->context, context, memory_order_relaxed);
    pthread_mutex_lock(&p->lock);
    atomic_store_explicit(&p->ticket, (job + 1) << 32, memory_order_release);
    if (p->sleepers > 0)
        pthread_cond_broadcast(&p->new_job);
    pthread_mutex_unlock(&p->lock);

    pool_work(p, 0);

    for (int i = 0; i < POOL_SPINS; i++) {
        if (atomic_load_explicit(&p->done, memory_order_acquire) == n)
            return;
        pool_pause();
    }
    pthread_mutex_lock(&p->lock);
    while (atomic_load_explicit(&p->done, memory_order_acquire) != n)
        pthread_cond_wait(&p->job_done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

void cpu_pool_run(cpu_pool *p, int64_t n, cpu_task_fn *fn, void *context)
{
    if (n <= 0)
        return;
    /* Also with one thread or one task: slot 0 belongs to one caller at a time. */
    pthread_mutex_lock(&p->job_lock);
    if (p->threads == 1 || n == 1 || n > pool_max_tasks) {
        for (int64_t i = 0; i < n; i++)
            fn(context, i, 0);
    } else {
        pool_run_part(p, n, fn, context);
    }
    pthread_mutex_unlock(&p->job_lock);
}

mt_status cpu_pool_create(int32_t threads, cpu_pool **ret)
{
    cpu_pool *p = calloc(1, sizeof *p);
    if (!p)
        return mt_fail(MT_ERR_NOMEM, "out of memory for the compute pool");
    p->threads = 1;
    pthread_mutex_init(&p->job_lock, NULL);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->new_job, NULL);
    pthread_cond_init(&p->job_done, NULL);
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    int rc = p->workers ? 0 : ENOMEM;
    for (; rc == 0 && p->threads < threads; p->threads++) {
        pool_start *start = malloc(sizeof *start);
        if (!start) {
            rc = ENOMEM;
            break;
        }
        *start = (pool_start){ p, p->threads };
        rc = pthread_create(&p->workers[p->threads - 1], NULL, pool_worker, start);
        if (rc != 0) {
            free(start);
            break;
        }
    }
    if (rc != 0) {
        mt_status status =
            mt_fail(MT_ERR_NOMEM, "cannot start compute thread %d of %d: %s; ask for fewer threads",
                    (int)p->threads, (int)threads, strerror(rc));
        cpu_pool_destroy(p);
        return status;
    }
    *ret = p;
    return MT_OK;
}

void cpu_pool_destroy(cpu_pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->new_job);
    pthread_mutex_unlock(&p->lock);
    for (int32_t i = 0; i + 1 < p->threads; i++)
        pthread_join(p->workers[i], NULL);
    free(p->workers);
    pthread_cond_destroy(&p->job_done);
    pthread_cond_destroy(&p->new_job);
    pthread_mutex_destroy(&p->lock);
    pthread_mutex_destroy(&p->job_lock);
    free(p);
}
