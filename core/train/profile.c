/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading and writing hardware profiles. One table a kind of record lists its fields, for both.
 */
#include "profile.h"

#include "../base/status.h"
#include "../manifest/config.h"
#include "files.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PROFILE_FORMAT "megatrain-profile"
enum { PROFILE_VERSION = 2, KEY_SIZE = 64 };

typedef enum field_type { FIELD_INT, FIELD_RATE, FIELD_RATE_OR_NONE, FIELD_DTYPE } field_type;

typedef struct field {
    const char *name;
    field_type type;
    size_t offset;
} field;

#define FIELD_OF(record, name, type)                                                               \
    {                                                                                              \
#name, (type), offsetof(record, name)                                                      \
    }

static const field copy_fields[] = {
    FIELD_OF(hardware_copy, bytes, FIELD_INT),     FIELD_OF(hardware_copy, in, FIELD_RATE),
    FIELD_OF(hardware_copy, out, FIELD_RATE),      FIELD_OF(hardware_copy, both_in, FIELD_RATE),
    FIELD_OF(hardware_copy, both_out, FIELD_RATE), { 0 }
};
static const field host_fields[] = { FIELD_OF(hardware_host, threads, FIELD_INT),
                                     FIELD_OF(hardware_host, copy, FIELD_RATE),
                                     FIELD_OF(hardware_host, update, FIELD_RATE),
                                     { 0 } };
static const field gemm_fields[] = { { "precision", FIELD_DTYPE, offsetof(hardware_gemm, dtype) },
                                     FIELD_OF(hardware_gemm, rows, FIELD_INT),
                                     FIELD_OF(hardware_gemm, cols, FIELD_INT),
                                     FIELD_OF(hardware_gemm, inner, FIELD_INT),
                                     FIELD_OF(hardware_gemm, forward, FIELD_RATE),
                                     FIELD_OF(hardware_gemm, input_gradient, FIELD_RATE),
                                     FIELD_OF(hardware_gemm, weight_gradient, FIELD_RATE),
                                     { 0 } };
static const field attention_fields[] = {
    { "precision", FIELD_DTYPE, offsetof(hardware_attention, dtype) },
    FIELD_OF(hardware_attention, document, FIELD_INT),
    FIELD_OF(hardware_attention, tokens, FIELD_INT),
    FIELD_OF(hardware_attention, heads, FIELD_INT),
    FIELD_OF(hardware_attention, kv_heads, FIELD_INT),
    FIELD_OF(hardware_attention, head_dim, FIELD_INT),
    FIELD_OF(hardware_attention, forward, FIELD_RATE),
    FIELD_OF(hardware_attention, backward, FIELD_RATE),
    FIELD_OF(hardware_attention, any_order, FIELD_RATE_OR_NONE),
    { 0 }
};

static const field scan_fields[] = { { "precision", FIELD_DTYPE, offsetof(hardware_scan, dtype) },
                                     FIELD_OF(hardware_scan, document, FIELD_INT),
                                     FIELD_OF(hardware_scan, tokens, FIELD_INT),
                                     FIELD_OF(hardware_scan, k_heads, FIELD_INT),
                                     FIELD_OF(hardware_scan, v_heads, FIELD_INT),
                                     FIELD_OF(hardware_scan, head_dim, FIELD_INT),
                                     FIELD_OF(hardware_scan, forward, FIELD_RATE),
                                     FIELD_OF(hardware_scan, backward, FIELD_RATE),
                                     { 0 } };

/* A list of records. */
typedef struct table {
    const char *name;
    const field *fields;
    size_t first, size, count; /* offset of the records, bytes of each, offset of their number */
    int32_t least, most;
} table;

#define TABLE_OF(name, fields, records, count, least)                                              \
    {                                                                                              \
        name, fields, offsetof(hardware, records), sizeof(((hardware *)0)->records[0]),            \
            offsetof(hardware, count), (least),                                                    \
            (int32_t)(sizeof(((hardware *)0)->records) / sizeof(((hardware *)0)->records[0]))      \
    }

static const table tables[] = {
    TABLE_OF("copies", copy_fields, copy, n_copies, 1),
    TABLE_OF("host_memory", host_fields, memory, n_threads, 1),
    TABLE_OF("gemms", gemm_fields, gemm, n_gemms, 1),
    TABLE_OF("attention", attention_fields, attention, n_attentions, 1),
    TABLE_OF("gated_delta", scan_fields, scan, n_scans, 0), /* backends may do without */
};
enum { TABLES = sizeof tables / sizeof tables[0] };

/* ---- writing --------------------------------------------------------------------------------- */

static void put_string(FILE *f, const char *key, const char *text)
{
    fprintf(f, "%s: \"", key);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', f);
        fputc((unsigned char)*text < 0x20 ? ' ' : *text, f);
    }
    fputs("\"\n", f);
}

static void put_record(FILE *f, const field *fields, const char *record)
{
    const char *sep = "";
    fputs("  - { ", f);
    for (const field *v = fields; v->name; v++) {
        int64_t whole;
        double number;
        mt_dtype dtype;
        memcpy(&number, record + v->offset, sizeof number);
        if (v->type == FIELD_RATE_OR_NONE && !(number > 0))
            continue;
        fprintf(f, "%s%s: ", sep, v->name);
        sep = ", ";
        switch (v->type) {
        case FIELD_INT:
            memcpy(&whole, record + v->offset, sizeof whole);
            fprintf(f, "%lld", (long long)whole);
            break;
        case FIELD_RATE:
        case FIELD_RATE_OR_NONE:
            fprintf(f, "%.6e", number);
            break;
        case FIELD_DTYPE:
            memcpy(&dtype, record + v->offset, sizeof dtype);
            fputs(mt_dtype_name(dtype), f);
            break;
        }
    }
    fputs(" }\n", f);
}

static void put_profile(FILE *f, const hardware *h)
{
    const mt_device_info *d = &h->device;
    const char *sep = "";
    fprintf(f,
            "# Measured by `megatrain bench hardware`. Memory in bytes, rates in bytes or FLOP a "
            "second.\nformat: " PROFILE_FORMAT "\nversion: %d\n",
            PROFILE_VERSION);
    put_string(f, "megatrain", h->megatrain);
    put_string(f, "host", h->host);
    fprintf(f, "measured_at: %lld\n\ndevice:\n", (long long)h->measured_at);
    put_string(f, "  kind", h->kind);
    put_string(f, "  name", d->name);
    put_string(f, "  details", d->details);
    fprintf(f, "  threads: %u\n  memory_total: %lld\n  memory_free: %lld\n  unified: %s\n",
            d->compute_threads, (long long)d->memory_total, (long long)d->memory_free,
            d->unified ? "true" : "false");
    fprintf(f, "  default_precision: %s\n  precisions: [", mt_dtype_name(d->default_compute));
    for (mt_dtype t = 0; t < MT_DTYPE_COUNT; t++)
        if (d->compute_dtypes & 1u << t) {
            fprintf(f, "%s%s", sep, mt_dtype_name(t));
            sep = ", ";
        }
    fprintf(f, "]\n\ncpus: %lld\nhost_memory_free: %lld\npin: %.6e\ndevice_copy: %.6e\n",
            (long long)h->cpus, (long long)h->host_memory, h->pin, h->device_copy);
    if (h->disk_read > 0)
        fprintf(f, "disk_read: %.6e\ndisk_write: %.6e\ndisk_direct: %s\n", h->disk_read,
                h->disk_write, h->disk_direct ? "true" : "false");
    for (int i = 0; i < TABLES; i++) {
        int32_t n;
        memcpy(&n, (const char *)h + tables[i].count, sizeof n);
        if (n == 0)
            continue;
        fprintf(f, "\n%s:\n", tables[i].name);
        for (int32_t k = 0; k < n; k++)
            put_record(f, tables[i].fields,
                       (const char *)h + tables[i].first + (size_t)k * tables[i].size);
    }
}

mt_status profile_prepare(const char *path, bool make_folder)
{
    char folder[PROFILE_PATH];
    if (strlen(path) >= PROFILE_PATH)
        return status_set(MT_ERR_INVALID, "the path '%.60s...' is too long", path);
    strcpy(folder, path);
    char *slash = strrchr(folder, '/');
    if (slash)
        *slash = '\0';
    mt_status st = make_folder && slash ? files_make_folders(folder) : MT_OK;
    if (st != MT_OK)
        return status_set(st, "%s; write the profile elsewhere with -o FILE", status_text());
    return files_check_output(path, make_folder ? NULL : PROFILE_FORMAT, true);
}

mt_status profile_write(const hardware *h, const char *path)
{
    char temporary[PROFILE_PATH + 32], *text = NULL;
    size_t n = 0;
    mt_status st = MT_OK;
    FILE *f = open_memstream(&text, &n);
    if (!f)
        return status_nomem("a profile", 0);
    put_profile(f, h);
    if (fclose(f) != 0)
        st = status_nomem("a profile", n);
    snprintf(temporary, sizeof temporary, "%s.tmp-%ld", path, (long)getpid());
    if (st == MT_OK) {
        unlink(temporary);
        st = files_write(temporary, text, n);
    }
    if (st == MT_OK && rename(temporary, path) != 0)
        st = status_set(MT_ERR_IO, "%s: cannot be replaced: %s", path, strerror(errno));
    if (st != MT_OK)
        unlink(temporary);
    free(text);
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

static mt_status read_dtype(const mt_config *c, const char *key, mt_dtype *ret)
{
    const char *name;
    mt_status st = c->get_string(c, key, &name);
    if (st != MT_OK)
        return st;
    for (mt_dtype t = MT_F32; t <= MT_F64; t++)
        if (strcmp(name, mt_dtype_name(t)) == 0) {
            *ret = t;
            return MT_OK;
        }
    return c->reject(c, key, "is '%s'; expected fp32 or bf16", name);
}

static mt_status read_rate(const mt_config *c, const char *key, double *ret)
{
    double x;
    mt_status st = c->get_float(c, key, &x);
    if (st == MT_OK && !(x > 0 && isfinite(x)))
        return c->reject(c, key, "is %g, but a rate is above 0", x);
    if (st == MT_OK)
        *ret = x;
    return st;
}

/* Of bytes, tokens, rows: sums of a few stay within 64 bits. */
static const int64_t most_count = INT64_C(1) << 60;

static mt_status read_count(const mt_config *c, const char *key, int64_t most, int64_t *ret)
{
    int64_t x;
    mt_status st = c->get_int(c, key, &x);
    if (st == MT_OK && (x < 1 || x > most))
        return c->reject(c, key, "is %lld, but must be from 1 to %lld", (long long)x,
                         (long long)most);
    if (st == MT_OK)
        *ret = x;
    return st;
}

static mt_status read_text(const mt_config *c, const char *key, char *ret, size_t size)
{
    const char *text;
    mt_status st = c->get_string(c, key, &text);
    if (st == MT_OK && strlen(text) >= size)
        return c->reject(c, key, "is longer than %zu bytes", size - 1);
    if (st == MT_OK)
        memcpy(ret, text, strlen(text) + 1);
    return st;
}

static mt_status read_record(const mt_config *c, const field *v, const char *key, char *record)
{
    int64_t whole = 0;
    double number = 0;
    mt_dtype dtype = MT_F32;
    mt_status st = MT_OK;
    switch (v->type) {
    case FIELD_INT:
        st = read_count(c, key, most_count, &whole);
        memcpy(record + v->offset, &whole, sizeof whole);
        break;
    case FIELD_RATE_OR_NONE:
        if (!c->has(c, key))
            break;
        /* fallthrough */
    case FIELD_RATE:
        st = read_rate(c, key, &number);
        memcpy(record + v->offset, &number, sizeof number);
        break;
    case FIELD_DTYPE:
        st = read_dtype(c, key, &dtype);
        memcpy(record + v->offset, &dtype, sizeof dtype);
        break;
    }
    return st;
}

static mt_status read_table(const mt_config *c, const table *t, hardware *h)
{
    char key[KEY_SIZE];
    mt_status st = MT_OK;
    int64_t n = c->length(c, t->name);
    if (t->least > 0 && !c->has(c, t->name))
        return c->get_int(c, t->name, &n); /* which says that it is missing */
    if (n < t->least || n > t->most)
        return c->reject(c, t->name, "has %lld records; expected %d to %d", (long long)n, t->least,
                         t->most);
    for (int64_t i = 0; i < n; i++)
        for (const field *v = t->fields; v->name && st == MT_OK; v++) {
            snprintf(key, sizeof key, "%s.%lld.%s", t->name, (long long)i, v->name);
            st = read_record(c, v, key, (char *)h + t->first + (size_t)i * t->size);
        }
    int32_t count = (int32_t)n;
    memcpy((char *)h + t->count, &count, sizeof count);
    return st;
}

static mt_status read_device(const mt_config *c, hardware *h)
{
    mt_device_info *d = &h->device;
    int64_t threads = 0;
    bool unified = false;
    char key[KEY_SIZE];
    d->struct_size = sizeof *d;
    mt_status st = read_text(c, "device.kind", h->kind, sizeof h->kind);
    if (st == MT_OK)
        st = read_text(c, "device.name", d->name, sizeof d->name);
    if (st == MT_OK)
        st = read_text(c, "device.details", d->details, sizeof d->details);
    if (st == MT_OK)
        st = read_count(c, "device.threads", UINT32_MAX, &threads);
    if (st == MT_OK)
        st = read_count(c, "device.memory_total", most_count, &d->memory_total);
    if (st == MT_OK)
        st = read_count(c, "device.memory_free", most_count, &d->memory_free);
    if (st == MT_OK)
        st = c->get_bool(c, "device.unified", &unified);
    if (st == MT_OK)
        st = read_dtype(c, "device.default_precision", &d->default_compute);
    for (int64_t i = 0; st == MT_OK && i < c->length(c, "device.precisions"); i++) {
        mt_dtype t = MT_F32;
        snprintf(key, sizeof key, "device.precisions.%lld", (long long)i);
        st = read_dtype(c, key, &t);
        d->compute_dtypes |= 1u << t;
    }
    if (st == MT_OK && !(d->compute_dtypes & 1u << d->default_compute))
        st = c->reject(c, "device.precisions", "must name the default precision, %s",
                       mt_dtype_name(d->default_compute));
    d->compute_threads = (uint32_t)threads;
    d->unified = unified;
    return st;
}

static mt_status read_format(const mt_config *c)
{
    const char *format = "";
    int64_t version = 0;
    mt_status st = mt_config_string(c, "format", "", &format);
    if (st == MT_OK && strcmp(format, PROFILE_FORMAT) != 0)
        return c->reject(c, "format",
                         "is '%s', expected " PROFILE_FORMAT
                         ": this is no profile of `megatrain bench hardware`",
                         format);
    if (st == MT_OK)
        st = c->get_int(c, "version", &version);
    if (st == MT_OK && version != PROFILE_VERSION)
        return c->reject(c, "version", "is %lld, but this program reads version %d; measure anew",
                         (long long)version, PROFILE_VERSION);
    return st;
}

static mt_status read_profile(config *whole, hardware *h)
{
    const mt_config *c = config_section(whole, "");
    if (!c)
        return MT_ERR_NOMEM;
    mt_status st = read_format(c);
    if (st == MT_OK)
        st = read_text(c, "megatrain", h->megatrain, sizeof h->megatrain);
    if (st == MT_OK)
        st = read_text(c, "host", h->host, sizeof h->host);
    if (st == MT_OK)
        st = read_count(c, "measured_at", most_count, &h->measured_at);
    if (st == MT_OK)
        st = read_device(c, h);
    if (st == MT_OK)
        st = read_count(c, "cpus", INT32_MAX, &h->cpus);
    if (st == MT_OK)
        st = read_count(c, "host_memory_free", most_count, &h->host_memory);
    if (st == MT_OK)
        st = read_rate(c, "pin", &h->pin);
    if (st == MT_OK)
        st = read_rate(c, "device_copy", &h->device_copy);
    if (st == MT_OK && (c->has(c, "disk_read") || c->has(c, "disk_write"))) {
        st = read_rate(c, "disk_read", &h->disk_read);
        if (st == MT_OK)
            st = read_rate(c, "disk_write", &h->disk_write);
        if (st == MT_OK)
            st = c->get_bool(c, "disk_direct", &h->disk_direct);
    }
    for (int i = 0; i < TABLES && st == MT_OK; i++)
        st = read_table(c, &tables[i], h);
    return st == MT_OK ? config_check_unused(whole, "") : st;
}

mt_status profile_read(const char *path, hardware *ret)
{
    if (access(path, F_OK) != 0)
        return status_set(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO,
                          "%s: cannot read the profile: %s; `megatrain bench hardware -o FILE` "
                          "makes one",
                          path, strerror(errno));
    config *c = NULL;
    hardware *h = calloc(1, sizeof *h);
    mt_status st = h ? config_read_yaml(path, &c) : status_nomem("a profile", sizeof *h);
    if (st == MT_OK)
        st = read_profile(c, h);
    if (st == MT_OK)
        *ret = *h;
    /* Of a file that is there, a missing key is a fault. */
    else if (st == MT_ERR_NOT_FOUND)
        st = MT_ERR_FORMAT;
    config_destroy(c);
    free(h);
    return st;
}

/* ---- the cache ------------------------------------------------------------------------------- */

mt_status profile_cache_path(const char *kind, char ret[PROFILE_PATH])
{
    char host[128] = "unknown", name[256];
    if (gethostname(host, sizeof host - 1) != 0 || strchr(host, '/'))
        snprintf(host, sizeof host, "unknown");
    snprintf(name, sizeof name, "profile-%s-%s.yaml", host, kind);
    mt_status st = files_cache_path(name, ret, PROFILE_PATH);
    return st == MT_OK
               ? st
               : status_set(st, "%s, or write the profile elsewhere with -o FILE", status_text());
}

mt_status profile_check(const hardware *h, const char *kind, const mt_device_info *device)
{
    if (strcmp(h->megatrain, MT_VERSION) != 0)
        return status_set(MT_ERR_INVALID, "it is of megatrain %s, this is " MT_VERSION,
                          h->megatrain);
    if (strcmp(h->kind, kind) != 0 || strcmp(h->device.name, device->name) != 0)
        return status_set(MT_ERR_INVALID, "it is of %s '%s', the device here is %s '%s'", h->kind,
                          h->device.name, kind, device->name);
    if (h->device.compute_threads != device->compute_threads)
        return status_set(MT_ERR_INVALID, "it is of a device with %u threads, this one uses %u",
                          h->device.compute_threads, device->compute_threads);
    return MT_OK;
}

mt_status profile_find(const char *kind, const mt_device_info *device, hardware *ret)
{
    char path[PROFILE_PATH];
    hardware *h = calloc(1, sizeof *h);
    if (!h)
        return status_nomem("a profile", sizeof *h);
    mt_status st = profile_cache_path(kind, path);
    if (st == MT_OK)
        st = profile_read(path, h);
    if (st == MT_OK) {
        st = profile_check(h, kind, device);
        if (st != MT_OK)
            status_prefix(st, "%s", path);
    }
    if (st == MT_OK)
        *ret = *h;
    free(h);
    return st;
}
