/* SPDX-License-Identifier: Apache-2.0
 *
 * The documents plugin: order, weights, splits, ranks, positions, token files, and the token cache.
 * Formats and labels are in test_documents.c.
 */
#include "../bad_disk.h"
#include "documents.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { LONG = 1000, RECORDS = 103 };

/* RECORDS texts of different lengths; id and content tell which one a document is. */
static void write_records(const char *path, int n)
{
    FILE *f = fopen(path, "w");
    for (int i = 0; i < n; i++)
        fprintf(f, "{\"text\": \"record %0*d\"}\n", 3 + i % 5, i);
    fclose(f);
}

static void collect(void *s, int64_t n, int64_t *ids)
{
    mt_document doc;
    for (int64_t i = 0; i < n; i++)
        ids[i] = d->next(s, &doc) == MT_OK ? doc.id : -1;
}

/* ---- order ---------------------------------------------------------------------------------- */

static void shuffling(void)
{
    support_enter(folder);
    write_records("a.jsonl", RECORDS);
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", "validation_split", "0");
    int64_t a[3 * RECORDS], b[3 * RECORDS];
    void *s = must_open(&c, MT_SPLIT_TRAIN, LONG, 0, 1);
    CHECK(documents(s) == RECORDS, "%d", (int)documents(s));
    collect(s, 3 * RECORDS, a);
    d->close(s);
    for (int e = 0; e < 3; e++)
        support_check_shuffled(a + e * RECORDS, RECORDS, e);
    CHECK(memcmp(a, a + RECORDS, RECORDS * sizeof *a) != 0, "epochs are alike");
    s = must_open(&c, MT_SPLIT_TRAIN, LONG, 0, 1);
    collect(s, 3 * RECORDS, b);
    CHECK(memcmp(a, b, sizeof a) == 0, "the same seed gave another order");
    d->close(s);
    const support_config plain = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    s = must_open(&plain, MT_SPLIT_TRAIN, LONG, 0, 1);
    collect(s, 3 * RECORDS, b);
    for (int i = 0; i < 3 * RECORDS; i++)
        CHECK(b[i] == i % RECORDS, "%d: %d", i, (int)b[i]);
    d->close(s);
    support_leave(folder);
}

static void splits_and_ranks(void)
{
    static const char *const fraction[] = { "0", "0.01", "0.05", "0.3", "0.5" };
    static const int held[] = { 0, 1, 5, 30, 51 };
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    write_records("a.jsonl", RECORDS);
    for (int f = 0; f < 5; f++)
        for (int world = 1; world <= 5; world += 2) {
            const support_config c =
                SUPPORT_CONFIG("files", "a.jsonl", "validation_split", fraction[f]);
            int seen[RECORDS] = { 0 }, val = 0;
            int64_t tokens = 0, counted = 0;
            for (int rank = 0; rank < world; rank++) {
                mt_document doc;
                void *s = must_open(&c, MT_SPLIT_TRAIN, LONG, rank, world);
                int64_t n = documents(s);
                CHECK(n == (RECORDS - held[f] - rank + world - 1) / world, "%d", (int)n);
                for (int64_t i = 0; i < n; i++) {
                    CHECK(d->next(s, &doc) == MT_OK, " ");
                    seen[doc.id]++;
                    tokens += doc.n - 1;
                }
                counted += inputs(s);
                d->close(s);
                s = must_open(&c, MT_SPLIT_VALIDATION, LONG, rank, world);
                int64_t last = -1, count = 0, here = 0;
                while (d->next(s, &doc) == MT_OK) {
                    CHECK(doc.id > last, "validation is out of order");
                    last = doc.id;
                    seen[doc.id]++;
                    val++;
                    count++;
                    here += doc.n - 1;
                }
                CHECK(count == documents(s) && here == inputs(s), "%d", (int)here);
                CHECK(d->next(s, &doc) == MT_END, " ");
                d->close(s);
            }
            for (int i = 0; i < RECORDS; i++)
                CHECK(seen[i] == 1, "%s, %d ranks: record %d seen %d times", fraction[f], world, i,
                      seen[i]);
            CHECK(val == held[f], "%d", val);
            /* Of several ranks each says its mean. */
            CHECK(world == 1 ? tokens == counted : llabs(tokens - counted) <= world, "%d: %d",
                  (int)tokens, (int)counted);
        }
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

static void validation_files(void)
{
    support_enter(folder);
    write_text("a.jsonl", "{\"text\": \"train\"}");
    write_text("b.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}");
    const support_config c =
        SUPPORT_CONFIG("files", "a.jsonl", "validation_files", "b.jsonl", "shuffle", "false");
    expect(&c, LONG, "<s>[train</s>]");
    void *s = must_open(&c, MT_SPLIT_VALIDATION, LONG, 0, 1);
    char text[64] = "";
    mt_document doc;
    CHECK(documents(s) == 1 && d->next(s, &doc) == MT_OK, " ");
    toy_write(&doc, text, sizeof text);
    CHECK(strcmp(text, "<s>x[y</s>]") == 0, "%s", text);
    d->close(s);
    support_leave(folder);
}

static void weights(void)
{
    enum { A = 10, B = 20, C = 30, EPOCH = 2 * A + B + C / 2 };
    support_enter(folder);
    write_records("a.jsonl", A);
    write_records("b.jsonl", B);
    write_records("c.jsonl", C);
    const support_config c = SUPPORT_CONFIG(
        "datasets.0.files", "a.jsonl", "datasets.0.weight", "2", "datasets.1.files", "b.jsonl",
        "datasets.2.files", "c.jsonl", "datasets.2.weight", "0.5", "validation_split", "0");
    void *s = must_open(&c, MT_SPLIT_TRAIN, LONG, 0, 1);
    CHECK(documents(s) == EPOCH, "%d", (int)documents(s));
    int both[A + B + C] = { 0 };
    for (int e = 0; e < 2; e++) {
        int seen[A + B + C] = { 0 }, of_c = 0;
        int64_t ids[EPOCH];
        collect(s, EPOCH, ids);
        for (int i = 0; i < EPOCH; i++) {
            seen[ids[i]]++;
            both[ids[i]]++;
        }
        for (int i = 0; i < A + B + C; i++) {
            int most = i < A ? 2 : 1;
            CHECK(i >= A + B ? seen[i] <= 1 : seen[i] == most, "%d: %d times", i, seen[i]);
            of_c += i >= A + B ? seen[i] : 0;
        }
        CHECK(of_c == C / 2, "%d", of_c);
    }
    for (int i = A + B; i < A + B + C; i++)
        CHECK(both[i] == 1, "two epochs see record %d %d times", i, both[i]);
    d->close(s);
    support_leave(folder);
}

/* Fault 16: going on in the middle of epoch 2 gives exactly what had not been seen. */
static void positions(void)
{
    support_enter(folder);
    write_records("a.jsonl", RECORDS);
    write_records("b.jsonl", RECORDS / 2);
    const support_config c = SUPPORT_CONFIG("datasets.0.files", "a.jsonl", "datasets.1.files",
                                            "b.jsonl", "datasets.1.weight", "0.7");
    log_set_level(MT_LOG_ERROR);
    void *s = must_open(&c, MT_SPLIT_TRAIN, 16, 1, 2);
    int64_t n = documents(s), all = 3 * n;
    int64_t *ids = calloc((size_t)all, sizeof *ids);
    mt_document doc;
    for (int64_t i = 0; i < all; i++) {
        int64_t epoch = -1, index = -1;
        d->tell(s, &epoch, &index);
        CHECK(epoch == i / n && index == i % n, "%d", (int)i);
        ids[i] = d->next(s, &doc) == MT_OK ? doc.id : -1;
    }
    d->close(s);
    for (int64_t i = 0; i < all; i += 17) {
        s = must_open(&c, MT_SPLIT_TRAIN, 16, 1, 2);
        CHECK(d->seek(s, i / n, i % n) == MT_OK, "%s", status_text());
        for (int64_t k = i; k < all; k++)
            CHECK(d->next(s, &doc) == MT_OK && doc.id == ids[k], "%d from %d", (int)k, (int)i);
        d->close(s);
    }
    s = must_open(&c, MT_SPLIT_TRAIN, 16, 1, 2);
    CHECK(d->seek(s, 0, n + 1) == MT_ERR_INVALID && support_says("not that of the checkpoint"),
          " ");
    CHECK(d->seek(s, -1, 0) == MT_ERR_INVALID, " ");
    d->close(s);
    d->close(NULL);
    free(ids);
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

static uint64_t fingerprint(const support_config *c)
{
    void *s = must_open(c, MT_SPLIT_TRAIN, 16, 0, 1);
    uint64_t hash = d->fingerprint(s);
    d->close(s);
    return hash;
}

/* By which a run is not resumed with other data, though there be as much of it. */
static void fingerprints(void)
{
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    write_text("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
    write_text("b.jsonl", "{\"text\": \"one\"}\n{\"text\": \"twp\"}\n");
    write_text("a.bin", "0123456789");
    write_text("b.bin", "0123456788");
    const support_config configs[] = {
        SUPPORT_CONFIG("files", "a.jsonl", "validation_split", "0"),
        SUPPORT_CONFIG("files", "b.jsonl", "validation_split", "0"),
        SUPPORT_CONFIG("files", "a.jsonl", "validation_split", "0.5"),
        SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER),
        SUPPORT_CONFIG("datasets.0.files", "a.jsonl", "datasets.0.weight", "2", IN_ORDER),
        SUPPORT_CONFIG("files", "a.bin", "dtype", "uint16", IN_ORDER),
        SUPPORT_CONFIG("files", "b.bin", "dtype", "uint16", IN_ORDER),
    };
    enum { CONFIGS = sizeof configs / sizeof *configs };
    for (int i = 0; i < CONFIGS; i++) {
        CHECK(fingerprint(&configs[i]) == fingerprint(&configs[i]), "%d", i);
        for (int k = 0; k < i; k++)
            CHECK(fingerprint(&configs[i]) != fingerprint(&configs[k]), "%d and %d", i, k);
    }
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* ---- token files ---------------------------------------------------------------------------- */

static void write_tokens(const char *path, int32_t magic, int32_t version, int width,
                         const int32_t *ids, int32_t n)
{
    FILE *f = fopen(path, "wb");
    int32_t header[256] = { magic, version, n };
    if (magic)
        fwrite(header, sizeof header, 1, f);
    for (int32_t i = 0; i < n; i++)
        fwrite(&ids[i], (size_t)width, 1, f); /* little-endian */
    fclose(f);
}

static void token_files(void)
{
    static const int32_t ids[] = { TOY_END, 'a', 'b', 'c', TOY_END, 'd', 'e', TOY_END, 'f', 'g' };
    support_enter(folder);
    write_tokens("2.bin", 20240520, 1, 2, ids, 10);
    write_tokens("4.bin", 20240801, 7, 4, ids, 10);
    write_tokens("bare2.bin", 0, 0, 2, ids, 10);
    write_tokens("bare4.bin", 0, 0, 4, ids, 10);
    static const char want[] = "a[bc</s>] / d[e</s>] / f[g]";
    support_config c = SUPPORT_CONFIG("files", "2.bin", IN_ORDER);
    expect(&c, LONG, want);
    c = SUPPORT_CONFIG("files", "4.bin", IN_ORDER);
    expect(&c, LONG, want);
    c = SUPPORT_CONFIG("files", "bare2.bin", IN_ORDER, "dtype", "uint16");
    expect(&c, LONG, want);
    c = SUPPORT_CONFIG("files", "bare4.bin", IN_ORDER, "dtype", "uint32");
    expect(&c, LONG, want);
    c = SUPPORT_CONFIG("files", "2.bin", IN_ORDER, "end_token", "98"); /* 'b' */
    expect(&c, LONG, "</s>[ab] / c[</s>de</s>fg]");
    c = SUPPORT_CONFIG("files", "2.bin", IN_ORDER, "end_token", "null");
    expect(&c, 4, "</s>[abc</s>] / </s>[de</s>f] / f[g]");
    c = SUPPORT_CONFIG("files.0", "2.bin", "files.1", "4.bin", IN_ORDER);
    void *s = must_open(&c, MT_SPLIT_TRAIN, LONG, 0, 1);
    CHECK(documents(s) == 6 && inputs(s) == 12 && d->vocab_size(s) == TOY_END + 1, "%d",
          (int)documents(s));
    d->close(s);

    c = SUPPORT_CONFIG("files", "bare2.bin");
    refuse(&c, "dtype: is missing: 'bare2.bin' has no header");
    write_tokens("odd.bin", 0, 0, 1, ids, 9);
    c = SUPPORT_CONFIG("files", "odd.bin", "dtype", "uint16");
    refuse(&c, "odd.bin: 9 bytes are no whole number of uint16");
    write_tokens("new.bin", 20240520, 2, 2, ids, 10);
    c = SUPPORT_CONFIG("files", "new.bin");
    refuse(&c, "version 2 of a token file; expected 1");
    CHECK(truncate("4.bin", 1060) == 0, " ");
    c = SUPPORT_CONFIG("files", "4.bin");
    refuse(&c, "4.bin: 1060 bytes, but its header says 10 tokens, which are 1064");
    support_leave(folder);
}

/* Documents of many lengths, across whatever blocks they are searched in. */
static void every_end_token_is_found(void)
{
    enum { N = 20000 };
    static int32_t ids[N];
    support_enter(folder);
    for (int i = 0, next = 3, length = 1; i < N; i++) {
        ids[i] = i == next ? TOY_END : i % 251;
        if (i == next)
            next += ++length;
    }
    write_tokens("2.bin", 20240520, 1, 2, ids, N);
    write_tokens("4.bin", 20240801, 7, 4, ids, N);
    for (int f = 0; f < 2; f++) {
        const support_config c = SUPPORT_CONFIG("files", f ? "4.bin" : "2.bin", IN_ORDER);
        void *s = must_open(&c, MT_SPLIT_TRAIN, LONG, 0, 1);
        mt_document doc;
        int64_t n = documents(s), at = 0;
        for (int64_t i = 0; i < n; i++) {
            CHECK(d->next(s, &doc) == MT_OK, " ");
            CHECK(memcmp(doc.tokens, ids + at, (size_t)doc.n * sizeof *ids) == 0, "%d", (int)i);
            for (int64_t k = 0; k < doc.n; k++)
                CHECK((doc.tokens[k] == TOY_END) == (k == doc.n - 1 && i < n - 1), "%d", (int)i);
            at += doc.n;
        }
        CHECK(at == N && d->vocab_size(s) == TOY_END + 1, "%d tokens", (int)at);
        d->close(s);
    }
    support_leave(folder);
}

static void a_token_file_that_shrinks(void)
{
    enum { N = 4000 };
    static int32_t ids[N];
    support_enter(folder);
    write_tokens("a.bin", 0, 0, 2, ids, N);
    const support_config c =
        SUPPORT_CONFIG("files", "a.bin", "dtype", "uint16", "end_token", "null");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 64, 0, 1);
    mt_document doc;
    CHECK(d->next(s, &doc) == MT_OK, "%s", status_text());
    CHECK(truncate("a.bin", 10) == 0, " ");
    CHECK(d->next(s, &doc) == MT_ERR_IO && support_says("a.bin: has become shorter"), " ");
    d->close(s);
    support_leave(folder);
}

/* What the ids were when the file was opened says what the model needs. */
static void a_token_file_that_changes(void)
{
    enum { N = 4000 };
    static int32_t ids[N];
    support_enter(folder);
    for (int wide = 0; wide < 2; wide++) {
        memset(ids, 0, sizeof ids);
        write_tokens("a.bin", 0, 0, wide ? 4 : 2, ids, N);
        const support_config c = SUPPORT_CONFIG("files", "a.bin", "dtype",
                                                wide ? "uint32" : "uint16", "end_token", "null");
        void *s = must_open(&c, MT_SPLIT_TRAIN, 64, 0, 1);
        mt_document doc;
        CHECK(d->next(s, &doc) == MT_OK, "%s", status_text());
        FILE *f = fopen("a.bin", "r+");
        for (int i = 0; i < N * (wide ? 4 : 2); i++)
            fputc(0xff, f);
        CHECK(fclose(f) == 0, " ");
        CHECK(d->next(s, &doc) == MT_ERR_IO, "%d", wide);
        CHECK(support_says("a.bin: has become another one: token ") &&
                  support_says("and all were below 1; leave the data alone"),
              "%s", status_text());
        d->close(s);
    }
    support_leave(folder);
}

/* Token files with bytes altered or cut off are refused, or read with what they promise. */
static void mutated_token_files(void)
{
    enum { N = 60 };
    const char *rounds = getenv("MT_TEST_ROUNDS");
    int32_t ids[N];
    uint32_t state = 1;
    int opened = 0, refused = 0;
    support_enter(folder);
    for (int i = 0; i < N; i++)
        ids[i] = i % 9 == 8 ? TOY_END : i;
    for (int round = 0; round < (rounds ? atoi(rounds) : 600); round++) {
        size_t size;
        int width = round % 2 ? 2 : 4;
        if (round % 4 < 2)
            write_tokens("a.bin", width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, width, ids,
                         N);
        else
            write_tokens("a.bin", 0, 0, width, ids, N);
        char *raw = support_read("a.bin", &size);
        for (int k = 0; k < 1 + round % 3; k++) {
            state = state * 1664525u + 1013904223u;
            size_t at = round % 8 < 4 ? (state >> 8) % 16 : (state >> 8) % size;
            if (state >> 28 == 0)
                size = at > 1 ? at : 2;
            else
                raw[at] = (char)(state >> 4);
        }
        support_write("a.bin", raw, size);
        free(raw);
        const support_config c =
            SUPPORT_CONFIG("files", "a.bin", "dtype", width == 2 ? "uint16" : "uint32", IN_ORDER);
        void *s = NULL;
        mt_document doc;
        if (open_stream(&c, MT_SPLIT_TRAIN, 16, 0, 1, &s) != MT_OK) {
            refused++;
            CHECK(*status_text(), "an error without a word");
            continue;
        }
        opened++;
        for (int64_t i = documents(s); i > 0; i--) {
            CHECK(d->next(s, &doc) == MT_OK && doc.n >= 2 && doc.n <= 17, "round %d", round);
            for (int64_t k = 0; k < doc.n; k++)
                CHECK(doc.tokens[k] >= 0 && doc.tokens[k] < d->vocab_size(s), "round %d: token %d",
                      round, doc.tokens[k]);
        }
        d->close(s);
    }
    CHECK(opened > 20 && refused > 20, "%d opened, %d refused", opened, refused);
    support_leave(folder);
}

/* Between any two instructions, too. */
static void *shrink_and_grow(void *stop)
{
    while (!atomic_load((_Atomic bool *)stop)) {
        CHECK(truncate("a.bin", 10) == 0, " ");
        CHECK(truncate("a.bin", 1 << 20) == 0, " ");
    }
    return NULL;
}

static void a_token_file_that_shrinks_at_any_time(void)
{
    static int32_t ids[1 << 19];
    support_enter(folder);
    write_tokens("a.bin", 0, 0, 2, ids, 1 << 19);
    const support_config c =
        SUPPORT_CONFIG("files", "a.bin", "dtype", "uint16", "end_token", "null");
    void *s = must_open(&c, MT_SPLIT_TRAIN, 4096, 0, 1);
    _Atomic bool stop = false;
    pthread_t thread;
    int whole = 0, cut = 0;
    CHECK(pthread_create(&thread, NULL, shrink_and_grow, &stop) == 0, " ");
    for (int i = 0; i < 200000 && (i < 20000 || !whole || !cut); i++) {
        mt_document doc;
        mt_status status = d->next(s, &doc);
        whole += status == MT_OK;
        cut += status == MT_ERR_IO;
    }
    stop = true;
    pthread_join(thread, NULL);
    CHECK(whole > 0 && cut > 0, "%d documents, %d errors", whole, cut);
    d->close(s);
    support_leave(folder);
}

/* Samples of one input: so many that their table is in a file. */
static void a_table_that_is_large(void)
{
    enum { TOKENS = (256 << 20) / 16 + 5000, EVERY = 1 << 16 };
    int32_t *ids = malloc(TOKENS * sizeof *ids);
    support_enter(folder);
    for (int i = 0; i < TOKENS; i++)
        ids[i] = (int)((i * 7919LL) % 65536);
    write_tokens("a.bin", 0, 0, 2, ids, TOKENS);
    const support_config c =
        SUPPORT_CONFIG("files", "a.bin", "dtype", "uint16", "end_token", "null", IN_ORDER);
    void *s = must_open(&c, MT_SPLIT_TRAIN, 1, 0, 1);
    CHECK(documents(s) == TOKENS - 1 && inputs(s) == TOKENS - 1, "%lld, %lld",
          (long long)documents(s), (long long)inputs(s));
    mt_document doc;
    for (int i = 0; i < TOKENS - 1; i += EVERY) {
        CHECK(d->seek(s, 0, i) == MT_OK && d->next(s, &doc) == MT_OK, "%s", status_text());
        CHECK(doc.id == i && doc.n == 2 && doc.tokens[0] == ids[i] && doc.tokens[1] == ids[i + 1],
              "sample %d: %lld, %d", i, (long long)doc.id, doc.tokens[0]);
    }
    bad_disk.kind = DISK_FAILS;
    CHECK(d->next(s, &doc) == MT_ERR_IO, " ");
    bad_disk.kind = DISK_GOOD;
    CHECK(strstr(status_text(), "table of samples in temporary files: cannot read at byte") &&
              strstr(status_text(), "Input/output error; choose another folder with data.cache"),
          "'%s'", status_text());
    d->close(s);
    free(ids);
    support_leave(folder);
}

/* ---- the cache ------------------------------------------------------------------------------ */

static bool ends_in(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

/* The one token cache of the folder; its name without the folder. */
static bool find_cache(char name[300], int *ret_n, int *ret_others)
{
    DIR *dir = opendir("cache");
    *ret_n = *ret_others = 0;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        bool tokens = ends_in(e->d_name, ".tokens");
        bool memo = ends_in(e->d_name, ".hash") || ends_in(e->d_name, ".used");
        if (tokens)
            snprintf(name, 300, "cache/%s", e->d_name);
        *ret_n += tokens;
        *ret_others += e->d_name[0] != '.' && !tokens && !memo;
    }
    if (dir)
        closedir(dir);
    return *ret_n > 0;
}

static int count_memos(void)
{
    DIR *dir = opendir("cache");
    int n = 0;
    for (struct dirent *e; dir && (e = readdir(dir));)
        n += ends_in(e->d_name, ".hash");
    if (dir)
        closedir(dir);
    return n;
}

/* Texts that were tokenised to open the stream and read an epoch, whose documents are returned. */
static const char *read_counted(const support_config *c, int64_t *ret_encoded)
{
    language.encoded = 0;
    const char *text = all_documents(c, 16);
    *ret_encoded = language.encoded;
    return text;
}

/* To find out what stands before texts, the tokenizer is asked about one letter, in two ways. */
enum { ASKED = 2 };

static void caches(void)
{
    int64_t encoded;
    int n, others;
    char name[300], want[1 << 15];
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    write_records("a.jsonl", RECORDS);
    cache_folder = NULL;
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", "validation_split", "0");
    snprintf(want, sizeof want, "%s", read_counted(&c, &encoded));
    CHECK(encoded == ASKED + RECORDS, "%d", (int)encoded);
    cache_folder = "cache";
    const support_config off =
        SUPPORT_CONFIG("files", "a.jsonl", "validation_split", "0", "cache", "off");
    CHECK(strcmp(read_counted(&off, &encoded), want) == 0, "no cache");
    CHECK(encoded == ASKED + RECORDS && !support_exists("cache"), "%d", (int)encoded);
    CHECK(strcmp(read_counted(&c, &encoded), want) == 0, "making the cache");
    CHECK(encoded == ASKED + RECORDS, "%d", (int)encoded);
    CHECK(find_cache(name, &n, &others) && n == 1 && others == 0, "%d caches, %d others", n,
          others);
    CHECK(strcmp(read_counted(&c, &encoded), want) == 0, "from the cache");
    CHECK(encoded == ASKED, "%d", (int)encoded);
    const support_config elsewhere =
        SUPPORT_CONFIG("files", "a.jsonl", "validation_split", "0", "cache", "x/y/z");
    CHECK(strcmp(read_counted(&elsewhere, &encoded), want) == 0, "a folder of one's own");
    CHECK(encoded == ASKED + RECORDS && support_exists("x/y/z"), "%d", (int)encoded);
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

static void what_makes_a_cache_stale(void)
{
    int64_t encoded;
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    cache_folder = "cache";
    write_text("a.jsonl", "{\"text\": \"one\"}\n");
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    CHECK(strcmp(read_counted(&c, &encoded), "<s>[one</s>]") == 0, " ");
    write_text("a.jsonl", "{\"text\": \"ond\"}\n"); /* one byte, at the same size */
    CHECK(strcmp(read_counted(&c, &encoded), "<s>[ond</s>]") == 0, " ");
    CHECK(encoded == ASKED + 1, "%d", (int)encoded);
    write_text("a.jsonl", "{\"text\": \"one\"}\n");
    CHECK(strcmp(read_counted(&c, &encoded), "<s>[one</s>]") == 0, " ");
    CHECK(encoded == ASKED, "what the file held before is known: %d", (int)encoded);
    language.fingerprint++;
    (void)read_counted(&c, &encoded);
    CHECK(encoded == ASKED + 1, "another tokenizer: %d", (int)encoded);
    language = usual;
    const support_config named = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "format", "text");
    (void)read_counted(&named, &encoded);
    CHECK(encoded == ASKED + 1, "another format: %d", (int)encoded);
    const support_config column =
        SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "columns.prompt", "x");
    (void)read_counted(&column, &encoded);
    CHECK(encoded == ASKED + 1, "other columns: %d", (int)encoded);
    const support_config skip = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "on_error", "skip");
    (void)read_counted(&skip, &encoded);
    CHECK(encoded == ASKED + 1, "another policy: %d", (int)encoded);
    const support_config longer =
        SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "long_documents", "drop");
    (void)read_counted(&longer, &encoded);
    CHECK(encoded == ASKED, "documents are kept whole: %d", (int)encoded);
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

static void write_on(const char *text, int64_t n)
{
    if (n == 3 && memcmp(text, "one", 3) == 0)
        write_text("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
}

/* What a file held when its key was made is not what was tokenised: no cache may say so. */
static void files_that_change_meanwhile(void)
{
    int n, others;
    char name[300];
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    cache_folder = "cache";
    write_text("a.jsonl", "{\"text\": \"one\"}\n");
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    language.meets = write_on;
    refuse(&c, "a.jsonl: changed while");
    CHECK(!find_cache(name, &n, &others) && n == 0, "%d caches", n);
    expect(&c, 64, "<s>[one</s>] / <s>[two</s>]");
    language.meets = NULL;
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* Files that have been left alone for a while are known by their times; a change still shows. */
static void files_that_settled(void)
{
    int64_t encoded;
    int n, others;
    char name[300];
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    cache_folder = "cache";
    write_text("a.jsonl", "{\"text\": \"one\"}\n");
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    (void)read_counted(&c, &encoded);
    sleep(4); /* longer than the coarsest grain of file times */
    for (int i = 0; i < 2; i++) {
        CHECK(strcmp(read_counted(&c, &encoded), "<s>[one</s>]") == 0, " ");
        CHECK(encoded == ASKED, "%d", (int)encoded);
        CHECK(count_memos() == 2, "of the file and of its cache: %d", count_memos());
    }
    write_text("a.jsonl", "{\"text\": \"ond\"}\n");
    CHECK(strcmp(read_counted(&c, &encoded), "<s>[ond</s>]") == 0, " ");
    CHECK(find_cache(name, &n, &others) && n == 2 && others == 0, "%d caches", n);
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* A cache that is cut or altered anywhere is noticed and made anew. */
static void damaged_caches(void)
{
    int64_t encoded;
    int n, others;
    size_t size;
    char name[300], want[1 << 15];
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    cache_folder = "cache";
    write_records("a.jsonl", 40);
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    snprintf(want, sizeof want, "%s", read_counted(&c, &encoded));
    CHECK(find_cache(name, &n, &others) && n == 1, "%d caches", n);
    char *whole = support_read(name, &size);
    for (size_t at = 0; at < size; at += at < 128 ? 7 : 61) {
        char *bad = malloc(size);
        memcpy(bad, whole, size);
        bad[at] ^= 0x10;
        support_write(name, bad, size);
        free(bad);
        CHECK(strcmp(read_counted(&c, &encoded), want) == 0, "byte %zu", at);
        CHECK(encoded == ASKED + 40, "byte %zu was not noticed", at);
        support_write(name, whole, at);
        CHECK(strcmp(read_counted(&c, &encoded), want) == 0, "cut to %zu bytes", at);
        CHECK(encoded == ASKED + 40, "the cut to %zu bytes was not noticed", at);
    }
    size_t again;
    char *new = support_read(name, &again);
    CHECK(again == size && memcmp(new, whole, size) == 0, "made anew, it is another");
    free(new);
    free(whole);
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* A disk that fails, and a cache that shrinks, while it is opened or read. */
static void caches_that_cannot_be_read(void)
{
    enum { HEADER = 96 };
    static const struct {
        bad_disk_kind kind;
        size_t least; /* of the reads that are bad */
        bool opening;
        const char *message;
    } cases[] = {
        { DISK_FAILS, 1, true, "cannot read at byte 0: Input/output error" },
        { DISK_FAILS, HEADER + 1, true, "cannot read at byte 96: Input/output error" },
        { FILE_SHRINKS, HEADER + 1, true, "has become shorter than the " },
        { DISK_FAILS, 1, false, ": Input/output error" },
        { FILE_SHRINKS, 1, false, "has become shorter than the " },
    };
    int n, others;
    char name[300];
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    cache_folder = "cache";
    write_records("a.jsonl", RECORDS);
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        (void)all_documents(&c, 16);
        CHECK(find_cache(name, &n, &others) && n == 1, "%d caches", n);
        mt_document doc;
        void *s = cases[i].opening ? NULL : must_open(&c, MT_SPLIT_TRAIN, 16, 0, 1);
        bad_disk.least = cases[i].least;
        bad_disk.kind = cases[i].kind;
        mt_status status = s ? d->next(s, &doc) : open_stream(&c, MT_SPLIT_TRAIN, 16, 0, 1, &s);
        bad_disk.kind = DISK_GOOD;
        bad_disk.least = 0;
        CHECK(status == MT_ERR_IO, "case %zu: %d", i, status);
        CHECK(strncmp(status_text(), name, strlen(name)) == 0 &&
                  strstr(status_text(), cases[i].message) &&
                  strstr(status_text(), "; remove it, and it is made anew"),
              "case %zu: '%s'", i, status_text());
        if (s)
            d->close(s);
    }
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* Of several processes that need the same cache one makes it, over what a killed one has left. */
static void processes_share_the_work(void)
{
    enum { PROCESSES = 4 };
    int n, others, encoded[PROCESSES], made = 0;
    int64_t once;
    char name[300], part[310];
    support_enter(folder);
    log_set_level(MT_LOG_ERROR);
    cache_folder = "cache";
    write_records("a.jsonl", 5000);
    const support_config c = SUPPORT_CONFIG("files", "a.jsonl", IN_ORDER, "workers", "1");
    language.encoded = 0;
    d->close(must_open(&c, MT_SPLIT_TRAIN, 16, 0, 1));
    once = language.encoded;
    CHECK(find_cache(name, &n, &others) && n == 1 && others == 0, "%d caches", n);
    snprintf(part, sizeof part, "%s.part", name);
    CHECK(rename(name, part) == 0, " ");
    for (int i = 0; i < PROCESSES; i++) {
        int ends[2];
        CHECK(pipe(ends) == 0, " ");
        if (fork() == 0) {
            language.encoded = 0;
            d->close(must_open(&c, MT_SPLIT_TRAIN, 16, 0, 1));
            int count = (int)language.encoded;
            _exit(write(ends[1], &count, sizeof count) != sizeof count);
        }
        close(ends[1]);
        encoded[i] = ends[0];
    }
    for (int i = 0; i < PROCESSES; i++) {
        int count = -1;
        CHECK(read(encoded[i], &count, sizeof count) == sizeof count, "process %d", i);
        close(encoded[i]);
        CHECK(count == ASKED || count == (int)once, "process %d: %d", i, count);
        made += count == (int)once;
    }
    while (wait(NULL) > 0)
        continue;
    CHECK(made == 1, "%d of them tokenised", made);
    CHECK(find_cache(name, &n, &others) && n == 1 && others == 0, "%d caches, %d others", n,
          others);
    cache_folder = NULL;
    log_set_level(MT_LOG_INFO);
    support_leave(folder);
}

/* Tokens, marks and order do not depend on the number of threads. */
static void threads_change_nothing(void)
{
    static const char *const workers[] = { "1", "2", "7" };
    static char cache[3][300];
    support_enter(folder);
    write_records("a.jsonl", 30000);
    char *content[3];
    size_t size[3];
    for (int i = 0; i < 3; i++) {
        int n, others;
        const support_config c = SUPPORT_CONFIG("files", "a.jsonl", "workers", workers[i]);
        cache_folder = "cache";
        d->close(must_open(&c, MT_SPLIT_TRAIN, 16, 0, 1));
        CHECK(find_cache(cache[i], &n, &others) && n == 1, "%d caches", n);
        content[i] = support_read(cache[i], &size[i]);
        support_remove("cache");
    }
    for (int i = 1; i < 3; i++) {
        CHECK(size[i] == size[0] && memcmp(content[i], content[0], size[0]) == 0, "%s workers",
              workers[i]);
        free(content[i]);
    }
    free(content[0]);
    cache_folder = NULL;
    support_leave(folder);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    d = plugin_interface(argv[1], MT_DATA_INTERFACE);
    RUN(shuffling);
    RUN(splits_and_ranks);
    RUN(validation_files);
    RUN(weights);
    RUN(positions);
    RUN(fingerprints);
    RUN(token_files);
    RUN(every_end_token_is_found);
    RUN(a_token_file_that_shrinks);
    RUN(a_token_file_that_changes);
    RUN(mutated_token_files);
    RUN(a_token_file_that_shrinks_at_any_time);
    RUN(a_table_that_is_large);
    RUN(caches);
    RUN(what_makes_a_cache_stale);
    RUN(files_that_change_meanwhile);
    RUN(files_that_settled);
    RUN(damaged_caches);
    RUN(caches_that_cannot_be_read);
    RUN(processes_share_the_work);
    RUN(threads_change_nothing);
    return check_done();
}
