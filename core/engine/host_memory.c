/* SPDX-License-Identifier: Apache-2.0
 *
 * What may be allocated within the limits of the machine and its groups, less a margin.
 */
#include "host_memory.h"

#include "../base/machine.h"

int64_t host_memory_available(void)
{
    int64_t room = machine_memory_available();
    return room - room / 32;
}
