/* SPDX-License-Identifier: Apache-2.0
 *
 * What the reader and the writer of safetensors files share: the dtypes of the format, its limits,
 * and its file names.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <megatrain/loader.h>
#include <megatrain/report.h>

/* The format's own limit on the JSON header, bytes. */
#define ST_MAX_HEADER 100000000u

#define ST_SUFFIX       ".safetensors"
#define ST_INDEX_SUFFIX ".safetensors.index.json"
#define ST_METADATA     "__metadata__"

/* A dtype of the format. `dtype` is -1 where MegaTrain has no counterpart: such tensors are listed
 * and checked, but cannot be read. */
typedef struct st_dtype {
    const char *name;
    mt_dtype dtype;
    int32_t bits;
} st_dtype;

/* NULL when there is none of that name / for that dtype. */
const st_dtype *st_dtype_by_name(const char *name);
const st_dtype *st_dtype_by_dtype(mt_dtype t);

/* printf into new memory; NULL when out of memory (the error text is set). */
char *st_format(const char *fmt, ...) MT_PRINTF(1, 2);

/* The reading half of mt_weights. */
bool st_probe(const char *path);
mt_status st_open(const char *path, void **ret_reader);
void st_close(void *reader);
int64_t st_count(const void *reader);
mt_status st_info(const void *reader, int64_t index, mt_tensor_info *ret);
const char *st_file(const void *reader, int64_t index);
mt_status st_read(const void *reader, int64_t index, int64_t offset, int64_t n, void *dst);
void st_read_once(void *reader);

/* The writing half. */
mt_status st_create(const char *folder, const char *stem, const mt_tensor_info *list, int64_t n,
                    int64_t shard_bytes, void **ret_writer);
mt_status st_write(void *writer, int64_t index, const void *data, int64_t n);
mt_status st_write_at(void *writer, int64_t index, int64_t offset, const void *data, int64_t n);
mt_status st_finish(void *writer);
void st_abort(void *writer);

#endif
