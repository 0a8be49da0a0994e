/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading past the page cache what is read once: no copy of it is made by the kernel, no memory is
 * taken for it that the host store needs, and requests are as large as they are asked for, which
 * readahead's are not when several threads read one file.
 */
#ifndef SAFETENSORS_DIRECT_H
#define SAFETENSORS_DIRECT_H

#include <megatrain/base.h>

/* Buffers that are aligned as the disk wants it, one for each thread that reads at the time. */
typedef struct st_pool st_pool;

/* NULL when out of memory. */
st_pool *st_pool_create(void);
void st_pool_destroy(st_pool *pool); /* accepts NULL */

/* Reads n bytes at `offset` of the open file. False, dst undefined, where that is of no use (few
 * bytes, or most of them in memory already), not possible (the file system), or fails: then they
 * are to be read in the ordinary way. [any] */
bool st_direct_read(st_pool *pool, int fd, int64_t offset, int64_t n, void *dst);

#endif
