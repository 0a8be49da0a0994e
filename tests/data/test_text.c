/* SPDX-License-Identifier: Apache-2.0
 *
 * The text plugin: documents, pieces, splits, order, ranks, positions, and its messages.
 */
#include "support.h"

#include <pthread.h>

#include <stdlib.h>
#include <unistd.h>

static const mt_data *d;
static char folder[64];

static mt_status open_stream(const support_config *c, mt_split split, int64_t len, uint64_t seed,
                             int rank, int world, void **ret)
{
    const mt_data_request request = { .struct_size = sizeof request,
                                      .split = split,
                                      .config = &c->base,
                                      .max_seq_len = len,
                                      .seed = seed,
                                      .rank = rank,
                                      .world = world };
    return d->open(&request, ret);
}

static void *must_open(const support_config *c, mt_split split, int64_t len, uint64_t seed,
                       int rank, int world)
{
    void *s = NULL;
    mt_status status = open_stream(c, split, len, seed, rank, world, &s);
    if (status) {
        fprintf(stderr, "open: %s\n", status_text());
        exit(1);
    }
    return s;
}

static int64_t documents(const void *s)
{
    int64_t n, tokens;
    d->size(s, &n, &tokens);
    return n;
}

static int64_t targets(const void *s)
{
    int64_t n, tokens;
    d->size(s, &n, &tokens);
    return tokens;
}

/* Writes a file in which the pair (i, i + 1) tells where it is: bytes of a de Bruijn-like count. */
static void write_numbers(const char *path, int n)
{
    uint8_t *data = malloc((size_t)n);
    for (int i = 0; i < n; i++)
        data[i] = (uint8_t)(i % 2 ? i / 2 / 256 : i / 2 % 256);
    support_write(path, data, (size_t)n);
    free(data);
}

/* ---- cutting -------------------------------------------------------------------------------- */

static void every_token_is_a_target_once(void)
{
    support_enter(folder);
    static const int lengths[] = { 2, 7, 8, 9, 10, 16, 17, 18, 100, 257 };
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        int n = lengths[k];
        write_numbers("a.txt", n);
        size_t size;
        char *raw = support_read("a.txt", &size);
        support_config c = SUPPORT_CONFIG("files", "a.txt", "validation_split", "0");
        void *s = must_open(&c, MT_SPLIT_TRAIN, 8, 1, 0, 1);
        int64_t pieces = documents(s);
        CHECK(pieces == (n - 1 + 7) / 8, "%d: %d", n, (int)pieces);
        CHECK(targets(s) == n - 1, "%d: %d", n, (int)targets(s));
        int *seen = calloc((size_t)n, sizeof *seen);
        for (int64_t i = 0; i < pieces; i++) {
            mt_document doc;
            CHECK(d->next(s, &doc) == MT_OK, " ");
            CHECK(doc.n >= 2 && doc.n <= 9 && !doc.loss_mask, "%d", (int)doc.n);
            for (int64_t t = 0; t < doc.n; t++) {
                CHECK(doc.tokens[t] == (uint8_t)raw[doc.id * 8 + t], "%d", n);
                if (t > 0)
                    seen[doc.id * 8 + t]++;
            }
        }
        for (int i = 0; i < n; i++)
            CHECK(seen[i] == (i > 0), "%d: token %d is a target %d times", n, i, seen[i]);
        free(seen);
        free(raw);
        d->close(s);
    }
    d->close(NULL);
    support_leave(folder);
}

/* The documents of a file, in corpus order, joined by '|'. */
static void expect_documents(const char *text, const char *separator, const char *want)
{
    support_write("docs.txt", text, strlen(text));
    support_config c = SUPPORT_CONFIG("files", "docs.txt", "document_separator", separator,
                                      "validation_files", "docs2.txt");
    support_write("docs2.txt", text, strlen(text));
    void *s = must_open(&c, MT_SPLIT_VALIDATION, 100, 1, 0, 1);
    char got[256] = "";
    mt_document doc;
    while (d->next(s, &doc) == MT_OK) {
        size_t n = strlen(got);
        got[n++] = '|';
        for (int64_t i = 0; i < doc.n; i++)
            got[n++] = (char)doc.tokens[i];
        got[n] = '\0';
    }
    CHECK(strcmp(got, want) == 0, "'%s', expected '%s'", got, want);
    d->close(s);
}

static void separators(void)
{
    support_enter(folder);
    expect_documents("ab\n\ncd", "none", "|ab\n\ncd");
    expect_documents("ab\n\ncd\nef\n", "blank_line", "|ab\n|cd\nef\n");
    expect_documents("\n\nab\r\n \t\r\n\n\ncd", "blank_line", "|ab\r\n|cd");
    expect_documents("\xef\xbb\xbf"
                     "ab\n\ncd",
                     "none", "|ab\n\ncd");
    expect_documents("\xef\xbb\xbf"
                     "\n\nab\n\xef\xbb\xbf",
                     "blank_line", "|ab\n\xef\xbb\xbf");
    expect_documents("ab<|end|>cd<|end|>", "<|end|>", "|ab|cd");
    expect_documents("<|end|><|end|>ab<|end|>x<|end|>cd<|en", "<|end|>", "|ab|cd<|en");
    support_leave(folder);
}

/* ---- order, ranks, positions ---------------------------------------------------------------- */

static void collect(void *s, int64_t n, int64_t *ids)
{
    mt_document doc;
    for (int64_t i = 0; i < n; i++)
        ids[i] = d->next(s, &doc) == MT_OK ? doc.id : -1;
}

enum { PIECES = 103 };

static void shuffling(void)
{
    support_enter(folder);
    write_numbers("a.txt", PIECES * 8 + 1);
    support_config c = SUPPORT_CONFIG("files", "a.txt", "validation_split", "0");
    int64_t a[3 * PIECES], b[3 * PIECES];
    void *s = must_open(&c, MT_SPLIT_TRAIN, 8, 5, 0, 1);
    CHECK(documents(s) == PIECES, "%d", (int)documents(s));
    collect(s, 3 * PIECES, a);
    d->close(s);
    for (int e = 0; e < 3; e++)
        support_check_shuffled(a + e * PIECES, PIECES, e);
    CHECK(memcmp(a, a + PIECES, PIECES * sizeof *a) != 0, "epochs are alike");
    s = must_open(&c, MT_SPLIT_TRAIN, 8, 5, 0, 1);
    collect(s, 3 * PIECES, b);
    CHECK(memcmp(a, b, sizeof a) == 0, "the same seed gave another order");
    d->close(s);
    s = must_open(&c, MT_SPLIT_TRAIN, 8, 6, 0, 1);
    collect(s, 3 * PIECES, b);
    CHECK(memcmp(a, b, sizeof a) != 0, "another seed gave the same order");
    d->close(s);
    support_leave(folder);
}

static void splits_and_ranks(void)
{
    support_enter(folder);
    write_numbers("a.txt", PIECES * 8 + 1);
    static const char *const fraction[] = { "0", "0.01", "0.05", "0.3", "0.5" };
    static const int held[] = { 0, 1, 5, 30, 51 };
    for (int f = 0; f < 5; f++)
        for (int world = 1; world <= 5; world += 2) {
            support_config c = SUPPORT_CONFIG("files", "a.txt", "validation_split", fraction[f]);
            int seen[PIECES] = { 0 }, val = 0, tokens = 0;
            for (int rank = 0; rank < world; rank++) {
                void *s = must_open(&c, MT_SPLIT_TRAIN, 8, 5, rank, world);
                int64_t n = documents(s);
                CHECK(n == (PIECES - held[f] - rank + world - 1) / world, "%d", (int)n);
                mt_document doc;
                for (int64_t i = 0; i < n; i++) {
                    CHECK(d->next(s, &doc) == MT_OK, " ");
                    seen[doc.id]++;
                }
                tokens += (int)targets(s);
                d->close(s);
                s = must_open(&c, MT_SPLIT_VALIDATION, 8, 5, rank, world);
                int64_t last = -1, count = 0;
                while (d->next(s, &doc) == MT_OK) {
                    CHECK(doc.id > last, "validation is out of order");
                    last = doc.id;
                    seen[doc.id]++;
                    val++;
                    count++;
                }
                CHECK(count == documents(s), " ");
                CHECK(d->next(s, &doc) == MT_END, " ");
                tokens += (int)targets(s);
                CHECK(d->seek(s, 0, 0) == MT_OK, " ");
                CHECK(count == 0 ? d->next(s, &doc) == MT_END : d->next(s, &doc) == MT_OK, " ");
                d->close(s);
            }
            for (int i = 0; i < PIECES; i++)
                CHECK(seen[i] == 1, "%s, %d ranks: piece %d seen %d times", fraction[f], world, i,
                      seen[i]);
            CHECK(val == held[f], "%d", val);
            CHECK(world > 1 || tokens == PIECES * 8, "%d", tokens);
        }
    support_leave(folder);
}

static void positions(void)
{
    support_enter(folder);
    write_numbers("a.txt", PIECES * 8 + 1);
    support_config c = SUPPORT_CONFIG("files", "a.txt");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 8, 9, 1, 2);
    int64_t n = documents(s), all = 3 * n;
    int64_t *ids = calloc((size_t)all, sizeof *ids), *epoch = calloc((size_t)all, sizeof *epoch),
            *index = calloc((size_t)all, sizeof *index);
    mt_document doc;
    for (int64_t i = 0; i < all; i++) {
        d->tell(s, &epoch[i], &index[i]);
        CHECK(epoch[i] == i / n && index[i] == i % n, "%d", (int)i);
        ids[i] = d->next(s, &doc) == MT_OK ? doc.id : -1;
    }
    d->close(s);
    for (int64_t i = 0; i < all; i += 7) {
        s = must_open(&c, MT_SPLIT_TRAIN, 8, 9, 1, 2);
        CHECK(d->seek(s, epoch[i], index[i]) == MT_OK, "%s", status_text());
        for (int64_t k = i; k < all; k++)
            CHECK(d->next(s, &doc) == MT_OK && doc.id == ids[k], "%d from %d", (int)k, (int)i);
        d->close(s);
    }
    s = must_open(&c, MT_SPLIT_TRAIN, 8, 9, 1, 2);
    CHECK(d->seek(s, 0, n + 1) == MT_ERR_INVALID && support_says("not that of the checkpoint"),
          " ");
    CHECK(d->seek(s, -1, 0) == MT_ERR_INVALID, " ");
    CHECK(d->vocab_size(s) == 256, " ");
    d->close(s);
    free(ids);
    free(epoch);
    free(index);
    support_leave(folder);
}

/* ---- files and messages --------------------------------------------------------------------- */

static void refuse(const support_config *c, const char *text)
{
    void *s = &s;
    mt_status status = open_stream(c, MT_SPLIT_TRAIN, 8, 1, 0, 1, &s);
    CHECK(status < 0 && s == &s, "opened; expected '%s'", text);
    CHECK(support_says(text), " ");
}

static void patterns(void)
{
    support_enter(folder);
    support_write("b.txt", "bbbb", 4);
    support_write("a.txt", "aaa", 3);
    support_write("c.log", "cc", 2);
    support_write("e.txt", "", 0);
    support_write("x[1].txt", "xxxxx", 5);
    CHECK(mkdir("sub.txt", 0777) == 0, " ");
    log_set_level(MT_LOG_ERROR);
    support_config c =
        SUPPORT_CONFIG("files.0", "c.log", "files.1", "[ab]*.txt", "validation_split", "0");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 8, 1, 0, 1);
    CHECK(documents(s) == 3 && targets(s) == 1 + 2 + 3, "%d", (int)targets(s));
    mt_document doc;
    char first[3] = "";
    for (int i = 0; i < 3; i++) {
        CHECK(d->next(s, &doc) == MT_OK, " ");
        first[doc.id] = (char)doc.tokens[0];
    }
    CHECK(memcmp(first, "cab", 3) == 0, "%.3s", first);
    d->close(s);
    c = SUPPORT_CONFIG("files", "*.txt", "validation_split", "0"); /* passes e.txt, sub.txt over */
    s = must_open(&c, MT_SPLIT_TRAIN, 8, 1, 0, 1);
    CHECK(documents(s) == 3, "%d", (int)documents(s));
    d->close(s);
    c = SUPPORT_CONFIG("files", "x[1].txt", "validation_split", "0");
    s = must_open(&c, MT_SPLIT_TRAIN, 8, 1, 0, 1);
    CHECK(targets(s) == 4, "%d", (int)targets(s));
    d->close(s);
    c = SUPPORT_CONFIG("files", "a.txt"); /* one piece: all training */
    s = must_open(&c, MT_SPLIT_TRAIN, 8, 1, 0, 1);
    CHECK(documents(s) == 1, " ");
    d->close(s);
    s = must_open(&c, MT_SPLIT_VALIDATION, 8, 1, 0, 1);
    CHECK(documents(s) == 0 && d->next(s, &doc) == MT_END, " ");
    d->close(s);
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

static void a_file_that_shrinks(void)
{
    support_enter(folder);
    write_numbers("shrinks.txt", 20000);
    const support_config c = SUPPORT_CONFIG("files", "shrinks.txt", "validation_split", "0");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 64, 1, 0, 1);
    mt_document doc;
    CHECK(d->next(s, &doc) == MT_OK, "%s", status_text());
    CHECK(truncate("shrinks.txt", 10) == 0, " ");
    CHECK(d->next(s, &doc) == MT_ERR_IO && support_says("shrinks.txt: has become shorter"), " ");
    d->close(s);
    support_leave(folder);
}

static void *shrink_and_grow(void *stop)
{
    while (!*(_Atomic bool *)stop) {
        CHECK(truncate("shrinks.txt", 10) == 0, " ");
        CHECK(truncate("shrinks.txt", 1 << 20) == 0, " ");
    }
    return NULL;
}

/* Whenever it happens it is an error, and the process goes on. */
static void a_file_that_shrinks_at_any_time(void)
{
    support_enter(folder);
    write_numbers("shrinks.txt", 1 << 20);
    const support_config c = SUPPORT_CONFIG("files", "shrinks.txt", "validation_split", "0");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 4096, 1, 0, 1);
    _Atomic bool stop = false;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, shrink_and_grow, &stop) == 0, " ");
    int good = 0, bad = 0;
    for (int i = 0; i < 20000 || (i < 2000000 && (!good || !bad)); i++) {
        mt_document doc;
        mt_status status = d->next(s, &doc);
        CHECK(status == MT_OK || status == MT_ERR_IO, "%d", status);
        good += status == MT_OK;
        bad += status == MT_ERR_IO;
    }
    stop = true;
    pthread_join(thread, NULL);
    CHECK(good && bad, "%d read, %d refused", good, bad);
    d->close(s);
    support_leave(folder);
}

/* Those behind the first 256 are opened for every read. */
static void many_files(void)
{
    enum { FILES = 260 };
    char name[32];
    support_enter(folder);
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "%03d.txt", i);
        write_numbers(name, 20 + i);
    }
    const support_config c = SUPPORT_CONFIG("files", "*.txt", "validation_split", "0");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 512, 1, 0, 1);
    mt_document doc;
    CHECK(documents(s) == FILES, "%d", (int)documents(s));
    for (int i = 0; i < FILES; i++) {
        size_t size;
        CHECK(d->next(s, &doc) == MT_OK, "%s", status_text());
        snprintf(name, sizeof name, "%03d.txt", (int)doc.id);
        char *raw = support_read(name, &size);
        bool same = (int64_t)size == doc.n;
        for (int64_t k = 0; k < doc.n && same; k++)
            same = doc.tokens[k] == (uint8_t)raw[k];
        CHECK(same, "%s", name);
        free(raw);
    }
    for (int i = 256; i < FILES; i++) {
        snprintf(name, sizeof name, "%03d.txt", i);
        CHECK(i % 2 ? truncate(name, 3) == 0 : unlink(name) == 0, "%s", name);
    }
    int refused = 0;
    for (int i = 0; i < FILES; i++)
        refused +=
            d->next(s, &doc) == MT_ERR_IO && (support_says("shorter") || support_says("open"));
    CHECK(refused == FILES - 256, "%d", refused);
    d->close(s);
    support_leave(folder);
}

/* Separators of all kinds of places in a file of several blocks, those across two among them: the
 * documents are the parts between the places where the text was put together. */
static void separators_across_blocks(void)
{
    enum { SIZE = 3 << 20, MOST = 400000 };
    support_enter(folder);
    char *text = malloc(SIZE + 200);
    int64_t *start = malloc(MOST * sizeof *start), *length = malloc(MOST * sizeof *length);
    for (int lines = 0; lines < 2; lines++) {
        int64_t n = 0, docs = 0;
        uint32_t x = 7;
        while (n < SIZE && docs < MOST) {
            x = x * 1664525 + 1013904223;
            start[docs] = n;
            for (uint32_t k = 2 + (x >> 20) % (docs % 50 ? 30 : 90); k > 0; k--)
                text[n++] = "abc-=d e"[(x >> k % 24) % 8];
            text[n - 1] = 'z';
            n += lines ? 1 : 0;
            if (lines)
                text[n - 1] = '\n';
            length[docs] = n - start[docs];
            docs++;
            memcpy(text + n, lines ? " \t\n\n" : "--=--", lines ? 4 : 5);
            n += lines ? 4 : 5;
        }
        support_write("docs.txt", text, (size_t)n);
        support_write("other.txt", "ab", 2);
        const support_config c =
            SUPPORT_CONFIG("files", "other.txt", "validation_files", "docs.txt",
                           "document_separator", lines ? "blank_line" : "--=--");
        void *s = must_open(&c, MT_SPLIT_VALIDATION, 100, 1, 0, 1);
        CHECK(documents(s) == docs, "%d documents, expected %d", (int)documents(s), (int)docs);
        int64_t wrong = 0;
        for (int64_t i = 0; i < docs; i++) {
            mt_document doc = { 0 };
            CHECK(d->next(s, &doc) == MT_OK, "%s", status_text());
            wrong += doc.n != length[i];
            for (int64_t k = 0; k < doc.n && doc.n == length[i]; k++)
                wrong += doc.tokens[k] != (uint8_t)text[start[i] + k];
        }
        CHECK(wrong == 0, "%d differences", (int)wrong);
        d->close(s);
    }
    free(text);
    free(start);
    free(length);
    support_leave(folder);
}

static void messages(void)
{
    support_enter(folder);
    support_write("a.txt", "some text", 9);
    support_write("b.txt", "other text", 10);
    support_write("e.txt", "", 0);
    support_write("one.txt", "1", 1);
    CHECK(mkdir("sub", 0777) == 0, " ");
    support_config c = SUPPORT_CONFIG();
    refuse(&c, "files");
    c = SUPPORT_CONFIG("files", "no.txt");
    refuse(&c, "'no.txt': cannot open: No such file");
    c = SUPPORT_CONFIG("files.0", "a.txt", "files.1", "no.txt");
    refuse(&c, "files.1: 'no.txt'");
    c = SUPPORT_CONFIG("files", "*.csv");
    refuse(&c, "matches no file");
    c = SUPPORT_CONFIG("files", "e.txt");
    refuse(&c, "is empty");
    c = SUPPORT_CONFIG("files", "one.txt");
    refuse(&c, "at least two bytes");
    c = SUPPORT_CONFIG("files", "sub");
    refuse(&c, "is a folder; name files, or use a pattern such as 'sub/*.txt'");
    c = SUPPORT_CONFIG("files", "/dev/null");
    refuse(&c, "not a regular file");
    c = SUPPORT_CONFIG("files.0", "a.txt", "files.1", "./a.txt");
    refuse(&c, "more than once");
    c = SUPPORT_CONFIG("files.0", "a.txt", "files.1", "b.txt", "validation_files", "b.txt");
    refuse(&c, "'b.txt' is among 'files' too");
    c = SUPPORT_CONFIG("files", "a.txt", "validation_split", "0.7");
    refuse(&c, "is 0.7; expected a fraction");
    c = SUPPORT_CONFIG("files", "a.txt", "validation_split", "nan");
    refuse(&c, "expected a fraction");
    c = SUPPORT_CONFIG("files", "a.txt", "document_separator", "");
    refuse(&c, "is empty");
    c = SUPPORT_CONFIG("files", "a.txt", "validation_files", "b.txt", "validation_split", "0.1");
    refuse(&c, "remove one of the two");
    if (geteuid() != 0) {
        CHECK(chmod("a.txt", 0) == 0, " ");
        c = SUPPORT_CONFIG("files", "a.txt");
        refuse(&c, "Permission denied");
    }
    c = SUPPORT_CONFIG("files", "b.txt", "validation_split", "0");
    void *s;
    CHECK(open_stream(&c, MT_SPLIT_TRAIN, 8, 1, 0, 3, &s) == MT_ERR_INVALID &&
              support_says("too few for 3 ranks"),
          " ");
    support_leave(folder);
}

static void tokenizer(const mt_tokenizer *t)
{
    void *k = NULL;
    CHECK(t->open("x", &k) == MT_ERR_UNSUPPORTED && support_says("x"), " ");
    CHECK(t->open(NULL, &k) == MT_OK, " ");
    CHECK(t->vocab_size(k) == 256 && t->special(k, MT_SPECIAL_END) == -1, " ");
    char all[256], back[256];
    int32_t ids[256];
    for (int i = 0; i < 256; i++)
        all[i] = (char)i;
    CHECK(t->encode(k, all, 256, 0, ids, 10) == 256 && ids[9] == 9, " ");
    CHECK(t->encode(k, all, 256, 0, ids, 256) == 256 && ids[255] == 255, " ");
    CHECK(t->decode(k, ids, 256, 0, back, 256) == 256 && memcmp(all, back, 256) == 0, " ");
    int32_t odd[3] = { 'a', 300, 'b' };
    CHECK(t->decode(k, odd, 3, 0, back, 4) == 5 && memcmp(back, "a\xef\xbf\xbd", 4) == 0, " ");
    t->close(k);
}

static const mt_tokenizer *tokens;

static void byte_tokenizer(void)
{
    tokenizer(tokens);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    d = plugin_interface(argv[1], MT_DATA_INTERFACE);
    tokens = plugin_interface(argv[1], MT_TOKENIZER_INTERFACE);
    RUN(every_token_is_a_target_once);
    RUN(separators);
    RUN(shuffling);
    RUN(splits_and_ranks);
    RUN(positions);
    RUN(patterns);
    RUN(messages);
    RUN(a_file_that_shrinks);
    RUN(a_file_that_shrinks_at_any_time);
    RUN(many_files);
    RUN(separators_across_blocks);
    RUN(byte_tokenizer);
    return check_done();
}
