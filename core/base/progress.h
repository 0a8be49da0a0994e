/* SPDX-License-Identifier: Apache-2.0
 *
 * How far something is that takes long, at what rate, and how much time it still takes at that: on
 * the live line of a terminal, else in a log line every two seconds. What is over before that is
 * not worth a word.
 */
#ifndef MT_CORE_PROGRESS_H
#define MT_CORE_PROGRESS_H

#include <megatrain/base.h>
#include <stdatomic.h>

typedef struct progress {
    const char *what;
    int64_t total; /* bytes */
    int64_t began; /* ns */
    _Atomic int64_t done;
    _Atomic int64_t next; /* when to speak again, ns */
    _Atomic bool spoken;
} progress;

/* Seconds of a clock that only goes forward. [any] */
double progress_now(void);

void progress_begin(progress *p, const char *what, int64_t total);
void progress_add(progress *p, int64_t bytes); /* [any] */
void progress_end(progress *p);

#endif
