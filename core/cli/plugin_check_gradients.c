/* SPDX-License-Identifier: Apache-2.0
 *
 * Finite differences for every template of an architecture, on the CPU backend.
 */
#include "plugin_check.h"

#include "../../plugins/host/registry.h"
#include "../template/gradcheck.h"
#include "../template/model.h"

mt_status plugin_check_gradients(const mt_arch *arch, const mt_config *hyper)
{
    const void *table = NULL;
    void *device = NULL;
    model *m = NULL;
    mt_status st = registry_find(PLUGIN_BACKEND, "cpu", MT_BACKEND_INTERFACE, &table, NULL);
    const mt_backend *backend = table;
    if (st == MT_OK)
        st = backend->open(0, 1, &device);
    if (st == MT_OK)
        st = model_create(arch, hyper, &m);
    for (int32_t i = 0; st == MT_OK && i < m->n_tpls; i++)
        st = gradcheck_template(m->tpls[i], m->vocab, backend, device);
    model_destroy(m);
    if (device)
        backend->close(device);
    return st;
}
