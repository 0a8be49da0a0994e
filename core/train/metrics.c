/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing metrics.jsonl, and cutting it back to a checkpoint's step on resume.
 */
#include "metrics.h"

#include "../base/status.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

struct metrics {
    FILE *file;
    char *path;
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
static mt_status find_cut(const metrics *m, const metrics_resume *r, int64_t *ret_keep,
                          bool *ret_has_eval)
{
    FILE *f = m->file;
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
            if (getline(&line, &room, f) > 0)
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
    free(line);
    *ret_keep = keep;
    return st;
}

mt_status metrics_open(const char *path, metrics **ret)
{
    mt_status st = MT_OK;
    metrics *m = calloc(1, sizeof *m);
    if (!m)
        return status_nomem("metrics", sizeof *m);
    m->path = strdup(path);
    int fd = m->path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0)
        m->file = fdopen(fd, "r+");
    if (!m->file) {
        st = status_set(MT_ERR_IO,
                        "%s: cannot open: %s; set output_dir to a folder that you can "
                        "write to",
                        path, strerror(errno));
        if (fd >= 0)
            close(fd);
        goto out;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        st = status_set(MT_ERR_INVALID,
                        "%s: another process is training in this run folder; stop it, or set "
                        "output_dir to another folder",
                        path);
        goto out;
    }
    *ret = m;
out:
    if (st != MT_OK)
        metrics_close(m);
    return st;
}

mt_status metrics_cut(metrics *m, const metrics_resume *resume, bool *ret_has_eval)
{
    int64_t keep = 0;
    bool has_eval = false;
    mt_status st = resume ? find_cut(m, resume, &keep, &has_eval) : MT_OK;
    if (st != MT_OK)
        return st;
    if (ftruncate(fileno(m->file), keep) != 0 || fseeko(m->file, keep, SEEK_SET) != 0)
        return status_set(MT_ERR_IO, "%s: cannot cut to %lld bytes: %s", m->path, (long long)keep,
                          strerror(errno));
    *ret_has_eval = has_eval;
    return MT_OK;
}

mt_status metrics_close(metrics *m)
{
    mt_status st = MT_OK;
    if (!m)
        return st;
    if (m->file && fclose(m->file) != 0)
        st = status_set(MT_ERR_IO, "%s: cannot write: %s", m->path, strerror(errno));
    free(m->path);
    free(m);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Members of the object that is being written. */
static void put_int(metrics *m, const char *key, int64_t x)
{
    fprintf(m->file, ", \"%s\": %lld", key, (long long)x);
}

/* 17 digits restore a double exactly; the loss of two runs is compared bit for bit. */
static void put_real(metrics *m, const char *key, double x)
{
    if (isfinite(x))
        fprintf(m->file, ", \"%s\": %.17g", key, x);
    else
        fprintf(m->file, ", \"%s\": null", key);
}

static void put_time(metrics *m, const char *key, double seconds)
{
    fprintf(m->file, ", \"%s\": %.6f", key, isfinite(seconds) ? seconds : 0.0);
}

static mt_status end_line(metrics *m)
{
    fputs("}\n", m->file);
    if (fflush(m->file) != 0 || ferror(m->file))
        return status_set(MT_ERR_IO,
                          "%s: cannot write: %s; free some space and start again with "
                          "the same command to resume",
                          m->path, strerror(errno));
    return MT_OK;
}

mt_status metrics_write_step(metrics *m, const metrics_step *s)
{
    static const char *const wait[ENGINE_WAITS] = { "wait_weights_seconds",
                                                    "wait_gradients_seconds",
                                                    "wait_optimizer_seconds", "wait_data_seconds" };
    double per_second = s->seconds > 0 ? 1.0 / s->seconds : 0;
    fprintf(m->file, "{\"step\": %lld", (long long)s->step);
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
    fprintf(m->file, ", \"updated\": %s", s->updated ? "true" : "false");
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
    return end_line(m);
}

mt_status metrics_write_eval(metrics *m, const metrics_eval *e)
{
    fprintf(m->file, "{\"step\": %lld", (long long)e->step);
    put_real(m, "validation_loss", e->loss);
    put_real(m, "perplexity", exp(e->loss));
    put_int(m, "validation_targets", e->targets);
    put_time(m, "seconds", e->seconds);
    return end_line(m);
}
