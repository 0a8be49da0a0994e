/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns of the run manifest against the parameters of a model.
 */
#include "groups.h"

#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"
#include "human.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>

enum { NAME_SIZE = 512, GROUP_SIZE = 32, KEY_SIZE = 64 };

/* The parameter's name by its unit: block.0.self_attn.q_proj.weight. */
static const char *name_by_unit(const model *m, const model_param *p, char ret[NAME_SIZE])
{
    snprintf(ret, NAME_SIZE, "%s.%s", m->units[p->unit].name, p->info->name);
    return ret;
}

static bool matches(const model *m, const model_param *p, const char *pattern)
{
    char name[NAME_SIZE];
    return fnmatch(pattern, p->name, 0) == 0 || fnmatch(pattern, name_by_unit(m, p, name), 0) == 0;
}

static size_t common_prefix(const char *a, const char *b)
{
    size_t n = 0;
    while (a[n] && a[n] == b[n])
        n++;
    return n;
}

/* Names the parameters that begin most like a pattern that matches none. */
static mt_status reject_pattern(const mt_config *c, const char *key, const model *m,
                                const char *pattern)
{
    enum { MOST_NAMES = 3 };
    char name[NAME_SIZE], list[MOST_NAMES * NAME_SIZE] = "";
    size_t best = 0;
    for (int pass = 0; pass < 2; pass++) { /* how like are they, then which are they */
        for (int32_t i = 0, listed = 0; i < m->n_params && listed < MOST_NAMES; i++) {
            const model_param *p = &m->params[i];
            size_t full = common_prefix(p->name, pattern);
            size_t unit = common_prefix(name_by_unit(m, p, name), pattern);
            size_t n = full >= unit ? full : unit;
            if (pass == 0) {
                best = n > best ? n : best;
            } else if (n == best) {
                text_append(list, sizeof list, "%s%s", listed++ ? ", " : "",
                            full >= unit ? p->name : name);
            }
        }
    }
    return c->reject(
        c, key,
        "is '%s', which no parameter matches; the most alike are %s (`megatrain inspect` "
        "lists all)",
        pattern, list);
}

/* ---- frozen ---------------------------------------------------------------------------------- */

static mt_status freeze_pattern(const mt_config *c, const char *key, model *m)
{
    const char *pattern = NULL;
    int64_t n = 0;
    mt_status st = c->get_string(c, key, &pattern);
    if (st != MT_OK)
        return st;
    for (int32_t i = 0; i < m->n_params; i++)
        if (matches(m, &m->params[i], pattern)) {
            m->params[i].flags |= MT_PARAM_FROZEN;
            m->params[i].pinned = true;
            n++;
        }
    return n > 0 ? MT_OK : reject_pattern(c, key, m, pattern);
}

static mt_status freeze(const mt_config *c, model *m)
{
    char key[KEY_SIZE];
    mt_status st = MT_OK;
    int64_t n = c->length(c, "freeze"), left = 0, frozen = 0;
    if (!c->has(c, "freeze") || config_is_empty_list(c, "freeze"))
        return MT_OK;
    if (n == 0)
        st = freeze_pattern(c, "freeze", m);
    for (int64_t i = 0; i < n && st == MT_OK; i++) {
        snprintf(key, sizeof key, "freeze.%lld", (long long)i);
        st = freeze_pattern(c, key, m);
    }
    if (st != MT_OK)
        return st;
    for (int32_t i = 0; i < m->n_params; i++)
        *(m->params[i].flags & MT_PARAM_FROZEN ? &frozen : &left) += m->params[i].elems;
    if (left == 0)
        return c->reject(c, "freeze", "leaves no parameter to train; match fewer");
    log_write(MT_LOG_INFO, "frozen: %s of %s parameters", human_grouped(frozen).s,
              human_grouped(frozen + left).s);
    return MT_OK;
}

/* ---- groups ---------------------------------------------------------------------------------- */

static mt_status read_rate(const mt_config *c, const char at[GROUP_SIZE], double base, double *ret)
{
    char scale[KEY_SIZE], rate[KEY_SIZE];
    double x = 1;
    snprintf(scale, sizeof scale, "%s.learning_rate_scale", at);
    snprintf(rate, sizeof rate, "%s.learning_rate", at);
    bool absolute = c->has(c, rate);
    if (absolute && c->has(c, scale))
        return c->reject(c, rate, "and 'learning_rate_scale' exclude each other; give one of them");
    if (absolute && base == 0)
        return c->reject(c, rate, "cannot follow the schedule of train.learning_rate, which is 0");
    mt_status st = mt_config_float(c, absolute ? rate : scale, 1, &x);
    if (st != MT_OK)
        return st;
    if (!(x >= 0 && x <= 1e6))
        return c->reject(c, absolute ? rate : scale, "is %g; expected a number from 0 to 1e6", x);
    *ret = absolute ? x / base : x;
    return MT_OK;
}

static mt_status read_decay(const mt_config *c, const char at[GROUP_SIZE], const mt_optim *optim,
                            engine_rule *rule)
{
    char key[KEY_SIZE];
    snprintf(key, sizeof key, "%s.weight_decay", at);
    if (!c->has(c, key))
        return MT_OK;
    if (optim->struct_size <= offsetof(mt_optim, flags) || !(optim->flags & MT_OPTIM_GROUP_DECAY))
        return c->reject(c, key, "is not offered by this optimizer; remove the key");
    mt_status st = c->get_float(c, key, &rule->weight_decay);
    if (st == MT_OK && !(rule->weight_decay >= 0 && rule->weight_decay <= 1))
        st = c->reject(c, key, "is %g; expected a number from 0 to 1", rule->weight_decay);
    rule->has_decay = true;
    return st;
}

static mt_status apply_group(const mt_config *c, const char at[GROUP_SIZE], const run_manifest *run,
                             const mt_optim *optim, const model *m, engine_rule *rules)
{
    engine_rule rule = { .lr_scale = 1 };
    const char *pattern = NULL;
    char key[KEY_SIZE];
    int64_t n = 0;
    snprintf(key, sizeof key, "%s.pattern", at);
    mt_status st = c->get_string(c, key, &pattern);
    if (st == MT_OK)
        st = read_rate(c, at, run->learning_rate, &rule.lr_scale);
    if (st == MT_OK)
        st = read_decay(c, at, optim, &rule);
    for (int32_t i = 0; i < m->n_params && st == MT_OK; i++)
        if (matches(m, &m->params[i], pattern)) {
            rules[i] = rule;
            n++;
        }
    return st != MT_OK || n > 0 ? st : reject_pattern(c, key, m, pattern);
}

mt_status groups_apply(const run_manifest *run, const mt_optim *optim, model *m,
                       engine_rule **ret_rules)
{
    const mt_config *c = config_section(run->config, "optimizer");
    char at[GROUP_SIZE];
    mt_status st = freeze(config_section(run->config, "train"), m);
    int64_t n = c->length(c, "groups");
    engine_rule *rules = NULL;
    if (st == MT_OK && n == 0) {
        if (c->has(c, "groups"))
            return c->reject(c, "groups", "must be a list of maps, each with a 'pattern'");
        *ret_rules = NULL;
        return MT_OK;
    }
    if (st == MT_OK && !(rules = calloc((size_t)m->n_params, sizeof *rules)))
        st = status_nomem("the groups of parameters", (size_t)m->n_params * sizeof *rules);
    for (int32_t i = 0; i < m->n_params && st == MT_OK; i++)
        rules[i].lr_scale = 1;
    for (int64_t i = 0; i < n && st == MT_OK; i++) { /* of several that match, the last counts */
        snprintf(at, sizeof at, "groups.%lld", (long long)i);
        st = apply_group(c, at, run, optim, m, rules);
    }
    if (st == MT_OK)
        *ret_rules = rules;
    else
        free(rules);
    return st;
}
