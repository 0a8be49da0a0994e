/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of conversations, by real tokenizers of each family's style: those that
 * apply_chat_template(tokenize=True) gives, and which of them are trained, by the offsets that
 * Hugging Face's tokenizers report.
 */
#include "fixtures.h"

static const mt_chat *interface;
static const mt_tokenizer *tokenizer;
static const char *fixtures;
static json_t *dialogues;

/* ---- a model's folder ------------------------------------------------------------------------ */

/* The style's tokenizer.json, and a tokenizer_config.json that names the format's BOS and EOS. */
static void make_folder(const json_t *fixture)
{
    char path[1024];
    size_t n = 0;
    snprintf(path, sizeof path, "%s/tokenizers/%s.json", fixtures,
             json_string_value(json_object_get(fixture, "tokenizer")));
    char *data = support_read(path, &n);
    support_write("tokenizer.json", data, n);
    free(data);
    json_t *roles = json_object();
    const char *bos = json_string_value(json_object_get(fixture, "bos"));
    if (bos[0])
        json_object_set_new(roles, "bos_token", json_string(bos));
    json_object_set(roles, "eos_token", json_object_get(fixture, "eos"));
    CHECK(json_dump_file(roles, "tokenizer_config.json", 0) == 0);
    json_decref(roles);
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* Where two arrays of tokens part. */
static int64_t parting(const json_t *expected, const int32_t *got, int64_t n)
{
    int64_t i = 0;
    while (i < n && i < (int64_t)json_array_size(expected) &&
           json_integer_value(json_array_get(expected, (size_t)i)) == got[i])
        i++;
    return i;
}

static int64_t wrong_mask(const json_t *expected, const uint8_t *got, int64_t n)
{
    int64_t from = 0;
    size_t k;
    json_t *range;
    json_array_foreach(expected, k, range)
    {
        int64_t first = json_integer_value(json_array_get(range, 0));
        int64_t last = json_integer_value(json_array_get(range, 1));
        for (; from < first; from++)
            if (got[from])
                return from;
        for (; from < last; from++)
            if (!got[from])
                return from;
    }
    for (; from < n; from++)
        if (got[from])
            return from;
    return -1;
}

static void check_case(const void *chat, const char *format, const json_t *c)
{
    static int32_t tokens[FIXTURE_TOKENS];
    static uint8_t trained[FIXTURE_TOKENS];
    mt_message messages[FIXTURE_MESSAGES];
    const json_t *ids = json_object_get(c, "ids"), *answers = json_object_get(c, "trained");
    int d = (int)json_integer_value(json_object_get(c, "d"));
    int64_t n_messages = fixture_messages(json_array_get(dialogues, (size_t)d), messages);
    bool prompt = json_is_true(json_object_get(c, "prompt"));
    if (!ids)
        return;
    int64_t n =
        interface->encode(chat, messages, n_messages, prompt, tokens, trained, FIXTURE_TOKENS);
    CHECK(n == (int64_t)json_array_size(ids), "%s, dialogue %d: %d tokens instead of %d", format, d,
          (int)n, (int)json_array_size(ids));
    if (n < 0 || n > FIXTURE_TOKENS)
        return;
    int64_t at = parting(ids, tokens, n);
    CHECK(at == n, "%s, dialogue %d: token %d", format, d, (int)at);
    if (answers && at == n) {
        at = wrong_mask(answers, trained, n);
        CHECK(at < 0, "%s, dialogue %d: token %d: %strained", format, d, (int)at,
              at >= 0 && trained[at] ? "" : "not ");
    }
}

static void all_formats(void)
{
    int compared = 0;
    for (int32_t i = 0; interface->formats[i]; i++) {
        const char *format = interface->formats[i];
        json_t *fixture = fixture_read(fixtures, format), *c;
        void *tokens = NULL, *chat = NULL;
        make_folder(fixture);
        mt_status st = tokenizer->open(".", &tokens);
        if (st == MT_OK)
            st = interface->open(format, tokenizer, tokens, &chat);
        CHECK(st == MT_OK, "%s: %s", format, status_text());
        if (st != MT_OK)
            exit(1);
        size_t k;
        json_array_foreach(json_object_get(fixture, "cases"), k, c) check_case(chat, format, c);
        compared += (int)k;
        interface->close(chat);
        tokenizer->close(tokens);
        json_decref(fixture);
    }
    CHECK(compared > 2000, "%d", compared);
}

int main(int argc, char **argv)
{
    char folder[64];
    if (argc != 4)
        return 2;
    interface = plugin_interface(argv[1], MT_CHAT_INTERFACE);
    tokenizer = plugin_interface(argv[2], MT_TOKENIZER_INTERFACE);
    fixtures = argv[3];
    dialogues = fixture_read(fixtures, "dialogues");
    support_enter(folder);
    RUN(all_formats);
    support_leave(folder);
    json_decref(dialogues);
    return check_done();
}
