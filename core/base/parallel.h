/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops over independent pieces of work on all processors that the process may use, for what
 * happens before and after training: the engine has queues and workers of its own.
 */
#ifndef MT_CORE_PARALLEL_H
#define MT_CORE_PARALLEL_H

#include <megatrain/base.h>

enum { PARALLEL_MAX_THREADS = 16 };

/* Piece `i`; `thread` is below the number of threads and belongs to one at a time, so that it may
 * have a buffer of its own. */
typedef mt_status (*parallel_body)(void *arg, int64_t i, int32_t thread);

/* Threads for a loop over n pieces, the calling one included; >= 1. What the process may use can
 * change, and with it the answer. [any] */
int32_t parallel_threads(int64_t n);

/* The same for pieces that wait for a disk: more threads than processors, so that these have work
 * and the disk has requests to choose from. [any] */
int32_t parallel_io_threads(int64_t n);

/* Runs body(arg, 0 .. n-1), each once and in about that order, on at most so many threads (up to
 * PARALLEL_MAX_THREADS), also where fewer can be had. After a failure no further piece is begun;
 * status and text are those of the first piece, in order, that failed. [any] */
mt_status parallel_run(int32_t threads, int64_t n, parallel_body body, void *arg);

/* The same on parallel_threads(n). [any] */
mt_status parallel_for(int64_t n, parallel_body body, void *arg);

#endif
