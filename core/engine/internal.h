/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the engine share. Threads: the main thread enqueues on copy-in and compute; the
 * lander thread (gradients.c) alone feeds copy-out; workers (workers.c) touch host memory only.
 * With config.serial there is one queue and no thread: every piece of work is done where it is
 * handed over.
 */
#ifndef MT_CORE_ENGINE_INTERNAL_H
#define MT_CORE_ENGINE_INTERNAL_H

#include "engine.h"
#include "layout.h"
#include "work.h"

#include <pthread.h>
#include <stdatomic.h>

/* ---- timeline -------------------------------------------------------------------------------- */

typedef enum track { TRACK_IN, TRACK_COMPUTE, TRACK_OUT, TRACK_WORKER } track;
typedef enum event_kind {
    EVENT_FORWARD,
    EVENT_BACKWARD,
    EVENT_COPY_IN,
    EVENT_COPY_OUT,
    EVENT_BATCH_IN,
    EVENT_UPDATE,
    EVENT_ADD,
    EVENT_SCATTER,
    EVENT_NORM,
    EVENT_GATHER,
    EVENT_GENERATE
} event_kind;

typedef struct timeline_event {
    int16_t kind;
    int16_t track; /* TRACK_WORKER + i: worker i */
    int32_t unit;
    int32_t micro; /* -1: all */
} timeline_event;

typedef struct timeline {
    timeline_event *event; /* [l.n_events], a ring */
    uint64_t *ns;          /* [2 * n_events] begin and end, written by the queues */
    int64_t n_events;
    _Atomic int64_t next;
    bool detailed;        /* every micro-batch and slice, for --trace */
    pthread_mutex_t lock; /* of what workers write whenever they like */
} timeline;

/* What was moved and updated since the last step was accounted for. */
typedef struct traffic {
    _Atomic int64_t in_bytes, out_bytes;
    _Atomic int64_t updated_elems;
    _Atomic uint64_t update_ns;     /* while any worker was at it */
    int64_t first_event, end_event; /* of the step, on the timeline */
} traffic;

/* What one pass of a unit waited for, for the step's accounting. */
typedef struct pass_record {
    int64_t compute, copy_in, copy_out, batch; /* timeline indices, -1: none */
    uint64_t blocked_from, blocked_to;         /* the copy-in waited for the optimizer, ns */
} pass_record;

/* ---- workers --------------------------------------------------------------------------------- */

/* A table whose rows are read from the host a few at a time. Its updates go row by row, each by
 * whoever claims it first: a worker that goes through all of the table, or one that gathers the row
 * for the next forward, which so waits for no others. */
typedef struct table {
    work *update; /* under way, by first element */
    int64_t n_updates;
    int64_t announced;    /* elements whose updates are yet to be submitted */
    _Atomic uint8_t *row; /* [rows] old, claimed or new: slices.c */
} table;

typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t wake; /* workers: there is work, or stop */
    pthread_cond_t done; /* others: something was finished, or a slab came back */
    pthread_t *thread;
    int32_t n_threads; /* 0: work is done by whoever submits it */
    int32_t n_started;
    bool stop;
    work_queue queue;
    /* Elements of work not yet done. */
    int64_t *pending;               /* [n_params] of the parameter, gathers apart */
    int64_t *updating;              /* [n_params] that change masters */
    int64_t gathering;              /* of gathers */
    int64_t set_users[LAYOUT_SETS]; /* that reads the set's rows */
    int64_t outstanding;            /* all of it */
    int32_t hurry;                  /* how many wait for the update of a table */
    table **table;                  /* [n_params] NULL: gathered nowhere, or never updated by row */
    int32_t n_updating;             /* workers at an update */
    uint64_t updating_since;        /* when the first of them began */
    void **free_slab;               /* [l.n_slabs] the one that came back last is taken first */
    int64_t n_free;
    int32_t *slab_users; /* [l.n_slabs] slices that read it */
    mt_status error;
    char error_text[512];
} pool;

/* ---- streams --------------------------------------------------------------------------------- */

typedef struct weight_buffer {
    void *data;
    void *loaded, *used; /* events: copied in; the last compute that read it */
    int32_t piece;       /* -1: empty */
    int64_t key;         /* what of it: gathered rows of group `key` */
    uint64_t version;    /* of the store */
    int64_t copy_in;     /* timeline index */
    uint64_t blocked_from, blocked_to;
} weight_buffer;

typedef struct grad_buffer {
    void *data; /* gradients as they leave */
    int64_t bytes;
    void *ready, *free; /* events: gradients complete; all copied out */
    bool busy;          /* what is in it has not been enqueued to leave; under the engine's lock */
    int64_t copy_out;   /* timeline index of the landing that last used it */
    int32_t first_unit, last_unit; /* in whose saved memory it lies, if first <= last */
} grad_buffer;

/* Micro-batches of a step. */
typedef struct micro_range {
    int64_t first, n;
} micro_range;

/* One group's batches, and the table rows that they use. */
typedef struct group_set {
    int32_t *host, *dev; /* [group_batches][micro_elems] */
    void *loaded, *done; /* events: batches on the device; the group's compute has passed */
    int64_t key;         /* number of the group, over the engine's life */
    micro_range range;
    const micro_batch **micro; /* [group_batches] */
    int32_t *rows;             /* [n_rows] distinct token ids of the group, ascending */
    /* The same of what gradients of tables are formed of: of the whole step, where those of all
     * groups are summed on the device, else `rows`. */
    int32_t *grad_rows;
    int64_t n_rows, n_grad_rows;
    int64_t landing; /* number of the last landing that reads `grad_rows` */
    uint16_t *hi;    /* packed rows, all gathered slots one after the other */
    int16_t *lo;
    int64_t batch_in; /* timeline index */
} group_set;

typedef struct landing {
    int32_t piece, buffer, set;
    bool last_group;
    micro_range range; /* whose gradients these are */
    bool held;         /* of those gradients that stayed for the norm; else of the others */
    update_params update;
} landing;

/* Pieces whose gradients wait on the device: parking.c. Under the engine's lock. */
typedef struct parking {
    landing *landing; /* [l.n_pieces] in the order in which they were formed */
    int64_t n;
    bool closed; /* the lander may take no more */
    bool taken;  /* it is at one */
} parking;

/* Gradients of a piece's slice, on their way into those of a step. */
typedef struct contribution {
    int32_t param;
    int64_t begin, end; /* elements */
    bool first;         /* of this step */
    bool again;         /* an earlier slot of the same piece contributes too */
    bool update;        /* the last one of this step, and updates are immediate */
    bool held;          /* the only one, and its update has been announced */
    update_params params;
} contribution;

/* What is streamed at once: a unit, or a segment of one that is cut. */
typedef struct piece_info {
    int32_t unit, segment;
    bool trains;        /* any slot gets a gradient */
    int64_t sum_offset; /* bytes into the gradient sums */
} piece_info;

/* A piece's turn in the order of compute. A unit that is cut has several: in forward its dense part
 * and then the experts, in backward the dense part again, the experts, and the dense part. */
typedef struct visit {
    int32_t piece;
    bool first, last; /* of the unit's in this pass */
} visit;

typedef struct unit_info {
    int32_t first_piece;
    bool gathers;
    int64_t slot_base;     /* index of its first slot among all units' */
    int64_t sum_base;      /* of its first sum of squares */
    int64_t activation[2]; /* offset of its boundary values; bytes from one batch to the next */
    int64_t saved[2];      /* likewise of its saved region */
    int64_t value_offset[MT_UNIT_MAX_IO]; /* of each output in a batch's boundary values */
    void *state;                          /* what generation keeps */
    float *aux_loss; /* host [micro_batches of a step]: the loss that it adds; NULL: none */
    /* Offsets of the experts' rows, [micro_batches] times layout_offsets_bytes. Of a unit that is
     * cut those of the group `offsets_key` are there once `offsets_there` has happened. */
    char *offsets;
    void *offsets_there;
    int64_t offsets_key;
    int64_t *load; /* [experts] rows of each in the last step */
} unit_info;

/* Positions in the order of compute: per group forward, then (training) backward; each is a visit.
 */
typedef struct sequence {
    int64_t n_groups, group_length;
    int64_t first_key; /* key of the first group */
    bool backward;
} sequence;

typedef struct step_state {
    const step_batch *batch;
    sequence seq;
    bool update, immediate;
    update_params params;
    double loss_scale;
    /* lander only, until it is idle */
    bool loss_known;
    double loss_sum, aux_loss_sum;
    bool discard;     /* no update of this step may happen */
    int32_t bad_unit; /* immediate: its gradient is not finite; -1: none */
    uint64_t landed;  /* when all gradients were where they belong, ns */
} step_state;

struct engine {
    const plan *p;
    const model *m;
    store *s;
    const mt_backend *b;
    void *dev;
    const mt_optim *optim;
    const void *optim_state;
    const engine_rule *rules;
    double router_bias_rate;
    const char *trace_path;
    bool serial, training;
    uint64_t chaos;
    layout l;
    int64_t esize; /* bytes of a compute element */

    void *region[LAYOUT_REGIONS];
    void *q_in, *q_compute, *q_out; /* one and the same when serial */
    unit_info *unit;                /* [n_units] */
    piece_info *piece;              /* [l.n_pieces] */
    visit *visit;                   /* [l.n_visits] those of forward, then those of backward */
    int64_t *loads;                 /* those of all units */
    float **plane;                  /* [n_params] host gradients; both NULL: leave by slabs */
    uint16_t **narrow;              /* [n_params] the same in BF16 */
    int32_t *contributors;          /* [n_params] */
    int64_t *pack_offset;           /* [l.n_slots] of gathered slots, into a set's staging */
    int64_t *block_base;            /* [n_params] first partial sum of squares */

    weight_buffer *weights; /* [plan->weight_buffers] */
    grad_buffer *grads;     /* [l.n_grads] */
    group_set set[LAYOUT_SETS];
    int64_t next_key;                /* of the next group */
    int32_t *row_of;                 /* [vocab] packed row of a token id, -1 */
    const micro_batch **group_micro; /* [group_batches] scratch */
    void **value;       /* [group_batches][MT_UNIT_MAX_IO] gradients of boundary values */
    tpl_binding *bound; /* [group_batches] those of the unit at work in backward */
    void **free_value;  /* [l.n_values] the others */
    int64_t n_free_values;
    int64_t next_grad; /* buffer, modulo their number */

    double *sums_dev, *sums_host; /* [l.n_sums] sums of squares of device gradients */
    double *blocks;               /* [n_blocks] partial sums over the plane */
    void *sum_scratch;
    float *loss_host;
    void *loss_ready; /* event: all losses of the step are on the host */

    step_state step;
    pool pool;
    timeline time;
    traffic traffic;
    pass_record *record;
    int64_t n_records, cap_records;
    uint64_t rng; /* chaos, main thread */

    /* the lander */
    pthread_t lander;
    bool lander_started;
    pthread_mutex_t lock;
    pthread_cond_t wake, progress;
    bool stop;
    landing *landing; /* [cap_landings], a ring */
    int64_t cap_landings;
    int64_t landings_given, landings_done;
    parking parking;
    int32_t *landed; /* [n_params] contributions of this step so far */
    void *flight_event[LAYOUT_FLIGHT];
    work flight[LAYOUT_FLIGHT]; /* what is being copied out, a ring */
    int64_t flight_head, flight_tail;
    contribution *complete; /* [n_params] to update when the landing is through */
    int32_t n_complete;
    uint64_t lander_rng;

    int64_t generated;  /* generation: next position */
    int32_t *positions; /* [l.tokens] scratch */
};

/* Does this parameter's gradient stay on the device until the norm is known? Not if contributions
 * to it are added up on the host. */
static inline bool stays_for_norm(const engine *e, int32_t param)
{
    return e->p->held && !e->plane[param] && !(e->m->params[param].flags & MT_PARAM_FROZEN);
}

/* engine.c: fails when the device or a worker has */
mt_status engine_alive(engine *e);

/* What a piece holds of its unit's parameters. */
static inline const tpl_segment *piece_segment(const engine *e, int32_t piece)
{
    const piece_info *p = &e->piece[piece];
    return &e->p->tpl[p->unit]->segment[p->segment];
}

/* The parameter behind a slice of the piece. */
static inline int32_t piece_param(const engine *e, int32_t piece, const tpl_slice *s)
{
    return e->m->units[e->piece[piece].unit].slot[s->slot];
}

/* chaos.c: delays and poison; nothing without config.chaos */
void chaos_delay(engine *e, void *queue, uint64_t *rng);
void chaos_sleep(engine *e, uint64_t *rng);
void chaos_poison(engine *e, void *queue, void *p, int64_t bytes);
void chaos_forget(const engine *e, void *p, int64_t bytes); /* the same of host memory, at once */
/* What follows every enqueue: waits for it when serial. */
static inline void enqueued(engine *e, void *queue)
{
    if (e->serial)
        e->b->queue_sync(e->dev, queue);
}

/* trace.c */
uint64_t time_now(void);
int64_t time_begin(engine *e, void *queue, int track_, event_kind kind, int32_t unit,
                   int32_t micro);
void time_end(engine *e, void *queue, int64_t index);
/* Host work that is over already. Only in a detailed timeline. [any] */
void time_span(engine *e, int track_, event_kind kind, int32_t unit, uint64_t from, uint64_t to);
void time_account(engine *e, uint64_t from, uint64_t to, engine_result *ret);
mt_status trace_write(engine *e);

/* workers.c */
mt_status pool_start(engine *e, bool bind);
void pool_stop(engine *e);
void pool_submit(engine *e, const work *w);
/* An update of so many elements of a parameter that will be submitted slice by slice, as
 * `announced`: from now on whoever waits for the parameter waits for them. */
void pool_announce(engine *e, int32_t param, int64_t elems);
void pool_wait_param(engine *e, int32_t param);
/* Is any parameter that the piece reads being updated? Tables that are gathered from do not count:
 * rows that have been packed are up to date. */
bool pool_updating(engine *e, int32_t piece);
bool pool_is_updating(engine *e, int32_t param);
void pool_wait_update(engine *e, int32_t param); /* until its masters are up to date */
void pool_wait_idle(engine *e);
/* Until rows of a table can be gathered: all of its update that is under way is on the host. */
void pool_wait_table(engine *e, int32_t param);
void pool_wait_gathers(engine *e);
void pool_wait_set(engine *e, int32_t set); /* until no work reads the set's rows */
int64_t pool_free_slabs(engine *e);
void pool_wait_slabs(engine *e, int64_t n); /* until n are free, or at least more than are now */
void *pool_try_slab(engine *e);
void *pool_wait_slab(engine *e);
void pool_release_slab(engine *e, void *slab);
mt_status pool_error(engine *e);
/* How long any worker was at an update since this was asked last, ns. */
uint64_t pool_take_update_ns(engine *e);

/* slices.c */
/* Does elements first .. first+n of the work, a slice of it; `block` is the worker's own. [any] */
mt_status slice_run(engine *e, const work *w, int64_t first, int64_t n, float *block);
/* dst = or += n gradients as they leave the device. */
void slice_widen(const engine *e, float *dst, const void *src, int64_t n, bool add);
mt_status tables_start(engine *e);
void tables_stop(engine *e);
/* From now on w's rows are updated by w. Nothing of them is under way, there is room, and the
 * pool's lock is held. */
void table_add(table *t, const work *w, int64_t cols);

/* stream.c */
mt_status stream_start(engine *e);
void stream_stop(engine *e);
void stream_prepare(engine *e, const micro_batch *const *micro, micro_range range, int64_t key,
                    bool with_targets);
const visit *stream_visit_at(const engine *e, const sequence *s, int64_t pos);
/* Does the visit at `pos` read weights? Only backward need not: an embedding's. */
bool stream_reads(const engine *e, const sequence *s, int64_t pos);
/* The buffer with the weights of the piece at `pos`; compute has been told to wait for them. */
weight_buffer *stream_acquire(engine *e, const sequence *s, int64_t pos);
/* Is the visit at `pos` one of backward, or of generation, to experts of which it is known that
 * none got a token? It needs no weights and has no gradients. Once it is, it stays so. */
bool stream_skips(const engine *e, const sequence *s, int64_t pos);
/* The visit at `pos` is through; fetches ahead. w is NULL where it was skipped. */
void stream_release(engine *e, const sequence *s, int64_t pos, weight_buffer *w);
void stream_batch(const engine *e, const group_set *s, int64_t i, mt_batch *ret);
/* What tpl_binding wants of it. */
const int32_t *stream_grad_rows(const engine *e, const group_set *s, int64_t i);

/* gradients.c */
mt_status lander_start(engine *e);
void lander_stop(engine *e);
grad_buffer *lander_acquire(engine *e, int32_t piece, int32_t *ret_index);
/* Where the piece's gradients are summed in FP32; `g` is NULL while they stay on the device. */
float *lander_sums(const engine *e, int32_t piece, const grad_buffer *g);
void lander_submit(engine *e, const landing *l);
/* Lets what stayed on the device leave and be updated, in the order of the next forward; the
 * updates have been announced. */
void lander_release(engine *e);
/* Gradients that stayed on the device, in their true shape, to ret_grads[param]. */
void lander_read(engine *e, float *const *ret_grads);
void lander_wait(engine *e, int64_t number); /* until landing `number` is through */
/* Makes compute wait until the buffer's contents are out. */
void lander_free(engine *e, const grad_buffer *g);
void lander_give(engine *e, const landing *l);
/* With immediate updates: is the loss finite, and this piece's gradient? Else the step's updates
 * are called off. */
void lander_check_piece(engine *e, int32_t piece);
/* The set whose table rows the step's last group used. */
int32_t lander_last_set(const engine *e);
void step_sum_loss(engine *e);

/* parking.c: nothing happens where no gradients wait on the device. */
/* Buffers of pieces whose at[piece] is not negative: bytes into saved memory. */
void parking_place(engine *e, const int64_t *at);
/* Makes compute wait until no gradients are in what the unit is to save. */
void parking_vacate(engine *e, int32_t unit);
/* May the piece's gradients wait, and be overtaken? */
bool parking_takes(const engine *e, int32_t piece);
void parking_add(engine *e, const landing *l);
/* What the lander is to land next; false: nothing, or others come first. [lander] */
bool parking_take(engine *e, landing *ret);
void parking_open(engine *e); /* before a step's passes */
/* All passes of the step are through: how many pieces are left, which until parking_open are the
 * main thread's. Nothing of the step is under way on copy-out any more. */
int64_t parking_close(engine *e);
/* Lets those n leave beside the next forward. */
void parking_clear(engine *e, int64_t n);

/* experts.c: nothing happens to units without experts. */
mt_status experts_start(engine *e);
void experts_stop(engine *e);
/* Enqueues that the host gets the offsets of the experts' rows in batch b of the step; right after
 * the unit's forward, or where it is cut its stage `before`. */
void experts_tell(engine *e, int32_t unit, int64_t b, const tpl_binding *bind, mt_pass pass);
/* Did experts first .. end-1 get no rows in these batches? Where the host has been told. */
bool experts_idle(const engine *e, int32_t unit, int32_t first, int32_t end, micro_range r);
/* The same of all of the last step. */
bool experts_unused(const engine *e, int32_t unit, int32_t first, int32_t end);
/* Sums the rows that every expert got in the step, when all of its forward is through. */
void experts_count(engine *e, int64_t batches);
/* What is said of it in engine_result; moves the routers' biases by it. */
double experts_violation(const engine *e);
void experts_balance(engine *e);

/* pass.c */
mt_status pass_start(engine *e);
void pass_stop(engine *e);
/* Enqueues all groups of e->step; afterwards the lander may still be busy. */
void pass_train(engine *e);
double pass_eval(engine *e, const step_batch *batch);
/* One micro-batch through the visit at `pos` of generation; states hold `used` tokens, and w is
 * NULL where it is skipped. */
void pass_generate(engine *e, int64_t pos, const weight_buffer *w, const mt_batch *batch,
                   mt_pass pass, int64_t used);

#endif
