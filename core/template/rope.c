/* SPDX-License-Identifier: Apache-2.0
 *
 * The rotary frequency rules: default, linear, dynamic, llama3, yarn.
 */
#include "rope.h"

#include "../base/status.h"

#include <math.h>
#include <stdio.h>

/* Where the scaling's keys are: "rope_parameters" or a map below it, "rope_scaling", or nowhere. */
typedef struct source {
    const mt_config *c;
    const mt_rope_spec *spec;
    const char *section;
    char buffer[64], key[128];
} source;

/* Without a section no key is there: every one of them has its default. */
static const char *key(source *s, const char *name)
{
    snprintf(s->key, sizeof s->key, "%s.%s", s->section ? s->section : "rope_parameters", name);
    return s->key;
}

static mt_status number(source *s, const char *name, double *ret)
{
    mt_status status = s->c->get_float(s->c, key(s, name), ret);
    if (status == MT_ERR_NOT_FOUND)
        return s->c->reject(s->c, s->section, "this rope type needs '%s'", name);
    return status;
}

/* Far above any model's: what is larger is a slip, and would leave FP32. */
static const double most_factor = 1e6, most_theta = 1e15, most_gain = 1000;

static bool is_length(double positions)
{
    return positions >= 1 && positions <= INT32_MAX;
}

static mt_status read_factor(source *s, double *ret)
{
    mt_status status = number(s, "factor", ret);
    if (status == MT_OK && !(*ret >= 1 && *ret <= most_factor))
        return s->c->reject(s->c, key(s, "factor"), "must be 1 to %g, found %g", most_factor, *ret);
    return status;
}

static mt_status scale_linear(source *s, mt_rope_attr *a)
{
    double factor;
    mt_status status = read_factor(s, &factor);
    if (status != MT_OK)
        return status;
    for (int i = 0; i < a->rotary_dim / 2; i++)
        a->inv_freq[i] /= (float)factor;
    return MT_OK;
}

static mt_status scale_llama3(source *s, mt_rope_attr *a)
{
    double factor, low, high, original;
    mt_status status;
    if ((status = read_factor(s, &factor)) != MT_OK ||
        (status = number(s, "low_freq_factor", &low)) != MT_OK ||
        (status = number(s, "high_freq_factor", &high)) != MT_OK ||
        (status = number(s, "original_max_position_embeddings", &original)) != MT_OK)
        return status;
    if (!(low > 0 && low < high && high <= most_factor) || !is_length(original))
        return s->c->reject(s->c, s->section,
                            "expected 0 < low_freq_factor < high_freq_factor <= %g and "
                            "original_max_position_embeddings from 1 to %d; found %g, %g, %g",
                            most_factor, INT32_MAX, low, high, original);
    float longest = (float)(original / low), shortest = (float)(original / high);
    for (int i = 0; i < a->rotary_dim / 2; i++) {
        float f = a->inv_freq[i], wavelength = (float)(2 * M_PI) / f;
        if (wavelength < shortest)
            continue;
        if (wavelength > longest) {
            a->inv_freq[i] = f / (float)factor;
        } else {
            float t = ((float)original / wavelength - (float)low) / (float)(high - low);
            a->inv_freq[i] = (1.0f - t) * f / (float)factor + t * f;
        }
    }
    return MT_OK;
}

/* Dynamic NTK changes the base for sequences beyond max_position_embeddings, which no run has: up
 * to there its frequencies are the default ones. */
static mt_status scale_dynamic(source *s)
{
    double factor;
    return read_factor(s, &factor);
}

static double yarn_gain(double scale, double mscale)
{
    return scale <= 1 ? 1 : 0.1 * mscale * log(scale) + 1;
}

static mt_status scale_yarn(source *s, double theta, mt_rope_attr *a)
{
    static const mt_rope_spec none;
    const mt_config *c = s->c;
    const mt_rope_spec *given = s->section ? &none : s->spec;
    double factor = 0, original = 0, fast, slow, gain, mscale, mscale_all, positions;
    bool truncate;
    mt_status status;
    if ((status = mt_config_float(c, "max_position_embeddings", 2048, &positions)) != MT_OK)
        return status;
    double trained = given->original_max_position_embeddings;
    if ((status = mt_config_float(c, key(s, "original_max_position_embeddings"),
                                  trained > 0 ? trained : positions, &original)) != MT_OK ||
        (status = mt_config_float(c, key(s, "factor"),
                                  given->factor > 0 ? given->factor : positions / original,
                                  &factor)) != MT_OK ||
        (status = mt_config_float(c, key(s, "beta_fast"), 32, &fast)) != MT_OK ||
        (status = mt_config_float(c, key(s, "beta_slow"), 1, &slow)) != MT_OK ||
        (status = mt_config_float(c, key(s, "mscale"), 0, &mscale)) != MT_OK ||
        (status = mt_config_float(c, key(s, "mscale_all_dim"), 0, &mscale_all)) != MT_OK ||
        (status = mt_config_bool(c, key(s, "truncate"), !given->fractional, &truncate)) != MT_OK)
        return status;
    if (!(factor >= 1 && factor <= most_factor) || !is_length(original) ||
        !(slow > 0 && slow < fast && fast <= most_factor))
        return c->reject(c, s->section ? s->section : "max_position_embeddings",
                         "expected factor from 1 to %g and 0 < beta_slow < beta_fast <= %g; found "
                         "%g, %g, %g",
                         most_factor, most_factor, factor, slow, fast);
    if (!(fabs(mscale) <= most_gain && fabs(mscale_all) <= most_gain))
        return c->reject(c, s->section,
                         "expected mscale and mscale_all_dim of at most %g; found "
                         "%g, %g",
                         most_gain, mscale, mscale_all);
    double derived = mscale != 0 && mscale_all != 0
                         ? yarn_gain(factor, mscale) / yarn_gain(factor, mscale_all)
                         : yarn_gain(factor, 1);
    if (given->attention_factor > 0)
        derived = given->attention_factor;
    if ((status = mt_config_float(c, key(s, "attention_factor"), derived, &gain)) != MT_OK)
        return status;
    if (!(gain > 0 && gain <= most_gain))
        return c->reject(c, key(s, "attention_factor"), "must be above 0, at most %g, found %g",
                         most_gain, gain);
    a->attention_factor = (float)gain;

    int d = a->rotary_dim;
    double low = d * log(original / (fast * 2 * M_PI)) / (2 * log(theta));
    double high = d * log(original / (slow * 2 * M_PI)) / (2 * log(theta));
    if (truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, d - 1);
    if (low == high)
        high += 0.001;
    for (int i = 0; i < d / 2; i++) {
        float ramp = (float)fmin(fmax((i - low) / (high - low), 0), 1);
        float f = a->inv_freq[i];
        a->inv_freq[i] = f / (float)factor * ramp + f * (1.0f - ramp);
    }
    return MT_OK;
}

/* Anything but a map holds no scaling that could be read, and dropping it would go unnoticed. */
static bool is_map(const mt_config *c, const char *section)
{
    const char *text;
    double number;
    bool truth;
    return c->length(c, section) == 0 && c->get_string(c, section, &text) != MT_OK &&
           c->get_float(c, section, &number) != MT_OK && c->get_bool(c, section, &truth) != MT_OK;
}

/* The section of the scaling: of a layer type, or of all layers. A type that has frequencies of its
 * own by an older spelling has no part in the scaling of the others. */
static mt_status find_section(source *s)
{
    static const char *const types[] = { "full_attention", "sliding_attention" };
    const mt_config *c = s->c;
    const char *type = s->spec->layer_type, *all = "rope_parameters";
    bool by_type = false;
    for (int i = 0; i < 2; i++) {
        s->section = all;
        by_type |= c->has(c, key(s, types[i]));
    }
    s->section = NULL;
    if (by_type && !type)
        return c->reject(c, all, "frequencies per layer type are not offered for this model type");
    if (by_type) {
        snprintf(s->buffer, sizeof s->buffer, "%s.%s", all, type);
        s->section = c->has(c, s->buffer) ? s->buffer : NULL;
    } else if (c->has(c, all)) {
        if (type)
            return c->reject(c, all,
                             "must hold the maps full_attention and sliding_attention for this "
                             "model type");
        s->section = all;
    } else if (c->has(c, "rope_scaling") && !s->spec->theta_key) {
        s->section = "rope_scaling";
    }
    if (s->section && !is_map(c, s->section))
        return c->reject(c, s->section, "must be a map with rope_type and the keys of that type");
    return MT_OK;
}

static mt_status read_type(source *s, const char **ret)
{
    const mt_config *c = s->c;
    mt_status status;
    *ret = s->spec->type && !s->section ? s->spec->type : "default";
    if (!s->section)
        return MT_OK;
    if ((status = mt_config_string(c, key(s, "type"), *ret, ret)) != MT_OK ||
        (status = mt_config_string(c, key(s, "rope_type"), *ret, ret)) != MT_OK)
        return status;
    if (!c->has(c, key(s, "type")) && !c->has(c, key(s, "rope_type")) &&
        c->has(c, key(s, "factor")))
        return c->reject(c, s->section,
                         "has a factor but no rope_type; expected one of linear, dynamic, llama3, "
                         "yarn");
    /* Some write it once more where the scaling is. */
    c->has(c, key(s, "max_position_embeddings"));
    return MT_OK;
}

static mt_status scale(source *s, const char *type, double theta, mt_rope_attr *a)
{
    if (strcmp(type, "default") == 0)
        return MT_OK;
    if (strcmp(type, "linear") == 0)
        return scale_linear(s, a);
    if (strcmp(type, "dynamic") == 0)
        return scale_dynamic(s);
    if (strcmp(type, "llama3") == 0)
        return scale_llama3(s, a);
    if (strcmp(type, "yarn") == 0)
        return scale_yarn(s, theta, a);
    return s->c->reject(
        s->c, key(s, s->c->has(s->c, key(s, "rope_type")) ? "rope_type" : "type"),
        "rope type '%s' is not offered; expected default, linear, dynamic, llama3 or yarn", type);
}

mt_status rope_from_config(const mt_config *c, const mt_rope_spec *spec, int64_t head_dim,
                           mt_rope_attr *ret)
{
    source s = { .c = c, .spec = spec };
    mt_rope_attr a = { .heads = 1, .head_dim = (int32_t)head_dim, .attention_factor = 1.0f };
    const char *theta_key = spec->theta_key ? spec->theta_key : "rope_theta", *type;
    double theta = spec->theta;
    double share = spec->partial_rotary_factor > 0 ? spec->partial_rotary_factor : 1;
    mt_status status = find_section(&s);
    if (status != MT_OK || (status = mt_config_float(c, theta_key, theta, &theta)) != MT_OK ||
        (status = mt_config_float(c, "partial_rotary_factor", share, &share)) != MT_OK ||
        (status = read_type(&s, &type)) != MT_OK)
        return status;
    if (s.section &&
        ((status = mt_config_float(c, key(&s, "rope_theta"), theta, &theta)) != MT_OK ||
         (status = mt_config_float(c, key(&s, "partial_rotary_factor"), share, &share)) != MT_OK))
        return status;
    if (!(theta > 1 && theta <= most_theta))
        return c->reject(c, theta_key, "must be above 1, at most %g, found %g", most_theta, theta);
    if (head_dim > 2 * MT_ROPE_MAX_FREQ / share && share > 0)
        return c->reject(c, "head_dim", "%lld is too large: expected at most %d rotary columns",
                         (long long)head_dim, 2 * MT_ROPE_MAX_FREQ);
    if (!(share > 0 && share <= 1))
        return c->reject(c, "partial_rotary_factor", "must be above 0 and at most 1, found %g",
                         share);
    a.rotary_dim = (int32_t)((double)head_dim * share);
    if (a.rotary_dim < 2 || a.rotary_dim % 2 || a.rotary_dim / 2 > MT_ROPE_MAX_FREQ)
        return c->reject(c, "head_dim", "%d rotary columns: expected an even number of at most %d",
                         a.rotary_dim, 2 * MT_ROPE_MAX_FREQ);
    for (int i = 0; i < a.rotary_dim / 2; i++)
        a.inv_freq[i] = 1.0f / powf((float)theta, (float)(2 * i) / (float)a.rotary_dim);
    status = scale(&s, type, theta, &a);
    if (status == MT_OK)
        *ret = a;
    return status;
}
