/* SPDX-License-Identifier: Apache-2.0
 *
 * From a node to a field of the run manifest, by the type of its key.
 */
#include "run_value.h"

#include "../base/text.h"

#include <math.h>
#include <stdio.h>

enum { TEXT_SIZE = 512 };

static void store_integer(run_manifest *r, const run_key *k, int64_t value)
{
    char *field = (char *)r + k->offset;
    int32_t narrow = (int32_t)value;
    if (k->size == sizeof narrow)
        memcpy(field, &narrow, sizeof narrow);
    else if (k->size == sizeof value)
        memcpy(field, &value, sizeof value);
}

/* "at least 1" or "from 0 to 1"; of a bound that is far away, only where it is passed. */
static const char *range_text(const run_key *k, double value, char *ret, size_t size)
{
    const char *or_auto = k->can_be_off  ? "\"auto\", \"off\" or "
                          : k->automatic ? "\"auto\" or "
                                         : "";
    const char *what = k->type == RUN_KEY_BYTES ? "a size" : "a number";
    if (k->max >= 1e9 && value > k->max && isfinite(value))
        snprintf(ret, size, "%s%s of at most %.16g", or_auto, what, k->max);
    else if (k->max >= 1e9)
        snprintf(ret, size, "%s%s of at least %g", or_auto, what, k->min);
    else
        snprintf(ret, size, "%s%s from %g to %g", or_auto, what, k->min, k->max);
    return ret;
}

static mt_status choice_error(const mt_config *c, const run_key *k, const node *n)
{
    char list[TEXT_SIZE] = "";
    for (int32_t i = 0; k->choices[i]; i++)
        text_append(list, sizeof list, "%s%s", i ? ", " : "one of ", k->choices[i]);
    return config_wrong(c, k->name, n, list);
}

static void store(run_manifest *r, const run_key *k, const void *value, size_t size)
{
    memcpy((char *)r + k->offset, value, size);
}

static bool is_word(const node *n, const char *word)
{
    return n->kind == NODE_STRING && strcmp(n->text, word) == 0;
}

/* True or false, where they stand for two of the key's choices? */
static bool is_answer(const run_key *k, const node *n)
{
    return n->kind == NODE_BOOL && k->yes;
}

static int32_t answer(const run_key *k, const node *n)
{
    return (n->boolean ? k->yes : k->no) - 1;
}

static mt_status read_string(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    if (is_answer(k, n)) {
        const char *word = k->choices[answer(k, n)];
        store(r, k, &word, sizeof word);
        return MT_OK;
    }
    if (n->kind != NODE_STRING)
        return config_wrong(c, k->name, n,
                            "a string (in quotes when it looks like something else)");
    if (!*n->text)
        return config_wrong(c, k->name, n, "a string that is not empty");
    if (k->size)
        store(r, k, &n->text, sizeof n->text);
    return MT_OK;
}

/* A string, or a map, whose own keys say what it is. */
static mt_status read_name(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    if (n->kind != NODE_MAP)
        return read_string(r, c, k, n);
    memset((char *)r + k->offset, 0, (size_t)k->size);
    return MT_OK;
}

static mt_status read_choice(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    int32_t i = 0;
    if (is_answer(k, n))
        i = answer(k, n);
    else
        while (k->choices[i] && !is_word(n, k->choices[i]))
            i++;
    if (!k->choices[i])
        return choice_error(c, k, n);
    store_integer(r, k, i);
    return MT_OK;
}

static mt_status read_bool(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    if (n->kind != NODE_BOOL)
        return config_wrong(c, k->name, n, "true or false");
    store(r, k, &n->boolean, sizeof n->boolean);
    return MT_OK;
}

static mt_status read_integer(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    char text[TEXT_SIZE];
    int64_t whole;
    mt_status s;
    if (k->type == RUN_KEY_BYTES && (s = config_bytes(c, k->name, &whole)) != MT_OK)
        return s;
    if (k->type == RUN_KEY_INT && !node_integer(n, &whole))
        return config_wrong(c, k->name, n,
                            k->automatic ? "\"auto\" or a whole number" : "a whole number");
    if ((double)whole < k->min || (double)whole > k->max)
        return config_wrong(c, k->name, n, range_text(k, (double)whole, text, sizeof text));
    store_integer(r, k, whole);
    return MT_OK;
}

static mt_status read_float(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    char text[TEXT_SIZE];
    if (n->kind != NODE_INT && n->kind != NODE_FLOAT)
        return config_wrong(c, k->name, n, "a number");
    if (!(n->number >= k->min && n->number <= k->max)) /* NaN fails too */
        return config_wrong(c, k->name, n, range_text(k, n->number, text, sizeof text));
    store(r, k, &n->number, sizeof n->number);
    return MT_OK;
}

mt_status run_read_value(run_manifest *r, const mt_config *c, const run_key *k, const node *n)
{
    if ((k->automatic && is_word(n, "auto")) || (k->can_be_off && is_word(n, "off"))) {
        store_integer(r, k, is_word(n, "auto") ? -1 : 0);
        return MT_OK;
    }
    switch (k->type) {
    case RUN_KEY_LIST:
        if (n->kind != NODE_LIST && n->kind != NODE_STRING)
            return config_wrong(c, k->name, n, "a list");
        return MT_OK;
    case RUN_KEY_NAME:
        return read_name(r, c, k, n);
    case RUN_KEY_STRING:
        return read_string(r, c, k, n);
    case RUN_KEY_CHOICE:
        return read_choice(r, c, k, n);
    case RUN_KEY_BOOL:
        return read_bool(r, c, k, n);
    case RUN_KEY_BYTES:
    case RUN_KEY_INT:
        return read_integer(r, c, k, n);
    case RUN_KEY_FLOAT:
        return read_float(r, c, k, n);
    }
    return MT_OK;
}
