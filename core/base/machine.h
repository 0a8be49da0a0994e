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

/* Resident bytes of this process, now and at its peak; 0 when the kernel does not say. */
int64_t machine_rss(void);
int64_t machine_peak_rss(void);

/* The first two and the quota (-1: none) with /proc and /sys below `root`, for tests. */
int64_t machine_memory_limit_at(const char *root);
int64_t machine_memory_available_at(const char *root);
double machine_cpu_quota_at(const char *root);

#endif
