/* SPDX-License-Identifier: Apache-2.0
 *
 * The keys of a run manifest: one table that run.c checks and the documentation lists. Keys of the
 * loader and of the optimizer are not here: their plugins read them from their sections.
 */
#include "run.h"

#include <stddef.h>

static const char *const precisions[] = { "auto", "fp32", "bf16", NULL };
static const char *const inits[] = { "random", "pretrained", NULL };
static const char *const bad_numbers[] = { "skip", "stop", NULL }; /* run_bad_numbers */
static const char *const packings[] = { "best_fit", "sequential", "none", NULL }; /* run_packing */
static const char *const switches[] = { "true", "false", NULL };
static const char *const schedules[] = { "constant", "linear", "cosine", "wsd", NULL };
static const char *const activations[] = { "auto", "keep", "select", "input", NULL };
static const char *const gradients[] = { "auto", "device", "host", NULL }; /* run_gradients */
static const char *const gradient_dtypes[] = { "fp32", "bf16", NULL };     /* run_gradient_dtype */
static const char *const binds[] = { "auto", "off", NULL };                /* run_bind */

#define MOST ((double)(INT64_C(1) << 53))
#define FIELD(name)                                                                                \
    .offset = offsetof(run_manifest, name), .size = sizeof(((run_manifest *)0)->name)
#define RANGE(lo, hi) .min = (lo), .max = (hi)

static const run_key keys[] = {
    { "", "model", RUN_KEY_STRING, FIELD(model),
      .doc = "A Hugging Face folder, a checkpoint folder, or a model manifest (YAML)." },
    { "", "init", RUN_KEY_CHOICE, .choices = inits,
      .doc = "Where weights come from: drawn anew, or read from the model's folder. Default: "
             "pretrained for a folder, random for a manifest." },
    { "", "device", RUN_KEY_STRING, "auto", FIELD(device),
      .doc = "Kind of a backend plugin; auto: the fastest that finds a device." },
    { "", "precision", RUN_KEY_CHOICE, "auto", .choices = precisions,
      .doc = "What the device computes in; masters are FP32 always. auto: the device's default." },
    { "", "threads", RUN_KEY_INT, "0", RANGE(0, 4096), FIELD(threads),
      .doc = "CPU threads; 0: as many as the process may use." },
    { "", "seed", RUN_KEY_INT, "42", RANGE(0, MOST), FIELD(seed),
      .doc = "Seed of initial weights, data order and sampling." },
    { "", "deterministic", RUN_KEY_BOOL, "true", FIELD(deterministic),
      .doc = "Results repeat bit for bit; false: they need not where that is faster." },
    { "", "output_dir", RUN_KEY_STRING, FIELD(output_dir),
      .doc = "Folder of the run, below the working directory. Default: runs/NAME for NAME.yaml." },

    { "data", "loader", RUN_KEY_STRING, "auto", FIELD(loader),
      .doc = "A loader plugin, whose own keys the section's others are; auto: by the first file's "
             "name and the model's tokenizer." },
    { "data", "tokenizer", RUN_KEY_STRING, "auto", FIELD(tokenizer),
      .doc = "A folder or file with a tokenizer; auto: the one in the model's folder, bytes for a "
             "vocabulary of 256." },
    { "data", "chat_format", RUN_KEY_NAME, "auto", FIELD(chat_format),
      .doc = "How conversations become tokens; auto: as the model's folder or manifest says; "
             "none; a map spells one out." },
    { "data", "max_seq_len", RUN_KEY_INT, "1024", RANGE(2, 1 << 30), FIELD(max_seq_len),
      .doc = "Tokens of a sequence; longer documents are cut." },
    { "data", "packing", RUN_KEY_CHOICE, "best_fit", packings, FIELD(packing), .yes = 1, .no = 3,
      .doc =
          "How micro-batches are filled with documents: whole ones (best_fit, or true), cut where "
          "they do not fit (sequential), or one in each (none, or false). Attention never "
          "crosses their borders." },

    { "train", "max_steps", RUN_KEY_INT, "0", RANGE(0, MOST), FIELD(max_steps),
      .doc = "Optimizer steps of the run; 0: num_train_epochs decides." },
    { "train", "num_train_epochs", RUN_KEY_FLOAT, "1", RANGE(0, 1e9), FIELD(num_train_epochs),
      .doc = "Passes over the data; not together with max_steps." },
    { "train", "micro_batch_size", RUN_KEY_INT, "1", RANGE(1, 1 << 30), FIELD(micro_batch_size),
      .doc = "Sequences of max_seq_len tokens in a micro-batch." },
    { "train", "gradient_accumulation_steps", RUN_KEY_INT, "1", RANGE(1, 1 << 30),
      FIELD(gradient_accumulation_steps),
      .doc = "Micro-batches of a step; not together with tokens_per_step." },
    { "train", "tokens_per_step", RUN_KEY_INT, RANGE(1, MOST),
      .doc = "Tokens of a step, a multiple of micro_batch_size * max_seq_len." },
    { "train", "learning_rate", RUN_KEY_FLOAT, "1e-4", RANGE(0, 1e6), FIELD(learning_rate),
      .doc = "Peak learning rate." },
    { "train", "min_lr_ratio", RUN_KEY_FLOAT, "0", RANGE(0, 1), FIELD(min_lr_ratio),
      .doc = "Learning rate at the end, as a share of the peak." },
    { "train", "lr_scheduler_type", RUN_KEY_CHOICE, "cosine", schedules, FIELD(lr_scheduler_type),
      .doc = "Shape of the schedule after the warm-up." },
    { "train", "warmup_steps", RUN_KEY_INT, "0", RANGE(0, MOST), FIELD(warmup_steps),
      .doc = "Steps of linear warm-up from 0; not together with warmup_ratio." },
    { "train", "warmup_ratio", RUN_KEY_FLOAT, "0", RANGE(0, 1), FIELD(warmup_ratio),
      .doc = "Warm-up as a share of all steps." },
    { "train", "wsd_decay_ratio", RUN_KEY_FLOAT, "0.1", RANGE(0, 1), FIELD(wsd_decay_ratio),
      .doc = "Last part of a wsd schedule, in which the learning rate decays." },
    { "train", "max_grad_norm", RUN_KEY_FLOAT, "1.0", RANGE(0, 1e30), FIELD(max_grad_norm),
      .doc = "Global norm that gradients are clipped to; 0: no clipping, and updates start while "
             "backward still runs." },
    { "train", "router_bias_update_rate", RUN_KEY_FLOAT, "0", RANGE(0, 1),
      FIELD(router_bias_update_rate),
      .doc = "How far a router's correction bias moves after each step towards experts with fewer "
             "tokens than the mean (0.001 is usual); 0: not at all." },
    { "train", "eval_steps", RUN_KEY_INT, "0", RANGE(0, MOST), FIELD(eval_steps),
      .doc = "Steps between evaluations; 0: none before the end." },
    { "train", "eval_batches", RUN_KEY_INT, "0", RANGE(0, MOST), FIELD(eval_batches),
      .doc = "Batches of an evaluation; 0: the whole validation split." },
    { "train", "early_stopping_patience", RUN_KEY_INT, "0", RANGE(0, MOST),
      FIELD(early_stopping_patience),
      .doc = "Evaluations in a row without a new best loss before the run ends; 0: never." },
    { "train", "freeze", RUN_KEY_LIST,
      .doc = "Patterns over names of parameters that are not trained and have no states." },
    { "train", "on_bad_numbers", RUN_KEY_CHOICE, "skip", bad_numbers, FIELD(on_bad_numbers),
      .doc = "What to do when a loss or gradient is not finite; skip needs clipping (without it, "
             "stop is the default)." },
    { "train", "max_skipped", RUN_KEY_INT, "10", RANGE(0, MOST), FIELD(max_skipped),
      .doc = "Skipped steps in a row before the run stops." },

    { "optimizer", "name", RUN_KEY_STRING, MT_DEFAULT_OPTIMIZER, FIELD(optimizer),
      .doc = "An optimizer plugin; the section's other keys are its own." },

    { "optimizer", "groups", RUN_KEY_LIST,
      .doc =
          "Maps of a pattern over names of parameters and what differs for them: learning_rate or "
          "learning_rate_scale, weight_decay." },

    { "memory", "gpu", RUN_KEY_BYTES, "auto", RANGE(1, MOST), .automatic = true,
      FIELD(memory_device), .doc = "Device memory to use at most (24GiB); auto: what is free." },
    { "memory", "host", RUN_KEY_BYTES, "auto", RANGE(1, MOST), .automatic = true,
      FIELD(memory_host), .doc = "Host memory to use at most; auto: what the process may use." },
    { "memory", "groups", RUN_KEY_INT, "auto", RANGE(1, 1 << 30), .automatic = true, FIELD(groups),
      .doc = "Groups of micro-batches that a step is run in; auto: the fastest that fits." },
    { "memory", "activations", RUN_KEY_CHOICE, "auto", activations, FIELD(activations),
      .doc = "What backward finds saved: everything, all but cheap operations, or units' inputs." },
    { "memory", "weight_buffers", RUN_KEY_INT, "auto", RANGE(2, 1024), .automatic = true,
      FIELD(weight_buffers), .doc = "Units or segments whose weights are on the device at once." },
    { "memory", "segment_size", RUN_KEY_BYTES, "auto", RANGE(1, MOST), .automatic = true,
      .can_be_off = true, FIELD(segment_bytes),
      .doc = "Units with larger weights are streamed some experts at a time (512MiB); auto: where "
             "it is faster, or nothing fits otherwise." },
    { "memory", "gradients", RUN_KEY_CHOICE, "auto", gradients, FIELD(gradients),
      .doc = "Where gradients are summed, and with clipping wait for their norm: device or host "
             "memory; auto: the fastest that fits." },
    { "memory", "gradient_dtype", RUN_KEY_CHOICE, "fp32", gradient_dtypes, FIELD(gradient_dtype),
      .doc = "What gradients, summed in FP32, leave the device as: fp32 or bf16." },
    { "memory", "optimizer_threads", RUN_KEY_INT, "0", RANGE(0, 4096), FIELD(optimizer_threads),
      .doc = "Threads that update weights; 0: as many as the process may use." },

    { "memory", "bind_workers", RUN_KEY_CHOICE, "auto", binds, FIELD(bind_workers),
      .doc =
          "Keep every optimizer thread on a processor of its own; auto: where there are enough." },

    { "log", "logging_steps", RUN_KEY_INT, "1", RANGE(1, MOST), FIELD(logging_steps),
      .doc = "Steps between progress lines; metrics record every step." },

    { "checkpoint", "save_steps", RUN_KEY_INT, "0", RANGE(0, MOST), FIELD(save_steps),
      .doc = "Steps between checkpoints; 0: only at the end." },
    { "checkpoint", "save_total_limit", RUN_KEY_INT, "2", RANGE(0, MOST), FIELD(save_total_limit),
      .doc = "Newest checkpoints to keep; 0: all." },
    { "checkpoint", "weights_only", RUN_KEY_BOOL, "false", FIELD(weights_only),
      .doc = "Save no optimizer state; such a checkpoint cannot be resumed." },
    { "checkpoint", "save_best", RUN_KEY_BOOL, "false", FIELD(save_best),
      .doc = "Keep the checkpoint with the best validation loss too, as checkpoints/best." },
    { "checkpoint", "export", RUN_KEY_STRING, "auto", FIELD(export_dir), .choices = switches,
      .yes = 1, .no = 2,
      .doc = "Folder that a finished run is exported to as a Hugging Face model in BF16; true: "
             "output_dir/model; auto: the same where the run began with such a folder's weights." },
    { "checkpoint", "resume_from_checkpoint", RUN_KEY_STRING, "auto", FIELD(resume_from_checkpoint),
      .doc = "auto: the newest of output_dir, if any; none: start anew; or a path." },
};

const run_key *run_schema(int32_t *ret_n)
{
    *ret_n = (int32_t)(sizeof keys / sizeof *keys);
    return keys;
}
