/* SPDX-License-Identifier: Apache-2.0
 *
 * Describing a layer once, without weights: parameters, operations, and what an operation is.
 *
 * An architecture calls these functions from a build function (arch.h). Nothing is computed: the
 * core records a graph and derives from it the backward, the parameter layout, what is saved for
 * backward, the memory plan and the FLOP count. Values are [tokens, cols]; there is no batch
 * dimension and no pad token.
 *
 * Errors are sticky: after the first one every call returns MT_NONE and the build fails with the
 * first text, so a build function needs no checks of its own.
 */
#ifndef MEGATRAIN_TEMPLATE_H
#define MEGATRAIN_TEMPLATE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A value of the graph: an activation or a parameter. */
typedef int32_t mt_val;
#define MT_NONE (-1) /* "no bias", "no sinks" */

enum {
    MT_OP_MAX_IN = 8,
    MT_OP_MAX_OUT = 4,
    MT_OP_MAX_AUX = 4,
    MT_OP_MAX_STATE = 2,
    MT_UNIT_MAX_IO = 4,
    MT_ROPE_MAX_FREQ = 256
};

/* ---- parameters --------------------------------------------------------------------------- */

typedef int32_t mt_init;
enum {
    MT_INIT_ZEROS = 0,
    MT_INIT_ONES = 1,
    MT_INIT_NORMAL = 2,   /* N(0, init_std) */
    MT_INIT_LOG_DECAY = 3 /* ln of U(0.01, 16): the rates of a recurrent state's decay */
};

enum {
    MT_PARAM_NO_DECAY = 1u << 0, /* weight decay does not touch it; set for every vector */
    MT_PARAM_FROZEN = 1u << 1,   /* no gradient, no optimizer state */
    MT_PARAM_ALIAS = 1u << 2,    /* `name` is a full name that another unit owns (tied head) */
    /* The device gets it in the statistics dtype, whatever it computes in: for few numbers of which
     * the upper half does not say enough. Only operations that say so take it
     * (mt_op_shape::stat_params). */
    MT_PARAM_STREAM_F32 = 1u << 3
};

enum {
    /* Each matrix stands transposed in the file: [cols, rows], (in, out). */
    MT_SOURCE_TRANSPOSED = 1u << 0,
    /* Each matrix stands as [rows, 1, cols]: the weight of a depthwise convolution. */
    MT_SOURCE_MIDDLE_ONE = 1u << 1
};

/* A tensor of a checkpoint, or a part of its rows, and the rows of the parameter that it fills; the
 * same description imports and exports. `name` lacks the unit's prefix. Where the parameter is a
 * stack of matrices (mt_param_info::stack) and the name contains "{}", there is one tensor for
 * each,
 * "{}" standing for its index: [rows, cols]. Without "{}" one tensor holds them all: [stack, rows,
 * cols]. Below, "row" is a row of one matrix; for vectors, stacked or not, an element of one vector
 * (tensors are then [n] or [stack, n]).
 *
 * Row t of n_rows rows, t = 0 .. n_rows-1, is the parameter's row first_row + t and the tensor's
 * row from_row + t / block * step + t % block. GPT-OSS's gate_up_proj has gate rows at 0, 2, 4 ...
 * and up rows at 1, 3, 5 ...: { .n_rows = I, .step = 2 } and { .first_row = I, .n_rows = I,
 * .from_row = 1, .step = 2 }, both of the same name. A tensor may also be shared by several
 * parameters of a unit (a packed qkv_proj). All its rows are used exactly once, and so its shape
 * follows. */
typedef struct mt_source {
    const char *name;
    uint32_t flags; /* MT_SOURCE_* */
    uint32_t reserved;
    int64_t first_row, n_rows; /* of each of the parameter's matrices; n_rows 0: to the last */
    int64_t from_row;          /* of the tensor */
    int64_t block, step;       /* blocks of `block` rows (0: 1) start `step` apart (0: `block`) */
} mt_source;

/* One way in which a parameter may stand in a checkpoint: sources that fill each of its rows once.
 */
typedef struct mt_param_layout {
    const mt_source *sources;
    uint32_t n_sources;
    uint32_t reserved;
} mt_param_layout;

/* A parameter as an architecture declares it. `name` is the Hugging Face tensor name without the
 * unit's prefix (the full name for an alias). A vector has rows == 0 and shape [cols] in a
 * checkpoint, a matrix has shape [rows, cols] = [out, in]. */
typedef struct mt_param_info {
    uint32_t struct_size;
    uint32_t flags;
    const char *name;
    int64_t rows;
    int64_t cols;
    mt_init init;
    float init_std;
    /* Number of equal matrices or vectors (experts) stacked by rows; 0: no stack. The parameter is
     * [stack, rows / stack, cols] in truth; rows == stack says that it is a stack of vectors,
     * [stack, cols], which weight decay does not touch. */
    int64_t stack;
    /* How it may stand in a checkpoint. Loading takes the first layout of which all tensors are
     * there, export writes layouts[0]. None: a tensor of its own name and shape. Copied. */
    const mt_param_layout *layouts;
    uint32_t n_layouts;
    uint32_t reserved;
} mt_param_info;

/* ---- attributes of the built-in operations -------------------------------------------------- */

typedef int32_t mt_norm_variant;
enum {
    MT_NORM_ROUND_THEN_SCALE = 0, /* y = w * R(x r): Llama, Mistral, Qwen2/3, DeepSeek */
    MT_NORM_FP32_SCALE = 1,       /* y = R(w x r): GPT-OSS */
    MT_NORM_ONE_PLUS = 2          /* y = R((1 + w) x r): Gemma, Qwen3-Next */
};

/* "rmsnorm": in x [T, heads*n], w [n]; out y like x. Each of the `heads` groups of n columns of a
 * row is normalised by itself (heads = 1: the whole row). R is the rounding to the compute dtype,
 * r = rsqrt(mean(x^2) + eps), statistics FP32. */
typedef struct mt_rmsnorm_attr {
    double eps;
    mt_norm_variant variant;
    int32_t heads;
} mt_rmsnorm_attr;

/* "scale": y = x * factor, the factor first rounded to the compute dtype (Gemma's embedding). */
typedef struct mt_scale_attr {
    double factor;
} mt_scale_attr;

typedef int32_t mt_activation;
enum {
    MT_ACT_SILU = 0,
    MT_ACT_GELU_TANH = 1,
    MT_ACT_SIGMOID = 2,
    MT_ACT_CLAMPED_SWIGLU = 3 /* only in "glu": GPT-OSS, (up+1) * g * sigmoid(1.702 g), clamps */
};

/* "act": y = f(x). "glu": in gate, up [T, n]; y = f(gate) * up. */
typedef struct mt_act_attr {
    mt_activation kind;
    int32_t reserved;
    double limit; /* MT_ACT_CLAMPED_SWIGLU only */
} mt_act_attr;

typedef int32_t mt_rope_pairing;
enum {
    MT_ROPE_HALF_SPLIT = 0, /* pairs (i, i + rotary_dim/2) */
    MT_ROPE_INTERLEAVED = 1 /* pairs (2i, 2i + 1): DeepSeek MLA */
};

/* "rope": in x [T, heads*head_dim]; rotates the first rotary_dim columns of every head by
 * inv_freq[i] * position; angles, cos and sin in FP32 as the reference forms them, both times
 * `attention_factor`. growth > 0: y is also multiplied by
 * 1 + growth * ln(1 + floor(position / growth_positions)), all columns of it (Ministral 3's
 * queries). Fill it with mt_model_rope (arch.h), then set `heads`. */
typedef struct mt_rope_attr {
    int32_t heads;
    int32_t head_dim;
    int32_t rotary_dim;
    mt_rope_pairing pairing;
    float attention_factor;
    float inv_freq[MT_ROPE_MAX_FREQ]; /* rotary_dim / 2 entries */
    float growth;                     /* 0: none */
    int32_t growth_positions;
} mt_rope_attr;

/* "attention": in q [T, heads*qk_dim], k [T, kv_heads*qk_dim], v [T, kv_heads*v_dim], optional
 * sinks [heads]; out [T, heads*v_dim]; aux lse [T, heads] (natural log, statistics dtype).
 * Causal inside each document, never across. s = scale * q.k; softcap > 0: s = cap * tanh(s/cap)
 * before the mask; window > 0: keys j > i - window (window keys, self included). */
typedef struct mt_attn_attr {
    int32_t heads;
    int32_t kv_heads;
    int32_t qk_dim;
    int32_t v_dim;
    double scale;
    double softcap;
    int64_t window;
} mt_attn_attr;

/* "linear_cross_entropy": in x [T, hidden], w [vocab, hidden]; out loss [T, 1] in the statistics
 * dtype, the negative log likelihood of each target, 0 where the target is ignored. Logits are
 * formed in chunks and never stored whole. softcap > 0: logits = cap * tanh(logits/cap).
 * In a train pass the gradients are formed while the logits exist (MT_OP_GRAD_IN_FORWARD). In
 * prefill and decode passes it writes the logits of the rows that the batch asks for. */
typedef struct mt_xent_attr {
    double softcap;
} mt_xent_attr;

typedef int32_t mt_router_scoring;
enum {
    MT_ROUTER_SOFTMAX = 0, /* p = softmax over all experts */
    MT_ROUTER_SIGMOID = 1  /* p = sigmoid, each expert by itself: DeepSeek V3 */
};

typedef int32_t mt_group_score;
enum {
    MT_GROUP_MAX = 0,     /* best expert: DeepSeek V2 */
    MT_GROUP_TOP2_SUM = 1 /* sum of the two best: DeepSeek V3 */
};

/* "router": in logits [T, E] (compute or statistics dtype), optional correction bias [E] (either),
 * which gets no gradient (declare it frozen). Picks top_k experts of each token by p + bias, the
 * lower index on a tie. groups > 1: experts are cut into as many equal groups, of which only the
 * top_groups with the best group_score take part. Out:
 *   0 weights [T, k], statistics dtype: p of the picked (without the bias), best expert first;
 *     renormalise: divided by their sum (+ 1e-20), which for a softmax is the softmax of the picked
 *     logits (Mixtral, GPT-OSS); then times scale.
 *   1 slots [T, k], int32: the row that each token's j-th pick has among all T * k rows ordered by
 *     expert, then by token: a permutation.
 *   2 offsets [1, E + 1], int32: rows [offsets[e], offsets[e + 1]) belong to expert e.
 * aux experts [T, k], int32. Everything else is computed in the statistics dtype or better. */
typedef struct mt_router_attr {
    int32_t top_k;
    mt_router_scoring scoring;
    int32_t renormalise; /* 0 or 1 */
    int32_t groups;      /* 0 and 1: none */
    int32_t top_groups;
    mt_group_score group_score;
    double scale; /* above 0; 1 for most */
} mt_router_attr;

/* "dispatch": in x [T, n], slots [T, k]; out [T*k, n]: each token's row copied to its k slots.
 * Backward sums them in the order of the picks.
 * "grouped_linear": in x [T*k, in] ordered by expert, w [E*out, in] (the experts' [out, in] stacked
 * by rows), offsets [1, E + 1], optional bias [E, out]; out [T*k, out]: rows of expert e times its
 * part of w. An expert without rows gets a zero gradient.
 * "combine": in y [T*k, n], weights [T, k], slots [T, k]; out [T, n]: sum over the picks, in their
 * order, of weight times row. None of the three has attributes. */

typedef int32_t mt_balance_mode;
enum {
    /* Each layer by itself, means over the micro-batch: E sum_e F_e P_e, F_e = rows of expert e a
     * token, P_e = mean of p; k when balanced (Switch Transformer, arXiv 2101.03961, equation 4,
     * for k experts a token). */
    MT_BALANCE_HF_PER_LAYER = 0,
    /* Each document by itself, as DeepSeek's seq_aux: E/k sum_e F_e P_e over the document's tokens;
     * 1 when balanced. Documents weigh as many tokens as they have targets. */
    MT_BALANCE_DEEPSEEK_SEQ = 1,
    /* That of HF_PER_LAYER with the means taken over the tokens of all layers at once, as
     * load_balancing_loss_func of transformers takes them. Layers may then make up for each other.
     */
    MT_BALANCE_HF_ALL_LAYERS = 2
};

/* "balance_loss": in logits [T, E], slots [T, k], offsets [1, E + 1] of a router; out loss [1, 1],
 * statistics dtype: coef times the above, times the targets (of the micro-batch, of each document)
 * that it speaks for, so that over a step it is a mean by tokens like the model's own loss.
 * p = softmax of all logits. Does nothing in prefill and decode passes.
 *
 * HF_ALL_LAYERS: out is what the loss of the layers so far gains by this one, and so all of them
 * add up to that over all layers. Tally (mt_op_shape) [2 E + 1]: rows of each expert, sum of p of
 * each, tokens. */
typedef struct mt_balance_attr {
    mt_balance_mode mode;
    int32_t reserved;
    double coef; /* above 0 */
} mt_balance_attr;

/* Doubles of its tally. [pure] */
static inline int64_t mt_balance_tally(mt_balance_mode mode, int64_t experts)
{
    return mode == MT_BALANCE_HF_ALL_LAYERS ? 2 * experts + 1 : 0;
}

/* "causal_conv": in x [T, n], w [n, width]; out like x: y[t, c] = sum over j < width of
 * w[c, j] x[t - width + 1 + j, c], each column by itself, with zeros before the start of a
 * document. No attributes.
 *
 * "log_decay": in a, [T, heads], a_log [heads], dt_bias [heads]; out [T, heads], statistics dtype:
 * -e^a_log softplus(a + dt_bias), the log of what a recurrent state is multiplied by (Mamba 2,
 * arXiv 2405.21060; Gated DeltaNet, arXiv 2412.06464). No attributes. */

/* "gated_delta": the gated delta rule (arXiv 2412.06464, equation 10). In q, k [T, k_heads*k_dim],
 * v [T, v_heads*v_dim], g [T, v_heads], the log of the decay, not above 0, in the statistics dtype,
 * beta [T, v_heads]; out o [T, v_heads*v_dim]. Every k head serves v_heads / k_heads v heads that
 * follow each other; a v head has a state S [k_dim, v_dim], 0 at the start of a document, FP32 or
 * better. With q and k of each head divided by sqrt(sum of squares + eps), and q times scale:
 *   S' = e^g S_t-1;  S_t = S' + k (beta (v - S'^T k))^T;  o = S_t^T q.
 * aux: for backward the state before every MT_DELTA_CHUNK tokens of a document, see
 * mt_delta_slot. */
typedef struct mt_delta_attr {
    int32_t k_heads, v_heads;
    int32_t k_dim, v_dim;
    double eps;
    double scale;
} mt_delta_attr;

enum { MT_DELTA_CHUNK = 64 };

/* The states of gated_delta's aux lie one after the other, each [v_heads, k_dim, v_dim]: the number
 * of the one before the first token of document d, which starts at token `start` of the
 * micro-batch. Those of its later chunks follow. */
static inline int64_t mt_delta_slot(int64_t d, int64_t start)
{
    return d + start / MT_DELTA_CHUNK;
}

/* "slice": in x [T, heads*n]; out [T, heads*cols]: columns [first, first + cols) of every head. A
 * slice of whole rows (heads = 1) costs nothing where the slices of x cover it exactly and nothing
 * else reads x. */
typedef struct mt_slice_attr {
    int32_t heads;
    int32_t reserved;
    int64_t first;
    int64_t cols;
} mt_slice_attr;

/* "concat": in 1 to 8 values; out, for every head, cols[i] columns of each operand i's head, one
 * after the other. Bit i of `shared`: operand i [T, cols[i]] is one head that all heads share
 * (MLA's rotary key), and its gradient the sum over heads in their order; else it is [T,
 * heads*cols[i]]. */
typedef struct mt_concat_attr {
    int32_t heads;
    uint32_t shared;
    int32_t cols[MT_OP_MAX_IN];
} mt_concat_attr;

/* ---- the builder ---------------------------------------------------------------------------- */

typedef struct mt_builder mt_builder;

typedef struct mt_builder_api {
    uint32_t struct_size;
    mt_val (*input)(mt_builder *b, uint32_t index, int64_t cols);
    void (*output)(mt_builder *b, uint32_t index, mt_val v);
    mt_val (*param)(mt_builder *b, const mt_param_info *info);
    /* Adds operation `op` (an id such as "rmsnorm"); attr may be NULL, is copied. MT_NONE is
     * allowed among `in` for optional operands. Fills ret_out with n_out values. */
    void (*op)(mt_builder *b, const char *op, const mt_val *in, uint32_t n_in, const void *attr,
               size_t attr_size, mt_val *ret_out, uint32_t n_out);
    /* Makes the build fail with a text of the architecture's own. */
    void (*fail)(mt_builder *b, const char *fmt, ...) MT_PRINTF(2, 3);
} mt_builder_api;

struct mt_builder {
    const mt_builder_api *api;
};

/* Value `index` of the tuple that the unit receives from the unit below, [T, cols]. [main] */
static inline mt_val mt_input(mt_builder *b, uint32_t index, int64_t cols)
{
    return b->api->input(b, index, cols);
}

/* Makes v value `index` of the tuple that the unit passes on (for the last unit: the loss). [main]
 */
static inline void mt_output(mt_builder *b, uint32_t index, mt_val v)
{
    b->api->output(b, index, v);
}

/* A [rows, cols] weight, N(0, std) at initialisation, decayed. [main] */
static inline mt_val mt_matrix(mt_builder *b, const char *name, int64_t rows, int64_t cols,
                               double std)
{
    mt_param_info p = { sizeof p, 0, name, rows, cols, MT_INIT_NORMAL, (float)std, 0, NULL, 0, 0 };
    return b->api->param(b, &p);
}

/* A [n] weight (norm, bias) with a constant initial value, never decayed. [main] */
static inline mt_val mt_vector(mt_builder *b, const char *name, int64_t n, mt_init init)
{
    mt_param_info p = { sizeof p, MT_PARAM_NO_DECAY, name, 0, n, init, 0.0f, 0, NULL, 0, 0 };
    return b->api->param(b, &p);
}

/* A [n] weight like mt_vector that the device gets in FP32 (MT_PARAM_STREAM_F32). [main] */
static inline mt_val mt_exact_vector(mt_builder *b, const char *name, int64_t n, mt_init init)
{
    mt_param_info p = {
        sizeof p, MT_PARAM_NO_DECAY | MT_PARAM_STREAM_F32, name, 0, n, init, 0.0f, 0, NULL, 0, 0
    };
    return b->api->param(b, &p);
}

/* A [rows, cols] weight that another unit owns, by its full name; gradients of all uses are summed
 * before the one update. [main] */
static inline mt_val mt_alias(mt_builder *b, const char *full_name, int64_t rows, int64_t cols)
{
    mt_param_info p = { sizeof p, MT_PARAM_ALIAS, full_name, rows, cols, MT_INIT_ZEROS, 0.0f,
                        0,        NULL,           0,         0 };
    return b->api->param(b, &p);
}

/* `stack` matrices [rows, cols] as one weight [stack * rows, cols], N(0, std), decayed: all experts
 * of a layer. `layouts` says where they stand in a checkpoint (mt_param_info); it and what it
 * points to are copied. Mixtral's gate and up projections of width I, stacked gate over up:
 *
 *   mt_source w[2] = { { .name = "block_sparse_moe.experts.{}.w1.weight", .n_rows = I },
 *                      { .name = "block_sparse_moe.experts.{}.w3.weight", .first_row = I } };
 *   mt_source fused[1] = { { .name = "mlp.experts.gate_up_proj" } };
 *   mt_param_layout l[2] = { { w, 2, 0 }, { fused, 1, 0 } };
 *   mt_val gate_up = mt_stacked(b, "mlp.experts.gate_up_proj", E, 2 * I, H, std, l, 2);
 * [main] */
static inline mt_val mt_stacked(mt_builder *b, const char *name, int64_t stack, int64_t rows,
                                int64_t cols, double std, const mt_param_layout *layouts,
                                uint32_t n_layouts)
{
    mt_param_info p = { sizeof p,   0,     name,    stack * rows, cols, MT_INIT_NORMAL,
                        (float)std, stack, layouts, n_layouts,    0 };
    return b->api->param(b, &p);
}

/* `stack` vectors [n] as one weight [stack, n] (the experts' biases), never decayed. [main] */
static inline mt_val mt_stacked_vectors(mt_builder *b, const char *name, int64_t stack, int64_t n,
                                        mt_init init, const mt_param_layout *layouts,
                                        uint32_t n_layouts)
{
    mt_param_info p = { sizeof p, MT_PARAM_NO_DECAY, name,      stack, n, init, 0.0f,
                        stack,    layouts,           n_layouts, 0 };
    return b->api->param(b, &p);
}

/* A matrix, or a vector where rows is 0, of which checkpoints hold something else than a tensor of
 * its own name and shape. [main] */
static inline mt_val mt_laid_out(mt_builder *b, const char *name, int64_t rows, int64_t cols,
                                 mt_init init, double std, const mt_param_layout *layouts,
                                 uint32_t n_layouts)
{
    mt_param_info p = { sizeof p, 0, name, rows, cols, init, (float)std, 0, layouts, n_layouts, 0 };
    return b->api->param(b, &p);
}

static inline mt_val mt_op1_(mt_builder *b, const char *op, const mt_val *in, uint32_t n_in,
                             const void *attr, size_t attr_size)
{
    mt_val out = MT_NONE;
    b->api->op(b, op, in, n_in, attr, attr_size, &out, 1);
    return out;
}

/* Rows of w [vocab, n] picked by the batch's token ids: [T, n]. [main] */
static inline mt_val mt_embedding(mt_builder *b, mt_val w)
{
    return mt_op1_(b, "embedding", &w, 1, NULL, 0);
}

/* y = x w^T + bias; w [out, in], bias [out] or MT_NONE. Linears that share x and stand next to each
 * other become one GEMM. [main] */
static inline mt_val mt_linear(mt_builder *b, mt_val x, mt_val w, mt_val bias)
{
    mt_val in[3] = { x, w, bias };
    return mt_op1_(b, "linear", in, 3, NULL, 0);
}

/* y = x w^T in the statistics dtype, from products and sums that are not rounded to the compute
 * dtype: for values that a choice hangs on. In backward what comes in is rounded to it first.
 * [main] */
static inline mt_val mt_exact_linear(mt_builder *b, mt_val x, mt_val w)
{
    mt_val in[2] = { x, w };
    return mt_op1_(b, "exact_linear", in, 2, NULL, 0);
}

static inline mt_val mt_rmsnorm(mt_builder *b, mt_val x, mt_val w, const mt_rmsnorm_attr *attr)
{
    mt_val in[2] = { x, w };
    return mt_op1_(b, "rmsnorm", in, 2, attr, sizeof *attr);
}

static inline mt_val mt_add(mt_builder *b, mt_val x, mt_val y)
{
    mt_val in[2] = { x, y };
    return mt_op1_(b, "add", in, 2, NULL, 0);
}

static inline mt_val mt_mul(mt_builder *b, mt_val x, mt_val y)
{
    mt_val in[2] = { x, y };
    return mt_op1_(b, "mul", in, 2, NULL, 0);
}

static inline mt_val mt_scale(mt_builder *b, mt_val x, double factor)
{
    mt_scale_attr attr = { factor };
    return mt_op1_(b, "scale", &x, 1, &attr, sizeof attr);
}

static inline mt_val mt_act(mt_builder *b, mt_val x, const mt_act_attr *attr)
{
    return mt_op1_(b, "act", &x, 1, attr, sizeof *attr);
}

static inline mt_val mt_glu(mt_builder *b, mt_val gate, mt_val up, const mt_act_attr *attr)
{
    mt_val in[2] = { gate, up };
    return mt_op1_(b, "glu", in, 2, attr, sizeof *attr);
}

static inline mt_val mt_rope(mt_builder *b, mt_val x, const mt_rope_attr *attr, int32_t heads)
{
    mt_rope_attr a = *attr;
    a.heads = heads;
    return mt_op1_(b, "rope", &x, 1, &a, sizeof a);
}

static inline mt_val mt_attention(mt_builder *b, mt_val q, mt_val k, mt_val v, mt_val sinks,
                                  const mt_attn_attr *attr)
{
    mt_val in[4] = { q, k, v, sinks };
    return mt_op1_(b, "attention", in, 4, attr, sizeof *attr);
}

static inline mt_val mt_linear_cross_entropy(mt_builder *b, mt_val x, mt_val w,
                                             const mt_xent_attr *attr)
{
    mt_val in[2] = { x, w };
    return mt_op1_(b, "linear_cross_entropy", in, 2, attr, sizeof *attr);
}

/* What a router decided, for the operations that follow it. */
typedef struct mt_routing {
    mt_val weights; /* [T, k] */
    mt_val slots;   /* [T, k] */
    mt_val offsets; /* [1, E + 1] */
} mt_routing;

/* Sends each token to attr->top_k of the experts; bias [E] (frozen) or MT_NONE. [main] */
static inline mt_routing mt_router(mt_builder *b, mt_val logits, mt_val bias,
                                   const mt_router_attr *attr)
{
    mt_val in[2] = { logits, bias }, out[3];
    b->api->op(b, "router", in, 2, attr, sizeof *attr, out, 3);
    mt_routing r = { out[0], out[1], out[2] };
    return r;
}

/* The rows that the experts work on, [T*k, n] from x [T, n]. [main] */
static inline mt_val mt_dispatch(mt_builder *b, mt_val x, const mt_routing *r)
{
    mt_val in[2] = { x, r->slots };
    return mt_op1_(b, "dispatch", in, 2, NULL, 0);
}

/* Each expert's linear on its rows of x [T*k, in]; w [E*out, in], bias [E, out] or MT_NONE. [main]
 */
static inline mt_val mt_grouped_linear(mt_builder *b, mt_val x, mt_val w, mt_val bias,
                                       const mt_routing *r)
{
    mt_val in[4] = { x, w, r->offsets, bias };
    return mt_op1_(b, "grouped_linear", in, 4, NULL, 0);
}

/* The experts' rows y [T*k, n], weighted and added up for each token: [T, n]. [main] */
static inline mt_val mt_combine(mt_builder *b, mt_val y, const mt_routing *r)
{
    mt_val in[3] = { y, r->weights, r->slots };
    return mt_op1_(b, "combine", in, 3, NULL, 0);
}

/* Adds a loss that keeps experts evenly used, with gradients into `logits`; at most one a unit.
 * [main] */
static inline void mt_balance_loss(mt_builder *b, mt_val logits, const mt_routing *r,
                                   const mt_balance_attr *attr)
{
    mt_val in[3] = { logits, r->slots, r->offsets };
    mt_op1_(b, "balance_loss", in, 3, attr, sizeof *attr);
}

/* Each column of x [T, n] convolved with its row of w [n, width], causally. [main] */
static inline mt_val mt_causal_conv(mt_builder *b, mt_val x, mt_val w)
{
    mt_val in[2] = { x, w };
    return mt_op1_(b, "causal_conv", in, 2, NULL, 0);
}

static inline mt_val mt_log_decay(mt_builder *b, mt_val a, mt_val a_log, mt_val dt_bias)
{
    mt_val in[3] = { a, a_log, dt_bias };
    return mt_op1_(b, "log_decay", in, 3, NULL, 0);
}

static inline mt_val mt_gated_delta(mt_builder *b, mt_val q, mt_val k, mt_val v, mt_val g,
                                    mt_val beta, const mt_delta_attr *attr)
{
    mt_val in[5] = { q, k, v, g, beta };
    return mt_op1_(b, "gated_delta", in, 5, attr, sizeof *attr);
}

/* Columns [first, first + cols) of every head of x; heads = 1 for the whole row. [main] */
static inline mt_val mt_slice(mt_builder *b, mt_val x, int32_t heads, int64_t first, int64_t cols)
{
    mt_slice_attr a = { heads, 0, first, cols };
    return mt_op1_(b, "slice", &x, 1, &a, sizeof a);
}

/* The heads of n operands side by side. [main] */
static inline mt_val mt_concat(mt_builder *b, const mt_val *in, uint32_t n,
                               const mt_concat_attr *attr)
{
    return mt_op1_(b, "concat", in, n, attr, sizeof *attr);
}

/* ---- what an operation is (for the core's own ops and for custom ones) ----------------------- */

/* Which dtype a value has: the run's compute dtype (BF16 or FP32; FP64 in gradient checks), the
 * statistics dtype (FP32; FP64 in gradient checks), or int32. A gradient has the dtype of its
 * value; int32 values have none. */
typedef int32_t mt_kind;
enum { MT_KIND_COMPUTE = 0, MT_KIND_STAT = 1, MT_KIND_INDEX = 2 };

/* Rows of a value, as a function of the micro-batch: per_token * tokens + per_document * documents
 * + fixed. An activation is { 1, 0, 0 }, a parameter { 0, 0, rows }, experts' input { k, 0, 0 }. */
typedef struct mt_rows {
    int64_t per_token;
    int64_t per_document;
    int64_t fixed;
} mt_rows;

typedef struct mt_shape {
    mt_rows rows;
    int64_t cols;
    mt_kind kind;
    int32_t is_param;
} mt_shape;

enum {
    /* Worth recomputing in backward under `select`: costs memory traffic, no GEMM. */
    MT_OP_CHEAP = 1u << 0,
    /* Never recomputed; in a train pass forward also gets d_in of its parameters and accumulates
     * their gradients; its aux values hold what backward hands down. */
    MT_OP_GRAD_IN_FORWARD = 1u << 1,
    /* in[0] is a table whose rows are picked by the batch: only the rows in use are on the device,
     * mt_batch::rows indexes them. */
    MT_OP_GATHERS_ROWS = 1u << 2,
    /* d_in of every activation operand equals d_out: the core aliases where it can, and calls
     * backward where it cannot. */
    MT_OP_PASS_THROUGH = 1u << 3,
    /* Several of these that share in[0] may run as one: parameter operands stacked by rows (vectors
     * end to end), outputs side by side. */
    MT_OP_MERGES_SIBLINGS = 1u << 4,
    /* out[0], one element in the statistics dtype, is a loss of its own, read by no operation: the
     * step's loss gains loss_scale * out[0]. Its backward gets no d_out. */
    MT_OP_EMITS_LOSS = 1u << 6,
    /* Works on the rows of each expert by themselves: in[1] and, where present, in[3] are stacks of
     * one entry an expert, in[2] the [1, experts + 1] offsets of their rows. The core may run it
     * for some experts at a time: it then gives those entries and those offsets, the first of which
     * need not be 0 nor the last the number of rows. Other rows must stay as they are, and what an
     * expert gets must not depend on which others are there. */
    MT_OP_BY_EXPERT = 1u << 7,
    /* Sends rows to experts: out[2] is the [1, experts + 1] offsets of their rows, and in[1], where
     * present, [experts] is added to what it ranks them by. A run may move that bias between steps
     * so that all of them get as many rows (train.router_bias_update_rate). */
    MT_OP_ROUTES = 1u << 8
};

/* What an operation's shape rule answers. */
typedef struct mt_op_shape {
    uint32_t struct_size;
    uint32_t n_out;
    uint32_t n_aux; /* tensors that only backward reads (row statistics, LSE) */
    mt_shape out[MT_OP_MAX_OUT];
    mt_shape aux[MT_OP_MAX_AUX];
    uint32_t backward_in;        /* bit i: backward reads in[i] */
    uint32_t backward_out;       /* bit i: backward reads out[i] */
    uint32_t no_grad_in;         /* bit i: in[i] never gets a gradient */
    double gemm_flops_per_token; /* forward; backward counts twice */
    double attn_flops_per_pair;  /* forward, per (query, key) pair that the mask allows */
    int64_t attn_window;         /* 0: all earlier tokens of the document */
    /* n_out 1, is_view 1: out[0] is columns [view_col, view_col + cols) of in[0], and the core
     * may alias it rather than call the kernel. */
    int64_t view_col;
    int32_t is_view;
    /* Tensors that generation keeps between the calls for one document, such as keys and values;
     * rows.per_token counts the tokens of the context (mt_op_call::state). */
    uint32_t n_state;
    mt_shape state[MT_OP_MAX_STATE];
    uint32_t stat_params; /* bit i: in[i] may be a parameter in the statistics dtype */
    uint32_t reserved;
    /* Forward, of a recurrence along the document: token after token, or chunk after chunk, it runs
     * at a rate of its own, far below a GEMM's; backward counts twice. */
    double scan_flops_per_token;
    /* Doubles of the tally that forward adds to and backward reads (mt_op_call::tally); 0: none. A
     * model has one for each micro-batch, which all its units share: those that have one agree on
     * its size. Only with MT_OP_EMITS_LOSS: nothing reads the result of such an operation, so that
     * under no policy backward runs its forward again, and every unit counts once. */
    int64_t tally;
} mt_op_shape;

/* X(id) for every operation that graphs are made of. */
#define MT_OPERATIONS(X)                                                                           \
    X(act)                                                                                         \
    X(add)                                                                                         \
    X(attention)                                                                                   \
    X(balance_loss)                                                                                \
    X(causal_conv)                                                                                 \
    X(combine)                                                                                     \
    X(concat)                                                                                      \
    X(dispatch)                                                                                    \
    X(embedding)                                                                                   \
    X(exact_linear)                                                                                \
    X(gated_delta)                                                                                 \
    X(glu)                                                                                         \
    X(grouped_linear)                                                                              \
    X(linear)                                                                                      \
    X(linear_cross_entropy)                                                                        \
    X(log_decay)                                                                                   \
    X(mul)                                                                                         \
    X(rmsnorm)                                                                                     \
    X(rope)                                                                                        \
    X(router)                                                                                      \
    X(scale)                                                                                       \
    X(slice)

/* An operation. Everything about it that the core needs to know; kernels come from the backends
 * (backend.h), which find them by `name`. */
typedef struct mt_op_def {
    uint32_t struct_size;
    uint32_t flags;
    const char *name;
    uint32_t min_in; /* operands that may not be MT_NONE */
    uint32_t max_in;
    uint32_t attr_size; /* a shorter attribute is extended with zeros */
    uint32_t reserved;
    /* Checks shapes and attributes and fills `ret`. An absent operand has cols == 0. On failure
     * writes a text of at most `error_size` bytes to `error`. [pure] */
    mt_status (*shape)(const mt_shape *in, uint32_t n_in, const void *attr, mt_op_shape *ret,
                       char *error, size_t error_size);
} mt_op_def;

#ifdef __cplusplus
}
#endif
#endif
