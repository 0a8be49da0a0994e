/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat formats against the models' own templates: the text, what is refused, and what is trained.
 * Over a toy tokenizer, so that a difference shows as text.
 */
#include "fixtures.h"
#include "toy.h"

enum { MAX_TOKENS = FIXTURE_TOKENS };

static const mt_chat *interface;
static const char *fixtures;
static json_t *dialogues;

/* An open format over a toy. */
typedef struct talk {
    toy toy;
    void *chat;
} talk;

static void must_open(talk *t, const char *format)
{
    mt_status st = interface->open(format, &toy_tokenizer, &t->toy, &t->chat);
    CHECK(st == MT_OK, "%s: %s", format, status_text());
    if (st != MT_OK)
        exit(1);
}

/* A conversation's text, and for each byte whether its token is trained. Below 0: refused. */
static int64_t text_of(const talk *t, const mt_message *messages, int64_t n, bool prompt,
                       char *ret_text, uint8_t *ret_trained)
{
    int32_t tokens[MAX_TOKENS];
    uint8_t trained[MAX_TOKENS];
    int64_t n_tokens = interface->encode(t->chat, messages, n, prompt, tokens, trained, MAX_TOKENS),
            at = 0;
    if (n_tokens < 0)
        return n_tokens;
    CHECK(n_tokens <= MAX_TOKENS);
    CHECK(interface->encode(t->chat, messages, n, prompt, NULL, NULL, 0) == n_tokens);
    for (int64_t i = 0; i < n_tokens; i++) {
        int64_t bytes =
            toy_tokenizer.decode(&t->toy, &tokens[i], 1, 0, ret_text + at, MAX_TOKENS * 4 - at);
        memset(ret_trained + at, trained[i], (size_t)bytes);
        at += bytes;
    }
    return at;
}

/* Puts [ and ] around what is trained. */
static const char *marked(const char *text, const uint8_t *trained, int64_t n)
{
    static char out[MAX_TOKENS * 5];
    size_t at = 0;
    for (int64_t i = 0; i <= n; i++) {
        bool before = i > 0 && trained[i - 1], now = i < n && trained[i];
        if (before != now)
            out[at++] = now ? '[' : ']';
        if (i < n)
            out[at++] = text[i];
    }
    out[at] = 0;
    return out;
}

/* ---- against the templates ------------------------------------------------------------------- */

/* Assistant turns that are trained, by the template's own marks. */
static void expect_answers(const json_t *c, uint8_t *ret, int64_t n)
{
    size_t i;
    json_t *a;
    memset(ret, 0, (size_t)n);
    json_array_foreach(json_object_get(c, "answers"), i, a)
    {
        json_int_t begin = json_integer_value(json_array_get(a, 0));
        json_int_t end = json_integer_value(json_array_get(a, 1));
        memset(ret + begin, 1, (size_t)(end - begin));
    }
}

static void check_case(const talk *t, const char *format, const json_t *c)
{
    static char text[MAX_TOKENS * 4];
    static uint8_t trained[MAX_TOKENS * 4], expected[MAX_TOKENS * 4];
    mt_message messages[FIXTURE_MESSAGES];
    json_int_t d = json_integer_value(json_object_get(c, "d"));
    int64_t n = fixture_messages(json_array_get(dialogues, (size_t)d), messages);
    bool prompt = json_is_true(json_object_get(c, "prompt"));
    const json_t *wanted = json_object_get(c, "text");
    int64_t bytes = text_of(t, messages, n, prompt, text, trained);
    if (!wanted) {
        CHECK(bytes < 0, "%s, dialogue %d: the template refuses it, here it is\n%.*s", format,
              (int)d, (int)bytes, text);
        return;
    }
    CHECK(bytes >= 0, "%s, dialogue %d: %s", format, (int)d, status_text());
    if (bytes < 0)
        return;
    bool same = bytes == (int64_t)json_string_length(wanted) &&
                memcmp(text, json_string_value(wanted), (size_t)bytes) == 0;
    CHECK(same, "%s, dialogue %d:\n%.*s\ninstead of\n%s", format, (int)d, (int)bytes, text,
          json_string_value(wanted));
    if (same && json_object_get(c, "answers")) {
        expect_answers(c, expected, bytes);
        CHECK(memcmp(trained, expected, (size_t)bytes) == 0, "%s, dialogue %d: trained:\n%s",
              format, (int)d, marked(text, trained, bytes));
    }
}

static void templates(void)
{
    for (int32_t i = 0; interface->formats[i]; i++) {
        const char *format = interface->formats[i];
        json_t *fixture = fixture_read(fixtures, format), *c;
        talk t = { .toy = { .bos = json_string_value(json_object_get(fixture, "bos")),
                            .eos = json_string_value(json_object_get(fixture, "eos")) } };
        must_open(&t, format);
        size_t k;
        json_array_foreach(json_object_get(fixture, "cases"), k, c) check_case(&t, format, c);
        CHECK(k > 100);
        interface->close(t.chat);
        json_decref(fixture);
    }
}

/* ---- what is trained, by hand ---------------------------------------------------------------- */

static void check_marked(const char *format, const char *bos, const char *eos, const char *expected)
{
    static char text[MAX_TOKENS * 4];
    static uint8_t trained[MAX_TOKENS * 4];
    const mt_message two[] = { { "user", "A", 1, NULL, 0, false },
                               { "assistant", "B", 1, NULL, 0, true },
                               { "user", "C", 1, NULL, 0, false },
                               { "assistant", "D", 1, NULL, 0, true } };
    talk t = { .toy = { .bos = bos, .eos = eos } };
    must_open(&t, format);
    int64_t n = text_of(&t, two, 4, false, text, trained);
    const char *got = marked(text, trained, n > 0 ? n : 0);
    CHECK(strcmp(got, expected) == 0, "%s:\n%s\ninstead of\n%s", format, got, expected);
    interface->close(t.chat);
}

static void trained_by_hand(void)
{
    check_marked("chatml", "", "",
                 "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[B<|im_end|>]\n"
                 "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n[D<|im_end|>]\n");
    check_marked("qwen3", "", "<|im_end|>",
                 "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[B<|im_end|>]\n"
                 "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
                 "[<think>\n\n</think>\n\nD<|im_end|>]\n");
    check_marked("qwen3.5", "", "<|im_end|>",
                 "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[B<|im_end|>]\n"
                 "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
                 "<think>\n[\n</think>\n\nD<|im_end|>]\n");
    check_marked("qwen3.5-nothink", "", "<|im_end|>",
                 "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[B<|im_end|>]\n"
                 "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
                 "<think>\n\n</think>\n\n[D<|im_end|>]\n");
    check_marked("llama-2", "<s>", "</s>",
                 "<s>[INST] A [/INST][ B </s>]<s>[INST] C [/INST][ D </s>]");
    check_marked("mistral-v1", "<s>", "</s>",
                 "<s> [INST] A [/INST][ B</s>] [INST] C [/INST][ D</s>]");
    check_marked("mistral-v3-tekken", "<s>", "</s>",
                 "<s>[INST]A[/INST][B</s>][INST]C[/INST][D</s>]");
    check_marked("deepseek-v2", "<s>", "</s>",
                 "<s>User: A\n\nAssistant:[ B</s>]User: C\n\nAssistant:[ D</s>]");
    check_marked("harmony", "<|startoftext|>", "<|return|>",
                 "<|start|>system<|message|>You are ChatGPT, a large language model trained by "
                 "OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\n"
                 "Reasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must "
                 "be included for every message.<|end|><|start|>user<|message|>A<|end|>"
                 "<|start|>assistant[<|channel|>final<|message|>B<|end|>]"
                 "<|start|>user<|message|>C<|end|>"
                 "<|start|>assistant[<|channel|>final<|message|>D<|return|>]");
    check_marked("alpaca", "<s>", "</s>",
                 "<s>Below is an instruction that describes a task. Write a response that "
                 "appropriately completes the request.\n\n### Instruction:\nA\n\n### Response:\n"
                 "[B</s>]\n\n### Instruction:\nC\n\n### Response:\n[D</s>]\n\n");
    check_marked("plain", "<s>", "</s>", "<s>A[B</s>]C[D</s>]");
}

static void turns_that_are_not_trained(void)
{
    static char text[MAX_TOKENS * 4];
    static uint8_t trained[MAX_TOKENS * 4];
    const mt_message two[] = { { "user", "A", 1, NULL, 0, false },
                               { "assistant", "B", 1, NULL, 0, false },
                               { "user", "C", 1, NULL, 0, false },
                               { "assistant", "D", 1, NULL, 0, true } };
    talk t = { .toy = { .bos = "<s>", .eos = "</s>" } };
    must_open(&t, "plain");
    int64_t n = text_of(&t, two, 4, false, text, trained);
    CHECK(strcmp(marked(text, trained, n), "<s>AB</s>C[D</s>]") == 0, "%s",
          marked(text, trained, n));
    interface->close(t.chat);
}

/* A token that holds the end of what is given and the start of the answer is given. */
static void straddling_token(void)
{
    static char text[MAX_TOKENS * 4];
    static uint8_t trained[MAX_TOKENS * 4];
    static const char *const words[] = { "\n\n", "assistant", " yes", "\nye", NULL };
    const struct {
        const char *answer, *expected;
    } cases[] = {
        { "yes", "<|im_start|>assistant\nye[s<|im_end|>]\n" },
        { "\nno", "<|im_start|>assistant\n\n[no<|im_end|>]\n" },
        { " yes", "<|im_start|>assistant\n[ yes<|im_end|>]\n" },
        { "", "<|im_start|>assistant\n[<|im_end|>]\n" },
    };
    talk t = { .toy = { .bos = "", .eos = "", .words = words } };
    must_open(&t, "chatml");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mt_message m = {
            "assistant", cases[i].answer, (int64_t)strlen(cases[i].answer), NULL, 0, true
        };
        int64_t n = text_of(&t, &m, 1, false, text, trained);
        CHECK(strcmp(marked(text, trained, n), cases[i].expected) == 0, "%s",
              marked(text, trained, n));
    }
    interface->close(t.chat);
}

/* As a normalizer may write one character as many: every z is five tokens. */
static int64_t encode_fivefold(const void *self, const char *text, int64_t n, uint32_t flags,
                               int32_t *ret_tokens, int64_t capacity)
{
    int32_t ids[MAX_TOKENS];
    int64_t n_ids = toy_tokenizer.encode(self, text, n, flags, ids, MAX_TOKENS), count = 0;
    for (int64_t i = 0; i < n_ids; i++)
        for (int k = 0; k < (ids[i] == 'z' ? 5 : 1); k++, count++)
            if (count < capacity)
                ret_tokens[count] = ids[i];
    return count;
}

static void more_tokens_than_bytes(void)
{
    enum { LETTERS = 200 };
    mt_tokenizer fivefold = toy_tokenizer;
    fivefold.encode = encode_fivefold;
    const toy words = { .bos = "", .eos = "" };
    char text[LETTERS + 1] = { 0 };
    int32_t ids[MAX_TOKENS];
    uint8_t trained[MAX_TOKENS];
    memset(text, 'z', LETTERS);
    void *chat = NULL;
    CHECK(interface->open("chatml", &fivefold, &words, &chat) == MT_OK, "%s", status_text());
    const mt_message turns[] = {
        { .role = "user", .content = text, .n_content = LETTERS, .trained = true },
        { .role = "assistant", .content = text, .n_content = LETTERS, .trained = true },
    };
    int64_t n = interface->encode(chat, turns, 2, false, ids, trained, MAX_TOKENS), marks = 0;
    CHECK(n > 2 * 5 * LETTERS && n <= MAX_TOKENS, "%d tokens: %s", (int)n, status_text());
    for (int64_t i = 0; i < n; i++)
        marks += trained[i] && ids[i] == 'z';
    CHECK(marks == 5 * LETTERS, "%d trained", (int)marks);
    interface->close(chat);
}

/* ---- reading answers ------------------------------------------------------------------------- */

static void check_parsed(const char *format, const char *text, const char *reasoning,
                         const char *content)
{
    talk t = { .toy = { .bos = "<s>", .eos = "</s>" } };
    mt_message m;
    must_open(&t, format);
    interface->parse(t.chat, text, (int64_t)strlen(text), &m);
    bool same = m.n_content == (int64_t)strlen(content) &&
                memcmp(m.content, content, strlen(content)) == 0 && !m.reasoning == !reasoning;
    if (same && reasoning)
        same = m.n_reasoning == (int64_t)strlen(reasoning) &&
               memcmp(m.reasoning, reasoning, strlen(reasoning)) == 0;
    CHECK(same, "%s '%s': reasoning '%.*s', content '%.*s'", format, text, (int)m.n_reasoning,
          m.reasoning ? m.reasoning : "", (int)m.n_content, m.content);
    interface->close(t.chat);
}

static void answers(void)
{
    check_parsed("chatml", "Hello", NULL, "Hello");
    check_parsed("chatml", "", NULL, "");
    check_parsed("llama-2", " Hello ", NULL, "Hello");
    check_parsed("llama-2", "Hello", NULL, "Hello");
    check_parsed("mistral-v1", " Hello", NULL, "Hello");
    check_parsed("deepseek-v2", " Hello", NULL, "Hello");
    check_parsed("qwen3", "Hello", NULL, "Hello");
    check_parsed("qwen3", "<think>\n\n</think>\n\nHello", "", "Hello");
    check_parsed("qwen3", "<think>\nhm\n</think>\n\nHello", "hm", "Hello");
    check_parsed("qwen3.5", "hm\n</think>\n\nHello", "hm", "Hello");
    check_parsed("qwen3.5-nothink", "Hello", NULL, "Hello");
    check_parsed("deepseek-r1", "hm\n</think>\n\nHello", "hm", "Hello");
    check_parsed("harmony", "<|channel|>final<|message|>Hello", NULL, "Hello");
    check_parsed("harmony",
                 "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
                 "<|message|>Hello",
                 "hm", "Hello");
}

/* What is shown while an answer grows never has to be taken back. */
static void answers_that_grow(void)
{
    static const char text[] = "<|channel|>analysis<|message|>a<|end|>b<|end|><|start|>assistant"
                               "<|channel|>final<|message|>Hello <|end|> all";
    talk t = { .toy = { .bos = "", .eos = "<|return|>" } };
    int64_t reasoning = 0, content = 0;
    must_open(&t, "harmony");
    for (int64_t n = 0; n < (int64_t)sizeof text; n++) {
        mt_message m;
        interface->parse(t.chat, text, n, &m);
        CHECK(m.n_reasoning >= reasoning && m.n_content >= content, "at byte %d", (int)n);
        reasoning = m.n_reasoning;
        content = m.n_content;
    }
    CHECK(reasoning == 9 && content == 17, "%d %d", (int)reasoning, (int)content);
    interface->close(t.chat);
}

/* ---- opening, stops, refusals ---------------------------------------------------------------- */

static void stops(void)
{
    const struct {
        const char *format, *eos, *stop[3];
    } cases[] = {
        { "chatml", "<eos>", { "<|im_end|>", "<eos>" } },
        { "qwen3", "<|im_end|>", { "<|im_end|>" } },
        { "llama-3", "<eos>", { "<|eot_id|>", "<eos>" } },
        { "gemma", "<eos>", { "<end_of_turn>", "<eos>" } },
        { "mistral-v3", "</s>", { "</s>" } },
        { "harmony", "<|return|>", { "<|return|>", "<|call|>" } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        talk t = { .toy = { .bos = "<s>", .eos = cases[i].eos } };
        must_open(&t, cases[i].format);
        int64_t n = 0, wanted = 0;
        const int32_t *ids = interface->stops(t.chat, &n);
        for (; wanted < 3 && cases[i].stop[wanted]; wanted++) {
            const char *text = cases[i].stop[wanted];
            int32_t id = toy_tokenizer.token_id(&t.toy, text, (int64_t)strlen(text));
            CHECK(wanted < n && ids[wanted] == id, "%s: stop %d", cases[i].format, (int)wanted);
        }
        CHECK(n == wanted, "%s: %d stops", cases[i].format, (int)n);
        interface->close(t.chat);
    }
}

static void check_refused(mt_status st, const char *words)
{
    CHECK(st < 0 && strstr(status_text(), words), "%d: '%s' has no '%s'", st, status_text(), words);
}

static void refusals(void)
{
    toy none = { .bos = "", .eos = "" };
    void *chat = NULL;
    check_refused(interface->open("qwen9", &toy_tokenizer, &none, &chat), "unknown chat format");
    check_refused(interface->open("plain", &toy_tokenizer, &none, &chat), "end-of-text");
    CHECK(!chat);
    talk t = { .toy = { .bos = "<bos>", .eos = "<eos>" } };
    must_open(&t, "gemma");
    const mt_message system = { "system", "x", 1, NULL, 0, false };
    const mt_message robot = { "robot", "x", 1, NULL, 0, false };
    const mt_message answer = { "assistant", "x", 1, NULL, 0, true };
    const mt_message tool = { "tool", "x", 1, NULL, 0, false };
    int32_t ids[8];
    check_refused((mt_status)interface->encode(t.chat, &system, 1, false, ids, NULL, 8),
                  "no system");
    check_refused((mt_status)interface->encode(t.chat, &robot, 1, false, ids, NULL, 8), "'robot'");
    check_refused((mt_status)interface->encode(t.chat, &answer, 1, false, ids, NULL, 8),
                  "take turns");
    check_refused((mt_status)interface->encode(t.chat, &tool, 1, false, ids, NULL, 8), "tool");
    check_refused((mt_status)interface->encode(t.chat, &tool, 0, false, ids, NULL, 8),
                  "without messages");
    interface->close(t.chat);
}

static void fingerprints(void)
{
    uint64_t seen[64];
    int32_t n = 0;
    for (; interface->formats[n] && n < 64; n++) {
        talk t = { .toy = { .bos = "<s>", .eos = "</s>" } };
        must_open(&t, interface->formats[n]);
        seen[n] = interface->fingerprint(t.chat);
        for (int32_t k = 0; k < n; k++)
            CHECK(seen[k] != seen[n], "%s and %s", interface->formats[k], interface->formats[n]);
        interface->close(t.chat);
    }
}

/* ---- the user's own ------------------------------------------------------------------------- */

static void own_format(void)
{
    static char text[MAX_TOKENS * 4];
    static uint8_t trained[MAX_TOKENS * 4];
    const char *const pairs[] = { "begin",
                                  "{bos}",
                                  "system",
                                  "{content}\n",
                                  "user",
                                  "Q: {content} {\"x\": {}}\n",
                                  "assistant",
                                  "A: {content}<|im_end|>\n",
                                  "generation_prompt",
                                  "A:",
                                  "end_of_turn",
                                  "<|im_end|>",
                                  NULL };
    support_config config = support_make_config(pairs);
    const mt_message three[] = { { "system", "S", 1, NULL, 0, false },
                                 { "user", "A", 1, NULL, 0, false },
                                 { "assistant", "B", 1, NULL, 0, true } };
    talk t = { .toy = { .bos = "<s>", .eos = "" } };
    mt_status st = interface->open_custom(&config.base, &toy_tokenizer, &t.toy, &t.chat);
    CHECK(st == MT_OK, "%s", status_text());
    if (st != MT_OK)
        return;
    int64_t n = text_of(&t, three, 3, false, text, trained);
    CHECK(strcmp(marked(text, trained, n), "<s>S\nQ: A {\"x\": {}}\nA:[ B<|im_end|>]\n") == 0, "%s",
          marked(text, trained, n));
    n = text_of(&t, three, 2, true, text, trained);
    static const char prompt[] = "<s>S\nQ: A {\"x\": {}}\nA:";
    CHECK(n == sizeof prompt - 1 && memcmp(text, prompt, sizeof prompt - 1) == 0, "%.*s", (int)n,
          text);
    interface->close(t.chat);
}

static void check_own_refused(const char *key, const char *value, const char *words)
{
    const char *pairs[] = { key, value, "user", "{content}", "assistant", "{content}{eos}", NULL };
    support_config config = support_make_config(pairs);
    toy t = { .bos = "<s>", .eos = "</s>" };
    void *chat = NULL;
    check_refused(interface->open_custom(&config.base, &toy_tokenizer, &t, &chat), words);
    interface->close(chat);
}

static void own_format_refused(void)
{
    check_own_refused("system", "no content", "{content}");
    check_own_refused("end_of_turn", "<|im_end|>", "never learn to end");
    check_own_refused("generation_prompt", "A:", "is not how 'assistant' begins");
    check_own_refused("user", "Q: {contnet}\n",
                      "has '{contnet}', which is no placeholder; did you mean '{content}'? There "
                      "are {content}, {bos} and {eos}");
    check_own_refused("user", "{content}{eos_token}",
                      "'{eos_token}', which is no placeholder; did "
                      "you mean '{eos}'?");
    check_own_refused("assistant", "{Content}{eos}", "did you mean '{content}'?");
    check_own_refused("system", "{message}", "has '{message}', which is no placeholder; there are");
    check_own_refused("system", "{ content }", "has '{ content }', which is no placeholder; did");
    check_own_refused("system", "{{content}}", "has '{{content}}', which is no placeholder; did");
    check_own_refused("system", "{{ message['content'] }}", "has '{{ message['content'] }}'");
    check_own_refused("system", "{% if x %}{content}", "has '{% if x %}'");
    check_own_refused("begin", "{boss}", "did you mean '{bos}'? There are {bos} and {eos}");
    check_own_refused("begin", "{content}", "has '{content}', which is no placeholder; there are");
}

/* ---- which format a template is -------------------------------------------------------------- */

static void resemblance(void)
{
    const struct {
        const char *jinja, *format;
    } cases[] = {
        { "{{ '<|im_start|>' + m.role }}...<|im_end|>", "chatml" },
        { "<|im_start|> <think> message.reasoning_content", "qwen3" },
        { "<|start_header_id|> Cutting Knowledge Date", "llama-3.1" },
        { "<|start_header_id|> <|eot_id|>", "llama-3" },
        { "<start_of_turn> <end_of_turn>", "gemma" },
        { "<start_of_turn> first_user_prefix", "gemma-3" },
        { "[INST] <<SYS>>", "llama-2" },
        { "'[INST]' + x + '[/INST]'", "mistral-v3-tekken" },
        { "'[SYSTEM_PROMPT]' '[INST]'", "mistral-v7-tekken" },
        { "'[SYSTEM_PROMPT] ' '[INST] '", "mistral-v7" },
        { "<｜User｜> '<｜Assistant｜>'", "deepseek-v3" },
        { "<|start|>assistant<|channel|>final<|message|>", "harmony" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *jinja = cases[i].jinja;
        const char *got = interface->resembles(jinja, (int64_t)strlen(jinja));
        CHECK(got && strcmp(got, cases[i].format) == 0, "%s: %s", jinja, got ? got : "(none)");
        CHECK(!interface->identify(jinja, (int64_t)strlen(jinja)), "%s", jinja);
    }
    CHECK(!interface->resembles("{{ messages }}", 14));
}

/* A template is known whatever its line ends and the white space around it. */
static void known_template(void)
{
    static const char jinja[] =
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\\n' }}{% endif %}";
    char padded[1024];
    const char *got = interface->identify(jinja, sizeof jinja - 1);
    CHECK(got && strcmp(got, "chatml") == 0, "%s", got ? got : "(unknown)");
    int n = snprintf(padded, sizeof padded, " \r\n%s\r\n\n", jinja);
    got = interface->identify(padded, n);
    CHECK(got && strcmp(got, "chatml") == 0, "%s", got ? got : "(unknown)");
    CHECK(!interface->identify(jinja, sizeof jinja - 3));
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    interface = plugin_interface(argv[1], MT_CHAT_INTERFACE);
    fixtures = argv[2];
    dialogues = fixture_read(fixtures, "dialogues");
    RUN(templates);
    RUN(trained_by_hand);
    RUN(turns_that_are_not_trained);
    RUN(straddling_token);
    RUN(more_tokens_than_bytes);
    RUN(answers);
    RUN(answers_that_grow);
    RUN(stops);
    RUN(refusals);
    RUN(fingerprints);
    RUN(own_format);
    RUN(own_format_refused);
    RUN(resemblance);
    RUN(known_template);
    json_decref(dialogues);
    return check_done();
}
