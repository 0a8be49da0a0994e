/* SPDX-License-Identifier: Apache-2.0
 *
 * Ids and text equal to what Hugging Face's tokenizers made of them, for a small tokenizer of every
 * style: fixtures/tokenizer, written by make_tokenizer_fixtures.py, which says what is in it.
 * Usage: fixtures tokenizer.so FOLDER STYLE
 */
#include "../data/support.h"

static const mt_tokenizer *iface;
static const char *folder, *style;
static void *tok;

/* Texts are up to a few thousand bytes, and no token is shorter than a byte. */
enum { ROOM = 1 << 17 };

static FILE *open_fixture(const char *name, const char *suffix)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%s", folder, name, suffix);
    FILE *f = fopen(path, "r");
    if (!f) {
        fprintf(stderr, "%s: cannot open\n", path);
        exit(1);
    }
    return f;
}

/* A line without its end; false at the end of the file. */
static bool next_line(FILE *f, char **line, size_t *cap)
{
    ssize_t n = getline(line, cap, f);
    if (n > 0 && (*line)[n - 1] == '\n')
        (*line)[n - 1] = '\0';
    return n > 0;
}

static int64_t unescape(const char *line, char *ret)
{
    int64_t n = 0;
    for (; *line; n++) {
        unsigned byte = (unsigned char)*line;
        if (byte == '\\' && sscanf(line, "\\x%2x", &byte) == 1)
            line += 4;
        else
            line++;
        ret[n] = (char)byte;
    }
    return n;
}

static int64_t parse_ids(char *line, int32_t *ret)
{
    int64_t n = 0;
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " "))
        ret[n++] = (int32_t)strtol(word, NULL, 10);
    return n;
}

static void check_ids(int64_t at, const char *what, const int32_t *got, int64_t n,
                      const int32_t *wanted, int64_t n_wanted)
{
    CHECK(n == n_wanted, "%s text %lld, %s: %lld ids, expected %lld", style, (long long)at, what,
          (long long)n, (long long)n_wanted);
    for (int64_t i = 0; i < n && i < n_wanted; i++)
        if (got[i] != wanted[i]) {
            CHECK(got[i] == wanted[i], "%s text %lld, %s: id %lld is %d, expected %d", style,
                  (long long)at, what, (long long)i, got[i], wanted[i]);
            return;
        }
}

/* Calls fn for each text with the three lines that belong to it. */
static void each_text(void (*fn)(int64_t at, const char *text, int64_t n, char *lines[3]))
{
    FILE *texts = open_fixture("texts", ".txt"), *results = open_fixture(style, ".txt");
    char *text = malloc(ROOM), *line = NULL, *expected[3] = { NULL };
    size_t cap = 0, caps[3] = { 0 };
    int64_t at = 0;
    for (; next_line(texts, &line, &cap); at++) {
        for (int i = 0; i < 3; i++)
            CHECK(next_line(results, &expected[i], &caps[i]), "%s ends early", style);
        fn(at, text, unescape(line, text), expected);
    }
    CHECK(at > 150, "only %lld texts", (long long)at);
    for (int i = 0; i < 3; i++)
        free(expected[i]);
    free(line);
    free(text);
    fclose(texts);
    fclose(results);
}

static void encode_one(int64_t at, const char *text, int64_t n, char *lines[3])
{
    static int32_t wanted[ROOM], got[ROOM];
    static const struct {
        const char *what;
        uint32_t flags;
    } way[] = { { "special added", MT_ENCODE_ADD_SPECIAL }, { "literal", MT_ENCODE_LITERAL } };
    for (int i = 0; i < 2; i++) {
        int64_t n_wanted = parse_ids(lines[i], wanted);
        int64_t made = iface->encode(tok, text, n, way[i].flags, got, ROOM);
        CHECK(made >= 0, "%s", status_text());
        check_ids(at, way[i].what, got, made, wanted, n_wanted);
        /* The number comes without room for the ids, too. */
        CHECK(iface->encode(tok, text, n, way[i].flags, NULL, 0) == made, "%s", way[i].what);
    }
}

static void encodes(void)
{
    each_text(encode_one);
}

static void decode_one(int64_t at, const char *text, int64_t n, char *lines[3])
{
    static int32_t ids[ROOM];
    static char wanted[ROOM], got[ROOM];
    (void)text;
    (void)n;
    int64_t n_ids = parse_ids(lines[0], ids), n_wanted = unescape(lines[2], wanted);
    int64_t made = iface->decode(tok, ids, n_ids, 0, got, ROOM);
    CHECK(made == n_wanted && memcmp(got, wanted, (size_t)made) == 0,
          "%s text %lld: '%.*s', expected '%.*s'", style, (long long)at, (int)made, got,
          (int)n_wanted, wanted);
    /* Cut short where there is no room, and still counted. */
    memset(got, 1, 8);
    CHECK(iface->decode(tok, ids, n_ids, 0, got, 3) == made, "%s text %lld", style, (long long)at);
    CHECK(made < 3 || memcmp(got, wanted, 3) == 0, "%s text %lld", style, (long long)at);
    CHECK(got[3] == 1, "%s text %lld: writes behind its room", style, (long long)at);
}

static void decodes(void)
{
    each_text(decode_one);
}

/* Any order of calls and any mixture of texts: the scratch of a call must not leak into another. */
static void again_in_one_text(void)
{
    static const char text[] = "the same <|im_end|> text, twice";
    int32_t first[128], second[128];
    int64_t n = iface->encode(tok, text, sizeof text - 1, 0, first, 128);
    CHECK(n > 0 && n <= 128, "%lld", (long long)n);
    iface->encode(tok, "\xff other", 7, 0, second, 128);
    CHECK(iface->encode(tok, text, sizeof text - 1, 0, second, 128) == n &&
              memcmp(first, second, (size_t)n * sizeof *first) == 0,
          "%s", style);
}

static void knows_its_tokens(void)
{
    int32_t id = iface->token_id(tok, "<|im_end|>", 10);
    char text[32];
    CHECK(id >= 0 && id < iface->vocab_size(tok), "%d", id);
    CHECK(iface->decode(tok, &id, 1, 0, text, sizeof text) == 10 &&
              memcmp(text, "<|im_end|>", 10) == 0,
          "'%.10s'", text);
    CHECK(iface->decode(tok, &id, 1, MT_DECODE_SKIP_SPECIAL, text, sizeof text) == 0, "%s", style);
    CHECK(iface->token_id(tok, "no such token", 13) == -1, "%s", style);
    CHECK(iface->fingerprint(tok) != 0, "%s", style);
    CHECK(iface->special(tok, MT_SPECIAL_END) == -1, "there is no file beside it that says so");
}

int main(int argc, char **argv)
{
    char path[4096];
    if (argc != 4)
        return 2;
    iface = plugin_interface(argv[1], MT_TOKENIZER_INTERFACE);
    folder = argv[2];
    style = argv[3];
    snprintf(path, sizeof path, "%s/%s.json", folder, style);
    if (iface->open(path, &tok) != MT_OK) {
        fprintf(stderr, "%s\n", status_text());
        return 1;
    }
    RUN(encodes);
    RUN(decodes);
    RUN(again_in_one_text);
    RUN(knows_its_tokens);
    iface->close(tok);
    return check_done();
}
