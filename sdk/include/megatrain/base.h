/* SPDX-License-Identifier: Apache-2.0
 *
 * Status codes, dtypes, the store's FP32 split, host services and configuration access.
 * Everything that crosses the border between MegaTrain and a plugin starts here.
 *
 * Thread tags used in all SDK headers:
 *   [main]     called only from the thread that runs the training loop
 *   [compute]  called from a backend queue's own thread
 *   [worker]   called from several optimizer workers at once, on disjoint ranges
 *   [loader]   called from the prefetch thread, one call at a time
 *   [any]      callable from every thread
 *   [pure]     callable from every thread, depends on nothing but its arguments
 */
#ifndef MEGATRAIN_BASE_H
#define MEGATRAIN_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MT_ABI_MAJOR 1
#define MT_ABI_MINOR 0

#if defined(__GNUC__)
#define MT_EXPORT                       __attribute__((visibility("default")))
#define MT_PRINTF(fmt_index, first_arg) __attribute__((format(printf, fmt_index, first_arg)))
#else
#define MT_EXPORT
#define MT_PRINTF(fmt_index, first_arg)
#endif

/* Result of every call that can fail. On failure the text is set through mt_host::set_error and
 * no `ret_` output has been touched. */
typedef int32_t mt_status;
enum {
    MT_OK = 0,
    MT_END = 1,              /* a stream ended normally; not an error */
    MT_ERR_INVALID = -1,     /* an argument, a key or a value that cannot be */
    MT_ERR_NOMEM = -2,       /* memory is exhausted or would be */
    MT_ERR_IO = -3,          /* the operating system refused a file operation */
    MT_ERR_FORMAT = -4,      /* a file's content breaks its format */
    MT_ERR_NOT_FOUND = -5,   /* a named thing does not exist */
    MT_ERR_UNSUPPORTED = -6, /* well-formed, but not offered */
    MT_ERR_ABI = -7,         /* plugin and host do not fit together */
    MT_ERR_DEVICE = -8,      /* a backend's device failed */
    MT_ERR_STOPPED = -9,     /* ended on request (signal) */
    MT_ERR_NUMERIC = -10,    /* a loss or a gradient is not finite */
    MT_ERR_INTERNAL = -11    /* a broken invariant of ours */
};

typedef int32_t mt_dtype;
enum {
    MT_F32 = 0,
    MT_BF16 = 1,
    MT_F64 = 2,
    MT_F16 = 3,
    MT_I8 = 4,
    MT_I16 = 5,
    MT_I32 = 6,
    MT_I64 = 7,
    MT_U8 = 8,
    MT_U16 = 9,
    MT_U32 = 10,
    MT_U64 = 11,
    MT_BOOL = 12,
    MT_F8_E4M3 = 13,
    MT_F8_E5M2 = 14,
    MT_DTYPE_COUNT = 15
};

/* Bytes of one element; 0 for an unknown dtype. [pure] */
static inline int64_t mt_dtype_size(mt_dtype t)
{
    static const int8_t size[MT_DTYPE_COUNT] = { 4, 2, 8, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 1, 1 };
    return t >= 0 && t < MT_DTYPE_COUNT ? size[t] : 0;
}

/* Lower-case name as used in manifests and messages ("bf16"). [pure] */
static inline const char *mt_dtype_name(mt_dtype t)
{
    static const char *const name[MT_DTYPE_COUNT] = { "fp32",  "bf16",     "fp64",    "fp16",
                                                      "int8",  "int16",    "int32",   "int64",
                                                      "uint8", "uint16",   "uint32",  "uint64",
                                                      "bool",  "fp8_e4m3", "fp8_e5m2" };
    return t >= 0 && t < MT_DTYPE_COUNT ? name[t] : "unknown";
}

/* A tensor in memory: `rows` rows of `cols` contiguous elements, `ld` elements from one row to the
 * next (ld >= cols). Activations are [tokens, features]; a view is the same memory with another
 * `data`, `cols` and an unchanged `ld`. Owns nothing. */
typedef struct mt_tensor {
    void *data;
    int64_t rows;
    int64_t cols;
    int64_t ld;
    mt_dtype dtype;
    int32_t reserved;
} mt_tensor;

/* ---- bit-level conversions ---------------------------------------------------------------- */

static inline uint32_t mt_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float mt_bits_f32(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* BF16 from FP32, round to nearest even, NaN stays NaN. What GPUs and activations use. [pure] */
static inline uint16_t mt_f32_to_bf16(float x)
{
    uint32_t u = mt_f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float mt_bf16_to_f32(uint16_t h)
{
    return mt_bits_f32((uint32_t)h << 16);
}

/* The store's split of an FP32 master weight (docs/architecture.md, "The host store"):
 * master bits = (hi << 16) + (int16) lo, `hi` the nearest BF16, ties away from zero in magnitude so
 * that `lo` fits 16 bits. Exact for every number and both infinities; every NaN becomes
 * 0x7fc00000. A finite master above the largest BF16 has hi = Inf and is still restored. [pure] */
static inline void mt_split_f32(float master, uint16_t *ret_hi, int16_t *ret_lo)
{
    uint32_t u = mt_f32_bits(master);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        u = 0x7fc00000u;
    uint32_t hi = (u + 0x8000u) >> 16;
    *ret_hi = (uint16_t)hi;
    *ret_lo = (int16_t)(uint16_t)(u - (hi << 16));
}

static inline float mt_join_f32(uint16_t hi, int16_t lo)
{
    return mt_bits_f32(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

/* ---- configuration ------------------------------------------------------------------------ */

/* Read access to a tree of hyper-parameters: a model's config.json or YAML, or the section of a
 * run manifest that belongs to the plugin. A key may be a dotted path ("rope_scaling.factor").
 * Getters return MT_ERR_NOT_FOUND for an absent or null key and MT_ERR_INVALID for a wrong type, or
 * for a number that is not finite; both have set an error text that names file, line and key. A key
 * that was asked for counts as known; in run manifests, keys that nobody asked for are reported as
 * unknown. [main] */
typedef struct mt_config mt_config;
struct mt_config {
    uint32_t struct_size;
    bool (*has)(const mt_config *c, const char *key); /* present and not null */
    mt_status (*get_int)(const mt_config *c, const char *key, int64_t *ret);
    mt_status (*get_float)(const mt_config *c, const char *key, double *ret);
    mt_status (*get_bool)(const mt_config *c, const char *key, bool *ret);
    /* The string lives as long as the config. */
    mt_status (*get_string)(const mt_config *c, const char *key, const char **ret);
    /* Number of elements of the list at `key`; 0 when absent. Elements are read as "key.0" ... */
    int64_t (*length)(const mt_config *c, const char *key);
    /* Sets an error text that names file, line and column of `key` (of the section when absent),
     * and returns MT_ERR_INVALID: `return c->reject(c, "head_dim", "must be even");` */
    mt_status (*reject)(const mt_config *c, const char *key, const char *fmt, ...) MT_PRINTF(3, 4);
    /* Present and null, where a family distinguishes that from absent. */
    bool (*is_null)(const mt_config *c, const char *key);
};

/* Is the key present with the value null? */
static inline bool mt_config_is_null(const mt_config *c, const char *key)
{
    return c->struct_size > offsetof(mt_config, is_null) && c->is_null(c, key);
}

/* The value at `key`, or `fallback` where the key is absent or null. A wrong type is an error. */
static inline mt_status mt_config_int(const mt_config *c, const char *key, int64_t fallback,
                                      int64_t *ret)
{
    if (c->has(c, key))
        return c->get_int(c, key, ret);
    *ret = fallback;
    return MT_OK;
}

static inline mt_status mt_config_float(const mt_config *c, const char *key, double fallback,
                                        double *ret)
{
    if (c->has(c, key))
        return c->get_float(c, key, ret);
    *ret = fallback;
    return MT_OK;
}

static inline mt_status mt_config_bool(const mt_config *c, const char *key, bool fallback,
                                       bool *ret)
{
    if (c->has(c, key))
        return c->get_bool(c, key, ret);
    *ret = fallback;
    return MT_OK;
}

static inline mt_status mt_config_string(const mt_config *c, const char *key, const char *fallback,
                                         const char **ret)
{
    if (c->has(c, key))
        return c->get_string(c, key, ret);
    *ret = fallback;
    return MT_OK;
}

/* ---- host services ------------------------------------------------------------------------ */

typedef int32_t mt_log_level;
enum { MT_LOG_ERROR = 0, MT_LOG_WARNING = 1, MT_LOG_INFO = 2, MT_LOG_DEBUG = 3 };

/* What MegaTrain offers a plugin. Lives for the whole process. */
typedef struct mt_host {
    uint32_t struct_size;
    uint16_t abi_major;
    uint16_t abi_minor;
    /* Sets the calling thread's error text (printf format, one line, no trailing newline). [any] */
    void (*set_error)(const char *fmt, ...) MT_PRINTF(1, 2);
    /* Writes a line to the log. Plugins never print by themselves. [any] */
    void (*log)(mt_log_level level, const char *fmt, ...) MT_PRINTF(2, 3);
    /* The calling thread's error text, "" for none; valid until the thread sets the next one. For
     * work in threads of the plugin's own, whose errors the main thread is to report. [any] */
    const char *(*error)(void);
} mt_host;

#ifdef __cplusplus
}
#endif
#endif
