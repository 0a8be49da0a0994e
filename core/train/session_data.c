/* SPDX-License-Identifier: Apache-2.0
 *
 * What a session reads text with: tokenizer, chat format, and the streams of its data.
 */
#include "session.h"

#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"
#include "../manifest/mistaken.h"
#include "files.h"

#include <megatrain/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Vocabulary of the byte tokenizer, which a model of this size has when it brings no other. */
enum { BYTE_VOCAB = 256 };

/* ---- tokenizer ------------------------------------------------------------------------------- */

static const mt_tokenizer *probe_tokenizers(const char *path)
{
    for (int32_t i = 0; i < registry_count(); i++) {
        const plugin_record *r = registry_get(i);
        const void *table = NULL;
        if (r->kind == PLUGIN_LOADER &&
            registry_find(PLUGIN_LOADER, r->provides[0], MT_TOKENIZER_INTERFACE, &table, NULL) ==
                MT_OK &&
            ((const mt_tokenizer *)table)->probe(path))
            return table;
    }
    return NULL;
}

mt_status session_find_tokenizer(const char *path, const mt_tokenizer **ret)
{
    const void *table = probe_tokenizers(path);
    mt_status st = MT_OK;
    char hub[MISTAKEN_TEXT];
    if (!table && access(path, F_OK) != 0 && *mistaken_name(path, hub))
        return status_set(MT_ERR_NOT_FOUND,
                          "%s: there is no such file or folder; expected a tokenizer.json or a "
                          "folder with one%s",
                          path, hub);
    if (!table)
        st = registry_find(PLUGIN_LOADER, SESSION_TOKENIZER, MT_TOKENIZER_INTERFACE, &table, NULL);
    if (st == MT_OK)
        *ret = table;
    return st;
}

static mt_status read_tokenizer(session *s, const mt_tokenizer *tokenizer, const char *path)
{
    size_t n = strlen(path);
    if (n >= sizeof s->tokenizer_path)
        return status_set(MT_ERR_INVALID, "the path of the tokenizer is too long: %.60s...", path);
    mt_status st = tokenizer->open(path, &s->tokens);
    if (st != MT_OK)
        return st;
    s->tokenizer = tokenizer;
    memcpy(s->tokenizer_path, path, n + 1);
    return MT_OK;
}

static mt_status open_bytes(session *s)
{
    const void *table = NULL;
    mt_status st =
        registry_find(PLUGIN_LOADER, MT_BYTE_TOKENIZER, MT_TOKENIZER_INTERFACE, &table, NULL);
    if (st == MT_OK)
        st = ((const mt_tokenizer *)table)->open(NULL, &s->tokens);
    if (st == MT_OK)
        s->tokenizer = table;
    return st;
}

static mt_status open_named(session *s, const char *path)
{
    const mt_tokenizer *tokenizer = NULL;
    mt_status st = session_find_tokenizer(path, &tokenizer);
    return st == MT_OK ? read_tokenizer(s, tokenizer, path) : st;
}

static mt_status open_tokenizer(session *s, const char *path)
{
    const char *folder = s->source.weights;
    if (strcmp(path, "auto") != 0)
        return open_named(s, path);
    if (folder && probe_tokenizers(folder))
        return open_named(s, folder);
    /* One that is there but cannot be read is missed only where there is text. */
    if (folder && open_named(s, folder) == MT_ERR_UNSUPPORTED)
        log_write(MT_LOG_WARNING, "the model's tokenizer is not read: %s", status_text());
    return s->model->vocab == BYTE_VOCAB ? open_bytes(s) : MT_OK;
}

/* ---- chat format ----------------------------------------------------------------------------- */

/* The template of `root`, the tree of tokenizer_config.json or chat_template.json: a string, or a
 * list of named ones of which "default" counts. NULL: it has none. */
static const char *template_of(const json_t *root)
{
    const json_t *t = json_object_get(root, "chat_template"), *item;
    size_t i;
    json_array_foreach(t, i, item)
    {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(item, "template"));
    }
    return json_string_value(t);
}

/* "alpaca, chatml, ...". */
static const char *list_formats(const mt_chat *chat, char *ret, size_t size)
{
    *ret = '\0';
    for (int32_t i = 0; chat->formats[i]; i++)
        text_append(ret, size, "%s%s", i ? ", " : "", chat->formats[i]);
    return ret;
}

/* The format that a template is, or at least looks like. */
static const char *identify_template(const mt_chat *chat, const char *file, const char *template)
{
    char names[1024];
    int64_t n = (int64_t)strlen(template);
    const char *format = chat->identify(template, n);
    if (format)
        return format;
    format = chat->resembles(template, n);
    if (format)
        log_write(MT_LOG_WARNING,
                  "%s: not a template that is known word for word; taken for '%s', of which it has "
                  "the markers (data.chat_format: %s accepts that)",
                  file, format, format);
    else
        log_write(MT_LOG_INFO,
                  "%s: not the template of a known format; name the one to use with "
                  "data.chat_format: %s",
                  file, list_formats(chat, names, sizeof names));
    return format;
}

/* The format that the template in `file` is taken for. False: there is no template in it. */
static bool identify_file(const mt_chat *chat, const char *file, bool jinja, const char **ret)
{
    char *text = NULL;
    size_t n = 0;
    json_t *root = NULL;
    json_error_t error;
    const char *template = NULL;
    if (jinja && config_read_file(file, &text, &n) == MT_OK)
        template = text;
    else if (!jinja && (root = mt_json_load_file(file, JSON_ALLOW_NUL, &error)))
        template = template_of(root);
    if (template)
        *ret = identify_template(chat, file, template);
    bool found = template != NULL;
    json_decref(root);
    free(text);
    return found;
}

/* The format of the chat template beside the tokenizer, NULL when there is none or no known one.
 * Where several stand, the file of its own counts, as in other programs. */
static const char *identify(const session *s, const mt_chat *chat)
{
    static const char *const names[] = { "chat_template.jinja", "chat_template.json",
                                         "tokenizer_config.json" };
    const char *format = NULL;
    bool found = false;
    for (size_t i = 0; i < sizeof names / sizeof *names && !found; i++) {
        char file[SESSION_PATH + 32];
        size_t n = strlen(s->tokenizer_path);
        if (!files_is_folder(s->tokenizer_path)) /* the file's own folder */
            while (n > 0 && s->tokenizer_path[n - 1] != '/')
                n--;
        snprintf(file, sizeof file, "%.*s%s%s", (int)n, s->tokenizer_path,
                 n > 0 && s->tokenizer_path[n - 1] != '/' ? "/" : "", names[i]);
        found = files_is_file(file) && identify_file(chat, file, i == 0, &format);
    }
    return format;
}

/* The format that a model says it has, by name or spelled out in its hyper-parameters, or by the
 * template beside its tokenizer; both NULL: it says nothing. */
static mt_status find_format(const session *s, const mt_chat *chat, const char **ret_name,
                             const mt_config **ret_custom)
{
    const mt_config *hyper = s->source.hyper;
    *ret_name = NULL;
    *ret_custom = hyper ? config_map(hyper, "chat_format") : NULL;
    if (*ret_custom)
        return MT_OK;
    if (hyper && hyper->has(hyper, "chat_format"))
        return hyper->get_string(hyper, "chat_format", ret_name);
    if (s->tokenizer_path[0])
        *ret_name = identify(s, chat);
    return MT_OK;
}

/* A format that the model spells out; one that a run spells out is checked with the run's keys. */
static mt_status open_spelled_out(session *s, const mt_chat *chat, const mt_config *format)
{
    mt_status st = chat->open_custom(format, s->tokenizer, s->tokens, &s->conversation);
    if (st != MT_OK || (st = config_check_section(format)) == MT_OK)
        return st;
    chat->close(s->conversation);
    s->conversation = NULL;
    return st;
}

/* A slip of the pen is answered with the name that was meant; any other name, by the plugin. */
static mt_status check_format_name(const mt_chat *chat, const char *format)
{
    int64_t n = 0;
    while (chat->formats[n] && strcmp(chat->formats[n], format) != 0)
        n++;
    int64_t nearest = chat->formats[n] ? -1 : text_nearest(format, chat->formats, n);
    return nearest < 0
               ? MT_OK
               : status_set(MT_ERR_NOT_FOUND, "unknown chat format '%s'; did you mean '%s'?",
                            format, chat->formats[nearest]);
}

static mt_status open_chat(session *s, const char *format, const mt_config *custom)
{
    const void *table = NULL;
    bool automatic = format && strcmp(format, "auto") == 0;
    if ((format && strcmp(format, "none") == 0) || (automatic && !s->tokenizer))
        return MT_OK;
    if (!s->tokenizer)
        return status_set(MT_ERR_INVALID, "a chat format needs a tokenizer, and the model brings "
                                          "none; name one with data.tokenizer");
    mt_status st = registry_find(PLUGIN_LOADER, MT_CHAT_PLUGIN, MT_CHAT_INTERFACE, &table, NULL);
    if (st != MT_OK)
        return automatic ? MT_OK : st;
    const mt_chat *chat = table;
    if (automatic)
        st = find_format(s, chat, &format, &custom);
    if (st != MT_OK || (automatic && !format && !custom))
        return st;
    if (format && !automatic)
        st = check_format_name(chat, format);
    if (st != MT_OK)
        return st;
    if (format)
        st = chat->open(format, s->tokenizer, s->tokens, &s->conversation);
    else if (automatic)
        st = open_spelled_out(s, chat, custom);
    else
        st = chat->open_custom(custom, s->tokenizer, s->tokens, &s->conversation);
    /* Nobody asked for it, and there may be no conversations. */
    if (st != MT_OK && automatic && format) {
        log_write(MT_LOG_WARNING, "the model's chat format is not used: %s", status_text());
        return MT_OK;
    }
    if (st != MT_OK)
        return st;
    s->chat = chat;
    snprintf(s->chat_format, sizeof s->chat_format, "%s", format ? format : "custom");
    return MT_OK;
}

mt_status session_open_tokenizer(session *s, const char *tokenizer, const char *chat_format,
                                 const mt_config *custom)
{
    mt_status st = open_tokenizer(s, tokenizer);
    return st == MT_OK ? open_chat(s, chat_format, custom) : st;
}

void session_close_tokenizer(session *s)
{
    if (s->chat)
        s->chat->close(s->conversation);
    if (s->tokenizer)
        s->tokenizer->close(s->tokens);
    s->chat = NULL;
    s->tokenizer = NULL;
}

/* ---- data ------------------------------------------------------------------------------------ */

static bool ends_in(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* What `loader: auto` is: by the name of the first file, and, for text, by what the model reads. */
static const char *choose_loader(const session *s, const run_manifest *run)
{
    const mt_config *c = config_section(run->config, "data");
    const char *first = "", *name = run->loader;
    if (strcmp(name, "auto") != 0)
        return name;
    if (c->length(c, "files") > 0)
        (void)c->get_string(c, "files.0", &first);
    else if (c->has(c, "files"))
        (void)c->get_string(c, "files", &first);
    bool bytes = s->tokenizer ? !s->tokenizer_path[0] : s->model->vocab == BYTE_VOCAB;
    if (ends_in(first, ".bin"))
        return MT_TOKENS_LOADER;
    if (ends_in(first, ".jsonl") || ends_in(first, ".json") || c->has(c, "datasets"))
        return MT_RECORDS_LOADER;
    return bytes ? MT_BYTES_LOADER : MT_RECORDS_LOADER;
}

mt_status session_find_records(const mt_data **ret)
{
    const void *table = NULL;
    mt_status st = registry_find(PLUGIN_LOADER, MT_RECORDS_LOADER, MT_DATA_INTERFACE, &table, NULL);
    if (st == MT_OK)
        *ret = table;
    return st;
}

/* For data that has a chat format of its own where the model has none. */
static const mt_chat *any_chat(const session *s)
{
    const void *table = NULL;
    if (s->chat || !s->tokenizer)
        return s->chat;
    (void)registry_find(PLUGIN_LOADER, MT_CHAT_PLUGIN, MT_CHAT_INTERFACE, &table, NULL);
    return table;
}

mt_data_request session_data_request(const session *s, const mt_config *keys)
{
    return (mt_data_request){ .struct_size = sizeof(mt_data_request),
                              .config = keys,
                              .rank = 0,
                              .world = 1,
                              .tokenizer = s->tokenizer,
                              .tokens = s->tokens,
                              .chat = any_chat(s),
                              .conversation = s->conversation,
                              .cache_folder = s->cache_folder[0] ? s->cache_folder : NULL };
}

static mt_status open_stream(const session *s, const run_manifest *run, mt_split split, void **ret)
{
    mt_data_request request = session_data_request(s, config_section(run->config, "data"));
    request.split = split;
    request.max_seq_len = run->max_seq_len;
    request.seed = (uint64_t)run->seed;
    return s->data->open(&request, ret);
}

/* Takes the stream over, also when it fails. */
static mt_status open_source(const session *s, const run_manifest *run, void *stream,
                             data_source **ret)
{
    const data_options options = { .micro_tokens = run->micro_batch_size * run->max_seq_len,
                                   .micro_batches = run->gradient_accumulation_steps,
                                   .packing = (packing_mode)run->packing,
                                   .prefetch = true };
    return data_open(s->data, stream, &options, ret);
}

static mt_status check_stream(const session *s, const run_manifest *run, const void *stream)
{
    int64_t vocab = s->data->vocab_size(stream);
    if (vocab > s->model->vocab) {
        const mt_config *c = config_section(run->config, "");
        return c->reject(
            c, "model",
            "the model has a vocabulary of %lld tokens, but the data needs %lld; use a "
            "model with vocab_size: %lld or another loader",
            (long long)s->model->vocab, (long long)vocab, (long long)vocab);
    }
    return MT_OK;
}

/* How many micro-batches an epoch is, which decides how many steps a run of epochs has. Reads the
 * data once where only that can tell. */
static mt_status count_batches(session *s, const run_manifest *run, void *stream)
{
    int64_t micro_tokens = run->micro_batch_size * run->max_seq_len, n = 0;
    s->epoch_batches = run->packing == RUN_PACKING_NONE
                           ? (double)s->epoch_documents
                           : (double)s->epoch_tokens / (double)micro_tokens;
    if (run->packing != RUN_PACKING_BEST_FIT || run->max_steps > 0)
        return MT_OK;
    mt_status st = packing_count_epoch(s->data, stream, micro_tokens, &n);
    if (st != MT_OK)
        return st;
    s->epoch_batches = (double)n;
    return s->data->seek(stream, 0, 0);
}

mt_status session_open_data(session *s, const run_manifest *run, bool training)
{
    const void *table = NULL;
    s->loader = choose_loader(s, run);
    mt_status st = registry_find(PLUGIN_LOADER, s->loader, MT_DATA_INTERFACE, &table, NULL);
    if (st != MT_OK)
        return config_blame(config_section(run->config, "data"), "loader");
    s->data = table;
    if (files_cache_path("data", s->cache_folder, sizeof s->cache_folder) != MT_OK)
        s->cache_folder[0] = '\0';

    /* Opened even when no evaluation is due, so that its keys are read and its files are found
     * missing now rather than after a night of training. */
    void *stream = NULL;
    st = open_stream(s, run, MT_SPLIT_VALIDATION, &stream);
    if (st != MT_OK)
        return st;
    int64_t tokens = 0;
    s->data->size(stream, &s->validation_documents, &tokens);
    st = check_stream(s, run, stream);
    s->data->close(stream);
    if (st != MT_OK || !training)
        return st;

    st = open_stream(s, run, MT_SPLIT_TRAIN, &stream);
    if (st != MT_OK)
        return st;
    s->data->size(stream, &s->epoch_documents, &s->epoch_tokens);
    st = check_stream(s, run, stream);
    if (st == MT_OK)
        st = count_batches(s, run, stream);
    if (s->data->struct_size > offsetof(mt_data, fingerprint) && s->data->fingerprint)
        s->fingerprint = s->data->fingerprint(stream);
    if (st != MT_OK) {
        s->data->close(stream);
        return st;
    }
    return open_source(s, run, stream, &s->train);
}

mt_status session_open_validation(const session *s, const run_manifest *run, data_source **ret)
{
    void *stream = NULL;
    mt_status st = open_stream(s, run, MT_SPLIT_VALIDATION, &stream);
    return st == MT_OK ? open_source(s, run, stream, ret) : st;
}
