/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing metrics.jsonl, and cutting it back to a checkpoint's step on resume. Lines that cannot be
 * written wait in memory: a run is not lost to a file of figures.
 */
#include "metrics.h"

#include "../base/log.h"
#include "../base/status.h"
#include "human.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_WAITING = 16 << 20, LINE_SIZE = 4096 };

struct metrics {
    int fd; /* -1: closed */
    char *path;
    off_t end;            /* of the whole lines in the file */
    char line[LINE_SIZE]; /* the one that is being made */
    size_t n_line;
    char *held; /* lines that are not in the file yet */
    size_t n_held, cap;
    int64_t waiting, lost; /* how many these are, and those for which there was no room */
    bool failing;          /* and this has been told */
};

/* ---- opening --------------------------------------------------------------------------------- */

/* What a line of an earlier run is about; false when it is not a whole object of ours. */
static bool parse_line(const char *line, size_t n, int64_t *ret_step, bool *ret_is_eval)
{
    if (n == 0 || line[n - 1] != '\n')
        return false; /* cut by a crash */
    json_t *root = json_loadb(line, n, 0, NULL);
    json_t *step = json_object_get(root, "step");
    bool ok = json_is_integer(step);
    if (ok) {
        *ret_step = json_integer_value(step);
        *ret_is_eval = json_object_get(root, "validation_loss") != NULL;
    }
    json_decref(root);
    return ok;
}

/* Where the lines end that this run would have written up to its checkpoint. Only the last line
 * can have been cut by a crash; cutting at another damaged one would take good lines along. */
static mt_status find_cut(const metrics *m, FILE *f, const metrics_resume *r, int64_t *ret_keep,
                          bool *ret_has_eval)
{
    mt_status st = MT_OK;
    char *line = NULL;
    size_t room = 0;
    int64_t keep = 0, number = 0;
    ssize_t n;
    while ((n = getline(&line, &room, f)) > 0) {
        int64_t step = 0;
        bool is_eval = false;
        number++;
        if (!parse_line(line, (size_t)n, &step, &is_eval)) {
            n = getline(&line, &room, f);
            if (n > 0)
                st = status_set(MT_ERR_FORMAT,
                                "%s:%lld: is no line of metrics, but others follow; mend the file "
                                "or move it elsewhere",
                                m->path, (long long)number);
            break;
        }
        if (step > r->step)
            break;
        if (is_eval && step == r->step && !r->eval_is_due)
            break;
        *ret_has_eval = is_eval && step == r->step;
        keep += n;
    }
    if (n < 0 && !feof(f)) /* what is not read would be cut off */
        st = status_set(MT_ERR_IO, "%s: cannot read: %s", m->path, strerror(errno));
    free(line);
    *ret_keep = keep;
    return st;
}

/* Opens the file and locks it; -1 with errno, which is EWOULDBLOCK where another process has. */
static int open_locked(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

mt_status metrics_open(const char *path, metrics **ret)
{
    metrics *m = calloc(1, sizeof *m);
    if (m)
        m->path = strdup(path);
    if (!m || !m->path) {
        free(m);
        return status_nomem("metrics", sizeof *m);
    }
    struct stat st;
    m->fd = open_locked(path);
    if (m->fd >= 0 && fstat(m->fd, &st) == 0 && S_ISREG(st.st_mode)) {
        *ret = m;
        return MT_OK;
    }
    int error = errno, fd = m->fd;
    metrics_close(m);
    if (fd >= 0)
        return status_set(MT_ERR_INVALID,
                          "%s: is no regular file, which alone can be cut to the step that a run "
                          "is resumed from; remove it, or move it elsewhere",
                          path);
    if (error == EWOULDBLOCK)
        return status_set(MT_ERR_INVALID,
                          "%s: another process is training in this run folder; stop it, or set "
                          "output_dir to another folder",
                          path);
    return status_set(MT_ERR_IO,
                      "%s: cannot open and lock: %s; set output_dir to a folder that you can write "
                      "to, on a file system that has locks",
                      path, strerror(error));
}

static mt_status cannot_cut(const metrics *m, int64_t keep)
{
    return status_set(MT_ERR_IO, "%s: cannot cut to %lld bytes: %s", m->path, (long long)keep,
                      strerror(errno));
}

mt_status metrics_cut(metrics *m, const metrics_resume *resume, bool *ret_has_eval)
{
    int64_t keep = 0;
    bool has_eval = false;
    if (resume) {
        FILE *f = fopen(m->path, "r");
        if (!f)
            return status_set(MT_ERR_IO, "%s: cannot read: %s", m->path, strerror(errno));
        mt_status st = find_cut(m, f, resume, &keep, &has_eval);
        fclose(f);
        if (st != MT_OK)
            return st;
    }
    if (ftruncate(m->fd, keep) != 0)
        return cannot_cut(m, keep);
    m->end = keep;
    *ret_has_eval = has_eval;
    return MT_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Appends to the line, which has room for all that is ever put there. */
static void MT_PRINTF(2, 3) put(metrics *m, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(m->line + m->n_line, LINE_SIZE - m->n_line, fmt, args);
    va_end(args);
    m->n_line += n > 0 && (size_t)n < LINE_SIZE - m->n_line ? (size_t)n : 0;
}

/* Members of the object that is being written. */
static void put_int(metrics *m, const char *key, int64_t x)
{
    put(m, ", \"%s\": %lld", key, (long long)x);
}

/* 17 digits restore a double exactly; the loss of two runs is compared bit for bit. */
static void put_real(metrics *m, const char *key, double x)
{
    if (isfinite(x))
        put(m, ", \"%s\": %.17g", key, x);
    else
        put(m, ", \"%s\": null", key);
}

static void put_time(metrics *m, const char *key, double seconds)
{
    put(m, ", \"%s\": %.6f", key, isfinite(seconds) ? seconds : 0.0);
}

/* The line waits for its turn; where too many do it is lost. */
static void hold_line(metrics *m)
{
    size_t need = m->n_held + m->n_line;
    if (need > m->cap && need <= MOST_WAITING) {
        size_t cap = need < MOST_WAITING / 2 ? 2 * need : MOST_WAITING;
        char *grown = realloc(m->held, cap);
        if (grown) {
            m->held = grown;
            m->cap = cap;
        }
    }
    if (need <= m->cap) {
        memcpy(m->held + m->n_held, m->line, m->n_line);
        m->n_held = need;
        m->waiting++;
    } else {
        m->lost++;
    }
    m->n_line = 0;
}

/* Is the open file still the one that its path names? Where that cannot be told it is. */
static bool is_in_place(const metrics *m, const struct stat *held)
{
    struct stat named;
    if (stat(m->path, &named) != 0)
        return errno != ENOENT && errno != ENOTDIR;
    return named.st_dev == held->st_dev && named.st_ino == held->st_ino;
}

/* A file that was removed or moved, with its folder or alone, or replaced, as editors do, is
 * written to for nothing: goes on in the one that is there, or a new one. Of one that another
 * program has cut, the end is where it is now: zeros would fill the gap. False with errno: there is
 * none. */
static bool find_file(metrics *m)
{
    struct stat st;
    if (fstat(m->fd, &st) == 0 && is_in_place(m, &st)) {
        if (st.st_size < m->end) {
            log_write(MT_LOG_WARNING, "%s: was cut by another program, and goes on there", m->path);
            m->end = st.st_size;
        }
        return true;
    }
    int fd = open_locked(m->path);
    off_t end = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    if (end < 0) {
        int error = errno == EWOULDBLOCK ? EBUSY : errno;
        if (fd >= 0)
            close(fd);
        errno = error;
        return false;
    }
    log_write(MT_LOG_WARNING, "%s: is another file than it was, and has the lines that come now",
              m->path);
    close(m->fd);
    m->fd = fd;
    m->end = end;
    return true;
}

/* Appends what waits, all of it or, with errno, nothing: who reads the file finds whole lines. */
static bool write_held(metrics *m)
{
    size_t done = 0;
    while (done < m->n_held) {
        ssize_t n = pwrite(m->fd, m->held + done, m->n_held - done, m->end + (off_t)done);
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0 || errno != EINTR) {
            int error = n == 0 ? EIO : errno;
            if (ftruncate(m->fd, m->end) != 0) /* what comes next is written over it */
                error = errno;
            errno = error;
            return false;
        }
    }
    m->end += (off_t)done;
    m->n_held = 0;
    return true;
}

/* Said once, when it begins: a line for each would hide all else. */
static void tell_failure(metrics *m)
{
    const char *why = strerror(errno);
    if (!m->failing)
        log_write(MT_LOG_WARNING,
                  "%s: cannot write: %s; training goes on, and up to %s of lines wait until they "
                  "can be written: free some space, or mend what is wrong there",
                  m->path, why, human_bytes(MOST_WAITING).s);
    m->failing = true;
}

static void write_waiting(metrics *m)
{
    if (!find_file(m) || !write_held(m)) {
        tell_failure(m);
        return;
    }
    if (m->failing)
        log_write(m->lost ? MT_LOG_WARNING : MT_LOG_INFO,
                  "%s: can be written again: %s line%s had to wait, %s %s lost", m->path,
                  human_grouped(m->waiting).s, m->waiting == 1 ? "" : "s", human_grouped(m->lost).s,
                  m->lost == 1 ? "is" : "are");
    m->failing = false;
    m->waiting = m->lost = 0;
}

static void end_line(metrics *m)
{
    put(m, "}\n");
    hold_line(m);
    write_waiting(m);
}

void metrics_close(metrics *m)
{
    if (!m)
        return;
    if (m->failing)
        write_waiting(m);
    int64_t lost = m->waiting + m->lost;
    if (m->fd >= 0 && close(m->fd) != 0)
        log_write(MT_LOG_WARNING, "%s: cannot write: %s; its last lines may be lost", m->path,
                  strerror(errno));
    if (lost > 0)
        log_write(MT_LOG_WARNING, "%s: cannot be written to the end: %s line%s %s lost", m->path,
                  human_grouped(lost).s, lost == 1 ? "" : "s", lost == 1 ? "is" : "are");
    free(m->held);
    free(m->path);
    free(m);
}

void metrics_write_step(metrics *m, const metrics_step *s)
{
    static const char *const wait[ENGINE_WAITS] = { "wait_weights_seconds",
                                                    "wait_gradients_seconds",
                                                    "wait_optimizer_seconds", "wait_data_seconds" };
    double per_second = s->seconds > 0 ? 1.0 / s->seconds : 0;
    put(m, "{\"step\": %lld", (long long)s->step);
    put_real(m, "loss", s->loss);
    if (s->has_aux_loss)
        put_real(m, "aux_loss", s->aux_loss);
    put_real(m, "grad_norm", s->grad_norm);
    put_real(m, "lr", s->lr);
    put_int(m, "tokens", s->tokens);
    put_int(m, "targets", s->targets);
    put_int(m, "total_tokens", s->total_tokens);
    put_real(m, "packing_efficiency", s->packing_efficiency);
    put_real(m, "epoch", s->epoch);
    put(m, ", \"updated\": %s", s->updated ? "true" : "false");
    put_time(m, "tokens_per_second", (double)s->tokens * per_second);
    put_real(m, "model_flops_per_second", s->model_flops * per_second);
    put_time(m, "seconds", s->seconds);
    for (int i = 0; i < ENGINE_WAITS; i++)
        put_time(m, wait[i], s->wait[i]);
    put_int(m, "device_bytes", s->bytes[PLAN_DEVICE]);
    put_int(m, "host_bytes", s->bytes[PLAN_HOST]);
    put_int(m, "rss", s->rss);
    if (!isnan(s->router_violation))
        put_real(m, "router_max_violation", s->router_violation);
    end_line(m);
}

void metrics_write_eval(metrics *m, const metrics_eval *e)
{
    put(m, "{\"step\": %lld", (long long)e->step);
    put_real(m, "validation_loss", e->loss);
    put_real(m, "perplexity", exp(e->loss));
    put_int(m, "validation_targets", e->targets);
    put_time(m, "seconds", e->seconds);
    end_line(m);
}
