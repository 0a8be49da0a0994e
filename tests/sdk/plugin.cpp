/* SPDX-License-Identifier: Apache-2.0
 *
 * An optimizer plugin in C++: all that it shows is that the SDK's macros and tables are C++17.
 */
#include <megatrain/optim.h>
#include <megatrain/plugin.h>

#include <new>

namespace
{

struct sgd {
    bool nothing;
};

mt_status create(const mt_config *, void **ret)
{
    *ret = new (std::nothrow) sgd{};
    return *ret ? static_cast<mt_status>(MT_OK) : mt_fail_nomem();
}

void destroy(void *optim)
{
    delete static_cast<sgd *>(optim);
}

uint32_t state_specs(const void *, mt_state_spec *)
{
    return 0;
}

mt_status update(const void *, const mt_update *u)
{
    for (int64_t i = 0; i < u->n; i++) {
        float w = mt_join_f32(u->hi[i], u->lo[i]);
        w -= static_cast<float>(u->lr * u->grad_scale) * u->grad[i];
        mt_split_f32(w, &u->hi[i], &u->lo[i]);
    }
    return MT_OK;
}

const mt_optim table = { sizeof(mt_optim), MT_GRAIN_ELEMENT, create, destroy, state_specs, update, 0, 0 };

mt_status prepare()
{
    mt_log(MT_LOG_DEBUG, "%s starts", mt_plugin_name);
    return MT_OK;
}

} // namespace

MT_PLUGIN_WITH("plain_sgd", "1.0.0", "Apache-2.0", prepare, 0, { MT_OPTIM_INTERFACE, &table })
