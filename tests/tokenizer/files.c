/* SPDX-License-Identifier: Apache-2.0
 *
 * Files that are wrong and what is said about them, files beside a tokenizer.json, cut files, long
 * texts, several threads. Usage: files tokenizer.so FIXTURES
 */
#include "../bad_disk.h"
#include "../data/support.h"

#include <pthread.h>

static const mt_tokenizer *iface;
static const char *fixtures;
static char folder[64];

/* The smallest tokenizer: a and b, and ab by a merge. */
#define MODEL                                                                                      \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"

static void write_text(const char *path, const char *text)
{
    support_write(path, text, strlen(text));
}

static void *must_open(const char *path)
{
    void *t = NULL;
    if (iface->open(path, &t) != MT_OK) {
        fprintf(stderr, "%s: %s\n", path, status_text());
        exit(1);
    }
    return t;
}

static void *open_text(const char *text)
{
    write_text("tokenizer.json", text);
    return must_open("tokenizer.json");
}

/* Encodes without flags; -2 marks the end. */
static void expect_ids(const char *file, const char *text, const int32_t *wanted)
{
    int32_t got[64];
    void *t = open_text(file);
    int64_t n = iface->encode(t, text, (int64_t)strlen(text), 0, got, 64);
    for (int64_t i = 0; i < n; i++)
        CHECK(wanted[i] == got[i], "'%s' token %d: %d, expected %d", text, (int)i, got[i],
              wanted[i]);
    CHECK(wanted[n] == -2, "'%s': only %d tokens", text, (int)n);
    iface->close(t);
}

#define IDS(...) ((const int32_t[]){ __VA_ARGS__, -2 })

/* ---- messages ------------------------------------------------------------------------------- */

static void refused(const char *text, const char *place, const char *found, const char *expected)
{
    void *t = NULL;
    write_text("tokenizer.json", text);
    CHECK(iface->open("tokenizer.json", &t) < 0 && !t, "%s", text);
    CHECK(strncmp(status_text(), "tokenizer.json", 14) == 0, "'%s'", status_text());
    CHECK(strstr(status_text(), place), "'%s' does not say '%s'", status_text(), place);
    CHECK(strstr(status_text(), found), "'%s' does not say '%s'", status_text(), found);
    CHECK(strstr(status_text(), expected), "'%s' does not say '%s'", status_text(), expected);
    if (t)
        iface->close(t);
}

static void names_what_is_wrong(void)
{
    support_enter(folder);
    refused("", "empty", "", "a JSON object");
    refused("{\"model\": ", "tokenizer.json:1:", "", "is the file complete?");
    refused("[]", "at the top", "something else", "an object");
    refused("{}", "model", "found nothing", "expected an object");
    refused("{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", "model.type", "'Unigram'",
            "only BPE");
    refused("{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "model.type", "'WordPiece'",
            "train on token files");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":[],\"merges\":[]}}", "model.vocab",
            "found a list", "an object");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}", "model.vocab",
            "found no token", "at least one");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", "model.vocab.a",
            "the number -1", "a whole number from 0");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4000000000},\"merges\":[]}}",
            "model.vocab.a", "4000000000", "to 16777215");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", "model.vocab.a",
            "the text '0'", "an id");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}",
            "model.vocab.b", "the id 0", "'a' has too");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", "model.merges", "found nothing",
            "a list");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"ab\"]}}",
            "model.merges[0]", "the text 'ab'", "two tokens");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[[\"a\",\"a\",\"a\"]]}}",
            "model.merges[0]", "a list", "two tokens");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a c\"]}}",
            "model.merges[0]", "'c'", "no token of model.vocab");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}",
            "model.merges[0]", "'aa'", "no token of model.vocab");
    refused("{\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{\"a\":0},\"merges\":[]}}",
            "model.dropout", "the number 0.1", "null or 0");
    refused("{\"model\":{\"type\":\"BPE\",\"unk_token\":\"?\",\"vocab\":{\"a\":0},\"merges\":[]}}",
            "model.unk_token", "'?'", "no token");
    refused("{\"model\":{\"type\":\"BPE\",\"fuse_unk\":1,\"vocab\":{\"a\":0},\"merges\":[]}}",
            "model.fuse_unk", "the number 1", "true or false");
    refused("{\"added_tokens\":7," MODEL "}", "added_tokens", "the number 7", "a list");
    refused("{\"added_tokens\":[{\"content\":\"x\"}]," MODEL "}", "added_tokens[0].id",
            "found nothing", "an id");
    refused("{\"added_tokens\":[{\"id\":1,\"content\":\"x\"}]," MODEL "}", "added_tokens[0]",
            "'x' has the id 1", "'b' has too");
    refused("{\"added_tokens\":[{\"id\":3}]," MODEL "}", "added_tokens[0].content", "found nothing",
            "a text");
    support_leave(folder);
}

static void names_stages_that_are_wrong(void)
{
    support_enter(folder);
    refused("{\"normalizer\":{\"type\":\"Precompiled\"}," MODEL "}", "normalizer.type",
            "'Precompiled' is not offered", "NFC");
    refused("{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},"
            "{\"type\":\"Nmt\"}]}," MODEL "}",
            "normalizer.normalizers[1].type", "'Nmt'", "Replace");
    refused("{\"normalizer\":{\"type\":\"Prepend\"}," MODEL "}", "normalizer.prepend",
            "found nothing", "a text");
    refused("{\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}," MODEL "}", "pre_tokenizer.type",
            "'BertPreTokenizer'", "ByteLevel");
    refused("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},"
            "\"behavior\":\"Isolated\"}," MODEL "}",
            "pre_tokenizer.pattern.Regex", "'('", "parenthesis");
    refused("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"\"},"
            "\"behavior\":\"Isolated\"}," MODEL "}",
            "pre_tokenizer.pattern", "an empty pattern", "matches something");
    refused("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},"
            "\"behavior\":\"Merged\"}," MODEL "}",
            "pre_tokenizer.behavior", "'Merged'", "Contiguous");
    refused("{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"__\"}," MODEL "}",
            "pre_tokenizer.replacement", "'__'", "a single character");
    refused("{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\","
            "\"prepend_scheme\":\"last\"}," MODEL "}",
            "pre_tokenizer.prepend_scheme", "'last'", "always, first or never");
    refused("{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
            "{\"id\":\"<s>\"}}],\"special_tokens\":{}}," MODEL "}",
            "post_processor.special_tokens.<s>", "found nothing", "an object");
    refused("{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}," MODEL "}",
            "post_processor.single", "found none", "the Sequence A");
    refused("{\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"x\",9],\"sep\":[\"x\",9]}"
            "," MODEL "}",
            "post_processor.cls[1]", "the number 9", "of the vocabulary");
    refused("{\"decoder\":{\"type\":\"WordPiece\"}," MODEL "}", "decoder.type", "'WordPiece'",
            "ByteFallback");
    refused("{\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":-1}," MODEL "}",
            "decoder.start", "the number -1", "from 0 on");
    refused("{\"decoder\":\"ByteLevel\"," MODEL "}", "decoder", "the text 'ByteLevel'",
            "an object");
    support_leave(folder);
}

/* A fixture that ends anywhere is refused, and nothing worse. */
static void refuses_cut_files(void)
{
    char path[4096];
    size_t n;
    snprintf(path, sizeof path, "%s/llama3.json", fixtures);
    char *text = support_read(path, &n);
    support_enter(folder);
    for (size_t cut = 0; cut < n - 2; cut += 100) {
        void *t = NULL;
        support_write("tokenizer.json", text, cut);
        CHECK(iface->open("tokenizer.json", &t) == MT_ERR_FORMAT, "cut at %d", (int)cut);
        CHECK(strncmp(status_text(), "tokenizer.json", 14) == 0, "%s", status_text());
    }
    free(text);
    support_leave(folder);
}

static void refuses_what_cannot_be_read(void)
{
    static const struct {
        bad_disk_kind kind;
        const char *message;
    } cases[] = {
        { DISK_FAILS, "tokenizer.json: cannot read at byte 0: Input/output error" },
        { FILE_SHRINKS, "tokenizer.json: has become shorter than the " },
    };
    support_enter(folder);
    for (int i = 0; i < 2; i++) {
        void *t = NULL;
        write_text("tokenizer.json", "{" MODEL "}");
        bad_disk.kind = cases[i].kind;
        CHECK(iface->open("tokenizer.json", &t) == MT_ERR_IO && !t, "case %d", i);
        bad_disk.kind = DISK_GOOD;
        CHECK(strncmp(status_text(), cases[i].message, strlen(cases[i].message)) == 0, "'%s'",
              status_text());
    }
    support_leave(folder);
}

static void refuses_other_paths(void)
{
    support_enter(folder);
    void *t = NULL;
    CHECK(!iface->probe("nowhere"), " ");
    CHECK(iface->open("nowhere", &t) == MT_ERR_NOT_FOUND, " ");
    CHECK(iface->open(NULL, &t) == MT_ERR_INVALID, " ");
    CHECK(!iface->probe("."), " ");
    CHECK(iface->open(".", &t) == MT_ERR_NOT_FOUND, " ");
    write_text("tokenizer.model", "x");
    CHECK(!iface->probe(".") && !iface->probe("tokenizer.model"), " ");
    CHECK(iface->open(".", &t) == MT_ERR_UNSUPPORTED && strstr(status_text(), "save_pretrained"),
          "%s", status_text());
    CHECK(iface->open("tokenizer.model", &t) == MT_ERR_UNSUPPORTED, "%s", status_text());
    write_text("tokenizer.json", "{" MODEL "}");
    CHECK(iface->probe(".") && iface->probe("tokenizer.json") && iface->probe("./tokenizer.json"),
          " ");
    t = must_open(".");
    iface->close(t);
    iface->close(NULL);
    support_leave(folder);
}

/* ---- files beside it ------------------------------------------------------------------------ */

static void expect_roles(int32_t begin, int32_t end, int32_t pad, int32_t unknown)
{
    void *t = must_open(".");
    CHECK(iface->special(t, MT_SPECIAL_BEGIN) == begin, "%d", iface->special(t, MT_SPECIAL_BEGIN));
    CHECK(iface->special(t, MT_SPECIAL_END) == end, "%d", iface->special(t, MT_SPECIAL_END));
    CHECK(iface->special(t, MT_SPECIAL_PAD) == pad, "%d", iface->special(t, MT_SPECIAL_PAD));
    CHECK(iface->special(t, MT_SPECIAL_UNKNOWN) == unknown, "%d",
          iface->special(t, MT_SPECIAL_UNKNOWN));
    CHECK(iface->special(t, 99) == -1, " ");
    iface->close(t);
}

static void finds_roles(void)
{
    support_enter(folder);
    write_text("tokenizer.json",
               "{\"added_tokens\":[{\"id\":9,\"content\":\"<e>\",\"special\":true},"
               "{\"id\":7,\"content\":\"<p>\",\"special\":true}]," MODEL "}");
    expect_roles(-1, -1, -1, -1);
    write_text("config.json", "{\"bos_token_id\":0,\"eos_token_id\":1,\"pad_token_id\":2}");
    expect_roles(0, 1, 2, -1);
    write_text("generation_config.json", "{\"eos_token_id\":[9,1],\"pad_token_id\":null}");
    expect_roles(0, 9, 2, -1);
    write_text("special_tokens_map.json", "{\"pad_token\":\"<p>\",\"unk_token\":\"ab\"}");
    expect_roles(0, 9, 7, 2);
    /* One that the vocabulary lacks, or an id beyond it, leaves the word to the next file. */
    write_text("tokenizer_config.json",
               "{\"bos_token\":{\"content\":\"a\"},\"eos_token\":\"<none>\","
               "\"pad_token\":null,\"unk_token_id\":99}");
    expect_roles(0, 9, 7, 2);
    write_text("tokenizer_config.json", "{\"eos_token\": ");
    void *t = NULL;
    CHECK(iface->open(".", &t) == MT_ERR_FORMAT, " ");
    CHECK(strstr(status_text(), "./tokenizer_config.json:1:"), "%s", status_text());
    support_leave(folder);
}

static uint64_t expect_around(const int32_t *wanted)
{
    int32_t got[8];
    void *t = must_open(".");
    int64_t n = iface->encode(t, "ab", 2, MT_ENCODE_ADD_SPECIAL, got, 8);
    for (int64_t i = 0; i < n; i++)
        CHECK(got[i] == wanted[i], "token %d: %d, expected %d", (int)i, got[i], wanted[i]);
    CHECK(n <= 8 && wanted[n] == -2, "%d tokens", (int)n);
    uint64_t print = iface->fingerprint(t);
    iface->close(t);
    return print;
}

/* tokenizer_config.json may overrule the template. */
static void adds_what_the_configuration_says(void)
{
    support_enter(folder);
    write_text(
        "tokenizer.json",
        "{\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"a\",0],\"sep\":[\"b\",1]}"
        "," MODEL "}");
    uint64_t plain = expect_around(IDS(0, 2, 1));
    write_text("tokenizer_config.json", "{\"bos_token\":\"b\",\"eos_token\":\"a\"}");
    expect_around(IDS(0, 2, 1));
    write_text("tokenizer_config.json", "{\"bos_token\":\"b\",\"add_bos_token\":true}");
    uint64_t before = expect_around(IDS(1, 2));
    write_text("tokenizer_config.json", "{\"eos_token\":\"b\",\"add_eos_token\":true,"
                                        "\"add_bos_token\":true}");
    uint64_t after = expect_around(IDS(2, 1));
    CHECK(plain != before && before != after && after != plain, "the same fingerprint");
    write_text("tokenizer_config.json", "{\"bos_token\":\"b\",\"add_bos_token\":false}");
    expect_around(IDS(2));
    write_text("tokenizer_config.json", "{\"add_bos_token\":\"yes\"}");
    void *t = NULL;
    CHECK(iface->open(".", &t) == MT_ERR_FORMAT &&
              strstr(status_text(), "add_bos_token: found the text 'yes', expected true or false"),
          "%s", status_text());
    support_leave(folder);
}

static void counts_to_the_largest_id(void)
{
    support_enter(folder);
    void *t = open_text("{\"added_tokens\":[{\"id\":9,\"content\":\"<e>\"}]," MODEL "}");
    char text[8];
    CHECK(iface->vocab_size(t) == 10, "%d", (int)iface->vocab_size(t));
    CHECK(iface->token_id(t, "<e>", 3) == 9 && iface->token_id(t, "ab", 2) == 2, " ");
    CHECK(iface->token_id(t, "", 0) == -1, " ");
    /* Ids without a token are passed over. */
    CHECK(iface->decode(t, IDS(5, 9, -1, 10), 4, 0, text, 8) == 3 && memcmp(text, "<e>", 3) == 0,
          " ");
    uint64_t print = iface->fingerprint(t);
    iface->close(t);
    t = open_text("{\"added_tokens\":[{\"id\":9,\"content\":\"<f>\"}]," MODEL "}");
    CHECK(iface->fingerprint(t) != print, "another file");
    iface->close(t);
    support_leave(folder);
}

/* ---- rules that the fixtures do not reach --------------------------------------------------- */

#define BYTES                                                                                      \
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},"   \
    "\"decoder\":{\"type\":\"ByteLevel\"},"

static void adds_tokens_by_their_flags(void)
{
    support_enter(folder);
    expect_ids(
        "{\"added_tokens\":[{\"id\":3,\"content\":\"<>\"},{\"id\":4,\"content\":\"<><>\"}]," MODEL
        "}",
        "<><><>", IDS(4, 3));
    expect_ids("{\"added_tokens\":[{\"id\":3,\"content\":\"ba\",\"single_word\":true}]," MODEL "}",
               "ba.ba:aba", IDS(3, 3, 2, 0));
    /* The longest wins, also where it then may not stand: shorter ones in it are not looked for. */
    expect_ids("{\"added_tokens\":[{\"id\":3,\"content\":\"<>\"},{\"id\":4,\"content\":\"<><>b\","
               "\"single_word\":true}]," MODEL "}",
               "<><>ba<>", IDS(1, 0, 3));
    expect_ids(
        "{\"added_tokens\":[{\"id\":3,\"content\":\"<\",\"lstrip\":true,\"rstrip\":true}]," MODEL
        "}",
        "a  <\t\n<  b", IDS(0, 3, 3, 1));
    support_leave(folder);
}

/* A token with letters of Latin-1 keeps them, though they are of the byte-level alphabet as well.
 */
static void keeps_added_tokens_as_they_are(void)
{
    support_enter(folder);
    void *t =
        open_text("{\"added_tokens\":[{\"id\":3,\"content\":\"\xc3\x89lan\"}]," BYTES MODEL "}");
    char text[16];
    int64_t n = iface->decode(t, IDS(2, 3), 2, 0, text, sizeof text);
    CHECK(n == 7 && memcmp(text, "ab\xc3\x89lan", 7) == 0, "'%.*s'", (int)n, text);
    CHECK(iface->token_id(t, "\xc3\x89lan", 5) == 3, "%d", iface->token_id(t, "\xc3\x89lan", 5));
    iface->close(t);
    support_leave(folder);
}

/* By the text that a token stands for, or as the file spells it. */
static void knows_tokens_of_bytes(void)
{
    support_enter(folder);
    void *t = open_text("{" BYTES "\"model\":{\"type\":\"BPE\",\"vocab\":{\"\xc4\x8a\":0,"
                        "\"\xc4\xa0\":1},\"merges\":[]}}");
    CHECK(iface->token_id(t, "\n", 1) == 0 && iface->token_id(t, " ", 1) == 1, " ");
    CHECK(iface->token_id(t, "\xc4\x8a", 2) == 0 && iface->token_id(t, "\t", 1) == -1, " ");
    iface->close(t);
    support_leave(folder);
}

static void repairs_what_is_no_utf8(void)
{
    support_enter(folder);
    static const struct {
        const char *bytes;
        int replaced;
    } cases[] = {
        { "\xff", 1 },         { "\xc3", 1 },
        { "\xe4\xb8", 1 },     { "\xe4\xb8\xe4\xb8\xad", 1 },
        { "\xf0\x9f\x98", 1 }, { "\xed\xa0\x80", 3 }, /* a surrogate */
        { "\xc0\xaf", 2 },     { "\xf4\x90\x80\x80", 4 },
        { "\xf0\x80\x80", 3 }, { "\x80\x80", 2 },
        { "a\xe2\x82", 1 },    { "\xe0\x80\x80", 3 },
    };
    void *t =
        open_text("{\"model\":{\"type\":\"BPE\",\"unk_token\":\"?\",\"vocab\":{\"a\":0,\"?\":1,"
                  "\"\xef\xbf\xbd\":2},\"merges\":[]}}");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t ids[16];
        int replaced = 0;
        int64_t n = iface->encode(t, cases[i].bytes, (int64_t)strlen(cases[i].bytes), 0, ids, 16);
        for (int64_t k = 0; k < n; k++)
            replaced += ids[k] == 2;
        CHECK(replaced == cases[i].replaced, "case %d: %d", (int)i, replaced);
    }
    iface->close(t);
    support_leave(folder);
}

/* ---- size and threads ----------------------------------------------------------------------- */

/* A document of 4 MB that is one piece: quadratic work would not end today. */
static void merges_long_pieces(void)
{
    support_enter(folder);
    enum { LONG = 4 << 20 };
    void *t = open_text("{" BYTES "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,"
                        "\"abab\":3,\"aa\":4},\"merges\":[\"a b\",[\"ab\",\"ab\"],\"a a\"]}}");
    char *text = malloc(LONG);
    int32_t *ids = malloc(LONG * sizeof *ids);
    for (int i = 0; i < LONG; i++)
        text[i] = i % 2 ? 'b' : 'a';
    int64_t n = iface->encode(t, text, LONG, 0, ids, LONG);
    CHECK(n == LONG / 4 && ids[0] == 3 && ids[n - 1] == 3, "%d", (int)n);
    memset(text, 'a', LONG);
    n = iface->encode(t, text, LONG - 1, 0, ids, LONG);
    CHECK(n == LONG / 2 && ids[0] == 4 && ids[n - 2] == 4 && ids[n - 1] == 0, "%d", (int)n);
    free(ids);
    free(text);
    iface->close(t);
    support_leave(folder);
}

/* A pattern that would go on for ever is given up; a long run of spaces is not. */
static void gives_up_runaway_patterns(void)
{
    static const char *const stages[] = {
        "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a+)+c\"},"
        "\"behavior\":\"Isolated\"}," MODEL,
        "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"(a+)+c\"},"
        "\"content\":\"b\"}," MODEL,
    };
    enum { SPACES = 1 << 20 };
    char file[512], *spaces = malloc(SPACES);
    int32_t ids[4];
    support_enter(folder);
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        snprintf(file, sizeof file, "{%s}", stages[i]);
        void *t = open_text(file);
        const char *text = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab";
        int64_t n = iface->encode(t, text, (int64_t)strlen(text), 0, ids, 4);
        CHECK(n == MT_ERR_FORMAT && strstr(status_text(), "a regular expression"), "%d: %s", (int)n,
              status_text());
        CHECK(iface->encode(t, "ab", 2, 0, ids, 4) == 1 && ids[0] == 2, "the next text is read");
        iface->close(t);
    }
    void *t = open_text("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":"
                        "\"\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Removed\"}," MODEL "}");
    memset(spaces, ' ', SPACES);
    spaces[SPACES - 1] = 'a';
    CHECK(iface->encode(t, spaces, SPACES, 0, ids, 4) == 1 && ids[0] == 0, "%s", status_text());
    iface->close(t);
    free(spaces);
    support_leave(folder);
}

/* The same in a decoder, which sees the whole text. */
static void gives_up_runaway_decoders(void)
{
    enum { LETTERS = 60 };
    int32_t ids[LETTERS + 1];
    char text[2 * LETTERS];
    support_enter(folder);
    void *t = open_text("{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},"
                        "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"(a+)+c\"},"
                        "\"content\":\"b\"}]}," MODEL "}");
    for (int i = 0; i < LETTERS; i++)
        ids[i] = 0;
    ids[LETTERS] = 1;
    int64_t n = iface->decode(t, ids, LETTERS + 1, 0, text, sizeof text);
    CHECK(n == MT_ERR_FORMAT && strstr(status_text(), "a regular expression"), "%d: %s", (int)n,
          status_text());
    CHECK(iface->decode(t, ids, 3, 0, text, sizeof text) == 3 && memcmp(text, "aaa", 3) == 0,
          "the next text is decoded");
    iface->close(t);
    support_leave(folder);
}

/* Normalizers one after the other that make a text ten times as long each. */
static void gives_up_growing_texts(void)
{
    enum { STAGES = 9, LETTERS = 100000 };
    char file[2048], *text = malloc(LETTERS);
    int32_t ids[4];
    int n = snprintf(file, sizeof file, "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < STAGES; i++)
        n += snprintf(file + n, sizeof file - (size_t)n,
                      "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},"
                      "\"content\":\"aaaaaaaaaa\"}",
                      i ? "," : "");
    snprintf(file + n, sizeof file - (size_t)n, "]}," MODEL "}");
    support_enter(folder);
    void *t = open_text(file);
    memset(text, 'a', LETTERS);
    int64_t made = iface->encode(t, text, LETTERS, 0, ids, 4);
    CHECK(made == MT_ERR_FORMAT && strstr(status_text(), "step 2 of the normalizer"), "%d: %s",
          (int)made, status_text());
    iface->close(t);
    free(text);
    support_leave(folder);
}

typedef struct job {
    void *tokenizer;
    const char *text;
    int64_t n;
    int32_t *wanted;
    int64_t n_wanted;
    bool same;
} job;

enum { ROUNDS = 8, THREADS = 4 };

static void *encode_often(void *arg)
{
    job *j = arg;
    int32_t *ids = malloc((size_t)j->n * sizeof *ids);
    j->same = true;
    for (int i = 0; i < ROUNDS && ids; i++)
        j->same &= iface->encode(j->tokenizer, j->text, j->n, 0, ids, j->n) == j->n_wanted &&
                   memcmp(ids, j->wanted, (size_t)j->n_wanted * sizeof *ids) == 0;
    free(ids);
    return NULL;
}

static void runs_on_several_threads(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/qwen.json", fixtures);
    void *t = must_open(path);
    snprintf(path, sizeof path, "%s/texts.txt", fixtures);
    job j = { .tokenizer = t };
    size_t size;
    char *text = support_read(path, &size);
    j.text = text;
    j.n = (int64_t)size;
    j.wanted = malloc(size * sizeof *j.wanted);
    j.n_wanted = iface->encode(t, j.text, j.n, 0, j.wanted, j.n);
    CHECK(j.n_wanted > 1000, "%d", (int)j.n_wanted);
    pthread_t thread[THREADS];
    job jobs[THREADS];
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = j;
        pthread_create(&thread[i], NULL, encode_often, &jobs[i]);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        CHECK(jobs[i].same, "thread %d", i);
    }
    free(j.wanted);
    free(text);
    iface->close(t);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    iface = plugin_interface(argv[1], MT_TOKENIZER_INTERFACE);
    fixtures = argv[2];
    RUN(names_what_is_wrong);
    RUN(names_stages_that_are_wrong);
    RUN(refuses_cut_files);
    RUN(refuses_what_cannot_be_read);
    RUN(refuses_other_paths);
    RUN(finds_roles);
    RUN(adds_what_the_configuration_says);
    RUN(counts_to_the_largest_id);
    RUN(adds_tokens_by_their_flags);
    RUN(keeps_added_tokens_as_they_are);
    RUN(knows_tokens_of_bytes);
    RUN(repairs_what_is_no_utf8);
    RUN(merges_long_pieces);
    RUN(gives_up_runaway_patterns);
    RUN(gives_up_runaway_decoders);
    RUN(gives_up_growing_texts);
    RUN(runs_on_several_threads);
    return check_done();
}
