/* SPDX-License-Identifier: Apache-2.0
 *
 * Saving a run on its way, and what that costs it.
 */
#include "loop_internal.h"

#include "../base/log.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "export.h"
#include "human.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What makes the checkpoint a model folder, besides the weights. */
static mt_status write_config(void *arg, const char *folder)
{
    const loop *l = arg;
    const session *s = l->s;
    const char *format = l->run->chat_format; /* NULL: spelled out */
    bool named = s->chat && format && strcmp(format, "auto") != 0;
    const mt_config *spelled_out =
        s->chat && !format ? config_section(l->run->config, "data.chat_format") : NULL;
    mt_status st =
        model_source_write_config(&s->source, folder, NULL, named ? format : NULL, spelled_out);
    return st == MT_OK ? export_copy_files(s->source.weights, s->tokenizer_path, folder) : st;
}

checkpoint_options loop_save_options(const loop *l)
{
    /* While steps are skipped nothing gets better: older, maybe saner, weights stay. */
    int64_t keep = l->state.skipped_in_a_row ? 0 : l->run->save_total_limit;
    return (checkpoint_options){ .folder = l->folder.checkpoints,
                                 .keep = keep,
                                 .best_step = l->run->save_best ? l->state.best_step : 0,
                                 .weights_only = l->run->weights_only,
                                 .weights_dtype = MT_F32,
                                 .model_type = l->s->source.model_type };
}

/* ---- the cost -------------------------------------------------------------------------------- */

/* Of the time, that saves may take before it is worth a word, and what they take as advised. */
static const double noticed = 0.05, advised = 0.02;

static double share_of_time(double save_seconds, double step_seconds, int64_t save_steps)
{
    return save_seconds / (save_seconds + step_seconds * (double)save_steps);
}

int64_t loop_advise_save_steps(double save_seconds, double step_seconds, int64_t save_steps)
{
    if (save_steps <= 0 || !(step_seconds > 0) ||
        share_of_time(save_seconds, step_seconds, save_steps) <= noticed)
        return 0;
    double least = save_seconds * (1 - advised) / advised / step_seconds;
    double power = pow(10, floor(log10(least)));
    double digit = least <= power ? 1 : least <= 2 * power ? 2 : least <= 5 * power ? 5 : 10;
    return llround(digit * power);
}

/* Nothing is trained while a run is saved. */
static void advise(loop *l, double seconds)
{
    int64_t now = l->run->save_steps;
    int64_t better =
        seconds < 1 || l->told_cost ? 0 : loop_advise_save_steps(seconds, l->step_time, now);
    if (better == 0)
        return;
    l->told_cost = true;
    log_write(MT_LOG_INFO,
              "saves take %.0f%% of the time: %s for every %s of steps; with "
              "checkpoint.save_steps=%lld they would take %.1f%%, and a failure would cost at most "
              "%s of training",
              100 * share_of_time(seconds, l->step_time, now), human_seconds(seconds).s,
              human_seconds(l->step_time * (double)now).s, (long long)better,
              100 * share_of_time(seconds, l->step_time, better),
              human_seconds(l->step_time * (double)better).s);
}

/* What was over at once says nothing about the disk. */
static void log_saved(const loop *l, double seconds, double writing, int64_t bytes)
{
    char rate[96] = "";
    if (writing >= 1)
        snprintf(rate, sizeof rate, ": %s at %s/s", human_bytes(bytes).s,
                 human_bytes((int64_t)((double)bytes / writing)).s);
    log_write(MT_LOG_INFO, "step %lld: saved %s in %s%s", (long long)l->state.step,
              l->folder.resume, human_seconds(seconds).s, rate);
}

/* ---- saving ---------------------------------------------------------------------------------- */

mt_status loop_save(loop *l)
{
    const checkpoint_options options = loop_save_options(l);
    int64_t bytes = 0;
    double began = progress_now(), drained;
    mt_status st = engine_drain(l->s->engine);
    drained = progress_now();
    if (st == MT_OK)
        st = checkpoint_bytes(l->s->store, &options, &bytes);
    if (st == MT_OK)
        st = checkpoint_save(l->s->store, &l->state, &options, l->format, write_config, l);
    if (st == MT_ERR_IO && l->folder.resume[0]) {
        char text[2048];
        snprintf(text, sizeof text, "%s", status_text());
        return status_set(st, "%s; the same command then goes on from %s", text, l->folder.resume);
    }
    if (st != MT_OK)
        return st;
    l->saved_step = l->state.step;
    st = checkpoint_latest(l->folder.checkpoints, l->folder.resume, sizeof l->folder.resume);
    if (st != MT_OK)
        return st;
    double ended = progress_now();
    log_saved(l, ended - began, ended - drained, bytes);
    advise(l, ended - drained);
    if (l->state.skipped_in_a_row == 0)
        strcpy(l->good, l->folder.resume);
    l->ended = progress_now();
    return MT_OK;
}
