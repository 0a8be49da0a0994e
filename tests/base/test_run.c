/* SPDX-License-Identifier: Apache-2.0
 *
 * Run manifests: defaults, values, and every kind of mistake with its exact place. Model sources.
 */
#include "../check.h"
#include "core/base/status.h"
#include "core/manifest/run.h"
#include "core/template/template.h"

#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/mt-run-XXXXXX";

static const char *write_file(const char *name, const char *text)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0)
        abort();
    return path;
}

static mt_status read_with(const char *text, const char *override, run_manifest **ret)
{
    char *args[] = { (char *) override };
    return run_read(write_file("run.yaml", text), args, override ? 1 : 0, ret);
}

/* The text must be FOLDER/run.yaml + `expected`, or exactly `expected` when it names an argument.
 */
static void check_text(const char *expected)
{
    char text[1024];
    snprintf(text, sizeof text, "%s/run.yaml%s", folder, expected);
    const char *whole = strncmp(expected, "argument", 8) == 0 ? expected : text;
    CHECK(strcmp(status_text(), whole) == 0, "found: %s\n  expected: %s", status_text(), whole);
}

static void refuse(const char *text, const char *override, const char *expected)
{
    run_manifest *r = NULL;
    mt_status s = read_with(text, override, &r);
    if (s == MT_OK) {
        s = run_check_plugin_keys(r, true);
        run_destroy(r);
    }
    CHECK(s != MT_OK, "accepted: %s %s", text, override ? override : "");
    check_text(expected);
}

static void test_defaults(void)
{
    run_manifest *r = NULL;
    CHECK(read_with("model: model.yaml\n", NULL, &r) == MT_OK, "%s", status_text());
    if (!r)
        return;
    CHECK(strcmp(r->device, "auto") == 0 && strcmp(r->precision, "auto") == 0);
    CHECK(r->threads == 0 && r->seed == 42 && r->from_scratch &&
          r->packing == RUN_PACKING_BEST_FIT);
    CHECK(strcmp(r->output_dir, "runs/run") == 0, "%s", r->output_dir);
    CHECK(strcmp(r->loader, "auto") == 0 && strcmp(r->optimizer, "adamw") == 0);
    CHECK(r->max_seq_len == 1024 && r->max_steps == 0 && r->num_train_epochs == 1);
    CHECK(r->micro_batch_size == 1 && r->gradient_accumulation_steps == 1);
    CHECK(r->learning_rate == 1e-4 && r->lr_scheduler_type == RUN_COSINE && r->max_grad_norm == 1);
    CHECK(r->on_bad_numbers == RUN_SKIP && r->max_skipped == 10);
    CHECK(r->memory_device == -1 && r->memory_host == -1 && r->groups == -1);
    CHECK(r->activations == -1 && r->weight_buffers == -1 && r->optimizer_threads == 0);
    CHECK(r->logging_steps == 1 && r->save_steps == 0 && r->save_total_limit == 2);
    CHECK(!r->weights_only && strcmp(r->resume_from_checkpoint, "auto") == 0);
    CHECK(r->model[0] == '/' && strstr(r->model, "/model.yaml"), "%s", r->model);
    /* The effective manifest means the same from anywhere. */
    const mt_config *root = config_section(r->config, "");
    const char *model = "", *output = "";
    CHECK(root->get_string(root, "model", &model) == MT_OK && strcmp(model, r->model) == 0);
    CHECK(root->get_string(root, "output_dir", &output) == MT_OK &&
          strcmp(output, "runs/run") == 0);
    CHECK(run_check_plugin_keys(r, true) == MT_OK, "%s", status_text());
    run_destroy(r);
}

static void test_values(void)
{
    static const char text[] =
        "model: hf\nprecision: bf16\nseed: 7\n"
        "data: {loader: jsonl, max_seq_len: 128, packing: false, files: [x]}\n"
        "train:\n  max_steps: 1e3\n  micro_batch_size: 4\n  tokens_per_step: 1536\n"
        "  lr_scheduler_type: wsd\n  wsd_decay_ratio: 0.2\n  warmup_steps: 5\n"
        "  max_grad_norm: 0\n  min_lr_ratio: 0.1\n"
        "optimizer: {name: lion}\n"
        "memory: {gpu: 24GiB, host: 1e9, groups: 2, activations: select, weight_buffers: 3}\n"
        "checkpoint: {weights_only: true, resume_from_checkpoint: none}\n";
    run_manifest *r = NULL;
    CHECK(read_with(text, "train.learning_rate=2e-3", &r) == MT_OK, "%s", status_text());
    if (!r)
        return;
    CHECK(!r->from_scratch && r->seed == 7 && strcmp(r->precision, "bf16") == 0);
    CHECK(r->max_seq_len == 128 && r->packing == RUN_PACKING_NONE &&
          strcmp(r->loader, "jsonl") == 0);
    CHECK(r->max_steps == 1000 && r->gradient_accumulation_steps == 3);
    CHECK(r->lr_scheduler_type == RUN_WSD && r->wsd_decay_ratio == 0.2 && r->warmup_steps == 5);
    CHECK(r->max_grad_norm == 0 && r->on_bad_numbers == RUN_STOP, "skip needs clipping");
    CHECK(r->learning_rate == 2e-3 && r->min_lr_ratio == 0.1);
    CHECK(r->memory_device == INT64_C(24) << 30 && r->memory_host == 1000000000);
    CHECK(r->groups == 2 && r->activations == TPL_SELECT && r->weight_buffers == 3);
    CHECK(r->weights_only && strcmp(r->resume_from_checkpoint, "none") == 0);
    check_case_failed |= run_check_plugin_keys(r, true) == MT_OK;
    check_text(":4:57: unknown key 'files' in 'data'; known: loader, max_seq_len, packing, "
               "tokenizer, chat_format");
    const mt_config *data = config_section(r->config, "data");
    data->length(data, "files");
    CHECK(run_check_plugin_keys(r, true) == MT_OK, "%s", status_text());
    run_destroy(r);
}

/* Each wrong line stands in line 3 of a manifest. */
static void test_wrong_values(void)
{
    static const char *const cases[][2] = {
        { "  learning_rat: 1", ":3:3: unknown key 'learning_rat' in 'train'; did you mean "
                               "'learning_rate'?" },
        { "  max_steps: ten", ":3:14: 'train.max_steps' must be a whole number, found the string "
                              "\"ten\"" },
        { "  max_steps: 1.5",
          ":3:14: 'train.max_steps' must be a whole number, found the number 1.5" },
        { "  micro_batch_size: -4", ":3:21: 'train.micro_batch_size' must be a number of at least "
                                    "1, found the number -4" },
        { "  max_steps: 9223372036854775807",
          ":3:14: 'train.max_steps' must be a number of at most 9007199254740992, found the number "
          "9223372036854775807" },
        { "  min_lr_ratio: 2",
          ":3:17: 'train.min_lr_ratio' must be a number from 0 to 1, found the number 2" },
        { "  learning_rate: .nan",
          ":3:18: 'train.learning_rate' must be a number from 0 to 1e+06, found the number .nan" },
        { "  max_grad_norm: 1.0e300", ":3:18: 'train.max_grad_norm' must be a number of at most "
                                      "1e+30, found the number 1.0e300" },
        { "  max_grad_norm: .inf", ":3:18: 'train.max_grad_norm' must be a number of at least 0, "
                                   "found the number .inf" },
        { "  lr_scheduler_type: cosin", ":3:22: 'train.lr_scheduler_type' must be one of constant, "
                                        "linear, cosine, wsd, found the "
                                        "string \"cosin\"" },
        { "  on_bad_numbers: true",
          ":3:19: 'train.on_bad_numbers' must be one of skip, stop, found true" },
        { "  lr: 1e-4", ":3:3: unknown key 'lr'; it is called 'train.learning_rate' here" },
        { "  warmup: 3", ":3:3: unknown key 'warmup'; it is called 'train.warmup_steps' here" },
        { "  eval_strategy: steps",
          ":3:3: unknown key 'eval_strategy'; it is called 'train.eval_steps' here" },
        { "  report_to: wandb",
          ":3:3: 'report_to': metrics are sent to no other program: every step's are in "
          "metrics.jsonl of the run folder; remove the key" },
        { "  seed: 3", ":3:3: unknown key 'train.seed'; did you mean 'seed'?" },
        { "  save_steps: 3",
          ":3:3: unknown key 'train.save_steps'; did you mean 'checkpoint.save_steps'?" },
        { "  weight_decay: 0.1",
          ":3:3: unknown key 'weight_decay'; it is called 'optimizer.weight_decay' here" },
        { "  lora_rank: 8",
          ":3:3: 'lora_rank': LoRA is not offered: MegaTrain trains every parameter and keeps all "
          "of them in host memory; remove the key" },
        { "  dpo_beta: 0.1", ":3:3: 'dpo_beta': preference and reward training is not offered: "
                             "MegaTrain does pre-training and fine-tuning; remove the key" },
        { "  load_in_4bit: true",
          ":3:3: 'load_in_4bit': training on quantized weights is not offered: precision is fp32 "
          "or bf16; remove the key" },
        { "  warmup_steps: 5\n  max_steps: 4",
          ":3:17: 'train.warmup_steps' is 5, longer than the run: max_steps is 4" },
        { "  warmup_steps: 5\n  warmup_ratio: 0.1",
          ":3:17: 'train.warmup_steps' and 'warmup_ratio' exclude each other; give one of them" },
        { "  max_steps: 5\n  num_train_epochs: 1",
          ":3:14: 'train.max_steps' and 'num_train_epochs' exclude each other; give one of them" },
        { "  tokens_per_step: 2048\n  gradient_accumulation_steps: 2",
          ":3:20: 'train.tokens_per_step' and 'gradient_accumulation_steps' exclude each other; "
          "give one of them" },
        { "  tokens_per_step: 1500\ndata:\n  max_seq_len: 1024",
          ":3:20: 'train.tokens_per_step' is 1500; expected a multiple of micro_batch_size * "
          "max_seq_len = 1 * 1024 = 1024, such as 2048" },
        { "  num_train_epochs: 0",
          ":3:21: 'train.num_train_epochs' must be positive, or max_steps be given" },
        { "  wsd_decay_ratio: 0.5",
          ":3:20: 'train.wsd_decay_ratio' is used only with lr_scheduler_type: wsd" },
        { "  min_lr_ratio: 0.5\n  lr_scheduler_type: constant",
          ":3:17: 'train.min_lr_ratio' has no effect on a constant schedule; remove it" },
        { "  wsd_decay_ratio: 0.5\n  lr_scheduler_type: wsd\n  warmup_ratio: 0.6",
          ":3:20: 'train.wsd_decay_ratio' and warmup_ratio together exceed the whole run" },
        { "  max_skipped: 3\n  on_bad_numbers: stop",
          ":3:16: 'train.max_skipped' has no effect where on_bad_numbers is stop; remove it" },
        { "  max_grad_norm: 0\n  max_skipped: 3",
          ":4:16: 'train.max_skipped' has no effect where on_bad_numbers is stop; remove it" },
        { "  on_bad_numbers: skip\n  max_grad_norm: 0",
          ":3:19: 'train.on_bad_numbers' is skip, which needs clipping: with max_grad_norm: 0 "
          "updates start before all gradients are known; use stop, or clip" },
        { "  gradient_accumulation_steps: 1e9",
          ":3:32: 'train.gradient_accumulation_steps' makes steps of 1000000000 micro-batches of "
          "1024 tokens; expected at most 1048576 of them, and 68719476736 tokens in all" },
        { "  tokens_per_step: 137438953472\n  micro_batch_size: 131072",
          ":3:20: 'train.tokens_per_step' makes steps of 1024 micro-batches of 134217728 tokens; "
          "expected at most 1048576 of them, and 68719476736 tokens in all" },
        { "  micro_batch_size: 1e9",
          ":3:21: 'train.micro_batch_size' is 1000000000: times max_seq_len 1024 that is more than "
          "2147483647 tokens" },
        { "  max_steps: [1]", ":3:14: 'train.max_steps' must be a whole number, found a list" },
        { "  max_steps: 1\n  max_steps: 2",
          ":4:3: key 'max_steps' stands here a second time; it is already in line 3" },
        { "memory: {gpu: 24G}",
          ":3:15: 'memory.gpu' must be a size such as 24GiB, 512MB or a number of bytes, found the "
          "string \"24G\"" },
        { "memory: {host: -1}", ":3:16: 'memory.host' must be a size such as 24GiB, 512MB or a "
                                "number of bytes, found the "
                                "number -1" },
        { "memory: {groups: x}", ":3:18: 'memory.groups' must be \"auto\" or a whole number, found "
                                 "the string \"x\"" },
        { "memory: {weight_buffers: 1}",
          ":3:26: 'memory.weight_buffers' must be \"auto\" or a number from 2 to 1024, found the "
          "number 1" },
        { "memory: 5", ":3:9: 'memory' must be a section of keys, found the number 5" },
        { "log: {csv: a.csv}", ":3:7: unknown key 'csv' in 'log'; known: logging_steps" },
        { "memry: {gpu: 1GiB}", ":3:1: unknown key 'memry'; did you mean 'memory'?" },
        { "data: {max_seq_len: 1}",
          ":3:21: 'data.max_seq_len' must be a number of at least 2, found the number 1" },
        { "optimizer: {lr: 1}",
          ":3:13: unknown key 'lr'; it is called 'train.learning_rate' here" },
        { "output_dir: ''",
          ":3:13: 'output_dir' must be a string that is not empty, found the string \"\"" },
        { "precision: fp16",
          ":3:12: 'precision' must be one of auto, fp32, bf16, found the string \"fp16\"" },
        { "output_dir: 3", ":3:13: 'output_dir' must be a string (in quotes when it looks like "
                           "something else), found the number 3" },
        { "init: pretrained", NULL }, /* checked below: its text has a path */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        snprintf(text, sizeof text, "model: model.yaml\ntrain:\n%s\n", cases[i][0]);
        if (cases[i][1])
            refuse(text, NULL, cases[i][1]);
    }
    run_manifest *r = NULL;
    CHECK(read_with("model: model.yaml\ninit: pretrained\n", NULL, &r) == MT_ERR_INVALID);
    CHECK(strstr(status_text(), "run.yaml:2:7: 'init' is pretrained, but the model manifest "),
          "%s", status_text());
}

static void test_model_path(void)
{
    refuse("seed: 1\n", NULL,
           ": key 'model' is missing; expected a Hugging Face folder or a model manifest");
    refuse("modle: x\n", NULL, ":1:1: unknown key 'modle'; did you mean 'model'?");
    run_manifest *r = NULL;
    CHECK(read_with("model: none\n", NULL, &r) == MT_ERR_INVALID);
    CHECK(
        strstr(status_text(), "run.yaml:1:8: 'model' names 'none', which does not exist: neither "),
        "%s", status_text());
    refuse("model: /none\n", NULL, ":1:8: 'model' names '/none', which does not exist");
}

static void test_overrides(void)
{
    refuse("model: model.yaml\n", "train.max_steps=abc",
           "argument 'train.max_steps=abc': 'train.max_steps' must be a whole number, found the "
           "string \"abc\"");
    refuse("model: model.yaml\n", "train.max_step=1",
           "argument 'train.max_step=1': unknown key 'max_step' in 'train'; did you mean "
           "'max_steps'?");
}

static void test_schema(void)
{
    int32_t n = 0;
    const run_key *keys = run_schema(&n);
    for (int32_t i = 0; i < n; i++) {
        const run_key *k = &keys[i];
        size_t length = strlen(k->doc);
        CHECK(length > 10 && k->doc[length - 1] == '.', "%s: doc", k->name);
        bool words = k->type == RUN_KEY_CHOICE || k->yes;
        CHECK(words == (k->choices != NULL), "%s: choices", k->name);
        for (int32_t j = 0; j < i; j++) {
            CHECK(strcmp(k->name, keys[j].name) != 0 || strcmp(k->section, keys[j].section) != 0,
                  "%s stands twice", k->name);
            CHECK(!k->size || !keys[j].size || k->offset != keys[j].offset,
                  "%s and %s share a field", k->name, keys[j].name);
        }
    }
}

/* ---- models --------------------------------------------------------------------------------- */

static void open_source(const char *name, model_source *ret)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    CHECK(model_source_open(path, ret) == MT_OK, "%s", status_text());
    if (!ret->config)
        exit(1);
}

static void test_sources(void)
{
    model_source m = { 0 };
    int64_t i = 0;
    bool b = false;
    open_source("hf", &m);
    CHECK(strcmp(m.model_type, "llama") == 0 && m.weights && strstr(m.weights, "/hf"));
    CHECK(m.hyper->get_int(m.hyper, "hidden_size", &i) == MT_OK && i == 64);
    CHECK(model_source_check_keys(&m) == MT_OK);
    model_source_close(&m);
    model_source_close(&m);

    open_source("mm", &m); /* text_config, with what it lacks from the top */
    CHECK(strcmp(m.model_type, "gemma3_text") == 0);
    CHECK(m.hyper->get_int(m.hyper, "hidden_size", &i) == MT_OK && i == 32);
    CHECK(m.hyper->get_bool(m.hyper, "tie_word_embeddings", &b) == MT_OK && b);
    CHECK(!m.hyper->has(m.hyper, "vision_config") && !m.hyper->has(m.hyper, "architectures"));
    CHECK(model_source_write_config(&m, folder, "float32", NULL, NULL) == MT_OK, "%s",
          status_text());
    model_source_close(&m);

    model_source back = { 0 };
    open_source("", &back); /* the folder into which config.json was just written */
    const char *class = "";
    CHECK(strcmp(back.model_type, "gemma3_text") == 0);
    CHECK(back.hyper->get_string(back.hyper, "architectures.0", &class) == MT_OK &&
              strcmp(class, "Gemma3ForCausalLM") == 0,
          "%s", class);
    const char *dtype = "";
    CHECK(back.hyper->get_string(back.hyper, "torch_dtype", &dtype) == MT_OK &&
              strcmp(dtype, "float32") == 0,
          "%s", dtype);
    double eps = 0;
    CHECK(back.hyper->get_float(back.hyper, "rms_norm_eps", &eps) == MT_OK && eps == 1e-05);
    model_source_close(&back);

    open_source("model.yaml", &m);
    CHECK(strcmp(m.model_type, "llama") == 0 && !m.weights);
    CHECK(m.hyper->get_int(m.hyper, "hidden_size", &i) == MT_OK && i == 8);
    CHECK(model_source_check_keys(&m) != MT_OK);
    CHECK(strstr(status_text(), "model.yaml:3:1: unknown key 'hiden_size'; did you mean") != NULL,
          "%s", status_text());
    model_source_close(&m);

    open_source("below.yaml", &m);
    CHECK(strcmp(m.model_type, "llama") == 0);
    CHECK(m.hyper->get_int(m.hyper, "hidden_size", &i) == MT_OK && i == 16);
    CHECK(model_source_check_keys(&m) == MT_OK, "%s", status_text());
    model_source_close(&m);

    char path[256];
    snprintf(path, sizeof path, "%s/empty", folder);
    CHECK(model_source_open(path, &m) == MT_ERR_NOT_FOUND);
    CHECK(strstr(status_text(), "no config.json in this folder") != NULL, "%s", status_text());
    snprintf(path, sizeof path, "%s/empty/checkpoints", folder);
    CHECK(mkdir(path, 0755) == 0, " ");
    path[strlen(path) - strlen("/checkpoints")] = '\0';
    CHECK(model_source_open(path, &m) == MT_ERR_NOT_FOUND);
    CHECK(strstr(status_text(), "is a run folder; name one of") != NULL, "%s", status_text());
    CHECK(model_source_open(write_file("untyped.yaml", "hidden_size: 3\n"), &m) == MT_ERR_INVALID);
    CHECK(strstr(status_text(), "key 'model_type' is missing") != NULL, "%s", status_text());
    CHECK(model_source_open(write_file("untyped.yaml", "arch: a\nmodel_type: b\n"), &m) ==
          MT_ERR_INVALID);
    CHECK(!m.config);
}

/* What an architecture might ask of it. */
static void ask(const model_source *m)
{
    static const char *const keys[] = { "hidden_size",         "layer_types.0", "rope_scaling",
                                        "rope_scaling.factor", "eps",           "absent" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        m->hyper->has(m->hyper, keys[i]);
}

/* Which keys differ, as the message has it; "" for none. */
static void expect_differences(const char *then, const char *now, const char *want)
{
    model_source a = { 0 }, b = { 0 };
    char text[512];
    snprintf(text, sizeof text, "model_type: x\n%s", then);
    write_file("then.yaml", text);
    snprintf(text, sizeof text, "arch: x\n%s", now);
    write_file("now.yaml", text);
    open_source("then.yaml", &a);
    open_source("now.yaml", &b);
    ask(&b);
    mt_status status = model_source_check_same(&b, &a);
    CHECK((status == MT_OK) == (*want == '\0'), "%s: %s", now, status_text());
    if (status)
        CHECK(strstr(status_text(), "now.yaml:") && strstr(status_text(), want), "%s, expected %s",
              status_text(), want);
    model_source_close(&a);
    model_source_close(&b);
}

static void test_same_source(void)
{
    const char *then = "hidden_size: 64\neps: 1.0e-5\nlayer_types: [a, b]\n"
                       "rope_scaling: {factor: 8, note: z}\nother: 1\n";
    expect_differences(then, then, "");
    expect_differences(then,
                       "# order, numbers, what nobody asks for\nother: 2\neps: 0.00001\n"
                       "rope_scaling: {note: y, factor: 8.0}\nlayer_types: [a, b]\n"
                       "hidden_size: 64.0\neos_token_id: 3\ndtype: bfloat16\n",
                       "");
    expect_differences(then,
                       "hidden_size: 64\neps: 1.0e-5\nlayer_types: [a, c]\n"
                       "rope_scaling: {factor: 4}\n",
                       "'layer_types.1' is \"c\", but was \"b\"; 'rope_scaling.factor' "
                       "is 4, but was 8");
    expect_differences(then, "hidden_size: 64\nlayer_types: [a, b]\nrope_scaling: null\n",
                       "'rope_scaling' is null, but was a map of 2; 'eps' is not given, but was "
                       "1.0e-5");
    expect_differences("hidden_size: 64\n", "hidden_size: \"64\"\nabsent: true\n",
                       "'hidden_size' is \"64\", but was 64; 'absent' is true, but was not given");
}

int main(void)
{
    if (!mkdtemp(folder) || chdir(folder) != 0 || mkdir("hf", 0755) || mkdir("mm", 0755) ||
        mkdir("empty", 0755))
        return 1;
    write_file("model.yaml", "arch: llama\nhidden_size: 8\nhiden_size: 1\n");
    write_file("below.yaml", "model_type: llama\nconfig: {hidden_size: 16}\n");
    write_file("hf/config.json", "{\"model_type\": \"llama\", \"hidden_size\": 64, \"x\": 1}");
    write_file(
        "mm/config.json",
        "{\"model_type\": \"gemma3\", \"architectures\": [\"Gemma3ForConditionalGeneration\"],"
        " \"tie_word_embeddings\": true, \"vision_config\": {\"hidden_size\": 1},"
        " \"text_config\": {\"model_type\": \"gemma3_text\", \"hidden_size\": 32,"
        " \"rms_norm_eps\": 1e-05}}");
    RUN(test_defaults);
    RUN(test_values);
    RUN(test_wrong_values);
    RUN(test_model_path);
    RUN(test_overrides);
    RUN(test_schema);
    RUN(test_sources);
    RUN(test_same_source);
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) ? 1 : check_done();
}
