/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend as a side; see side.h.
 */
#include "side.h"

#include <math.h>

const mt_backend *op_backend(void)
{
    static const mt_backend *backend;
    if (!backend)
        backend = side_backend(mt_plugin_entry_v1(MT_ABI_MAJOR, MT_ABI_MINOR));
    return backend;
}

enum { ISAS = 4, THREADS = 3 };

static side opened[ISAS][THREADS + 1];

const side *cpu_side(const char *isa, int32_t threads)
{
    static const char *const names[ISAS] = { NULL, "scalar", "avx2", "avx512" };
    int i = 0;
    while (isa && (!names[i] || strcmp(names[i], isa) != 0))
        i++;
    side *s = &opened[i][threads];
    if (!s->b) {
        if (isa)
            setenv("MEGATRAIN_CPU_FLAGS", isa, 1);
        else
            unsetenv("MEGATRAIN_CPU_FLAGS");
        side_open(op_backend(), threads, s);
    }
    return s;
}

void cpu_sides_close(void)
{
    for (int i = 0; i < ISAS; i++)
        for (int threads = 1; threads <= THREADS; threads++)
            if (opened[i][threads].b)
                side_close(&opened[i][threads]);
}

/* What backward differentiates: sum of out * d_out, or the summed loss times its scale. */
static double objective(const op_case *c, const op_data *d, const op_result *r)
{
    double sum = 0;
    for (uint32_t i = 0; i < c->n_out; i++)
        for (int64_t k = 0; k < op_count(&c->out[i]); k++)
            sum += c->out[i].index
                       ? 0
                       : r->out[i][k] * (c->grad_in_forward ? c->batch.loss_scale : d->d_out[i][k]);
    return sum;
}

void op_check_gradients(const op_case *c, uint32_t seed, double tolerance)
{
    enum { SAMPLES = 24 };
    op_data d;
    op_result r;
    op_fill(c, seed, &d);
    const side *s = cpu_side("scalar", 1);
    const op_how how = { .dtype = MT_F64, .pad = 3 };
    op_run(s, c, &d, &how, &r);
    op_how fwd = how;
    fwd.forward_only = true;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (!r.d_in[i])
            continue;
        int64_t n = op_count(&c->in[i]), step = n > SAMPLES ? n / SAMPLES : 1;
        double norm = 0, got[2 * SAMPLES + 1], want[2 * SAMPLES + 1];
        int m = 0;
        for (int64_t k = 0; k < n && m < 2 * SAMPLES; k += step, m++) {
            const double h = 1e-4, x = d.in[i][k];
            op_result up, down;
            d.in[i][k] = x + h;
            op_run(s, c, &d, &fwd, &up);
            d.in[i][k] = x - h;
            op_run(s, c, &d, &fwd, &down);
            d.in[i][k] = x;
            want[m] = (objective(c, &d, &up) - objective(c, &d, &down)) / (2 * h);
            got[m] = r.d_in[i][k];
            norm += fabs(want[m]);
            op_result_free(&up);
            op_result_free(&down);
        }
        CHECK(norm > 0, "%s: gradient %u is zero everywhere", c->op, i);
        double e = op_error(got, want, m);
        CHECK(e < tolerance, "%s: gradient %u is off by %g of its size", c->op, i, e);
    }
    op_result_free(&r);
    op_data_free(&d);
}

/* Takes away what accumulating gradients were added to. */
static void shift_gradients(const op_case *c, op_result *r, double by)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        for (int64_t k = 0; r->d_in[i] && k < op_count(&c->in[i]); k++)
            r->d_in[i][k] += by;
}

static void check_isa(const op_case *c, const op_data *d, const op_result *want, const char *isa,
                      mt_dtype dtype, double tolerance)
{
    op_how how = { .dtype = dtype };
    char what[64];
    op_result one, more;
    snprintf(what, sizeof what, "%s %s", isa, mt_dtype_name(dtype));
    op_run(cpu_side(isa, 1), c, d, &how, &one);
    op_compare(c, &one, want, tolerance, what);
    for (int32_t threads = 2; threads <= 3; threads++) {
        how.pad = 4 - threads;
        op_run(cpu_side(isa, threads), c, d, &how, &more);
        op_compare(c, &more, &one, 0, "with more threads");
        op_result_free(&more);
    }
    how.accumulate = true;
    op_run(cpu_side(isa, 3), c, d, &how, &more);
    shift_gradients(c, &more, -0.5);
    op_compare(c, &more, &one, tolerance * 4, "accumulating");
    op_result_free(&more);
    op_result_free(&one);
}

void op_check_fast(const op_case *c, uint32_t seed, double tolerance_f32, double tolerance_bf16)
{
    static const char *const isa[] = { "scalar", "avx2", "avx512" };
    op_data d;
    op_result want;
    op_fill(c, seed, &d);
    op_run(cpu_side("scalar", 1), c, &d, &(op_how){ .dtype = MT_F64 }, &want);
    for (int i = 0; i < 3; i++) {
        check_isa(c, &d, &want, isa[i], MT_F32, tolerance_f32);
        check_isa(c, &d, &want, isa[i], MT_BF16, tolerance_bf16);
    }
    op_result_free(&want);
    op_data_free(&d);
}
