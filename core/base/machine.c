/* SPDX-License-Identifier: Apache-2.0
 *
 * Limits from /proc and the control group files. Files that are missing mean "no limit".
 */
#include "machine.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { PATH_SIZE = 4096 };

/* One line of /proc/self/cgroup turned into a folder of the mounted hierarchy. */
typedef struct group {
    char mount[PATH_SIZE]; /* "ROOT/sys/fs/cgroup" or ".../memory" */
    char path[PATH_SIZE];  /* "/user.slice/x" */
    bool v2;
    bool found;
} group;

/* "KEY: N kB" of a /proc file in bytes, -1 when it is not there. */
static int64_t proc_bytes(const char *root, const char *file, const char *key)
{
    char path[PATH_SIZE], line[256];
    snprintf(path, sizeof path, "%s/proc/%s", root, file);
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    int64_t ret = -1;
    size_t n = strlen(key);
    while (ret < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, key, n) == 0 && line[n] == ':')
            ret = strtoll(line + n + 1, NULL, 10) * 1024;
    fclose(f);
    return ret;
}

/* Finds the group of `controller`. Where both hierarchies exist, v1 rules if it is mounted with
 * that controller. */
static group find_group(const char *root, const char *controller)
{
    group g = { .found = false };
    char path[PATH_SIZE], line[PATH_SIZE];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (!f)
        return g;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        char *names = strchr(line, ':');
        char *where = names ? strchr(names + 1, ':') : NULL;
        if (!where)
            continue;
        *where++ = '\0';
        names++;
        bool v2 = *names == '\0', ours = v2 && !g.found;
        char *save = NULL;
        for (char *name = strtok_r(names, ",", &save); name; name = strtok_r(NULL, ",", &save))
            ours |= strcmp(name, controller) == 0;
        if (!ours)
            continue;
        g.found = true;
        g.v2 = v2;
        snprintf(g.mount, sizeof g.mount, "%.3000s/sys/fs/cgroup%s%s", root, v2 ? "" : "/",
                 v2 ? "" : controller);
        snprintf(g.path, sizeof g.path, "%s", strcmp(where, "/") == 0 ? "" : where);
    }
    fclose(f);
    return g;
}

/* First line of a file of the group; false when it does not exist. */
static bool group_line(const group *g, const char *file, char *ret, size_t size)
{
    char path[2 * PATH_SIZE + 64];
    snprintf(path, sizeof path, "%s%s/%s", g->mount, g->path, file);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool good = fgets(ret, (int)size, f) != NULL;
    fclose(f);
    return good;
}

/* A number of bytes; INFINITY where the file says "max" or does not exist. */
static double group_bytes(const group *g, const char *file)
{
    char line[128];
    if (!group_line(g, file, line, sizeof line) || line[0] < '0' || line[0] > '9')
        return INFINITY;
    return strtod(line, NULL);
}

/* "KEY N" of memory.stat; 0 when it is not there. */
static double group_stat(const group *g, const char *key)
{
    char path[2 * PATH_SIZE + 64], name[64];
    unsigned long long value;
    double ret = 0;
    snprintf(path, sizeof path, "%s%s/memory.stat", g->mount, g->path);
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    while (fscanf(f, "%63s %llu", name, &value) == 2)
        if (strcmp(name, key) == 0)
            ret = (double)value;
    fclose(f);
    return ret;
}

/* Goes to the group above; false at the top. A path that is not mounted here (a container sees its
 * own group as the root) fails on every level until the root, which then speaks for it. */
static bool go_up(group *g)
{
    char *slash = strrchr(g->path, '/');
    if (!slash)
        return false;
    *slash = '\0';
    return true;
}

static double least_memory(const char *root, bool available)
{
    double least = (double)proc_bytes(root, "meminfo", available ? "MemAvailable" : "MemTotal");
    if (least < 0)
        least = INFINITY;
    group g = find_group(root, "memory");
    if (!g.found)
        return least;
    do {
        double limit = group_bytes(&g, g.v2 ? "memory.max" : "memory.limit_in_bytes");
        if (available && isfinite(limit)) {
            double used = group_bytes(&g, g.v2 ? "memory.current" : "memory.usage_in_bytes");
            used -= group_stat(&g, g.v2 ? "inactive_file" : "total_inactive_file");
            if (isfinite(used))
                limit -= fmax(used, 0);
        }
        least = fmin(least, fmax(limit, 0));
    } while (go_up(&g));
    return least;
}

static int64_t as_bytes(double x)
{
    return x < 0x1p62 ? (int64_t)x : INT64_MAX;
}

int64_t machine_memory_limit_at(const char *root)
{
    return as_bytes(least_memory(root, false));
}

int64_t machine_memory_available_at(const char *root)
{
    return as_bytes(least_memory(root, true));
}

int64_t machine_memory_limit(void)
{
    return machine_memory_limit_at("");
}

int64_t machine_memory_available(void)
{
    return machine_memory_available_at("");
}

double machine_cpu_quota_at(const char *root)
{
    group g = find_group(root, "cpu");
    double least = INFINITY;
    if (!g.found)
        return -1;
    do {
        char line[128];
        double quota = -1, period = -1;
        if (g.v2 && group_line(&g, "cpu.max", line, sizeof line)) {
            if (sscanf(line, "%lf %lf", &quota, &period) != 2)
                quota = -1;
        } else if (!g.v2) {
            quota = group_bytes(&g, "cpu.cfs_quota_us");
            period = group_bytes(&g, "cpu.cfs_period_us");
        }
        if (quota > 0 && period > 0 && isfinite(quota) && isfinite(period))
            least = fmin(least, quota / period);
    } while (go_up(&g));
    return isfinite(least) ? least : -1;
}

/* Processors of the affinity mask, ascending; ret_cpus may be NULL. */
static int32_t allowed_cpus(int32_t *ret_cpus, int32_t most)
{
    int32_t n = 0;
    /* The mask of a large machine does not fit a cpu_set_t: the kernel then says EINVAL. */
    for (size_t cpus = 1024; cpus <= 1 << 16; cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (!set)
            break;
        size_t size = CPU_ALLOC_SIZE(cpus);
        bool good = sched_getaffinity(0, size, set) == 0;
        for (size_t i = 0; good && i < cpus; i++)
            if (CPU_ISSET_S(i, size, set)) {
                if (ret_cpus && n < most)
                    ret_cpus[n] = (int32_t)i;
                n++;
            }
        CPU_FREE(set);
        if (good)
            break;
    }
    return n;
}

int32_t machine_cpus(void)
{
    double n = allowed_cpus(NULL, 0), quota = machine_cpu_quota_at("");
    if (quota > 0)
        n = fmin(n, ceil(quota));
    return n > 1 ? (int32_t)n : 1;
}

/* The lowest-numbered processor of the same physical core; itself where the system does not say. */
static int32_t core_of(const char *root, int32_t cpu)
{
    char path[PATH_SIZE], line[256];
    snprintf(path, sizeof path,
             "%.3000s/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", root, cpu);
    FILE *f = fopen(path, "re");
    if (!f)
        return cpu;
    int32_t core = cpu;
    if (fgets(line, sizeof line, f) && line[0] >= '0' && line[0] <= '9')
        core = (int32_t)strtol(line, NULL, 10);
    fclose(f);
    return core;
}

void machine_order_cpus_at(const char *root, int32_t *cpus, int32_t n)
{
    int32_t *core = calloc((size_t)n + 1, 2 * sizeof *core), *sorted = core + n, done = 0;
    if (!core)
        return;
    for (int32_t i = 0; i < n; i++)
        core[i] = core_of(root, cpus[i]);
    /* Round r takes the processor of every core that has r others of that core before it. */
    for (int32_t r = 0; done < n; r++)
        for (int32_t i = 0; i < n; i++) {
            int32_t before = 0;
            for (int32_t k = 0; k < i; k++)
                before += core[k] == core[i];
            if (before == r)
                sorted[done++] = cpus[i];
        }
    memcpy(cpus, sorted, (size_t)n * sizeof *cpus);
    free(core);
}

int32_t machine_own_cpus(int32_t *ret_cpus, int32_t most)
{
    int32_t n = allowed_cpus(ret_cpus, most);
    double quota = machine_cpu_quota_at("");
    if (n > most || (quota > 0 && quota < n))
        return 0;
    machine_order_cpus_at("", ret_cpus, n);
    return n;
}

bool machine_bind_thread(int32_t cpu)
{
    size_t size = CPU_ALLOC_SIZE((size_t)cpu + 1);
    cpu_set_t *set = CPU_ALLOC((size_t)cpu + 1);
    if (!set)
        return false;
    CPU_ZERO_S(size, set);
    CPU_SET_S((size_t)cpu, size, set);
    bool good = sched_setaffinity(0, size, set) == 0;
    CPU_FREE(set);
    return good;
}

int64_t machine_rss(void)
{
    int64_t bytes = proc_bytes("", "self/status", "VmRSS");
    return bytes > 0 ? bytes : 0;
}

int64_t machine_peak_rss(void)
{
    int64_t bytes = proc_bytes("", "self/status", "VmHWM");
    return bytes > 0 ? bytes : 0;
}
