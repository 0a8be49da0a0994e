/* SPDX-License-Identifier: Apache-2.0
 *
 * What patterns make of every character there is, one class after the other, as Hugging Face's
 * tokenizers do: fixtures/tokenizer/classes.txt. Usage: classes tokenizer.so FIXTURES
 */
#include "../data/support.h"

static const mt_tokenizer *iface;
static const char *fixtures;
static char folder[64];

enum { CHARS = 0x110000 };

static bool in_class[CHARS];
static char text[4 * CHARS];

static int64_t put(char *p, uint32_t c)
{
    if (c < 0x80) {
        p[0] = (char)c;
        return 1;
    }
    int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = { 0, 0, 0xc0, 0xe0, 0xf0 };
    for (int i = n - 1; i > 0; i--, c >>= 6)
        p[i] = (char)(0x80 | (c & 0x3f));
    p[0] = (char)(lead[n] | c);
    return n;
}

/* All characters that are, or are not, in the class; returns how many. */
static int64_t write_chars(bool wanted, int64_t *ret_bytes)
{
    int64_t n = 0, bytes = 0;
    for (uint32_t c = 0; c < CHARS; c++)
        if (in_class[c] == wanted && (c < 0xd800 || c >= 0xe000)) {
            bytes += put(text + bytes, c);
            n++;
        }
    *ret_bytes = bytes;
    return n;
}

/* Keeps each match of the pattern, as an unknown character. */
static void *open_pattern(const char *pattern)
{
    char file[1024], escaped[256];
    size_t n = 0;
    for (const char *p = pattern; *p; p++) {
        if (*p == '\\')
            escaped[n++] = '\\';
        escaped[n++] = *p;
    }
    escaped[n] = '\0';
    n = (size_t)snprintf(file, sizeof file,
                         "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"%s\"},"
                         "\"behavior\":\"Removed\",\"invert\":true},\"model\":{\"type\":\"BPE\","
                         "\"unk_token\":\"??\",\"vocab\":{\"??\":0},\"merges\":[]}}",
                         escaped);
    support_write("tokenizer.json", file, n);
    void *t = NULL;
    CHECK(iface->open("tokenizer.json", &t) == MT_OK, "%s", status_text());
    return t;
}

static void read_ranges(char *line)
{
    memset(in_class, 0, sizeof in_class);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) {
        unsigned first = 1, last = 0;
        CHECK(sscanf(word, "%x-%x", &first, &last) == 2 && last < CHARS, "%s", word);
        for (unsigned c = first; c <= last; c++)
            in_class[c] = true;
    }
}

static void matches_every_character(void)
{
    char path[4096], *line = NULL;
    size_t cap = 0;
    int64_t bytes;
    snprintf(path, sizeof path, "%s/classes.txt", fixtures);
    FILE *f = fopen(path, "r");
    CHECK(f, "%s", path);
    support_enter(folder);
    int classes = 0;
    for (; f && getline(&line, &cap, f) > 0; classes++) {
        char *space = strchr(line, ' ');
        *space = '\0';
        void *t = open_pattern(line);
        read_ranges(space + 1);
        int64_t n = write_chars(true, &bytes);
        int64_t found = t ? iface->encode(t, text, bytes, 0, NULL, 0) : -1;
        CHECK(found == n, "%s: %lld of its %lld characters", line, (long long)found, (long long)n);
        write_chars(false, &bytes);
        found = t ? iface->encode(t, text, bytes, 0, NULL, 0) : -1;
        CHECK(found == 0, "%s: %lld characters too many", line, (long long)found);
        iface->close(t);
    }
    CHECK(classes > 15, "%d", classes);
    support_leave(folder);
    free(line);
    if (f)
        fclose(f);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    iface = plugin_interface(argv[1], MT_TOKENIZER_INTERFACE);
    fixtures = argv[2];
    RUN(matches_every_character);
    return check_done();
}
