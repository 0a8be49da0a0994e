/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "add": y = a + b. Backward hands d_out to both operands; the core usually aliases
 * instead.
 */
#include "rowwise.h"

CPU_ROWWISE_OP(add);
