/* SPDX-License-Identifier: Apache-2.0
 *
 * Which format a chat template is: by the hash of its text where it is one that was compared with
 * the format, else by the markers that stand in it.
 */
#include "chat.h"

#include <stdlib.h>
#include <xxhash.h>

/* XXH3 of the template's text without white space around it and with every line end, also one that
 * is spelt "\n", as one character. tests/oracle/make_chat_fixtures.py --hashes prints these lines,
 * after comparing each template with its format. */
static const struct known {
    uint64_t hash;
    const char *format;
} known[] = {
    { 0xa04f41d813a07b13, "chatml" },      /* test:teknium/OpenHermes-2.5-Mistral-7B */
    { 0x7b2b31b443f0df1c, "deepseek-r1" }, /* trl:deepseekv3 */
    { 0xf48e53fd1793f416, "deepseek-r1" }, /* trl:deepseek_r1_distill */
    { 0xf64ecff9c8ef587d, "deepseek-v2" }, /* test:DeepSeek-V2 */
    { 0x2c2e86beabccd2a4, "gemma" },       /* trl:gemma */
    { 0xa817dbca75477b99, "gemma" },       /* trl:gemma_training */
    { 0xb8025d2ed1726f6d, "gemma-3" },     /* trl:gemma3_training */
    { 0xd9c620dcaf86f38d, "gemma-3" },     /* trl:gemma3 */
    { 0x3c4f8e2875337322, "harmony" },     /* trl:gptoss */
    { 0xcb7c5112dfc4a3b0, "llama-2" },     /* json:llama2 */
    { 0x2ebf1bbd3466e452, "llama-3" },     /* trl:llama3_training */
    { 0x9799ad6e2dea0594, "llama-3" },     /* trl:llama3 */
    { 0xba28f0d41aa45594, "llama-3.1" },   /* trl:llama3_2 */
    { 0xda8ae4616203881a, "llama-3.1" },   /* trl:llama3_1 */
    { 0xa5d004210ebce758, "mistral-v0" },  /* test:mistralai/Mistral-7B-Instruct-v0.2 (NOTE */
    { 0xfa42ef759a4066ef, "mistral-v1" },  /* test:mistralai/Mistral-7B-Instruct-v0.2 (mistralai */
    { 0xda83cc145815d4a5, "mistral-v3" },  /* test:Mistral-Large-Instruct-2407 */
    { 0xa5438a4278f4c2ee, "mistral-v3-tekken" }, /* file:mistralai-Mistral-Nemo-Instruct-2407 */
    { 0x11381d1c62000f60, "mistral-v7" },        /* test:mistralai/Mistral-Large-Instruct-2411 */
    { 0xd5d943bd0bd9082f, "qwen2" },             /* own:qwen2 */
    { 0x5c3f1a53fb89828f, "qwen2.5" },           /* trl:qwen2_5_training */
    { 0xf9a29021c9d093ad, "qwen2.5" },           /* trl:qwen2_5 */
    { 0x4372a702009a6e39, "qwen3" },             /* trl:qwen3 */
    { 0x5a33498785c53d45, "qwen3" },             /* hfjs:Qwen/Qwen3-0.6B */
    { 0xa04c0d765923822c, "qwen3-instruct" },    /* trl:qwen3_instruct_2507 */
    { 0xa11e5c229baddc8f, "qwen3-instruct" },    /* trl:qwen3_instruct_2507_training */
    { 0xa69ea3477483e007, "qwen3.5" },           /* trl:qwen3_5_think */
    { 0xfb03378d1eea9c51, "qwen3.5" },           /* trl:qwen3_6 */
    { 0xa0b456ecee016ab3, "qwen3.5-nothink" },   /* trl:qwen3_5_nothink */
    { 0x1db34e9fc60441d8, "zephyr" },            /* hfjs:HuggingFaceH4/zephyr-7b-beta */
};

/* Looked for in order; the first whose markers are all there counts. */
static const struct markers {
    const char *format;
    const char *all[3];
} markers[] = {
    { "harmony", { "<|start|>", "<|channel|>", "<|message|>" } },
    { "qwen3.5", { "<|im_start|>", "<think>", "System message must be at the beginning." } },
    { "qwen3", { "<|im_start|>", "<think>", "reasoning_content" } },
    { "qwen2.5", { "<|im_start|>", "You are Qwen, created by Alibaba Cloud." } },
    { "qwen2", { "<|im_start|>", "You are a helpful assistant." } },
    { "chatml", { "<|im_start|>", "<|im_end|>" } },
    { "llama-3.1", { "<|start_header_id|>", "Cutting Knowledge Date" } },
    { "llama-3", { "<|start_header_id|>", "<|eot_id|>" } },
    { "gemma-3", { "<start_of_turn>", "first_user_prefix" } },
    { "gemma", { "<start_of_turn>", "<end_of_turn>" } },
    { "deepseek-r1", { "<｜User｜>", "<｜Assistant｜><think>" } },
    { "deepseek-v3", { "<｜User｜>", "<｜Assistant｜>" } },
    { "llama-2", { "[INST]", "<<SYS>>" } },
    { "mistral-v7", { "[SYSTEM_PROMPT] ", "[INST] " } },
    { "mistral-v7-tekken", { "[SYSTEM_PROMPT]", "[INST]" } },
    { "mistral-v1", { "[INST] ", " [/INST]" } },
    { "mistral-v3", { "[INST] ", "[/INST]" } },
    { "mistral-v3-tekken", { "[INST]", "[/INST]" } },
    { "zephyr", { "<|user|>\n", "<|assistant|>", "eos_token" } },
    { "zephyr", { "<|user|>\\n", "<|assistant|>", "eos_token" } },
    { "alpaca", { "### Instruction:", "### Response:", "eos_token" } },
};

static bool is_space(char ch)
{
    return ch == ' ' || ch == '\t' || ch == '\r' || ch == '\n';
}

/* 0 when out of memory: no template's hash. */
static uint64_t template_hash(const char *p, int64_t n)
{
    while (n > 0 && is_space(*p)) {
        p++;
        n--;
    }
    while (n > 0 && is_space(p[n - 1]))
        n--;
    char *text = malloc((size_t)n + 1);
    if (!text)
        return 0;
    size_t used = 0;
    for (int64_t i = 0; i < n; i++) {
        char next = i + 1 < n ? p[i + 1] : 0;
        bool line_end = (p[i] == '\r' && next == '\n') || (p[i] == '\\' && next == 'n');
        text[used++] = line_end ? '\n' : p[i];
        i += line_end;
    }
    uint64_t hash = XXH3_64bits(text, used);
    free(text);
    return hash;
}

const char *chat_identify(const char *jinja, int64_t n)
{
    uint64_t hash = template_hash(jinja, n);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].hash == hash)
            return known[i].format;
    return NULL;
}

static bool has(const char *p, int64_t n, const char *word)
{
    return !word || memmem(p, (size_t)n, word, strlen(word));
}

const char *chat_resembles(const char *jinja, int64_t n)
{
    for (size_t i = 0; i < sizeof markers / sizeof *markers; i++) {
        const struct markers *m = &markers[i];
        if (has(jinja, n, m->all[0]) && has(jinja, n, m->all[1]) && has(jinja, n, m->all[2]))
            return m->format;
    }
    return NULL;
}
