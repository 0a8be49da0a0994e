/* SPDX-License-Identifier: Apache-2.0
 *
 * How a run begins: anew, or where its newest checkpoint is.
 */
#include "loop_internal.h"

#include "../base/log.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "export.h"
#include "files.h"
#include "human.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Does the run go on with the data, and in the folder, that the checkpoint belongs to? */
static mt_status check_resumed(const loop *l)
{
    const run_manifest *run = l->run;
    const session *s = l->s;
    const mt_config *c = config_section(run->config, "");
    if (l->state.seed != (uint64_t)run->seed)
        return c->reject(c, "seed",
                         "is %lld, but %s was begun with %llu, so the data would come in "
                         "another order; set seed: %llu, or start anew in another output_dir",
                         (long long)run->seed, l->folder.resume, (unsigned long long)l->state.seed,
                         (unsigned long long)l->state.seed);
    if (l->state.epoch_documents != s->epoch_documents ||
        l->state.epoch_tokens != s->epoch_tokens) {
        c = config_section(run->config, "data");
        return c->reject(c, "files",
                         "and the other keys of the section give an epoch of %lld tokens in %lld "
                         "pieces, but %s was trained on %lld in %lld; go on with the same data, "
                         "or start anew from these weights (model: %s) in another output_dir",
                         (long long)s->epoch_tokens, (long long)s->epoch_documents,
                         l->folder.resume, (long long)l->state.epoch_tokens,
                         (long long)l->state.epoch_documents, l->folder.resume);
    }
    if (l->state.fingerprint && s->fingerprint && l->state.fingerprint != s->fingerprint) {
        c = config_section(run->config, "data");
        return c->reject(
            c, "files",
            "hold other text than %s was trained on (its size is the same); go on with "
            "the same data, or start anew from these weights (model: %s) in another "
            "output_dir",
            l->folder.resume, l->folder.resume);
    }
    /* Later steps of this folder would be mixed with those of this run, and be resumed next. */
    char newest[RUN_FOLDER_PATH];
    mt_status st = checkpoint_latest(l->folder.checkpoints, newest, sizeof newest);
    if (st == MT_ERR_NOT_FOUND)
        return MT_OK;
    const char *dash = st == MT_OK ? strrchr(newest, '-') : NULL;
    if (dash && strtoll(dash + 1, NULL, 10) > l->state.step) {
        c = config_section(run->config, "checkpoint");
        return c->reject(c, "resume_from_checkpoint",
                         "goes back to step %lld (%s), but %s holds %s; go on from that one with "
                         "auto, name another output_dir, or remove what is later",
                         (long long)l->state.step, l->folder.resume, run->output_dir, newest);
    }
    return st;
}

/* What cannot be read; settings that do not fit a checkpoint are no fault of the checkpoint. */
static bool is_damaged(mt_status st)
{
    return st == MT_ERR_FORMAT || st == MT_ERR_IO || st == MT_ERR_NOT_FOUND;
}

/* Puts the text in front, and behind it the checkpoint before one that is damaged. */
static mt_status cannot_resume(const loop *l, mt_status st)
{
    char text[2048], older[RUN_FOLDER_PATH];
    snprintf(text, sizeof text, "%s", status_text());
    if (!is_damaged(st) || checkpoint_older(l->folder.resume, older, sizeof older) != MT_OK)
        return status_set(st, "cannot resume: %s", text);
    return status_set(st,
                      "cannot resume: %s; the one before it is %s: remove %s to go on from there",
                      text, older, l->folder.resume);
}

/* Weights, states and position of the checkpoint. */
static mt_status resume(loop *l)
{
    startup *start = &l->s->startup;
    startup_mark(start);
    mt_status st = checkpoint_load(l->s->store, l->folder.resume, l->format, &l->state);
    startup_end(start, STARTUP_WEIGHTS, l->s->store->weight_bytes + l->s->store->state_bytes);
    if (st != MT_OK)
        return cannot_resume(l, st);
    if ((st = check_resumed(l)) != MT_OK)
        return st;
    st = data_seek(l->s->train, l->state.data);
    if (st != MT_OK)
        return status_prefix(st, "cannot resume from %s", l->folder.resume);
    l->saved_step = l->state.step;
    if (l->state.skipped_in_a_row == 0)
        strcpy(l->good, l->folder.resume);
    log_write(MT_LOG_INFO, "resuming from %s: step %lld of %lld done", l->folder.resume,
              (long long)l->state.step, (long long)l->schedule.total);
    if (l->state.step >= l->schedule.total)
        log_write(MT_LOG_INFO,
                  "nothing is left to do, and no other setting has an effect: raise train.%s to go "
                  "on, or name another output_dir to train anew",
                  l->run->max_steps > 0 ? "max_steps" : "num_train_epochs");
    return MT_OK;
}

/* Weights drawn, or those of the model's folder. */
static mt_status start_new(loop *l)
{
    const run_manifest *run = l->run;
    const char *weights = l->s->source.weights;
    l->state = (checkpoint_state){ .seed = (uint64_t)run->seed,
                                   .epoch_documents = l->s->epoch_documents,
                                   .epoch_tokens = l->s->epoch_tokens,
                                   .fingerprint = l->s->fingerprint,
                                   .best_validation_loss = INFINITY,
                                   .loss = NAN,
                                   .validation_loss = NAN };
    if (run->from_scratch) {
        log_write(MT_LOG_INFO, "new run: random weights, seed %lld", (long long)run->seed);
        return session_load_weights(l->s, "", (uint64_t)run->seed);
    }
    if (!weights) {
        const mt_config *c = config_section(run->config, "");
        return c->reject(c, "init",
                         "is pretrained, but %s has no weights; set init: random, or name a model "
                         "folder that has them",
                         run->model);
    }
    mt_status st = session_load_weights(l->s, weights, 0);
    if (st == MT_OK)
        log_write(MT_LOG_INFO, "new run: weights of %s", weights);
    return st;
}

/* How many of the steps that are left before the last one are multiples of `each`; 0: none is. */
static int64_t multiples_left(const loop *l, int64_t each)
{
    int64_t last = l->schedule.total - 1;
    return each == 0 ? 0 : last / each - l->state.step / each;
}

/* The steps that both divide, 0 where that is beyond the last one. */
static int64_t common_multiple(const loop *l, int64_t a, int64_t b)
{
    int64_t divisor = a, rest = b;
    while (rest > 0) {
        int64_t next = divisor % rest;
        divisor = rest;
        rest = next;
    }
    return a == 0 || b == 0 || a / divisor > l->schedule.total / b ? 0 : a / divisor * b;
}

/* Checkpoints that are still to be saved, at most: every evaluation may find a new best. */
static int64_t saves_left(const loop *l)
{
    int64_t save = l->run->save_steps, eval = l->run->save_best ? l->run->eval_steps : 0;
    if (l->state.step >= l->schedule.total)
        return 0;
    return multiples_left(l, save) + multiples_left(l, eval) -
           multiples_left(l, common_multiple(l, save, eval)) + 1;
}

/* By how many checkpoints the folder grows at most: a new one stands before an old one goes, and
 * the best stays besides. */
static mt_status checkpoints_more(const loop *l, int64_t *ret)
{
    int64_t there = 0, left = saves_left(l), keep = l->run->save_total_limit;
    mt_status st = checkpoint_count(l->folder.checkpoints, &there);
    if (st != MT_OK)
        return st;
    int64_t room = keep + 1 + l->run->save_best - there;
    *ret = keep == 0 || left < room ? left : room > 1 ? room : left > 0;
    return MT_OK;
}

/* A full disk is better known before the first step than at the save that it stops. */
static mt_status warn_of_space(const loop *l)
{
    char folder[RUN_FOLDER_PATH];
    const checkpoint_options options = loop_save_options(l);
    int64_t each = 0, more = 0, export = 0, have = files_free_bytes(l->folder.checkpoints);
    mt_status st = checkpoint_bytes(l->s->store, &options, &each);
    if (st == MT_OK)
        st = checkpoints_more(l, &more);
    if (st == MT_OK && more > 0 && loop_export_folder(l->run, folder))
        st = export_bytes(l->s->model, MT_BF16, &export);
    double need = (double)more * (double)each + (double)export;
    if (st != MT_OK || have < 0 || need <= (double)have)
        return st;
    log_write(MT_LOG_WARNING,
              "%s: %s checkpoint%s of %s%s%s will not fit into the %s that are free; what does not "
              "fit will not be saved: free some space, lower checkpoint.save_total_limit, save "
              "less often, or choose another output_dir",
              l->folder.checkpoints, human_grouped(more).s, more == 1 ? "" : "s",
              human_bytes(each).s, export ? " and an export of " : "",
              export ? human_bytes(export).s : "", human_bytes(have).s);
    return MT_OK;
}

mt_status loop_begin(loop *l)
{
    bool resumed = l->folder.resume[0], has_eval = false;
    mt_status st = resumed ? resume(l) : start_new(l);
    if (st == MT_OK)
        st = checkpoint_tidy(l->folder.checkpoints, l->run->save_best ? l->state.best_step : 0);
    if (st != MT_OK)
        return st;
    const metrics_resume from = { l->state.step, loop_eval_is_due(l, l->state.step) };
    st = metrics_cut(l->metrics, resumed ? &from : NULL, &has_eval);
    /* The manifest that is there tells how a finished run was trained. */
    if (st == MT_OK && !(resumed && loop_is_finished(l)))
        st = run_folder_write_manifest(l->run);
    if (st == MT_OK)
        st = warn_of_space(l);
    l->ended = progress_now();
    /* A signal may have come between the step and its evaluation. */
    if (st == MT_OK && l->state.step > 0 && from.eval_is_due && !has_eval)
        st = loop_evaluate(l);
    return st;
}
