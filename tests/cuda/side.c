/* SPDX-License-Identifier: Apache-2.0
 *
 * Running operations on two backends; see side.h.
 */
#include "side.h"

#include <dlfcn.h>

side cpu, cuda;

static const mt_backend *load(const char *variable)
{
    const char *path = getenv(variable);
    void *so = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    const mt_plugin *(*entry)(uint32_t, uint32_t) = NULL;
    void *symbol = so ? dlsym(so, MT_PLUGIN_ENTRY) : NULL;
    memcpy(&entry, &symbol, sizeof entry);
    const mt_plugin *p = entry ? entry(MT_ABI_MAJOR, MT_ABI_MINOR) : NULL;
    if (!p) {
        fprintf(stderr, "%s=%s: %s\n", variable, path ? path : "", so ? "no plugin" : dlerror());
        exit(1);
    }
    return side_backend(p);
}

void sides_open(void)
{
    const mt_backend *of_cuda = load("MT_TEST_CUDA_PLUGIN");
    if (of_cuda->probe() != MT_OK) {
        printf("skipped: %s\n", side_last_error());
        exit(SIDE_SKIP);
    }
    side_open(of_cuda, 0, &cuda);
    const mt_backend *of_cpu = load("MT_TEST_CPU_PLUGIN");
    if (!side_try_open(of_cpu, 0, &cpu)) {
        /* Without OpenBLAS the plain C kernels serve as well. */
        setenv("MEGATRAIN_CPU_FLAGS", "scalar", 1);
        side_open(of_cpu, 0, &cpu);
    }
    mt_device_info info;
    of_cuda->info(cuda.device, &info);
    fprintf(stderr, "%s, %s\n", info.name, info.details);
}

bool only_small(void)
{
    const char *value = getenv("MT_TEST_SMALL");
    return value && strcmp(value, "0") != 0;
}

void side_open_with(const char *variable, const char *value, side *ret)
{
    setenv(variable, value, 1);
    side_open(cuda.b, 0, ret);
}

void sides_close(void)
{
    side_close(&cuda);
    side_close(&cpu);
}

void op_check(const op_case *c, uint32_t seed, op_bounds bounds)
{
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    op_data d;
    op_fill(c, seed, &d);
    for (int t = 0; t < 3; t++) {
        double bound = dtypes[t] == MT_F64 ? 1e-11 : dtypes[t] == MT_F32 ? bounds.f32 : bounds.bf16;
        for (int v = 0; v < 3; v++) {
            /* Rows packed; apart by what keeps 16-byte accesses possible, or does not. */
            op_how how = { .dtype = dtypes[t],
                           .pad = v == 0   ? 0
                                  : v == 1 ? 8
                                           : 3,
                           .accumulate = v == 2 };
            char what[64];
            snprintf(what, sizeof what, "%s, rows %d apart%s", mt_dtype_name(how.dtype),
                     (int)how.pad, how.accumulate ? ", accumulating" : "");
            op_result got, again, want;
            op_run(&cpu, c, &d, &how, &want);
            op_run(&cuda, c, &d, &how, &got);
            op_run(&cuda, c, &d, &how, &again);
            op_compare(c, &got, &want, bound, what);
            op_compare(c, &again, &got, 0, what);
            op_result_free(&got);
            op_result_free(&again);
            op_result_free(&want);
        }
    }
    op_data_free(&d);
}
