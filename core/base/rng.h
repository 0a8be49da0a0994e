/* SPDX-License-Identifier: Apache-2.0
 *
 * Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
 * 1, 2, 3", SC 2011). Number i of a key is a pure function of (key, i), so the order in which
 * threads draw does not matter, and a position is all the state there is.
 */
#ifndef MT_CORE_RNG_H
#define MT_CORE_RNG_H

#include <megatrain/base.h>

/* The block function: ten rounds. [pure] */
void rng_philox(const uint32_t key[2], const uint32_t counter[4], uint32_t ret[4]);

/* A key for what `label` names ("model.norm.weight", "sampling") in a run of this seed. [pure] */
uint64_t rng_key(uint64_t seed, const char *label);

/* ret[i] = element first + i of the key's standard normal sequence (Box-Muller), |x| < 6.7; cutting
 * a range into pieces gives the same numbers, as does any machine. [pure] */
void rng_normals(uint64_t key, uint64_t first, int64_t n, float *ret);

/* A sequence that is drawn one by one. Copy it, or store key and position, to come back. */
typedef struct rng {
    uint64_t key;
    uint64_t position; /* 64-bit words drawn so far */
} rng;

uint64_t rng_next(rng *r);
double rng_uniform(rng *r);                 /* in [0, 1), 53 bits */
uint64_t rng_below(rng *r, uint64_t bound); /* 0 .. bound - 1 without bias; bound > 0 */

#endif
