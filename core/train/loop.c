/* SPDX-License-Identifier: Apache-2.0
 *
 * The training loop: batches, learning rate, steps, metrics, evaluation. loop_begin.c has how a run
 * starts or goes on, loop_save.c how it is saved, signals.c what stops it.
 *
 * Everything that a step writes or decides is a function of the state that a checkpoint holds and
 * of the manifest, so that a resumed run goes on as if it had never stopped.
 */
#include "loop_internal.h"

#include "../base/log.h"
#include "../base/machine.h"
#include "../base/progress.h"
#include "../base/status.h"
#include "../manifest/mistaken.h"
#include "export.h"
#include "files.h"
#include "human.h"
#include "signals.h"

#include <math.h>
#include <stdio.h>

/* ---- the run --------------------------------------------------------------------------------- */

/* The sign of a NaN says nothing, and is printed all the same. */
static double positive_nan(double x)
{
    return isnan(x) ? (double)NAN : x;
}

int64_t train_count_steps(const session *s, const run_manifest *run)
{
    if (run->max_steps > 0)
        return run->max_steps;
    if (!s->train)
        return 0;
    double steps =
        ceil(run->num_train_epochs * s->epoch_batches / (double)run->gradient_accumulation_steps);
    return steps < 1 ? 1 : (int64_t)steps;
}

static bool every(int64_t step, int64_t n)
{
    return n > 0 && step % n == 0;
}

static bool is_last(const loop *l, int64_t step)
{
    return step == l->schedule.total;
}

static bool log_is_due(const loop *l, int64_t step)
{
    return every(step, l->run->logging_steps) || step == 1 || is_last(l, step);
}

bool loop_is_finished(const loop *l)
{
    int64_t patience = l->run->early_stopping_patience;
    return l->state.step >= l->schedule.total ||
           (patience > 0 && l->state.evaluations_since_best >= patience);
}

bool loop_eval_is_due(const loop *l, int64_t step)
{
    return l->s->validation_documents > 0 && (every(step, l->run->eval_steps) || is_last(l, step));
}

/* ---- evaluation ------------------------------------------------------------------------------ */

mt_status train_evaluate(session *s, const run_manifest *run, double *ret_loss,
                         int64_t *ret_targets, bool (*stop)(void))
{
    data_source *source = NULL;
    double sum = 0;
    int64_t targets = 0;
    mt_status st = session_open_validation(s, run, &source);
    for (int64_t i = 0; st == MT_OK && (run->eval_batches == 0 || i < run->eval_batches); i++) {
        const step_batch *batch = NULL;
        double loss_sum = 0;
        if (stop && stop()) {
            st = status_set(MT_ERR_STOPPED, "the evaluation was stopped by a signal");
            break;
        }
        st = data_next(source, &batch);
        if (st == MT_OK)
            st = engine_eval(s->engine, batch, &loss_sum);
        if (st == MT_OK) {
            sum += loss_sum;
            targets += batch->n_targets;
        }
    }
    data_close(source);
    if (st != MT_OK && st != MT_END)
        return st;
    if (targets == 0)
        return status_set(MT_ERR_INVALID, "the validation split has no target tokens; give the "
                                          "data section more text or another split");
    *ret_loss = positive_nan(sum / (double)targets);
    *ret_targets = targets;
    return MT_OK;
}

mt_status loop_evaluate(loop *l)
{
    metrics_eval e = { .step = l->state.step };
    double began = progress_now();
    mt_status st = train_evaluate(l->s, l->run, &e.loss, &e.targets, train_stop_requested);
    if (st != MT_OK)
        return st;
    e.seconds = progress_now() - began;
    l->ended = progress_now(); /* a step's time does not count the evaluation before it */
    checkpoint_state *state = &l->state;
    bool best = e.loss < state->best_validation_loss;
    state->validation_loss = e.loss;
    state->evaluations_since_best = best ? 0 : state->evaluations_since_best + 1;
    if (best) {
        state->best_validation_loss = e.loss;
        state->best_step = e.step;
    }
    log_write(MT_LOG_INFO, "step %lld: validation loss %.4f, perplexity %.3f, %s targets in %s",
              (long long)e.step, e.loss, exp(e.loss), human_count((double)e.targets).s,
              human_seconds(e.seconds).s);
    metrics_write_eval(l->metrics, &e);
    return MT_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Seconds that the run still takes; NaN after the first step done here, which warms caches up and
 * says little about the others. */
static double time_left(loop *l, const metrics_step *m)
{
    double steps = (double)(l->schedule.total - m->step);
    bool first = l->s->startup.seconds[STARTUP_STEP] == 0;
    if (!first)
        l->step_time += (l->step_time > 0 ? 0.1 : 1) * (m->seconds - l->step_time);
    return first && steps > 0 ? (double)NAN : l->step_time * steps;
}

static void show_progress(loop *l, const metrics_step *m)
{
    char line[256], aux[32] = "";
    double left = time_left(l, m);
    if (m->has_aux_loss)
        snprintf(aux, sizeof aux, "  aux %.4f", m->aux_loss);
    snprintf(line, sizeof line,
             "step %lld/%lld  loss %.4f%s  lr %.2e  norm %.2f  %s tok/s  ETA %s  RSS %s",
             (long long)m->step, (long long)l->schedule.total, m->loss, aux, m->lr, m->grad_norm,
             human_rate((double)m->tokens / m->seconds).s, human_seconds(left).s,
             human_bytes(m->rss).s);
    if (log_has_terminal())
        log_live(line);
    else if (log_is_due(l, m->step))
        log_write(MT_LOG_INFO, "%s", line);
}

enum { THEN_SIZE = RUN_FOLDER_PATH + 96 };

/* How to go on from before the numbers were bad. */
static const char *what_then(const loop *l, char ret[THEN_SIZE])
{
    if (!l->good[0])
        snprintf(ret, THEN_SIZE, "start again (no checkpoint is from before)");
    else if (strcmp(l->good, l->folder.resume) == 0)
        snprintf(ret, THEN_SIZE, "resume from %s", l->good);
    else
        snprintf(ret, THEN_SIZE, "remove the checkpoints after %s and resume from it", l->good);
    return ret;
}

/* A step whose numbers were bad: nothing was changed; go on or give up? */
static mt_status handle_bad_numbers(loop *l, const metrics_step *m)
{
    char what[96], then[THEN_SIZE];
    snprintf(what, sizeof what, "loss %g, gradient norm %g", m->loss, m->grad_norm);
    l->state.skipped_in_a_row++;
    log_write(MT_LOG_WARNING, "step %lld: %s: not finite; the step changed nothing",
              (long long)m->step, what);
    if (l->run->on_bad_numbers == RUN_STOP)
        return status_set(MT_ERR_NUMERIC,
                          "step %lld: %s: not finite, and on_bad_numbers is 'stop'; lower "
                          "learning_rate or look at the data, then %s",
                          (long long)m->step, what, what_then(l, then));
    if (l->state.skipped_in_a_row > l->run->max_skipped)
        return status_set(MT_ERR_NUMERIC,
                          "step %lld: not finite %lld times in a row (max_skipped is %lld); lower "
                          "learning_rate or look at the data, then %s",
                          (long long)m->step, (long long)l->state.skipped_in_a_row,
                          (long long)l->run->max_skipped, what_then(l, then));
    return MT_OK;
}

static mt_status do_step(loop *l)
{
    const step_batch *batch = NULL;
    double began = progress_now();
    mt_status st = data_next(l->s->train, &batch);
    double waited = progress_now() - began;
    l->data_failed = st != MT_OK;
    if (st != MT_OK)
        return st == MT_END ? status_set(MT_ERR_INTERNAL, "the training stream ended") : st;

    const engine_step_params params = { .step = l->state.optimizer_step + 1,
                                        .lr = schedule_lr(&l->schedule, l->state.step),
                                        .max_grad_norm = l->run->max_grad_norm };
    engine_result r = { 0 };
    st = engine_step(l->s->engine, batch, &params, &r);
    if (st != MT_OK)
        return status_prefix(st, "step %lld", (long long)l->state.step + 1);

    int64_t documents = 0;
    for (int64_t i = 0; i < batch->n; i++)
        documents += batch->micro[i].documents;
    l->state.step++;
    l->state.optimizer_step += r.updated;
    l->state.tokens += batch->tokens;
    l->state.targets += batch->n_targets;
    l->state.data = data_tell(l->s->train);
    l->state.loss = positive_nan(r.loss_sum / (double)r.n_targets);

    double context = (double)batch->tokens / (double)documents;
    double room = (double)batch->n * (double)(l->run->micro_batch_size * l->run->max_seq_len);
    l->packed += (double)batch->tokens;
    l->room += room;
    metrics_step m = { .step = l->state.step,
                       .loss = l->state.loss,
                       .has_aux_loss = model_adds_loss(l->s->model),
                       .aux_loss = positive_nan(r.aux_loss_sum / (double)r.n_targets),
                       .grad_norm = positive_nan(r.grad_norm),
                       .router_violation = r.router_violation,
                       .lr = params.lr,
                       .tokens = batch->tokens,
                       .targets = batch->n_targets,
                       .total_tokens = l->state.tokens,
                       .packing_efficiency = (double)batch->tokens / room,
                       .epoch = data_epochs(l->s->train, l->s->epoch_documents),
                       .model_flops = model_train_flops_per_token(l->s->model, context) *
                                      (double)batch->tokens,
                       .rss = machine_rss(),
                       .updated = r.updated };
    memcpy(m.wait, r.wait_seconds, sizeof m.wait);
    m.wait[ENGINE_WAIT_DATA] += waited;
    engine_bytes(l->s->engine, m.bytes);
    double ended = progress_now();
    m.seconds = ended - l->ended;
    l->ended = ended;

    show_progress(l, &m);
    metrics_write_step(l->metrics, &m);
    if (!m.updated)
        return handle_bad_numbers(l, &m);
    l->state.skipped_in_a_row = 0;
    return MT_OK;
}

/* The first step done here is the end of the start. */
static mt_status next_step(loop *l)
{
    startup *start = &l->s->startup;
    if (start->seconds[STARTUP_STEP] > 0)
        return do_step(l);
    startup_mark(start);
    mt_status st = do_step(l);
    startup_end(start, STARTUP_STEP, 0);
    if (st == MT_OK)
        startup_log(start);
    return st;
}

static mt_status stop_if_asked(void)
{
    return train_stop_requested() ? status_set(MT_ERR_STOPPED, "stopped by a signal") : MT_OK;
}

static mt_status steps(loop *l)
{
    mt_status st = stop_if_asked();
    while (st == MT_OK && !loop_is_finished(l)) {
        st = next_step(l);
        if (st == MT_OK)
            st = stop_if_asked();
        if (st == MT_OK && loop_eval_is_due(l, l->state.step)) {
            st = loop_evaluate(l);
            l->data_failed = st != MT_OK && st != MT_ERR_NUMERIC;
        }
        bool best = l->run->save_best && l->state.best_step == l->state.step;
        if (st == MT_OK && (best || every(l->state.step, l->run->save_steps)))
            st = loop_save(l);
    }
    if (st == MT_OK && l->state.step < l->schedule.total)
        log_write(
            MT_LOG_INFO,
            "stopping early after step %lld: %lld evaluations in a row were not better than the "
            "one after step %lld, %.4f",
            (long long)l->state.step, (long long)l->state.evaluations_since_best,
            (long long)l->state.best_step, l->state.best_validation_loss);
    return st;
}

/* ---- export at the end ----------------------------------------------------------------------- */

bool loop_export_folder(const run_manifest *run, char ret[RUN_FOLDER_PATH])
{
    const char *dir = run->export_dir;
    bool automatic = strcmp(dir, "auto") == 0;
    if (strcmp(dir, "false") == 0 || (automatic && run->from_scratch))
        return false;
    if (automatic || strcmp(dir, "true") == 0)
        snprintf(ret, RUN_FOLDER_PATH, "%s/" RUN_FOLDER_EXPORT, run->output_dir);
    else
        snprintf(ret, RUN_FOLDER_PATH, "%s", dir);
    return true;
}

/* The best checkpoint where the run keeps it, else the newest. Reads from the files, so that the
 * model's memory is not needed twice. */
static mt_status export_run(const loop *l, const char *folder)
{
    char from[RUN_FOLDER_PATH + sizeof CHECKPOINT_BEST];
    int64_t bytes = 0;
    model_source source = { 0 };
    const export_options options = {
        .folder = folder,
        .dtype = MT_BF16,
        .shard_bytes = EXPORT_SHARD_BYTES,
        .replace = true,
        .stop = train_stop_requested,
    };
    bool best = l->run->save_best && l->state.best_step > 0;
    snprintf(from, sizeof from, "%s/" CHECKPOINT_BEST, l->folder.checkpoints);
    if (!best || !files_is_folder(from))
        strcpy(from, l->folder.resume);
    mt_status st = model_source_open(from, &source);
    if (st == MT_OK)
        st = export_model(&source, l->s->model, l->format, &options, &bytes);
    model_source_close(&source);
    if (st != MT_OK)
        return status_prefix(st, "the run is finished and saved, but cannot be exported");
    log_write(MT_LOG_INFO, "exported %s to %s, %s in %s", from, folder, human_bytes(bytes).s,
              mt_dtype_name(options.dtype));
    return MT_OK;
}

/* A run that was finished before is exported only where that is still to be done. */
static mt_status export_if_asked(const loop *l, bool trained)
{
    char folder[RUN_FOLDER_PATH];
    if (!loop_export_folder(l->run, folder) || !loop_is_finished(l) || !l->folder.resume[0] ||
        (!trained && files_is_folder(folder)))
        return MT_OK;
    return export_run(l, folder);
}

/* A run that ends amid skipped steps has as a rule run away: saved it is, but nobody is to take it
 * for finished. */
static mt_status check_end(const loop *l)
{
    long long step = l->state.step, row = l->state.skipped_in_a_row;
    char then[THEN_SIZE];
    if (row == 0 || step < l->schedule.total)
        return MT_OK;
    if (l->state.optimizer_step == 0)
        return status_set(MT_ERR_NUMERIC,
                          "none of the %lld steps changed anything: no loss or gradient norm was "
                          "finite; look at the data and the weights of the model",
                          step);
    return status_set(MT_ERR_NUMERIC,
                      "the run ends with %lld step%s whose numbers were not finite, so its weights "
                      "are those after step %lld, and it is not exported; lower learning_rate or "
                      "look at the data, then %s; `megatrain export %s -o DIR` exports it as it is",
                      row, row == 1 ? "" : "s", step - row, what_then(l, then), l->run->output_dir);
}

/* What asks for evaluations needs something to evaluate on. */
static mt_status check_evaluation(const session *s, const run_manifest *run)
{
    const mt_config *train = config_section(run->config, "train");
    const mt_config *saves = config_section(run->config, "checkpoint");
    if (run->early_stopping_patience > 0 && run->eval_steps == 0)
        return train->reject(train, "early_stopping_patience",
                             "is set, but nothing is evaluated before the end; set eval_steps");
    if (s->validation_documents > 0)
        return MT_OK;
    if (run->eval_steps > 0)
        return train->reject(train, "eval_steps",
                             "is set, but there is no validation data; give the data section some, "
                             "or set eval_steps: 0");
    if (run->save_best)
        return saves->reject(saves, "save_best",
                             "is set, but there is no validation data to tell which is best; give "
                             "the data section some");
    return MT_OK;
}

static const char *from_here(const char *path)
{
    while (strncmp(path, "./", 2) == 0)
        path += 2;
    return path;
}

/* Does the path lead into the run folder, which train makes? */
static bool is_in_run(const run_manifest *run, const char *path)
{
    const char *folder = from_here(run->output_dir), *file = from_here(path);
    size_t n = strlen(folder);
    return strncmp(file, folder, n) == 0 && file[n] == '/';
}

/* Is the folder, slashes at its end or not, one that holds the run by the time of the export? */
static bool is_of_run(const run_manifest *run, const char *folder)
{
    const char *own = from_here(run->output_dir), *path = from_here(folder);
    size_t n = strlen(own);
    if (strncmp(path, own, n) != 0)
        return false;
    path += n;
    if (strncmp(path, "/" RUN_FOLDER_CHECKPOINTS, sizeof RUN_FOLDER_CHECKPOINTS) == 0)
        path += sizeof RUN_FOLDER_CHECKPOINTS;
    return path[strspn(path, "/")] == '\0';
}

mt_status train_check_places(const run_manifest *run, const session_engine_options *options)
{
    char folder[RUN_FOLDER_PATH];
    const mt_config *c = config_section(run->config, "checkpoint");
    mt_status st = run_folder_check(run);
    if (st == MT_OK && mistaken_home(run->export_dir))
        return c->reject(c, "export",
                         "begins with ~, which only a shell knows: write the path out");
    bool exports = st == MT_OK && loop_export_folder(run, folder);
    if (exports && is_of_run(run, folder))
        return c->reject(c, "export",
                         "is a folder of the run itself, which is not empty at the end; name "
                         "another one, or true for %s/" RUN_FOLDER_EXPORT,
                         run->output_dir);
    if (exports && (st = export_check_folder(folder, true)) != MT_OK)
        return config_blame(c, "export");
    if (st != MT_OK || !options->trace)
        return st;
    if (is_in_run(run, options->trace)) {
        const char *name = from_here(options->trace) + strlen(from_here(run->output_dir)) + 1;
        if (strcmp(name, RUN_FOLDER_METRICS) != 0 && strcmp(name, RUN_FOLDER_MANIFEST) != 0)
            return MT_OK;
        return status_set(MT_ERR_INVALID,
                          "%s: is a file of the run itself, which a trace would replace; name "
                          "another one",
                          options->trace);
    }
    return files_check_output(options->trace, TRACE_MARK, false);
}

mt_status train_run(session *s, run_manifest *run, const session_engine_options *options,
                    train_outcome *ret)
{
    loop l = { .s = s, .run = run, .saved_step = -1 };
    mt_status st = check_evaluation(s, run);
    if (st != MT_OK)
        return st;
    l.schedule = schedule_of_run(run, train_count_steps(s, run));

    st = run_folder_open(run, &l.folder, &l.metrics);
    if (st == MT_OK && options->trace)
        st = files_check_output(options->trace, TRACE_MARK, false);
    if (st == MT_OK)
        st = session_format(&l.format);
    if (st == MT_OK && l.folder.resume[0] &&
        (st = session_check_model(s, l.folder.resume)) != MT_OK)
        st = status_prefix(st, "cannot resume");
    if (st == MT_OK)
        st = session_start(s, options);
    if (st == MT_OK)
        st = loop_begin(&l);
    train_finish_on_signal();
    int64_t first = l.state.step;
    if (st == MT_OK)
        st = steps(&l);
    /* Also when nothing is left to do: the last updates must have landed. Days of training are not
     * lost because a text file was: what failed is told after the save. */
    if ((st == MT_OK || st == MT_ERR_STOPPED || l.data_failed) && l.state.step > 0 &&
        l.saved_step != l.state.step) {
        char text[2048];
        snprintf(text, sizeof text, "%s", status_text());
        mt_status saved = loop_save(&l);
        if (st == MT_OK || st == MT_ERR_STOPPED)
            st = saved == MT_OK ? st : saved;
        else
            status_set(st, "%s", text);
    }
    log_live(NULL);
    metrics_close(l.metrics);
    if (st == MT_OK)
        st = check_end(&l);
    if (st == MT_OK)
        st = export_if_asked(&l, l.state.step > first);

    ret->step = l.state.step;
    ret->steps = l.schedule.total;
    ret->skipped = l.state.step - l.state.optimizer_step;
    ret->loss = l.state.loss;
    ret->validation_loss = l.state.validation_loss;
    ret->packing_efficiency = l.packed / l.room;
    snprintf(ret->checkpoint, sizeof ret->checkpoint, "%s",
             l.saved_step >= 0 ? l.folder.resume : "");
    return st;
}
