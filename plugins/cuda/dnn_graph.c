/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of packed documents as a graph of cuDNN operations. The library recognises the whole
 * graph and runs it as one kernel, or a few in backward; the order of the masks and which tensors
 * are virtual are part of what it recognises.
 *
 * Tensors are {documents, heads, rows, dim}. Every document has its own length and starts at its
 * own element ("ragged"), so that documents lie in [tokens, heads * dim] as they are packed.
 * Intermediates are FP32, probabilities and their gradients BF16 where they enter a product.
 */
#include "dnn_graph.h"

#include <string.h>

typedef struct tensor {
    cudnnBackendDescriptor_t d;
} tensor;

typedef struct dims {
    int64_t n[4], stride[4];
} dims;

static const cudnnDataType_t f32 = CUDNN_DATA_FLOAT, bf16 = CUDNN_DATA_BFLOAT16,
                             int32 = CUDNN_DATA_INT32, boolean = CUDNN_DATA_BOOLEAN;

/* ---- descriptors ----------------------------------------------------------------------------- */

bool dnn_check(dnn_graph *g, cudnnStatus_t status, const char *what)
{
    if (status == CUDNN_STATUS_SUCCESS)
        return true;
    if (g->status == CUDNN_STATUS_SUCCESS) {
        g->status = status;
        g->failed = what;
        g->text[0] = 0;
        g->api->cudnnGetLastErrorString(g->text, sizeof g->text);
    }
    return false;
}

cudnnBackendDescriptor_t dnn_descriptor(dnn_graph *g, cudnnBackendDescriptorType_t type)
{
    cudnnBackendDescriptor_t d = NULL;
    if (g->n_made == DNN_MAX_DESCRIPTORS) {
        dnn_check(g, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, "a larger graph");
        return NULL;
    }
    if (dnn_check(g, g->api->cudnnBackendCreateDescriptor(type, &d),
                  "cudnnBackendCreateDescriptor"))
        g->made[g->n_made++] = d;
    return d;
}

void dnn_set(dnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
             cudnnBackendAttributeType_t type, int64_t count, const void *values, const char *what)
{
    if (g->status == CUDNN_STATUS_SUCCESS)
        dnn_check(g, g->api->cudnnBackendSetAttribute(d, name, type, count, values), what);
}

bool dnn_finalize(dnn_graph *g, cudnnBackendDescriptor_t d, const char *what)
{
    if (g->status == CUDNN_STATUS_SUCCESS)
        dnn_check(g, g->api->cudnnBackendFinalize(d), what);
    return g->status == CUDNN_STATUS_SUCCESS;
}

static void set_descriptor(dnn_graph *g, cudnnBackendDescriptor_t d,
                           cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t value,
                           const char *what)
{
    dnn_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value, what);
}
#define SET_DESCRIPTOR(g, d, name, value) set_descriptor(g, d, name, value, #name)

/* ---- tensors --------------------------------------------------------------------------------- */

typedef enum { TENSOR_REAL, TENSOR_VIRTUAL, TENSOR_BY_VALUE } tensor_kind;

static tensor make_tensor(dnn_graph *g, cudnnDataType_t type, const dims *n, int64_t uid,
                          tensor_kind kind, cudnnBackendDescriptor_t starts)
{
    const int64_t alignment = 16;
    const bool yes = true;
    cudnnBackendDescriptor_t d = dnn_descriptor(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    DNN_SET(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    DNN_SET(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, n->n);
    DNN_SET(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, n->stride);
    DNN_SET(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    DNN_SET(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (kind == TENSOR_VIRTUAL)
        DNN_SET(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (kind == TENSOR_BY_VALUE)
        DNN_SET(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (starts)
        SET_DESCRIPTOR(g, d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, starts);
    dnn_finalize(g, d, "a tensor");
    return (tensor){ d };
}

static tensor make_virtual(dnn_graph *g, cudnnDataType_t type, const dims *n)
{
    return make_tensor(g, type, n, DNN_UID_VIRTUAL + g->n_virtual++, TENSOR_VIRTUAL, NULL);
}

static tensor make_scalar(dnn_graph *g, dnn_scalar what)
{
    static const dims one = { { 1, 1, 1, 1 }, { 1, 1, 1, 1 } };
    if (g->n_scalars == DNN_MAX_SCALARS) {
        dnn_check(g, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, "more scalars");
        return (tensor){ NULL };
    }
    g->scalar[g->n_scalars] = what;
    return make_tensor(g, f32, &one, DNN_UID_SCALAR + g->n_scalars++, TENSOR_BY_VALUE, NULL);
}

/* Rows and heads of a packed tensor: {documents, heads, rows, dim}, rows `ld` apart. */
static dims packed(const dnn_shape *s, int which, int64_t heads, int64_t dim)
{
    int64_t ld = s->ld[which];
    return (dims){ { s->documents, heads, s->rows, dim }, { s->rows * ld, dim, ld, 1 } };
}

static dims contiguous(int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (dims){ { a, b, c, d }, { b * c * d, c * d, d, 1 } };
}

/* The last two dimensions change places; memory stays. */
static dims transposed(const dims *n)
{
    return (dims){ { n->n[0], n->n[1], n->n[3], n->n[2] },
                   { n->stride[0], n->stride[1], n->stride[3], n->stride[2] } };
}

/* ---- operations ------------------------------------------------------------------------------ */

static void add_op(dnn_graph *g, cudnnBackendDescriptor_t op, const char *what)
{
    dnn_finalize(g, op, what);
    if (g->n_ops == DNN_MAX_OPS)
        dnn_check(g, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, "more operations");
    else
        g->op[g->n_ops++] = op;
}

static cudnnBackendDescriptor_t pointwise_op(dnn_graph *g, cudnnPointwiseMode_t mode,
                                             cudnnDataType_t math, int64_t axis)
{
    const float one = 1;
    cudnnBackendDescriptor_t how = dnn_descriptor(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    DNN_SET(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    DNN_SET(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &math);
    if (mode == CUDNN_POINTWISE_GEN_INDEX)
        DNN_SET(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    dnn_finalize(g, how, "a pointwise mode");
    cudnnBackendDescriptor_t op = dnn_descriptor(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    DNN_SET(g, op, CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, CUDNN_TYPE_FLOAT, 1, &one);
    DNN_SET(g, op, CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, CUDNN_TYPE_FLOAT, 1, &one);
    return op;
}

/* y = mode(x, b), y = mode(x) where b is NULL. */
static void pointwise_to(dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t math, tensor x,
                         const tensor *b, tensor y)
{
    cudnnBackendDescriptor_t op = pointwise_op(g, mode, math, 0);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.d);
    if (b)
        SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b->d);
    add_op(g, op, "a pointwise operation");
}

static tensor unary(dnn_graph *g, cudnnPointwiseMode_t mode, const dims *n, tensor x)
{
    tensor y = make_virtual(g, f32, n);
    pointwise_to(g, mode, f32, x, NULL, y);
    return y;
}

static tensor binary(dnn_graph *g, cudnnPointwiseMode_t mode, const dims *n, tensor x, tensor b)
{
    tensor y = make_virtual(g, f32, n);
    pointwise_to(g, mode, f32, x, &b, y);
    return y;
}

static tensor logical(dnn_graph *g, cudnnPointwiseMode_t mode, const dims *n, tensor x, tensor b)
{
    tensor y = make_virtual(g, boolean, n);
    pointwise_to(g, mode, boolean, x, &b, y);
    return y;
}

/* Every element's own row (axis 2) or column (axis 3). */
static tensor index_of(dnn_graph *g, const dims *n, tensor x, int64_t axis, cudnnDataType_t math)
{
    tensor y = make_virtual(g, int32, n);
    cudnnBackendDescriptor_t op = pointwise_op(g, CUDNN_POINTWISE_GEN_INDEX, math, axis);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.d);
    add_op(g, op, "an index");
    return y;
}

/* x where the mask says so, else minus infinity. */
static tensor keep(dnn_graph *g, const dims *n, tensor x, tensor mask)
{
    tensor y = make_virtual(g, f32, n), lowest = make_scalar(g, DNN_LOWEST);
    cudnnBackendDescriptor_t op = pointwise_op(g, CUDNN_POINTWISE_BINARY_SELECT, f32, 0);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, lowest.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, mask.d);
    add_op(g, op, "a selection");
    return y;
}

static tensor tanh_backward(dnn_graph *g, const dims *n, tensor dy, tensor x)
{
    tensor dx = make_virtual(g, f32, n);
    cudnnBackendDescriptor_t op = pointwise_op(g, CUDNN_POINTWISE_TANH_BWD, f32, 0);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_DYDESC, dy.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_POINTWISE_DXDESC, dx.d);
    add_op(g, op, "a gradient of tanh");
    return dx;
}

/* c = a b; m, n, k: the lengths of documents that bound each extent, NULL where none does. */
static void matmul(dnn_graph *g, tensor a, tensor b, tensor c, const tensor *m, const tensor *n,
                   const tensor *k)
{
    cudnnBackendDescriptor_t how = dnn_descriptor(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    DNN_SET(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    dnn_finalize(g, how, "a product's type");
    cudnnBackendDescriptor_t op = dnn_descriptor(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    if (m)
        SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, m->d);
    if (n)
        SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, n->d);
    if (k)
        SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, k->d);
    add_op(g, op, "a product");
}

static void reduce_to(dnn_graph *g, cudnnReduceTensorOp_t mode, tensor x, tensor y)
{
    const bool deterministic = false; /* asks for nothing: fused reductions have a fixed order */
    cudnnBackendDescriptor_t how = dnn_descriptor(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    DNN_SET(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    DNN_SET(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    DNN_SET(g, how, CUDNN_ATTR_REDUCTION_IS_DETERMINISTIC, CUDNN_TYPE_BOOLEAN, 1, &deterministic);
    dnn_finalize(g, how, "a reduction's type");
    cudnnBackendDescriptor_t op = dnn_descriptor(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.d);
    add_op(g, op, "a reduction");
}

static tensor reduce(dnn_graph *g, cudnnReduceTensorOp_t mode, const dims *n, tensor x)
{
    tensor y = make_virtual(g, f32, n);
    reduce_to(g, mode, x, y);
    return y;
}

static void reshape(dnn_graph *g, tensor x, tensor y)
{
    cudnnBackendDescriptor_t op = dnn_descriptor(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.d);
    SET_DESCRIPTOR(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.d);
    add_op(g, op, "a reshape");
}

/* ---- attention ------------------------------------------------------------------------------- */

/* What forward and backward share. */
typedef struct attention {
    dnn_graph *g;
    const dnn_shape *s;
    dims scores, column; /* {documents, heads, rows, rows}, {documents, heads, rows, 1} */
    cudnnBackendDescriptor_t starts[DNN_TENSORS];
    tensor lengths_q, lengths_k;
    tensor scale, cap;
    tensor before_tanh;
} attention;

static tensor packed_tensor(const attention *a, int which, const dims *n)
{
    bool wide = which == DNN_LSE || which == DNN_DQ_SUM;
    return make_tensor(a->g, wide ? f32 : bf16, n, DNN_UID_TENSOR + which, TENSOR_REAL,
                       a->starts[which]);
}

static tensor softcap(attention *a, tensor x)
{
    dnn_graph *g = a->g;
    a->before_tanh = binary(g, CUDNN_POINTWISE_DIV, &a->scores, x, a->cap);
    tensor t = unary(g, CUDNN_POINTWISE_TANH_FWD, &a->scores, a->before_tanh);
    return binary(g, CUDNN_POINTWISE_MUL, &a->scores, t, a->cap);
}

static tensor softcap_backward(const attention *a, tensor d)
{
    dnn_graph *g = a->g;
    d = binary(g, CUDNN_POINTWISE_MUL, &a->scores, d, a->cap);
    d = tanh_backward(g, &a->scores, d, a->before_tanh);
    return binary(g, CUDNN_POINTWISE_DIV, &a->scores, d, a->cap);
}

/* Rows and columns of the document itself. */
static tensor mask_padding(const attention *a, tensor x)
{
    dnn_graph *g = a->g;
    const dims *n = &a->scores;
    tensor row = index_of(g, n, x, 2, int32), col = index_of(g, n, x, 3, int32);
    tensor rows = logical(g, CUDNN_POINTWISE_CMP_LT, n, row, a->lengths_q);
    tensor cols = logical(g, CUDNN_POINTWISE_CMP_LT, n, col, a->lengths_k);
    return keep(g, n, x, logical(g, CUDNN_POINTWISE_LOGICAL_AND, n, rows, cols));
}

/* Keys up to the query's own; of these the last `window` where there is one. */
static tensor mask_band(const attention *a, tensor x)
{
    dnn_graph *g = a->g;
    const dims *n = &a->scores;
    tensor row = index_of(g, n, x, 2, f32), col = index_of(g, n, x, 3, f32);
    x = keep(g, n, x, logical(g, CUDNN_POINTWISE_CMP_GE, n, row, col));
    if (!a->s->window)
        return x;
    row = index_of(g, n, x, 2, f32);
    col = index_of(g, n, x, 3, f32);
    tensor reach = binary(g, CUDNN_POINTWISE_ADD, n, col, make_scalar(g, DNN_WINDOW));
    return keep(g, n, x, logical(g, CUDNN_POINTWISE_CMP_GT, n, reach, row));
}

/* Scaled, capped scores with the padding masked. */
static tensor scores_of(attention *a, tensor q, tensor k_transposed)
{
    dnn_graph *g = a->g;
    tensor x = make_virtual(g, f32, &a->scores);
    matmul(g, q, k_transposed, x, &a->lengths_q, &a->lengths_k, NULL);
    x = binary(g, CUDNN_POINTWISE_MUL, &a->scores, x, a->scale);
    if (a->s->softcap)
        x = softcap(a, x);
    return mask_padding(a, x);
}

static void forward(attention *a)
{
    dnn_graph *g = a->g;
    const dnn_shape *s = a->s;
    dims q_dims = packed(s, DNN_Q, s->heads, s->qk_dim),
         k_dims = packed(s, DNN_K, s->kv_heads, s->qk_dim), kt_dims = transposed(&k_dims),
         v_dims = packed(s, DNN_V, s->kv_heads, s->v_dim),
         out_dims = packed(s, DNN_OUT, s->heads, s->v_dim),
         lse_dims = packed(s, DNN_LSE, s->heads, 1);
    tensor q = packed_tensor(a, DNN_Q, &q_dims), k = packed_tensor(a, DNN_K, &kt_dims);
    tensor v = packed_tensor(a, DNN_V, &v_dims), out = packed_tensor(a, DNN_OUT, &out_dims);
    tensor lse = packed_tensor(a, DNN_LSE, &lse_dims);
    tensor x = mask_band(a, scores_of(a, q, k));
    tensor top = reduce(g, CUDNN_REDUCE_TENSOR_MAX, &a->column, x);
    x = binary(g, CUDNN_POINTWISE_SUB, &a->scores, x, top);
    x = unary(g, CUDNN_POINTWISE_EXP, &a->scores, x);
    tensor sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, &a->column, x);
    tensor log = unary(g, CUDNN_POINTWISE_LOG, &a->column, sum);
    pointwise_to(g, CUDNN_POINTWISE_ADD, f32, top, &log, lse);
    tensor p = make_virtual(g, bf16, &a->scores);
    pointwise_to(g, CUDNN_POINTWISE_DIV, f32, x, &sum, p);
    matmul(g, p, v, out, &a->lengths_q, NULL, &a->lengths_k);
}

/* d = x^T y, summed over the query heads of a key head; x is FP32 scores, y a packed tensor. */
static void key_gradient(const attention *a, tensor x, tensor y, int64_t dim, tensor d)
{
    dnn_graph *g = a->g;
    const dnn_shape *s = a->s;
    dims across = transposed(&a->scores);
    tensor xt = make_virtual(g, bf16, &across);
    reshape(g, x, xt);
    if (s->heads == s->kv_heads) {
        matmul(g, xt, y, d, &a->lengths_k, NULL, &a->lengths_q);
        return;
    }
    dims all = contiguous(s->documents, s->heads, s->rows, dim);
    tensor of_heads = make_virtual(g, bf16, &all);
    matmul(g, xt, y, of_heads, &a->lengths_k, NULL, &a->lengths_q);
    reduce_to(g, CUDNN_REDUCE_TENSOR_ADD, of_heads, d);
}

/* Without an FP32 accumulator for dQ the gradient of the scores goes through memory, and no sum
 * depends on which block comes first: the same bits every time. With it blocks add to dQ as they
 * come, which is faster and takes no memory that grows with the square of the rows. */
static void backward(attention *a)
{
    dnn_graph *g = a->g;
    const dnn_shape *s = a->s;
    dims q_dims = packed(s, DNN_Q, s->heads, s->qk_dim),
         k_dims = packed(s, DNN_K, s->kv_heads, s->qk_dim), kt_dims = transposed(&k_dims),
         v_dims = packed(s, DNN_V, s->kv_heads, s->v_dim), vt_dims = transposed(&v_dims),
         out_dims = packed(s, DNN_OUT, s->heads, s->v_dim),
         lse_dims = packed(s, DNN_LSE, s->heads, 1),
         d_out_dims = packed(s, DNN_D_OUT, s->heads, s->v_dim),
         dq_dims = packed(s, DNN_DQ, s->heads, s->qk_dim),
         dk_dims = packed(s, DNN_DK, s->kv_heads, s->qk_dim),
         dv_dims = packed(s, DNN_DV, s->kv_heads, s->v_dim),
         rows_dims = contiguous(s->documents, s->heads, s->rows, s->v_dim);
    tensor q = packed_tensor(a, DNN_Q, &q_dims), kt = packed_tensor(a, DNN_K, &kt_dims);
    tensor vt = packed_tensor(a, DNN_V, &vt_dims), out = packed_tensor(a, DNN_OUT, &out_dims);
    tensor lse = packed_tensor(a, DNN_LSE, &lse_dims);
    tensor d_out = packed_tensor(a, DNN_D_OUT, &d_out_dims);
    tensor dq = packed_tensor(a, DNN_DQ, &dq_dims), dk = packed_tensor(a, DNN_DK, &dk_dims);
    tensor dv = packed_tensor(a, DNN_DV, &dv_dims);
    tensor one = make_scalar(g, DNN_ONE);

    tensor x = binary(g, CUDNN_POINTWISE_MUL, &rows_dims, d_out, out);
    x = reduce(g, CUDNN_REDUCE_TENSOR_ADD, &a->column, x);
    tensor sums = make_tensor(g, f32, &a->column, DNN_UID_SUMS, TENSOR_REAL, NULL);
    pointwise_to(g, CUDNN_POINTWISE_MUL, f32, x, &one, sums);

    x = scores_of(a, q, kt);
    x = binary(g, CUDNN_POINTWISE_SUB, &a->scores, x, lse);
    tensor p = unary(g, CUDNN_POINTWISE_EXP, &a->scores, mask_band(a, x));
    key_gradient(a, p, d_out, s->v_dim, dv);

    x = make_virtual(g, f32, &a->scores);
    matmul(g, d_out, vt, x, &a->lengths_q, &a->lengths_k, NULL);
    x = binary(g, CUDNN_POINTWISE_SUB, &a->scores, x, sums);
    x = binary(g, CUDNN_POINTWISE_MUL, &a->scores, x, p);
    if (s->softcap)
        x = softcap_backward(a, x);
    x = binary(g, CUDNN_POINTWISE_MUL, &a->scores, x, a->scale);
    key_gradient(a, x, q, s->qk_dim, dk);

    tensor k = make_tensor(g, bf16, &k_dims, DNN_UID_VIRTUAL + g->n_virtual++, TENSOR_VIRTUAL,
                           a->starts[DNN_K]);
    reshape(g, kt, k);
    tensor to = dq;
    if (s->any_order) {
        const dims sum_dims = packed(s, DNN_DQ_SUM, s->heads, s->qk_dim);
        to = packed_tensor(a, DNN_DQ_SUM, &sum_dims);
    }
    matmul(g, x, k, to, &a->lengths_q, NULL, &a->lengths_k);
    if (s->any_order)
        pointwise_to(g, CUDNN_POINTWISE_IDENTITY, f32, to, NULL, dq);
}

/* A gradient goes by its operand's table where rows are equally far apart. */
static void make_starts(attention *a)
{
    static const int like[DNN_TENSORS] = { DNN_Q,   DNN_K, DNN_V, DNN_OUT, DNN_LSE,
                                           DNN_OUT, DNN_Q, DNN_K, DNN_V,   DNN_Q };
    const dnn_shape *s = a->s;
    const dims n = { { s->documents + 1, 1, 1, 1 }, { 1, 1, 1, 1 } };
    for (int i = 0; i < dnn_tensors(s); i++) {
        int of = s->ld[i] == s->ld[like[i]] ? like[i] : i;
        a->g->starts_of[i] = of;
        a->starts[i] =
            of < i
                ? a->starts[of]
                : make_tensor(a->g, CUDNN_DATA_INT64, &n, DNN_UID_STARTS + i, TENSOR_REAL, NULL).d;
    }
}

bool dnn_graph_init(dnn_graph *ret, const dnn_api *api, cudnnHandle_t handle, const dnn_shape *s)
{
    *ret = (dnn_graph){ .api = api };
    dnn_graph *g = ret;
    attention a = { .g = g, .s = s };
    const dims lengths = { { s->documents, 1, 1, 1 }, { 1, 1, 1, 1 } };
    a.scores = contiguous(s->documents, s->heads, s->rows, s->rows);
    a.column = contiguous(s->documents, s->heads, s->rows, 1);
    make_starts(&a);
    a.lengths_q = make_tensor(g, int32, &lengths, DNN_UID_LENGTHS_Q, TENSOR_REAL, NULL);
    a.lengths_k = make_tensor(g, int32, &lengths, DNN_UID_LENGTHS_K, TENSOR_REAL, NULL);
    a.scale = make_scalar(g, DNN_SCALE);
    if (s->softcap)
        a.cap = make_scalar(g, DNN_SOFTCAP);
    if (s->backward)
        backward(&a);
    else
        forward(&a);
    g->graph = dnn_descriptor(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    DNN_SET(g, g->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops,
            g->op);
    if (handle)
        DNN_SET(g, g->graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    return dnn_finalize(g, g->graph, "the operation graph");
}

void dnn_graph_finish(dnn_graph *g)
{
    while (g->n_made > 0)
        (void)g->api->cudnnBackendDestroyDescriptor(g->made[--g->n_made]);
}
