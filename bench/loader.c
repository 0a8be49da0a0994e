/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast the documents loader makes tokens and gives them to a training loop: a generated JSONL
 * file is tokenised into a cache with one thread and with all, opened from that cache, and read for
 * an epoch. What `next` takes is also given as the share of a core at 13 000 tokens a second, the
 * rate of a 7B model on a large GPU.
 *
 * With text.so the same bytes are read by the loader of text too, a token a byte.
 *
 *     bench-loader documents.so tokenizer.so TOKENIZER.json [MEGABYTES [text.so]]
 */
#include "plugin.h"

#include <megatrain/loader.h>

#include <ftw.h>
#include <time.h>
#include <unistd.h>

enum { TRAINING_RATE = 13000, MAX_SEQ_LEN = 2048, WORDS = 4096 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a manifest ----------------------------------------------------------------------------- */

typedef struct manifest {
    mt_config base;
    const char *file;
    int64_t workers;
} manifest;

static bool has(const mt_config *c, const char *key)
{
    (void)c;
    return strcmp(key, "files") == 0 || strcmp(key, "workers") == 0;
}

static mt_status get_string(const mt_config *c, const char *key, const char **ret)
{
    (void)key;
    *ret = ((const manifest *)c)->file;
    return MT_OK;
}

static mt_status get_int(const mt_config *c, const char *key, int64_t *ret)
{
    (void)key;
    *ret = ((const manifest *)c)->workers;
    return MT_OK;
}

static int64_t length(const mt_config *c, const char *key)
{
    (void)c, (void)key;
    return 0;
}

static mt_status reject(const mt_config *c, const char *key, const char *fmt, ...)
{
    (void)c;
    va_list args;
    va_start(args, fmt);
    char text[512];
    vsnprintf(text, sizeof text, fmt, args);
    bench_set_error("%s: %s", key, text);
    va_end(args);
    return MT_ERR_INVALID;
}

/* ---- data ----------------------------------------------------------------------------------- */

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Prompts and completions of words that recur as those of a language do: low ones often. */
static void write_records(const char *path, int64_t bytes)
{
    static char words[WORDS][12];
    uint64_t state = 1;
    for (int i = 0; i < WORDS; i++) {
        int n = 2 + (int)(draw(&state) % 8);
        for (int k = 0; k < n; k++)
            words[i][k] = "etaoinshrdlucmfwypvbgkjqxz"[draw(&state) % (1 + draw(&state) % 26)];
    }
    FILE *f = fopen(path, "w");
    for (int64_t written = 0; f && written < bytes;) {
        for (int part = 0; part < 2; part++) {
            written += fprintf(f, part ? "\", \"completion\": \"" : "{\"prompt\": \"");
            for (uint32_t n = 20 + draw(&state) % 200; n > 0; n--)
                written += fprintf(f, " %s", words[draw(&state) % (1 + draw(&state) % WORDS)]);
        }
        written += fprintf(f, "\"}\n");
    }
    if (!f || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *f)
{
    (void)st, (void)flag, (void)f;
    return remove(path);
}

/* ---- timing --------------------------------------------------------------------------------- */

typedef struct bench {
    const mt_data *data;
    const mt_tokenizer *tokenizer;
    const void *tokens;
    const char *file, *cache;
    int64_t bytes;
} bench;

static void *open_stream(const bench *b, int64_t workers, double *ret_seconds)
{
    const manifest m = { .base = { .struct_size = offsetof(mt_config, is_null),
                                   .has = has,
                                   .get_int = get_int,
                                   .get_string = get_string,
                                   .length = length,
                                   .reject = reject },
                         .file = b->file,
                         .workers = workers };
    const mt_data_request request = { .struct_size = sizeof request,
                                      .split = MT_SPLIT_TRAIN,
                                      .config = &m.base,
                                      .max_seq_len = MAX_SEQ_LEN,
                                      .world = 1,
                                      .tokenizer = b->tokenizer,
                                      .tokens = b->tokens,
                                      .cache_folder = b->cache };
    void *s = NULL;
    double start = now();
    if (b->data->open(&request, &s) != MT_OK) {
        fprintf(stderr, "open: %s\n", bench_error());
        exit(1);
    }
    *ret_seconds = now() - start;
    return s;
}

static void time_building(const bench *b, int64_t workers)
{
    double seconds;
    int64_t documents, tokens;
    bench anew = *b;
    anew.cache = NULL;
    void *s = open_stream(&anew, workers, &seconds);
    b->data->size(s, &documents, &tokens);
    printf("tokenising, %2lld thread%s: %6.2f M tokens/s, %6.1f MB/s\n", (long long)workers,
           workers == 1 ? " " : "s", (double)tokens / seconds * 1e-6,
           (double)b->bytes / seconds * 1e-6);
    b->data->close(s);
}

static void time_reading(const bench *b, const char *opening)
{
    double seconds;
    int64_t documents, tokens, read = 0;
    mt_document doc;
    b->data->close(open_stream(b, 0, &seconds));
    void *s = open_stream(b, 0, &seconds);
    b->data->size(s, &documents, &tokens);
    printf("%-24s %6.1f ms for %.1f M tokens\n", opening, seconds * 1e3, (double)tokens * 1e-6);
    double start = now();
    for (int64_t i = 0; i < documents; i++) {
        if (b->data->next(s, &doc) != MT_OK) {
            fprintf(stderr, "next: %s\n", bench_error());
            exit(1);
        }
        read += doc.n;
    }
    double rate = (double)read / (now() - start);
    printf("next, shuffled:          %6.1f M tokens/s; %.4f%% of a core at %d tokens/s\n",
           rate * 1e-6, 100 * TRAINING_RATE / rate, TRAINING_RATE);
    b->data->close(s);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr,
                "usage: %s documents.so tokenizer.so TOKENIZER.json [MEGABYTES [text.so]]\n",
                argv[0]);
        return 2;
    }
    char folder[] = "/tmp/bench-loader-XXXXXX", file[64], cache[64];
    void *tokens = NULL;
    bench b = { .data = bench_interface(argv[1], MT_DATA_INTERFACE),
                .tokenizer = bench_interface(argv[2], MT_TOKENIZER_INTERFACE),
                .bytes = (int64_t)(argc > 4 ? atoi(argv[4]) : 16) * 1000000 };
    if (b.tokenizer->open(argv[3], &tokens) != MT_OK || !mkdtemp(folder)) {
        fprintf(stderr, "%s: %s\n", argv[3], bench_error());
        return 1;
    }
    snprintf(file, sizeof file, "%s/a.jsonl", folder);
    snprintf(cache, sizeof cache, "%s/cache", folder);
    b.tokens = tokens;
    b.file = file;
    b.cache = cache;
    write_records(file, b.bytes);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    time_building(&b, 1);
    if (processors > 1)
        time_building(&b, processors);
    time_reading(&b, "opening from the cache:");
    if (argc > 5) {
        b.data = bench_interface(argv[5], MT_DATA_INTERFACE);
        time_reading(&b, "opening text:");
    }
    b.tokenizer->close(tokens);
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}
