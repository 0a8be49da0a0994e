/* SPDX-License-Identifier: Apache-2.0
 *
 * Where hyper-parameters come from: config.json of a Hugging Face folder or of a checkpoint, or a
 * model manifest.
 */
#include "../base/status.h"
#include "mistaken.h"
#include "node.h"
#include "run.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

enum { NAME_SIZE = 256 };

/* A multi-modal config.json keeps the language model's keys in text_config; what is missing there
 * stands at the top. Keys about the whole are not inherited. */
static mt_status use_text_config(config *c)
{
    static const char *const whole[] = { "text_config",   "vision_config", "audio_config",
                                         "architectures", "auto_map",      NULL };
    node_item *item = node_find(c->root, "text_config");
    if (!item || item->value->kind != NODE_MAP)
        return MT_OK;
    if (!node_inherit(c, item->value, c->root, whole))
        return MT_ERR_NOMEM;
    c->root = item->value;
    return MT_OK;
}

static mt_status open_folder(const char *path, config **ret, const char **ret_label)
{
    struct stat st;
    char file[4096];
    if (snprintf(file, sizeof file, "%s/checkpoints", path) >= (int)sizeof file)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", path);
    bool run = stat(file, &st) == 0;
    snprintf(file, sizeof file, "%s/config.json", path);
    if (stat(file, &st) != 0 && errno == ENOENT && run)
        return status_set(MT_ERR_NOT_FOUND,
                          "%s is a run folder; name one of %s/checkpoints, or the model that it "
                          "exported",
                          path, path);
    if (stat(file, &st) != 0 && errno == ENOENT)
        return mistaken_folder(path);
    mt_status s = config_read_json(file, ret);
    if (s != MT_OK)
        return s;
    *ret_label = (*ret)->root->mark.label;
    return use_text_config(*ret);
}

/* `model_type` of the hyper-parameters; a manifest may say `arch`, and say either beside `config:`.
 */
static mt_status find_model_type(config *c, const mt_config *hyper, bool manifest, const char **ret)
{
    const mt_config *root = config_section(c, "");
    if (!root)
        return MT_ERR_NOMEM;
    if (manifest && root->has(root, "arch") && root->has(root, "model_type"))
        return root->reject(root, "arch", "and 'model_type' mean the same; give one of them");
    if (manifest && root->has(root, "arch"))
        return root->get_string(root, "arch", ret);
    if (root->has(root, "model_type"))
        return root->get_string(root, "model_type", ret);
    if (hyper->has(hyper, "model_type"))
        return hyper->get_string(hyper, "model_type", ret);
    if (manifest && root->has(root, "model"))
        return root->reject(root, "model",
                            "makes this a run manifest; give its run folder, a checkpoint, a model "
                            "folder, or a model manifest (with 'model_type')");
    return status_set(MT_ERR_INVALID, "%s: key 'model_type' is missing; it names the architecture",
                      c->root->mark.label);
}

/* Plugins that know several types read theirs among the hyper-parameters, wherever it stood. */
static mt_status put_model_type(config *c, const mt_config *hyper, const char *model_type)
{
    node *map = config_node(hyper, "");
    node_item *item = node_find(map, "model_type");
    if (item && item->value->kind == NODE_STRING && strcmp(item->value->text, model_type) == 0)
        return MT_OK;
    node *value = node_create(c, NODE_STRING, map->mark);
    if (!value)
        return MT_ERR_NOMEM;
    value->text = model_type;
    if (item)
        item->value = value;
    else if (!node_append(c, map, "model_type", map->mark, value))
        return MT_ERR_NOMEM;
    return MT_OK;
}

mt_status model_source_open(const char *path, model_source *ret)
{
    model_source m = { 0 };
    struct stat st;
    char hub[MISTAKEN_TEXT];
    if (stat(path, &st) != 0)
        return status_set(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO,
                          "%s: cannot open the model: %s%s", path, strerror(errno),
                          errno == ENOENT ? mistaken_name(path, hub) : "");
    mt_status s = mistaken_for_model(path);
    if (s != MT_OK)
        return s;
    bool folder = S_ISDIR(st.st_mode);
    size_t n = strlen(path);
    bool json = !folder && n > 5 && strcmp(path + n - 5, ".json") == 0;
    s = folder ? open_folder(path, &m.config, &m.label)
        : json ? config_read_json(path, &m.config)
               : config_read_yaml(path, &m.config);
    if (s == MT_OK && json)
        s = use_text_config(m.config);
    if (s != MT_OK)
        goto out;
    const node_item *below = folder || json ? NULL : node_find(m.config->root, "config");
    m.label = m.config->root->mark.label;
    m.weights = folder ? arena_strdup(&m.config->arena, path) : NULL;
    m.hyper = config_section(m.config, below ? "config" : "");
    if (!m.hyper || (folder && !m.weights)) {
        s = MT_ERR_NOMEM;
        goto out;
    }
    if (below && below->value->kind != NODE_MAP) {
        s = config_wrong(m.hyper, "", below->value, "a map of hyper-parameters");
        goto out;
    }
    s = find_model_type(m.config, m.hyper, !folder && !json, &m.model_type);
    if (s == MT_OK)
        s = put_model_type(m.config, m.hyper, m.model_type);
    if (s != MT_OK)
        goto out;
    *ret = m;
    return MT_OK;
out:
    config_destroy(m.config);
    return s;
}

void model_source_close(model_source *s)
{
    config_destroy(s->config);
    *s = (model_source){ 0 };
}

/* Facts for other programs that an architecture has no use for, allowed in model manifests too. */
static const char *const facts[] = {
    "architectures", "dtype",       "torch_dtype", "bos_token_id",         "eos_token_id",
    "pad_token_id",  "chat_format", "use_cache",   "transformers_version", NULL
};

/* Keys of a description that its copy in a checkpoint does not have. */
static const char *const not_hyper[] = { "arch", "config", "text_config", "quantization_config",
                                         NULL };

static bool is_among(const char *const *list, const char *key)
{
    while (*list && strcmp(*list, key) != 0)
        list++;
    return *list != NULL;
}

bool model_source_is_fact(const char *key)
{
    return is_among(facts, key) || is_among(not_hyper, key);
}

mt_status model_source_check_keys(const model_source *s)
{
    size_t n = strlen(s->label);
    if (s->weights || (n > 5 && strcmp(s->label + n - 5, ".json") == 0))
        return MT_OK;
    for (int32_t i = 0; facts[i]; i++)
        s->hyper->has(s->hyper, facts[i]);
    s->hyper->has(s->hyper, "model_type");
    /* The keys of a chat format that is spelled out are for whoever opens it. */
    static const char *const apart[] = { "chat_format", NULL }, *const below[] = { "config", NULL };
    bool nested = node_find(s->config->root, "config") != NULL;
    mt_status st = config_check_unused_but(s->config, "", nested ? below : apart);
    return st == MT_OK && nested ? config_check_unused_but(s->config, "config", apart) : st;
}

/* The class name by the rule that Hugging Face follows: qwen3_moe is Qwen3MoeForCausalLM,
 * gemma3_text is Gemma3ForCausalLM. */
static void class_name(const char *model_type, char *ret, size_t size)
{
    size_t n = strlen(model_type), used = 0;
    if (n > 5 && strcmp(model_type + n - 5, "_text") == 0)
        n -= 5;
    bool start = true;
    for (size_t i = 0; i < n && used + 1 < size; i++) {
        unsigned char ch = (unsigned char)model_type[i];
        if (ch != '_')
            ret[used++] = (char)(start ? toupper(ch) : ch);
        start = ch == '_';
    }
    snprintf(ret + used, size - used, "ForCausalLM");
}

/* Appends a text under `key`; none where the text is NULL. */
static bool append_text(config *c, node *map, const char *key, node_mark mark, const char *text)
{
    node *value = text ? node_create(c, NODE_STRING, mark) : NULL;
    if (value)
        value->text = text;
    return !text || (value && node_append(c, map, key, mark, value));
}

mt_status model_source_write_config(const model_source *s, const char *folder, const char *dtype,
                                    const char *chat_format, const mt_config *spelled_out)
{
    config *c = s->config;
    node_mark mark = c->root->mark;
    char path[4096], name[NAME_SIZE];
    if (snprintf(path, sizeof path, "%s/config.json", folder) >= (int)sizeof path)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", folder);
    const node *hyper = config_node(s->hyper, "");
    node *map = node_create(c, NODE_MAP, mark);
    node *type = node_create(c, NODE_STRING, mark);
    node *list = node_create(c, NODE_LIST, mark), *class = node_create(c, NODE_STRING, mark);
    if (!map || !type || !list || !class)
        return MT_ERR_NOMEM;
    const node_item *given = node_find(hyper, "architectures");
    class_name(s->model_type, name, sizeof name);
    type->text = s->model_type;
    class->text = arena_strdup(&c->arena, name);
    const char *dtype_key = node_find(hyper, "dtype") ? "dtype" : "torch_dtype";
    if (!append_text(c, map, dtype_key, mark, dtype) ||
        !append_text(c, map, "chat_format", mark, chat_format) || !class->text ||
        (spelled_out && !node_append(c, map, "chat_format", mark, config_node(spelled_out, ""))) ||
        !node_append(c, list, NULL, mark, class) ||
        !node_append(c, map, "architectures", mark, given ? given->value : list) ||
        !node_append(c, map, "model_type", mark, type) ||
        !node_inherit(c, map, hyper, not_hyper)) /* weights are written dequantised */
        return MT_ERR_NOMEM;
    return node_write_json(map, path);
}
