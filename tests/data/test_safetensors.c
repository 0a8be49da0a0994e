/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors plugin: round trips, shards, and every way in which files can be wrong.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

static const mt_weights *w;
static char folder[64];

static mt_tensor_info tensor(const char *name, mt_dtype dtype, int32_t ndim, int64_t d0, int64_t d1)
{
    mt_tensor_info t = { .name = name, .dtype = dtype, .ndim = ndim, .dim = { d0, d1 } };
    t.bytes = mt_dtype_size(dtype) * (ndim > 0 ? d0 : 1) * (ndim > 1 ? d1 : 1);
    return t;
}

static uint8_t byte_of(int64_t tensor, int64_t i)
{
    return (uint8_t)(tensor * 31 + i * 7 + (i >> 8));
}

/* Writes the list with byte_of patterns, in pieces of `piece` bytes. */
static mt_status write_set(const char *stem, const mt_tensor_info *list, int64_t n, int64_t shard,
                           int64_t piece)
{
    void *out;
    mt_status status = w->create(".", stem, list, n, shard, &out);
    uint8_t *data = malloc((size_t)piece);
    if (status)
        goto out;
    for (int64_t t = 0; t < n; t++)
        for (int64_t at = 0; at < list[t].bytes; at += piece) {
            int64_t k = list[t].bytes - at < piece ? list[t].bytes - at : piece;
            for (int64_t i = 0; i < k; i++)
                data[i] = byte_of(t, at + i);
            if ((status = w->write(out, t, data, k))) {
                w->abort(out);
                goto out;
            }
        }
    status = w->finish(out);
out:
    free(data);
    return status;
}

/* The set at `path` is exactly the list, with byte_of contents. */
static void expect_set(const char *path, const mt_tensor_info *list, int64_t n)
{
    void *r;
    mt_status status = w->open(path, &r);
    CHECK(status == MT_OK, "%s", status_text());
    if (status)
        return;
    CHECK(w->count(r) == n, "%d", (int)w->count(r));
    int64_t found = 0;
    for (int64_t i = 0; i < w->count(r); i++) {
        mt_tensor_info t;
        CHECK(w->info(r, i, &t) == MT_OK, " ");
        for (int64_t k = 0; k < n; k++) {
            if (strcmp(list[k].name, t.name) != 0)
                continue;
            found++;
            CHECK(t.dtype == list[k].dtype && t.ndim == list[k].ndim && t.bytes == list[k].bytes,
                  "%s", t.name);
            CHECK(memcmp(t.dim, list[k].dim, sizeof t.dim) == 0, "%s", t.name);
            uint8_t *data = malloc((size_t)t.bytes + 1);
            int64_t half = t.bytes / 2, wrong = 0;
            CHECK(w->read(r, i, 0, half, data) == MT_OK, "%s", status_text());
            CHECK(w->read(r, i, half, t.bytes - half, data + half) == MT_OK, "%s", status_text());
            for (int64_t b = 0; b < t.bytes; b++)
                wrong += data[b] != byte_of(k, b);
            CHECK(wrong == 0, "%s: %d bytes differ", t.name, (int)wrong);
            CHECK(w->read(r, i, t.bytes, 1, data) == MT_ERR_INVALID, "past the end");
            CHECK(w->read(r, i, -1, 1, data) == MT_ERR_INVALID, "before the start");
            free(data);
        }
    }
    CHECK(found == n, "%d of %d", (int)found, (int)n);
    w->close(r);
}

static int count_files(void)
{
    FILE *p = popen("ls -A | wc -l", "r");
    int n = -1;
    if (fscanf(p, "%d", &n) != 1)
        n = -1;
    pclose(p);
    return n;
}

/* ---- writing and reading back --------------------------------------------------------------- */

static void round_trip(void)
{
    support_enter(folder);
    mt_tensor_info list[16];
    int64_t n = 0;
    static const char *const name[MT_DTYPE_COUNT] = { "f32", "bf16", "f64", "f16", "i8",
                                                      "i16", "i32",  "i64", "u8",  "u16",
                                                      "u32", "u64",  "b",   "e4",  "e5" };
    for (mt_dtype d = 0; d < MT_DTYPE_COUNT; d++)
        list[n++] = tensor(name[d], d, 2, 3 + d, 5);
    list[n++] = tensor("scalar", MT_F32, 0, 0, 0);
    CHECK(write_set("model", list, n, 0, 13) == MT_OK, "%s", status_text());
    CHECK(count_files() == 1, "%d", count_files());
    expect_set(".", list, n);
    expect_set("./model.safetensors", list, n);
    expect_set("model", list, n);
    CHECK(w->probe(".") && w->probe("model.safetensors") && !w->probe("/proc"), "probe");

    size_t size;
    char *raw = support_read("model.safetensors", &size);
    uint64_t header;
    memcpy(&header, raw, 8);
    CHECK(header % 8 == 0, "%d", (int)header);
    CHECK(strstr(raw + 8, "{\"__metadata__\":{\"format\":\"pt\"}") == raw + 8, "%.60s", raw + 8);
    free(raw);
    support_leave(folder);
}

static void empty_sets_and_tensors(void)
{
    support_enter(folder);
    CHECK(write_set("none", NULL, 0, 0, 8) == MT_OK, "%s", status_text());
    expect_set("none", NULL, 0);
    mt_tensor_info list[] = { tensor("a", MT_F32, 2, 0, 4), tensor("b", MT_F32, 1, 4, 0),
                              tensor("c", MT_F32, 2, 4, 0), tensor("d", MT_U8, 1, 1, 0),
                              tensor("e", MT_F32, 1, 0, 0) };
    CHECK(write_set("model", list, 5, 0, 8) == MT_OK, "%s", status_text());
    expect_set(".", list, 5);
    CHECK(write_set("model", list, 5, 1, 8) == MT_OK, "%s", status_text());
    expect_set(".", list, 5);
    support_leave(folder);
}

static void shards(void)
{
    support_enter(folder);
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 10, 0), tensor("b", MT_F32, 1, 10, 0),
                              tensor("big", MT_F32, 2, 10, 10), tensor("c", MT_BF16, 1, 3, 0) };
    CHECK(write_set("model", list, 4, 80, 16) == MT_OK, "%s", status_text());
    CHECK(support_exists("model-00001-of-00003.safetensors"), " ");
    CHECK(support_exists("model-00003-of-00003.safetensors"), " ");
    CHECK(support_exists("model.safetensors.index.json"), " ");
    CHECK(count_files() == 4, "%d", count_files());
    expect_set(".", list, 4);
    expect_set("model", list, 4);
    expect_set("model.safetensors.index.json", list, 4);

    /* A smaller set over a larger one, and back: nothing of the older one stays. */
    CHECK(write_set("model", list, 2, 0, 16) == MT_OK, "%s", status_text());
    CHECK(count_files() == 1, "%d", count_files());
    expect_set(".", list, 2);
    CHECK(write_set("model", list, 4, 410, 16) == MT_OK, "%s", status_text());
    CHECK(count_files() == 3, "%d", count_files());
    expect_set(".", list, 4);
    CHECK(write_set("model", list, 4, 80, 16) == MT_OK, "%s", status_text());
    CHECK(count_files() == 4, "%d", count_files());
    /* Files of another stem are none of its business. */
    CHECK(write_set("mod", list, 4, 410, 16) == MT_OK, "%s", status_text());
    CHECK(count_files() == 7, "%d", count_files());
    expect_set("mod", list, 4);
    expect_set("model", list, 4);
    support_leave(folder);
}

static void abort_leaves_the_old_set(void)
{
    support_enter(folder);
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 10, 0), tensor("b", MT_F32, 1, 10, 0) };
    CHECK(write_set("model", list, 2, 40, 16) == MT_OK, "%s", status_text());
    void *out;
    float x[10] = { 0 };
    CHECK(w->create(".", "model", list, 2, 40, &out) == MT_OK, " ");
    CHECK(w->write(out, 0, x, 40) == MT_OK, " ");
    w->abort(out);
    expect_set(".", list, 2);
    CHECK(count_files() == 3, "%d", count_files());
    /* finish refuses what is not complete. */
    CHECK(w->create(".", "model", list, 2, 40, &out) == MT_OK, " ");
    CHECK(w->write(out, 0, x, 40) == MT_OK, " ");
    CHECK(w->finish(out) == MT_ERR_INVALID && support_says("'b' lacks 40 bytes"), " ");
    expect_set(".", list, 2);
    CHECK(count_files() == 3, "%d", count_files());
    /* Out of order, too much. */
    CHECK(w->create(".", "model", list, 2, 0, &out) == MT_OK, " ");
    CHECK(w->write(out, 1, x, 4) == MT_ERR_INVALID, " ");
    w->abort(out);
    CHECK(w->create(".", "model", list, 2, 0, &out) == MT_OK, " ");
    CHECK(w->write(out, 0, x, 44) == MT_ERR_INVALID, " ");
    w->abort(out);
    w->abort(NULL);
    w->close(NULL);
    mt_tensor_info twice[] = { list[0], list[0] };
    CHECK(w->create(".", "x", twice, 2, 0, &out) == MT_ERR_INVALID && support_says("twice"), " ");
    CHECK(w->create("./no-folder", "x", list, 2, 0, &out) == MT_ERR_IO, " ");
    support_leave(folder);
}

/* ---- in any order, by several threads ------------------------------------------------------- */

enum { PIECES = 96, PIECE = 40 };

typedef struct scattered {
    void *out;
    const mt_tensor_info *list;
    _Atomic int next;
    _Atomic int failures;
} scattered;

/* Piece (37 i) mod 96 of the tensors' bytes as if they stood one behind the other. */
static void *write_scattered(void *arg)
{
    scattered *s = arg;
    uint8_t data[PIECE];
    for (int i; (i = s->next++) < PIECES;) {
        int64_t t = 0, at = i * 37 % PIECES * PIECE;
        for (; at >= s->list[t].bytes; t++)
            at -= s->list[t].bytes;
        for (int64_t k = 0; k < PIECE; k++)
            data[k] = byte_of(t, at + k);
        s->failures += w->write_at(s->out, t, at, data, PIECE) != MT_OK;
    }
    return NULL;
}

static void scattered_writes(void)
{
    support_enter(folder);
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 200, 0), tensor("none", MT_F32, 1, 0, 0),
                              tensor("b", MT_F32, 2, 20, 20), tensor("c", MT_BF16, 1, 20, 0),
                              tensor("d", MT_F32, 1, 350, 0) };
    for (int64_t shard = 0; shard <= 900; shard += 450) {
        scattered s = { .list = list };
        pthread_t thread[4];
        CHECK(w->create(".", "model", list, 5, shard, &s.out) == MT_OK, "%s", status_text());
        for (int i = 0; i < 4; i++)
            pthread_create(&thread[i], NULL, write_scattered, &s);
        for (int i = 0; i < 4; i++)
            pthread_join(thread[i], NULL);
        CHECK(s.failures == 0 && w->finish(s.out) == MT_OK, "%s", status_text());
        expect_set(".", list, 5);
        CHECK(write_set("again", list, 5, shard, 64) == MT_OK, "%s", status_text());
        CHECK(system("for f in model*.safetensors; do cmp $f again${f#model} || exit 1; done") == 0,
              "shards of %d bytes are not those that are written in order", (int)shard);
        CHECK(system("rm *") == 0, " ");
    }
    void *out;
    uint8_t x[1601] = { 0 };
    CHECK(w->create(".", "model", list, 5, 450, &out) == MT_OK, " ");
    CHECK(w->write_at(out, 4, 700, x, 700) == MT_OK && w->write_at(out, 2, 0, x, 1600) == MT_OK,
          "%s", status_text());
    CHECK(w->finish(out) == MT_ERR_INVALID && support_says("'a' lacks 800 bytes"), " ");
    static const struct {
        int64_t index, offset, n;
    } bad[] = { { 5, 0, 1 }, { -1, 0, 1 }, { 0, 1, 800 }, { 0, -1, 1 }, { 0, 801, 0 } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(w->create(".", "model", list, 5, 450, &out) == MT_OK, " ");
        CHECK(w->write_at(out, bad[i].index, bad[i].offset, x, bad[i].n) == MT_ERR_INVALID, "%d",
              (int)i);
        CHECK(w->write_at(out, 0, 0, x, 1) == MT_ERR_INVALID && support_says("earlier"), " ");
        w->abort(out);
    }
    CHECK(w->create(".", "model", list, 5, 0, &out) == MT_OK, " ");
    CHECK(w->write_at(out, 0, 0, x, 500) == MT_OK, " ");
    CHECK(w->write_at(out, 0, 200, x, 400) == MT_ERR_INVALID && support_says("given before"), " ");
    w->abort(out);
    CHECK(count_files() == 0, "%d", count_files());
    support_leave(folder);
}

/* ---- what is read once ---------------------------------------------------------------------- */

static bool in_page_cache(const char *path, size_t size)
{
    unsigned char pages[2048] = { 0 };
    int fd = open(path, O_RDONLY);
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    size_t n = (size + 4095) / 4096, found = 0;
    CHECK(map != MAP_FAILED && n <= sizeof pages && mincore(map, size, pages) == 0, " ");
    for (size_t i = 0; i < n; i++)
        found += pages[i] & 1;
    munmap(map, size);
    close(fd);
    return found > n / 2;
}

/* Writes what is not written, so that pages can be dropped; false where the disk cannot be had
 * without the page cache. */
static bool forget(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0)
        return false;
    CHECK(fdatasync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, " ");
    close(fd);
    return true;
}

/* Past the page cache, whatever the places of the bytes are; from it, where they are there. */
static void read_once(void)
{
    support_enter(folder);
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 100001, 0), tensor("b", MT_U8, 1, 4500007, 0),
                              tensor("c", MT_U8, 1, 300000, 0) };
    const char *file = "model.safetensors";
    CHECK(write_set("model", list, 3, 0, 1 << 20) == MT_OK, "%s", status_text());
    for (int cached = 0; cached < 2; cached++) {
        struct stat st;
        void *r;
        stat(file, &st);
        bool direct = forget(file);
        if (cached)
            free(support_read(file, &(size_t){ 0 }));
        CHECK(w->open(".", &r) == MT_OK, "%s", status_text());
        w->read_once(r);
        w->read_once(r);
        uint8_t *data = malloc(5000000);
        static const int64_t places[][2] = { { 0, 4500007 },
                                             { 1, 4096 * 512 },
                                             { 4095, 300000 },
                                             { 4100000, 400007 },
                                             { 17, 2 * 4096 * 512 + 1 } };
        for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
            int64_t at = places[i][0], n = places[i][1], wrong = 0;
            CHECK(w->read(r, 1, at, n, data) == MT_OK, "%s", status_text());
            for (int64_t k = 0; k < n; k++)
                wrong += data[k] != byte_of(1, at + k);
            CHECK(wrong == 0, "%d bytes from %d on differ", (int)wrong, (int)at);
        }
        if (direct && !cached)
            CHECK(!in_page_cache(file, (size_t)st.st_size), "it went through the page cache");
        /* The end of the file goes, and is named all the same. */
        CHECK(truncate(file, st.st_size - 100000) == 0, " ");
        CHECK(w->read(r, 2, 0, 300000, data) == MT_ERR_IO && support_says("ends at byte"), " ");
        w->close(r);
        free(data);
        CHECK(write_set("model", list, 3, 0, 1 << 20) == MT_OK, "%s", status_text());
    }
    support_leave(folder);
}

static void full_device(void)
{
    void *out;
    if (!support_exists("/dev/full"))
        return;
    support_enter(folder);
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 10, 0) };
    /* The temporary name leads to a device that is always full. */
    char temp[64];
    snprintf(temp, sizeof temp, "model.safetensors.tmp-%ld", (long)getpid());
    CHECK(symlink("/dev/full", temp) == 0, " ");
    CHECK(w->create(".", "model", list, 1, 0, &out) == MT_ERR_IO, " ");
    CHECK(support_says("No space left on device") && support_says("free some space"), " ");
    CHECK(count_files() == 0, "%d", count_files());
    support_leave(folder);
}

/* ---- malformed files ------------------------------------------------------------------------ */

static void write_raw(const char *path, const char *header, uint64_t length, size_t data)
{
    size_t n = strlen(header);
    char *raw = calloc(1, 8 + n + data);
    memcpy(raw, &length, 8);
    memcpy(raw + 8, header, n);
    support_write(path, raw, 8 + n + data);
    free(raw);
}

/* A single file with this header and so many bytes of data fails with `code`, saying `text`. */
static void refuse(const char *header, size_t data, mt_status code, const char *text)
{
    void *r = &code;
    write_raw("model.safetensors", header, strlen(header), data);
    mt_status status = w->open(".", &r);
    CHECK(status == code, "%d for %s", status, header);
    CHECK(support_says("model.safetensors") && support_says(text), "%s", header);
    CHECK(r == &code, "output touched");
}

#define T(name, dtype, shape, b, e)                                                                \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #b "," #e "]}"

static void malformed(void)
{
    support_enter(folder);
    void *r;
    const mt_status f = MT_ERR_FORMAT;
    refuse("{" T("a", "F32", "[4]", 0, 16) "}", 12, f, "truncated");
    refuse("{" T("a", "F32", "[4]", 0, 16) "}", 20, f, "follows");
    refuse("{" T("a", "F32", "[4]", 0, 16) "," T("b", "F32", "[4]", 8, 24) "}", 24, f,
           "'b' starts at byte 8 of the data, expected 16 (it overlaps");
    refuse("{" T("a", "F32", "[4]", 0, 16) "," T("b", "F32", "[4]", 20, 36) "}", 36, f,
           "'b' starts at byte 20 of the data, expected 16 (a hole");
    refuse("{" T("a", "F32", "[4]", 4, 20) "}", 20, f, "a hole");
    refuse("{" T("a", "F31", "[4]", 0, 16) "}", 16, f, "unknown dtype 'F31'");
    refuse("{" T("a", "F32", "[5]", 0, 16) "}", 16, f, "span 16 bytes");
    refuse("{" T("a", "F32", "[4]", 16, 0) "}", 16, f, "in order");
    refuse("{" T("a", "F32", "[-4]", 0, 16) "}", 16, f, "dimension 0");
    refuse("{" T("a", "F32", "[4.0]", 0, 16) "}", 16, f, "dimension 0");
    refuse("{" T("a", "F32", "[4611686018427387904,4]", 0, 0) "}", 0, f, "2^63");
    refuse("{" T("a", "F32", "[4611686018427387904,4,0]", 0, 0) "}", 0, f, "2^63");
    refuse("{" T("a", "F4", "[3]", 0, 1) "}", 1, f, "byte boundary");
    refuse("{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4, MT_ERR_UNSUPPORTED,
           "9 dimensions");
    refuse("{" T("a", "F32", "[1]", 0, 4) "," T("a", "F32", "[1]", 4, 8) "}", 8, f, "duplicate");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, f, "'a'");
    refuse("{\"a\":7}", 4, f, "'a'");
    refuse("[1]", 0, f, "JSON object");
    refuse("{\"a\"", 0, f, "bad header");
    refuse("{\"\xff\":1}", 0, f, "bad header");

    write_raw("model.safetensors", "{}", 100000001, 0);
    CHECK(w->open(".", &r) == f && support_says("at most 100000000"), " ");
    write_raw("model.safetensors", "{}", 3, 0);
    CHECK(w->open(".", &r) == f && support_says("truncated"), " ");
    write_raw("model.safetensors", "{}", UINT64_MAX, 0);
    CHECK(w->open(".", &r) == f, " ");
    support_write("model.safetensors", "abc", 3);
    CHECK(w->open(".", &r) == f && support_says("too short"), " ");
    CHECK(unlink("model.safetensors") == 0, " ");
    CHECK(w->open(".", &r) == MT_ERR_NOT_FOUND, " ");
    CHECK(w->open("nowhere", &r) == MT_ERR_NOT_FOUND && support_says("nowhere"), " ");

    /* A valid file cut at every byte never opens. */
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 3, 0), tensor("b", MT_I8, 1, 3, 0) };
    CHECK(write_set("model", list, 2, 0, 16) == MT_OK, " ");
    size_t size;
    char *raw = support_read("model.safetensors", &size);
    for (size_t n = 0; n < size; n++) {
        support_write("model.safetensors", raw, n);
        CHECK(w->open(".", &r) == f, "opened with %zu of %zu bytes", n, size);
    }
    free(raw);
    support_leave(folder);
}

/* Every bit of a valid header turned over: it opens or it does not, but what opens can be read. */
static void turned_bits(void)
{
    support_enter(folder);
    mt_tensor_info list[] = { tensor("a", MT_F32, 2, 3, 2), tensor("b", MT_I8, 1, 3, 0) };
    CHECK(write_set("model", list, 2, 0, 16) == MT_OK, " ");
    size_t size;
    char *raw = support_read("model.safetensors", &size);
    int opened = 0;
    for (size_t bit = 0; bit < (size - 27) * 8; bit++) {
        raw[bit / 8] ^= (char)(1 << bit % 8);
        support_write("model.safetensors", raw, size);
        raw[bit / 8] ^= (char)(1 << bit % 8);
        void *r;
        if (w->open(".", &r))
            continue;
        opened++;
        int64_t sum = 0;
        for (int64_t i = 0; i < w->count(r); i++) {
            mt_tensor_info t;
            char data[64];
            CHECK(w->info(r, i, &t) == MT_OK && t.bytes <= 27, "%d", (int)bit);
            sum += t.bytes;
            if (t.dtype >= 0 && t.bytes <= 27)
                CHECK(w->read(r, i, 0, t.bytes, data) == MT_OK, "%s", status_text());
        }
        CHECK(sum == 27, "%d", (int)bit);
        w->close(r);
    }
    CHECK(opened > 0, "names may change");
    free(raw);
    support_leave(folder);
}

static void unreadable_dtype(void)
{
    support_enter(folder);
    static const char header[] = "{" T("a", "F4", "[4]", 0, 2) "," T("b", "F32", "[1]", 2, 6) "}";
    write_raw("model.safetensors", header, strlen(header), 6);
    void *r;
    CHECK(w->open(".", &r) == MT_OK, "%s", status_text());
    mt_tensor_info t;
    CHECK(w->info(r, 0, &t) == MT_OK && t.dtype == -1 && t.bytes == 2, " ");
    char data[4];
    CHECK(w->read(r, 0, 0, 2, data) == MT_ERR_UNSUPPORTED && support_says("F4"), " ");
    CHECK(w->read(r, 1, 0, 4, data) == MT_OK, " ");
    CHECK(w->info(r, 2, &t) == MT_ERR_INVALID, " ");
    /* The file shrinks while it is open: an error, no signal. */
    CHECK(truncate("model.safetensors", 8 + (off_t)strlen(header) + 3) == 0, " ");
    CHECK(w->read(r, 1, 0, 4, data) == MT_ERR_IO && support_says("changed"), " ");
    w->close(r);
    support_leave(folder);
}

static void edit_index(const char *text)
{
    support_write("model.safetensors.index.json", text, strlen(text));
}

static void bad_index(void)
{
    support_enter(folder);
    void *r;
    mt_tensor_info list[] = { tensor("a", MT_F32, 1, 10, 0), tensor("b", MT_F32, 1, 10, 0) };
    CHECK(write_set("model", list, 2, 40, 16) == MT_OK, "%s", status_text());
    size_t n;
    char *index = support_read("model.safetensors.index.json", &n);
#define S1 "\"model-00001-of-00002.safetensors\""
#define S2 "\"model-00002-of-00002.safetensors\""
    edit_index("{\"weight_map\":{\"a\":" S1 ",\"b\":" S2 ",\"c\":" S2 "}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("'c' is missing from"), " ");
    edit_index("{\"weight_map\":{\"a\":" S1 ",\"b\":" S1 "}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("'b' is missing from"), " ");
    edit_index("{\"weight_map\":{\"a\":" S2 ",\"b\":" S1 "}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("places in"), " ");
    edit_index("{\"weight_map\":{\"a\":" S1 ",\"c\":" S2 "}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("'b' is not in"), " ");
    edit_index("{\"weight_map\":{\"a\":" S1 ",\"a\":" S1 "}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("duplicate"), " ");
    edit_index("{\"weight_map\":{\"a\":\"../x.safetensors\"}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("../x.safetensors"), " ");
    edit_index("{\"weight_map\":{\"a\":1}}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("no text"), " ");
    edit_index("{}");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("weight_map"), " ");
    edit_index("{");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("index.json:1:"), " ");

    edit_index(index);
    expect_set(".", list, 2);
    /* A single file of another save beside the index. */
    CHECK(system("cp model-00001-of-00002.safetensors model.safetensors") == 0, " ");
    CHECK(w->open(".", &r) == MT_ERR_FORMAT && support_says("side by side"), " ");
    CHECK(unlink("model.safetensors") == 0, " ");
    /* A shard is gone. */
    CHECK(unlink("model-00002-of-00002.safetensors") == 0, " ");
    CHECK(w->open(".", &r) == MT_ERR_NOT_FOUND &&
              support_says("00002-of-00002.safetensors: missing"),
          " ");
    free(index);
    support_leave(folder);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    w = plugin_interface(argv[1], MT_WEIGHTS_INTERFACE);
    RUN(round_trip);
    RUN(empty_sets_and_tensors);
    RUN(shards);
    RUN(abort_leaves_the_old_set);
    RUN(scattered_writes);
    RUN(read_once);
    RUN(full_device);
    RUN(malformed);
    RUN(turned_bits);
    RUN(unreadable_dtype);
    RUN(bad_index);
    return check_done();
}
