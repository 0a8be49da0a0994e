/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints and weights with a small tied model: bit-exact round trips, what is refused, and what
 * survives a kill, a full disk and a folder that cannot be written.
 */
#include "../../core/base/parallel.h"
#include "../../core/train/card.h"
#include "../../core/train/checkpoint.h"
#include "../../core/train/export.h"
#include "../../core/train/files.h"
#include "small_model.h"
#include "support.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

static const mt_weights *format;
static char folder[64];

static const mt_state_spec states[] = { { "m", MT_F32 }, { "v", MT_BF16 } };

static mt_status write_config(void *arg, const char *path)
{
    char file[512];
    snprintf(file, sizeof file, "%s/config.json", path);
    support_write(file, "{}", 2);
    ++*(int *)arg;
    return MT_OK;
}

static mt_status refuse_config(void *arg, const char *path)
{
    (void)arg;
    return status_set(MT_ERR_IO, "%s: no config today", path);
}

static checkpoint_options default_options(void)
{
    return (checkpoint_options){ .folder = "runs/checkpoints",
                                 .weights_dtype = MT_F32,
                                 .model_type = "small" };
}

/* A temporary folder, a tied model and two stores of it, with states. */
typedef struct scene {
    model *m;
    store *a, *b;
    checkpoint_options o;
} scene;

static scene enter(void)
{
    support_enter(folder);
    model *m = small_model_create(true);
    return (scene){ m, small_store_create(m, states, 2), small_store_create(m, states, 2),
                    default_options() };
}

static void leave(scene *s)
{
    store_destroy(s->a);
    store_destroy(s->b);
    model_destroy(s->m);
    support_leave(folder);
}

static mt_status save_at(const store *s, int64_t step, const checkpoint_options *o)
{
    int configs = 0;
    checkpoint_state state = { .step = step, .optimizer_step = step - 1 };
    return checkpoint_save(s, &state, o, format, write_config, &configs);
}

/* Fills masters with every kind of number and states with noise, all of it depending on `salt`. */
static void fill(store *s, uint64_t salt)
{
    static const uint32_t odd[] = { 0x00000000, 0x80000000, 0x00000001, 0x7f7fffff, 0xff7fffff,
                                    0x7f800000, 0xff800000, 0x7fc00000, 0x3f808000, 0x3f808001,
                                    0x3f807fff, 0x00008000, 0x80008000, 0x007fffff };
    uint64_t x = salt * 2 + 1;
    for (int32_t p = 0; p < s->m->n_params; p++) {
        int64_t n = s->m->params[p].elems;
        for (int64_t i = 0; i < n; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            uint32_t u = (uint32_t)(x >> 32);
            float v = mt_bits_f32(i < 14 ? odd[i] : u);
            store_set(s, p, i, 1, &v);
        }
        for (uint32_t k = 0; k < s->n_states; k++) {
            uint8_t *state = store_state(s, p, k);
            for (int64_t i = 0; i < n * mt_dtype_size(s->states[k].dtype); i++) {
                x = x * 6364136223846793005u + 1442695040888963407u;
                state[i] = (uint8_t)(x >> 40);
            }
        }
    }
}

/* Compares element by element, and says where. */
static void expect_equal(const store *a, const store *b, bool with_states)
{
    int64_t wrong = 0;
    for (int32_t p = 0; p < a->m->n_params; p++) {
        int64_t n = a->m->params[p].elems;
        for (int64_t i = 0; i < n; i++) {
            float x, y;
            store_get(a, p, i, 1, &x);
            store_get(b, p, i, 1, &y);
            wrong += mt_f32_bits(x) != mt_f32_bits(y);
        }
        for (uint32_t k = 0; with_states && k < a->n_states; k++)
            wrong += memcmp(store_state(a, p, k), store_state(b, p, k),
                            (size_t)(n * mt_dtype_size(a->states[k].dtype))) != 0;
        CHECK(wrong == 0, "%s: %d differences", a->m->params[p].name, (int)wrong);
    }
    if (with_states)
        CHECK(store_hash(a) == store_hash(b), "hashes");
}

/* Stands before the C library's: from this name of a folder on, counted from 1, listing fails; 0:
 * it does not. */
static int unlisted_from;

struct dirent *readdir(DIR *d)
{
    struct dirent *(*next)(DIR *);
    *(void **)&next = dlsym(RTLD_NEXT, "readdir");
    if (unlisted_from != 1) {
        unlisted_from -= unlisted_from > 1;
        return next(d);
    }
    errno = EIO;
    return NULL;
}

/* Stands before the C library's: what is temporary stays. */
static bool unremovable;

int remove(const char *path)
{
    int (*next)(const char *);
    *(void **)&next = dlsym(RTLD_NEXT, "remove");
    if (!unremovable || !strstr(path, "/.tmp-"))
        return next(path);
    errno = EIO;
    return -1;
}

static int count_entries(const char *path)
{
    DIR *d = opendir(path);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    if (d)
        closedir(d);
    return n;
}

static int count_temporary(const char *path)
{
    DIR *d = opendir(path);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        n += strncmp(e->d_name, ".tmp-", 5) == 0;
    if (d)
        closedir(d);
    return n;
}

/* ---- round trips ---------------------------------------------------------------------------- */

static void round_trip(void)
{
    scene at = enter();
    store *a = at.a, *b = at.b;
    model *m = at.m;
    fill(a, 1);
    fill(b, 2);
    checkpoint_options o = at.o;
    checkpoint_state s = { .step = 12,
                           .optimizer_step = 11,
                           .tokens = 1ll << 40,
                           .targets = 77,
                           .data = { 1, 23, 45, 4096 },
                           .seed = UINT64_MAX - 1,
                           .epoch_documents = 5,
                           .epoch_tokens = 6,
                           .fingerprint = UINT64_MAX / 3,
                           .best_validation_loss = 1.0 / 3,
                           .best_step = 7,
                           .evaluations_since_best = 3,
                           .loss = 1.0 / 7,
                           .validation_loss = -INFINITY,
                           .skipped_in_a_row = 2 };
    for (int round = 0; round < 3; round++) {
        o.shard_bytes = round ? 1500 : 0;
        s.best_validation_loss = round == 1 ? INFINITY : s.best_validation_loss;
        int configs = 0;
        s.step = 12 + round;
        CHECK(checkpoint_save(a, &s, &o, format, write_config, &configs) == MT_OK, "%s",
              status_text());
        CHECK(configs == 1, "%d", configs);
        char path[256];
        CHECK(checkpoint_latest(o.folder, path, sizeof path) == MT_OK, "%s", status_text());
        checkpoint_state got;
        memset(&got, 0x55, sizeof got);
        fill(b, 2);
        CHECK(checkpoint_load(b, path, format, &got) == MT_OK, "%s", status_text());
        expect_equal(a, b, true);
        CHECK(memcmp(&got, &s, sizeof s) == 0, "the state differs");
        CHECK(strstr(path, round ? round == 1 ? "step-000013" : "step-000014" : "step-000012"),
              "%s", path);
        s.best_validation_loss = 1e-300 / 3;
    }
    CHECK(support_exists("runs/checkpoints/step-000012/model.safetensors"), " ");
    CHECK(support_exists("runs/checkpoints/step-000012/config.json"), " ");
    CHECK(support_exists("runs/checkpoints/step-000013/model.safetensors.index.json"), " ");
    CHECK(count_entries("runs/checkpoints") == 3, "%d", count_entries("runs/checkpoints"));

    /* A run for inference restores the weights only, and a checkpoint is a folder of weights. */
    store *c = small_store_create(m, NULL, 0);
    checkpoint_state got;
    CHECK(checkpoint_load(c, "runs/checkpoints/step-000013", format, &got) == MT_OK, "%s",
          status_text());
    expect_equal(a, c, false);
    store_destroy(c);
    c = small_store_create(m, NULL, 0);
    CHECK(weights_load(c, "runs/checkpoints/step-000013", format, NULL) == MT_OK, "%s",
          status_text());
    expect_equal(a, c, false);
    store_destroy(c);
    leave(&at);
}

static void weights_only(void)
{
    support_enter(folder);
    model *m = small_model_create(true);
    store *a = small_store_create(m, states, 2), *b = small_store_create(m, states, 2),
          *c = small_store_create(m, NULL, 0);
    fill(a, 1);
    checkpoint_options o = default_options();
    o.weights_only = true;
    o.weights_dtype = MT_BF16;
    CHECK(save_at(a, 3, &o) == MT_OK, "%s", status_text());
    checkpoint_state got;
    const char *path = "runs/checkpoints/step-000003";
    CHECK(checkpoint_load(b, path, format, &got) == MT_ERR_INVALID && support_says("weights_only"),
          " ");
    CHECK(checkpoint_load(c, path, format, &got) == MT_OK, "%s", status_text());
    for (int32_t p = 0; p < m->n_params; p++)
        for (int64_t i = 0; i < m->params[p].elems; i++) {
            float x, y;
            uint16_t hi;
            int16_t lo;
            store_get(a, p, i, 1, &x);
            store_get(c, p, i, 1, &y);
            mt_split_f32(x, &hi, &lo);
            /* What BF16 cannot tell from infinity was streamed as infinity. */
            float want = mt_bf16_to_f32(hi);
            CHECK(mt_f32_bits(want) == mt_f32_bits(y) || (isnan(want) && isnan(y)), "%s %d: %g %g",
                  m->params[p].name, (int)i, (double)want, (double)y);
        }
    CHECK(!support_exists("runs/checkpoints/step-000003/optimizer.safetensors"), " ");
    o.weights_only = false;
    CHECK(save_at(a, 4, &o) == MT_ERR_INVALID && support_says("bf16"), " ");
    store_destroy(a);
    store_destroy(b);
    store_destroy(c);
    model_destroy(m);
    support_leave(folder);
}

static void rotation(void)
{
    support_enter(folder);
    model *m = small_model_create(true);
    store *s = small_store_create(m, states, 2);
    checkpoint_options o = default_options();
    o.keep = 2;
    CHECK(system("mkdir -p runs/checkpoints/.tmp-step-000001/x runs/checkpoints/step-000900 "
                 "runs/checkpoints/notes; touch runs/checkpoints/.tmp-old-step-000007") == 0,
          " ");
    char path[256];
    CHECK(checkpoint_latest(o.folder, path, sizeof path) == MT_ERR_NOT_FOUND, "an empty folder");
    CHECK(checkpoint_latest("no/such", path, sizeof path) == MT_ERR_NOT_FOUND, " ");
    for (int64_t step = 1; step <= 5; step++)
        CHECK(save_at(s, step * 5, &o) == MT_OK, "%s", status_text());
    CHECK(support_exists("runs/checkpoints/step-000020"), " ");
    CHECK(support_exists("runs/checkpoints/step-000025"), " ");
    CHECK(support_exists("runs/checkpoints/step-000900"), "not ours to remove");
    CHECK(support_exists("runs/checkpoints/notes"), "not ours to remove");
    CHECK(count_entries("runs/checkpoints") == 4, "%d", count_entries("runs/checkpoints"));
    CHECK(checkpoint_latest(o.folder, path, sizeof path) == MT_OK &&
              strcmp(path, "runs/checkpoints/step-000025") == 0,
          "%s", path);
    char tiny[8] = "before";
    CHECK(checkpoint_latest(o.folder, tiny, sizeof tiny) == MT_ERR_INVALID, " ");
    CHECK(strcmp(tiny, "before") == 0, "output touched");
    /* A run that went back: what it saves now is kept, whatever higher steps stand there. */
    o.keep = 1;
    CHECK(save_at(s, 2, &o) == MT_OK, "%s", status_text());
    CHECK(support_exists("runs/checkpoints/step-000002"), " ");
    CHECK(count_entries("runs/checkpoints") == 3, "%d", count_entries("runs/checkpoints"));
    /* A damaged state.json is passed over. */
    o.keep = 0;
    CHECK(save_at(s, 4, &o) == MT_OK, "%s", status_text());
    support_write("runs/checkpoints/step-000004/state.json", "{", 1);
    log_set_level(MT_LOG_ERROR);
    CHECK(checkpoint_latest(o.folder, path, sizeof path) == MT_OK &&
              strcmp(path, "runs/checkpoints/step-000002") == 0,
          "%s", path);
    /* One that cannot be read is not: it may be whole. */
    CHECK(unlink("runs/checkpoints/step-000004/state.json") == 0 &&
              symlink("state.json", "runs/checkpoints/step-000004/state.json") == 0,
          " ");
    CHECK(checkpoint_latest(o.folder, path, sizeof path) == MT_ERR_IO &&
              strstr(status_text(), "runs/checkpoints/step-000004/state.json: ") &&
              strstr(status_text(), "Too many levels of symbolic links; make it readable, or move"),
          "%s", status_text());
    log_set_level(MT_LOG_INFO);
    store_destroy(s);
    model_destroy(m);
    support_leave(folder);
}

static void same_step_again(void)
{
    scene at = enter();
    store *a = at.a, *b = at.b;
    checkpoint_options o = at.o;
    o.shard_bytes = 600;
    fill(a, 1);
    CHECK(save_at(a, 5, &o) == MT_OK, "%s", status_text());
    int before = count_entries("runs/checkpoints/step-000005");
    o.shard_bytes = 0;
    fill(a, 2);
    CHECK(save_at(a, 5, &o) == MT_OK, "%s", status_text());
    checkpoint_state got;
    CHECK(checkpoint_load(b, "runs/checkpoints/step-000005", format, &got) == MT_OK, "%s",
          status_text());
    expect_equal(a, b, true);
    CHECK(before > 6 && count_entries("runs/checkpoints/step-000005") == 4, "orphans: %d files",
          count_entries("runs/checkpoints/step-000005"));
    CHECK(count_entries("runs/checkpoints") == 1, "%d", count_entries("runs/checkpoints"));

    /* The new one stands, also where the old one cannot be removed yet. */
    log_set_level(MT_LOG_ERROR);
    fill(a, 3);
    unremovable = true;
    CHECK(save_at(a, 5, &o) == MT_OK, "%s", status_text());
    unremovable = false;
    log_set_level(MT_LOG_INFO);
    CHECK(checkpoint_load(b, "runs/checkpoints/step-000005", format, &got) == MT_OK, "%s",
          status_text());
    expect_equal(a, b, true);
    CHECK(count_entries("runs/checkpoints") == 2, "%d", count_entries("runs/checkpoints"));
    CHECK(save_at(a, 5, &o) == MT_OK, "%s", status_text());
    CHECK(count_entries("runs/checkpoints") == 1, "%d", count_entries("runs/checkpoints"));
    leave(&at);
}

/* What was rotated out and stays is in the way of no save, and of no start. */
static void rotated_and_not_removed(void)
{
    scene at = enter();
    checkpoint_options o = at.o;
    o.keep = 1;
    log_set_level(MT_LOG_ERROR);
    CHECK(save_at(at.a, 5, &o) == MT_OK, "%s", status_text());
    unremovable = true;
    CHECK(save_at(at.a, 6, &o) == MT_OK, "%s", status_text());
    CHECK(save_at(at.a, 7, &o) == MT_OK, "%s", status_text());
    CHECK(checkpoint_tidy(o.folder, 0) == MT_OK, "%s", status_text());
    CHECK(count_entries("runs/checkpoints") == 3, "%d", count_entries("runs/checkpoints"));
    /* Of what is left of this very step, some would be taken for new. */
    CHECK(mkdir("runs/checkpoints/.tmp-step-000008", 0777) == 0, " ");
    support_write("runs/checkpoints/.tmp-step-000008/model.safetensors", "x", 1);
    CHECK(save_at(at.a, 8, &o) == MT_ERR_IO && strstr(status_text(), ".tmp-step-000008"), "%s",
          status_text());
    unremovable = false;
    CHECK(save_at(at.a, 8, &o) == MT_OK, "%s", status_text());
    CHECK(count_entries("runs/checkpoints") == 1, "%d", count_entries("runs/checkpoints"));
    log_set_level(MT_LOG_INFO);
    leave(&at);
}

/* ---- what is refused ------------------------------------------------------------------------ */

static void flip_byte(const char *path, long at_end)
{
    FILE *f = fopen(path, "r+b");
    CHECK(f != NULL, "%s", path);
    if (!f)
        return;
    fseek(f, -at_end, SEEK_END);
    int c = fgetc(f);
    fseek(f, -at_end, SEEK_END);
    fputc(c ^ 1, f);
    fclose(f);
}

static void damaged(void)
{
    support_enter(folder);
    model *m = small_model_create(true), *untied = small_model_create(false);
    store *a = small_store_create(m, states, 2), *b = small_store_create(m, states, 2),
          *other = small_store_create(untied, states, 2);
    fill(a, 1);
    checkpoint_options o = default_options();
    o.shard_bytes = 1100;
    CHECK(save_at(a, 5, &o) == MT_OK, "%s", status_text());
    CHECK(system("mkdir x; cp -r runs/checkpoints/step-000005 x/ok") == 0, " ");
    checkpoint_state got, untouched;
    memset(&got, 0x55, sizeof got);
    untouched = got;
    static const struct {
        const char *damage, *says;
    } cases[] = {
        { "rm state.json", "no state.json" },
        { "rm model-00002-of-*.safetensors", "model-00002-of-" },
        { "rm model.safetensors.index.json", "model.safetensors" },
        { "rm optimizer.safetensors.index.json", "optimizer" },
        { "rm optimizer-00001-of-*.safetensors", "optimizer-00001-of-" },
        { "sed -i 's/\"version\": 1/\"version\": 2/' state.json", "version 2" },
        { "sed -i 's/\"epoch\"/\"epooch\"/' state.json", "epoch" },
        { "sed -i '/\"weights\": {/,/}/ s/: \"[0-9a-f]*\"/: \"0123456789abcdef\"/' state.json",
          "its values have checksum" },
        { "sed -i '/\"optimizer\": {/,/}/ s/: \"[0-9a-f]*\"/: \"0123456789abcdef\"/' state.json",
          "its values have checksum" },
        { "sed -i 's/\"optimizer_step\": 4/\"optimizer_step\": 5/' state.json",
          "its values have checksum" },
        { "sed -i '/\"checksum\"/d; s/^ },$/ }/' state.json", "state.json" },
        { "echo '{' > state.json", "state.json:" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[512];
        snprintf(command, sizeof command, "rm -rf x/c; cp -r x/ok x/c; cd x/c && %s",
                 cases[i].damage);
        CHECK(system(command) == 0, "%s", command);
        CHECK(checkpoint_load(b, "x/c", format, &got) < 0, "loaded after: %s", cases[i].damage);
        CHECK(support_says(cases[i].says), "%s", cases[i].damage);
    }
    CHECK(system("rm -rf x/c; cp -r x/ok x/c") == 0, " ");
    flip_byte("x/c/model-00001-of-00003.safetensors", 9);
    CHECK(checkpoint_load(b, "x/c", format, &got) == MT_ERR_FORMAT && support_says("checksum"),
          " ");
    CHECK(system("rm -rf x/c; cp -r x/ok x/c; ls x/c/optimizer-00002-of-* > /dev/null") == 0, " ");
    CHECK(system("cd x/c; f=$(ls optimizer-00002-of-*); printf '\\377' | dd of=$f bs=1 "
                 "seek=$(($(stat -c %s $f) - 3)) conv=notrunc status=none; "
                 "printf '\\001\\002\\003' | dd of=$f bs=1 seek=$(($(stat -c %s $f) - 3)) "
                 "conv=notrunc status=none") == 0,
          " ");
    CHECK(checkpoint_load(b, "x/c", format, &got) == MT_ERR_FORMAT && support_says("optimizer-"),
          " ");

    /* Another model, another optimizer. */
    CHECK(checkpoint_load(other, "x/ok", format, &got) == MT_ERR_INVALID &&
              support_says("lm_head.weight") && support_says("another output_dir"),
          " ");
    const mt_state_spec wide[] = { { "m", MT_F32 }, { "v", MT_F32 } };
    store *c = small_store_create(m, wide, 2);
    CHECK(checkpoint_load(c, "x/ok", format, &got) == MT_ERR_INVALID, " ");
    CHECK(support_says("m (fp32), v (bf16)") && support_says("m (fp32), v (fp32)"), " ");
    store_destroy(c);
    c = small_store_create(m, wide, 1);
    CHECK(checkpoint_load(c, "x/ok", format, &got) == MT_ERR_INVALID && support_says("keeps m (fp"),
          " ");
    store_destroy(c);
    CHECK(memcmp(&got, &untouched, sizeof got) == 0, "output touched");
    CHECK(checkpoint_load(b, "x/ok", format, &got) == MT_OK, "%s", status_text());
    expect_equal(a, b, true);
    store_destroy(a);
    store_destroy(b);
    store_destroy(other);
    model_destroy(m);
    model_destroy(untied);
    support_leave(folder);
}

/* Alters a few bytes of a file: other ones, fewer, more, or an end that is cut off. */
static void mutate(const char *path, uint32_t *state)
{
    size_t n;
    char *text = support_read(path, &n);
    char *more = realloc(text, n + 8);
    for (uint32_t k = 1 + (*state >> 9) % 3; k > 0 && n > 0; k--) {
        *state = *state * 1664525u + 1013904223u;
        size_t at = (*state >> 8) % n;
        uint32_t how = *state >> 28;
        if (how < 10) {
            more[at] = how < 6 ? "{}[]\",:0-9e\0\xff"[(*state >> 4) % 14] : (char)(*state >> 5);
        } else if (how < 13) {
            memmove(more + at, more + at + 1, --n - at);
        } else if (how < 15) {
            memmove(more + at + 1, more + at, n++ - at);
        } else {
            n = at;
        }
    }
    support_write(path, more, n);
    free(more);
}

/* Whatever is altered in one of its files, a checkpoint is refused, or is what was saved: values
 * and checksums stand in different files. */
static void mutations(void)
{
    static const char *const files[] = { "state.json",
                                         "model.safetensors.index.json",
                                         "optimizer.safetensors.index.json",
                                         "model-00001-of-00003.safetensors",
                                         "model-00003-of-00003.safetensors",
                                         "optimizer-00002-of-00004.safetensors" };
    enum { FILES = sizeof files / sizeof *files };
    const char *rounds = getenv("MT_TEST_ROUNDS");
    scene at = enter();
    uint32_t state = 1;
    int loaded = 0, refused = 0;
    at.o.shard_bytes = 1100;
    fill(at.a, 1);
    CHECK(save_at(at.a, 5, &at.o) == MT_OK, "%s", status_text());
    CHECK(system("mv runs/checkpoints/step-000005 ok; mkdir c") == 0, " ");
    for (int round = 0; round < (rounds ? atoi(rounds) : 120); round++) {
        char path[128];
        checkpoint_state got = { 0 };
        CHECK(system("cp ok/* c/") == 0, " ");
        snprintf(path, sizeof path, "c/%s", files[round % FILES]);
        state = state * 1664525u + 1013904223u + (uint32_t)round;
        mutate(path, &state);
        if (checkpoint_load(at.b, "c", format, &got) == MT_OK) {
            loaded++;
            CHECK(got.step == 5 && got.optimizer_step == 4, "round %d: another state", round);
            expect_equal(at.a, at.b, true);
        } else {
            refused++;
            CHECK(support_says("c/") || support_says("c:"), "round %d", round);
        }
        store *s = small_store_create(at.m, NULL, 0);
        CHECK(weights_load(s, "c", format, NULL) == MT_OK || *status_text(), "round %d", round);
        store_destroy(s);
    }
    CHECK(refused > loaded, "%d refused, %d loaded", refused, loaded);
    leave(&at);
}

/* ---- what survives -------------------------------------------------------------------------- */

/* A child saves in a loop and is killed at a random moment; whatever is newest then loads, and is
 * what was saved under that step. */
static void kill_at_any_moment(void)
{
    scene at = enter();
    store *a = at.a, *b = at.b;
    checkpoint_options o = at.o;
    o.keep = 2;
    o.shard_bytes = 1100;
    fill(a, 1);
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    clock_gettime(CLOCK_MONOTONIC, &t1);
    uint32_t us = (uint32_t)((t1.tv_sec - t0.tv_sec) * 1000000 + (t1.tv_nsec - t0.tv_nsec) / 1000);
    us = us > 100000 ? 100000 : us;
    uint32_t x = 12345;
    int64_t first = 1, newest = 1;
    int cut_off = 0;
    /* On a busy machine the first save may have been the only quick one: until both have been seen,
     * the children get longer and more of them. */
    for (int round = 0; round < 20 || (round < 100 && (newest == 1 || !cut_off)); round++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            for (int64_t step = first + 1;; step++) {
                fill(a, (uint64_t)step);
                if (save_at(a, step, &o))
                    _exit(1);
            }
        }
        x = x * 1664525 + 1013904223;
        usleep(us / 4 + (x >> 8) % (us * 3)); /* within the first saves */
        kill(child, SIGKILL);
        int how = 0;
        waitpid(child, &how, 0);
        CHECK(WIFSIGNALED(how), "the child ended by itself: a save failed");
        char path[256] = "";
        checkpoint_state got = { 0 };
        CHECK(checkpoint_latest(o.folder, path, sizeof path) == MT_OK, "%s", status_text());
        CHECK(checkpoint_load(b, path, format, &got) == MT_OK, "%s", status_text());
        CHECK(got.step >= newest, "step %d after %d", (int)got.step, (int)newest);
        if (got.step == newest)
            us += us / 4 + 1;
        newest = first = got.step;
        cut_off += count_temporary(o.folder) > 0;
        fill(a, (uint64_t)newest);
        expect_equal(a, b, true);
    }
    CHECK(newest > 1, "no child finished a save");
    CHECK(cut_off > 0, "no save was cut off");
    CHECK(save_at(a, newest + 1, &o) == MT_OK, "%s", status_text());
    CHECK(count_entries("runs/checkpoints") == 2, "%d entries: what was cut off stays",
          count_entries("runs/checkpoints"));
    leave(&at);
}

static void expect_step_1(store *a, store *b, const checkpoint_options *o)
{
    char path[256] = "";
    checkpoint_state got;
    CHECK(checkpoint_latest(o->folder, path, sizeof path) == MT_OK, "%s", status_text());
    CHECK(checkpoint_load(b, path, format, &got) == MT_OK && got.step == 1, "%s", status_text());
    fill(a, 1);
    expect_equal(a, b, true);
    CHECK(count_entries(o->folder) == 1, "%d entries", count_entries(o->folder));
}

static void failing_saves(void)
{
    scene at = enter();
    store *a = at.a, *b = at.b;
    checkpoint_options o = at.o;
    fill(a, 1);
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    fill(a, 2);

    /* Files may grow to this many bytes and no further: in the header, in the weights, in the
     * states, in state.json. */
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old;
    getrlimit(RLIMIT_FSIZE, &old);
    static const rlim_t limits[] = { 0, 5, 300, 2000, 2600 };
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit limit = { limits[i], old.rlim_max };
        setrlimit(RLIMIT_FSIZE, &limit);
        mt_status status = save_at(a, 2, &o);
        setrlimit(RLIMIT_FSIZE, &old);
        CHECK(status == MT_ERR_IO, "%d", status);
        CHECK(support_says("cannot save step 2") && support_says("free some space"), " ");
    }
    signal(SIGXFSZ, SIG_DFL);
    expect_step_1(a, b, &o);

    checkpoint_state state = { .step = 2 };
    CHECK(checkpoint_save(a, &state, &o, format, refuse_config, NULL) == MT_ERR_IO &&
              support_says("no config today"),
          " ");
    expect_step_1(a, b, &o);

    /* The folder is a file; the folder cannot be written. */
    support_write("file", "", 0);
    checkpoint_options bad = o;
    bad.folder = "file/below";
    CHECK(save_at(a, 2, &bad) == MT_ERR_IO && support_says("file"), " ");
    leave(&at);
}

/* Runs in a child that is nobody when the tests are run by root, whom permissions do not stop. */
static void read_only_folder(void)
{
    scene at = enter();
    store *a = at.a, *b = at.b;
    checkpoint_options o = at.o;
    fill(a, 1);
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    CHECK(chmod(folder, 0755) == 0 && chmod("runs/checkpoints", 0555) == 0, " ");
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (geteuid() == 0 && setuid(65534) < 0)
            _exit(77);
        _exit(save_at(a, 2, &o) == MT_ERR_IO && support_says("Permission denied") ? 0 : 1);
    }
    int how = -1;
    waitpid(child, &how, 0);
    CHECK(WIFEXITED(how) && (WEXITSTATUS(how) == 0 || WEXITSTATUS(how) == 77), "%d", how);
    CHECK(chmod("runs/checkpoints", 0755) == 0, " ");
    expect_step_1(a, b, &o);
    leave(&at);
}

/* Of a file that nobody has read, no line is named. */
static void unreadable_files(void)
{
    static const char at[] = "runs/checkpoints/step-000001";
    static const char *const files[] = { "state.json", "model.safetensors.index.json" };
    scene s = enter();
    store *a = s.a;
    checkpoint_options o = s.o;
    o.shard_bytes = 1100;
    fill(a, 1);
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    CHECK(chmod(folder, 0755) == 0, " ");
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[128], want[256];
        snprintf(path, sizeof path, "%s/%s", at, files[i]);
        snprintf(want, sizeof want, "%s: cannot read: Permission denied", path);
        CHECK(chmod(path, 0) == 0, "%s", path);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            checkpoint_state state;
            if (geteuid() == 0 && setuid(65534) < 0)
                _exit(77);
            _exit(checkpoint_load(s.b, at, format, &state) == MT_ERR_IO && support_says(want) ? 0
                                                                                              : 1);
        }
        int how = -1;
        waitpid(child, &how, 0);
        CHECK(WIFEXITED(how) && (WEXITSTATUS(how) == 0 || WEXITSTATUS(how) == 77), "%d: %s", how,
              want);
        CHECK(chmod(path, 0644) == 0, "%s", path);
    }
    leave(&s);
}

/* A file system of 256 KiB, where mounting is allowed: the save is refused before it starts. */
static void small_disk(void)
{
    support_enter(folder);
    CHECK(mkdir("disk", 0755) == 0, " ");
    if (geteuid() != 0 || mount("none", "disk", "tmpfs", 0, "size=256k") < 0) {
        support_leave(folder);
        return;
    }
    model *m = small_model_create(true);
    store *a = small_store_create(m, states, 2);
    checkpoint_options o = default_options();
    o.folder = "disk";
    CHECK(save_at(a, 1, &o) == MT_ERR_IO && support_says("256 KiB are free") &&
              support_says("save_total_limit"),
          " ");
    CHECK(count_entries("disk") == 0, " ");
    umount("disk");
    store_destroy(a);
    model_destroy(m);
    support_leave(folder);
}

static long peak_kib(void)
{
    char line[256];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %ld kB", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib;
}

/* Makes the present size the peak, and returns it. */
static long reset_peak(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (f) {
        fputs("5", f);
        fclose(f);
    }
    return peak_kib();
}

/* ---- tensors of many blocks ------------------------------------------------------------------ */

/* A format whose files are written in order only, as an older plugin's. */
static mt_weights without_write_at(void)
{
    mt_weights w = *format;
    w.struct_size = offsetof(mt_weights, write_at);
    return w;
}

/* The checksum of a whole tensor is the one that state.json has. */
static void expect_sum(const char *files, const char *section, const char *tensor)
{
    void *r = NULL;
    mt_tensor_info info = { 0 };
    int64_t i = 0;
    CHECK(format->open(files, &r) == MT_OK, "%s", status_text());
    while (format->info(r, i, &info) == MT_OK && strcmp(info.name, tensor) != 0)
        i++;
    char *bytes = malloc((size_t)info.bytes), want[32];
    CHECK(format->read(r, i, 0, info.bytes, bytes) == MT_OK, "%s", status_text());
    snprintf(want, sizeof want, "%016llx",
             (unsigned long long)XXH3_64bits(bytes, (size_t)info.bytes));
    json_t *root = json_load_file("runs/checkpoints/step-000001/state.json", 0, NULL);
    const char *sum = json_string_value(json_object_get(json_object_get(root, section), tensor));
    CHECK(sum && strcmp(sum, want) == 0, "%s: %s, expected %s", tensor, sum ? sum : "none", want);
    json_decref(root);
    free(bytes);
    format->close(r);
}

/* All processors pass blocks of the same tensors, in several files; then in order, one by one. */
static void many_blocks(void)
{
    support_enter(folder);
    model *m = small_model_create_sized(false, 9001, 500);
    store *a = small_store_create(m, states, 2), *b = small_store_create(m, states, 2);
    fill(a, 1);
    checkpoint_options o = default_options();
    o.shard_bytes = 18 << 20;
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    CHECK(support_exists("runs/checkpoints/step-000001/model-00003-of-00003.safetensors"), " ");
    checkpoint_state got;
    CHECK(checkpoint_load(b, "runs/checkpoints/step-000001", format, &got) == MT_OK, "%s",
          status_text());
    expect_equal(a, b, true);
    expect_sum("runs/checkpoints/step-000001", "weights", "model.embed_tokens.weight");
    expect_sum("runs/checkpoints/step-000001/optimizer", "optimizer", "lm_head.weight.m");

    const mt_weights in_order = without_write_at(), *fast = format;
    format = &in_order;
    o.folder = "in-order";
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    format = fast;
    CHECK(system("diff -r runs/checkpoints in-order") == 0, "other files when written in order");

    /* One byte of a block in the middle. */
    static const char *const file[] = { "model-00001-of-00003", "optimizer-00001-of-00004" };
    for (size_t i = 0; i < 2; i++) {
        char path[256];
        snprintf(path, sizeof path, "runs/checkpoints/step-000001/%s.safetensors", file[i]);
        flip_byte(path, 9 << 20);
        CHECK(checkpoint_load(b, "runs/checkpoints/step-000001", format, &got) == MT_ERR_FORMAT &&
                  support_says(file[i]) && support_says("checksum"),
              "%s", file[i]);
        flip_byte(path, 9 << 20);
    }
    /* The disk is full in the middle. */
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old;
    getrlimit(RLIMIT_FSIZE, &old);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 11 << 20, old.rlim_max });
    mt_status status = save_at(a, 2, &o);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_DFL);
    CHECK(status == MT_ERR_IO && support_says("free some space"), "%d", status);
    CHECK(count_entries("in-order") == 1, "%d", count_entries("in-order"));
    store_destroy(a);
    store_destroy(b);
    model_destroy(m);
    support_leave(folder);
}

/* Reads of blocks wait until two are under way at a time, for as long as half a minute. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t second;
    int reading, most;
    bool late;
} reads = { .lock = PTHREAD_MUTEX_INITIALIZER, .second = PTHREAD_COND_INITIALIZER };
static mt_status (*read_alone)(const void *, int64_t, int64_t, int64_t, void *);

static mt_status read_together(const void *reader, int64_t index, int64_t offset, int64_t n,
                               void *dst)
{
    if (n < 1 << 20)
        return read_alone(reader, index, offset, n, dst);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 30;
    pthread_mutex_lock(&reads.lock);
    if (++reads.reading > reads.most) {
        reads.most = reads.reading;
        pthread_cond_broadcast(&reads.second);
    }
    while (reads.most < 2 && !reads.late)
        reads.late = pthread_cond_timedwait(&reads.second, &reads.lock, &until) != 0;
    pthread_mutex_unlock(&reads.lock);
    mt_status status = read_alone(reader, index, offset, n, dst);
    pthread_mutex_lock(&reads.lock);
    reads.reading--;
    pthread_mutex_unlock(&reads.lock);
    return status;
}

/* A checkpoint is exported by several threads, and as it is by one. */
static void export_of_many_blocks(void)
{
    static const char step[] = "runs/checkpoints/step-000001";
    char path[256];
    support_enter(folder);
    model *m = small_model_create_sized(false, 9001, 500);
    store *a = small_store_create(m, states, 2), *b = small_store_create(m, states, 2);
    fill(a, 1);
    checkpoint_options c = default_options();
    c.shard_bytes = 18 << 20;
    CHECK(save_at(a, 1, &c) == MT_OK, "%s", status_text());
    snprintf(path, sizeof path, "%s/config.json", step);
    support_write(path, "{\"model_type\": \"small\"}", 23);
    model_source source = { 0 };
    CHECK(model_source_open(step, &source) == MT_OK, "%s", status_text());
    mt_weights together = *format;
    const mt_weights in_order = without_write_at();
    read_alone = format->read;
    together.read = read_together;
    int64_t bytes = 0;
    for (int k = 0; k < 2; k++) {
        const mt_dtype dtype = k ? MT_F32 : MT_BF16;
        const export_options some = { .folder = "some", .dtype = dtype, .shard_bytes = 7 << 20 };
        const export_options one = { .folder = "one", .dtype = dtype, .shard_bytes = 7 << 20 };
        reads.most = 0;
        CHECK(export_model(&source, m, &together, &some, &bytes) == MT_OK, "%s", status_text());
        CHECK(reads.most > 1, "one thread");
        CHECK(export_model(&source, m, &in_order, &one, &bytes) == MT_OK, "%s", status_text());
        CHECK(system("diff -r some one") == 0, "other files when written in order");
        if (dtype == MT_F32) {
            CHECK(weights_load(b, "some", format, NULL) == MT_OK, "%s", status_text());
            expect_equal(a, b, false);
        }
        CHECK(system("rm -r some one") == 0, " ");
    }
    /* One byte of a block in the middle. */
    const export_options o = { .folder = "some", .dtype = MT_BF16 };
    snprintf(path, sizeof path, "%s/model-00001-of-00003.safetensors", step);
    flip_byte(path, 9 << 20);
    CHECK(export_model(&source, m, format, &o, &bytes) == MT_ERR_FORMAT &&
              support_says("model-00001-of-00003") && support_says("checksum"),
          "a damaged checkpoint is exported");
    CHECK(!support_exists("some") && !support_exists("some.tmp-export"), "something is left");
    model_source_close(&source);
    store_destroy(a);
    store_destroy(b);
    model_destroy(m);
    support_leave(folder);
}

/* A store of about 80 MB: saving and loading it takes no more than the threads' buffers. */
static void bounded_memory(void)
{
    const long most = (16 + 4 * parallel_io_threads(PARALLEL_MAX_THREADS)) * 1024;
    support_enter(folder);
    model *m = small_model_create_sized(true, 40000, 200);
    store *a = small_store_create(m, states, 2);
    fill(a, 1);
    checkpoint_options o = default_options();
    long before = reset_peak();
    CHECK(save_at(a, 1, &o) == MT_OK, "%s", status_text());
    long saving = peak_kib() - before;
    before = reset_peak();
    checkpoint_state got;
    CHECK(checkpoint_load(a, "runs/checkpoints/step-000001", format, &got) == MT_OK, "%s",
          status_text());
    long loading = peak_kib() - before;
#ifndef __SANITIZE_THREAD__ /* its shadow grows */
    CHECK(saving < most, "saving took %ld KiB more", saving);
    CHECK(loading < most, "loading took %ld KiB more", loading);
#else
    (void)saving, (void)loading, (void)most;
#endif
    store_destroy(a);
    model_destroy(m);
    support_leave(folder);
}

/* ---- weights and back ------------------------------------------------------------------------ */

/* Load and save: the files are equal, byte for byte. */
static void load_and_save(void)
{
    support_enter(folder);
    model *m = small_model_create(true);
    store *s = small_store_create(m, states, 2), *again = small_store_create(m, NULL, 0);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        checkpoint_options o = default_options();
        o.weights_only = bf16;
        o.weights_dtype = bf16 ? MT_BF16 : MT_F32;
        fill(s, 1);
        if (bf16) { /* a number that BF16 cannot hold is not a weight that BF16 files hold */
            for (int32_t p = 0; p < m->n_params; p++)
                for (int64_t i = 0; i < m->params[p].elems; i++) {
                    float x = (float)(i % 100) / 64;
                    store_set(s, p, i, 1, &x);
                }
        }
        o.folder = "a";
        CHECK(save_at(s, 1 + bf16, &o) == MT_OK, "%s", status_text());
        CHECK(weights_load(again, bf16 ? "a/step-000002" : "a/step-000001", format, NULL) == MT_OK,
              "%s", status_text());
        o.folder = "b";
        o.weights_only = true;
        CHECK(save_at(again, 1 + bf16, &o) == MT_OK, "%s", status_text());
        char command[128];
        snprintf(command, sizeof command,
                 "cmp a/step-00000%d/model.safetensors b/step-00000%d/model.safetensors", 1 + bf16,
                 1 + bf16);
        CHECK(system(command) == 0, "%s", command);
    }
    store_destroy(s);
    store_destroy(again);
    model_destroy(m);
    support_leave(folder);
}

/* A folder that a disk fails to list is not one that holds nothing: a run would begin anew, and an
 * export replace what is there. */
static void unlisted_folder(void)
{
    scene at = enter();
    char path[256];
    int64_t n = -1;
    for (int64_t step = 1; step <= 3; step++)
        CHECK(save_at(at.a, step, &at.o) == MT_OK, "%s", status_text());
    for (int name = 1; name <= 5; name++) {
        unlisted_from = name;
        CHECK(checkpoint_latest(at.o.folder, path, sizeof path) == MT_ERR_IO &&
                  support_says("runs/checkpoints: cannot list: Input/output error"),
              "from name %d on", name);
        unlisted_from = name;
        CHECK(checkpoint_count(at.o.folder, &n) == MT_ERR_IO && n == -1, "%d", (int)n);
        unlisted_from = name;
        CHECK(files_sync_contents(at.o.folder) == MT_ERR_IO, " ");
    }
    unlisted_from = 1;
    CHECK(export_check_folder("runs", true) == MT_ERR_IO, " ");
    unlisted_from = 0;
    CHECK(export_check_folder("runs", true) == MT_ERR_INVALID && support_says("not empty"), " ");
    CHECK(checkpoint_count(at.o.folder, &n) == MT_OK && n == 3, "%d", (int)n);
    leave(&at);
}

/* A loss of a run that ran away has a perplexity of hundreds of digits. */
static void card_of_a_large_loss(void)
{
    scene at = enter();
    checkpoint_state s = { .step = 12, .loss = 700, .validation_loss = NAN, .best_step = 8 };
    size_t n = 0;
    s.best_validation_loss = 1.5;
    CHECK(checkpoint_save(at.a, &s, &at.o, format, NULL, NULL) == MT_OK, "%s", status_text());
    CHECK(card_write(".", "runs/checkpoints/step-000012", at.m, MT_BF16) == MT_OK, "%s",
          status_text());
    char *text = support_read("README.md", &n);
    CHECK(strstr(text, "| training loss | 700.0000 nats/token (perplexity 1.0142e+304), after step "
                       "12 |\n"),
          "%s", text);
    CHECK(!strstr(text, "| validation loss"), "%s", text);
    CHECK(strstr(text, "| best validation loss | 1.5000 nats/token (perplexity 4.4817), after step "
                       "8 |\n"),
          "%s", text);
    free(text);
    leave(&at);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    format = plugin_interface(argv[1], MT_WEIGHTS_INTERFACE);
    RUN(round_trip);
    RUN(weights_only);
    RUN(rotation);
    RUN(same_step_again);
    RUN(rotated_and_not_removed);
    RUN(damaged);
    RUN(mutations);
    RUN(kill_at_any_moment);
    RUN(failing_saves);
    RUN(read_only_folder);
    RUN(unreadable_files);
    RUN(small_disk);
    RUN(many_blocks);
    RUN(export_of_many_blocks);
    RUN(bounded_memory);
    RUN(load_and_save);
    RUN(unlisted_folder);
    RUN(card_of_a_large_loss);
    return check_done();
}
