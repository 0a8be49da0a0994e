/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain plugins check: does a plugin load, agree with its manifest, and do what its kind asks?
 */
#ifndef MT_CORE_PLUGIN_CHECK_H
#define MT_CORE_PLUGIN_CHECK_H

#include "../manifest/config.h"

#include <megatrain/arch.h>
#include <megatrain/backend.h>
#include <megatrain/optim.h>

/* Runs every test for the plugin at `path`, each in its own process of at most `timeout` seconds,
 * and prints a line for each. True when all passed. Needs the registry. [main] */
bool plugin_check(const char *path, unsigned timeout);

/* Compares the derived gradients of every template of the model that `hyper` configures with
 * central differences in FP64 on the CPU backend; fails with the template, the tensor and the
 * element of the first difference. [main] */
mt_status plugin_check_gradients(const mt_arch *arch, const mt_config *hyper);

/* Updates small tensors as a whole and in ranges of the optimizer's granularity, with the keys of a
 * section `optimizer`; fails with the first element that differs, is not finite, or does not
 * belong to its range. [main] */
mt_status plugin_check_updates(const mt_optim *optim, const mt_config *keys);

#endif
