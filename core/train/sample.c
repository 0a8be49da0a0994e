/* SPDX-License-Identifier: Apache-2.0
 *
 * Sampling from logits. Probabilities are formed in double and gone through by logit and then by
 * id, so that a draw is the same wherever the logits are. A draw looks at few of a large
 * vocabulary's tokens: they are taken from a heap, not sorted.
 */
#include "sample.h"

#include "../base/status.h"

#include <math.h>
#include <stdlib.h>

typedef struct candidate {
    float logit;
    int32_t id;
} candidate;

struct sampler {
    sampler_options options;
    int64_t vocab;
    uint64_t state;
    double top;      /* the largest logit */
    candidate *heap; /* [vocab]: the best of those left first; those taken stand at the end, the
                        first one last */
    int64_t left;
};

mt_status sampler_check(const sampler_options *options)
{
    if (!(options->temperature >= 0) || isinf(options->temperature))
        return status_set(MT_ERR_INVALID, "temperature must be 0 (greedy) or positive, not %g",
                          options->temperature);
    if (options->top_k < 0)
        return status_set(MT_ERR_INVALID, "top-k must be 0 (all) or positive, not %lld",
                          (long long)options->top_k);
    if (!(options->top_p > 0 && options->top_p <= 1))
        return status_set(MT_ERR_INVALID, "top-p must be above 0 and at most 1, not %g",
                          options->top_p);
    return MT_OK;
}

mt_status sampler_create(const sampler_options *options, int64_t vocab, sampler **ret)
{
    mt_status st = sampler_check(options);
    if (st != MT_OK)
        return st;
    sampler *s = calloc(1, sizeof *s);
    if (!s)
        return status_nomem("a sampler", sizeof *s);
    s->options = *options;
    s->vocab = vocab;
    s->state = options->seed;
    s->heap = calloc((size_t)vocab, sizeof *s->heap);
    if (!s->heap) {
        free(s);
        return status_nomem("a sampler's candidates", (size_t)vocab * sizeof *s->heap);
    }
    *ret = s;
    return MT_OK;
}

void sampler_destroy(sampler *s)
{
    if (!s)
        return;
    free(s->heap);
    free(s);
}

/* splitmix64 (Steele, Lea and Flood 2014): a uniform double in [0, 1). */
static double draw(sampler *s)
{
    uint64_t z = s->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

/* ---- the heap -------------------------------------------------------------------------------- */

static bool is_better(const candidate *a, const candidate *b)
{
    return a->logit != b->logit ? a->logit > b->logit : a->id < b->id;
}

static void swap(candidate *a, candidate *b)
{
    candidate t = *a;
    *a = *b;
    *b = t;
}

static void sift_down(candidate *heap, int64_t n, int64_t at)
{
    for (;;) {
        int64_t best = at, child = 2 * at + 1;
        for (int64_t i = child; i < child + 2 && i < n; i++)
            if (is_better(&heap[i], &heap[best]))
                best = i;
        if (best == at)
            return;
        swap(&heap[at], &heap[best]);
        at = best;
    }
}

static void fill(sampler *s, const float *logits)
{
    s->left = s->vocab;
    for (int64_t i = 0; i < s->vocab; i++)
        s->heap[i] = (candidate){ logits[i], (int32_t)i };
    for (int64_t i = s->vocab / 2; i-- > 0;)
        sift_down(s->heap, s->left, i);
}

/* The i-th likeliest. */
static const candidate *likeliest(sampler *s, int64_t i)
{
    while (s->vocab - s->left <= i) {
        swap(&s->heap[0], &s->heap[--s->left]);
        sift_down(s->heap, s->left, 0);
    }
    return &s->heap[s->vocab - 1 - i];
}

/* ---- drawing --------------------------------------------------------------------------------- */

static double weight(const sampler *s, float logit)
{
    return exp(((double)logit - s->top) / s->options.temperature);
}

/* How many of the likeliest top-k and top-p allow, and the sum of their weights. */
static int64_t cut(sampler *s, const float *logits, double *ret_sum)
{
    int64_t n = s->vocab;
    double sum = 0, mass = 0;
    if (s->options.top_k > 0 && s->options.top_k < n) {
        n = s->options.top_k;
        for (int64_t i = 0; i < n; i++)
            sum += weight(s, likeliest(s, i)->logit);
    } else {
        for (int64_t i = 0; i < n; i++)
            sum += weight(s, logits[i]);
    }
    *ret_sum = sum;
    for (int64_t i = 0; i < n && s->options.top_p < 1; i++) {
        mass += weight(s, likeliest(s, i)->logit);
        if (mass >= s->options.top_p * sum) {
            *ret_sum = mass;
            return i + 1;
        }
    }
    return n;
}

mt_status sampler_next(sampler *s, const float *logits, int32_t *ret)
{
    int64_t best = 0;
    for (int64_t i = 0; i < s->vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return status_set(MT_ERR_NUMERIC,
                              "the model's logit of token %lld is not a number: the weights are "
                              "damaged or the precision is too low",
                              (long long)i);
        if (logits[i] > logits[best])
            best = i;
    }
    if (s->options.temperature == 0) {
        *ret = (int32_t)best;
        return MT_OK;
    }

    s->top = logits[best];
    fill(s, logits);
    double sum = 0;
    int64_t n = cut(s, logits, &sum), pick = 0;
    for (double at = draw(s) * sum; pick < n - 1; pick++) {
        at -= weight(s, likeliest(s, pick)->logit);
        if (at < 0)
            break;
    }
    *ret = likeliest(s, pick)->id;
    return MT_OK;
}
