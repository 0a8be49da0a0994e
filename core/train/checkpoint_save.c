/* SPDX-License-Identifier: Apache-2.0
 *
 * The tensors of a checkpoint: masters and optimizer states on their way to files.
 */
#include "../base/status.h"
#include "checkpoint_files.h"
#include "weights_pass.h"

#include <stdio.h>
#include <stdlib.h>

static const int64_t default_shard_bytes = (int64_t)4 << 30;

mt_tensor_info checkpoint_state_info(const model_param *p, const char *name, mt_dtype dtype)
{
    mt_tensor_info t = { .name = name, .dtype = dtype, .bytes = p->elems * mt_dtype_size(dtype) };
    if (p->rows)
        t.dim[t.ndim++] = p->rows;
    t.dim[t.ndim++] = p->cols;
    return t;
}

/* One set of files that is to be written. */
typedef struct saving {
    mt_tensor_info *list; /* [n] in the order of the files */
    weights_item *items;  /* [n] */
    int64_t n, bytes;
    arena names;
} saving;

static mt_status saving_init(saving *v, int64_t room)
{
    v->list = calloc((size_t)room + 1, sizeof *v->list);
    v->items = calloc((size_t)room + 1, sizeof *v->items);
    return v->list && v->items
               ? MT_OK
               : status_nomem("the tensors of a checkpoint", (size_t)room * sizeof *v->list);
}

static void saving_finish(saving *v)
{
    free(v->list);
    free(v->items);
    arena_finish(&v->names);
}

static void add_tensor(saving *v, const mt_tensor_info *info, int64_t tensor, void *plane)
{
    v->list[v->n] = *info;
    v->items[v->n] = (weights_item){
        .index = v->n, .dtype = info->dtype, .tensor = tensor, .plane = plane, .bytes = info->bytes
    };
    v->n++;
    v->bytes += info->bytes;
}

static mt_status list_weights(saving *v, const tensor_map *map, mt_dtype dtype)
{
    mt_status status = saving_init(v, map->n);
    for (int64_t t = 0; t < map->n && !status; t++) {
        const mt_tensor_info info = tensor_info(&map->tensors[t], dtype);
        add_tensor(v, &info, t, NULL);
    }
    return status;
}

static mt_status list_states(saving *v, const store *s)
{
    const model *m = s->m;
    mt_status status = saving_init(v, (int64_t)m->n_params * s->n_states);
    for (int32_t p = 0; p < m->n_params && !status; p++)
        for (uint32_t k = 0; k < s->n_states && !(m->params[p].flags & MT_PARAM_FROZEN); k++) {
            const char *name =
                arena_printf(&v->names, "%s.%s", m->params[p].name, s->states[k].name);
            if (!name)
                return MT_ERR_NOMEM;
            const mt_tensor_info info =
                checkpoint_state_info(&m->params[p], name, s->states[k].dtype);
            add_tensor(v, &info, -1, store_state(s, p, k));
        }
    return status;
}

static mt_status add_sums(const saving *v, json_t *sums)
{
    for (int64_t i = 0; i < v->n; i++) {
        char text[32];
        snprintf(text, sizeof text, "%016llx", (unsigned long long)v->items[i].sum);
        if (json_object_set_new(sums, v->list[i].name, json_string(text)) < 0)
            return status_nomem("checksums of a checkpoint", sizeof text);
    }
    return MT_OK;
}

static mt_status write_files(const saving *v, weights_way *way, const char *folder,
                             const char *stem, int64_t shard_bytes, json_t *sums)
{
    mt_status status = way->format->create(folder, stem, v->list, v->n, shard_bytes, &way->writer);
    if (status)
        return status;
    if ((status = weights_pass(way, v->items, v->n)))
        way->format->abort(way->writer);
    else
        status = way->format->finish(way->writer);
    return status ? status : add_sums(v, sums);
}

mt_status checkpoint_save_tensors(const store *s, const checkpoint_options *o,
                                  const tensor_map *map, const mt_weights *format,
                                  const char *folder, json_t *weights, json_t *states)
{
    int64_t shard_bytes = o->shard_bytes ? o->shard_bytes : default_shard_bytes;
    saving w = { 0 }, t = { 0 };
    progress p;
    weights_way way = { .format = format,
                        .masters = weights_of_store((store *)s), /* which are only read */
                        .map = map,
                        .sums = true,
                        .progress = &p };
    mt_status status = list_weights(&w, map, o->weights_dtype);
    if (!status && !o->weights_only)
        status = list_states(&t, s);
    if (status)
        goto out;
    progress_begin(&p, "saving the checkpoint", w.bytes + t.bytes);
    status = write_files(&w, &way, folder, CHECKPOINT_WEIGHTS_STEM, shard_bytes, weights);
    if (!status && !o->weights_only)
        status = write_files(&t, &way, folder, CHECKPOINT_STATES_STEM, shard_bytes, states);
    progress_end(&p);
out:
    saving_finish(&w);
    saving_finish(&t);
    return status;
}
