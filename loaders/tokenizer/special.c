/* SPDX-License-Identifier: Apache-2.0
 *
 * Which tokens begin and end a document: the files beside a tokenizer.json say so. The first file
 * that names a token for a role decides. tokenizer_config.json may say, too, whether texts get
 * them: that replaces the template, as in transformers 5.
 */
#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ROLES = 4 };

typedef struct role {
    const char *text_key, *id_key;
} role;

static const role roles[ROLES] = {
    [MT_SPECIAL_BEGIN] = { "bos_token", "bos_token_id" },
    [MT_SPECIAL_END] = { "eos_token", "eos_token_id" },
    [MT_SPECIAL_PAD] = { "pad_token", "pad_token_id" },
    [MT_SPECIAL_UNKNOWN] = { "unk_token", "unk_token_id" },
};

/* A text, or an object that describes the token. */
static const char *text_of(const json_t *v)
{
    return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

/* An id, or a list whose first one is meant. */
static int64_t id_of(const json_t *v)
{
    v = json_is_array(v) ? json_array_get(v, 0) : v;
    return json_is_integer(v) ? json_integer_value(v) : -1;
}

static bool is_token(const tokenizer *t, int64_t id)
{
    return id >= 0 && id < t->vocab.size && t->vocab.text[id].p;
}

static mt_status take_role(const tok_file *f, const json_t *root, int which)
{
    tokenizer *t = f->t;
    const char *text = text_of(json_object_get(root, roles[which].text_key));
    const json_t *number = json_object_get(root, roles[which].id_key);
    int64_t id = id_of(number);
    if (json_is_real(number))
        return tok_unexpected(f, tok_place_member((tok_place){ "" }, roles[which].id_key), number,
                              "the id of a token");
    if (text) {
        id = tok_table_find(&t->vocab.by_text, tok_literal(text));
        if (id < 0 && text[0])
            mt_log(MT_LOG_WARNING, "%s: %s: '%s' is no token of the vocabulary; it is left out",
                   f->path, roles[which].text_key, text);
    }
    if (is_token(t, id))
        t->special[which] = (int32_t)id;
    return MT_OK;
}

/* add_bos_token and add_eos_token, where either is there. */
typedef struct additions {
    bool given, begin, end;
} additions;

static mt_status read_additions(const tok_file *f, const json_t *root, additions *ret)
{
    const tok_place top = { "" };
    additions a = { .given = tok_has(root, "add_bos_token") || tok_has(root, "add_eos_token") };
    mt_status status = tok_get_bool(f, top, root, "add_bos_token", &a.begin);
    if (!status)
        status = tok_get_bool(f, top, root, "add_eos_token", &a.end);
    if (!status && a.given)
        *ret = a;
    return status;
}

/* The list becomes the one token, or nothing. */
static mt_status set_list(int32_t **list, int64_t *n, bool wanted, int32_t id)
{
    *n = 0;
    if (!wanted || id < 0)
        return MT_OK;
    int32_t *grown = realloc(*list, sizeof *grown);
    if (!grown)
        return mt_fail_nomem();
    *grown = id;
    *list = grown;
    *n = 1;
    return MT_OK;
}

static mt_status replace_template(tokenizer *t, const additions *a)
{
    mt_status status = set_list(&t->before, &t->n_before, a->begin, t->special[MT_SPECIAL_BEGIN]);
    return status ? status : set_list(&t->after, &t->n_after, a->end, t->special[MT_SPECIAL_END]);
}

mt_status tok_load_special(tokenizer *t, const char *folder)
{
    static const char *const files[] = { "tokenizer_config.json", "special_tokens_map.json",
                                         "generation_config.json", "config.json" };
    additions added = { false };
    for (int which = 0; which < ROLES; which++)
        t->special[which] = -1;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[4200];
        json_t *root = NULL;
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        if (access(path, F_OK) < 0)
            continue;
        mt_status status = tok_read_json(path, &root, NULL);
        if (status)
            return status;
        for (int which = 0; which < ROLES && !status; which++)
            if (t->special[which] < 0)
                status = take_role(&(tok_file){ path, t }, root, which);
        if (!status && i == 0)
            status = read_additions(&(tok_file){ path, t }, root, &added);
        json_decref(root);
        if (status)
            return status;
    }
    if (t->special[MT_SPECIAL_UNKNOWN] < 0)
        t->special[MT_SPECIAL_UNKNOWN] = t->bpe.unk;
    return added.given ? replace_template(t, &added) : MT_OK;
}
