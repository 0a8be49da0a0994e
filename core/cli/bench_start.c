/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain bench start: what `train` does up to the end of its first step, with the files of the
 * weights on the disk only and again in memory, beside how fast the same files can be read.
 */
#include "../../plugins/host/registry.h"
#include "../base/parallel.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "../train/human.h"
#include "../train/session.h"
#include "bench.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the files of the weights ---------------------------------------------------------------- */

enum { MAX_FILES = 1024, PIECE = 8 << 20, DIRECT_ALIGN = 4096 };

typedef struct weight_file {
    char *path;
    int64_t bytes, first_piece;
} weight_file;

typedef struct weight_files {
    weight_file file[MAX_FILES];
    int32_t n;
    int64_t bytes, pieces;
} weight_files;

static void files_finish(weight_files *f)
{
    for (int32_t i = 0; i < f->n; i++)
        free(f->file[i].path);
}

static bool is_weights(const char *name)
{
    static const char suffix[] = "." SESSION_FORMAT;
    size_t n = strlen(name), k = sizeof suffix - 1;
    return n > k && strcmp(name + n - k, suffix) == 0;
}

static mt_status files_list(const char *folder, weight_files *f)
{
    mt_status st = MT_OK;
    DIR *d = opendir(folder);
    if (!d)
        return status_set(MT_ERR_IO, "%s: cannot list: %s", folder, strerror(errno));
    for (struct dirent *e; st == MT_OK && f->n < MAX_FILES && (e = readdir(d));) {
        struct stat info;
        weight_file *w = &f->file[f->n];
        if (!is_weights(e->d_name))
            continue;
        if (asprintf(&w->path, "%s/%s", folder, e->d_name) < 0) {
            st = status_nomem("a path", strlen(folder));
            break;
        }
        f->n++;
        if (stat(w->path, &info) < 0) {
            st = status_set(MT_ERR_IO, "%s: cannot read: %s", w->path, strerror(errno));
            break;
        }
        w->bytes = info.st_size;
        w->first_piece = f->pieces;
        f->bytes += w->bytes;
        f->pieces += (w->bytes + PIECE - 1) / PIECE;
    }
    closedir(d);
    return st;
}

/* So that they have to come from the disk. What is not written yet stays in memory. */
static void files_forget(const weight_files *f)
{
    for (int32_t i = 0; i < f->n; i++) {
        int fd = open(f->file[i].path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

typedef struct reading {
    const weight_files *files;
    int flags; /* O_DIRECT: past the page cache */
    void *buffer[PARALLEL_MAX_THREADS];
} reading;

static mt_status read_piece(void *arg, int64_t i, int32_t thread)
{
    reading *r = arg;
    const weight_file *w = r->files->file;
    while (i >= w->first_piece + (w->bytes + PIECE - 1) / PIECE)
        w++;
    int fd = open(w->path, O_RDONLY | O_CLOEXEC | r->flags);
    int64_t at = (i - w->first_piece) * PIECE, end = at + PIECE < w->bytes ? at + PIECE : w->bytes;
    ssize_t got = 1;
    while (fd >= 0 && at < end && got > 0) {
        got = pread(fd, r->buffer[thread], PIECE, at);
        at += got;
    }
    mt_status st = MT_OK;
    if (fd < 0 || got < 0)
        st = status_set(MT_ERR_IO, "%s: cannot read: %s", w->path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return st;
}

/* Bytes a second, by as many threads as load weights. */
static mt_status read_rate(const weight_files *f, int flags, double *ret)
{
    reading r = { .files = f, .flags = flags };
    const int32_t threads = parallel_io_threads(f->pieces);
    mt_status st = MT_OK;
    for (int i = 0; i < threads && st == MT_OK; i++)
        if (!(r.buffer[i] = aligned_alloc(DIRECT_ALIGN, PIECE)))
            st = status_nomem("reading", PIECE);
    double began = progress_now();
    if (st == MT_OK)
        st = parallel_run(threads, f->pieces, read_piece, &r);
    double seconds = progress_now() - began;
    for (int i = 0; i < threads; i++)
        free(r.buffer[i]);
    if (st == MT_OK)
        *ret = (double)f->bytes / seconds;
    return st;
}

/* Where a file system has no direct access, through the page cache, which holds nothing. */
static mt_status disk_rate(const weight_files *f, double *ret)
{
    files_forget(f);
    if (read_rate(f, O_DIRECT, ret) == MT_OK)
        return MT_OK;
    return read_rate(f, 0, ret);
}

/* ---- one start ------------------------------------------------------------------------------- */

static mt_status first_step(session *s, const run_manifest *run)
{
    const step_batch *batch = NULL;
    const engine_step_params params = { .step = 1,
                                        .lr = run->learning_rate,
                                        .max_grad_norm = run->max_grad_norm };
    engine_result r;
    startup_mark(&s->startup);
    mt_status st = data_next(s->train, &batch);
    if (st == MT_OK)
        st = engine_step(s->engine, batch, &params, &r);
    if (st == MT_OK)
        startup_end(&s->startup, STARTUP_STEP, 0);
    return st;
}

static mt_status start(session *s, run_manifest *run)
{
    mt_status st = session_open_run(s, run, true);
    if (st == MT_OK)
        st = session_start(s, &(session_engine_options){ 0 });
    if (st == MT_OK)
        st = session_load_weights(s, run->from_scratch ? "" : s->source.weights,
                                  (uint64_t)run->seed);
    return st == MT_OK ? first_step(s, run) : st;
}

static mt_status timed_start(run_manifest *run, startup *ret)
{
    session s = { 0 };
    mt_status st = start(&s, run);
    *ret = s.startup;
    session_close(&s);
    return st;
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Disks are sold, and dd counts, in powers of ten. */
static double gb(double bytes)
{
    return bytes * 1e-9;
}

/* Of fewer bytes it is opening files and starting threads that takes the time. */
static const double least_bytes = 32e6;

static void print_phase(const startup *s, startup_phase p, double ceiling)
{
    double t = s->seconds[p], bytes = (double)s->bytes[p];
    if (!s->bytes[p] || t <= 0)
        printf("  %9.3f s %30s", t, "");
    else if (p == STARTUP_WEIGHTS && ceiling > 0 && bytes >= least_bytes)
        printf("  %9.3f s %8.2f GB %6.2f GB/s %4.0f%%", t, gb(bytes), gb(bytes / t),
               100 * bytes / t / ceiling);
    else
        printf("  %9.3f s %8.2f GB %6.2f GB/s %5s", t, gb(bytes), gb(bytes / t), "");
}

static void print_table(const startup times[2], const double rate[2])
{
    printf("%-10s  %-41s  %s\n", "", "files on the disk", "files in memory");
    for (int p = 0; p < STARTUP_PHASES; p++) {
        printf("%-10s", startup_name((startup_phase)p));
        for (int k = 0; k < 2; k++)
            print_phase(&times[k], (startup_phase)p, rate[k]);
        printf("\n");
    }
    printf("%-10s  %9.3f s %30s  %9.3f s\n", "in all", startup_total(&times[0]), "",
           startup_total(&times[1]));
    double weights = (double)times[0].bytes[STARTUP_WEIGHTS];
    if (rate[0] > 0 && weights < least_bytes)
        printf("weights of less than %.0f MB are too few to compare with the rate of reading\n",
               1e-6 * least_bytes);
}

static mt_status bench(run_manifest *run)
{
    weight_files files = { 0 };
    startup times[2];
    double rate[2] = { 0 };
    model_source source = { 0 };
    mt_status st = model_source_open(run->model, &source);
    bool has_files = st == MT_OK && !run->from_scratch;
    if (has_files && (st = files_list(source.weights, &files)) == MT_OK &&
        (st = disk_rate(&files, &rate[0])) == MT_OK)
        files_forget(&files);
    for (int k = 0; k < 2 && st == MT_OK; k++) {
        /* Once more through the page cache, so that it holds what fits there. */
        if (k == 1 && has_files && (st = read_rate(&files, 0, &rate[1])) == MT_OK)
            st = read_rate(&files, 0, &rate[1]);
        if (st == MT_OK)
            st = timed_start(run, &times[k]);
    }
    if (st == MT_OK && has_files)
        printf("%s: %d files of weights, %.2f GB; read at %.2f GB/s from the disk, %.2f GB/s from "
               "memory\n",
               source.weights, files.n, gb((double)files.bytes), gb(rate[0]), gb(rate[1]));
    if (st == MT_OK)
        print_table(times, rate);
    files_finish(&files);
    model_source_close(&source);
    return st;
}

static int run_bench_start(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    const cli_option options[] = { CLI_PLUGIN_DIR(&dirs), { 0 } };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    run_manifest *run = NULL;
    if (rc == CLI_GO_ON)
        rc = cli_read_run(self, argv, words, &run);
    if (rc != CLI_GO_ON)
        return rc;
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = bench(run);
    rc = cli_exit(st);
    run_destroy(run);
    registry_finish();
    return rc;
}

const cli_command cli_bench_start = {
    .name = "bench start",
    .words = "RUN.yaml [key=value ...] [options]",
    .brief = "measure what a run does before its first step",
    .help =
        "Does what `train` does for RUN.yaml up to the end of its first step, twice: with the\n"
        "files of the weights only on the disk, and again with them in memory. Prints how long\n"
        "each phase took, how much went through it, and for the weights which part that is of\n"
        "the rate at which as many threads read the same files and do nothing else. Writes no run\n"
        "folder. Data is tokenised in the first start if it was not before.",
    .example = "example: how fast is the start of this fine-tuning run?\n"
               "  megatrain bench start docs/examples/finetune/finetune.yaml",
    .run = run_bench_start,
};
