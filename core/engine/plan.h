/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan: placement and schedule, made before anything is allocated. Exact in bytes; a cost model
 * predicts the time. `megatrain plan` prints it, `train` executes it or refuses.
 */
#ifndef MT_CORE_PLAN_H
#define MT_CORE_PLAN_H

#include "../host/store.h"

enum { PLAN_AUTO = -1 };

/* What the machine does, for the cost model. Bytes/s and FLOP/s. */
typedef struct plan_profile {
    double gemm_flops; /* per second, compute dtype */
    double attn_flops;
    double copy_in, copy_out; /* host <-> device, bytes/s */
    double host_bandwidth;    /* bytes/s that all optimizer workers together reach */
    /* 0: not measured; then as attn_flops, and as if the second took no time */
    double attn_backward_flops;
    double device_bandwidth; /* bytes/s that operations read and write on the device */
    double attn_any_order;   /* forward and backward together, where sums may have any order */
    double scan_flops, scan_backward_flops; /* of recurrences; 0: not measured, as gemm_flops */
} plan_profile;

/* A machine other than this one: bytes of memory that are free. */
typedef struct plan_machine {
    int64_t device, host;
    bool unified; /* both are the same */
    int32_t cpus; /* that its processes may use */
} plan_machine;

/* Where the gradients of a step are summed, and when they leave the device. */
typedef enum plan_gradients {
    PLAN_GRADIENTS_AUTO = 0,
    PLAN_GRADIENTS_DEVICE, /* summed there; a unit's leave as soon as the last group formed them */
    PLAN_GRADIENTS_HOST,   /* they leave after every group and are added there */
    PLAN_GRADIENTS_HELD    /* summed on the device; with clipping they leave when the norm is known,
                              without it as with PLAN_GRADIENTS_DEVICE */
} plan_gradients;

/* What the user asked for. */
typedef struct plan_request {
    mt_dtype compute;
    int64_t micro_tokens;    /* tokens of a micro-batch */
    int64_t micro_batches;   /* per step */
    int64_t micro_documents; /* most documents of a micro-batch */
    int64_t max_seq_len;
    int64_t groups;         /* micro-batch groups of a step; PLAN_AUTO */
    int32_t policy;         /* tpl_policy for all units, or PLAN_AUTO */
    int32_t weight_buffers; /* units or segments in flight, >= 2; PLAN_AUTO */
    /* Units whose weights are larger than that many bytes are streamed in segments, as many experts
     * at a time as fit it; 0: units stay whole; PLAN_AUTO: as large as fits. */
    int64_t segment_bytes;
    plan_gradients gradients;
    mt_dtype gradient_dtype;     /* what gradients leave the device as: MT_F32, MT_BF16 */
    int64_t device_limit;        /* bytes; PLAN_AUTO: what the device has free, less a margin */
    int64_t host_limit;          /* bytes; PLAN_AUTO: what the cgroup or the machine has */
    const plan_machine *machine; /* NULL: this one; outlives the plan */
    double max_grad_norm;        /* 0: clipping off, immediate updates, no gradient plane */
    bool any_order;              /* results need not repeat: backend.h, set_deterministic */
    bool training;               /* false: eval and generation only, no states, no gradients */
    int64_t context;             /* generation: tokens of a document; 0: none */
    /* Of the optimizer: */
    uint32_t n_states;
    mt_state_spec states[MT_OPTIM_MAX_STATES];
    mt_granularity grain;
    int32_t workers; /* threads; <= 0: one for each processor */
} plan_request;

/* Bytes of one kind in one tier. */
typedef enum plan_tier { PLAN_DEVICE = 0, PLAN_HOST = 1, PLAN_TIERS = 2 } plan_tier;
typedef struct plan_item {
    const char *name; /* "weight buffers", "saved activations", "masters", ... */
    plan_tier tier;
    int64_t bytes;
} plan_item;

typedef struct plan {
    plan_request request;
    const model *m;
    int64_t groups, group_batches; /* groups of a step, most micro-batches of a group */
    int32_t weight_buffers;
    int32_t workers;       /* of the optimizer */
    int64_t segment_bytes; /* as in the request, chosen; 0: all units are whole */
    bool device_sums;      /* gradients of all groups are summed on the device */
    bool held;             /* gradients stay on the device until their norm is known */
    bool deep; /* slabs for up to a good share of all gradients, which the optimizer may be behind
                  with when backward ends and deal with beside the next forward */
    int64_t slab_cut; /* bytes by which that share is too large for the host */
    /* Do gradients that the optimizer is behind with wait on the device (layout_park)? Bytes of
     * their buffers behind saved activations, and of those that find no room there. */
    bool parked;
    int64_t parked_bytes, park_apart;
    tpl_policy *policy; /* [n_units] */
    tpl_plan **tpl;     /* [n_units]; units with the same template and policy share one */
    plan_item item[32];
    int32_t n_items;
    int64_t tier_bytes[PLAN_TIERS];
    /* Prediction for a full step, seconds, and what bounds it. */
    double seconds, compute_seconds, copy_in_seconds, copy_out_seconds, optimizer_seconds;
    const char *bound;          /* "compute", "copy-in", "copy-out", "host memory" */
    double determinism_seconds; /* of compute that results which repeat cost; 0 where unknown */
    struct plan_owner *owner;
} plan;

/* Chooses whatever is PLAN_AUTO: the fastest that fits. When nothing fits, fails with a text that
 * says what is missing and what would make it fit. [main] */
mt_status plan_create(const model *m, const plan_request *request, const plan_profile *profile,
                      const mt_backend *backend, void *device, plan **ret);
void plan_destroy(plan *p); /* accepts NULL */

/* Must the store have a gradient plane (store_create)? With clipping gradients wait there for their
 * norm unless the device holds them; several groups are summed there unless the device sums them.
 * It is FP32: a plane of BF16 gradients belongs to the engine. [pure] */
bool plan_needs_grad_plane(const plan *p);

/* Decimals with which a rate in tokens/s has three digits that count: a large model may well make
 * less than one. [pure] */
int plan_rate_decimals(double rate);

/* The table that `megatrain plan` prints (brief: the few lines that `train` starts with). */
void plan_print(const plan *p, bool brief, void (*line)(void *arg, const char *text), void *arg);

/* Rough figures for this device: a short measurement of GEMM, copies and host bandwidth. [main] */
mt_status plan_measure(const mt_backend *backend, void *device, mt_dtype compute,
                       plan_profile *ret);

#endif
