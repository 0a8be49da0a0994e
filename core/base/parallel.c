/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads that take pieces off a counter.
 */
#include "parallel.h"

#include "machine.h"
#include "status.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

typedef struct loop {
    parallel_body body;
    void *arg;
    int64_t n;
    _Atomic int64_t next;
    _Atomic int32_t threads; /* begun so far */
    pthread_mutex_t lock;    /* of what follows */
    int64_t failed;          /* the first piece that did; n: none */
    mt_status status;
    char text[2048];
} loop;

static void note_failure(loop *l, int64_t i, mt_status status)
{
    atomic_store(&l->next, l->n);
    pthread_mutex_lock(&l->lock);
    if (i < l->failed) {
        l->failed = i;
        l->status = status;
        snprintf(l->text, sizeof l->text, "%s", status_text());
    }
    pthread_mutex_unlock(&l->lock);
}

static void *take_pieces(void *arg)
{
    loop *l = arg;
    int32_t thread = atomic_fetch_add(&l->threads, 1);
    for (int64_t i; (i = atomic_fetch_add(&l->next, 1)) < l->n;) {
        mt_status status = l->body(l->arg, i, thread);
        if (status)
            note_failure(l, i, status);
    }
    return NULL;
}

static int32_t limit(int64_t threads, int64_t n)
{
    int64_t most = threads < PARALLEL_MAX_THREADS ? threads : PARALLEL_MAX_THREADS;
    return (int32_t)(n < 1 ? 1 : n < most ? n : most);
}

int32_t parallel_threads(int64_t n)
{
    return limit(machine_cpus(), n);
}

int32_t parallel_io_threads(int64_t n)
{
    enum { LEAST = 8 };
    int64_t twice = 2 * machine_cpus();
    return limit(twice > LEAST ? twice : LEAST, n);
}

mt_status parallel_run(int32_t threads, int64_t n, parallel_body body, void *arg)
{
    loop l = { .body = body, .arg = arg, .n = n, .failed = n, .lock = PTHREAD_MUTEX_INITIALIZER };
    pthread_t thread[PARALLEL_MAX_THREADS];
    int32_t want = limit(threads, n) - 1, started = 0;
    while (started < want && pthread_create(&thread[started], NULL, take_pieces, &l) == 0)
        started++;
    take_pieces(&l);
    for (int32_t i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    pthread_mutex_destroy(&l.lock);
    return l.status ? status_set(l.status, "%s", l.text) : MT_OK;
}

mt_status parallel_for(int64_t n, parallel_body body, void *arg)
{
    return parallel_run(parallel_threads(n), n, body, arg);
}
