/* SPDX-License-Identifier: Apache-2.0
 *
 * The keys of the `data` section (docs/manifests.md lists them).
 */
#include "documents.h"

const char *const doc_format_names[FORMATS + 1] = {
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", NULL
};

static const char *const train_on_names[] = { "assistant", "last", "all", NULL };
static const char *const long_names[] = { "auto", "split", "truncate", "drop", NULL };
static const char *const error_names[] = { "stop", "skip", NULL };
static const char *const dtype_names[] = { "uint16", "uint32", NULL };

/* The index in `names` of the word at `key`. */
static mt_status read_choice(const mt_config *c, const char *key, const char *const *names,
                             int32_t fallback, int32_t *ret)
{
    const char *text;
    mt_status status = mt_config_string(c, key, names[fallback], &text);
    if (status)
        return status;
    char all[128] = "";
    for (int32_t i = 0; names[i]; i++) {
        if (strcmp(names[i], text) == 0) {
            *ret = i;
            return MT_OK;
        }
        size_t n = strlen(all);
        snprintf(all + n, sizeof all - n, "%s%s", i ? ", " : "", names[i]);
    }
    return c->reject(c, key, "is '%s'; expected one of %s", text, all);
}

const char *const doc_column_names[COLUMNS] = {
    [COLUMN_TEXT] = "text",
    [COLUMN_PROMPT] = "prompt",
    [COLUMN_COMPLETION] = "completion",
    [COLUMN_INSTRUCTION] = "instruction",
    [COLUMN_INPUT] = "input",
    [COLUMN_OUTPUT] = "output",
    [COLUMN_HISTORY] = "history",
    [COLUMN_SYSTEM] = "system",
    [COLUMN_MESSAGES] = "messages",
    [COLUMN_CONVERSATIONS] = "conversations",
    [COLUMN_ROLE] = "role",
    [COLUMN_CONTENT] = "content",
    [COLUMN_REASONING] = "reasoning_content",
    [COLUMN_INPUT_IDS] = "input_ids",
    [COLUMN_LABELS] = "labels",
    [COLUMN_ATTENTION_MASK] = "attention_mask",
    [COLUMN_USER] = "user",
    [COLUMN_ASSISTANT] = "assistant",
};

/* Format and columns below `prefix` ("" or "datasets.0."); what is absent stays as it is. */
static mt_status read_shape(const mt_config *c, const char *prefix, doc_dataset *d)
{
    char key[96];
    int32_t format = FORMAT_AUTO;
    snprintf(key, sizeof key, "%sformat", prefix);
    mt_status status = read_choice(c, key, doc_format_names, (int32_t)d->format, &format);
    d->format = (doc_format)format;
    snprintf(key, sizeof key, "%scolumns", prefix);
    (void)c->has(c, key); /* the map itself is known, whatever is in it */
    for (int32_t i = 0; i < COLUMNS && !status; i++) {
        snprintf(key, sizeof key, "%scolumns.%s", prefix, doc_column_names[i]);
        status = mt_config_string(c, key, d->columns[i], &d->columns[i]);
    }
    return status;
}

static mt_status read_datasets(const mt_config *c, const doc_dataset *usual, doc_options *o)
{
    int64_t n = c->length(c, "datasets");
    if (n == 0 && c->has(c, "datasets"))
        return c->reject(c, "datasets", "must be a list of maps, each with `files`");
    if (n > 0 && c->has(c, "files"))
        return c->reject(c, "files", "cannot be given together with datasets; name them there");
    o->train = calloc((size_t)(n ? n : 1), sizeof *o->train);
    if (!o->train)
        return mt_fail_nomem();
    mt_status status = MT_OK;
    for (int64_t i = 0; i < (n ? n : 1) && !status; i++) {
        doc_dataset *d = &o->train[i];
        char prefix[48] = "", key[96];
        *d = *usual;
        o->n_train++;
        if (n > 0)
            snprintf(prefix, sizeof prefix, "datasets.%lld.", (long long)i);
        snprintf(d->key_text, sizeof d->key_text, "%sfiles", prefix);
        d->key = d->key_text;
        d->weight = 1;
        if (n > 0) {
            snprintf(key, sizeof key, "%sweight", prefix);
            if ((status = mt_config_float(c, key, 1, &d->weight)))
                break;
            if (!(d->weight > 0 && d->weight <= 1000))
                return c->reject(c, key, "is %g; expected a number above 0, at most 1000",
                                 d->weight);
            if ((status = read_shape(c, prefix, d)))
                break;
        }
        status = mt_files_choose(c, d->key, &d->files);
    }
    return status;
}

static mt_status read_validation(const mt_config *c, const doc_dataset *usual, doc_options *o)
{
    mt_status status = mt_config_float(c, "validation_split", 0.05, &o->validation_split);
    if (status)
        return status;
    if (!(o->validation_split >= 0 && o->validation_split <= 0.5))
        return c->reject(c, "validation_split",
                         "is %g; expected a fraction from 0 (no validation) to 0.5",
                         o->validation_split);
    if (!c->has(c, "validation_files"))
        return MT_OK;
    if (c->has(c, "validation_split"))
        return c->reject(c, "validation_split",
                         "cannot be given together with validation_files; remove one of the two");
    o->validation_split = 0;
    o->validation = *usual;
    o->validation.key = "validation_files";
    o->validation.weight = 1;
    return mt_files_choose(c, o->validation.key, &o->validation.files);
}

static mt_status read_end_token(const mt_config *c, doc_options *o)
{
    o->end_token = END_TOKEN_AUTO;
    if (mt_config_is_null(c, "end_token"))
        o->end_token = END_TOKEN_NONE;
    if (!c->has(c, "end_token"))
        return MT_OK;
    mt_status status = c->get_int(c, "end_token", &o->end_token);
    if (status)
        return status;
    if (o->end_token < 0 || o->end_token > INT32_MAX)
        return c->reject(c, "end_token", "is %lld; expected the id of a token",
                         (long long)o->end_token);
    return MT_OK;
}

static mt_status read_words(const mt_config *c, doc_options *o)
{
    int32_t choice = 0;
    mt_status status = read_choice(c, "train_on", train_on_names, TRAIN_ASSISTANT, &choice);
    o->train_on = (doc_train_on)choice;
    if (!status)
        status = read_choice(c, "long_documents", long_names, LONG_AUTO, &choice);
    o->long_documents = (doc_long)choice;
    if (!status)
        status = read_choice(c, "on_error", error_names, 0, &choice);
    o->skip_errors = choice == 1;
    if (!status)
        status = read_choice(c, "dtype", dtype_names, 0, &choice);
    o->dtype = choice == 1 ? MT_U32 : MT_U16;
    o->dtype_name = c->has(c, "dtype") ? dtype_names[choice] : NULL;
    if (!status)
        status = mt_config_string(c, "cache", "auto", &o->cache);
    if (!status)
        status = mt_config_string(c, "document_separator", "none", &o->separator);
    if (!status && !*o->separator)
        status = c->reject(c, "document_separator",
                           "is empty; expected none, blank_line or the text between documents");
    return status;
}

mt_status doc_options_read(const mt_data_request *request, doc_options *ret)
{
    const mt_config *c = request->config;
    doc_options *o = ret;
    doc_dataset usual = { 0 };
    mt_status status = read_words(c, o);
    if (!status)
        status = mt_config_bool(c, "shuffle", true, &o->shuffle);
    if (!status)
        status = mt_config_int(c, "workers", 0, &o->workers);
    if (!status && (o->workers < 0 || o->workers > 1024))
        status = c->reject(c, "workers", "is %lld; expected 0 (all processors) to 1024",
                           (long long)o->workers);
    if (!status)
        status = read_end_token(c, o);
    if (!status)
        status = read_shape(c, "", &usual);
    if (!status)
        status = read_validation(c, &usual, o);
    if (!status)
        status = read_datasets(c, &usual, o);
    /* Only a run that trains may not measure what it was trained on by mistake. */
    for (int64_t i = 0; request->split == MT_SPLIT_TRAIN && i < o->n_train && !status; i++)
        status = mt_files_check_apart(c, &o->train[i].files, o->train[i].key, &o->validation.files,
                                      o->validation.key);
    return status;
}

void doc_options_finish(doc_options *o)
{
    for (int64_t i = 0; i < o->n_train; i++)
        mt_files_finish(&o->train[i].files);
    free(o->train);
    mt_files_finish(&o->validation.files);
    *o = (doc_options){ 0 };
}
