/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading a shared object and making sure, before anything of it is used, that it is the plugin
 * that its manifest describes and that its tables are whole. Every refusal says what was found and
 * what was expected.
 */
#include "../../core/base/status.h"
#include "host.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <megatrain/arch.h>
#include <megatrain/backend.h>
#include <megatrain/loader.h>
#include <megatrain/optim.h>
#include <stdio.h>
#include <sys/stat.h>

/* ---- interface tables ----------------------------------------------------------------------- */

typedef struct member {
    const char *name;
    size_t offset;
} member;

/* Members that must be there; the last one also tells the least size of the table, which stays what
 * it was in ABI 1.0 when the table grows. */
#define MEMBER(type, name)                                                                         \
    {                                                                                              \
#name, offsetof(type, name)                                                                \
    }

static const member arch_members[] = {
    MEMBER(mt_arch, model_types),
    MEMBER(mt_arch, configure),
    MEMBER(mt_arch, destroy),
};
static const member optim_members[] = {
    MEMBER(mt_optim, create),
    MEMBER(mt_optim, destroy),
    MEMBER(mt_optim, state_specs),
    MEMBER(mt_optim, update),
};
static const member weights_members[] = {
    MEMBER(mt_weights, probe),  MEMBER(mt_weights, open),   MEMBER(mt_weights, close),
    MEMBER(mt_weights, count),  MEMBER(mt_weights, info),   MEMBER(mt_weights, file),
    MEMBER(mt_weights, read),   MEMBER(mt_weights, create), MEMBER(mt_weights, write),
    MEMBER(mt_weights, finish), MEMBER(mt_weights, abort),
};
static const member data_members[] = {
    MEMBER(mt_data, open),       MEMBER(mt_data, close), MEMBER(mt_data, size),
    MEMBER(mt_data, next),       MEMBER(mt_data, tell),  MEMBER(mt_data, seek),
    MEMBER(mt_data, vocab_size),
};
static const member tokenizer_members[] = {
    MEMBER(mt_tokenizer, probe),       MEMBER(mt_tokenizer, open),
    MEMBER(mt_tokenizer, close),       MEMBER(mt_tokenizer, vocab_size),
    MEMBER(mt_tokenizer, special),     MEMBER(mt_tokenizer, token_id),
    MEMBER(mt_tokenizer, encode),      MEMBER(mt_tokenizer, decode),
    MEMBER(mt_tokenizer, fingerprint),
};
static const member chat_members[] = {
    MEMBER(mt_chat, formats),     MEMBER(mt_chat, identify),  MEMBER(mt_chat, open),
    MEMBER(mt_chat, close),       MEMBER(mt_chat, encode),    MEMBER(mt_chat, stops),
    MEMBER(mt_chat, fingerprint), MEMBER(mt_chat, resembles), MEMBER(mt_chat, open_custom),
    MEMBER(mt_chat, parse),
};
static const member backend_members[] = {
    MEMBER(mt_backend, kind),
    MEMBER(mt_backend, probe),
    MEMBER(mt_backend, open),
    MEMBER(mt_backend, close),
    MEMBER(mt_backend, info),
    MEMBER(mt_backend, device_alloc),
    MEMBER(mt_backend, device_free),
    MEMBER(mt_backend, host_alloc),
    MEMBER(mt_backend, host_free),
    MEMBER(mt_backend, queue_create),
    MEMBER(mt_backend, queue_destroy),
    MEMBER(mt_backend, queue_sync),
    MEMBER(mt_backend, event_create),
    MEMBER(mt_backend, event_destroy),
    MEMBER(mt_backend, event_record),
    MEMBER(mt_backend, event_wait),
    MEMBER(mt_backend, event_query),
    MEMBER(mt_backend, event_sync),
    MEMBER(mt_backend, error),
    MEMBER(mt_backend, copy_in),
    MEMBER(mt_backend, copy_out),
    MEMBER(mt_backend, copy),
    MEMBER(mt_backend, fill),
    MEMBER(mt_backend, copy_in_join),
    MEMBER(mt_backend, join_scratch),
    MEMBER(mt_backend, sum_squares),
    MEMBER(mt_backend, sum_squares_scratch),
    MEMBER(mt_backend, timestamp),
    MEMBER(mt_backend, delay),
    MEMBER(mt_backend, kernel),
};

typedef struct interface_def {
    plugin_kind kind;
    const char *id;
    const member *members;
    size_t n;
} interface_def;

#define INTERFACE(kind, id, members)                                                               \
    {                                                                                              \
        kind, id, members, sizeof(members) / sizeof *(members)                                     \
    }

static const interface_def interfaces[] = {
    INTERFACE(PLUGIN_ARCH, MT_ARCH_INTERFACE, arch_members),
    INTERFACE(PLUGIN_OPTIM, MT_OPTIM_INTERFACE, optim_members),
    INTERFACE(PLUGIN_LOADER, MT_WEIGHTS_INTERFACE, weights_members),
    INTERFACE(PLUGIN_LOADER, MT_DATA_INTERFACE, data_members),
    INTERFACE(PLUGIN_LOADER, MT_TOKENIZER_INTERFACE, tokenizer_members),
    INTERFACE(PLUGIN_LOADER, MT_CHAT_INTERFACE, chat_members),
    INTERFACE(PLUGIN_BACKEND, MT_BACKEND_INTERFACE, backend_members),
};

static bool names(const char *const *list, const char *name)
{
    for (; *list; list++)
        if (strcmp(*list, name) == 0)
            return true;
    return false;
}

static mt_status check_table(const plugin_record *r, const interface_def *d, const void *table)
{
    uint32_t size;
    memcpy(&size, table, sizeof size); /* every table starts with its struct_size */
    size_t least = d->members[d->n - 1].offset + sizeof(void *);
    if (size < least)
        return status_set(MT_ERR_ABI,
                          "plugin %s: table of %s: struct_size is %u, expected at least "
                          "%zu; was it built with other headers?",
                          r->path, d->id, size, least);
    for (size_t i = 0; i < d->n; i++) {
        const void *value;
        memcpy(&value, (const char *)table + d->members[i].offset, sizeof value);
        if (!value)
            return status_set(MT_ERR_ABI,
                              "plugin %s: table of %s: member '%s' is NULL, expected a "
                              "value",
                              r->path, d->id, d->members[i].name);
    }
    return MT_OK;
}

/* What an architecture claims and what its manifest promises must be the same names. */
static mt_status check_model_types(const plugin_record *r, const mt_arch *arch)
{
    for (int32_t i = 0; r->provides[i]; i++) {
        bool claimed = false;
        for (uint32_t k = 0; k < arch->n_model_types; k++)
            claimed |= arch->model_types[k] && strcmp(arch->model_types[k], r->provides[i]) == 0;
        if (!claimed)
            return status_set(MT_ERR_ABI,
                              "plugin %s: its manifest provides '%s', which is not among its %u "
                              "model types",
                              r->path, r->provides[i], arch->n_model_types);
    }
    for (uint32_t k = 0; k < arch->n_model_types; k++)
        if (!arch->model_types[k] || !names(r->provides, arch->model_types[k]))
            return status_set(MT_ERR_ABI,
                              "plugin %s: model type '%s' is missing in 'provides' of its manifest",
                              r->path, arch->model_types[k] ? arch->model_types[k] : "(NULL)");
    return MT_OK;
}

static mt_status check_interfaces(const plugin_record *r, const mt_plugin *p)
{
    int32_t found = 0;
    const char *wanted = NULL;
    for (size_t i = 0; i < sizeof interfaces / sizeof *interfaces; i++) {
        const interface_def *d = &interfaces[i];
        if (d->kind != r->kind)
            continue;
        wanted = wanted ? wanted : d->id;
        const void *table = p->get_interface(d->id);
        if (!table)
            continue;
        found++;
        mt_status s = check_table(r, d, table);
        if (s == MT_OK && d->kind == PLUGIN_ARCH)
            s = check_model_types(r, table);
        if (s != MT_OK)
            return s;
        const mt_optim *optim = d->kind == PLUGIN_OPTIM ? table : NULL;
        if (optim &&
            (optim->granularity < MT_GRAIN_ELEMENT || optim->granularity > MT_GRAIN_TENSOR))
            return status_set(MT_ERR_ABI, "plugin %s: granularity is %d, expected 0 to 2", r->path,
                              optim->granularity);
        const mt_backend *backend = d->kind == PLUGIN_BACKEND ? table : NULL;
        if (backend && !names(r->provides, backend->kind))
            return status_set(
                MT_ERR_ABI, "plugin %s: device kind '%s' is missing in 'provides' of its manifest",
                r->path, backend->kind);
    }
    if (!found)
        return status_set(MT_ERR_ABI, "plugin %s: has no interface of its kind '%s'; expected %s%s",
                          r->path, plugin_kind_name(r->kind), wanted,
                          r->kind == PLUGIN_LOADER ? " or another of loader.h" : "");
    return MT_OK;
}

/* ---- descriptor ----------------------------------------------------------------------------- */

static mt_status check_abi(const char *path, const char *who, uint32_t major, uint32_t minor)
{
    if (major != MT_ABI_MAJOR)
        return status_set(MT_ERR_ABI, "plugin %s: %s ABI %u.%u, expected major version %d", path,
                          who, major, minor, MT_ABI_MAJOR);
    if (minor > MT_ABI_MINOR)
        return status_set(MT_ERR_ABI,
                          "plugin %s: %s ABI %u.%u, newer than this program's %d.%d; update "
                          "MegaTrain",
                          path, who, major, minor, MT_ABI_MAJOR, MT_ABI_MINOR);
    return MT_OK;
}

static mt_status check_same(const plugin_record *r, const char *what, const char *found,
                            const char *expected)
{
    if (found && strcmp(found, expected) == 0)
        return MT_OK;
    return status_set(MT_ERR_ABI, "plugin %s: its %s is '%s', but its manifest says '%s'", r->path,
                      what, found ? found : "(NULL)", expected);
}

static mt_status check_descriptor(const plugin_record *r, const mt_plugin *p)
{
    size_t least = offsetof(mt_plugin, get_interface) + sizeof p->get_interface;
    if (p->magic != MT_PLUGIN_MAGIC)
        return status_set(MT_ERR_ABI, "plugin %s: magic is 0x%08x, expected 0x%08x", r->path,
                          p->magic, MT_PLUGIN_MAGIC);
    if (p->struct_size < least)
        return status_set(MT_ERR_ABI, "plugin %s: descriptor of %u bytes, expected at least %zu",
                          r->path, p->struct_size, least);
    mt_status s = check_abi(r->path, "is built for", p->abi_major, p->abi_minor);
    if (s != MT_OK)
        return s;
    if (p->pointer_size != sizeof(void *))
        return status_set(MT_ERR_ABI, "plugin %s: pointers of %u bytes, expected %zu", r->path,
                          p->pointer_size, sizeof(void *));
    if ((p->build_flags ^ MT_BUILD_FLAGS) & MT_BUILD_TSAN)
        return status_set(MT_ERR_ABI,
                          "plugin %s: is built %s ThreadSanitizer, this program %s; "
                          "build both alike",
                          r->path, p->build_flags & MT_BUILD_TSAN ? "with" : "without",
                          MT_BUILD_FLAGS & MT_BUILD_TSAN ? "with" : "without");
    if (p->abi_major != r->abi_major || p->abi_minor != r->abi_minor)
        return status_set(MT_ERR_ABI,
                          "plugin %s: is built for ABI %u.%u, but its manifest says "
                          "%u.%u",
                          r->path, p->abi_major, p->abi_minor, r->abi_major, r->abi_minor);
    s = check_same(r, "name", p->name, r->name);
    if (s == MT_OK)
        s = check_same(r, "version", p->version, r->version);
    if (s == MT_OK)
        s = check_same(r, "licence", p->licence, r->licence);
    if (s == MT_OK && (!p->init || !p->get_interface))
        s = status_set(MT_ERR_ABI, "plugin %s: '%s' of its descriptor is NULL, expected a function",
                       r->path, p->init ? "get_interface" : "init");
    return s;
}

/* The dynamic linker maps what the program headers say without looking at the file's size, and dies
 * in the missing pages of one that was copied in part. */
static mt_status check_whole(const char *path)
{
    ElfW(Ehdr) head;
    ElfW(Phdr) part;
    struct stat st;
    uint64_t end = 0;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return status_set(MT_ERR_ABI, "plugin %s: cannot open: %s", path, strerror(errno));
    /* Anything odd but that is for dlopen to tell. */
    bool known = fstat(fileno(f), &st) == 0 && fread(&head, sizeof head, 1, f) == 1 &&
                 memcmp(head.e_ident, ELFMAG, SELFMAG) == 0 && head.e_phentsize == sizeof part &&
                 head.e_phoff <= INT64_MAX && fseeko(f, (off_t)head.e_phoff, SEEK_SET) == 0;
    for (int i = 0; known && i < head.e_phnum && fread(&part, sizeof part, 1, f) == 1; i++)
        if (part.p_type == PT_LOAD && part.p_offset + part.p_filesz > end)
            end = part.p_offset + part.p_filesz;
    fclose(f);
    if (!known || end <= (uint64_t)st.st_size)
        return MT_OK;
    return status_set(MT_ERR_ABI,
                      "plugin %s is cut off: %lld bytes, expected at least %llu; install it again",
                      path, (long long)st.st_size, (unsigned long long)end);
}

mt_status handshake(plugin_record *r, const mt_host *host)
{
    union {
        void *object;
        const mt_plugin *(*function)(uint32_t, uint32_t);
    } entry;
    mt_status s = check_abi(r->path, "its manifest asks for", r->abi_major, r->abi_minor);
    if (s == MT_OK)
        s = discover_check_owner(r->path);
    if (s == MT_OK)
        s = check_whole(r->path);
    if (s != MT_OK)
        return s;
    /* Never unloaded, also when it is refused: code of it may have registered itself anywhere. */
    void *handle = dlopen(r->path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return status_set(MT_ERR_ABI, "plugin %s: cannot load: %s", r->path, dlerror());
    entry.object = dlsym(handle, MT_PLUGIN_ENTRY);
    if (!entry.object)
        return status_set(MT_ERR_ABI, "plugin %s: does not export %s; is it a MegaTrain plugin?",
                          r->path, MT_PLUGIN_ENTRY);
    const mt_plugin *p = entry.function(MT_ABI_MAJOR, MT_ABI_MINOR);
    if (!p)
        return status_set(MT_ERR_ABI, "plugin %s: declines to work with ABI %d.%d of this program",
                          r->path, MT_ABI_MAJOR, MT_ABI_MINOR);
    s = check_descriptor(r, p);
    if (s != MT_OK)
        return s;
    status_set(MT_OK, "%s", "");
    s = p->init(host);
    if (s != MT_OK) {
        const char *why = status_text();
        return status_set(s, "plugin %s: cannot start: %s", r->path,
                          *why ? why : "it gave no reason");
    }
    s = check_interfaces(r, p);
    if (s != MT_OK)
        return s;
    r->plugin = p;
    return MT_OK;
}
