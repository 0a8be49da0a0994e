/* SPDX-License-Identifier: Apache-2.0
 *
 * Figures as people read them.
 */
#include "human.h"

#include "../engine/plan.h"

#include <math.h>
#include <stdio.h>

/* Three significant digits and a unit. */
static human_text scaled(double x, double base, const char *const *unit, int units)
{
    human_text t;
    int u = 0;
    while (u < units - 1 && fabs(x) >= base * 0.9995) {
        x /= base;
        u++;
    }
    int decimals = u == 0 || fabs(x) >= 99.95 ? 0 : fabs(x) >= 9.995 ? 1 : 2;
    snprintf(t.s, sizeof t.s, "%.*f%s", decimals, x, unit[u]);
    return t;
}

human_text human_count(double x)
{
    static const char *const unit[] = { "", "k", "M", "B", "T", "P" };
    return scaled(x, 1000, unit, 6);
}

human_text human_rate(double x)
{
    human_text t;
    if (!(x < 999.5))
        return human_count(x);
    snprintf(t.s, sizeof t.s, "%.*f", plan_rate_decimals(x), x);
    return t;
}

human_text human_bytes(int64_t bytes)
{
    static const char *const unit[] = { " B", " KiB", " MiB", " GiB", " TiB" };
    return scaled((double)bytes, 1024, unit, 5);
}

human_text human_seconds(double seconds)
{
    human_text t;
    if (!(seconds >= 0) || seconds > 1e9) {
        snprintf(t.s, sizeof t.s, "?");
        return t;
    }
    long long n = llround(seconds);
    if (seconds < 9.995)
        snprintf(t.s, sizeof t.s, "%.2fs", seconds);
    else if (n < 60)
        snprintf(t.s, sizeof t.s, "%llds", n);
    else if (n < 3600)
        snprintf(t.s, sizeof t.s, "%lldm%02llds", n / 60, n % 60);
    else if (n < 86400)
        snprintf(t.s, sizeof t.s, "%lldh%02lldm", n / 3600, n % 3600 / 60);
    else
        snprintf(t.s, sizeof t.s, "%lldd%02lldh", n / 86400, n % 86400 / 3600);
    return t;
}

human_text human_grouped(int64_t x)
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)x);
    human_text t;
    int w = 0;
    for (int i = 0; i < n; i++) {
        if (i > 0 && digits[i - 1] != '-' && (n - i) % 3 == 0)
            t.s[w++] = ',';
        t.s[w++] = digits[i];
    }
    t.s[w] = '\0';
    return t;
}
