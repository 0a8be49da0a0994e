/* SPDX-License-Identifier: Apache-2.0
 *
 * Progress lines.
 */
#include "progress.h"

#include "log.h"

#include <stdio.h>
#include <time.h>

static const int64_t QUIET = 2000000000, LIVE = 200000000; /* ns */

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

double progress_now(void)
{
    return (double)now() * 1e-9;
}

void progress_begin(progress *p, const char *what, int64_t total)
{
    int64_t began = now();
    *p = (progress){ .what = what, .total = total, .began = began, .next = began + QUIET };
}

void progress_add(progress *p, int64_t bytes)
{
    const double gib = 1.0 / (1 << 30);
    int64_t done = atomic_fetch_add(&p->done, bytes) + bytes;
    int64_t at = now(), next = atomic_load(&p->next);
    /* Of the threads that find it is time, one speaks. */
    if (at < next || done <= 0 ||
        !atomic_compare_exchange_strong(&p->next, &next, at + (log_has_terminal() ? LIVE : QUIET)))
        return;
    char text[160];
    double rate = (double)done / ((double)(at - p->began) * 1e-9), left = (double)(p->total - done);
    snprintf(text, sizeof text, "%s: %.1f of %.1f GiB, %.2f GiB/s, %.0f s left", p->what,
             (double)done * gib, (double)p->total * gib, rate * gib, left / rate);
    if (log_has_terminal())
        log_live(text);
    else
        log_write(MT_LOG_INFO, "%s", text);
    atomic_store(&p->spoken, true);
}

void progress_end(progress *p)
{
    if (p->spoken && log_has_terminal())
        log_live(NULL);
}
