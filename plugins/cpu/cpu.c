/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin's entry: hands out the CPU backend.
 */
#include "device.h"

#include <megatrain/plugin.h>

MT_PLUGIN("cpu", "1.0.0", "Apache-2.0", MT_BACKEND_INTERFACE, &cpu_backend)
