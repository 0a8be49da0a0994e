/* SPDX-License-Identifier: Apache-2.0
 *
 * Is a template's derived backward right? Asked by tests and by `megatrain plugins check`.
 */
#ifndef MT_CORE_GRADCHECK_H
#define MT_CORE_GRADCHECK_H

#include "template.h"

/* Compares, in FP64, the derived gradient of every parameter and input with central differences of
 * a random combination of the outputs, on a small batch of odd documents; then the three policies
 * with each other, bit for bit. Fails with the template, the tensor and the element of the first
 * difference. Needs a backend that computes in FP64 in host memory. [main] */
mt_status gradcheck_template(const tpl *t, int64_t vocab, const mt_backend *backend, void *device);

#endif
