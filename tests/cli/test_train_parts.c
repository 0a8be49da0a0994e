/* SPDX-License-Identifier: Apache-2.0
 *
 * The pure parts of training and of the program: schedules, sampling, figures, UTF-8, metrics.
 */
#include "core/base/status.h"
#include "core/cli/utf8.h"
#include "core/engine/plan.h"
#include "core/train/human.h"
#include "core/train/loop_internal.h"
#include "core/train/metrics.h"
#include "core/train/sample.h"
#include "core/train/schedule.h"
#include "core/train/signals.h"

#include "../check.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- saving ---------------------------------------------------------------------------------- */

/* Of 91 GB at 1.8 GB/s; with steps of 32k and of 131k tokens. */
static void advice_on_saving(void)
{
    CHECK(loop_advise_save_steps(50, 2.5, 100) == 1000, " ");
    CHECK(loop_advise_save_steps(50, 10, 50) == 500, " ");
    CHECK(loop_advise_save_steps(50, 10, 20) == 500, " ");
    /* 5% or less are not worth a word; a little more are. */
    CHECK(loop_advise_save_steps(50, 10, 95) == 0, " ");
    CHECK(loop_advise_save_steps(50, 10, 94) == 500, " ");
    /* Just enough, and just not. */
    CHECK(loop_advise_save_steps(1, 0.491, 1) == 100, " ");
    CHECK(loop_advise_save_steps(1, 0.489, 1) == 200, " ");
    CHECK(loop_advise_save_steps(1, 0.097, 1) == 1000, " ");
    CHECK(loop_advise_save_steps(1, 60, 1) == 0 && loop_advise_save_steps(9, 60, 1) == 10, " ");
    /* Only at the end, or before a step was timed. */
    CHECK(loop_advise_save_steps(50, 2.5, 0) == 0 && loop_advise_save_steps(50, 0, 10) == 0, " ");
}

/* ---- schedules: expected values are those of transformers/optimization.py -------------------- */

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-15 + 1e-12 * fabs(b);
}

static void warmup_starts_from_zero(void)
{
    for (run_schedule k = RUN_CONSTANT; k <= RUN_WSD; k++) {
        schedule s = { k, 2e-3, 0.1, 10, 100, 20 };
        CHECK(schedule_lr(&s, 0) == 0);
        CHECK(near(schedule_lr(&s, 5), 1e-3));
        CHECK(near(schedule_lr(&s, 10), 2e-3));
    }
}

static void constant_stays(void)
{
    schedule s = { RUN_CONSTANT, 3e-4, 0.1, 0, 100, 0 };
    CHECK(schedule_lr(&s, 0) == 3e-4 && schedule_lr(&s, 99) == 3e-4 &&
          schedule_lr(&s, 500) == 3e-4);
}

static void linear_falls_to_its_floor(void)
{
    schedule s = { RUN_LINEAR, 1.0, 0.0, 10, 110, 0 };
    CHECK(near(schedule_lr(&s, 60), 0.5));
    CHECK(near(schedule_lr(&s, 109), 0.01));
    CHECK(schedule_lr(&s, 110) == 0 && schedule_lr(&s, 200) == 0);
    s.min_ratio = 0.2;
    CHECK(near(schedule_lr(&s, 60), 0.6));
    CHECK(near(schedule_lr(&s, 110), 0.2));
}

static void cosine_is_half_a_period(void)
{
    schedule s = { RUN_COSINE, 1.0, 0.0, 0, 100, 0 };
    CHECK(near(schedule_lr(&s, 25), 0.85355339059327373));
    CHECK(near(schedule_lr(&s, 50), 0.5));
    CHECK(near(schedule_lr(&s, 75), 0.14644660940672627));
    s.min_ratio = 0.1;
    CHECK(near(schedule_lr(&s, 50), 0.55));
    CHECK(near(schedule_lr(&s, 1000), 0.1));
}

static void wsd_is_flat_then_decays(void)
{
    schedule s = { RUN_WSD, 1.0, 0.0, 10, 100, 20 };
    CHECK(schedule_lr(&s, 10) == 1 && schedule_lr(&s, 80) == 1);
    CHECK(near(schedule_lr(&s, 90), 0.5));
    CHECK(near(schedule_lr(&s, 100), 0.0));
    s.decay = 1000; /* reaches into the warm-up: decays right after it */
    CHECK(schedule_lr(&s, 10) == 1 && schedule_lr(&s, 11) < 1);
    CHECK(near(schedule_lr(&s, 55), 0.5));
}

static void ratios_become_steps(void)
{
    run_manifest run = { .learning_rate = 1.0,
                         .lr_scheduler_type = RUN_WSD,
                         .warmup_ratio = 0.03,
                         .wsd_decay_ratio = 0.1 };
    schedule s = schedule_of_run(&run, 101);
    CHECK(s.warmup == 4 && s.decay == 11 && s.total == 101, "%lld %lld", (long long)s.warmup,
          (long long)s.decay);
    run.warmup_steps = 7;
    CHECK(schedule_of_run(&run, 101).warmup == 7);
}

/* ---- sampling -------------------------------------------------------------------------------- */

static int32_t draw_one(const sampler_options *o, const float *logits, int64_t n)
{
    sampler *s = NULL;
    int32_t token = -1;
    CHECK(sampler_create(o, n, &s) == MT_OK);
    CHECK(sampler_next(s, logits, &token) == MT_OK);
    sampler_destroy(s);
    return token;
}

static void greedy_takes_the_first_largest(void)
{
    const float logits[] = { 0.5f, 2.0f, 2.0f, -1.0f };
    CHECK(draw_one(&(sampler_options){ .top_p = 1 }, logits, 4) == 1);
}

/* Shares of many draws against the softmax. */
static void draws_follow_the_softmax(void)
{
    const float logits[] = { 0.0f, 1.0f, 2.0f };
    const double weight[] = { 1.0, exp(1.0 / 0.7), exp(2.0 / 0.7) };
    double sum = weight[0] + weight[1] + weight[2];
    int count[3] = { 0 };
    sampler *s = NULL;
    enum { N = 200000 };
    CHECK(sampler_create(&(sampler_options){ .temperature = 0.7, .top_p = 1, .seed = 3 }, 3, &s) ==
          MT_OK);
    for (int i = 0; i < N; i++) {
        int32_t t = 0;
        CHECK(sampler_next(s, logits, &t) == MT_OK);
        count[t]++;
    }
    sampler_destroy(s);
    for (int i = 0; i < 3; i++) /* five standard deviations */
        CHECK(fabs((double)count[i] / N - weight[i] / sum) < 5 * 0.5 / sqrt(N), "token %d: %d", i,
              count[i]);
}

static void top_k_and_top_p_cut(void)
{
    /* Probabilities 0.4, 0.3, 0.2, 0.1 in scattered order. */
    const float logits[] = { logf(0.1f), logf(0.4f), logf(0.2f), logf(0.3f) };
    const struct {
        int64_t top_k;
        double top_p;
        int allowed;
    } cases[] = { { 1, 1, 1 << 1 },
                  { 2, 1, 1 << 1 | 1 << 3 },
                  { 0, 0.35, 1 << 1 },
                  { 0, 0.65, 1 << 1 | 1 << 3 },
                  { 0, 0.85, 1 << 1 | 1 << 3 | 1 << 2 },
                  { 2, 0.99, 1 << 1 | 1 << 3 },
                  { 9, 1, 15 } };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        sampler *s = NULL;
        sampler_options o = { 1.0, cases[c].top_k, cases[c].top_p, 11 };
        int seen = 0;
        CHECK(sampler_create(&o, 4, &s) == MT_OK);
        for (int i = 0; i < 2000; i++) {
            int32_t t = 0;
            CHECK(sampler_next(s, logits, &t) == MT_OK);
            seen |= 1 << t;
        }
        sampler_destroy(s);
        CHECK(seen == cases[c].allowed, "case %zu: %x", c, seen);
    }
}

static void the_seed_decides(void)
{
    float logits[64] = { 0 };
    int same = 0, other = 0;
    sampler *a = NULL, *b = NULL, *c = NULL;
    sampler_create(&(sampler_options){ 1, 0, 1, 5 }, 64, &a);
    sampler_create(&(sampler_options){ 1, 0, 1, 5 }, 64, &b);
    sampler_create(&(sampler_options){ 1, 0, 1, 6 }, 64, &c);
    for (int i = 0; i < 100; i++) {
        int32_t x = 0, y = 0, z = 0;
        sampler_next(a, logits, &x);
        sampler_next(b, logits, &y);
        sampler_next(c, logits, &z);
        same += x == y;
        other += x == z;
    }
    CHECK(same == 100 && other < 20, "%d %d", same, other);
    sampler_destroy(a);
    sampler_destroy(b);
    sampler_destroy(c);
}

static void bad_sampling_is_refused(void)
{
    const sampler_options bad[] = {
        { -1, 0, 1, 0 }, { NAN, 0, 1, 0 }, { 1, -1, 1, 0 }, { 1, 0, 0, 0 }, { 1, 0, 1.5, 0 }
    };
    const char *names[] = { "temperature", "temperature", "top-k", "top-p", "top-p" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        sampler *s = NULL;
        CHECK(sampler_create(&bad[i], 4, &s) == MT_ERR_INVALID && !s);
        CHECK(strstr(status_text(), names[i]), "%s", status_text());
    }
    const float logits[] = { 0.0f, NAN };
    sampler *s = NULL;
    int32_t t = 9;
    CHECK(sampler_create(&(sampler_options){ .top_p = 1 }, 2, &s) == MT_OK);
    CHECK(sampler_next(s, logits, &t) == MT_ERR_NUMERIC && t == 9);
    sampler_destroy(s);
}

/* ---- figures --------------------------------------------------------------------------------- */

#define SAME(a, b)                                                                                 \
    do {                                                                                           \
        human_text got_ = (a);                                                                     \
        CHECK(strcmp(got_.s, b) == 0, "got '%s', expected '%s'", got_.s, b);                       \
    } while (0)

static void figures_read_well(void)
{
    SAME(human_count(0), "0");
    SAME(human_count(950), "950");
    SAME(human_count(999.9), "1.00k");
    SAME(human_count(12345), "12.3k");
    SAME(human_count(8030261248.0), "8.03B");
    SAME(human_rate(0), "0");
    SAME(human_rate(0.000012345), "0.0000123");
    SAME(human_rate(0.5), "0.500");
    SAME(human_rate(9.996), "10.0");
    SAME(human_rate(99.96), "100");
    SAME(human_rate(999.9), "1.00k");
    SAME(human_rate(12345), "12.3k");
    SAME(human_bytes(512), "512 B");
    SAME(human_bytes(1536), "1.50 KiB");
    SAME(human_bytes((int64_t)12 << 30), "12.0 GiB");
    SAME(human_seconds(0.421), "0.42s");
    SAME(human_seconds(59.4), "59s");
    SAME(human_seconds(151), "2m31s");
    SAME(human_seconds(18420), "5h07m");
    SAME(human_seconds(273600), "3d04h");
    SAME(human_seconds(NAN), "?");
    SAME(human_grouped(0), "0");
    SAME(human_grouped(999), "999");
    SAME(human_grouped(-1234567), "-1,234,567");
    SAME(human_grouped(8030261248), "8,030,261,248");
}

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

static void shows_on(bool terminal, const char *bytes, const char *expected)
{
    char got[256] = "";
    size_t n = 0;
    utf8_stream s = { .for_terminal = terminal };
    for (; *bytes; bytes++)
        n += (size_t)utf8_put(&s, (unsigned char)*bytes, got + n);
    n += (size_t)utf8_end(&s, got + n);
    got[n] = '\0';
    CHECK(strcmp(got, expected) == 0, "got '%s', expected '%s'", got, expected);
}

static void shows(const char *bytes, const char *expected)
{
    shows_on(false, bytes, expected);
}

#define BAD "\xef\xbf\xbd"

static void text_is_valid_utf8(void)
{
    shows("plain\n", "plain\n");
    shows("\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\xa7", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\xa7");
    shows("a\xff"
          "b",
          "a" BAD "b");
    shows("\xe2\x82", BAD);                /* cut at the end */
    shows("\xe2\x82x", BAD "x");           /* cut by a character */
    shows("\xe2\xc3\xa9", BAD "\xc3\xa9"); /* cut by another lead */
    shows("\x80\x80", BAD BAD);
    shows("\xc0\xaf", BAD BAD);         /* overlong */
    shows("\xed\xa0\x80", BAD BAD BAD); /* a surrogate */
    shows("\xf4\x90\x80\x80", BAD BAD BAD BAD);
}

static void terminals_get_no_control_characters(void)
{
    shows("a\033[2J\x7f\xc2\x9b", "a\033[2J\x7f\xc2\x9b");
    shows_on(true, "a\033[2J\x7f\n\t\xc2\x9b\xc2\xa0", "a" BAD "[2J" BAD "\n\t" BAD "\xc2\xa0");
}

/* ---- metrics --------------------------------------------------------------------------------- */

static char *slurp(const char *path)
{
    static char text[8192];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = '\0';
    if (f)
        fclose(f);
    return text;
}

static void put_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
}

static char metrics_path[64];

/* Opens as a resume would and returns what is left. */
static char *after_resume(metrics_resume r, bool *ret_has_eval)
{
    metrics *m = NULL;
    *ret_has_eval = false;
    CHECK(metrics_open(metrics_path, &m) == MT_OK, "%s", status_text());
    CHECK(metrics_cut(m, &r, ret_has_eval) == MT_OK, "%s", status_text());
    metrics_close(m);
    return slurp(metrics_path);
}

#define S1 "{\"step\": 1, \"loss\": 5}\n"
#define S2 "{\"step\": 2, \"loss\": 4}\n"
#define E2 "{\"step\": 2, \"validation_loss\": 4}\n"
#define S3 "{\"step\": 3, \"loss\": 3}\n"

static void metrics_are_cut_to_the_checkpoint(void)
{
    bool has_eval = false;
    put_file(metrics_path, S1 S2 E2 S3 "{\"step\": 4, \"lo");
    CHECK(strcmp(after_resume((metrics_resume){ 2, true }, &has_eval), S1 S2 E2) == 0);
    CHECK(has_eval);

    /* The end of a shorter run evaluated where this run does not. */
    put_file(metrics_path, S1 S2 E2 S3);
    CHECK(strcmp(after_resume((metrics_resume){ 2, false }, &has_eval), S1 S2) == 0);
    CHECK(!has_eval);

    /* The evaluation had not come when the run was stopped. */
    put_file(metrics_path, S1 S2 S3);
    CHECK(strcmp(after_resume((metrics_resume){ 2, true }, &has_eval), S1 S2) == 0);
    CHECK(!has_eval);

    /* A line cut by a crash. */
    put_file(metrics_path, S1 "{\"step\": 2, \"lo");
    CHECK(strcmp(after_resume((metrics_resume){ 2, true }, &has_eval), S1) == 0);
}

/* Lines that a disk fails to bring are not cut off. */
static void metrics_that_cannot_be_read(void)
{
    metrics *m = NULL;
    bool has_eval = false;
    CHECK(metrics_open("/proc/self/mem", &m) == MT_OK, "%s", status_text());
    CHECK(metrics_cut(m, &(metrics_resume){ 2, true }, &has_eval) == MT_ERR_IO);
    CHECK(strcmp(status_text(), "/proc/self/mem: cannot read: Input/output error") == 0, "%s",
          status_text());
    metrics_close(m);
}

/* Stands before the C library's. */
static int lock_error;

int flock(int fd, int operation)
{
    errno = lock_error;
    return lock_error ? -1 : (int)syscall(SYS_flock, fd, operation);
}

static void metrics_that_cannot_be_locked(void)
{
    metrics *m = NULL;
    lock_error = ENOLCK;
    CHECK(metrics_open(metrics_path, &m) == MT_ERR_IO && !m);
    CHECK(strstr(status_text(), "lock: No locks available; set output_dir"), "%s", status_text());
    lock_error = 0;
}

/* The evaluations after these steps, one a line, are all there is. */
static void check_lines(const char *path, int from, int to)
{
    const char *text = slurp(path);
    for (int step = from; step <= to; step++) {
        char begin[64];
        int n = snprintf(begin, sizeof begin, "{\"step\": %d, \"validation_loss\": ", step);
        CHECK(strncmp(text, begin, (size_t)n) == 0, "step %d: %s", step, text);
        text += strcspn(text, "\n");
        text += *text == '\n';
    }
    CHECK(*text == '\0', "more: %s", text);
}

static void write_evaluations(metrics *m, int from, int to)
{
    for (int step = from; step <= to; step++)
        metrics_write_eval(m, &(metrics_eval){ step, 1.5, 3, 1 });
}

/* Of a full disk the file has whole lines only, and all of them once there is room again. */
static void metrics_wait_for_a_disk(void)
{
    metrics *m = NULL;
    bool has_eval = false;
    struct rlimit before, full;
    struct stat st;
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR && getrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(metrics_open(metrics_path, &m) == MT_OK, "%s", status_text());
    CHECK(metrics_cut(m, NULL, &has_eval) == MT_OK, "%s", status_text());
    write_evaluations(m, 1, 2);
    CHECK(stat(metrics_path, &st) == 0);
    full = (struct rlimit){ (rlim_t)st.st_size + 30, before.rlim_max };
    for (int round = 0; round < 2; round++) { /* the second one lasts */
        CHECK(setrlimit(RLIMIT_FSIZE, &full) == 0);
        write_evaluations(m, 3 + 3 * round, 4 + 3 * round);
        check_lines(metrics_path, 1, round ? 5 : 2);
        CHECK(round || setrlimit(RLIMIT_FSIZE, &before) == 0);
        if (!round)
            write_evaluations(m, 5, 5);
        check_lines(metrics_path, 1, 5);
    }
    metrics_close(m);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    check_lines(metrics_path, 1, 5);
}

/* What another program puts in the file's place is gone on with, and not written over; what it
 * moves away stays as it is. */
static void metrics_are_replaced(void)
{
    metrics *m = NULL;
    bool has_eval = false;
    char aside[80];
    snprintf(aside, sizeof aside, "%s.aside", metrics_path);
    CHECK(metrics_open(metrics_path, &m) == MT_OK, "%s", status_text());
    CHECK(metrics_cut(m, NULL, &has_eval) == MT_OK, "%s", status_text());
    write_evaluations(m, 1, 2);
    put_file(aside, slurp(metrics_path));
    CHECK(rename(aside, metrics_path) == 0);
    write_evaluations(m, 3, 4);
    check_lines(metrics_path, 1, 4);
    CHECK(rename(metrics_path, aside) == 0);
    write_evaluations(m, 5, 6);
    check_lines(aside, 1, 4);
    check_lines(metrics_path, 5, 6);
    metrics_close(m);
    CHECK(unlink(aside) == 0);
}

/* What waits is bounded: then the lines that come last are lost. */
static void metrics_wait_in_little_memory(void)
{
    enum { STEPS = 300000 };
    metrics *m = NULL;
    bool has_eval = false;
    struct rlimit before, full;
    struct stat st;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(metrics_open(metrics_path, &m) == MT_OK, "%s", status_text());
    CHECK(metrics_cut(m, NULL, &has_eval) == MT_OK, "%s", status_text());
    full = (struct rlimit){ 10, before.rlim_max };
    CHECK(setrlimit(RLIMIT_FSIZE, &full) == 0);
    write_evaluations(m, 1, STEPS);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    metrics_close(m); /* which tries again */
    CHECK(stat(metrics_path, &st) == 0 && st.st_size > (15 << 20) && st.st_size <= (16 << 20),
          "%lld bytes", (long long)st.st_size);
}

static void metrics_begin_anew_where_they_were_removed(void)
{
    metrics *m = NULL, *second = NULL;
    bool has_eval = false;
    char folder[64], path[80];
    snprintf(folder, sizeof folder, "/tmp/mt-metrics-%d", (int)getpid());
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    CHECK(mkdir(folder, 0777) == 0);
    CHECK(metrics_open(path, &m) == MT_OK, "%s", status_text());
    CHECK(metrics_cut(m, NULL, &has_eval) == MT_OK, "%s", status_text());
    write_evaluations(m, 1, 3);
    CHECK(unlink(path) == 0);
    write_evaluations(m, 4, 5);
    check_lines(path, 4, 5);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
    write_evaluations(m, 6, 7);
    CHECK(access(folder, F_OK) != 0 && mkdir(folder, 0777) == 0);
    write_evaluations(m, 8, 8);
    check_lines(path, 6, 8);
    CHECK(metrics_open(path, &second) == MT_ERR_INVALID && !second); /* still locked */
    metrics_close(m);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
}

static void metrics_lines_are_json(void)
{
    metrics *m = NULL, *second = NULL;
    bool has_eval = false;
    CHECK(metrics_open(metrics_path, &m) == MT_OK);
    CHECK(metrics_open(metrics_path, &second) == MT_ERR_INVALID && !second);
    CHECK(strstr(status_text(), "another process"), "%s", status_text());
    CHECK(metrics_cut(m, NULL, &has_eval) == MT_OK && !has_eval);
    metrics_step s = { .step = 7,
                       .loss = NAN,
                       .has_aux_loss = true,
                       .aux_loss = 0.25,
                       .grad_norm = INFINITY,
                       .lr = 0.1,
                       .tokens = 10,
                       .targets = 9,
                       .seconds = 2,
                       .model_flops = 8e9,
                       .updated = false };
    metrics_write_step(m, &s);
    s.has_aux_loss = false;
    metrics_write_step(m, &s);
    metrics_write_eval(m, &(metrics_eval){ 7, log(2.0), 3, 1 });
    const char *text = slurp(metrics_path); /* flushed, though the file is still open */
    CHECK(strstr(text, "{\"step\": 7, \"loss\": null, \"aux_loss\": 0.25, \"grad_norm\": null, "
                       "\"lr\": 0.10000000000000001, \"tokens\": 10, \"targets\": 9") == text,
          "%s", text);
    CHECK(strstr(text, "\n{\"step\": 7, \"loss\": null, \"grad_norm\""), "%s", text);
    CHECK(strstr(text, "\"updated\": false, \"tokens_per_second\": 5.0"), "%s", text);
    CHECK(strstr(text, "\"model_flops_per_second\": 4000000000"), "%s", text);
    CHECK(
        strstr(text, "\n{\"step\": 7, \"validation_loss\": 0.69314718055994529, \"perplexity\": 2"),
        "%s", text);
    metrics_close(m);
}

/* ---- signals --------------------------------------------------------------------------------- */

enum { SURVIVED = 3, NOT_ASKED = 4 };

/* Status of a process that catches signals and gets a second one `ms` after the first. */
static int status_of_two_signals(long ms)
{
    pid_t pid = fork();
    if (pid == 0) {
        const struct timespec pause = { ms / 1000, ms % 1000 * 1000000 };
        train_catch_signals();
        train_finish_on_signal();
        bool before = train_stop_requested();
        raise(SIGTERM);
        if (before || !train_stop_requested())
            _exit(NOT_ASKED);
        nanosleep(&pause, NULL);
        raise(SIGINT);
        _exit(SURVIVED);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void a_signal_repeated_at_once_is_the_same(void)
{
    CHECK(status_of_two_signals(0) == SURVIVED);
}

static void a_later_signal_ends_at_once(void)
{
    CHECK(status_of_two_signals(1100) == 75);
}

static void slow_rates_have_digits(void)
{
    static const double rate[] = { 0, 0.0123, 0.5, 4.567, 45.67, 456.7, 55950 };
    static const char *const text[] = { "0", "0.0123", "0.500", "4.57", "45.7", "457", "55950" };
    for (size_t i = 0; i < sizeof rate / sizeof *rate; i++) {
        char got[32];
        snprintf(got, sizeof got, "%.*f", plan_rate_decimals(rate[i]), rate[i]);
        CHECK(strcmp(got, text[i]) == 0, "%s, expected %s", got, text[i]);
    }
}

int main(void)
{
    snprintf(metrics_path, sizeof metrics_path, "/tmp/mt-metrics-%d.jsonl", (int)getpid());
    RUN(warmup_starts_from_zero);
    RUN(constant_stays);
    RUN(linear_falls_to_its_floor);
    RUN(cosine_is_half_a_period);
    RUN(wsd_is_flat_then_decays);
    RUN(ratios_become_steps);
    RUN(advice_on_saving);
    RUN(slow_rates_have_digits);
    RUN(greedy_takes_the_first_largest);
    RUN(draws_follow_the_softmax);
    RUN(top_k_and_top_p_cut);
    RUN(the_seed_decides);
    RUN(bad_sampling_is_refused);
    RUN(figures_read_well);
    RUN(text_is_valid_utf8);
    RUN(terminals_get_no_control_characters);
    RUN(metrics_are_cut_to_the_checkpoint);
    RUN(metrics_that_cannot_be_read);
    RUN(metrics_that_cannot_be_locked);
    RUN(metrics_lines_are_json);
    RUN(metrics_wait_for_a_disk);
    RUN(metrics_are_replaced);
    RUN(metrics_wait_in_little_memory);
    RUN(metrics_begin_anew_where_they_were_removed);
    RUN(a_signal_repeated_at_once_is_the_same);
    RUN(a_later_signal_ends_at_once);
    unlink(metrics_path);
    return check_done();
}
