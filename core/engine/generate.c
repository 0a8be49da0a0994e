/* SPDX-License-Identifier: Apache-2.0
 *
 * Generation: prefill and decode of one sequence through the same templates, with a state per
 * unit. Weights stream as in eval, or stay in their buffers when the plan holds one for each unit;
 * of units that are cut only those of experts with tokens.
 */
#include "internal.h"

#include "../base/status.h"

#include <string.h>

static mt_status check_call(const engine *e, const int32_t *tokens, int64_t n, int64_t used)
{
    int64_t context = e->p->request.context;
    if (context == 0)
        return status_set(MT_ERR_INVALID, "the plan has no room for generation (context is 0)");
    if (n < 1 || used < 0 || used + n > context)
        return status_set(MT_ERR_INVALID, "%lld tokens after %lld do not fit the context's %lld",
                          (long long)n, (long long)used, (long long)context);
    if (used > 0 && used != e->generated)
        return status_set(MT_ERR_INVALID,
                          "position %lld does not follow the %lld tokens fed so far",
                          (long long)used, (long long)e->generated);
    if (n > e->l.tokens)
        return status_set(MT_ERR_INVALID, "%lld tokens at once; this plan takes at most %lld",
                          (long long)n, (long long)e->l.tokens);
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= e->m->vocab)
            return status_set(MT_ERR_INVALID,
                              "token %lld: id %d is not below the vocabulary's %lld", (long long)i,
                              tokens[i], (long long)e->m->vocab);
    return MT_OK;
}

/* Runs the last visit for the logits of rows first .. first+n, and copies them to `dst`. */
static void read_logits(engine *e, const weight_buffer *w, mt_batch *batch, mt_pass pass,
                        int64_t used, int64_t first, int64_t n, float *dst)
{
    int64_t vocab = e->m->vocab;
    int32_t *host_rows = e->region[LAYOUT_HOST_LOGITS];
    float *host_logits = (float *)(host_rows + 64);
    batch->logit_rows = e->region[LAYOUT_LOGITS];
    batch->logits = (char *)e->region[LAYOUT_LOGITS] + 256;
    batch->n_logit_rows = n;
    for (int64_t i = 0; i < n; i++)
        host_rows[i] = (int32_t)(first + i);
    e->b->copy_in(e->dev, e->q_compute, (void *)batch->logit_rows, host_rows, n * 4);
    enqueued(e, e->q_compute);
    pass_generate(e, e->l.n_forward - 1, w, batch, pass, used);
    e->b->copy_out(e->dev, e->q_compute, host_logits, batch->logits, n * vocab * 4);
    enqueued(e, e->q_compute);
    e->b->queue_sync(e->dev, e->q_compute);
    memcpy(dst, host_logits, (size_t)(n * vocab) * sizeof *dst);
}

mt_status engine_generate(engine *e, const int32_t *tokens, int64_t n, int64_t used,
                          float *ret_logits, float *all_logits)
{
    mt_status st = engine_alive(e);
    if (st == MT_OK)
        st = check_call(e, tokens, n, used);
    if (st < 0)
        return st;
    int64_t head = e->l.n_forward - 1;
    mt_pass pass = used == 0 ? MT_PASS_PREFILL : MT_PASS_DECODE;
    int32_t *positions = e->positions;
    int32_t starts[2] = { 0, (int32_t)n };
    for (int64_t i = 0; i < n; i++)
        positions[i] = (int32_t)(used + i);
    const micro_batch micro = { .tokens = n,
                                .documents = 1,
                                .max_document = n,
                                .ids = (int32_t *)tokens,
                                .positions = positions,
                                .doc_starts = starts };
    const micro_batch *list[1] = { &micro };
    sequence *s = &e->step.seq;
    *s = (sequence){ .n_groups = 1, .group_length = e->l.n_forward, .first_key = e->next_key };
    stream_prepare(e, list, (micro_range){ 0, 1 }, e->next_key++, false);
    group_set *set = &e->set[s->first_key % LAYOUT_SETS];

    mt_batch batch;
    stream_batch(e, set, 0, &batch);
    e->b->event_wait(e->dev, e->q_compute, set->loaded);
    int64_t event = time_begin(e, e->q_compute, TRACK_COMPUTE, EVENT_GENERATE, -1, -1);
    for (int64_t pos = 0; pos < head; pos++) {
        weight_buffer *w = stream_skips(e, s, pos) ? NULL : stream_acquire(e, s, pos);
        pass_generate(e, pos, w, &batch, pass, used);
        stream_release(e, s, pos, w);
    }
    weight_buffer *w = stream_acquire(e, s, head);
    for (int64_t i = 0; all_logits && i < n; i += LAYOUT_LOGIT_ROWS) {
        int64_t rows = n - i < LAYOUT_LOGIT_ROWS ? n - i : LAYOUT_LOGIT_ROWS;
        read_logits(e, w, &batch, pass, used, i, rows, all_logits + i * e->m->vocab);
    }
    if (all_logits)
        memcpy(ret_logits, all_logits + (n - 1) * e->m->vocab,
               (size_t)e->m->vocab * sizeof *ret_logits);
    else
        read_logits(e, w, &batch, pass, used, n - 1, 1, ret_logits);
    stream_release(e, s, head, w);
    time_end(e, e->q_compute, event);
    e->b->event_record(e->dev, set->done, e->q_compute);
    e->generated = used + n;
    return engine_alive(e);
}
