/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "act": y = f(x): SiLU, GELU (tanh form), sigmoid.
 */
#include "rows.h"

CPU_ROWS_OP(act);
