/* SPDX-License-Identifier: Apache-2.0
 *
 * Finite differences in FP64 for every operation and every awkward graph; the three policies bit
 * for bit; what they save, in bytes.
 */
#include "core/base/status.h"
#include "core/template/gradcheck.h"
#include "tests/check.h"
#include "zoo.h"

static const mt_backend *backend;
static void *device;

static void differences(void)
{
    for (const zoo_entry *z = zoo; z->name; z++) {
        tpl *t = NULL;
        mt_status st = tpl_create(z->name, z->build, NULL, z->arg, &t);
        if (st == MT_OK)
            st = gradcheck_template(t, ZOO_VOCAB, backend, device);
        CHECK(st == MT_OK, "%s: %s", z->name, status_text());
        tpl_destroy(t);
    }
}

static int64_t padded(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* The block of the zoo: H 10, 4 heads and 2 KV heads of 6, 13 hidden columns. */
static void saved_bytes(void)
{
    const zoo_entry *z = zoo_find("block");
    tpl *t = NULL;
    CHECK(tpl_create(z->name, z->build, NULL, z->arg, &t) == MT_OK, "%s", status_text());
    for (mt_dtype dtype = MT_F32; dtype <= MT_BF16; dtype++)
        for (int64_t tokens = 1; tokens < 200; tokens += 66) {
            tpl_bounds bounds = { tokens, 1, 1, dtype, 0, 0 };
            int64_t c = mt_dtype_size(dtype), n = tokens;
            int64_t gemms = padded(n * 48 * c) + padded(n * 24 * c) + padded(n * 10 * c) +
                            padded(n * 26 * c) + padded(n * 10 * c);
            int64_t lse = padded(n * 4 * 4);
            /* input norm, q and k norms, q and k rotated, residual sum, third norm, gate times up
             */
            int64_t cheap = padded(n * 10 * c) + padded(n * 24 * c) + padded(n * 12 * c) +
                            padded(n * 10 * c) + padded(n * 10 * c) + padded(n * 13 * c);
            /* reciprocal roots of n1, qn, kn, n2, n3, n4 */
            int64_t roots = 4 * padded(n * 4) + padded(n * 4 * 4) + padded(n * 2 * 4);
            int64_t expected[] = { gemms + lse + cheap + roots, gemms + lse, 0 };
            for (int p = 0; p < TPL_POLICIES; p++) {
                tpl_plan *plan = NULL;
                CHECK(tpl_plan_create(t, (tpl_policy)p, &bounds, backend, device, &plan) == MT_OK,
                      "%s", status_text());
                CHECK(plan && plan->saved_bytes == expected[p],
                      "%s, %s, %lld tokens: %lld bytes saved, expected %lld", mt_dtype_name(dtype),
                      tpl_policy_name((tpl_policy)p), (long long)tokens,
                      plan ? (long long)plan->saved_bytes : 0, (long long)expected[p]);
                CHECK(plan && plan->d_in_place[0] == 0, "the residual gradient is not in place");
                tpl_plan_destroy(plan);
            }
        }
    tpl_destroy(t);
}

static void info_of_a_gpu(const void *dev, mt_device_info *ret)
{
    backend->info(dev, ret);
    ret->unified = 0;
}

/* Device memory that the host cannot read is refused, not read. */
static void needs_host_memory(void)
{
    mt_backend gpu = *backend;
    gpu.info = info_of_a_gpu;
    tpl *t = NULL;
    CHECK(tpl_create(zoo[0].name, zoo[0].build, NULL, zoo[0].arg, &t) == MT_OK, "%s",
          status_text());
    CHECK(gradcheck_template(t, ZOO_VOCAB, &gpu, device) == MT_ERR_UNSUPPORTED, "it was accepted");
    tpl_destroy(t);
}

int main(void)
{
    backend = zoo_backend(&device);
    RUN(differences);
    RUN(saved_bytes);
    RUN(needs_host_memory);
    backend->close(device);
    return check_done();
}
