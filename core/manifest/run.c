/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading a run manifest: values by the schema, then what only several keys together can get wrong.
 */
#include "run.h"

#include "../base/status.h"
#include "../base/text.h"
#include "mistaken.h"
#include "node.h"
#include "run_value.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { PLACE_SIZE = 512, TEXT_SIZE = 512 };

static const char *const sections[] = { "",       "data", "train",      "optimizer",
                                        "memory", "log",  "checkpoint", NULL };
static const char *const plugin_sections[] = { "data", "optimizer", NULL };

typedef struct reader {
    run_manifest *run;
    const mt_config *root, *data, *train, *checkpoint;
} reader;

/* ---- unknown keys --------------------------------------------------------------------------- */

/* Well-known keys of other trainers: what they are called here, or why there is none. */
static const struct hint {
    const char *key;  /* a trailing '*' matches every ending */
    const char *here; /* "section.key", or NULL */
    const char *why;  /* when not offered */
} hints[] = {
#define NO_LORA                                                                                    \
    "LoRA is not offered: MegaTrain trains every parameter and keeps all of them in host memory"
#define NO_PREF                                                                                    \
    "preference and reward training is not offered: MegaTrain does pre-training and fine-tuning"
#define NO_QUANT "training on quantized weights is not offered: precision is fp32 or bf16"
#define NO_SHARD "sharding over processes is not offered: see the section 'memory'"
#define NO_SIGHT "vision and audio are not offered: MegaTrain trains on text"
#define NO_REPORT                                                                                  \
    "metrics are sent to no other program: every step's are in metrics.jsonl of the run folder"
#define NO_HYPER "is a hyper-parameter: set it in the model's config.json or manifest"
#define NO_BALANCE                                                                                 \
    NO_HYPER " (for routers that a correction bias balances there is "                             \
             "train.router_bias_update_rate)"
    { "lora*", NULL, NO_LORA },
    { "qlora*", NULL, NO_LORA },
    { "use_lora", NULL, NO_LORA },
    { "peft*", NULL, NO_LORA },
    { "adapter*", NULL, NO_LORA },
    { "finetuning_type", NULL, NO_LORA },
    { "dpo*", NULL, NO_PREF },
    { "orpo*", NULL, NO_PREF },
    { "kto*", NULL, NO_PREF },
    { "ppo*", NULL, NO_PREF },
    { "grpo*", NULL, NO_PREF },
    { "rlhf*", NULL, NO_PREF },
    { "reward_model*", NULL, NO_PREF },
    { "stage", NULL, NO_PREF },
    { "quantiz*", NULL, NO_QUANT },
    { "load_in_*", NULL, NO_QUANT },
    { "bnb*", NULL, NO_QUANT },
    { "deepspeed*", NULL, NO_SHARD },
    { "fsdp*", NULL, NO_SHARD },
    { "zero_stage", NULL, NO_SHARD },
    { "tensor_parallel*", NULL, NO_SHARD },
    { "pipeline_parallel*", NULL, NO_SHARD },
    { "vision*", NULL, NO_SIGHT },
    { "image*", NULL, NO_SIGHT },
    { "audio*", NULL, NO_SIGHT },
    { "fp16", NULL, "FP16 is not offered: precision is fp32 or bf16" },
    { "bf16", "precision", NULL },
    { "dtype", "precision", NULL },
    { "torch_dtype", "precision", NULL },
    { "mixed_precision", "precision", NULL },
    { "model_name*", "model", NULL },
    { "model_path", "model", NULL },
    { "base_model", "model", NULL },
    { "lr", "train.learning_rate", NULL },
    { "warmup", "train.warmup_steps", NULL },
    { "steps", "train.max_steps", NULL },
    { "lr_scale", "optimizer.groups.0.learning_rate_scale", NULL },
    { "epochs", "train.num_train_epochs", NULL },
    { "num_epochs", "train.num_train_epochs", NULL },
    { "batch_size", "train.micro_batch_size", NULL },
    { "train_batch_size", "train.micro_batch_size", NULL },
    { "per_device_train_batch_size", "train.micro_batch_size", NULL },
    { "grad_accum*", "train.gradient_accumulation_steps", NULL },
    { "clip_grad*", "train.max_grad_norm", NULL },
    { "grad_clip*", "train.max_grad_norm", NULL },
    { "gradient_clip*", "train.max_grad_norm", NULL },
    { "moe_router_bias_update_rate", "train.router_bias_update_rate", NULL },
    { "bias_update_speed", "train.router_bias_update_rate", NULL },
    { "eval_strategy", "train.eval_steps", NULL },
    { "evaluation_strategy", "train.eval_steps", NULL },
    { "save_strategy", "checkpoint.save_steps", NULL },
    { "resume", "checkpoint.resume_from_checkpoint", NULL },
    { "report_to", NULL, NO_REPORT },
    { "wandb*", NULL, NO_REPORT },
    { "tensorboard*", NULL, NO_REPORT },
    { "logging_dir", NULL, NO_REPORT },
    { "scheduler", "train.lr_scheduler_type", NULL },
    { "lr_scheduler", "train.lr_scheduler_type", NULL },
    { "weight_decay", "optimizer.weight_decay", NULL },
    { "optim", "optimizer.name", NULL },
    { "dataset", "data.files", NULL },
    { "dataset_path", "data.files", NULL },
    { "data_path", "data.files", NULL },
    { "train_file*", "data.files", NULL },
    { "eval_file*", "data.validation_files", NULL },
    { "val_file*", "data.validation_files", NULL },
    { "max_seq_length", "data.max_seq_len", NULL },
    { "block_size", "data.max_seq_len", NULL },
    { "cutoff_len", "data.max_seq_len", NULL },
    { "context_length", "data.max_seq_len", NULL },
    { "max_length", "data.max_seq_len", NULL },
    { "seq_len", "data.max_seq_len", NULL },
    { "seq_length", "data.max_seq_len", NULL },
    { "sequence_len", "data.max_seq_len", NULL },
    { "output_router_logits", NULL, NO_BALANCE },
    { "router_aux_loss*", NULL, NO_BALANCE },
    { "aux_loss*", NULL, NO_BALANCE },
    { "moe_aux_loss*", NULL, NO_BALANCE },
    { "rope_*", NULL, NO_HYPER },
    { "max_position_embeddings", NULL, NO_HYPER },
    { "gradient_checkpointing", "memory.activations", NULL },
};

static bool hint_matches(const struct hint *h, const char *key)
{
    size_t n = strlen(h->key);
    return h->key[n - 1] == '*' ? strncmp(h->key, key, n - 1) == 0 : strcmp(h->key, key) == 0;
}

/* Is there something better to say about an unknown key than the nearest one of its section? */
static mt_status check_foreign_key(const char *section, const node_item *item)
{
    char place[PLACE_SIZE];
    node_place(item->mark, place, sizeof place);
    int32_t n;
    const run_key *keys = run_schema(&n);
    for (int32_t i = 0; i < n; i++)
        if (strcmp(keys[i].name, item->key) == 0 && strcmp(keys[i].section, section) != 0)
            return status_set(MT_ERR_INVALID, "%s: unknown key '%s%s%s'; did you mean '%s%s%s'?",
                              place, section, *section ? "." : "", item->key, keys[i].section,
                              *keys[i].section ? "." : "", item->key);
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) {
        if (!hint_matches(&hints[i], item->key))
            continue;
        if (!hints[i].here)
            return status_set(MT_ERR_UNSUPPORTED, "%s: '%s': %s; remove the key", place, item->key,
                              hints[i].why);
        return status_set(MT_ERR_INVALID, "%s: unknown key '%s'; it is called '%s' here", place,
                          item->key, hints[i].here);
    }
    return MT_OK;
}

static mt_status check_foreign_keys(config *c, const char *section)
{
    const node *map = *section ? NULL : c->root;
    const node_item *item = *section ? node_find(c->root, section) : NULL;
    if (item)
        map = item->value;
    for (int64_t i = 0; map && map->kind == NODE_MAP && i < map->n; i++) {
        mt_status s = map->items[i].asked ? MT_OK : check_foreign_key(section, &map->items[i]);
        if (s != MT_OK)
            return s;
    }
    return MT_OK;
}

static bool is_plugin_section(const char *section)
{
    return strcmp(section, plugin_sections[0]) == 0 || strcmp(section, plugin_sections[1]) == 0;
}

static mt_status check_keys(config *c)
{
    char found[128], place[PLACE_SIZE];
    int32_t n;
    const run_key *keys = run_schema(&n);
    for (int32_t i = 1; sections[i]; i++) {
        const node_item *item = node_find(c->root, sections[i]);
        if (item && item->value->kind != NODE_MAP && item->value->kind != NODE_NULL)
            return status_set(MT_ERR_INVALID, "%s: '%s' must be a section of keys, found %s",
                              node_place(item->value->mark, place, sizeof place), sections[i],
                              node_describe(item->value, found, sizeof found));
    }
    for (int32_t i = 0; i < n; i++) { /* asking makes them known */
        const mt_config *section = config_section(c, keys[i].section);
        if (!section)
            return MT_ERR_NOMEM;
        section->has(section, keys[i].name);
    }
    for (int32_t i = 0; sections[i]; i++) {
        mt_status s = is_plugin_section(sections[i]) ? MT_OK : check_foreign_keys(c, sections[i]);
        if (s != MT_OK)
            return s;
    }
    return config_check_unused_but(c, "", plugin_sections);
}

mt_status run_check_plugin_keys(run_manifest *r, bool data_was_read)
{
    for (int32_t i = 0; plugin_sections[i]; i++) {
        mt_status s = check_foreign_keys(r->config, plugin_sections[i]);
        if (s == MT_OK && (data_was_read || strcmp(plugin_sections[i], "data") != 0))
            s = config_check_unused(r->config, plugin_sections[i]);
        if (s != MT_OK)
            return s;
    }
    return MT_OK;
}

/* ---- values --------------------------------------------------------------------------------- */

static mt_status read_values(run_manifest *r)
{
    int32_t n;
    const run_key *keys = run_schema(&n);
    for (int32_t i = 0; i < n; i++) {
        const run_key *k = &keys[i];
        const mt_config *section = config_section(r->config, k->section);
        if (!section)
            return MT_ERR_NOMEM;
        const node *found = config_node(section, k->name);
        node fallback = { 0 };
        if (!found || found->kind == NODE_NULL) {
            if (!k->fallback)
                continue;
            node_resolve(&fallback, k->fallback);
            found = &fallback;
        }
        mt_status s = run_read_value(r, section, k, found);
        if (s != MT_OK)
            return s;
    }
    return MT_OK;
}

/* ---- paths ---------------------------------------------------------------------------------- */

static bool exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

/* Makes the path at `key`, which `ret` holds as it was written, absolute. */
static mt_status resolve_path(const reader *in, const mt_config *section, const char *key,
                              const char **ret)
{
    const char *given = *ret, *manifest = in->run->path;
    arena *a = &in->run->config->arena;
    node *n = config_node(section, key);
    const char *slash = strrchr(manifest, '/');
    const char *beside =
        slash ? arena_printf(a, "%.*s/%s", (int)(slash - manifest), manifest, given) : given;
    if (!beside)
        return MT_ERR_NOMEM;
    bool from_argument = n->mark.line == 0;
    const char *first = from_argument || *given == '/' ? given : beside;
    const char *second = from_argument ? beside : given;
    const char *path = exists(first) ? first : exists(second) ? second : NULL;
    char hub[MISTAKEN_TEXT];
    const char *remedy = mistaken_name(given, hub);
    if (!path && strcmp(first, second) == 0)
        return section->reject(section, key, "names '%s', which does not exist%s", given, remedy);
    if (!path)
        return section->reject(section, key,
                               "names '%s', which does not exist: neither %s nor %s (below the "
                               "working directory) is there%s",
                               given, first, second, remedy);
    char *absolute = realpath(path, NULL);
    if (!absolute)
        return section->reject(section, key, "names %s, which cannot be reached", path);
    given = arena_strdup(a, absolute);
    free(absolute);
    if (!given)
        return MT_ERR_NOMEM;
    n->text = given;
    n->plain = false;
    *ret = given;
    return MT_OK;
}

static mt_status resolve_paths(const reader *in)
{
    run_manifest *r = in->run;
    if (!r->model)
        return status_set(MT_ERR_INVALID,
                          "%s: key 'model' is missing; expected a Hugging Face folder or a model "
                          "manifest",
                          r->path);
    mt_status s = resolve_path(in, in->root, "model", &r->model);
    if (s == MT_OK && strcmp(r->tokenizer, "auto") != 0)
        s = resolve_path(in, in->data, "tokenizer", &r->tokenizer);
    return s;
}

/* Makes a default that depends on where and when it is read part of the effective manifest. */
static mt_status keep_default(config *c, const char *key, const char *text)
{
    node *value = node_create(c, NODE_STRING, c->root->mark);
    if (!value)
        return MT_ERR_NOMEM;
    value->text = text;
    node_item *item = node_find(c->root, key);
    if (item) /* it is there, but null */
        item->value = value;
    else if (!node_append(c, c->root, key, c->root->mark, value))
        return MT_ERR_NOMEM;
    node_find(c->root, key)->asked = true;
    return MT_OK;
}

/* runs/NAME for .../NAME.yaml. */
static mt_status default_output_dir(run_manifest *r)
{
    const char *slash = strrchr(r->path, '/'), *name = slash ? slash + 1 : r->path;
    const char *dot = strrchr(name, '.');
    int n = dot && dot != name ? (int)(dot - name) : (int)strlen(name);
    r->output_dir = arena_printf(&r->config->arena, "runs/%.*s", n, name);
    return r->output_dir ? keep_default(r->config, "output_dir", r->output_dir) : MT_ERR_NOMEM;
}

/* Paths in the folder are made, and recognised, by what they begin with. */
static mt_status trim_output_dir(run_manifest *r)
{
    const char *given = r->output_dir;
    size_t n = strlen(given);
    while (n > 1 && given[n - 1] == '/')
        n--;
    r->output_dir = given[n] ? arena_printf(&r->config->arena, "%.*s", (int)n, given) : given;
    return r->output_dir ? MT_OK : MT_ERR_NOMEM;
}

/* ---- several keys together ------------------------------------------------------------------ */

static mt_status read_init(const reader *in)
{
    run_manifest *r = in->run;
    struct stat st;
    bool folder = stat(r->model, &st) == 0 && S_ISDIR(st.st_mode);
    const char *init = folder ? "pretrained" : "random";
    mt_status s = in->root->has(in->root, "init") ? in->root->get_string(in->root, "init", &init)
                                                  : keep_default(r->config, "init", init);
    if (s != MT_OK)
        return s;
    r->from_scratch = strcmp(init, "random") == 0;
    if (!r->from_scratch && !folder)
        return in->root->reject(in->root, "init",
                                "is pretrained, but the model manifest %s has no weights; name a "
                                "Hugging Face folder or a checkpoint as the model",
                                r->model);
    return mt_config_string(in->root, "precision", "auto", &r->precision);
}

static mt_status check_exclusive(const mt_config *c, const char *key, const char *other)
{
    if (c->has(c, key) && c->has(c, other))
        return c->reject(c, key, "and '%s' exclude each other; give one of them", other);
    return MT_OK;
}

/* A step of more is a slip. Plans would be searched for at length, and what they count in bytes
 * leave 64 bits. */
enum { MOST_MICRO_BATCHES = 1 << 20 };
static const int64_t most_step_tokens = INT64_C(1) << 36;

static mt_status check_step_size(const run_manifest *r, const mt_config *c)
{
    int64_t micro = r->micro_batch_size * r->max_seq_len, n = r->gradient_accumulation_steps;
    if (n <= MOST_MICRO_BATCHES && n <= most_step_tokens / micro)
        return MT_OK;
    return c->reject(
        c, c->has(c, "tokens_per_step") ? "tokens_per_step" : "gradient_accumulation_steps",
        "makes steps of %lld micro-batches of %lld tokens; expected at most %d of them, and %lld "
        "tokens in all",
        (long long)n, (long long)micro, MOST_MICRO_BATCHES, (long long)most_step_tokens);
}

/* As long as the length of documents is a default, the model may yet make it shorter. */
static mt_status read_step_size(run_manifest *r, const mt_config *c, bool length_is_final)
{
    mt_status s = check_exclusive(c, "tokens_per_step", "gradient_accumulation_steps");
    if (s != MT_OK)
        return s;
    if (r->micro_batch_size > INT32_MAX / r->max_seq_len)
        return c->reject(c, "micro_batch_size",
                         "is %lld: times max_seq_len %lld that is more than %d tokens",
                         (long long)r->micro_batch_size, (long long)r->max_seq_len, INT32_MAX);
    if (!c->has(c, "tokens_per_step"))
        return check_step_size(r, c);
    int64_t tokens, micro = r->micro_batch_size * r->max_seq_len;
    s = c->get_int(c, "tokens_per_step", &tokens);
    if (s != MT_OK)
        return s;
    if (tokens % micro != 0 && !length_is_final)
        return MT_OK;
    if (tokens % micro != 0)
        return c->reject(c, "tokens_per_step",
                         "is %lld; expected a multiple of micro_batch_size * max_seq_len = %lld * "
                         "%lld = %lld, such as %lld",
                         (long long)tokens, (long long)r->micro_batch_size,
                         (long long)r->max_seq_len, (long long)micro,
                         (long long)((tokens + micro - 1) / micro * micro));
    r->gradient_accumulation_steps = tokens / micro;
    return check_step_size(r, c);
}

static mt_status check_schedule(const reader *in)
{
    const mt_config *c = in->train;
    const run_manifest *r = in->run;
    mt_status s = r->max_steps ? check_exclusive(c, "max_steps", "num_train_epochs") : MT_OK;
    if (s == MT_OK)
        s = check_exclusive(c, "warmup_steps", "warmup_ratio");
    if (s != MT_OK)
        return s;
    if (r->max_steps == 0 && r->num_train_epochs <= 0)
        return c->reject(c, "num_train_epochs", "must be positive, or max_steps be given");
    if (r->max_steps > 0 && r->warmup_steps > r->max_steps)
        return c->reject(c, "warmup_steps", "is %lld, longer than the run: max_steps is %lld",
                         (long long)r->warmup_steps, (long long)r->max_steps);
    bool wsd = r->lr_scheduler_type == RUN_WSD;
    if (!wsd && c->has(c, "wsd_decay_ratio"))
        return c->reject(c, "wsd_decay_ratio", "is used only with lr_scheduler_type: wsd");
    if (r->lr_scheduler_type == RUN_CONSTANT && r->min_lr_ratio > 0)
        return c->reject(c, "min_lr_ratio", "has no effect on a constant schedule; remove it");
    if (wsd && r->warmup_ratio + r->wsd_decay_ratio > 1)
        return c->reject(c, "wsd_decay_ratio", "and warmup_ratio together exceed the whole run");
    return MT_OK;
}

static mt_status check_together(const reader *in)
{
    run_manifest *r = in->run;
    const mt_config *c = in->train;
    mt_status s = read_init(in);
    if (s == MT_OK)
        s = read_step_size(r, in->train, in->data->has(in->data, "max_seq_len"));
    if (s == MT_OK)
        s = check_schedule(in);
    if (s != MT_OK)
        return s;
    if (r->max_grad_norm == 0 && r->on_bad_numbers == RUN_SKIP) {
        if (c->has(c, "on_bad_numbers"))
            return c->reject(c, "on_bad_numbers",
                             "is skip, which needs clipping: with max_grad_norm: 0 updates start "
                             "before all gradients are known; use stop, or clip");
        r->on_bad_numbers = RUN_STOP;
    }
    if (r->on_bad_numbers == RUN_STOP && c->has(c, "max_skipped"))
        return c->reject(c, "max_skipped", "has no effect where on_bad_numbers is stop; remove it");
    r->activations--; /* the first choice is "auto", -1 */
    return MT_OK;
}

/* ---- reading -------------------------------------------------------------------------------- */

/* Takes `c` over. */
static mt_status read_config(config *c, char *const *overrides, int n_overrides, run_manifest **ret)
{
    mt_status s = MT_OK;
    run_manifest *r = calloc(1, sizeof *r);
    if (!r) {
        config_destroy(c);
        return status_nomem("a run manifest", sizeof *r);
    }
    r->config = c;
    for (int i = 0; s == MT_OK && i < n_overrides; i++)
        s = config_override(r->config, overrides[i]);
    if (s != MT_OK)
        goto out;
    r->path = r->config->root->mark.label;
    reader in = { r, config_section(r->config, ""), config_section(r->config, "data"),
                  config_section(r->config, "train"), config_section(r->config, "checkpoint") };
    if (!in.root || !in.data || !in.train || !in.checkpoint) {
        s = MT_ERR_NOMEM;
        goto out;
    }
    s = check_keys(r->config);
    if (s == MT_OK)
        s = read_values(r);
    if (s == MT_OK)
        s = resolve_paths(&in);
    if (s == MT_OK)
        s = r->output_dir ? trim_output_dir(r) : default_output_dir(r);
    if (s == MT_OK)
        s = check_together(&in);
    if (s != MT_OK)
        goto out;
    *ret = r;
    r = NULL;
out:
    run_destroy(r);
    return s;
}

/* Fails for a model manifest, or a config.json. */
static mt_status check_is_run(const config *c, const char *path)
{
    const char *key = node_find(c->root, "model_type") ? "model_type" : "arch";
    if (node_find(c->root, "model") || !node_find(c->root, key))
        return MT_OK;
    return status_set(
        MT_ERR_INVALID,
        "%s: is a model ('%s' stands in it); name it as 'model:' in a run manifest, and "
        "that manifest here",
        path, key);
}

mt_status run_read(const char *path, char *const *overrides, int n_overrides, run_manifest **ret)
{
    config *c = NULL;
    mt_status s = mistaken_for_run(path);
    if (s == MT_OK)
        s = config_read_yaml(path, &c);
    if (s == MT_OK && (s = check_is_run(c, path)) != MT_OK)
        config_destroy(c);
    return s == MT_OK ? read_config(c, overrides, n_overrides, ret) : s;
}

mt_status run_of_model(const char *model, char *const *overrides, int n_overrides,
                       run_manifest **ret)
{
    config *c = NULL;
    mt_status s = config_parse_yaml("{}", 2, "command line", &c);
    if (s != MT_OK)
        return s;
    s = config_set_text(c, "model", model, "command line");
    if (s == MT_OK)
        return read_config(c, overrides, n_overrides, ret);
    config_destroy(c);
    return s;
}

mt_status run_fit_length(run_manifest *r, int64_t positions, bool *ret_fitted)
{
    const mt_config *data = config_section(r->config, "data");
    *ret_fitted = false;
    if (data->has(data, "max_seq_len"))
        return MT_OK;
    if (positions > 1 && r->max_seq_len > positions) {
        r->max_seq_len = positions;
        *ret_fitted = true;
    }
    return read_step_size(r, config_section(r->config, "train"), true);
}

void run_destroy(run_manifest *r)
{
    if (!r)
        return;
    config_destroy(r->config);
    free(r);
}
