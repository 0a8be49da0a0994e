/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "glu": y = f(gate) * up: SiLU, GELU (tanh form), and GPT-OSS's clamped SwiGLU.
 */
#include "rowwise.h"

CPU_ROWWISE_OP(glu);
