/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "act": y = f(x): SiLU, GELU (tanh form), sigmoid.
 */
#include "rowwise.h"

CPU_ROWWISE_OP(act);
