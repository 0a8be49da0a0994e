/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops over independent pieces of work on all processors that the process may use, for what
 * happens before and after training: the engine has queues and workers of its own.
 */
#ifndef MT_CORE_PARALLEL_H
#define MT_CORE_PARALLEL_H

#include <megatrain/base.h>

enum { PARALLEL_MAX_THREADS = 16 };

/* Piece `i`; `thread` is below parallel_threads(n) and belongs to one thread at a time, so that it
 * may have a buffer of its own. */
typedef mt_status (*parallel_body)(void *arg, int64_t i, int32_t thread);

/* Threads that a loop over n pieces has at most, the calling one included; >= 1. [any] */
int32_t parallel_threads(int64_t n);

/* Runs body(arg, 0 .. n-1), each once and in about that order, also where fewer threads can be had.
 * After a failure no further piece is begun; status and text are those of the first piece, in
 * order, that failed. [any] */
mt_status parallel_for(int64_t n, parallel_body body, void *arg);

/* The same for pieces that wait for a disk: more threads than processors, so that these have work
 * and the disk has requests to choose from. */
int32_t parallel_io_threads(int64_t n);
mt_status parallel_io(int64_t n, parallel_body body, void *arg);

#endif
