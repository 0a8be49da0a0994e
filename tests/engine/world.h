/* SPDX-License-Identifier: Apache-2.0
 *
 * A whole small world for tests of the engine: the CPU backend of the build tree, a Llama-like
 * model of three blocks, an AdamW of a few lines, random steps, and an engine over them.
 */
#ifndef MT_TEST_WORLD_H
#define MT_TEST_WORLD_H

#include "core/engine/engine.h"
#include "core/manifest/run.h"

enum { WORLD_VOCAB = 61, WORLD_HIDDEN = 32, WORLD_BLOCKS = 3 };

typedef struct world_options {
    bool tied, frozen_norms;
    int32_t hidden; /* 0: WORLD_HIDDEN */
    int32_t blocks; /* 0: WORLD_BLOCKS */
    int32_t vocab;  /* 0: WORLD_VOCAB */
    bool tables;    /* every block adds rows of a table of its own */
    int32_t wide;   /* columns of a second table beside the embedding; 0: there is none */
    /* The only parameter of its template that is trained, as it is called there; NULL: all are. */
    const char *only;
    /* A model manifest of tests/engine/models and the plugin of its architecture, in place of the
     * model of this file; hidden, blocks, vocab and so on then mean nothing. */
    const char *manifest, *plugin;
    plan_request request; /* zero fields get defaults */
    bool serial;
    uint64_t chaos, seed;
    double router_bias_rate;
    const char *trace;
    int32_t threads;
    mt_granularity grain;    /* of the optimizer, which fails where it gets anything smaller */
    bool apart;              /* the device has memory of its own, or says so */
    uint64_t slow_ns;        /* every attention forward takes at least this long */
    uint64_t slow_update_ns; /* and every call of the optimizer */
    int64_t good_updates;    /* calls of the optimizer, after which all fail; 0: none does */
} world_options;

typedef struct world {
    struct world_config *config;
    model_source source; /* of a manifest */
    model *m;
    plan *p;
    store *s;
    engine *e;
} world;

/* Threads of the backend: 2 unless set before the first world_backend; 0: all there are. */
extern int32_t world_threads;
const mt_backend *world_backend(void **ret_device);
void world_model(const world_options *o, world *ret); /* only ret->m */
/* Ends the program when anything fails. Defaults: fp32, 4 micro-batches of 24 tokens in at most 4
 * documents, 1 group, keep, 2 weight buffers, no limits, clipping at 1. max_grad_norm < 0: off. */
void world_open(const world_options *o, world *ret);
void world_close(world *w);

/* The same with an engine that may fail; close it even then. */
mt_status world_try(const world_options *o, world *ret);
/* Only a plan, which may fail. */
mt_status world_plan(const world_options *o, const model *m, plan **ret);

/* n micro-batches of `tokens` tokens in documents of random length; a few targets are ignored. */
step_batch *world_batch(uint64_t seed, int64_t n, int64_t tokens, int64_t documents, int32_t vocab);
/* The same tokens and documents cut into other micro-batches: sizes[k] documents each. */
step_batch *world_recut(const step_batch *b, const int64_t *documents, int64_t n);
void world_batch_free(step_batch *b);

/* Takes step i, or ends the program. */
engine_result world_step(world *w, const step_batch *b, int64_t i, double lr);

/* What some steps came to: sums of their figures, and a hash of masters and states at the end. */
typedef struct world_outcome {
    uint64_t hash;
    double loss, aux_loss, norm;
} world_outcome;

void world_add(world_outcome *sum, const engine_result *r);
/* Waits for the last update, and takes the hash. */
void world_hash(world *w, world_outcome *ret);
/* Equal to the bit? NaN is NaN. */
bool world_same(const world_outcome *a, const world_outcome *b);
/* Both in words. */
const char *world_compare(const world_outcome *got, const world_outcome *want);

double world_loss(world *w, const step_batch *b); /* engine_eval */
/* Gradients of all parameters, one after the other. */
float *world_gradients(world *w, const step_batch *b, double *ret_loss);
int64_t world_offset(const world *w, int32_t param);

void world_fail(const char *what);

#endif
