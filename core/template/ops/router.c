/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixture of experts: which experts each token goes to, with which weights, and where its rows are
 * when all rows are ordered by expert.
 */
#include "ops.h"

static mt_status check_attr(const mt_router_attr *a, int64_t experts, char *error,
                            size_t error_size)
{
    if (a->top_k < 1 || a->top_k > experts)
        return op_refuse(error, error_size,
                         "top_k must be 1 to %lld, the number of experts, not %d",
                         (long long)experts, a->top_k);
    if (a->scoring != MT_ROUTER_SOFTMAX && a->scoring != MT_ROUTER_SIGMOID)
        return op_refuse(error, error_size, "scoring %d is unknown", a->scoring);
    if (a->group_score != MT_GROUP_MAX && a->group_score != MT_GROUP_TOP2_SUM)
        return op_refuse(error, error_size, "group score %d is unknown", a->group_score);
    if (!(a->scale > 0))
        return op_refuse(error, error_size, "scale must be above 0 (1: none), not %g", a->scale);
    if (a->groups <= 1)
        return a->groups < 0 ? op_refuse(error, error_size, "%d groups", a->groups) : MT_OK;
    int64_t size = experts / a->groups;
    if (experts % a->groups != 0)
        return op_refuse(error, error_size, "%lld experts do not divide into %d groups",
                         (long long)experts, a->groups);
    if (a->group_score == MT_GROUP_TOP2_SUM && size < 2)
        return op_refuse(error, error_size, "groups of one expert have no two best");
    if (a->top_groups < 1 || a->top_groups > a->groups || a->top_groups * size < a->top_k)
        return op_refuse(error, error_size,
                         "%d of %d groups of %lld experts cannot give %d experts", a->top_groups,
                         a->groups, (long long)size, a->top_k);
    return MT_OK;
}

static mt_status shape(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size)
{
    const mt_router_attr *a = attr;
    int64_t experts = in[0].cols;
    if (in[0].is_param || in[0].kind == MT_KIND_INDEX || !op_row_a_token(&in[0]))
        return op_refuse(error, error_size, "the logits must be an activation with a row a token");
    if (n_in > 1 && op_present(&in[1]) && !op_is_vector(&in[1], experts))
        return op_refuse(error, error_size,
                         "the correction bias must be a vector of %lld elements, one an expert",
                         (long long)experts);
    mt_status st = check_attr(a, experts, error, error_size);
    if (st != MT_OK)
        return st;
    ret->n_out = 3;
    ret->out[0] = (mt_shape){ in[0].rows, a->top_k, MT_KIND_STAT, 0 };
    ret->out[1] = (mt_shape){ in[0].rows, a->top_k, MT_KIND_INDEX, 0 };
    ret->out[2] = (mt_shape){ { 0, 0, 1 }, experts + 1, MT_KIND_INDEX, 0 };
    ret->n_aux = 1; /* the picked experts */
    ret->aux[0] = (mt_shape){ in[0].rows, a->top_k, MT_KIND_INDEX, 0 };
    ret->backward_in = 1u << 0;
    ret->no_grad_in = 1u << 1;
    ret->stat_params = 1u << 1;
    return MT_OK;
}

/* Its results are so small that saving them is always right. */
const mt_op_def op_router = {
    sizeof(mt_op_def), MT_OP_ROUTES, "router", 1, 2, sizeof(mt_router_attr), 0, shape
};
