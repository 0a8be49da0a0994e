/* SPDX-License-Identifier: Apache-2.0
 *
 * Files that are read, not mapped: one that shrinks meanwhile, or that its disk fails to bring, is
 * then an error and no SIGBUS. What is in them is not known here.
 */
#ifndef DOCUMENTS_FILE_H
#define DOCUMENTS_FILE_H

#include <megatrain/report.h>

typedef struct doc_file {
    int fd;
    size_t size; /* bytes of the file when it was opened */
    char *path;  /* for messages */
    /* What to do about one that cannot be read; NULL: what is to be done about the user's data. */
    const char *remedy;
} doc_file;

void doc_file_close(doc_file *f); /* accepts one that is all zero */

/* n bytes from byte `at` on. [any] */
mt_status doc_file_read(const doc_file *f, size_t at, size_t n, void *ret);

/* Fails: the file is another one than it was, as `fmt` says, with what to do about it. [any] */
mt_status MT_PRINTF(2, 3) doc_file_changed(const doc_file *f, const char *fmt, ...);

/* XXH3-64 of all bytes from `from` on. */
mt_status doc_file_hash(const doc_file *f, size_t from, uint64_t *ret);

/* Part of a file in memory, for who goes through it from its beginning to its end. */
typedef struct doc_window {
    const doc_file *file;
    char *data;
    size_t first, n; /* bytes of the file that are there */
} doc_window;

mt_status doc_window_open(const doc_file *f, doc_window *ret);
void doc_window_close(doc_window *w); /* accepts one that is all zero */

/* The file's bytes from `at` up to `end`, or as many of them as the window holds: *ret_n, at least
 * one. They are there until the next call. `at` may be any byte; numbers are whole where the window
 * is asked for multiples of their size. */
mt_status doc_window_at(doc_window *w, size_t at, size_t end, const void **ret, size_t *ret_n);

#endif
