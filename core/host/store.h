/* SPDX-License-Identifier: Apache-2.0
 *
 * The host store: master weights and optimizer states of every unit, in planes.
 *
 * Plane `hi` (BF16, what is streamed) and plane `lo` (the 16 bits below) together are the FP32
 * master; the optimizer declares the others; a gradient plane exists when all gradients must be
 * there before the first update. Padding between parameters is zero and stays zero.
 *
 * What takes long for a large model (memory that is found, pinned and cleared; random numbers) says
 * how far it is: on the live line of a terminal, else in a log line every two seconds.
 */
#ifndef MT_CORE_STORE_H
#define MT_CORE_STORE_H

#include "../template/model.h"

#include <megatrain/optim.h>

typedef struct store_unit {
    int64_t elems; /* = tpl.own_elems */
    uint16_t *hi;
    int16_t *lo;
    /* Element i of plane s belongs to element i of the master. NULL, as `grad`, in a unit of which
     * every parameter is frozen. */
    void *state[MT_OPTIM_MAX_STATES];
    float *grad; /* NULL without a gradient plane */
} store_unit;

/* Memory of some units' planes, one unit after the other. */
typedef struct store_region {
    void *data;
    int64_t bytes;
} store_region;

enum { STORE_REGION_BYTES = 1 << 30 };

typedef struct store {
    const model *m;
    int32_t n_units;
    store_unit *units;
    uint32_t n_states;
    mt_state_spec states[MT_OPTIM_MAX_STATES];
    int64_t weight_bytes, state_bytes, grad_bytes; /* exact, as allocated */
    const mt_backend *backend;
    void *device;
    store_region *regions; /* whole units each, as few as reach the size asked for */
    int32_t n_regions;
    int64_t region_bytes;     /* of all */
    _Atomic uint64_t version; /* bumped by whoever has changed masters */
} store;

/* Bytes that store_create will allocate. [pure] */
int64_t store_bytes(const model *m, const mt_state_spec *states, uint32_t n_states,
                    bool grad_plane);

/* All planes zero. Memory comes from backend->host_alloc. n_states may be 0 (inference). [main] */
mt_status store_create(const model *m, const mt_state_spec *states, uint32_t n_states,
                       bool grad_plane, const mt_backend *backend, void *device, store **ret);
/* The same with regions of about `region_bytes` bytes. */
mt_status store_create_in(const model *m, const mt_state_spec *states, uint32_t n_states,
                          bool grad_plane, int64_t region_bytes, const mt_backend *backend,
                          void *device, store **ret);
void store_destroy(store *s); /* accepts NULL */

/* Draws every parameter as its declaration says; the result depends on `seed` and the parameters'
 * names only, not on order or threads. [main] */
void store_init_random(store *s, uint64_t seed);

/* Fills every parameter with values of its declared distribution that repeat: as good as random for
 * measuring, at the speed of memory. [main] */
mt_status store_init_pattern(store *s);

/* Elements first .. first+n of parameter p as FP32 masters. [any], disjoint ranges */
void store_get(const store *s, int32_t param, int64_t first, int64_t n, float *ret);
void store_set(store *s, int32_t param, int64_t first, int64_t n, const float *src);

/* Pointer to the elements of state plane `state` that belong to parameter p; NULL in a unit that is
 * frozen. */
void *store_state(const store *s, int32_t param, uint32_t state);

/* xxh3-64 over all masters and states, in parameter order: equal stores have equal hashes. [any] */
uint64_t store_hash(const store *s);

#endif
