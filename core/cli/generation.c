/* SPDX-License-Identifier: Apache-2.0
 *
 * The sequence that is generated.
 */
#include "generation.h"

#include "../base/status.h"

#include <stdio.h>
#include <stdlib.h>

/* Longer prompts are fed in pieces of this size: memory for the activations of more tokens would
 * gain little speed. */
enum { LARGEST_PIECE = 1024 };

mt_status generation_open(generation *g, session *s, const generation_options *o)
{
    int64_t vocab = s->model->vocab;
    g->s = s;
    g->context = o->context;
    g->piece = o->prompt < LARGEST_PIECE ? o->prompt : LARGEST_PIECE;
    mt_status st = session_make_generation_plan(s, g->piece, g->context);
    if (st == MT_OK)
        st = session_start(s, &(session_engine_options){ 0 });
    if (st == MT_OK)
        st = session_load_weights(s, o->weights, o->sampling.seed);
    if (st != MT_OK)
        return st;
    g->logits = calloc((size_t)vocab, sizeof *g->logits);
    g->tokens = calloc((size_t)g->context, sizeof *g->tokens);
    if (!g->logits || !g->tokens)
        return status_nomem("logits and tokens", (size_t)vocab * sizeof *g->logits +
                                                     (size_t)g->context * sizeof *g->tokens);
    return sampler_create(&o->sampling, vocab, &g->sampler);
}

void generation_close(generation *g)
{
    sampler_destroy(g->sampler);
    free(g->logits);
    free(g->tokens);
    *g = (generation){ 0 };
}

mt_status generation_feed(generation *g, const int32_t *tokens, int64_t n)
{
    int64_t same = 0;
    while (same < n && same < g->used && tokens[same] == g->tokens[same])
        same++;
    /* Of what the engine holds nothing can be taken back, and the logits are of its last token. */
    if (same < g->used)
        g->used = 0;
    while (g->used < n) {
        int64_t piece = n - g->used < g->piece ? n - g->used : g->piece;
        mt_status st =
            engine_generate(g->s->engine, tokens + g->used, piece, g->used, g->logits, NULL);
        if (st != MT_OK)
            return st;
        memcpy(g->tokens + g->used, tokens + g->used, (size_t)piece * sizeof *tokens);
        g->used += piece;
    }
    return MT_OK;
}

static mt_status append(generation *g, int32_t token)
{
    mt_status st = engine_generate(g->s->engine, &token, 1, g->used, g->logits, NULL);
    if (st == MT_OK)
        g->tokens[g->used++] = token;
    return st;
}

static bool is_among(int32_t token, const int32_t *list, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (list[i] == token)
            return true;
    return false;
}

mt_status generation_run(generation *g, const int32_t *stops, int64_t n_stops, int64_t most,
                         generation_put put, void *arg, int64_t *ret_made)
{
    mt_status st = MT_OK;
    int64_t made = 0;
    while (made < most && st == MT_OK) {
        int32_t token = 0;
        st = sampler_next(g->sampler, g->logits, &token);
        if (st != MT_OK || is_among(token, stops, n_stops))
            break;
        st = put(arg, token);
        if (++made == most || g->used == g->context)
            break;
        if (st == MT_OK)
            st = append(g, token);
    }
    *ret_made = made;
    return st;
}
