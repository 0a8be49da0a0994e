/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_cross_entropy: the LM head and the loss in one, a chunk of tokens at a time, so that the
 * logits of all tokens never exist together. Tokens without a target (prompts) are left out: a
 * chunk gathers the others. In a train pass its logits turn into their own gradient in place, and
 * from it come the gradients of x (aux 0) and w.
 */
#include "../rows.h"

#include <math.h>
#include <stdio.h>

enum { IN_X = 0, IN_W = 1 };
enum { IGNORED = -100 };

/* Rows of logits that exist at the same time: as many as fit CHUNK_BYTES in FP32 within these
 * limits. More rows read and write the gradient of w less often. */
enum { CHUNK_BYTES = 128 << 20, CHUNK_MIN = 64, CHUNK_MAX = 2048 };
/* Numbers of logits that one task of the row phase takes. */
enum { ROW_TASK_LOGITS = 1 << 16 };
/* Rows of a tile of logits in prefill and decode, gathered in scratch. */
enum { GENERATE_ROWS = 64 };

/* Phase 0 lists the tokens that have a target; then each chunk goes through its stages. */
enum { STAGE_GATHER = 0, STAGE_LOGITS = 1, STAGE_ROWS = 2, STAGE_GRADS = 3 };

static bool generates(const mt_op_call *c)
{
    return c->pass == MT_PASS_PREFILL || c->pass == MT_PASS_DECODE;
}

static int64_t chunk_rows(int64_t vocab)
{
    int64_t rows = CHUNK_BYTES / (vocab * (int64_t)sizeof(float)) / CHUNK_MIN * CHUNK_MIN;
    return rows < CHUNK_MIN ? CHUNK_MIN : rows > CHUNK_MAX ? CHUNK_MAX : rows;
}

/* Where things are in `work`: logits [rows, vocab], x and its gradient [rows, hidden], and the
 * list: their number, then the tokens that have a target. */
typedef struct layout {
    int64_t rows; /* of a whole chunk */
    int64_t logits, x, dx, list, bytes;
} layout;

static int64_t aligned(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static layout layout_of(const mt_op_call *c)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W];
    int64_t size = mt_dtype_size(x->dtype), most = chunk_rows(w->rows);
    layout l = { .rows = x->rows < most ? x->rows : most };
    l.x = l.logits + aligned(l.rows * w->rows * size);
    l.dx = l.x + aligned(l.rows * x->cols * size);
    l.list = l.dx + aligned(l.rows * x->cols * size);
    l.bytes = l.list + (x->rows + 1) * (int64_t)sizeof(int32_t);
    return l;
}

/* A chunk of a train or eval pass; without any target in the batch there is one of no rows. */
typedef struct chunk {
    int64_t rows;
    const int32_t *tokens; /* [rows] */
    int32_t stage;
    bool first;
    mt_tensor logits, x, dx;
} chunk;

static int32_t stages(const mt_op_call *c)
{
    return c->pass == MT_PASS_TRAIN ? 4 : 3;
}

static chunk chunk_of(const mt_op_call *c, int32_t phase)
{
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W];
    layout l = layout_of(c);
    char *work = c->work;
    const int32_t *list = (const int32_t *)(work + l.list);
    int64_t index = (phase - 1) / stages(c), from = index * l.rows;
    chunk k = { .stage = (phase - 1) % stages(c), .first = index == 0, .tokens = list + 1 + from };
    k.rows = list[0] - from < l.rows ? list[0] - from : l.rows;
    k.logits = (mt_tensor){ work + l.logits, k.rows, w->rows, w->rows, x->dtype, 0 };
    k.x = (mt_tensor){ work + l.x, k.rows, x->cols, x->cols, x->dtype, 0 };
    k.dx = (mt_tensor){ work + l.dx, k.rows, x->cols, x->cols, x->dtype, 0 };
    return k;
}

static int32_t xent_phases(const mt_op_call *c, bool backward)
{
    if (backward || generates(c))
        return 1;
    int64_t targets = 0, rows = layout_of(c).rows;
    for (int64_t i = 0; i < c->in[IN_X].rows; i++)
        targets += c->batch.targets[i] != IGNORED;
    int64_t chunks = targets > 0 ? (targets + rows - 1) / rows : 1;
    return 1 + (int32_t)chunks * stages(c);
}

static cpu_tiles generate_tiles(const mt_op_call *c)
{
    cpu_tiles t = cpu_tiles_of(c->batch.n_logit_rows, c->in[IN_W].rows);
    if (t.tile_m > GENERATE_ROWS) {
        t.tile_m = GENERATE_ROWS;
        t.count = (t.m + GENERATE_ROWS - 1) / GENERATE_ROWS * t.across;
    }
    return t;
}

static int64_t rows_per_task(int64_t vocab)
{
    int64_t rows = ROW_TASK_LOGITS / vocab;
    return rows < 1 ? 1 : rows > CPU_ROWS_PER_TASK ? CPU_ROWS_PER_TASK : rows;
}

/* The gradient stage runs the tasks of dx, then those of dw. */
static int64_t dx_tasks(const mt_op_call *c, const chunk *k, cpu_tiles *ret)
{
    *ret = cpu_tiles_of(k->rows, c->in[IN_X].cols);
    return c->n_aux > 0 && c->aux[0].data ? ret->count : 0;
}

static int64_t dw_tasks(const mt_op_call *c, cpu_tiles *ret)
{
    *ret = cpu_tiles_of(c->in[IN_W].rows, c->in[IN_W].cols);
    return c->d_in[IN_W].data ? ret->count : 0;
}

static int64_t xent_tasks(const mt_op_call *c, bool backward, int32_t phase)
{
    if (backward)
        return c->d_in[IN_X].data ? (c->aux[0].rows + CPU_ROWS_PER_TASK - 1) / CPU_ROWS_PER_TASK
                                  : 0;
    if (generates(c))
        return c->batch.n_logit_rows > 0 ? generate_tiles(c).count : 0;
    if (phase == 0)
        return 1;
    chunk k = chunk_of(c, phase);
    cpu_tiles dx, dw;
    if (k.stage == STAGE_GATHER)
        return (k.rows + CPU_ROWS_PER_TASK - 1) / CPU_ROWS_PER_TASK;
    if (k.stage == STAGE_LOGITS)
        return cpu_tiles_of(k.rows, k.logits.cols).count;
    if (k.stage == STAGE_ROWS) {
        int64_t rows = rows_per_task(k.logits.cols);
        return (k.rows + rows - 1) / rows;
    }
    return dx_tasks(c, &k, &dx) + dw_tasks(c, &dw);
}

static void *at(const mt_tensor *t, int64_t row, int64_t col)
{
    return (char *)t->data + (row * t->ld + col) * mt_dtype_size(t->dtype);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* One row in plain C: softcap, loss, and (factor not NULL) the gradient in place. */
#define DEFINE_ROW(name, elem_t, LOAD, STORE, real_t, EXP, TANH, LOG)                              \
    static real_t name(elem_t *x, int64_t n, int64_t target, real_t cap, const real_t *factor)     \
    {                                                                                              \
        real_t max = -(real_t)INFINITY, sum = 0;                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            if (cap > 0)                                                                           \
                x[i] = STORE(cap * TANH(LOAD(x[i]) / cap));                                        \
            if (LOAD(x[i]) > max)                                                                  \
                max = LOAD(x[i]);                                                                  \
        }                                                                                          \
        for (int64_t i = 0; i < n; i++)                                                            \
            sum += EXP(LOAD(x[i]) - max);                                                          \
        real_t lse = max + LOG(sum), loss = lse - LOAD(x[target]);                                 \
        for (int64_t i = 0; factor && i < n; i++) {                                                \
            real_t v = LOAD(x[i]), g = EXP(v - lse) - (i == target ? 1 : 0);                       \
            g *= *factor;                                                                          \
            if (cap > 0)                                                                           \
                g *= 1 - v / cap * (v / cap);                                                      \
            x[i] = STORE(g);                                                                       \
        }                                                                                          \
        return loss;                                                                               \
    }

#define SAME(x) (x)
DEFINE_ROW(row_f32, float, SAME, SAME, float, expf, tanhf, logf)
DEFINE_ROW(row_f64, double, SAME, SAME, double, exp, tanh, log)
DEFINE_ROW(row_bf16, uint16_t, mt_bf16_to_f32, mt_f32_to_bf16, float, expf, tanhf, logf)

static float load_logit(const void *x, bool bf16, int64_t i)
{
    return bf16 ? mt_bf16_to_f32(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static float row_fast(const cpu_rows *rows, void *x, bool bf16, int64_t n, int64_t target,
                      float cap, const float *factor)
{
    float max = rows->logits_max(x, bf16, n, cap);
    float lse = max + (float)log(rows->logits_sum(x, bf16, n, max));
    float v = load_logit(x, bf16, target);
    if (factor) {
        rows->logits_grad(x, bf16, n, lse, *factor, cap);
        float g = (expf(v - lse) - 1) * *factor;
        if (cap > 0)
            g *= 1 - v / cap * (v / cap);
        if (bf16)
            ((uint16_t *)x)[target] = mt_f32_to_bf16(g);
        else
            ((float *)x)[target] = g;
    }
    return lse - v;
}

static void finish_rows(cpu_isa isa, const mt_op_call *c, const chunk *k, int64_t task)
{
    const mt_xent_attr *attr = c->attr;
    const cpu_rows *rows = cpu_rows_for(isa);
    int64_t vocab = k->logits.cols, step = rows_per_task(vocab);
    double scale = c->batch.loss_scale;
    float scale_f32 = (float)scale, cap = (float)attr->softcap;
    bool train = c->pass == MT_PASS_TRAIN;
    for (int64_t i = task * step; i < k->rows && i < (task + 1) * step; i++) {
        int64_t target = c->batch.targets[k->tokens[i]];
        void *x = at(&k->logits, i, 0), *loss = at(&c->out[0], k->tokens[i], 0);
        const float *factor = train ? &scale_f32 : NULL;
        if (k->logits.dtype == MT_F64)
            *(double *)loss = row_f64(x, vocab, target, attr->softcap, train ? &scale : NULL);
        else if (rows)
            *(float *)loss =
                row_fast(rows, x, k->logits.dtype == MT_BF16, vocab, target, cap, factor);
        else if (k->logits.dtype == MT_F32)
            *(float *)loss = row_f32(x, vocab, target, cap, factor);
        else
            *(float *)loss = row_bf16(x, vocab, target, cap, factor);
    }
}

/* ---- prefill and decode ---------------------------------------------------------------------- */

/* Rounded as in training: to the compute dtype, after softcap again. */
static void finish_logits(void *x, mt_dtype compute, int64_t n, double cap)
{
    if (compute == MT_F64) {
        for (int64_t i = 0; cap > 0 && i < n; i++)
            ((double *)x)[i] = cap * tanh(((double *)x)[i] / cap);
        return;
    }
    float *y = x, cap_f32 = (float)cap;
    bool bf16 = compute == MT_BF16;
    for (int64_t i = 0; (bf16 || cap > 0) && i < n; i++) {
        if (bf16)
            y[i] = mt_bf16_to_f32(mt_f32_to_bf16(y[i]));
        if (cap > 0)
            y[i] = cap_f32 * tanhf(y[i] / cap_f32);
        if (bf16)
            y[i] = mt_bf16_to_f32(mt_f32_to_bf16(y[i]));
    }
}

static int64_t gathered_bytes(const mt_op_call *c)
{
    return GENERATE_ROWS * c->in[IN_X].cols * (int64_t)sizeof(double);
}

static void generate_tile(cpu_isa isa, const mt_op_call *c, int64_t task, char *scratch)
{
    const mt_xent_attr *attr = c->attr;
    const mt_tensor *x = &c->in[IN_X], *w = &c->in[IN_W];
    cpu_tiles tiles = generate_tiles(c);
    cpu_tile t = cpu_tile_at(&tiles, task);
    mt_tensor rows = { scratch, t.rows, x->cols, x->cols, x->dtype, 0 };
    mt_dtype stat = x->dtype == MT_F64 ? MT_F64 : MT_F32;
    mt_tensor logits = { c->batch.logits, c->batch.n_logit_rows, w->rows, w->rows, stat, 0 };
    for (int64_t i = 0; i < t.rows; i++)
        memcpy(at(&rows, i, 0), at(x, c->batch.logit_rows[t.row + i], 0),
               (size_t)(x->cols * mt_dtype_size(x->dtype)));
    cpu_gemm_for(isa)(false, true, t.rows, t.cols, x->cols, 1, x->dtype, scratch, x->cols,
                      at(w, t.col, 0), w->ld, 0, stat, at(&logits, t.row, t.col), logits.ld,
                      scratch + gathered_bytes(c));
    for (int64_t i = 0; i < t.rows; i++)
        finish_logits(at(&logits, t.row + i, t.col), x->dtype, t.cols, attr->softcap);
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static void zero_row(const mt_tensor *t, int64_t row, int64_t col, int64_t cols)
{
    memset(at(t, row, col), 0, (size_t)(cols * mt_dtype_size(t->dtype)));
}

/* Lists the tokens that have a target; the others have no loss and no gradient. */
static void list_targets(const mt_op_call *c)
{
    int32_t *list = (int32_t *)((char *)c->work + layout_of(c).list);
    bool dx = c->pass == MT_PASS_TRAIN && c->n_aux > 0 && c->aux[0].data;
    list[0] = 0;
    for (int64_t i = 0; i < c->in[IN_X].rows; i++) {
        if (c->batch.targets[i] != IGNORED) {
            list[++list[0]] = (int32_t)i;
            continue;
        }
        zero_row(&c->out[0], i, 0, 1);
        if (dx)
            zero_row(&c->aux[0], i, 0, c->aux[0].cols);
    }
}

static void gather(const mt_op_call *c, const chunk *k, int64_t task)
{
    const mt_tensor *x = &c->in[IN_X];
    for (int64_t i = task * CPU_ROWS_PER_TASK; i < k->rows && i < (task + 1) * CPU_ROWS_PER_TASK;
         i++)
        memcpy(at(&k->x, i, 0), at(x, k->tokens[i], 0),
               (size_t)(x->cols * mt_dtype_size(x->dtype)));
}

static void logits_tile(cpu_isa isa, const mt_op_call *c, const chunk *k, int64_t task,
                        void *scratch)
{
    const mt_tensor *x = &k->x, *w = &c->in[IN_W];
    cpu_tiles tiles = cpu_tiles_of(k->rows, k->logits.cols);
    cpu_tile t = cpu_tile_at(&tiles, task);
    cpu_gemm_for(isa)(false, true, t.rows, t.cols, x->cols, 1, x->dtype, at(x, t.row, 0), x->ld,
                      at(w, t.col, 0), w->ld, 0, x->dtype, at(&k->logits, t.row, t.col),
                      k->logits.ld, scratch);
}

static void dx_tile(cpu_isa isa, const mt_op_call *c, const chunk *k, cpu_tile t, void *scratch)
{
    const mt_tensor *w = &c->in[IN_W], *g = &k->logits, *d = &k->dx;
    cpu_gemm_for(isa)(false, false, t.rows, t.cols, g->cols, 1, g->dtype, at(g, t.row, 0), g->ld,
                      at(w, 0, t.col), w->ld, 0, d->dtype, at(d, t.row, t.col), d->ld, scratch);
    for (int64_t i = t.row; i < t.row + t.rows; i++)
        memcpy(at(&c->aux[0], k->tokens[i], t.col), at(d, i, t.col),
               (size_t)(t.cols * mt_dtype_size(d->dtype)));
}

static void dw_tile(cpu_isa isa, const mt_op_call *c, const chunk *k, cpu_tile t, void *scratch)
{
    const mt_tensor *x = &k->x, *g = &k->logits, *d = &c->d_in[IN_W];
    bool add = !k->first || (c->d_accumulate >> IN_W & 1u);
    if (k->rows == 0) {
        for (int64_t i = 0; !add && i < t.rows; i++)
            zero_row(d, t.row + i, t.col, t.cols);
        return;
    }
    cpu_gemm_for(isa)(true, false, t.rows, t.cols, k->rows, 1, g->dtype, at(g, 0, t.row), g->ld,
                      at(x, 0, t.col), x->ld, add, d->dtype, at(d, t.row, t.col), d->ld, scratch);
}

static void grad_tile(cpu_isa isa, const mt_op_call *c, const chunk *k, int64_t task, void *scratch)
{
    cpu_tiles dx, dw;
    int64_t n_dx = dx_tasks(c, k, &dx);
    dw_tasks(c, &dw);
    if (task < n_dx)
        dx_tile(isa, c, k, cpu_tile_at(&dx, task), scratch);
    else
        dw_tile(isa, c, k, cpu_tile_at(&dw, task - n_dx), scratch);
}

/* Backward only hands down what forward has formed. */
static void hand_down(const mt_op_call *c, int64_t task)
{
    const mt_tensor *from = &c->aux[0], *to = &c->d_in[IN_X];
    bool add = c->d_accumulate >> IN_X & 1u;
    for (int64_t i = task * CPU_ROWS_PER_TASK; i < from->rows && i < (task + 1) * CPU_ROWS_PER_TASK;
         i++) {
        void *y = at(to, i, 0);
        const void *x = at(from, i, 0);
        if (!add) {
            memcpy(y, x, (size_t)(from->cols * mt_dtype_size(from->dtype)));
            continue;
        }
        for (int64_t j = 0; j < from->cols; j++) {
            if (from->dtype == MT_F32)
                ((float *)y)[j] += ((const float *)x)[j];
            else if (from->dtype == MT_F64)
                ((double *)y)[j] += ((const double *)x)[j];
            else
                ((uint16_t *)y)[j] = mt_f32_to_bf16(mt_bf16_to_f32(((uint16_t *)y)[j]) +
                                                    mt_bf16_to_f32(((const uint16_t *)x)[j]));
        }
    }
}

static void xent_run(cpu_isa isa, const mt_op_call *c, bool backward, int32_t phase, int64_t task,
                     void *scratch)
{
    if (backward) {
        hand_down(c, task);
        return;
    }
    if (generates(c)) {
        generate_tile(isa, c, task, scratch);
        return;
    }
    if (phase == 0) {
        list_targets(c);
        return;
    }
    chunk k = chunk_of(c, phase);
    if (k.stage == STAGE_GATHER)
        gather(c, &k, task);
    else if (k.stage == STAGE_LOGITS)
        logits_tile(isa, c, &k, task, scratch);
    else if (k.stage == STAGE_ROWS)
        finish_rows(isa, c, &k, task);
    else
        grad_tile(isa, c, &k, task, scratch);
}

static int64_t xent_workspace(const mt_op_call *c, bool backward)
{
    return backward || generates(c) ? 0 : layout_of(c).bytes;
}

static int64_t xent_scratch(const mt_op_call *c, bool backward)
{
    if (backward)
        return 0;
    return cpu_gemm_work(CPU_TILE_M, CPU_TILE_N, INT32_MAX, c->in[IN_X].dtype) +
           (generates(c) ? gathered_bytes(c) : 0);
}

static bool xent_check(const mt_op_call *c, char *error, size_t error_size)
{
    int64_t vocab = c->in[IN_W].rows;
    if (generates(c)) {
        for (int64_t i = 0; i < c->batch.n_logit_rows; i++) {
            int32_t row = c->batch.logit_rows[i];
            if (row < 0 || row >= c->in[IN_X].rows) {
                snprintf(error, error_size, "logits of row %d are wanted of %lld rows", (int)row,
                         (long long)c->in[IN_X].rows);
                return false;
            }
        }
        return true;
    }
    for (int64_t i = 0; i < c->in[IN_X].rows; i++) {
        int32_t target = c->batch.targets[i];
        if (target != IGNORED && (target < 0 || target >= vocab)) {
            snprintf(
                error, error_size,
                "target %lld is token %d, the vocabulary has %lld; do tokenizer and model fit?",
                (long long)i, (int)target, (long long)vocab);
            return false;
        }
    }
    return true;
}

const cpu_op cpu_op_linear_cross_entropy = {
    .name = "linear_cross_entropy",
    .phases = xent_phases,
    .tasks = xent_tasks,
    .workspace = xent_workspace,
    .scratch = xent_scratch,
    .run_scratch = xent_run,
    .check = xent_check,
};
