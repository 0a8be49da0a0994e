/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and closing what a command works with.
 */
#include "session.h"

#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "checkpoint_files.h"
#include "files.h"
#include "groups.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* ---- device ---------------------------------------------------------------------------------- */

static mt_status find_backend(const char *kind, bool asked_for, const mt_backend **ret)
{
    const void *table = NULL;
    mt_status st = registry_find(PLUGIN_BACKEND, kind, MT_BACKEND_INTERFACE, &table, NULL);
    if (st == MT_ERR_NOT_FOUND && asked_for)
        status_set(st,
                   "%s (a backend is built where its compiler and libraries are found: see what "
                   "`meson setup` says of them)",
                   status_text());
    if (st == MT_OK)
        st = ((const mt_backend *)table)->probe();
    if (st == MT_OK)
        *ret = table;
    return st;
}

static mt_status choose_compute(session *s, const char *precision)
{
    if (strcmp(precision, "auto") == 0)
        s->compute = s->info.default_compute;
    else if (strcmp(precision, "fp32") == 0)
        s->compute = MT_F32;
    else if (strcmp(precision, "bf16") == 0)
        s->compute = MT_BF16;
    else
        return status_set(MT_ERR_INVALID,
                          "precision is '%s', but it must be 'auto', 'fp32' or 'bf16'", precision);
    if (!(s->info.compute_dtypes & 1u << s->compute))
        return status_set(MT_ERR_UNSUPPORTED, "%s cannot compute in %s; choose another precision",
                          s->info.name, mt_dtype_name(s->compute));
    return MT_OK;
}

mt_status session_use_profile(session *s, const char *path)
{
    s->elsewhere = calloc(1, sizeof *s->elsewhere);
    if (!s->elsewhere)
        return status_nomem("a profile", sizeof *s->elsewhere);
    mt_status st = profile_read(path, s->elsewhere);
    s->machine = (plan_machine){ .device = s->elsewhere->device.memory_free,
                                 .host = s->elsewhere->host_memory,
                                 .unified = s->elsewhere->device.unified != 0,
                                 .cpus = (int32_t)s->elsewhere->cpus };
    return st;
}

static mt_status find_device(session *s, const char *kind)
{
    if (strcmp(kind, "gpu") == 0) /* which 'cpu' is nearest to */
        return status_set(
            MT_ERR_INVALID,
            "device 'gpu': a device is called as its backend is; did you mean 'cuda'?");
    if (strcmp(kind, "auto") != 0) {
        mt_status st = find_backend(kind, true, &s->backend);
        return st == MT_OK ? st : status_prefix(st, "device '%s'", kind);
    }
    if (find_backend("cuda", false, &s->backend) == MT_OK)
        return MT_OK;
    log_write(MT_LOG_INFO, "device: cpu (no cuda: %s)", status_text());
    mt_status st = find_backend("cpu", false, &s->backend);
    return st == MT_OK ? st : status_prefix(st, "device 'cpu'");
}

/* The backend of the profile's kind where it can be had, else the CPU's, which knows the same
 * operations but needs other scratch memory for them. */
static mt_status find_stand_in(session *s, const char *kind)
{
    const hardware *h = s->elsewhere;
    if (strcmp(kind, "auto") != 0 && strcmp(kind, h->kind) != 0)
        return status_set(MT_ERR_INVALID, "device '%s': the profile is of a device '%s'", kind,
                          h->kind);
    if (find_backend(h->kind, false, &s->backend) == MT_OK)
        return MT_OK;
    log_write(MT_LOG_INFO, "no device '%s' here: workspaces are planned as the CPU needs them",
              h->kind);
    mt_status st = find_backend("cpu", false, &s->backend);
    return st == MT_OK ? st : status_prefix(st, "device 'cpu'");
}

mt_status session_open_device(session *s, const char *kind, const char *precision, int64_t threads)
{
    mt_status st = s->elsewhere ? find_stand_in(s, kind) : find_device(s, kind);
    if (st != MT_OK)
        return st;
    st = s->backend->open(0, (int32_t)threads, &s->device);
    if (st != MT_OK)
        return status_prefix(st, "device '%s'", s->backend->kind);
    s->info.struct_size = sizeof s->info;
    s->backend->info(s->device, &s->info);
    if (s->elsewhere)
        s->info = s->elsewhere->device;
    return choose_compute(s, precision);
}

mt_status session_open_run_device(session *s, const run_manifest *run)
{
    mt_status st = session_open_device(s, run->device, run->precision, run->threads);
    if (st != MT_OK)
        return config_blame(config_section(run->config, ""), s->device ? "precision" : "device");
    if (!run->deterministic && !hardware_set_deterministic(s->backend, s->device, false))
        log_write(MT_LOG_INFO, "deterministic: false changes nothing on device '%s'",
                  s->backend->kind);
    return MT_OK;
}

/* ---- model and optimizer --------------------------------------------------------------------- */

mt_status session_open_model(session *s, const char *path)
{
    mt_status st = model_source_open(path, &s->source);
    if (st != MT_OK)
        return st;
    const void *table = NULL;
    st = registry_find(PLUGIN_ARCH, s->source.model_type, MT_ARCH_INTERFACE, &table, NULL);
    if (st != MT_OK)
        return config_blame(s->source.hyper, "model_type");
    s->arch = table;
    st = model_create(s->arch, s->source.hyper, &s->model);
    return st == MT_OK ? model_source_check_keys(&s->source) : st;
}

mt_status session_check_model(const session *s, const char *path)
{
    model_source then = { 0 };
    char file[SESSION_PATH];
    snprintf(file, sizeof file, "%s/" CHECKPOINT_STATE_FILE, path);
    mt_status st = files_is_file(file) ? model_source_open(path, &then) : MT_ERR_NOT_FOUND;
    if (st == MT_ERR_NOT_FOUND)
        return MT_OK;
    if (st != MT_OK) {
        log_write(MT_LOG_WARNING, "cannot compare the model with that of %s: %s", path,
                  status_text());
        return MT_OK;
    }
    st = model_source_check_same(&s->source, &then);
    model_source_close(&then);
    if (st == MT_OK)
        return MT_OK;
    char text[2048];
    snprintf(text, sizeof text, "%s", status_text());
    return status_set(st,
                      "%s when %s was saved; put back what was, or, to go on with the changed "
                      "model, change %s/config.json too, or start anew from its weights (model: "
                      "%s) in another output_dir",
                      text, path, path, path);
}

mt_status session_open_optim(session *s, const run_manifest *run)
{
    const void *table = NULL;
    mt_status st = registry_find(PLUGIN_OPTIM, run->optimizer, MT_OPTIM_INTERFACE, &table, NULL);
    if (st != MT_OK)
        return config_blame(config_section(run->config, "optimizer"), "name");
    s->optim = table;
    st = s->optim->create(config_section(run->config, "optimizer"), &s->optim_state);
    if (st != MT_OK)
        return st;
    s->n_states = s->optim->state_specs(s->optim_state, s->states);
    return MT_OK;
}

/* ---- plan, store, engine --------------------------------------------------------------------- */

/* From the cached profile of this device, when there is one that can be used. */
static bool use_cache(session *s, int64_t document)
{
    hardware *h = calloc(1, sizeof *h);
    mt_status st = h ? profile_find(s->backend->kind, &s->info, h) : MT_ERR_NOT_FOUND;
    if (st == MT_OK)
        st = hardware_profile(h, s->compute, document, &s->profile);
    if (st == MT_OK)
        s->measured_at = h->measured_at;
    else if (st != MT_ERR_NOT_FOUND)
        log_write(MT_LOG_INFO, "the hardware profile is not used: %s", status_text());
    free(h);
    return st == MT_OK;
}

/* What the machine can do, for documents of up to that many tokens. */
static mt_status find_profile(session *s, int64_t document)
{
    mt_status st = MT_OK;
    const hardware *h = s->elsewhere;
    if (s->measured)
        return MT_OK;
    if (h) {
        st = hardware_profile(h, s->compute, document, &s->profile);
        s->measured_at = h->measured_at;
    } else if (!use_cache(s, document)) {
        st = plan_measure(s->backend, s->device, s->compute, &s->profile);
    }
    s->measured = st == MT_OK;
    return st;
}

static mt_status make_plan(session *s, const plan_request *request)
{
    mt_status st = find_profile(s, request->max_seq_len);
    return st == MT_OK
               ? plan_create(s->model, request, &s->profile, s->backend, s->device, &s->plan)
               : st;
}

static mt_status plan_run(session *s, const run_manifest *run, int64_t micro_tokens,
                          int64_t micro_batches, int64_t micro_documents, bool training)
{
    static const plan_gradients gradients[] = { [RUN_GRADIENTS_AUTO] = PLAN_GRADIENTS_AUTO,
                                                [RUN_GRADIENTS_DEVICE] = PLAN_GRADIENTS_HELD,
                                                [RUN_GRADIENTS_HOST] = PLAN_GRADIENTS_HOST };
    plan_request request = { .compute = s->compute,
                             .micro_tokens = micro_tokens,
                             .micro_batches = micro_batches,
                             .micro_documents = micro_documents,
                             .max_seq_len = run->max_seq_len,
                             .groups = run->groups,
                             .policy = run->activations,
                             .weight_buffers = run->weight_buffers,
                             .segment_bytes = run->segment_bytes,
                             .gradients = gradients[run->gradients],
                             .gradient_dtype =
                                 run->gradient_dtype == RUN_GRADIENT_BF16 ? MT_BF16 : MT_F32,
                             .device_limit = run->memory_device,
                             .host_limit = run->memory_host,
                             .machine = s->elsewhere ? &s->machine : NULL,
                             .max_grad_norm = training ? run->max_grad_norm : 0,
                             .any_order = !run->deterministic,
                             .training = training,
                             .n_states = training ? s->n_states : 0,
                             .grain = s->optim->granularity,
                             .workers = run->optimizer_threads };
    memcpy(request.states, s->states, sizeof request.states);
    s->bind_workers = run->bind_workers == RUN_BIND_AUTO;
    s->router_bias_rate = run->router_bias_update_rate;
    return make_plan(s, &request);
}

/* The run's step in micro-batches `factor` times as large as the run has them. */
static mt_status plan_step(session *s, const run_manifest *run, int64_t factor, bool training)
{
    int64_t micro = factor * run->micro_batch_size * run->max_seq_len;
    return plan_run(s, run, micro, run->gradient_accumulation_steps / factor,
                    run->packing == RUN_PACKING_NONE ? 1 : micro, training);
}

mt_status session_make_plan(session *s, const run_manifest *run, bool training)
{
    const mt_config *c = config_section(run->config, "memory");
    if (run->groups > run->gradient_accumulation_steps)
        return c->reject(c, "groups", "is %lld; expected 1 to the %lld micro-batch%s of a step",
                         (long long)run->groups, (long long)run->gradient_accumulation_steps,
                         run->gradient_accumulation_steps == 1 ? "" : "es");
    return plan_step(s, run, 1, training);
}

mt_status session_make_larger_plan(session *s, const run_manifest *run, int64_t factor)
{
    plan_destroy(s->plan);
    s->plan = NULL;
    return plan_step(s, run, factor, true);
}

mt_status session_make_step_plan(session *s, const run_manifest *run, int64_t micro_tokens,
                                 int64_t micro_batches, int64_t micro_documents)
{
    plan_destroy(s->plan);
    s->plan = NULL;
    return plan_run(s, run, micro_tokens, micro_batches, micro_documents, true);
}

mt_status session_make_generation_plan(session *s, int64_t prompt, int64_t context)
{
    const plan_request request = { .compute = s->compute,
                                   .micro_tokens = prompt,
                                   .micro_batches = 1,
                                   .micro_documents = 1,
                                   .max_seq_len = prompt,
                                   .groups = 1,
                                   .policy = PLAN_AUTO,
                                   .weight_buffers = PLAN_AUTO,
                                   .segment_bytes = PLAN_AUTO,
                                   .device_limit = PLAN_AUTO,
                                   .host_limit = PLAN_AUTO,
                                   .training = false,
                                   .context = context };
    return make_plan(s, &request);
}

static mt_status open_tokenizer(session *s, const run_manifest *run)
{
    const mt_config *custom =
        run->chat_format ? NULL : config_section(run->config, "data.chat_format");
    mt_status st = session_open_tokenizer(s, run->tokenizer, run->chat_format, custom);
    if (st == MT_OK)
        return MT_OK;
    bool by_tokenizer = !s->tokenizer && strcmp(run->tokenizer, "auto") != 0;
    return config_blame(config_section(run->config, "data"),
                        by_tokenizer ? "tokenizer" : "chat_format");
}

/* Documents no longer than the model has positions, unless the manifest asks for more. */
static mt_status fit_length(run_manifest *run, const model *m)
{
    bool fitted = false;
    mt_status st = run_fit_length(run, m->max_positions, &fitted);
    if (st == MT_OK && fitted)
        log_write(MT_LOG_INFO,
                  "data.max_seq_len is not given: %lld, the model's max_position_embeddings",
                  (long long)run->max_seq_len);
    return st;
}

/* A rate at which no bias would move is a misunderstanding. */
static mt_status check_router_bias(const run_manifest *run, const model *m)
{
    const mt_config *c = config_section(run->config, "train");
    bool any = false, moves = false;
    for (int32_t u = 0; u < m->n_units; u++) {
        any |= m->units[u].t->bias_slot >= 0;
        moves |= model_bias_moves(m, u);
    }
    if (run->router_bias_update_rate == 0 || moves)
        return MT_OK;
    return any ? c->reject(c, "router_bias_update_rate",
                           "is %g, but train.freeze matches the correction bias of every router; "
                           "match fewer, or set 0",
                           run->router_bias_update_rate)
               : c->reject(c, "router_bias_update_rate",
                           "is %g, but no router of this model has a correction bias (those of "
                           "DeepSeek V3 have one); set 0",
                           run->router_bias_update_rate);
}

static mt_status check_length(const run_manifest *run, const model *m)
{
    const mt_config *c = config_section(run->config, "data");
    if (m->max_positions == 0 || run->max_seq_len <= m->max_positions)
        return MT_OK;
    return c->reject(c, "max_seq_len",
                     "of %lld tokens is more than the model's max_position_embeddings, %lld; "
                     "lower it, or raise the other in the model",
                     (long long)run->max_seq_len, (long long)m->max_positions);
}

static bool data_is_read(const session *s, const run_manifest *run)
{
    const mt_config *c = config_section(run->config, "data");
    return s->data_use == SESSION_DATA_READ ||
           (s->data_use == SESSION_DATA_IF_NAMED && (c->has(c, "files") || c->has(c, "datasets")));
}

mt_status session_open_run(session *s, run_manifest *run, bool training)
{
    startup_begin(&s->startup);
    mt_status st = session_open_run_device(s, run);
    startup_end(&s->startup, STARTUP_DEVICE, 0);
    if (st == MT_OK)
        st = session_open_model(s, run->model);
    if (st == MT_OK)
        st = fit_length(run, s->model);
    /* Opened for evaluation as well: it is the optimizer that knows its keys. */
    if (st == MT_OK)
        st = session_open_optim(s, run);
    if (st == MT_OK)
        st = groups_apply(run, s->optim, s->model, &s->rules);
    if (st == MT_OK)
        st = check_router_bias(run, s->model);
    startup_end(&s->startup, STARTUP_MODEL, 0);
    bool read = data_is_read(s, run);
    if (st == MT_OK)
        st = check_length(run, s->model);
    if (st == MT_OK && read)
        st = open_tokenizer(s, run);
    startup_end(&s->startup, STARTUP_TOKENIZER, 0);
    if (st == MT_OK && read)
        st = session_open_data(s, run, training);
    startup_end(&s->startup, STARTUP_DATA, 0);
    if (st == MT_OK)
        st = run_check_plugin_keys(run, s->data_use != SESSION_DATA_LEFT_OUT);
    if (st == MT_OK)
        st = session_make_plan(s, run, training);
    startup_end(&s->startup, STARTUP_PLAN, 0);
    return st;
}

human_text session_profile_name(const session *s)
{
    human_text t;
    time_t when = (time_t)s->measured_at;
    struct tm date;
    if (!when || !gmtime_r(&when, &date))
        snprintf(t.s, sizeof t.s, "a rough measurement");
    else
        strftime(t.s, sizeof t.s, "the profile of %Y-%m-%d", &date);
    return t;
}

mt_status session_start(session *s, const session_engine_options *options)
{
    const plan_request *r = &s->plan->request;
    bool grad_plane = plan_needs_grad_plane(s->plan);
    mt_status st = MT_OK;
    if (s->store && (s->store->grad_bytes > 0) != grad_plane) {
        store_destroy(s->store);
        s->store = NULL;
    }
    startup_mark(&s->startup);
    if (!s->store)
        st = store_create(s->model, r->states, r->n_states, grad_plane, s->backend, s->device,
                          &s->store);
    if (st != MT_OK)
        return st;
    startup_end(&s->startup, STARTUP_MEMORY, s->store->region_bytes);
    const engine_config setup = { .plan = s->plan,
                                  .store = s->store,
                                  .backend = s->backend,
                                  .device = s->device,
                                  .optim = r->training ? s->optim : NULL,
                                  .optim_state = s->optim_state,
                                  .rules = s->rules,
                                  .router_bias_rate = s->router_bias_rate,
                                  .bind_workers = s->bind_workers,
                                  .serial = options->serial,
                                  .chaos = options->chaos,
                                  .trace_path = options->trace };
    st = engine_create(&setup, &s->engine);
    startup_end(&s->startup, STARTUP_ENGINE, 0);
    return st;
}

void session_stop(session *s)
{
    engine_destroy(s->engine);
    s->engine = NULL;
}

mt_status session_format(const mt_weights **ret)
{
    const void *table = NULL;
    mt_status st = registry_find(PLUGIN_LOADER, SESSION_FORMAT, MT_WEIGHTS_INTERFACE, &table, NULL);
    if (st != MT_OK)
        return status_prefix(st, "weights format '%s'", SESSION_FORMAT);
    *ret = table;
    return MT_OK;
}

mt_status session_load_weights(session *s, const char *path, uint64_t seed)
{
    const mt_weights *format = NULL;
    mt_status st = MT_OK;
    int64_t bytes = s->store->weight_bytes;
    startup_mark(&s->startup);
    if (path[0] == '\0')
        store_init_random(s->store, seed);
    else if ((st = session_format(&format)) == MT_OK)
        st = weights_load(s->store, path, format, &bytes);
    startup_end(&s->startup, STARTUP_WEIGHTS, bytes);
    return st;
}

void session_close(session *s)
{
    engine_destroy(s->engine);
    store_destroy(s->store);
    plan_destroy(s->plan);
    data_close(s->train);
    session_close_tokenizer(s);
    if (s->optim)
        s->optim->destroy(s->optim_state);
    free(s->rules);
    model_destroy(s->model);
    model_source_close(&s->source);
    if (s->backend)
        s->backend->close(s->device);
    free(s->elsewhere);
    *s = (session){ 0 };
}
