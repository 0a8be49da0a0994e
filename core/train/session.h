/* SPDX-License-Identifier: Apache-2.0
 *
 * A session holds what a command works with: device, model, optimizer, data, plan, store, engine,
 * each opened when it is needed and closed in reverse. Every sub-command opens only what it uses.
 */
#ifndef MT_CORE_SESSION_H
#define MT_CORE_SESSION_H

#include "../engine/engine.h"
#include "../manifest/run.h"
#include "data.h"
#include "human.h"
#include "profile.h"
#include "startup.h"

/* The format of weights and checkpoints. */
#define SESSION_FORMAT "safetensors"

/* The tokenizer that says what is wrong with a path that none can read. */
#define SESSION_TOKENIZER "tokenizer"

enum { SESSION_PATH = 4096 };

/* Whether a run's tokenizer and data are read. A plan needs neither. */
typedef enum session_data_use {
    SESSION_DATA_READ,     /* a run without data is an error */
    SESSION_DATA_IF_NAMED, /* where data.files or data.datasets is there */
    SESSION_DATA_LEFT_OUT  /* not even looked at, nor are the keys that belong to it */
} session_data_use;

typedef struct session {
    /* session_use_profile: owned; `info` below is then the device of the profile, which a backend
     * of this machine stands in for */
    hardware *elsewhere;
    plan_machine machine; /* its memory */
    /* session_open_device */
    const mt_backend *backend;
    void *device;
    mt_device_info info;
    mt_dtype compute;
    /* session_open_model */
    model_source source;
    const mt_arch *arch;
    model *model;
    /* session_open_optim */
    const mt_optim *optim;
    void *optim_state;
    uint32_t n_states;
    mt_state_spec states[MT_OPTIM_MAX_STATES];
    engine_rule *rules; /* of parameter groups, [n_params]; NULL: none */
    /* session_open_tokenizer: NULL where the model has none */
    const mt_tokenizer *tokenizer;
    void *tokens;
    char tokenizer_path[SESSION_PATH]; /* "": built in */
    const mt_chat *chat;
    void *conversation;
    char chat_format[32];
    /* session_open_run */
    session_data_use data_use; /* set before it */
    /* session_open_data */
    const char *loader; /* name of the plugin */
    const mt_data *data;
    char cache_folder[SESSION_PATH]; /* "": none */
    data_source *train;
    int64_t epoch_documents, epoch_tokens; /* training: in one epoch; tokens are inputs */
    double epoch_batches;                  /* micro-batches in one epoch */
    uint64_t fingerprint;                  /* of the training data; 0: not known */
    int64_t validation_documents;          /* 0: the data has no validation split */
    /* session_make_plan, session_start */
    bool measured;
    plan_profile profile; /* of the device, when measured */
    int64_t measured_at;  /* Unix time; 0: just now, roughly */
    plan *plan;
    store *store;
    engine *engine;
    bool bind_workers;
    double router_bias_rate;
    startup startup; /* session_open_run, session_start and session_load_weights add to it */
} session;

/* How a run is executed rather than what it computes. */
typedef struct session_engine_options {
    bool serial;
    uint64_t chaos; /* 0: off */
    const char *trace;
} session_engine_options;

/* A session starts as { 0 }; every function below needs a registry that is initialised. [main] */

/* Plans will be for the machine that the profile at `path` was measured on. Before
 * session_open_device; nothing can be started then. */
mt_status session_use_profile(session *s, const char *path);

/* `kind` is a backend's name or "auto": CUDA where a plugin for it exists and finds a device, else
 * the CPU (said in one line of the log). `precision` is "auto", "fp32" or "bf16". threads <= 0: all
 * that this process may use. */
mt_status session_open_device(session *s, const char *kind, const char *precision, int64_t threads);

/* The same as a run manifest says, `deterministic` included. */
mt_status session_open_run_device(session *s, const run_manifest *run);

/* Reads the model at `path` and describes it by the architecture that claims its model_type. Needs
 * no device. */
mt_status session_open_model(session *s, const char *path);

/* Is it the model that it was when the checkpoint at `path` was saved? Its config.json says what
 * that was; without one (or with one that cannot be read: a warning) nobody knows. Anything but a
 * checkpoint passes. */
mt_status session_check_model(const session *s, const char *path);

mt_status session_open_optim(session *s, const run_manifest *run);

/* The plugin whose tokenizer to open `path` with: the first one that can read it; where there is
 * none SESSION_TOKENIZER, whose open says what is wrong with the path. */
mt_status session_find_tokenizer(const char *path, const mt_tokenizer **ret);

/* `tokenizer` is a folder or file, or "auto": the one in the model's folder, where a plugin can
 * read it, the bytes themselves for a vocabulary of 256, else none. `chat_format` is a name,
 * "none", or "auto": the one that the model names (chat_format) or whose template stands beside the
 * tokenizer, else none; NULL: the one that `custom` spells out. "auto" needs the model: without one
 * only the template counts. */
mt_status session_open_tokenizer(session *s, const char *tokenizer, const char *chat_format,
                                 const mt_config *custom);
void session_close_tokenizer(session *s); /* accepts a session without */

/* The loader of records: conversations, instructions, text. */
mt_status session_find_records(const mt_data **ret);

/* What data is opened with: tokenizer, chat format and cache of the session, and the keys of the
 * data; split, length and seed are the caller's to set. */
mt_data_request session_data_request(const session *s, const mt_config *keys);

/* Opens the training stream, if the run is to train, and looks at the validation split; checks the
 * data against the model. Needs the model, and the tokenizer where there is one. */
mt_status session_open_data(session *s, const run_manifest *run, bool training);

/* All of the above for a run, groups of parameters, then its plan: what train, plan and eval begin
 * with. Checks that every key of the manifest was known to someone. Data is read as s->data_use
 * says; s->data stays NULL where it is not. */
mt_status session_open_run(session *s, run_manifest *run, bool training);

/* A fresh source over the validation split; the caller closes it. */
mt_status session_open_validation(const session *s, const run_manifest *run, data_source **ret);

/* What a run asks of the plan; needs device, model, data, and for training the optimizer. */
mt_status session_make_plan(session *s, const run_manifest *run, bool training);

/* Tokens up to which micro-batches are tried that are larger than a run asks for. */
enum { SESSION_MOST_MICRO = 8192 };

/* The same for training on micro-batches `factor` times as large, which divides how many there are.
 * A plan that is there is destroyed. */
mt_status session_make_larger_plan(session *s, const run_manifest *run, int64_t factor);

/* The same for training on steps of micro_batches x micro_tokens tokens in at most micro_documents
 * documents a micro-batch, whatever the run says about them. A plan that is there is destroyed.
 * Needs device, model, optimizer. */
mt_status session_make_step_plan(session *s, const run_manifest *run, int64_t micro_tokens,
                                 int64_t micro_batches, int64_t micro_documents);

/* A plan for generating sequences of up to `context` tokens of which up to `prompt` are fed at
 * once. Needs device and model. */
mt_status session_make_generation_plan(session *s, int64_t prompt, int64_t context);

/* What the times of the plan go by: "the profile of 2026-11-29". */
human_text session_profile_name(const session *s);

/* Allocates the plan's store and engine. A store that is there already is kept where it serves the
 * plan. */
mt_status session_start(session *s, const session_engine_options *options);

/* Frees the engine; the store stays. */
void session_stop(session *s);

/* The interface that reads and writes weights. */
mt_status session_format(const mt_weights **ret);

/* Fills the store from `path` ("" stands for random values drawn from `seed`): a HF folder or a
 * checkpoint, weights only. */
mt_status session_load_weights(session *s, const char *path, uint64_t seed);

/* Closes whatever is open; the session is { 0 } again. */
void session_close(session *s);

#endif
