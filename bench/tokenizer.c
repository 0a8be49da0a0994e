/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast a tokenizer encodes a text: bytes and tokens a second of one core, in documents of about
 * 4000 bytes as a loader hands them over, the best of some rounds. Times are the thread's own, so
 * that others on the machine count little. Without a FILE, words drawn by Zipf's law.
 *
 *     bench-tokenizer PLUGIN.so TOKENIZER.json [FILE]
 */
#include "plugin.h"

#include <megatrain/loader.h>

#include <time.h>

enum { DOCUMENT = 4000, ROUNDS = 5, WORDS = 4000, GENERATED = 4 << 20 };

/* ---- text ----------------------------------------------------------------------------------- */

static char *read_file(const char *path, int64_t *ret_n)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        exit(1);
    }
    fseek(f, 0, SEEK_END);
    int64_t n = ftell(f);
    rewind(f);
    char *text = malloc((size_t)n + 1);
    if (!text || fread(text, 1, (size_t)n, f) != (size_t)n) {
        perror(path);
        exit(1);
    }
    fclose(f);
    *ret_n = n;
    return text;
}

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Words of 1 to 10 letters; the word of rank r is drawn about 1 / r of the time. */
static char *generate(int64_t *ret_n)
{
    static char word[WORDS][12];
    static const char letters[] = "eeeeetttaaaooiinnsshhrrddllucmfwygpbvk";
    char *text = malloc(GENERATED + 16);
    uint64_t state = 1;
    int64_t n = 0;
    if (!text)
        exit(1);
    for (int i = 0; i < WORDS; i++)
        for (uint32_t k = 0, length = 1 + draw(&state) % 10; k < length; k++)
            word[i][k] = letters[draw(&state) % (sizeof letters - 1)];
    while (n < GENERATED) {
        uint32_t range = 1 + draw(&state) % WORDS;
        const char *w = word[draw(&state) % range];
        n += sprintf(text + n, "%s%s", w, draw(&state) % 12 ? " " : ".\n");
    }
    *ret_n = n;
    return text;
}

/* The end of the document that starts at `at`: behind a new line, or at least no character is cut.
 */
static int64_t document_end(const char *text, int64_t at, int64_t n)
{
    int64_t end = at + DOCUMENT < n ? at + DOCUMENT : n;
    const char *newline = memchr(text + end, '\n', (size_t)(n - end));
    if (newline && newline - text < end + DOCUMENT)
        return newline + 1 - text;
    while (end < n && ((uint8_t)text[end] & 0xc0) == 0x80)
        end++;
    return end;
}

/* ---- timing --------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int64_t encode_all(const mt_tokenizer *iface, void *t, const char *text, int64_t n)
{
    static int32_t ids[4 * DOCUMENT];
    int64_t tokens = 0;
    for (int64_t at = 0, end; at < n; at = end) {
        end = document_end(text, at, n);
        tokens += iface->encode(t, text + at, end - at, MT_ENCODE_ADD_SPECIAL, ids, 4 * DOCUMENT);
    }
    return tokens;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: bench-tokenizer PLUGIN.so TOKENIZER.json [FILE]\n");
        return 2;
    }
    const mt_tokenizer *iface = bench_interface(argv[1], MT_TOKENIZER_INTERFACE);
    void *t = NULL;
    int64_t n, tokens = 0;
    double best = 1e9, start = seconds();
    if (iface->open(argv[2], &t) != MT_OK) {
        fprintf(stderr, "%s\n", bench_error());
        return 1;
    }
    double opened = seconds() - start;
    char *text = argc > 3 ? read_file(argv[3], &n) : generate(&n);
    for (int i = 0; i < ROUNDS; i++) {
        start = seconds();
        tokens = encode_all(iface, t, text, n);
        double took = seconds() - start;
        best = took < best ? took : best;
    }
    printf("%-28s %6.1f MB  opened in %.2f s  %6.2f MB/s  %6.2f M tokens/s  %.2f bytes a token\n",
           argc > 3 ? argv[3] : "words", (double)n / 1e6, opened, (double)n / 1e6 / best,
           (double)tokens / 1e6 / best, (double)n / (double)tokens);
    free(text);
    iface->close(t);
    return 0;
}
