/* SPDX-License-Identifier: Apache-2.0
 *
 * Hardware profiles: what is written is read back, whose they are, and what a plan makes of them.
 */
#include "core/train/profile.h"

#include "../check.h"
#include "core/base/status.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static hardware example(void)
{
    hardware h = {
        .host = "a \"quoted\\host",
        .megatrain = MT_VERSION,
        .measured_at = 1700000000,
        .kind = "cuda",
        .device = { .struct_size = sizeof h.device,
                    .compute_threads = 132,
                    .name = "NVIDIA H200",
                    .details = "sm_90",
                    .memory_total = INT64_C(150000000000),
                    .memory_free = INT64_C(149000000001),
                    .compute_dtypes = 1u << MT_F32 | 1u << MT_BF16,
                    .default_compute = MT_BF16 },
        .cpus = 16,
        .host_memory = INT64_C(1500000000000),
        .n_copies = 2,
        .copy = { { 1 << 20, 40e9, 41e9, 30e9, 31e9 }, { 32 << 20, 55e9, 54e9, 45e9, 44e9 } },
        .n_threads = 2,
        .memory = { { 1, 10e9, 28e9 }, { 16, 100e9, 122e9 } },
        .device_copy = 4.3e12,
        .pin = 9e9,
        .n_gemms = 3,
        .gemm = { { MT_BF16, 8192, 4096, 4096, 8e14, 4e14, 2e14 },
                  { MT_BF16, 8192, 4096, 8192, 8e14, 4e14, 2e14 },
                  { MT_F32, 8192, 4096, 4096, 5e13, 5e13, 5e13 } },
        .n_attentions = 3,
        .attention = { { MT_BF16, 1024, 8192, 32, 8, 128, 2e14, 1e14 },
                       { MT_BF16, 4096, 8192, 32, 8, 128, 3e14, 1.5e14, 2.5e14 },
                       { MT_F32, 1024, 8192, 32, 8, 128, 2e13, 2e13 } },
        .n_scans = 1,
        .scan = { { MT_BF16, 1024, 8192, 16, 32, 128, 3e12, 2e12 } },
    };
    return h;
}

static void written_and_read(void)
{
    char folder[] = "/tmp/mt-profile-XXXXXX", path[128];
    CHECK(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a/b.yaml", folder);
    hardware h = example(), r;
    CHECK(profile_read(path, &r) == MT_ERR_NOT_FOUND);
    CHECK(profile_prepare(path, false) == MT_ERR_IO, "no folder is made");
    CHECK(profile_prepare(path, true) == MT_OK, "%s", status_text());
    CHECK(profile_read(path, &r) == MT_ERR_NOT_FOUND, "the try leaves nothing");
    CHECK(profile_write(&h, path) == MT_OK, "%s", status_text());
    CHECK(profile_prepare(path, false) == MT_OK, "%s", status_text());
    CHECK(profile_write(&h, path) == MT_OK, "an old one is replaced: %s", status_text());
    CHECK(profile_prepare("/dev/null", false) == MT_ERR_IO, "no device is replaced");
    CHECK(profile_prepare(folder, false) == MT_ERR_IO, "nor a folder");
    CHECK(profile_read(path, &r) == MT_OK, "%s", status_text());
    CHECK(strcmp(r.host, h.host) == 0 && strcmp(r.device.name, h.device.name) == 0);
    CHECK(r.device.memory_free == h.device.memory_free && r.host_memory == h.host_memory);
    CHECK(r.device.compute_dtypes == h.device.compute_dtypes &&
          r.device.default_compute == MT_BF16 && !r.device.unified);
    CHECK(r.n_copies == 2 && memcmp(r.copy, h.copy, sizeof r.copy) == 0);
    CHECK(r.n_threads == 2 && memcmp(r.memory, h.memory, sizeof r.memory) == 0);
    CHECK(r.n_gemms == 3 && r.gemm[2].dtype == MT_F32 && r.gemm[1].inner == 8192 &&
          r.gemm[1].weight_gradient == 2e14);
    CHECK(r.n_attentions == 3 && r.attention[1].backward == 1.5e14);
    CHECK(r.attention[0].any_order == 0 && r.attention[1].any_order == 2.5e14);
    CHECK(r.n_scans == 1 && memcmp(r.scan, h.scan, sizeof r.scan) == 0);
    CHECK(r.pin == h.pin && r.device_copy == h.device_copy && r.disk_read == 0);
    h.disk_read = 3e9;
    h.disk_write = 2e9;
    h.disk_direct = true;
    CHECK(profile_write(&h, path) == MT_OK);
    CHECK(profile_read(path, &r) == MT_OK && r.disk_write == 2e9 && r.disk_direct);
    h.n_scans = 0; /* a backend without */
    CHECK(profile_write(&h, path) == MT_OK);
    CHECK(profile_read(path, &r) == MT_OK && r.n_scans == 0, "%s", status_text());
    unlink(path);
    snprintf(path, sizeof path, "%s/a", folder);
    CHECK(rmdir(path) == 0, "no temporary file is left");
    rmdir(folder);
}

static void a_profile_belongs_to_a_device(void)
{
    hardware h = example();
    mt_device_info d = h.device;
    CHECK(profile_check(&h, "cuda", &d) == MT_OK);
    CHECK(profile_check(&h, "cpu", &d) == MT_ERR_INVALID && strstr(status_text(), "cpu"));
    d.compute_threads = 66;
    CHECK(profile_check(&h, "cuda", &d) == MT_ERR_INVALID && strstr(status_text(), "66"));
    d = h.device;
    strcpy(d.name, "NVIDIA H100");
    CHECK(profile_check(&h, "cuda", &d) == MT_ERR_INVALID && strstr(status_text(), "H100"));
    strcpy(h.megatrain, "0.0.0");
    CHECK(profile_check(&h, "cuda", &h.device) == MT_ERR_INVALID && strstr(status_text(), "0.0.0"));
}

static bool near(double x, double want)
{
    return fabs(x - want) < 1e-9 * want;
}

static void rates_add_up_as_times(void)
{
    hardware h = example();
    plan_profile p = { 0 };
    CHECK(hardware_profile(&h, MT_BF16, 1000, &p) == MT_OK);
    /* As many FLOPs at 8, 4 and 2: 3 / (1/8 + 1/4 + 1/2). */
    CHECK(near(p.gemm_flops, 24e14 / 7), "%g", p.gemm_flops);
    CHECK(near(p.attn_flops, 3.5 / (1 / 2e14 + 2.5 / 1e14)), "%g", p.attn_flops);
    CHECK(p.attn_any_order == 0);
    CHECK(p.scan_flops == 3e12 && p.scan_backward_flops == 2e12);
    CHECK(p.copy_in == 55e9 && p.copy_out == 54e9 && p.host_bandwidth == 122e9);
    CHECK(hardware_profile(&h, MT_BF16, 8000, &p) == MT_OK);
    CHECK(near(p.attn_flops, 3.5 / (1 / 3e14 + 2.5 / 1.5e14)), "%g", p.attn_flops);
    CHECK(near(p.attn_any_order, 3.5 / (1 / 3e14 + 2.5 / 2.5e14)), "%g", p.attn_any_order);
    CHECK(hardware_profile(&h, MT_F32, 8000, &p) == MT_OK && near(p.gemm_flops, 5e13));
    CHECK(p.scan_flops == 0);
    CHECK(hardware_profile(&h, MT_F64, 8000, &p) == MT_ERR_UNSUPPORTED &&
          strstr(status_text(), "fp64"));
}

int main(void)
{
    RUN(written_and_read);
    RUN(a_profile_belongs_to_a_device);
    RUN(rates_add_up_as_times);
    return check_done();
}
