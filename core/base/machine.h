/* SPDX-License-Identifier: Apache-2.0
 *
 * What this process may use of the machine: memory and processors within its control groups, and
 * what it does use. All functions are [any].
 */
#ifndef MT_CORE_MACHINE_H
#define MT_CORE_MACHINE_H

#include <megatrain/base.h>

/* Bytes of RAM that the process may use at most: the least of the machine's memory and the limits
 * of its control group (v1 or v2) and all groups above it. */
int64_t machine_memory_limit(void);

/* Bytes that can still be allocated: within the same limits, less what is in use there and cannot
 * be reclaimed (page cache can). */
int64_t machine_memory_available(void);

/* Processors: the least of the affinity mask and the control groups' quotas, rounded up. >= 1 */
int32_t machine_cpus(void);

/* The processors of the affinity mask, one of every physical core first, then the second of each,
 * and so on: where threads that are to stay on one processor go. Returns how many; 0 where there
 * are more than `most`, or where a quota below them says that others use them too. */
int32_t machine_own_cpus(int32_t *ret_cpus, int32_t most);

/* Keeps the calling thread on one processor; false when the system will not have it. */
bool machine_bind_thread(int32_t cpu);

/* Resident bytes of this process, now and at its peak; 0 when the kernel does not say. */
int64_t machine_rss(void);
int64_t machine_peak_rss(void);

/* The first two and the quota (-1: none) with /proc and /sys below `root`, for tests. */
int64_t machine_memory_limit_at(const char *root);
int64_t machine_memory_available_at(const char *root);
double machine_cpu_quota_at(const char *root);
/* Puts n ascending processors in the order of machine_own_cpus. */
void machine_order_cpus_at(const char *root, int32_t *cpus, int32_t n);

#endif
