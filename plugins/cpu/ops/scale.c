/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "scale": y = x * factor, the factor rounded to the compute dtype first (Gemma's
 * embedding).
 */
#include "rowwise.h"

CPU_ROWWISE_OP(scale);
