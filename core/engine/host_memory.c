/* SPDX-License-Identifier: Apache-2.0
 *
 * Available memory from /proc/meminfo and the limits of the cgroups that hold the process.
 */
#include "host_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static int64_t read_number(const char *path)
{
    int64_t n = -1;
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    if (fscanf(f, "%" SCNd64, &n) != 1)
        n = -1; /* "max" */
    fclose(f);
    return n;
}

static int64_t meminfo_available(void)
{
    char line[128];
    int64_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    if (!f)
        return INT64_MAX;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %" SCNd64, &kib) == 1)
            break;
    fclose(f);
    return kib > 0 ? kib * 1024 : INT64_MAX;
}

/* Room below one cgroup's limit. Its page cache counts as used but can be dropped. */
static int64_t cgroup_room(const char *folder, const char *limit, const char *usage)
{
    char path[4400];
    snprintf(path, sizeof path, "%s/%s", folder, limit);
    int64_t most = read_number(path);
    if (most < 0 || most >= INT64_MAX / 2)
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/%s", folder, usage);
    int64_t used = read_number(path), cache = 0;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    FILE *f = fopen(path, "re");
    if (f) {
        char line[128];
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "inactive_file %" SCNd64, &cache) == 1)
                break;
        fclose(f);
    }
    used = used > cache ? used - cache : 0;
    return most > used ? most - used : 0;
}

int64_t host_memory_available(void)
{
    int64_t room = meminfo_available();
    char line[4200], folder[4300];
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::", 3) != 0)
            continue;
        line[strcspn(line, "\n")] = '\0';
        /* Every ancestor's limit holds too. */
        for (char *path = line + 3;;) {
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s", path);
            int64_t r = cgroup_room(folder, "memory.max", "memory.current");
            room = r < room ? r : room;
            char *slash = strrchr(path, '/');
            if (!slash || !path[0])
                break;
            *slash = '\0';
        }
    }
    if (f)
        fclose(f);
    int64_t v1 =
        cgroup_room("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
    room = v1 < room ? v1 : room;
    int64_t margin = room / 32;
    return room - margin;
}
