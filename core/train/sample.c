/* SPDX-License-Identifier: Apache-2.0
 *
 * Sampling from logits. Probabilities are formed in double, after sorting by logit and then by id,
 * so that a draw is the same wherever the logits are.
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
    candidate *sorted; /* [vocab] */
};

mt_status sampler_create(const sampler_options *options, int64_t vocab, sampler **ret)
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
    sampler *s = calloc(1, sizeof *s);
    if (!s)
        return status_nomem("a sampler", sizeof *s);
    s->options = *options;
    s->vocab = vocab;
    s->state = options->seed;
    s->sorted = calloc((size_t)vocab, sizeof *s->sorted);
    if (!s->sorted) {
        free(s);
        return status_nomem("a sampler's candidates", (size_t)vocab * sizeof *s->sorted);
    }
    *ret = s;
    return MT_OK;
}

void sampler_destroy(sampler *s)
{
    if (!s)
        return;
    free(s->sorted);
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

static int by_logit(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
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

    for (int64_t i = 0; i < s->vocab; i++)
        s->sorted[i] = (candidate){ logits[i], (int32_t)i };
    qsort(s->sorted, (size_t)s->vocab, sizeof *s->sorted, by_logit);

    int64_t n = s->vocab;
    if (s->options.top_k > 0 && s->options.top_k < n)
        n = s->options.top_k;
    double top = s->sorted[0].logit, sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += exp((s->sorted[i].logit - top) / s->options.temperature);
    if (s->options.top_p < 1) {
        double mass = 0;
        for (int64_t i = 0; i < n; i++) {
            mass += exp((s->sorted[i].logit - top) / s->options.temperature);
            if (mass >= s->options.top_p * sum) {
                n = i + 1;
                sum = mass;
                break;
            }
        }
    }

    double at = draw(s) * sum;
    int64_t pick = 0;
    for (; pick < n - 1; pick++) {
        at -= exp((s->sorted[pick].logit - top) / s->options.temperature);
        if (at < 0)
            break;
    }
    *ret = s->sorted[pick].id;
    return MT_OK;
}
