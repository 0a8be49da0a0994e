/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin's entry: hands out the CUDA backend.
 */
#include "cuda.h"

#include <megatrain/plugin.h>

MT_PLUGIN_WITH("cuda", "1.0.0", "Apache-2.0", NULL, CUDART_VERSION / 1000,
               { MT_BACKEND_INTERFACE, &cuda_backend })
