/* SPDX-License-Identifier: Apache-2.0
 *
 * The documents plugin: formats, columns, labels, cuts, malformed records and messages. What
 * streams and caches do is in test_documents_stream.c.
 */
#include "documents.h"

enum { LONG = 1000 };

/* ---- formats -------------------------------------------------------------------------------- */

static void formats(void)
{
    static const struct {
        const char *line, *want;
    } cases[] = {
        { "{\"text\": \"hi\"}", "<s>[hi</s>]" },
        { "{\"text\": \"h\\u0000\\u00e4\"}", NULL }, /* below */
        { "{\"prompt\": \"2+2=\", \"completion\": \"4\"}", "<s>2+2=[4</s>]" },
        { "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"},"
          "{\"role\": \"assistant\", \"content\": \"yo\"}]}",
          "<s>{user\nhi}\n{assistant\n[yo}]\n" },
        { "{\"messages\": [{\"role\": \"system\", \"content\": \"be\"},"
          "{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"h\"},"
          "{\"type\": \"text\", \"text\": \"i\"}]},"
          "{\"role\": \"assistant\", \"content\": \"yo\", \"reasoning_content\": \"hm\"}]}",
          "<s>{system\nbe}\n{user\nhi}\n{assistant\n[hm|yo}]\n" },
        { "{\"conversations\": [{\"from\": \"human\", \"value\": \"hi\"},"
          "{\"from\": \"gpt\", \"value\": \"yo\"}], \"system\": \"be\"}",
          "<s>{system\nbe}\n{user\nhi}\n{assistant\n[yo}]\n" },
        { "{\"conversations\": [{\"role\": \"user\", \"content\": \"hi\"},"
          "{\"role\": \"assistant\", \"content\": \"yo\"}]}",
          "<s>{user\nhi}\n{assistant\n[yo}]\n" },
        { "{\"instruction\": \"do\", \"output\": \"ok\"}", "<s>{user\ndo}\n{assistant\n[ok}]\n" },
        { "{\"instruction\": \"do\", \"input\": \"it\", \"output\": \"ok\", \"system\": \"be\","
          "\"history\": [[\"q\", \"r\"]]}",
          "<s>{system\nbe}\n{user\nq}\n{assistant\n[r}]\n{user\ndo\nit}\n{assistant\n[ok}]\n" },
        { "{\"instruction\": \"do\", \"input\": \"\", \"output\": \"ok\", \"history\": null}",
          "<s>{user\ndo}\n{assistant\n[ok}]\n" },
        { "{\"prompt\": [{\"role\": \"user\", \"content\": \"hi\"}],"
          "\"completion\": [{\"role\": \"assistant\", \"content\": \"yo\"}]}",
          "<s>{user\nhi}\n{assistant\n[yo}]\n" },
        { "{\"input_ids\": [104, 105, 106]}", "h[ij]" },
        { "{\"input_ids\": [104, 105, 106, 107], \"labels\": [-100, -100, 106, -100]}", "hi[j]k" },
        { "{\"input_ids\": [257, 257, 104, 105, 257], \"attention_mask\": [0, 0, 1, 1, 1]}",
          "h[i</s>]" },
    };
    support_enter(folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text("a.jsonl", cases[i].line);
        const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
        if (cases[i].want) {
            expect(&c, LONG, cases[i].want);
            continue;
        }
        void *s = must_open(&c, MT_SPLIT_TRAIN, LONG, 0, 1);
        static const int32_t ids[] = { TOY_BEGIN, 'h', 0, 0xc3, 0xa4, TOY_END };
        mt_document doc;
        CHECK(d->next(s, &doc) == MT_OK && doc.n == 6, "%d", (int)doc.n);
        CHECK(memcmp(doc.tokens, ids, sizeof ids) == 0, "NUL and UTF-8 are text");
        d->close(s);
    }
    support_leave(folder);
}

static void arrays_and_lines(void)
{
    static const char *const same[] = {
        "{\"text\": \"x\"}\n{\"text\": \"y\"}\n",
        "{\"text\": \"x\"}\r\n\r\n{\"text\": \"y\"}",
        "\xef\xbb\xbf{\"text\": \"x\"}\n\n   \n{\"text\": \"y\"}\n\n",
        "[{\"text\": \"x\"}, {\"text\": \"y\"}]",
        "\n [ {\n \"text\": \"x\"\n}\n,\n{\"text\": \"y\", \"z\": [\"]}\\\"\", {}]}\n]\n",
    };
    support_enter(folder);
    const support_config c = SUPPORT_CONFIG("files", "a.json", IN_ORDER);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        write_text("a.json", same[i]);
        expect(&c, LONG, "<s>[x</s>] / <s>[y</s>]");
    }
    write_text("a.json", "[{\"text\": \"x\"} {\"text\": \"y\"}]");
    refuse(&c, "a.json:1: expected ',' or ']'");
    write_text("a.json", "[{\"text\": \"x\"},\n{\"text\": \"y\"}");
    refuse(&c, "a.json:2: the file ends inside its array");
    write_text("a.json", "[{\"text\": \"x\"}, {\"text\": \"y}]");
    refuse(&c, "a.json:1: the file ends inside its array");
    write_text("a.json", "[{\"text\": \"x\"},\n]");
    refuse(&c, "a.json:2: expected an element of the array, found ']'");
    write_text("a.json", "[{\"text\": \"x\"},, {\"text\": \"y\"}]");
    refuse(&c, "a.json:1: expected an element of the array, found ','");
    write_text("a.json", "[, {\"text\": \"x\"}]");
    refuse(&c, "a.json:1: expected an element of the array, found ','");
    write_text("a.json", "[{\"text\": \"x\"}]\nmore");
    refuse(&c, "a.json:2: text after the end");
    support_leave(folder);
}

static void text_files(void)
{
    support_enter(folder);
    write_text("a.txt", "x\n\ny\nz\n");
    write_text("b.txt", "\xef\xbb\xbfu<|end|>v");
    support_config c = SUPPORT_CONFIG("files.0", "a.txt", "files.1", "b.txt", IN_ORDER);
    expect(&c, LONG, "<s>[x\n\ny\nz\n</s>] / <s>[u<|end|>v</s>]");
    c = SUPPORT_CONFIG("files", "a.txt", IN_ORDER, "document_separator", "blank_line");
    expect(&c, LONG, "<s>[x\n</s>] / <s>[y\nz\n</s>]");
    c = SUPPORT_CONFIG("files", "b.txt", IN_ORDER, "document_separator", "<|end|>");
    expect(&c, LONG, "<s>[u</s>] / <s>[v</s>]");
    write_text("c.jsonl", "{\"text\": \"w\"}");
    c = SUPPORT_CONFIG("files.0", "b.txt", "files.1", "c.jsonl", IN_ORDER);
    expect(&c, LONG, "<s>[u<|end|>v</s>] / <s>[w</s>]");
    support_leave(folder);
}

static void columns(void)
{
    support_enter(folder);
    write_text("a.jsonl", "{\"question\": \"2+2=\", \"answer\": \"4\", \"prompt\": \"no\"}");
    support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "columns.prompt", "question",
                                      "columns.completion", "answer");
    expect(&c, LONG, "<s>2+2=[4</s>]");
    write_text("a.jsonl", "{\"dialog\": [{\"who\": \"me\", \"says\": \"hi\"},"
                          "{\"who\": \"it\", \"says\": \"yo\"}]}");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "columns.conversations", "dialog",
                       "columns.role", "who", "columns.content", "says", "columns.user", "me",
                       "columns.assistant", "it");
    expect(&c, LONG, "<s>{user\nhi}\n{assistant\n[yo}]\n");
    /* A format that is asked for is not guessed. */
    write_text("a.jsonl", "{\"messages\": [], \"text\": \"hi\"}");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "format", "text");
    expect(&c, LONG, "<s>[hi</s>]");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "format", "chat");
    refuse(&c, "is 'chat'; expected one of auto, messages, sharegpt, alpaca");
    write_text("a.jsonl", "{\"foo\": 1, \"bar\": 2}");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    refuse(&c, "the records have the keys foo, bar, which is no format");
    support_leave(folder);
}

/* ---- labels --------------------------------------------------------------------------------- */

#define DIALOGUE                                                                                   \
    "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"},"                                    \
    "{\"role\": \"assistant\", \"content\": \"r\", \"weight\": 0},"                                \
    "{\"role\": \"user\", \"content\": \"s\"},{\"role\": \"assistant\", \"content\": \"t\"},"      \
    "{\"role\": \"user\", \"content\": \"u\"},"                                                    \
    "{\"role\": \"assistant\", \"content\": \"v\", \"weight\": 1}]}\n"

static void what_is_trained(void)
{
    support_enter(folder);
    write_text("a.jsonl", DIALOGUE);
    support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    expect(&c, LONG,
           "<s>{user\nq}\n{assistant\nr}\n{user\ns}\n{assistant\n[t}]\n{user\nu}\n{assistant\n"
           "[v}]\n");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "train_on", "last");
    expect(&c, LONG,
           "<s>{user\nq}\n{assistant\nr}\n{user\ns}\n{assistant\nt}\n{user\nu}\n{assistant\n"
           "[v}]\n");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "train_on", "all");
    expect(&c, LONG,
           "<s>[{user\nq}\n{assistant\nr}\n{user\ns}\n{assistant\nt}\n{user\nu}\n{assistant\n"
           "v}\n]");
    write_text("a.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}");
    expect(&c, LONG, "<s>[xy</s>]");
    write_text("a.jsonl", "{\"text\": \"y\"}");
    refuse(&c, "there are none");
    support_leave(folder);
}

/* Prompt and completion are tokenised together; a token across their border is the prompt's. */
static void borders_of_prompts(void)
{
    static const struct {
        const char *prompt, *completion, *want;
    } cases[] = {
        { "xa", "by", "<s>xab[y</s>]" },     { "xab", "y", "<s>xab[y</s>]" },
        { "x", "aby", "<s>x[aby</s>]" },     { "", "y", "<s>[y</s>]" },
        { "a", "b", "<s>ab[</s>]" },         { "aba", "bab", "<s>abab[ab</s>]" },
        { "x</s>", "y", "<s>x</s>[y</s>]" },
    };
    support_enter(folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[128];
        snprintf(line, sizeof line, "{\"prompt\": \"%s\", \"completion\": \"%s\"}", cases[i].prompt,
                 cases[i].completion);
        write_text("a.jsonl", line);
        const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
        expect(&c, LONG, cases[i].want);
    }
    support_leave(folder);
}

/* Fault 9: the end token is padding too, and still a target, once a sample. */
static void the_end_is_trained(void)
{
    support_enter(folder);
    write_text("a.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}\n"
                          "{\"prompt\": \"x\", \"completion\": \"y</s>\"}\n");
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    language.ends = true; /* the tokenizer would add one as well */
    expect(&c, LONG, "<s>x[y</s>] / <s>x[y</s>]");
    language = usual;
    support_leave(folder);
}

/* Fault 11. */
static void the_beginning_stands_once(void)
{
    support_enter(folder);
    write_text("a.jsonl", "{\"text\": \"<s>hi\"}\n{\"text\": \"hi\"}\n");
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    expect(&c, LONG, "<s>[hi</s>] / <s>[hi</s>]");
    language.begins = false;
    language.fingerprint++;
    expect(&c, LONG, "<s>[hi</s>] / h[i</s>]");
    language = usual;
    write_text("a.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"},"
                          "{\"role\": \"assistant\", \"content\": \"r\"}]}");
    expect(&c, LONG, "<s>{user\nq}\n{assistant\n[r}]\n"); /* the chat format's own */
    support_leave(folder);
}

/* Fault 10: samples without any target are left out; a whole dataset of them is an error. */
static void nothing_to_train_on(void)
{
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    write_text("a.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n"
                          "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"},"
                          "{\"role\": \"assistant\", \"content\": \"r\"}]}\n"
                          "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"},"
                          "{\"role\": \"assistant\", \"content\": \"r\", \"weight\": 0}]}\n");
    support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    expect(&c, LONG, "<s>{user\nq}\n{assistant\n[r}]\n");
    write_text("a.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n");
    refuse(&c, "hold no sample with a token to train on");
    write_text("a.jsonl", "{\"input_ids\": [1, 2], \"labels\": [1, -100]}\n");
    refuse(&c, "hold no sample with a token to train on");
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* ---- length --------------------------------------------------------------------------------- */

static void long_documents(void)
{
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    write_text("a.jsonl", "{\"text\": \"0123456\"}\n{\"text\": \"xyz\"}\n");
    support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    expect(&c, 4, "<s>[0123] / 3[456</s>] / <s>[xyz</s>]");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "long_documents", "truncate");
    expect(&c, 4, "<s>[0123] / <s>[xyz</s>]");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "long_documents", "drop");
    expect(&c, 4, "<s>[xyz</s>]");
    /* A conversation keeps its start; where that has no answer, nothing is left of it. */
    write_text("a.jsonl", "{\"prompt\": \"012\", \"completion\": \"xyz\"}\n");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    expect(&c, 5, "<s>012[xy]");
    void *s;
    CHECK(open_stream(&c, MT_SPLIT_TRAIN, 3, 0, 1, &s) == MT_ERR_INVALID, " ");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "long_documents", "split");
    expect(&c, 3, "2[xyz] / z[</s>]"); /* without the piece that has no target */
    expect(&c, 2, "12[x] / x[yz] / z[</s>]");
    /* Text beside it is split all the same. */
    write_text("b.txt", "0123456");
    c = SUPPORT_CONFIG("files.0", "a.jsonl", "files.1", "b.txt", IN_ORDER);
    expect(&c, 4, "<s>012[x] / <s>[0123] / 3[456</s>]");
    /* Also where everything is trained, so that both look alike. */
    c = SUPPORT_CONFIG("files.0", "a.jsonl", "files.1", "b.txt", IN_ORDER, "train_on", "all");
    expect(&c, 4, "<s>[012x] / <s>[0123] / 3[456</s>]");
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* ---- malformed records ---------------------------------------------------------------------- */

static void malformed_records(void)
{
    static const struct {
        const char *line, *reason;
    } cases[] = {
        { "{\"text\": ", "a.jsonl:3: no JSON: column " },
        { "[1]", "a.jsonl:3: the record is a list; expected an object" },
        { "{\"text\": \"\xff\"}", "a.jsonl:3: no JSON: column" },
        { "{\"text\": 5}", "a.jsonl:3: 'text' is a number; expected a string" },
        { "{\"txt\": \"\"}", "a.jsonl:3: 'text' is nothing; expected a string" },
        { "{\"text\": \"x\", \"images\": [\"a.png\"]}", "a.jsonl:3: 'images': images are not" },
    };
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"text\": \"x\"}\n\n%s\n{\"text\": \"y\"}\n%s\n",
                 cases[i].line, cases[i].line);
        write_text("a.jsonl", text);
        support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
        refuse(&c, cases[i].reason);
        CHECK(support_says("data.on_error: skip"), " ");
        c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "on_error", "skip");
        expect(&c, LONG, "<s>[x</s>] / <s>[y</s>]");
    }
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

static void malformed_turns(void)
{
#define TURN "{\"role\": \"user\", \"content\": \"q\"}"
    static const struct {
        const char *turns, *reason;
    } cases[] = {
        { "", "'messages' holds no turns" },
        { "5", "a turn is a number; expected an object" },
        { "{\"content\": \"q\"}", "'role' of a turn is nothing; expected a string" },
        { "{\"role\": \"narrator\", \"content\": \"q\"}", "a turn of 'narrator'; expected system" },
        { "{\"role\": \"user\"}", "'content' of a turn is nothing" },
        { "{\"role\": \"user\", \"content\": null}", "'content' of a turn is null" },
        { "{\"role\": \"tool\", \"content\": \"4\"}", "tool calls are not offered" },
        { TURN ", {\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{}]}",
          "'tool_calls': tool calls are not offered" },
        { "{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", \"image_url\": {}}]}",
          "a part of type 'image_url' is not offered; only text is" },
        { "{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}", "whose 'text' is nothing" },
        { TURN ", {\"role\": \"assistant\", \"content\": \"r\", \"weight\": 0.5}",
          "'weight' of a turn must be 0 or 1" },
        { TURN ", {\"role\": \"assistant\", \"content\": \"r\", \"reasoning_content\": 1}",
          "'reasoning_content' is a number" },
        { "{\"role\": \"assistant\", \"content\": \"r\"}", "the assistant speaks first" },
    };
#undef TURN
    support_enter(folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        snprintf(text, sizeof text, "%s{\"messages\": [%s]}\n", DIALOGUE, cases[i].turns);
        write_text("a.jsonl", text);
        const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
        refuse(&c, cases[i].reason);
        CHECK(support_says("a.jsonl:2: "), " ");
    }
    support_leave(folder);
}

static void malformed_tokens(void)
{
    static const struct {
        const char *record, *reason;
    } cases[] = {
        { "{\"input_ids\": 5}", "'input_ids' is a number; expected a list" },
        { "{\"input_ids\": [1, 261]}", "token 1 of input_ids is no integer from 0 to 260" },
        { "{\"input_ids\": [1, -1]}", "token 1 of input_ids" },
        { "{\"input_ids\": [1, 2.5]}", "token 1 of input_ids" },
        { "{\"input_ids\": [1, 2], \"labels\": [1]}", "'labels' has 1 numbers for 2 tokens" },
        { "{\"input_ids\": [1, 2], \"labels\": [2, 3]}", "label 0 is neither its token, 1" },
    };
    support_enter(folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text("a.jsonl", cases[i].record);
        const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
        refuse(&c, cases[i].reason);
    }
    support_leave(folder);
}

/* Many records over several batches and files: the first malformed one is named, wherever threads
 * stand; skipping counts all of them. */
static void the_first_malformed_record_is_named(void)
{
    enum { LINES = 20000, FIRST = 9000, EVERY = 1000 };
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    FILE *f = fopen("a.jsonl", "w");
    int good = 0;
    for (int i = 1; i <= LINES; i++) {
        bool bad = i >= FIRST && i % EVERY == 0;
        fprintf(f, bad ? "{\"text\": %d}\n" : "{\"text\": \"number %d\"}\n", i);
        good += !bad;
    }
    fclose(f);
    support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "workers", "4");
    refuse(&c, "a.jsonl:9000: 'text' is a number");
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "workers", "4", "on_error", "skip");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 64, 0, 1);
    CHECK(documents(s) == good && good == LINES - 12, "%d", (int)documents(s));
    d->close(s);
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* Files with a few bytes altered, taken out or cut off are read or refused, never worse; what is
 * read keeps its promises. */
static void mutations(void)
{
    static const char *const seeds[] = {
        DIALOGUE
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": "
        "\"\\u00e4\"}]}, {\"role\": \"assistant\", \"content\": \"x\"}]}\n",
        "[{\"prompt\": \"a[]{}\", \"completion\": \"\\\"b\"}, {\"prompt\": \"c\", \"completion\": "
        "\"d\"}]",
        "{\"input_ids\": [1, 2, 3], \"labels\": [-100, 2, 3], \"attention_mask\": [1, 1, 0]}\n",
        "{\"instruction\": \"i\", \"input\": \"j\", \"output\": \"k\", \"history\": [[\"l\", "
        "\"m\"]]}\n",
    };
    enum { ROUNDS = 400, MOST_BYTES = 1024 };
    uint32_t state = 1;
    int opened = 0;
    support_enter(folder);
    log_set_level(MT_LOG_ERROR - 1);
    for (int round = 0; round < ROUNDS; round++) {
        char text[MOST_BYTES];
        size_t n = strlen(seeds[round % 4]);
        memcpy(text, seeds[round % 4], n);
        for (int k = 0; k < 1 + round % 3; k++) {
            state = state * 1664525u + 1013904223u;
            size_t at = (state >> 8) % n;
            if (state >> 30 == 0)
                n = at + 1;
            else if (state >> 30 == 1)
                memmove(text + at, text + at + 1, --n - at);
            else
                text[at] = "{}[]\",:\\0\n\xff"[(state >> 4) % 11];
        }
        support_write("a.json", text, n);
        const support_config c = SUPPORT_CONFIG("files", "a.json", IN_ORDER, "on_error", "skip");
        void *s = NULL;
        mt_document doc;
        if (open_stream(&c, MT_SPLIT_TRAIN, 64, 0, 1, &s) != MT_OK) {
            CHECK(*status_text(), "an error without a word");
            continue;
        }
        opened++;
        for (int64_t i = documents(s); i > 0; i--)
            CHECK(d->next(s, &doc) == MT_OK && doc.n >= 2 && doc.n <= 65 && !doc.loss_mask[0] &&
                      memchr(doc.loss_mask, 1, (size_t)doc.n),
                  "round %d", round);
        d->close(s);
    }
    CHECK(opened > ROUNDS / 10, "only %d could be opened", opened);
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* ---- what a model lacks, keys --------------------------------------------------------------- */

static void messages(void)
{
    support_enter(folder);
    write_text("a.jsonl", "{\"instruction\": \"do\", \"output\": \"ok\"}");
    write_text("ids.jsonl", "{\"input_ids\": [70000, 70001]}");
    write_text("t.txt", "text");
    write_text("x.parquet", "PAR1");
    write_text("x.bin", "0123");
    support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    with_format = false; /* a chat plugin, but no format: alpaca's own */
    expect(&c, LONG, "<s>{user\ndo}\n{assistant\n[ok}]\n");
    with_chat = false;
    refuse(&c, "a.jsonl:1: the record is a conversation, but the model has no chat format");
    with_chat = with_format = true;
    with_tokenizer = false;
    c = SUPPORT_CONFIG("files", "t.txt", IN_ORDER);
    refuse(&c, "the data is text, but the model has no tokenizer; name one with data.tokenizer");
    with_chat = false;
    c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    refuse(&c, "a conversation, but the model has no tokenizer; name one with data.tokenizer");
    with_chat = true;
    c = SUPPORT_CONFIG("files", "ids.jsonl", IN_ORDER); /* these need none */
    void *s = must_open(&c, MT_SPLIT_TRAIN, 8, 0, 1);
    CHECK(d->vocab_size(s) == 70002, "%d", (int)d->vocab_size(s));
    d->close(s);
    with_tokenizer = true;
    c = SUPPORT_CONFIG("files", "x.parquet");
    refuse(&c, "'x.parquet' is of a kind that is not read");
    c = SUPPORT_CONFIG("files.0", "x.bin", "files.1", "t.txt");
    refuse(&c, "mixes token files");
    c = SUPPORT_CONFIG("files", "t.txt", "dtype", "uint16");
    refuse(&c, "belongs to token files");
    c = SUPPORT_CONFIG("files", "t.txt", "columns.text", "body");
    refuse(&c, "columns: belongs to records");
    c = SUPPORT_CONFIG("files", "a.jsonl", "document_separator", "blank_line");
    refuse(&c, "document_separator: belongs to text files");
    c = SUPPORT_CONFIG("files", "t.txt", "train_on", "last");
    refuse(&c, "there are none");
    c = SUPPORT_CONFIG("files", "t.txt", "document_separator", "");
    refuse(&c, "is empty");
    c = SUPPORT_CONFIG("files", "t.txt", "datasets.0.files", "a.jsonl");
    refuse(&c, "cannot be given together with datasets");
    c = SUPPORT_CONFIG("datasets.0.files", "a.jsonl", "datasets.0.weight", "0");
    refuse(&c, "datasets.0.weight: is 0");
    c = SUPPORT_CONFIG("files", "t.txt", "validation_files", "t.txt");
    refuse(&c, "'t.txt' is among 'files' too");
    c = SUPPORT_CONFIG("files", "t.txt", "validation_split", "0.7");
    refuse(&c, "is 0.7; expected a fraction");
    c = SUPPORT_CONFIG("files", "t.txt", "on_error", "ignore");
    refuse(&c, "expected one of stop, skip");
    support_leave(folder);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    d = plugin_interface(argv[1], MT_DATA_INTERFACE);
    RUN(formats);
    RUN(arrays_and_lines);
    RUN(text_files);
    RUN(columns);
    RUN(what_is_trained);
    RUN(borders_of_prompts);
    RUN(the_end_is_trained);
    RUN(the_beginning_stands_once);
    RUN(nothing_to_train_on);
    RUN(long_documents);
    RUN(malformed_records);
    RUN(malformed_turns);
    RUN(malformed_tokens);
    RUN(the_first_malformed_record_is_named);
    RUN(mutations);
    RUN(messages);
    return check_done();
}
