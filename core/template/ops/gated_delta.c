/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear attention by the gated delta rule: a state a head that each token decays and corrects.
 */
#include "ops.h"

enum { Q, K, V, G, BETA };

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    (void)n_in;
    static const char *const name[] = { "q", "k", "v", "g", "beta" };
    const mt_delta_attr *a = attr;
    if (a->k_heads < 1 || a->v_heads < 1 || a->v_heads % a->k_heads != 0 || a->k_dim < 1 ||
        a->v_dim < 1)
        return op_refuse(error, error_size, "%d v heads of %d do not divide into %d k heads of %d",
                         a->v_heads, a->v_dim, a->k_heads, a->k_dim);
    if (!(a->eps >= 0) || !(a->scale > 0))
        return op_refuse(error, error_size,
                         "scale must be above 0 and eps not below it; found %g, %g", a->scale,
                         a->eps);
    int64_t k_cols = (int64_t)a->k_heads * a->k_dim, v_cols = (int64_t)a->v_heads * a->v_dim;
    int64_t expected[] = { k_cols, k_cols, v_cols, a->v_heads, a->v_heads };
    for (uint32_t i = 0; i <= BETA; i++) {
        mt_kind kind = i == G ? MT_KIND_STAT : MT_KIND_COMPUTE;
        if (in[i].is_param || in[i].kind != kind || !op_row_a_token(&in[i]) ||
            in[i].cols != expected[i])
            return op_refuse(error, error_size,
                             "%s must be an activation of %lld columns with a row a token, in the "
                             "%s dtype",
                             name[i], (long long)expected[i], i == G ? "statistics" : "compute");
    }
    int64_t state = (int64_t)a->v_heads * a->k_dim * a->v_dim;
    ret->n_out = 1;
    ret->out[0] = in[V];
    /* States of all chunks: at most one for each MT_DELTA_CHUNK tokens and one a document. */
    ret->n_aux = 1;
    ret->aux[0] = (mt_shape){
        { 1, MT_DELTA_CHUNK, 0 }, (state + MT_DELTA_CHUNK - 1) / MT_DELTA_CHUNK, MT_KIND_STAT, 0
    };
    ret->backward_in = 0x1f;
    ret->scan_flops_per_token = 6.0 * (double)state;
    ret->n_state = 1;
    ret->state[0] =
        (mt_shape){ { 0, 0, (int64_t)a->v_heads * a->k_dim }, a->v_dim, MT_KIND_STAT, 0 };
    return MT_OK;
}

const mt_op_def op_gated_delta = { sizeof(mt_op_def),     0, "gated_delta", 5, 5,
                                   sizeof(mt_delta_attr), 0, shape };
