/* SPDX-License-Identifier: Apache-2.0
 *
 * What this process may use: processors and memory, as the affinity mask and the control groups
 * (both versions) say. A limit of a group holds for all groups below it, so every level counts.
 */
#include "device.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Reads a small file; false when it is not there. */
static bool read_text(const char *path, char *buf, size_t size)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    size_t n = fread(buf, 1, size - 1, f);
    fclose(f);
    buf[n] = 0;
    return n > 0;
}

/* The group of this process in the hierarchy of `controller` ("" for version 2). */
static bool group_path(const char *controller, char *ret, size_t size)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return false;
    char line[1024];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        char *names = strchr(line, ':');
        char *path = names ? strchr(names + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        names++;
        path[strcspn(path, "\n")] = 0;
        for (char *save = NULL, *name = strtok_r(names, ",", &save); name && !found;
             name = strtok_r(NULL, ",", &save))
            found = *controller && strcmp(name, controller) == 0;
        if (!*controller && !*names)
            found = true;
        if (found)
            snprintf(ret, size, "%s", path);
    }
    fclose(f);
    return found;
}

/* Calls fn for the group of this process and each one above it. A container often sees its own
 * group as the root of the mount, so levels that do not exist are passed over. */
static void each_group(const char *mount, const char *controller,
                       void (*fn)(const char *folder, void *arg), void *arg)
{
    char path[1024], folder[1200];
    if (!group_path(controller, path, sizeof path))
        return;
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", mount, strcmp(path, "/") == 0 ? "" : path);
        fn(folder, arg);
        char *slash = strrchr(path, '/');
        if (!slash || !path[0])
            return;
        *slash = 0;
    }
}

static bool read_number(const char *folder, const char *file, double *ret)
{
    char path[1300], text[64];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    if (!read_text(path, text, sizeof text))
        return false;
    char *end;
    *ret = strtod(text, &end);
    return end != text;
}

static void quota_v2(const char *folder, void *arg)
{
    double *cpus = arg, quota, period;
    char path[1300], text[64];
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (read_text(path, text, sizeof text) && sscanf(text, "%lf %lf", &quota, &period) == 2 &&
        period > 0 && quota / period < *cpus)
        *cpus = quota / period;
}

static void quota_v1(const char *folder, void *arg)
{
    double *cpus = arg, quota, period;
    if (read_number(folder, "cpu.cfs_quota_us", &quota) &&
        read_number(folder, "cpu.cfs_period_us", &period) && quota > 0 && period > 0 &&
        quota / period < *cpus)
        *cpus = quota / period;
}

/* Processors in the affinity mask, however large the machine's mask is. */
static int32_t affinity_threads(void)
{
    int32_t n = 0;
    for (size_t cpus = 1024; n == 0 && cpus <= (size_t)1 << 18; cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (!set)
            break;
        size_t size = CPU_ALLOC_SIZE(cpus);
        CPU_ZERO_S(size, set);
        if (sched_getaffinity(0, size, set) == 0)
            n = CPU_COUNT_S(size, set);
        CPU_FREE(set);
    }
    return n > 0 ? n : 1;
}

int32_t cpu_limit_threads(void)
{
    int32_t n = affinity_threads();
    double quota = n;
    each_group("/sys/fs/cgroup", "", quota_v2, &quota);
    each_group("/sys/fs/cgroup/cpu", "cpu", quota_v1, &quota);
    int32_t allowed = (int32_t)(quota + 0.5);
    return allowed < 1 ? 1 : allowed < n ? allowed : n;
}

typedef struct memory_limit {
    double total, free;
    const char *limit_file, *usage_file, *stat_file, *cache_key;
} memory_limit;

/* Page cache counts as used but is given back under pressure. */
static double reclaimable(const char *folder, const memory_limit *m)
{
    char path[1300], line[256];
    snprintf(path, sizeof path, "%s/%s", folder, m->stat_file);
    FILE *f = fopen(path, "re");
    double bytes = 0;
    if (!f)
        return 0;
    size_t key = strlen(m->cache_key);
    while (fgets(line, sizeof line, f))
        if (strncmp(line, m->cache_key, key) == 0 && line[key] == ' ')
            bytes = strtod(line + key, NULL);
    fclose(f);
    return bytes;
}

static void memory_group(const char *folder, void *arg)
{
    memory_limit *m = arg;
    double limit, usage;
    if (!read_number(folder, m->limit_file, &limit) || limit <= 0)
        return;
    if (limit < m->total)
        m->total = limit;
    if (read_number(folder, m->usage_file, &usage)) {
        double left = limit - usage + reclaimable(folder, m);
        if (left < m->free)
            m->free = left;
    }
}

void cpu_limit_memory(int64_t *ret_total, int64_t *ret_free)
{
    double total = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    double available = total;
    FILE *f = fopen("/proc/meminfo", "re");
    if (f) {
        char line[256];
        double kib;
        while (fgets(line, sizeof line, f)) {
            if (sscanf(line, "MemTotal: %lf kB", &kib) == 1)
                total = kib * 1024;
            else if (sscanf(line, "MemAvailable: %lf kB", &kib) == 1)
                available = kib * 1024;
        }
        fclose(f);
    }
    memory_limit v2 = { total,         available,      "memory.max", "memory.current",
                        "memory.stat", "inactive_file" };
    each_group("/sys/fs/cgroup", "", memory_group, &v2);
    memory_limit v1 = { v2.total,
                        v2.free,
                        "memory.limit_in_bytes",
                        "memory.usage_in_bytes",
                        "memory.stat",
                        "total_inactive_file" };
    each_group("/sys/fs/cgroup/memory", "memory", memory_group, &v1);
    *ret_total = (int64_t)v1.total;
    *ret_free = v1.free > 0 ? (int64_t)v1.free : 0;
}
