/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotary frequencies: published models' values, formed independently in FP64; the spellings of
 * config.json; what is refused.
 */
#include "../../core/template/rope.h"
#include "../../core/base/status.h"
#include "../../core/manifest/config.h"
#include "../check.h"

#include <math.h>

/* Frequencies are formed in FP32 from an FP32 power: a few roundings of 6e-8 each. */
static const double BOUND = 4e-7;

typedef struct golden {
    int32_t index;
    double value;
} golden;

static mt_status form_spec(const char *yaml, const mt_rope_spec *spec, int64_t head_dim,
                           mt_rope_attr *ret)
{
    config *c = NULL;
    mt_status st = config_parse_yaml(yaml, strlen(yaml), "config", &c);
    if (!st)
        st = rope_from_config(config_section(c, ""), spec, head_dim, ret);
    config_destroy(c);
    return st;
}

static mt_status form(const char *yaml, double theta, int64_t head_dim, mt_rope_attr *ret)
{
    mt_rope_spec spec = { .struct_size = sizeof spec, .theta = theta };
    return form_spec(yaml, &spec, head_dim, ret);
}

static bool near(double a, double b)
{
    return fabs(a - b) <= BOUND * fabs(b);
}

/* Checks some frequencies, the sum of all, and the factor on cos and sin. */
static void check(const char *yaml, int64_t head_dim, const golden *g, int n, double sum,
                  double attention_factor)
{
    mt_rope_attr a = { 0 };
    mt_status st = form(yaml, 10000, head_dim, &a);
    CHECK(!st, "%s", status_text());
    CHECK(a.head_dim == head_dim && a.rotary_dim == head_dim && a.heads == 1 &&
              a.pairing == MT_ROPE_HALF_SPLIT,
          "head_dim %d, rotary_dim %d, heads %d", a.head_dim, a.rotary_dim, a.heads);
    double found = 0;
    for (int i = 0; i < a.rotary_dim / 2; i++)
        found += (double)a.inv_freq[i];
    CHECK(near(found, sum), "sum %.9g, expected %.9g", found, sum);
    CHECK(a.inv_freq[0] == 1.0f, "first %.9g", (double)a.inv_freq[0]);
    for (int i = 0; i < n; i++)
        CHECK(near((double)a.inv_freq[g[i].index], g[i].value), "[%d] = %.9g, expected %.9g",
              g[i].index, (double)a.inv_freq[g[i].index], g[i].value);
    CHECK(near((double)a.attention_factor, attention_factor), "attention factor %.9g",
          (double)a.attention_factor);
}

#define CHECK_ROPE(yaml, dim, g, sum, factor)                                                      \
    check(yaml, dim, g, (int)(sizeof(g) / sizeof *(g)), sum, factor)

/* ---- published models ------------------------------------------------------------------------ */

static void llama31(void)
{
    static const golden g[] = { { 1, 0.814617234 },     { 28, 0.00321144599 },
                                { 29, 0.00216657076 },  { 30, 0.00137189357 },
                                { 34, 0.000178507813 }, { 35, 9.55621235e-05 },
                                { 63, 3.06892599e-07 } };
    CHECK_ROPE("rope_theta: 500000.0\n"
               "rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0,\n"
               "  high_freq_factor: 4.0, original_max_position_embeddings: 8192}\n",
               128, g, 5.3860582, 1);
}

static void llama32(void)
{
    static const golden g[] = { { 14, 0.00321144599 },
                                { 15, 0.00129054793 },
                                { 16, 0.000429556797 },
                                { 17, 9.7082878e-05 },
                                { 31, 9.41830673e-08 } };
    CHECK_ROPE("rope_parameters: {rope_type: llama3, rope_theta: 500000.0, factor: 32.0,\n"
               "  low_freq_factor: 1.0, high_freq_factor: 4.0,\n"
               "  original_max_position_embeddings: 8192}\n",
               64, g, 2.9682023, 1);
}

static void gpt_oss(void)
{
    static const golden g[] = { { 8, 0.0508132748 },
                                { 9, 0.0317056962 },
                                { 12, 0.00679495949 },
                                { 17, 0.000129318701 },
                                { 31, 3.02351143e-07 } };
    CHECK_ROPE("rope_theta: 150000\n"
               "max_position_embeddings: 131072\n"
               "rope_scaling: {rope_type: yarn, factor: 32.0, beta_fast: 32.0, beta_slow: 1.0,\n"
               "  truncate: false, original_max_position_embeddings: 4096}\n",
               64, g, 3.18043828, 1.3465735903);
}

static void deepseek_v3(void)
{
    static const golden g[] = {
        { 11, 0.0390069266 }, { 15, 0.00833450895 }, { 22, 0.000177827941 }, { 23, 3.33380358e-05 }
    };
    CHECK_ROPE("rope_theta: 10000\n"
               "max_position_embeddings: 163840\n"
               "rope_scaling: {type: yarn, factor: 40, beta_fast: 32, beta_slow: 1, mscale: 1.0,\n"
               "  mscale_all_dim: 1.0, original_max_position_embeddings: 4096}\n",
               64, g, 3.94893627, 1);
}

static void ministral3(void)
{
    static const golden g[] = { { 30, 0.000690702339 }, { 40, 1.11142463e-05 } };
    CHECK_ROPE("rope_parameters: {rope_type: yarn, rope_theta: 1000000.0, factor: 16.0,\n"
               "  beta_fast: 32.0, beta_slow: 1.0, mscale: 1.0, mscale_all_dim: 1.0,\n"
               "  original_max_position_embeddings: 16384}\n"
               "max_position_embeddings: 262144\n",
               128, g, 5.13512938, 1);
}

/* ---- rules ----------------------------------------------------------------------------------- */

static void default_and_linear(void)
{
    mt_rope_attr plain = { 0 }, linear = { 0 }, old = { 0 };
    CHECK(!form("hidden_size: 64\n", 10000, 24, &plain), "%s", status_text());
    CHECK(!form("rope_parameters: {rope_type: linear, factor: 4.0, rope_theta: 10000.0}\n", 500, 24,
                &linear),
          "%s", status_text());
    CHECK(!form("rope_scaling: {type: linear, factor: 4.0}\n", 10000, 24, &old), "%s",
          status_text());
    for (int i = 0; i < 12; i++) {
        double f = pow(10000, -i / 12.0);
        CHECK(near((double)plain.inv_freq[i], f), "[%d] %.9g, expected %.9g", i,
              (double)plain.inv_freq[i], f);
        CHECK(linear.inv_freq[i] == plain.inv_freq[i] / 4, "[%d] %.9g", i,
              (double)linear.inv_freq[i]);
        CHECK(old.inv_freq[i] == linear.inv_freq[i], "[%d] %.9g", i, (double)old.inv_freq[i]);
    }
    CHECK(plain.attention_factor == 1.0f && linear.attention_factor == 1.0f, "factors");
}

static void partial(void)
{
    mt_rope_attr a = { 0 };
    CHECK(!form("partial_rotary_factor: 0.25\n", 10000, 256, &a), "%s", status_text());
    CHECK(a.head_dim == 256 && a.rotary_dim == 64, "head_dim %d, rotary_dim %d", a.head_dim,
          a.rotary_dim);
    CHECK(near((double)a.inv_freq[1], pow(10000, -2.0 / 64)), "[1] %.9g", (double)a.inv_freq[1]);
}

/* Without a factor, it is the ratio of the two context lengths; a given attention factor wins. */
static void yarn_defaults(void)
{
    mt_rope_attr given = { 0 }, derived = { 0 };
    CHECK(!form("max_position_embeddings: 131072\n"
                "rope_scaling: {rope_type: yarn, factor: 32.0, attention_factor: 1.5,\n"
                "  original_max_position_embeddings: 4096}\n",
                10000, 64, &given),
          "%s", status_text());
    CHECK(!form("max_position_embeddings: 131072\n"
                "rope_scaling: {rope_type: yarn, original_max_position_embeddings: 4096}\n",
                10000, 64, &derived),
          "%s", status_text());
    CHECK(given.attention_factor == 1.5f, "%.9g", (double)given.attention_factor);
    CHECK(near((double)derived.attention_factor, 0.1 * log(32) + 1), "%.9g",
          (double)derived.attention_factor);
    CHECK(memcmp(given.inv_freq, derived.inv_freq, sizeof given.inv_freq) == 0, "frequencies");
}

/* Dynamic NTK differs from the default only beyond the positions that the model has. */
static void dynamic(void)
{
    mt_rope_attr plain = { 0 }, ntk = { 0 };
    CHECK(!form("rope_theta: 5000.0\n", 10000, 24, &plain), "%s", status_text());
    CHECK(
        !form("rope_theta: 5000.0\nrope_scaling: {type: dynamic, factor: 2.0}\n", 10000, 24, &ntk),
        "%s", status_text());
    CHECK(memcmp(&plain, &ntk, sizeof plain) == 0, "frequencies");
}

/* Both spellings of layers with frequencies of their own give the same; each alone has the default
 * of its kind, and no scaling is shared. */
static void layer_types(void)
{
    static const struct {
        const char *yaml;
        double full_theta, full_factor, sliding_theta;
    } cases[] = {
        { "hidden_size: 64\n", 1e6, 1, 1e4 },
        { "rope_theta: 500000.0\nrope_local_base_freq: 20000.0\n"
          "rope_scaling: {rope_type: linear, factor: 8.0}\n",
          5e5, 8, 2e4 },
        { "rope_parameters:\n"
          "  full_attention: {rope_type: linear, factor: 8.0, rope_theta: 500000.0}\n"
          "  sliding_attention: {rope_type: default, rope_theta: 20000.0}\n",
          5e5, 8, 2e4 },
        { "rope_parameters: {full_attention: {rope_type: linear, factor: 4.0}}\n", 1e6, 4, 1e4 },
        { "rope_parameters: null\nrope_scaling: null\nrope_theta: 500000.0\n", 5e5, 1, 1e4 },
    };
    const mt_rope_spec full = { .struct_size = sizeof full,
                                .theta = 1e6,
                                .layer_type = "full_attention" };
    const mt_rope_spec sliding = { .struct_size = sizeof sliding,
                                   .theta = 1e4,
                                   .layer_type = "sliding_attention",
                                   .theta_key = "rope_local_base_freq" };
    mt_rope_attr a = { 0 };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        mt_rope_attr f = { 0 }, s = { 0 };
        CHECK(!form_spec(cases[k].yaml, &full, 256, &f), "%s", status_text());
        CHECK(!form_spec(cases[k].yaml, &sliding, 256, &s), "%s", status_text());
        for (int i = 0; i < 128; i += 9) {
            double want = pow(cases[k].full_theta, -i / 128.0) / cases[k].full_factor;
            CHECK(near((double)f.inv_freq[i], want), "full, case %d: [%d] %.9g, expected %.9g",
                  (int)k, i, (double)f.inv_freq[i], want);
            want = pow(cases[k].sliding_theta, -i / 128.0);
            CHECK(near((double)s.inv_freq[i], want), "sliding, case %d: [%d] %.9g, expected %.9g",
                  (int)k, i, (double)s.inv_freq[i], want);
        }
    }
    CHECK(form_spec("rope_parameters: {rope_theta: 10000.0}\n", &full, 64, &a) == MT_ERR_INVALID &&
              strstr(status_text(), "full_attention"),
          "%s", status_text());
    CHECK(form("rope_parameters: {full_attention: {rope_theta: 10000.0}}\n", 1e4, 64, &a) ==
                  MT_ERR_INVALID &&
              strstr(status_text(), "per layer type"),
          "%s", status_text());
}

/* What a family scales with where the configuration says nothing. */
static void scaled_by_default(void)
{
    const mt_rope_spec spec = { .struct_size = sizeof spec,
                                .theta = 1e6,
                                .type = "yarn",
                                .factor = 16,
                                .original_max_position_embeddings = 16384,
                                .attention_factor = 1 };
    mt_rope_attr found = { 0 }, want = { 0 }, plain = { 0 };
    CHECK(!form_spec("max_position_embeddings: 262144\n", &spec, 128, &found), "%s", status_text());
    CHECK(!form("rope_scaling: {type: yarn, factor: 16.0, attention_factor: 1.0,\n"
                "  original_max_position_embeddings: 16384}\n",
                1e6, 128, &want),
          "%s", status_text());
    CHECK(memcmp(&found, &want, sizeof want) == 0, "frequencies");
    CHECK(!form_spec("rope_parameters: {rope_type: default}\n", &spec, 128, &found) &&
              !form("{}", 1e6, 128, &plain),
          "%s", status_text());
    CHECK(memcmp(&found, &plain, sizeof plain) == 0, "a configuration's own word counts");
}

static void refused(const char *yaml, const char *names)
{
    mt_rope_attr a = { .heads = -7 };
    mt_status st = form(yaml, 10000, 64, &a);
    CHECK(st == MT_ERR_INVALID && strstr(status_text(), names), "%d, '%s' should name '%s'", st,
          status_text(), names);
    CHECK(a.heads == -7, "a failed call touched its output");
}

static void refusals(void)
{
    refused("rope_scaling: {rope_type: dynamic}\n", "factor");
    refused("rope_scaling: {rope_type: proportional}\n", "proportional");
    refused("rope_scaling: {type: longrope, factor: 2.0}\n", "longrope");
    refused("rope_scaling: {rope_type: linear}\n", "factor");
    refused("rope_scaling: {factor: 2.0}\n", "no rope_type");
    refused("rope_scaling: llama3\n", "must be a map");
    refused("rope_scaling: [llama3]\n", "must be a map");
    refused("rope_scaling: {rope_type: yarn, factor: 2.0, attention_factor: -1}\n", "above 0");
    refused("rope_scaling: {rope_type: linear, factor: 0.5}\n", "factor");
    refused("rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0,\n"
            "  high_freq_factor: 4.0}\n",
            "original_max_position_embeddings");
    refused("rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 4.0,\n"
            "  high_freq_factor: 4.0, original_max_position_embeddings: 8192}\n",
            "high_freq_factor");
    refused("rope_theta: 1.0\n", "rope_theta");
    refused("rope_theta: high\n", "rope_theta");
    refused("rope_theta: 1.0e300\n", "must be above 1, at most 1e+15, found 1e+300");
    refused("rope_scaling: {rope_type: linear, factor: 1.0e300}\n", "must be 1 to 1e+06, found");
    refused("rope_scaling: {rope_type: dynamic, factor: 1.0e300}\n", "must be 1 to 1e+06, found");
    refused("rope_scaling: {rope_type: yarn, factor: 1.0e300}\n",
            "expected factor from 1 to 1e+06");
    refused("rope_scaling: {rope_type: yarn, factor: 2.0, beta_fast: 1.0e300}\n", "<= 1e+06");
    refused("rope_scaling: {rope_type: yarn, factor: 2.0, mscale: 1.0e300, mscale_all_dim: 1}\n",
            "expected mscale and mscale_all_dim of at most 1000");
    refused("rope_scaling: {rope_type: yarn, factor: 2.0, attention_factor: 1.0e300}\n",
            "must be above 0, at most 1000");
    refused("rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0,\n"
            "  high_freq_factor: 1.0e300, original_max_position_embeddings: 8192}\n",
            "high_freq_factor <= 1e+06");
    refused("partial_rotary_factor: 1.5\n", "partial_rotary_factor");
}

int main(void)
{
    RUN(llama31);
    RUN(llama32);
    RUN(gpt_oss);
    RUN(deepseek_v3);
    RUN(ministral3);
    RUN(default_and_linear);
    RUN(dynamic);
    RUN(layer_types);
    RUN(scaled_by_default);
    RUN(partial);
    RUN(yarn_defaults);
    RUN(refusals);
    return check_done();
}
