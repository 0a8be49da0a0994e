/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading what is expected, packing its documents, comparing.
 */
#include "expected.h"

#include "../../core/base/status.h"
#include "../check.h"

#include <math.h>

/* The bounds: max |a - b| / max |b| in FP32. */

/* ---- reading --------------------------------------------------------------------------------- */

static int64_t elems(const mt_tensor_info *info)
{
    int64_t n = 1;
    for (int32_t i = 0; i < info->ndim; i++)
        n *= info->dim[i];
    return n;
}

static mt_status find(const mt_weights *f, const void *reader, const char *name, int64_t *ret_index,
                      mt_tensor_info *ret)
{
    for (int64_t i = 0, n = f->count(reader); i < n; i++) {
        mt_status status = f->info(reader, i, ret);
        if (status)
            return status;
        if (strcmp(ret->name, name) == 0) {
            *ret_index = i;
            return MT_OK;
        }
    }
    return status_set(MT_ERR_NOT_FOUND, "the expected values lack '%s'", name);
}

/* A whole tensor as it stands; the caller frees. */
static mt_status read_raw(const mt_weights *f, const void *reader, const char *name, mt_dtype dtype,
                          int64_t *ret_n, void *ret)
{
    int64_t index = 0;
    mt_tensor_info info;
    mt_status status = find(f, reader, name, &index, &info);
    if (status)
        return status;
    if (info.dtype != dtype)
        return status_set(MT_ERR_FORMAT, "'%s' is %s, expected %s", name, mt_dtype_name(info.dtype),
                          mt_dtype_name(dtype));
    void *data = malloc((size_t)info.bytes + 1);
    if (!data)
        return status_nomem(name, (size_t)info.bytes);
    if ((status = f->read(reader, index, 0, info.bytes, data))) {
        free(data);
        return status;
    }
    *ret_n = elems(&info);
    *(void **)ret = data;
    return MT_OK;
}

/* An FP32 tensor as doubles. */
static mt_status read_doubles(const mt_weights *f, const void *reader, const char *name,
                              int64_t *ret_n, double **ret)
{
    float *value = NULL;
    mt_status status = read_raw(f, reader, name, MT_F32, ret_n, &value);
    if (status)
        return status;
    *ret = malloc((size_t)*ret_n * sizeof **ret);
    for (int64_t i = 0; *ret && i < *ret_n; i++)
        (*ret)[i] = (double)value[i];
    free(value);
    return *ret ? MT_OK : status_nomem(name, (size_t)*ret_n * sizeof **ret);
}

/* What only models with an auxiliary loss have. */
static mt_status read_aux_loss(const mt_weights *f, const void *reader, expected *e)
{
    double *loss = NULL;
    int64_t n = 0;
    mt_status status = read_raw(f, reader, "aux_loss", MT_F64, &n, &loss);
    if (!status)
        status = read_raw(f, reader, "micro_starts", MT_I32, &e->micro_batches, &e->micro_starts);
    if (!status)
        e->aux_loss = loss[0];
    free(loss);
    return status;
}

static mt_status read_grads(const mt_weights *f, const void *reader, const model *m, expected *e)
{
    e->grads = calloc((size_t)m->n_params, sizeof *e->grads);
    if (!e->grads)
        return status_nomem("gradients", (size_t)m->n_params * sizeof *e->grads);
    int64_t trained = 0;
    for (int32_t p = 0; p < m->n_params; p++) {
        char name[256];
        int64_t n = 0;
        if (m->params[p].flags & MT_PARAM_FROZEN)
            continue;
        trained++;
        snprintf(name, sizeof name, "grad.%s", m->params[p].name);
        mt_status status = read_doubles(f, reader, name, &n, &e->grads[p]);
        if (status)
            return status;
        if (n != m->params[p].elems)
            return status_set(MT_ERR_FORMAT, "'%s' has %lld elements, the parameter %lld", name,
                              (long long)n, (long long)m->params[p].elems);
    }
    int64_t found = 0;
    for (int64_t i = 0, n = f->count(reader); i < n; i++) {
        mt_tensor_info info;
        mt_status status = f->info(reader, i, &info);
        if (status)
            return status;
        found += strncmp(info.name, "grad.", 5) == 0;
    }
    return found == trained
               ? MT_OK
               : status_set(MT_ERR_FORMAT,
                            "%lld gradients expected, the model trains %lld parameters",
                            (long long)found, (long long)trained);
}

mt_status expected_read(const char *path, const mt_weights *format, const model *m, expected *ret)
{
    void *reader = NULL;
    expected e = { .vocab = m->vocab };
    int64_t n = 0, targets = 0, logits = 0, starts = 0;
    double *loss = NULL;
    mt_status status = format->open(path, &reader);
    if (status)
        return status;
    if ((status = read_raw(format, reader, "ids", MT_I32, &e.tokens, &e.ids)) ||
        (status = read_raw(format, reader, "targets", MT_I32, &targets, &e.targets)) ||
        (status = read_raw(format, reader, "doc_starts", MT_I32, &starts, &e.doc_starts)) ||
        (status = read_doubles(format, reader, "logits", &logits, &e.logits)) ||
        (status = read_raw(format, reader, "loss", MT_F64, &n, &loss)) ||
        (model_adds_loss(m) && (status = read_aux_loss(format, reader, &e))) ||
        (status = read_grads(format, reader, m, &e)))
        goto out;
    e.documents = starts - 1;
    e.loss = loss[0];
    if (targets != e.tokens || logits != e.tokens * e.vocab || e.documents < 1 ||
        e.doc_starts[e.documents] != e.tokens)
        status = status_set(MT_ERR_FORMAT, "%s: the shapes do not fit together", path);
    for (int64_t i = 0; i < targets; i++)
        e.n_targets += e.targets[i] >= 0;
out:
    free(loss);
    format->close(reader);
    if (status)
        expected_finish(&e, m);
    else
        *ret = e;
    return status;
}

void expected_finish(expected *e, const model *m)
{
    free(e->ids);
    free(e->targets);
    free(e->doc_starts);
    free(e->micro_starts);
    free(e->logits);
    expected_grads_destroy(e->grads, m);
    *e = (expected){ 0 };
}

double **expected_grads_create(const model *m)
{
    double **grads = calloc((size_t)m->n_params, sizeof *grads);
    for (int32_t p = 0; grads && p < m->n_params; p++)
        if (!(grads[p] = calloc((size_t)m->params[p].elems, sizeof **grads))) {
            expected_grads_destroy(grads, m);
            return NULL;
        }
    return grads;
}

void expected_grads_destroy(double **grads, const model *m)
{
    for (int32_t p = 0; grads && p < m->n_params; p++)
        free(grads[p]);
    free(grads);
}

/* ---- batches --------------------------------------------------------------------------------- */

static mt_status fill_micro(const expected *e, int64_t first, int64_t end, micro_batch *b)
{
    int64_t from = e->doc_starts[first], tokens = e->doc_starts[end] - from;
    *b = (micro_batch){ .tokens = tokens,
                        .documents = end - first,
                        .ids = malloc((size_t)tokens * sizeof(int32_t)),
                        .targets = malloc((size_t)tokens * sizeof(int32_t)),
                        .positions = malloc((size_t)tokens * sizeof(int32_t)),
                        .doc_starts = malloc((size_t)(end - first + 1) * sizeof(int32_t)) };
    if (!b->ids || !b->targets || !b->positions || !b->doc_starts)
        return status_nomem("a micro-batch", (size_t)tokens * 16);
    memcpy(b->ids, e->ids + from, (size_t)tokens * sizeof *b->ids);
    memcpy(b->targets, e->targets + from, (size_t)tokens * sizeof *b->targets);
    b->doc_starts[0] = 0;
    for (int64_t d = first; d < end; d++) {
        int64_t n = e->doc_starts[d + 1] - e->doc_starts[d], at = e->doc_starts[d] - from;
        b->doc_starts[d - first + 1] = (int32_t)(at + n);
        b->max_document = n > b->max_document ? n : b->max_document;
        for (int64_t i = 0; i < n; i++)
            b->positions[at + i] = (int32_t)i;
    }
    for (int64_t i = 0; i < tokens; i++)
        b->n_targets += b->targets[i] >= 0;
    return MT_OK;
}

mt_status expected_batch(const expected *e, const int64_t *first, int64_t n, step_batch *ret)
{
    step_batch b = { .n = n, .micro = calloc((size_t)n, sizeof *b.micro) };
    mt_status status = b.micro ? MT_OK : status_nomem("a batch", (size_t)n * sizeof *b.micro);
    for (int64_t k = 0; k < n && !status; k++) {
        status = fill_micro(e, first[k], k + 1 < n ? first[k + 1] : e->documents, &b.micro[k]);
        b.tokens += b.micro[k].tokens;
        b.n_targets += b.micro[k].n_targets;
    }
    if (status)
        expected_batch_finish(&b);
    else
        *ret = b;
    return status;
}

void expected_batch_finish(step_batch *b)
{
    for (int64_t k = 0; b->micro && k < b->n; k++) {
        free(b->micro[k].ids);
        free(b->micro[k].targets);
        free(b->micro[k].positions);
        free(b->micro[k].doc_starts);
    }
    free(b->micro);
    *b = (step_batch){ 0 };
}

/* ---- comparison ------------------------------------------------------------------------------ */

double expected_error(const double *a, const double *b, int64_t n)
{
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(a[i]) || !isfinite(b[i]))
            return INFINITY;
        worst = fmax(worst, fabs(a[i] - b[i]));
        largest = fmax(largest, fabs(b[i]));
    }
    return worst > 0 ? worst / largest : 0;
}

double expected_check_loss(const expected *e, const char *what, double loss_sum)
{
    double loss = loss_sum / (double)e->n_targets;
    double error = expected_error(&loss, &e->loss, 1);
    CHECK(error <= e->bounds.loss, "%s: loss %.9g, expected %.9g (error %.2e)", what, loss, e->loss,
          error);
    return error;
}

double expected_check_aux_loss(const expected *e, const char *what, double aux_loss_sum)
{
    double loss = aux_loss_sum / (double)e->n_targets;
    double error = expected_error(&loss, &e->aux_loss, 1);
    CHECK(error <= e->bounds.aux_loss, "%s: auxiliary loss %.9g, expected %.9g (error %.2e)", what,
          loss, e->aux_loss, error);
    return error;
}

double expected_check_grads(const expected *e, const char *what, const model *m,
                            double *const *grads)
{
    double worst = 0;
    for (int32_t p = 0; p < m->n_params; p++) {
        if (m->params[p].flags & MT_PARAM_FROZEN)
            continue;
        double error = expected_error(grads[p], e->grads[p], m->params[p].elems);
        worst = fmax(worst, error);
        CHECK(error <= e->bounds.grads, "%s: gradient of %s is off by %.2e of its largest element",
              what, m->params[p].name, error);
    }
    return worst;
}
