/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing and prefetch over a made-up stream whose tokens tell document and place.
 */
#include "../../core/train/data.h"
#include "support.h"

#include <stdatomic.h>
#include <unistd.h>

/* ---- a stream: document i has length(i) tokens i * 1000 + place, the order turns with the epoch
 */

typedef struct stream {
    int64_t documents, epoch, index;
    int64_t (*length)(int64_t i);
    uint8_t (*mask)(int64_t i, int64_t place); /* NULL: all */
    bool endless;
    int64_t fails_at; /* calls of next that succeed; -1: all */
    int32_t tokens[1000];
    uint8_t masks[1000];
} stream;

static atomic_int open_streams;

static void fake_close(void *s)
{
    if (s)
        atomic_fetch_sub(&open_streams, 1);
    free(s);
}

static mt_status fake_next(void *arg, mt_document *ret)
{
    stream *s = arg;
    if (s->fails_at == 0)
        return status_set(MT_ERR_IO, "the disk is gone");
    s->fails_at--;
    if (s->index == s->documents) {
        if (!s->endless)
            return MT_END;
        s->epoch++;
        s->index = 0;
    }
    int64_t i = (s->index++ * 7 + s->epoch) % s->documents; /* documents is prime to 7 */
    int64_t n = s->length(i);
    memset(s->tokens, 0xff, sizeof s->tokens); /* the last document is gone */
    for (int64_t t = 0; t < n; t++) {
        s->tokens[t] = (int32_t)(i * 1000 + t);
        s->masks[t] = s->mask ? s->mask(i, t) : 1;
    }
    *ret = (mt_document){ s->tokens, s->mask ? s->masks : NULL, n, i };
    return MT_OK;
}

static void fake_tell(const void *arg, int64_t *ret_epoch, int64_t *ret_index)
{
    const stream *s = arg;
    bool turn = s->endless && s->index == s->documents;
    *ret_epoch = s->epoch + turn;
    *ret_index = turn ? 0 : s->index;
}

static mt_status fake_seek(void *arg, int64_t epoch, int64_t index)
{
    stream *s = arg;
    if (index > s->documents)
        return status_set(MT_ERR_INVALID, "no document %d", (int)index);
    s->epoch = epoch;
    s->index = index;
    return MT_OK;
}

static const mt_data fake = { .struct_size = sizeof(mt_data),
                              .close = fake_close,
                              .next = fake_next,
                              .tell = fake_tell,
                              .seek = fake_seek };

static int64_t ragged(int64_t i)
{
    static const int64_t n[] = { 5, 2, 40, 17, 3, 9, 1, 64, 33, 2, 2, 11, 0, 16, 18 };
    return n[i % 15];
}

static uint8_t some(int64_t i, int64_t place)
{
    return (i * 31 + place * 17) % 3 == 0;
}

static uint8_t nothing(int64_t i, int64_t place)
{
    (void)i;
    (void)place;
    return 0;
}

/* Documents 2 and 7 (the long ones) are masked whole. */
static uint8_t not_long(int64_t i, int64_t place)
{
    (void)place;
    return ragged(i) < 40;
}

enum { DOCUMENTS = 45 };

static data_source *must_open(const stream *proto, data_options o)
{
    stream *s = malloc(sizeof *s);
    *s = *proto;
    atomic_fetch_add(&open_streams, 1);
    data_source *d = NULL;
    if (data_open(&fake, s, &o, &d)) {
        fprintf(stderr, "%s\n", status_text());
        exit(1);
    }
    return d;
}

static const stream plain = {
    .documents = DOCUMENTS, .length = ragged, .endless = true, .fails_at = -1
};

/* ---- what a step must look like ------------------------------------------------------------- */

/* Checks the form of a step; counts each target in seen[document * 1000 + place]. */
static void check_step(const step_batch *step, const data_options *o, int *seen)
{
    int64_t tokens = 0, targets = 0;
    CHECK(step->n >= 1 && step->n <= o->micro_batches, "%d", (int)step->n);
    for (int64_t k = 0; k < step->n; k++) {
        const micro_batch *b = &step->micro[k];
        int64_t longest = 0, n = 0;
        CHECK(b->tokens >= 1 && b->tokens <= o->micro_tokens, "%d", (int)b->tokens);
        CHECK(b->doc_starts[0] == 0 && b->doc_starts[b->documents] == b->tokens, " ");
        CHECK(o->packing != PACKING_NONE || b->documents == 1, "%d", (int)b->documents);
        for (int64_t j = 0; j < b->documents; j++) {
            int32_t first = b->doc_starts[j], end = b->doc_starts[j + 1];
            CHECK(end > first, "an empty document");
            longest = end - first > longest ? end - first : longest;
            for (int32_t t = first; t < end; t++) {
                CHECK(b->positions[t] == t - first, " ");
                CHECK(b->ids[t] == b->ids[first] + t - first, "documents mix");
                CHECK(b->targets[t] == -100 || b->targets[t] == b->ids[t] + 1, " ");
                if (b->targets[t] >= 0) {
                    n++;
                    if (seen)
                        seen[b->targets[t]]++;
                }
            }
        }
        CHECK(b->max_document == longest, " ");
        CHECK(b->n_targets == n && n > 0, "%d, counted %d", (int)b->n_targets, (int)n);
        tokens += b->tokens;
        targets += n;
    }
    CHECK(step->tokens == tokens && step->n_targets == targets, " ");
}

/* A validation stream to its end: every target exactly once, micro-batches full. */
static void one_epoch(data_options o, uint8_t (*mask)(int64_t, int64_t))
{
    stream proto = plain;
    proto.endless = false;
    proto.mask = mask;
    int *seen = calloc(DOCUMENTS * 1000, sizeof *seen);
    data_source *d = must_open(&proto, o);
    const step_batch *step;
    mt_status status;
    bool partial = false;
    while ((status = data_next(d, &step)) == MT_OK) {
        check_step(step, &o, seen);
        CHECK(!partial, "a partial step before the last");
        for (int64_t k = 0; k < step->n; k++)
            partial |= o.packing == PACKING_SEQUENTIAL && step->micro[k].tokens < o.micro_tokens;
        partial |= !mask && step->n < o.micro_batches;
    }
    CHECK(status == MT_END, "%s", status_text());
    CHECK(data_next(d, &step) == MT_END, "the end must stay");
    int64_t wrong = 0, all = 0;
    for (int64_t i = 0; i < DOCUMENTS; i++)
        for (int64_t t = 0; t < 1000; t++) {
            int want = t >= 1 && t < ragged(i) && (!mask || mask(i, t));
            wrong += seen[i * 1000 + t] != want;
            all += want;
        }
    CHECK(wrong == 0 && all > 0, "%d of %d targets not exactly once", (int)wrong, (int)all);
    data_close(d);
    free(seen);
}

static void every_target_once(void)
{
    static const int64_t tokens[] = { 1, 7, 16, 63, 64, 1000 };
    for (int k = 0; k < 6; k++)
        for (packing_mode mode = PACKING_BEST_FIT; mode <= PACKING_NONE; mode++)
            for (int ahead = 0; ahead < 2; ahead++) {
                one_epoch((data_options){ tokens[k], 3, mode, ahead }, NULL);
                one_epoch((data_options){ tokens[k], 1, mode, ahead }, some);
            }
}

static void sequential_is_full(void)
{
    data_options o = { 32, 4, PACKING_SEQUENTIAL, true };
    data_source *d = must_open(&plain, o);
    CHECK(data_max_documents(d) == 32, " ");
    for (int i = 0; i < 100; i++) {
        const step_batch *step;
        CHECK(data_next(d, &step) == MT_OK, "%s", status_text());
        check_step(step, &o, NULL);
        CHECK(step->tokens == 128 && step->n_targets == 128, "%d", (int)step->tokens);
    }
    data_close(d);
}

/* ---- best fit ------------------------------------------------------------------------------- */

enum { MOST_BATCHES = 4096 };

/* Lengths, in inputs, of what the micro-batches of an epoch hold. */
static int64_t pack_epoch(const stream *proto, int64_t micro_tokens, int64_t *ret_tokens,
                          int64_t *ret_documents)
{
    stream one = *proto;
    one.endless = false;
    data_source *d = must_open(&one, (data_options){ micro_tokens, 1, PACKING_BEST_FIT, false });
    const step_batch *step;
    int64_t n = 0;
    while (data_next(d, &step) == MT_OK && n < MOST_BATCHES) {
        ret_tokens[n] = step->tokens;
        ret_documents[n++] = step->micro[0].documents;
    }
    data_close(d);
    return n;
}

/* Inputs of 700, 300, 400, 600, 500, 500: three full micro-batches of two documents each. */
static int64_t pairs(int64_t i)
{
    static const int64_t n[] = { 701, 301, 401, 601, 501, 501 };
    return n[i % 6];
}

/* Three of 600 do not pair up, whatever the others do. */
static int64_t loose(int64_t i)
{
    static const int64_t n[] = { 601, 101, 601, 201, 601, 101 };
    return n[i % 6];
}

static int64_t random_length(int64_t i)
{
    return 2 + (int64_t)((uint64_t)i * 2654435761u % 1000003u) % 400;
}

static void whole_documents_fill_micro_batches(void)
{
    int64_t tokens[MOST_BATCHES], documents[MOST_BATCHES];
    stream proto = plain;
    proto.documents = 6;
    proto.length = pairs;
    CHECK(pack_epoch(&proto, 1000, tokens, documents) == 3, " ");
    for (int i = 0; i < 3; i++)
        CHECK(tokens[i] == 1000 && documents[i] == 2, "%d: %d", i, (int)tokens[i]);
    proto.length = loose; /* 600 + 200, 600 + 100 + 100, 600 */
    CHECK(pack_epoch(&proto, 1000, tokens, documents) == 3, " ");
    for (int i = 0; i < 3; i++)
        CHECK(tokens[i] >= 600 && tokens[i] <= 800, "%d", (int)tokens[i]);

    proto.documents = 2003; /* several windows would be 1 Mi tokens; this is 0.4 Mi */
    proto.length = random_length;
    int64_t n = pack_epoch(&proto, 1000, tokens, documents), all = 0, least = 1000;
    for (int64_t i = 0; i < n; i++) {
        all += tokens[i];
        least = tokens[i] < least ? tokens[i] : least;
    }
    CHECK(n == (all + 999) / 1000, "%d micro-batches for %d tokens", (int)n, (int)all);
    CHECK(least > 750, "the emptiest has %d tokens", (int)least);
}

static void an_epoch_is_counted_exactly(void)
{
    static const int64_t sizes[] = { 7, 64, 1000 };
    int64_t tokens[MOST_BATCHES], documents[MOST_BATCHES];
    for (int masked = 0; masked < 2; masked++)
        for (int k = 0; k < 3; k++) {
            stream proto = plain;
            proto.mask = masked ? some : NULL;
            int64_t n = 0, want = pack_epoch(&proto, sizes[k], tokens, documents);
            CHECK(packing_count_epoch(&fake, &proto, sizes[k], &n) == MT_OK, "%s", status_text());
            CHECK(n == want && n > 0, "%d, counted %d", (int)want, (int)n);
        }
}

/* Windows end with the epoch: each one trains every target once before the next begins. */
static void epochs_do_not_mix(void)
{
    data_options o = { 16, 1, PACKING_BEST_FIT, true };
    data_source *d = must_open(&plain, o);
    int *seen = calloc(DOCUMENTS * 1000, sizeof *seen);
    const step_batch *step;
    for (int64_t epoch = 0; epoch < 3; epoch++) {
        double before = (double)epoch;
        do {
            CHECK(data_next(d, &step) == MT_OK, "%s", status_text());
            check_step(step, &o, seen);
            double now = data_epochs(d, DOCUMENTS);
            CHECK(now > before, "%g after %g epochs", now, before);
            before = now;
        } while (data_tell(d).epoch == epoch);
        CHECK(before == (double)epoch + 1, "%g epochs", before);
        int64_t wrong = 0;
        for (int64_t i = 0; i < DOCUMENTS; i++)
            for (int64_t t = 1; t < ragged(i); t++)
                wrong += seen[i * 1000 + t] != epoch + 1;
        CHECK(wrong == 0, "epoch %d: %d targets", (int)epoch, (int)wrong);
    }
    data_close(d);
    free(seen);
}

/* ---- prefetch = no prefetch; resume --------------------------------------------------------- */

/* All that a step holds, as one number. */
static uint64_t fingerprint(const step_batch *s)
{
    uint64_t h = (uint64_t)s->n;
    for (int64_t k = 0; k < s->n; k++) {
        const micro_batch *b = &s->micro[k];
        for (int64_t t = 0; t < b->tokens; t++)
            h = (h * 1000003u + (uint32_t)b->ids[t]) * 1000003u +
                (uint32_t)(b->targets[t] * 64 + b->positions[t]);
        for (int64_t j = 0; j <= b->documents; j++)
            h = h * 1000003u + (uint32_t)b->doc_starts[j];
    }
    return h;
}

enum { STEPS = 40 };

static void resume(void)
{
    for (packing_mode mode = PACKING_BEST_FIT; mode <= PACKING_NONE; mode++) {
        data_options o = { 16, 2, mode, false };
        uint64_t want[STEPS];
        data_position at[STEPS + 1];
        stream proto = plain;
        proto.documents = 15;
        proto.mask = some;
        data_source *d = must_open(&proto, o);
        const step_batch *step;
        at[0] = data_tell(d);
        for (int i = 0; i < STEPS; i++) {
            CHECK(data_next(d, &step) == MT_OK, "%s", status_text());
            want[i] = fingerprint(step);
            at[i + 1] = data_tell(d);
        }
        data_close(d);
        bool inside_in_epoch_2 = false;
        for (int from = 0; from <= STEPS; from++) {
            inside_in_epoch_2 |= at[from].epoch >= 1 && at[from].offset > 0;
            o.prefetch = from % 2;
            d = must_open(&proto, o);
            CHECK(data_seek(d, at[from]) == MT_OK, "%s", status_text());
            data_position now = data_tell(d);
            CHECK(memcmp(&now, &at[from], sizeof now) == 0, "%d", from);
            for (int i = from; i < STEPS; i++) {
                CHECK(data_next(d, &step) == MT_OK, "%s", status_text());
                CHECK(fingerprint(step) == want[i], "step %d, resumed at %d", i, from);
                now = data_tell(d);
                CHECK(memcmp(&now, &at[i + 1], sizeof now) == 0, "%d", i);
            }
            data_close(d);
        }
        CHECK(inside_in_epoch_2, "the test does not reach what it is for");
    }
}

static void a_batch_lives_until_the_second_next_call(void)
{
    data_options o = { 16, 2, PACKING_SEQUENTIAL, true };
    data_source *d = must_open(&plain, o);
    const step_batch *step[3] = { NULL };
    uint64_t h[3] = { 0 };
    for (int i = 0; i < 200; i++) {
        CHECK(data_next(d, &step[i % 3]) == MT_OK, "%s", status_text());
        h[i % 3] = fingerprint(step[i % 3]);
        if (i % 20 == 0)
            usleep(500); /* let the thread run ahead as far as it dares */
        if (i > 0)
            CHECK(fingerprint(step[(i + 2) % 3]) == h[(i + 2) % 3], "step %d", i - 1);
        CHECK(fingerprint(step[i % 3]) == h[i % 3], "step %d", i);
    }
    data_close(d);
}

/* ---- what goes wrong ------------------------------------------------------------------------ */

static void nothing_to_train(void)
{
    for (int way = 0; way < 6; way++) {
        const packing_mode mode = (packing_mode)(way / 2);
        const bool ahead = way % 2;
        stream proto = plain;
        proto.mask = nothing;
        data_source *d = must_open(&proto, (data_options){ 16, 2, mode, ahead });
        const step_batch *step = NULL;
        CHECK(data_next(d, &step) == MT_ERR_INVALID && support_says("no token to train on"), " ");
        CHECK(data_next(d, &step) == MT_ERR_INVALID && !step, "an error must stay");
        data_close(d);
        proto.endless = false;
        d = must_open(&proto, (data_options){ 16, 2, mode, ahead });
        CHECK(data_next(d, &step) == MT_END, " ");
        data_close(d);
        /* Whole micro-batches and whole steps fall out; what is left is complete. */
        one_epoch((data_options){ 4, 1, mode, ahead }, not_long);
        one_epoch((data_options){ 4, 3, mode, ahead }, not_long);
    }
}

static void errors_pass_through(void)
{
    for (int ahead = 0; ahead < 2; ahead++) {
        stream proto = plain;
        proto.fails_at = 20;
        data_source *d = must_open(&proto, (data_options){ 16, 2, PACKING_SEQUENTIAL, ahead });
        const step_batch *step;
        mt_status status;
        int steps = 0;
        while ((status = data_next(d, &step)) == MT_OK)
            steps++;
        CHECK(status == MT_ERR_IO && support_says("the disk is gone"), "%d", status);
        CHECK(steps > 2, "%d", steps);
        CHECK(data_next(d, &step) == MT_ERR_IO && support_says("the disk is gone"), " ");
        CHECK(data_seek(d, (data_position){ 0, 0, 0, 0 }) == MT_ERR_INVALID, " ");
        data_close(d);
    }
}

static void bad_positions(void)
{
    data_source *d = must_open(&plain, (data_options){ 16, 2, PACKING_SEQUENTIAL, true });
    CHECK(data_seek(d, (data_position){ 0, DOCUMENTS + 1, 0, 0 }) == MT_ERR_INVALID, " ");
    CHECK(data_seek(d, (data_position){ 0, 0, 4, 0 }) == MT_ERR_INVALID && support_says("token 4"),
          " ");
    CHECK(data_seek(d, (data_position){ 1, 0, -1, 0 }) == MT_ERR_INVALID, " ");
    /* A window's micro-batches are those of one size, and no place inside a document. */
    CHECK(data_seek(d, (data_position){ 0, 0, 4, 16 }) == MT_ERR_INVALID &&
              support_says("go on with packing: best_fit"),
          " ");
    data_close(d);
    d = must_open(&plain, (data_options){ 16, 2, PACKING_BEST_FIT, true });
    CHECK(data_seek(d, (data_position){ 0, 0, 4, 32 }) == MT_ERR_INVALID &&
              support_says("micro-batches of 32 tokens"),
          " ");
    CHECK(data_seek(d, (data_position){ 0, 0, 4, 0 }) == MT_ERR_INVALID &&
              support_says("inside a document"),
          " ");
    CHECK(data_seek(d, (data_position){ 0, 0, 1000, 16 }) == MT_ERR_INVALID &&
              support_says("micro-batch 1000"),
          " ");
    CHECK(data_seek(d, (data_position){ 0, 0, 4, 16 }) == MT_OK, "%s", status_text());
    data_close(d);
    d = NULL;
    data_options none = { 0, 1, PACKING_SEQUENTIAL, false };
    atomic_fetch_add(&open_streams, 1);
    CHECK(data_open(&fake, malloc(1), &none, &d) == MT_ERR_INVALID && !d, " ");
    data_close(NULL);
}

static void closing_early(void)
{
    for (int i = 0; i < 50; i++) {
        data_source *d = must_open(&plain, (data_options){ 64, 4, PACKING_SEQUENTIAL, true });
        const step_batch *step;
        for (int k = 0; k < i % 5; k++)
            CHECK(data_next(d, &step) == MT_OK, " ");
        data_close(d);
    }
    CHECK(atomic_load(&open_streams) == 0, "%d streams are still open", open_streams);
}

int main(void)
{
    log_set_level(MT_LOG_ERROR); /* micro-batches are left out on purpose */
    RUN(every_target_once);
    RUN(sequential_is_full);
    RUN(whole_documents_fill_micro_batches);
    RUN(an_epoch_is_counted_exactly);
    RUN(epochs_do_not_mix);
    RUN(resume);
    RUN(a_batch_lives_until_the_second_next_call);
    RUN(nothing_to_train);
    RUN(errors_pass_through);
    RUN(bad_positions);
    RUN(closing_early);
    return check_done();
}
