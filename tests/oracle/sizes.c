/* SPDX-License-Identifier: Apache-2.0
 *
 * Published Llamas, configured from their hyper-parameters: exact numbers of parameters, bytes of
 * the host store, FLOPs of a trained token. For every model type what its defaults are, and which
 * layers attend in a window.
 *
 *     oracle-sizes PLUGIN_DIR
 */
#include "../../core/base/status.h"
#include "../../core/host/store.h"
#include "../../core/manifest/config.h"
#include "../../plugins/host/registry.h"
#include "../check.h"

#include <math.h>

static const mt_arch *arch;

typedef struct release {
    const char *name;
    int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim;
    bool tied;
    int64_t params;
} release;

/* FLOPs of a trained token at `context` tokens a document: 6 a weight of every matrix product, and
 * 12 heads * head_dim a layer for each (query, key) pair, of which causality leaves half. */
static double flops(const release *r, double context)
{
    double q = (double)(r->heads * r->head_dim), kv = (double)(r->kv_heads * r->head_dim);
    double h = (double)r->hidden, i = (double)r->intermediate, l = (double)r->layers;
    double weights = l * (2 * h * q + 2 * h * kv + 3 * h * i) + (double)r->vocab * h;
    return 6 * weights + 12 * q * l * (context + 1) / 2;
}

static void check_release(const release *r)
{
    char text[1024];
    config *c = NULL;
    model *m = NULL;
    int n = snprintf(text, sizeof text,
                     "vocab_size: %lld\nhidden_size: %lld\nintermediate_size: %lld\n"
                     "num_hidden_layers: %lld\nnum_attention_heads: %lld\n"
                     "num_key_value_heads: %lld\nhead_dim: %lld\ntie_word_embeddings: %s\n",
                     (long long)r->vocab, (long long)r->hidden, (long long)r->intermediate,
                     (long long)r->layers, (long long)r->heads, (long long)r->kv_heads,
                     (long long)r->head_dim, r->tied ? "true" : "false");
    mt_status st = config_parse_yaml(text, (size_t)n, r->name, &c);
    if (!st)
        st = model_create(arch, config_section(c, ""), &m);
    CHECK(!st, "%s: %s", r->name, status_text());
    if (!st) {
        const mt_state_spec adamw[] = { { "m", MT_F32 }, { "v", MT_F32 } };
        int64_t bytes = store_bytes(m, adamw, 2, false);
        double want = flops(r, 8192), found = model_train_flops_per_token(m, 8192);
        CHECK(m->total_params == r->params, "%s: %lld parameters, expected %lld", r->name,
              (long long)m->total_params, (long long)r->params);
        CHECK(m->n_units == r->layers + 2, "%s: %d units", r->name, m->n_units);
        CHECK(bytes >= 12 * r->params && (double)bytes < 12.03 * (double)r->params,
              "%s: a store of %.4f bytes a parameter", r->name, (double)bytes / (double)r->params);
        CHECK(fabs(found - want) <= 1e-12 * want, "%s: %.12g FLOPs a token, expected %.12g",
              r->name, found, want);
    }
    model_destroy(m);
    config_destroy(c);
}

static void releases(void)
{
    static const release list[] = {
        { "Llama-2 7B", 32000, 4096, 11008, 32, 32, 32, 128, false, 6738415616 },
        { "Llama-2 13B", 32000, 5120, 13824, 40, 40, 40, 128, false, 13015864320 },
        { "Llama-2 70B", 32000, 8192, 28672, 80, 64, 8, 128, false, 68976648192 },
        { "Llama-3 8B", 128256, 4096, 14336, 32, 32, 8, 128, false, 8030261248 },
        { "Llama-3 70B", 128256, 8192, 28672, 80, 64, 8, 128, false, 70553706496 },
        { "Llama-3.1 405B", 128256, 16384, 53248, 126, 128, 8, 128, false, 405853388800 },
        { "Llama-3.2 1B", 128256, 2048, 8192, 16, 32, 8, 64, true, 1235814400 },
        { "Llama-3.2 3B", 128256, 3072, 8192, 28, 24, 8, 128, true, 3212749824 },
        { "TinyLlama-1.1B", 32000, 2048, 5632, 22, 32, 4, 64, false, 1100048384 },
        { "SmolLM2-135M", 49152, 576, 1536, 30, 9, 3, 64, true, 134515008 },
        { "SmolLM2-360M", 49152, 960, 2560, 32, 15, 5, 64, true, 361821120 },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        check_release(&list[i]);
}

static mt_status create(const char *type, const char *yaml, config **ret_config, model **ret)
{
    const void *table = NULL;
    mt_status st = registry_find(PLUGIN_ARCH, type, MT_ARCH_INTERFACE, &table, NULL);
    if (!st)
        st = config_parse_yaml(yaml, strlen(yaml), type, ret_config);
    if (!st)
        st = model_create(table, config_section(*ret_config, ""), ret);
    CHECK(!st, "%s: %s", type, status_text());
    return st;
}

/* Every key has the default of transformers' configuration class. */
static void defaults(void)
{
    static const struct {
        const char *type;
        int64_t params, vocab, positions;
    } list[] = {
        { "llama", 6738415616, 32000, 2048 },
        { "mistral", 7241732096, 32000, 131072 },
        { "ministral", 7241732096, 32000, 131072 },
        { "ministral3", 8489553920, 131072, 262144 },
        { "qwen2", 12049846272, 151936, 32768 },
        { "qwen3", 12049461248, 151936, 32768 },
        { "mixtral", 46702792704, 32000, 131072 },
        { "qwen2_moe", 14315784192, 151936, 32768 },
        { "qwen3_moe", 15350731776, 151936, 32768 },
        { "gemma", 8537680896, 256000, 8192 },
        { "gemma2", 2614341888, 256000, 8192 },
        { "gemma3_text", 2628658432, 262208, 131072 },
        { "gpt_oss", 116829156672, 201088, 131072 },
        { "deepseek", 6910365696, 102400, 2048 },
        { "deepseek_v2", 38612307968, 102400, 2048 },
        { "deepseek_v3", 671026419200, 129280, 4096 },
        { "qwen3_next", 79674391296, 151936, 32768 },
        { "qwen3_5_text", 8953803264, 248320, 32768 },
        { "qwen3_5", 8953803264, 248320, 32768 },
        { "qwen3_5_moe_text", 34660610688, 248320, 32768 },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char yaml[64];
        config *c = NULL;
        model *m = NULL;
        snprintf(yaml, sizeof yaml, "model_type: %s\n", list[i].type);
        if (!create(list[i].type, yaml, &c, &m)) {
            CHECK(m->total_params == list[i].params, "%s: %lld parameters, expected %lld",
                  list[i].type, (long long)m->total_params, (long long)list[i].params);
            CHECK(m->vocab == list[i].vocab && m->max_positions == list[i].positions,
                  "%s: vocabulary %lld, positions %lld", list[i].type, (long long)m->vocab,
                  (long long)m->max_positions);
        }
        model_destroy(m);
        config_destroy(c);
    }
}

/* The window of every layer: a digit for each of the first nine layers, 0: none, 1: `window`. */
static void windows(void)
{
    static const struct {
        const char *type, *yaml;
        int64_t window;
        const char *layers;
    } list[] = {
        { "llama", "model_type: llama", 1, "000000000" },
        { "mistral", "model_type: mistral", 4096, "111111111" },
        { "mistral", "{ model_type: mistral, sliding_window: null }", 1, "000000000" },
        { "mistral", "{ model_type: mistral, sliding_window: 77 }", 77, "111111111" },
        { "ministral",
          "{ model_type: ministral, num_hidden_layers: 3, layer_types: [sliding_attention, "
          "full_attention, sliding_attention] }",
          4096, "101" },
        { "ministral3", "model_type: ministral3", 1, "000000000" },
        { "qwen2", "{ model_type: qwen2, sliding_window: 77 }", 1, "000000000" },
        { "qwen2",
          "{ model_type: qwen2, use_sliding_window: true, sliding_window: 77, max_window_layers: "
          "4 }",
          77, "000011111" },
        { "qwen3", "{ model_type: qwen3, use_sliding_window: true, max_window_layers: 8 }", 4096,
          "000000001" },
        { "mixtral", "model_type: mixtral", 1, "000000000" },
        { "qwen2_moe", "{ model_type: qwen2_moe, use_sliding_window: true, max_window_layers: 6 }",
          4096, "101010000" },
        { "qwen2_moe", "{ model_type: qwen2_moe, sliding_window: 0 }", 1, "000000000" },
        { "qwen3_moe", "{ model_type: qwen3_moe, use_sliding_window: true }", 4096, "111111111" },
        { "gemma", "model_type: gemma", 1, "000000000" },
        { "gemma2", "model_type: gemma2", 4096, "101010101" },
        { "gemma3_text", "{ model_type: gemma3_text, sliding_window: 512 }", 512, "111110111" },
        { "gemma3_text", "{ model_type: gemma3_text, sliding_window_pattern: 3 }", 4096,
          "110110110" },
        { "gpt_oss", "model_type: gpt_oss", 128, "101010101" },
        { "gpt_oss",
          "{ model_type: gpt_oss, num_hidden_layers: 3, sliding_window: 5, layer_types: "
          "[full_attention, sliding_attention, sliding_attention] }",
          5, "011" },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        config *c = NULL;
        model *m = NULL;
        if (!create(list[i].type, list[i].yaml, &c, &m))
            for (int32_t k = 0; list[i].layers[k]; k++) {
                int64_t want = list[i].layers[k] == '1' ? list[i].window : 0;
                CHECK(m->units[k + 1].t->attn_window == want,
                      "%s: layer %d sees %lld keys, expected %lld", list[i].yaml, k,
                      (long long)m->units[k + 1].t->attn_window, (long long)want);
            }
        model_destroy(m);
        config_destroy(c);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s PLUGIN_DIR\n", argv[0]);
        return 2;
    }
    const char *dirs[] = { argv[1] };
    const void *table = NULL;
    mt_status st = registry_init(dirs, 1);
    if (!st)
        st = registry_find(PLUGIN_ARCH, "llama", MT_ARCH_INTERFACE, &table, NULL);
    if (st) {
        fprintf(stderr, "%s\n", status_text());
        return 1;
    }
    arch = table;
    RUN(releases);
    RUN(defaults);
    RUN(windows);
    registry_finish();
    return check_done();
}
