/* SPDX-License-Identifier: Apache-2.0
 *
 * Initial weights: what a parameter's declaration says, element by element.
 */
#include "../base/rng.h"
#include "model.h"

#include <math.h>

void model_draw(const model_param *p, uint64_t seed, int64_t first, int64_t n, float *ret)
{
    uint64_t key = rng_key(seed, p->name);
    rng r = { key, (uint64_t)first };
    if (p->init == MT_INIT_NORMAL)
        rng_normals(key, (uint64_t)first, n, ret);
    for (int64_t k = 0; k < n; k++)
        switch (p->init) {
        case MT_INIT_NORMAL:
            ret[k] *= p->init_std;
            break;
        case MT_INIT_LOG_DECAY:
            ret[k] = (float)log(0.01 + 15.99 * rng_uniform(&r));
            break;
        default:
            ret[k] = p->init == MT_INIT_ONES ? 1.0f : 0.0f;
        }
}
