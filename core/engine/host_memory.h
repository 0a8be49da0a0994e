/* SPDX-License-Identifier: Apache-2.0
 *
 * How much host memory this process may still use.
 */
#ifndef MT_CORE_HOST_MEMORY_H
#define MT_CORE_HOST_MEMORY_H

#include <stdint.h>

/* Bytes: what the machine has available, or less where a cgroup allows less, minus a margin for
 * everything that no plan lists. [any] */
int64_t host_memory_available(void);

#endif
