/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors plugin: its interface table, and the format's dtypes.
 */
#include "safetensors.h"

#include <megatrain/plugin.h>

#include <stdio.h>
#include <stdlib.h>

static const mt_weights safetensors_weights = {
    .struct_size = sizeof(mt_weights),
    .probe = st_probe,
    .open = st_open,
    .close = st_close,
    .count = st_count,
    .info = st_info,
    .file = st_file,
    .read = st_read,
    .create = st_create,
    .write = st_write,
    .finish = st_finish,
    .abort = st_abort,
    .write_at = st_write_at,
    .read_once = st_read_once,
};

MT_PLUGIN("safetensors", "1.0.0", "Apache-2.0", MT_WEIGHTS_INTERFACE, &safetensors_weights)

static const st_dtype dtypes[] = {
    { "F32", MT_F32, 32 },  { "BF16", MT_BF16, 16 },      { "F16", MT_F16, 16 },
    { "F64", MT_F64, 64 },  { "I8", MT_I8, 8 },           { "I16", MT_I16, 16 },
    { "I32", MT_I32, 32 },  { "I64", MT_I64, 64 },        { "U8", MT_U8, 8 },
    { "U16", MT_U16, 16 },  { "U32", MT_U32, 32 },        { "U64", MT_U64, 64 },
    { "BOOL", MT_BOOL, 8 }, { "F8_E4M3", MT_F8_E4M3, 8 }, { "F8_E5M2", MT_F8_E5M2, 8 },
    { "F8_E8M0", -1, 8 },   { "F8_E4M3FNUZ", -1, 8 },     { "F8_E5M2FNUZ", -1, 8 },
    { "F4", -1, 4 },        { "F6_E2M3", -1, 6 },         { "F6_E3M2", -1, 6 },
    { "C64", -1, 64 },
};

enum { N_DTYPES = sizeof dtypes / sizeof *dtypes };

const st_dtype *st_dtype_by_name(const char *name)
{
    for (int i = 0; i < N_DTYPES; i++)
        if (strcmp(dtypes[i].name, name) == 0)
            return &dtypes[i];
    return NULL;
}

const st_dtype *st_dtype_by_dtype(mt_dtype t)
{
    for (int i = 0; i < N_DTYPES; i++)
        if (t >= 0 && dtypes[i].dtype == t)
            return &dtypes[i];
    return NULL;
}

char *st_format(const char *fmt, ...)
{
    char *text = NULL;
    va_list args;
    va_start(args, fmt);
    int n = vasprintf(&text, fmt, args);
    va_end(args);
    if (n < 0) {
        mt_fail_nomem();
        return NULL;
    }
    return text;
}
