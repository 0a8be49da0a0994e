/* SPDX-License-Identifier: Apache-2.0
 *
 * Discovery, ownership and handshake: what is found in which order, and that every wrong plugin is
 * refused with a text of its own.
 *     test_registry FOLDER_OF_TEST_PLUGINS FOLDER_OF_IN_TREE_PLUGINS
 */
#include "../check.h"
#include "core/base/status.h"
#include "plugins/host/registry.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <megatrain/arch.h>
#include <megatrain/backend.h>
#include <megatrain/loader.h>
#include <megatrain/optim.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/mt-plugins-XXXXXX";
static const char *built, *in_tree;

static const char *path_in(const char *sub, const char *name, const char *end)
{
    static char path[16][512];
    static int next;
    char *p = path[next++ % 16];
    snprintf(p, sizeof path[0], "%s/%s/%s%s", folder, sub, name, end);
    return p;
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0 || chmod(path, 0644) != 0)
        abort();
}

static void make_folder(const char *sub)
{
    if (mkdir(path_in(sub, "", ""), 0755) != 0 || chmod(path_in(sub, "", ""), 0755) != 0)
        abort();
}

static void write_manifest(const char *sub, const char *name, const char *kind, const char *abi,
                           const char *provides)
{
    char text[512];
    snprintf(text, sizeof text,
             "name: %s\nversion: 1.2.3\nlicence: Apache-2.0\ndescription: A test\nkind: %s\n"
             "abi: \"%s\"\nprovides: [%s]\n",
             name, kind, abi, provides);
    write_text(path_in(sub, name, ".yaml"), text);
}

/* Copies a built module to SUB/NAME.so. */
static void copy_module(const char *module, const char *sub, const char *name)
{
    char from[512], buffer[65536];
    size_t n;
    snprintf(from, sizeof from, "%s/%s.so", built, module);
    const char *to = path_in(sub, name, ".so");
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    if (!in || !out)
        abort();
    while ((n = fread(buffer, 1, sizeof buffer, in)) > 0)
        if (fwrite(buffer, 1, n, out) != n)
            abort();
    fclose(in);
    if (fclose(out) != 0 || chmod(to, 0755) != 0)
        abort();
}

/* A folder SUB with the module and an optimizer manifest of the same name. */
static const char *place(const char *sub, const char *module)
{
    make_folder(sub);
    copy_module(module, sub, module);
    write_manifest(sub, module, "optim", "1.0", "sgd");
    return path_in(sub, module, ".so");
}

/* Loading must fail with "plugin PATH: " + expected (PATH/.. where it starts with '!'). */
static void refuse_path(const char *path, const char *expected)
{
    char text[1024];
    const plugin_record *r = NULL;
    mt_status s = registry_load_file(path, &r);
    CHECK(s != MT_OK && !r, "%s was accepted", path);
    snprintf(text, sizeof text, "plugin %s%s", path, expected);
    CHECK(strcmp(status_text(), text) == 0, "found: %s\n  expected: %s", status_text(), text);
    /* It stays refused, for the same reason. */
    CHECK(registry_load_file(path, &r) == s && strcmp(status_text(), text) == 0, "%s",
          status_text());
}

static void refuse(const char *module, const char *expected)
{
    refuse_path(place(module, module), expected);
}

/* A module under another name, or with another manifest. */
static void refuse_copy(const char *sub, const char *module, const char *name, const char *kind,
                        const char *abi, const char *provides, const char *expected)
{
    make_folder(sub);
    copy_module(module, sub, name);
    write_manifest(sub, name, kind, abi, provides);
    refuse_path(path_in(sub, name, ".so"), expected);
}

static void test_wrong_descriptors(void)
{
    char text[256];
    refuse("bad_magic", ": magic is 0x12345678, expected 0x4c50544d");
    refuse("null_descriptor", ": declines to work with ABI 1.0 of this program");
    snprintf(text, sizeof text, ": descriptor of 24 bytes, expected at least %zu",
             sizeof(mt_plugin));
    refuse("short_descriptor", text);
    refuse("other_major", ": is built for ABI 2.0, expected major version 1");
    refuse("newer_minor",
           ": is built for ABI 1.1, newer than this program's 1.0; update MegaTrain");
    refuse("other_pointers", ": pointers of 4 bytes, expected 8");
    refuse("other_sanitizer", MT_BUILD_FLAGS & MT_BUILD_TSAN
                                  ? ": is built without ThreadSanitizer, this program with; build "
                                    "both alike"
                                  : ": is built with ThreadSanitizer, this program without; build "
                                    "both alike");
    refuse("no_init", ": 'init' of its descriptor is NULL, expected a function");
    refuse("init_fails", ": cannot start: the printer is out of ink");
    refuse("prepare_fails", ": cannot start: prepare_fails: the printer is out of paper");
    refuse("init_silent", ": cannot start: it gave no reason");
    refuse("not_a_plugin", ": does not export mt_plugin_entry_v1; is it a MegaTrain plugin?");
}

static void test_wrong_tables(void)
{
    char text[256];
    refuse("no_interface", ": has no interface of its kind 'optim'; expected megatrain.optim/1");
    snprintf(text, sizeof text,
             ": table of megatrain.optim/1: struct_size is 16, expected at least %zu; was it built "
             "with other headers?",
             offsetof(mt_optim, flags));
    refuse("short_table", text);
    refuse("null_member",
           ": table of megatrain.optim/1: member 'state_specs' is NULL, expected a value");
    refuse("bad_granularity", ": granularity is 7, expected 0 to 2");

    /* an optimizer whose manifest says that it is an architecture */
    refuse_copy("kind", "sample", "sample", "arch", "1.0", "x",
                ": has no interface of its kind 'arch'; expected megatrain.arch/1");
    refuse_copy("more", "sample-arch", "sample-arch", "arch", "1.0", "sample, sample_text, other",
                ": its manifest provides 'other', which is not among its 2 model types");
    refuse_copy("chat", "chat_without_parse", "chat_without_parse", "loader", "1.0", "chat",
                ": table of megatrain.chat/1: member 'parse' is NULL, expected a value");
    refuse_copy("less", "sample-arch", "sample-arch", "arch", "1.0", "sample",
                ": model type 'sample_text' is missing in 'provides' of its manifest");
}

static void test_wrong_manifests(void)
{
    refuse_copy("clash", "sample", "other", "optim", "1.0", "sgd",
                ": its name is 'sample', but its manifest says 'other'");

    refuse_copy("abi", "sample", "sample", "optim", "2.0", "sgd",
                ": its manifest asks for ABI 2.0, expected major version 1");

    make_folder("texts");
    static const char *const cases[][2] = {
        { "name: x\n", ":1:1: key 'version' is missing" },
        { "name: x\nversion: 1.2.3\nlicence: A\nkind: optimizer\n",
          ":4:7: 'kind' is \"optimizer\"; expected arch, optim, loader or backend" },
        { "name: x\nversion: 1.2.3\nlicence: A\nkind: optim\nabi: 1.0\n",
          ":5:6: 'abi' must be a string (put it in quotes when it looks like something else), "
          "found "
          "the number 1.0" },
        { "name: x\nversion: 1.2.3\nlicence: A\nkind: optim\nabi: '1'\n",
          ":5:6: 'abi' is \"1\"; expected MAJOR.MINOR such as \"1.0\"" },
        { "name: x\nversion: 1.2.3\nlicence: A\nkind: optim\nabi: '1.0'\nprovides: []\n",
          ":6:11: 'provides' must be a list of at least one name" },
        { "name: x\nversion: 1.2.3\nlicence: A\nkind: optim\nabi: '1.0'\nprovides: [y]\nauthor: "
          "z\n",
          ":7:1: unknown key 'author'; known: name, version, licence, kind, abi, provides, "
          "description, check" },
        { "name: x\nversion: [\n", ":3:1: did not find expected node content (while parsing a flow "
                                   "node that starts in line 3)" },
    };
    copy_module("sample", "texts", "x");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char expected[1024];
        const plugin_record *r = NULL;
        const char *so = path_in("texts", "x", ".so"), *yaml = path_in("texts", "x", ".yaml");
        write_text(yaml, cases[i][0]);
        CHECK(registry_load_file(so, &r) != MT_OK && !r);
        snprintf(expected, sizeof expected, "plugin %s: %s%s", so, yaml, cases[i][1]);
        CHECK(strcmp(status_text(), expected) == 0, "found: %s\n  expected: %s", status_text(),
              expected);
    }
}

/* Texts of the dynamic linker differ between versions; only ours are compared. */
static void test_unloadable(void)
{
    char text[600];
    const plugin_record *r = NULL;
    const char *path = place("unresolved", "unresolved");
    CHECK(registry_load_file(path, &r) == MT_ERR_ABI);
    snprintf(text, sizeof text, "plugin %s: cannot load: ", path);
    CHECK(strncmp(status_text(), text, strlen(text)) == 0, "%s", status_text());
    CHECK(strstr(status_text(), "a_function_that_nobody_has"), "%s", status_text());

    make_folder("text");
    write_manifest("text", "words", "optim", "1.0", "sgd");
    path = path_in("text", "words", ".so");
    write_text(path, "These are words.\n");
    CHECK(registry_load_file(path, &r) == MT_ERR_ABI);
    snprintf(text, sizeof text, "plugin %s: cannot load: ", path);
    CHECK(strncmp(status_text(), text, strlen(text)) == 0, "%s", status_text());

    /* Copied in part: the dynamic linker would die of it. */
    make_folder("part");
    copy_module("sample", "part", "sample");
    write_manifest("part", "sample", "optim", "1.0", "sgd");
    path = path_in("part", "sample", ".so");
    CHECK(truncate(path, 5000) == 0);
    CHECK(registry_load_file(path, &r) == MT_ERR_ABI);
    snprintf(text, sizeof text, "plugin %s is cut off: 5000 bytes, expected at least ", path);
    CHECK(strncmp(status_text(), text, strlen(text)) == 0, "%s", status_text());

    CHECK(registry_load_file(path_in("part", "x", ".so"), &r) == MT_ERR_NOT_FOUND, "%s",
          status_text());
    CHECK(registry_load_file("x.txt", &r) == MT_ERR_INVALID);
    CHECK(strcmp(status_text(), "plugin x.txt: expected a shared object NAME.so") == 0, "%s",
          status_text());
}

static void test_ownership(void)
{
    char expected[1024];
    const char *path = place("writable", "sample");
    if (chmod(path, 0777) != 0)
        abort();
    snprintf(expected, sizeof expected,
             " is writable by everyone (mode 777); make it safe with: chmod go-w %s", path);
    refuse_path(path, expected);

    path = place("group", "sample");
    if (chmod(path, 0775) != 0)
        abort();
    snprintf(expected, sizeof expected,
             " is writable by its group (mode 775); make it safe with: chmod go-w %s", path);
    refuse_path(path, expected);

    const plugin_record *r = NULL;
    path = place("open", "sample");
    char *parent = strdup(path);
    *strrchr(parent, '/') = '\0';
    if (chmod(parent, 0777) != 0)
        abort();
    CHECK(registry_load_file(path, &r) == MT_ERR_UNSUPPORTED && !r);
    snprintf(
        expected, sizeof expected,
        "plugin folder %s is writable by everyone (mode 777); make it safe with: chmod go-w %s",
        parent, parent);
    CHECK(strcmp(status_text(), expected) == 0, "%s", status_text());

    /* A link into that folder does not help. */
    make_folder("link");
    const char *link = path_in("link", "sample", ".so");
    write_manifest("link", "sample", "optim", "1.0", "sgd");
    if (symlink(path, link) != 0)
        abort();
    CHECK(registry_load_file(link, &r) == MT_ERR_UNSUPPORTED && !r);
    CHECK(strcmp(status_text(), expected) == 0, "%s", status_text());
    free(parent);

    make_folder("folder");
    write_manifest("folder", "sample", "optim", "1.0", "sgd");
    path = path_in("folder", "sample", ".so");
    if (mkdir(path, 0755) != 0)
        abort();
    refuse_path(path, " is not a regular file");

    if (geteuid() == 0) { /* only root can give a file away */
        path = place("foreign", "sample");
        if (chown(path, 12345, 12345) != 0)
            abort();
        refuse_path(path, " belongs to user 12345; expected root or the present user (0)");
    }
}

static void test_good(void)
{
    const plugin_record *r = NULL;
    const void *table = NULL;
    registry_finish();
    const char *path = place("good", "sample");
    CHECK(registry_load_file(path, &r) == MT_OK, "%s", status_text());
    if (!r)
        return;
    CHECK(strcmp(r->name, "sample") == 0 && strcmp(r->version, "1.2.3") == 0);
    CHECK(r->kind == PLUGIN_OPTIM && strcmp(r->provides[0], "sgd") == 0 && !r->provides[1]);
    CHECK(r->plugin && registry_interface(r, MT_OPTIM_INTERFACE));
    CHECK(!registry_interface(r, "megatrain.nothing/1"));

    copy_module("sample-arch", "good", "sample-arch");
    write_manifest("good", "sample-arch", "arch", "1.0", "sample, sample_text");
    CHECK(registry_load_file(path_in("good", "sample-arch", ".so"), &r) == MT_OK, "%s",
          status_text());
    const mt_arch *arch = registry_interface(r, MT_ARCH_INTERFACE);
    const bool *prepared = registry_interface(r, "sample.prepared/1");
    CHECK(prepared && *prepared, "a plugin's prepare was not called, or a second interface lost");
    CHECK(arch && arch->configure(NULL, NULL, NULL) == MT_ERR_UNSUPPORTED);
    CHECK(strcmp(status_text(), "sample-arch has no units") == 0, "%s", status_text());

    /* Found by what it provides, once it is known. */
    CHECK(registry_find(PLUGIN_ARCH, "sample_text", MT_ARCH_INTERFACE, &table, &r) == MT_OK &&
          table == arch);
    table = NULL;
    CHECK(registry_find(PLUGIN_ARCH, "sample", MT_OPTIM_INTERFACE, &table, &r) ==
              MT_ERR_UNSUPPORTED &&
          !table);
    CHECK(strstr(status_text(), "does not offer megatrain.optim/1"), "%s", status_text());
}

/* Stands before the C library's. */
static const char *unlistable = "";

int scandir(const char *path, struct dirent ***ret, int (*filter)(const struct dirent *),
            int (*compare)(const struct dirent **, const struct dirent **))
{
    int (*next)(const char *, struct dirent ***, int (*)(const struct dirent *),
                int (*)(const struct dirent **, const struct dirent **));
    *(void **)&next = dlsym(RTLD_NEXT, "scandir");
    if (strcmp(path, unlistable) != 0)
        return next(path, ret, filter, compare);
    errno = EIO;
    return -1;
}

static void test_search(void)
{
    registry_finish();
    make_folder("first");
    make_folder("second");
    make_folder("unsafe");
    copy_module("sample", "first", "sample");
    write_manifest("first", "sample", "optim", "1.0", "sgd, momentum");
    copy_module("sample", "second", "sample"); /* shadowed */
    write_manifest("second", "sample", "optim", "1.0", "sgd");
    copy_module("init_fails", "second", "init_fails");
    write_manifest("second", "init_fails", "optim", "1.0", "momentum, failing");
    write_text(path_in("second", "broken", ".yaml"), "name: [\n");
    write_manifest("second", "lonely", "optim", "1.0", "lonely"); /* no .so */
    copy_module("sample", "unsafe", "unsafe");
    write_manifest("unsafe", "unsafe", "optim", "1.0", "unsafe");
    if (chmod(path_in("unsafe", "", ""), 0777) != 0 || chdir(path_in("second", "", "")) != 0)
        abort();

    char *first = realpath(path_in("first", "", ""), NULL);
    char absent[512], variable[2048], text[1024];
    snprintf(absent, sizeof absent, "%s/absent", folder);
    snprintf(variable, sizeof variable, ".::second:%s/second:%s/unsafe:%s", folder, folder, absent);
    setenv("MEGATRAIN_PLUGIN_PATH", variable, 1);
    setenv("XDG_DATA_HOME", absent, 1);
    const char *dirs[] = { first };
    CHECK(registry_init(dirs, 1) == MT_OK, "%s", status_text());

    const plugin_record *r = NULL;
    const void *table = NULL;
    bool unsafe = false, lonely = false;
    int samples = 0;
    for (int32_t i = 0; i < registry_count(); i++) {
        const plugin_record *k = registry_get(i);
        samples += strcmp(k->name, "sample") == 0;
        unsafe |= strcmp(k->name, "unsafe") == 0;
        lonely |= strcmp(k->name, "lonely") == 0;
        CHECK(!k->plugin, "%s was loaded by the search", k->name);
    }
    CHECK(samples == 1 && !unsafe && !lonely);
    CHECK(!registry_get(-1) && !registry_get(registry_count()));

    CHECK(registry_find(PLUGIN_OPTIM, "momentum", MT_OPTIM_INTERFACE, &table, &r) == MT_OK, "%s",
          status_text());
    CHECK(r && strncmp(r->path, first, strlen(first)) == 0, "the first folder does not win");
    CHECK(r && r->shadows && strstr(r->shadows, "/second/sample.so"));
    CHECK(registry_find(PLUGIN_OPTIM, "failing", MT_OPTIM_INTERFACE, &table, &r) == MT_ERR_DEVICE);
    CHECK(strstr(status_text(), "cannot start: the printer is out of ink"), "%s", status_text());
    CHECK(registry_find(PLUGIN_OPTIM, "momentun", MT_OPTIM_INTERFACE, &table, &r) ==
          MT_ERR_NOT_FOUND);
    /* Plugins that are installed where the build would install its own are listed behind. */
    const char *start = "no plugin provides optim 'momentun'; there is: sgd, momentum, failing";
    CHECK(strncmp(status_text(), start, strlen(start)) == 0, "%s", status_text());
    CHECK(strstr(status_text(), " (those of other plugins with --plugin-dir DIR or "
                                "MEGATRAIN_PLUGIN_PATH); did you mean 'momentum'?"),
          "%s", status_text());
    CHECK(registry_find(PLUGIN_ARCH, "no_such", MT_ARCH_INTERFACE, &table, &r) == MT_ERR_NOT_FOUND);
    CHECK(strstr(status_text(), "no plugin provides arch 'no_such'"), "%s", status_text());
    registry_finish();

    const char *missing[] = { absent };
    CHECK(registry_init(missing, 1) == MT_ERR_NOT_FOUND);
    snprintf(text, sizeof text, "plugin folder %s: No such file or directory", absent);
    CHECK(strcmp(status_text(), text) == 0, "%s", status_text());
    CHECK(registry_count() == 0);

    /* What the command line names must have an effect. */
    const char *no_folder[] = { path_in("first", "sample", ".yaml") };
    CHECK(registry_init(no_folder, 1) == MT_ERR_INVALID && registry_count() == 0);
    snprintf(text, sizeof text, "plugin folder %s is not a folder", no_folder[0]);
    CHECK(strcmp(status_text(), text) == 0, "%s", status_text());
    const char *unsafe_dirs[] = { path_in("unsafe", "", "") };
    CHECK(registry_init(unsafe_dirs, 1) == MT_ERR_UNSUPPORTED && registry_count() == 0);
    CHECK(strstr(status_text(), "writable by everyone"), "%s", status_text());
    unlistable = first;
    CHECK(registry_init(dirs, 1) == MT_ERR_IO && registry_count() == 0);
    snprintf(text, sizeof text, "plugin folder %s: cannot list: Input/output error", first);
    CHECK(strcmp(status_text(), text) == 0, "%s", status_text());
    unlistable = "";
    unsetenv("MEGATRAIN_PLUGIN_PATH");
    free(first);
}

/* The plugins of the tree pass the same door. */
static void test_in_tree(void)
{
    registry_finish();
    const char *dirs[] = { in_tree };
    CHECK(registry_init(dirs, 1) == MT_OK, "%s", status_text());
    CHECK(registry_count() >= 4, "%d plugins", registry_count());
    for (int32_t i = 0; i < registry_count(); i++) {
        const plugin_record *r = registry_get(i), *loaded = NULL;
        if (strncmp(r->path, in_tree, strlen(in_tree)) != 0)
            continue;
        CHECK(registry_load_file(r->path, &loaded) == MT_OK && loaded == r, "%s", status_text());
    }
    const void *table = NULL;
    CHECK(registry_find(PLUGIN_OPTIM, "adamw", MT_OPTIM_INTERFACE, &table, NULL) == MT_OK, "%s",
          status_text());
    CHECK(registry_find(PLUGIN_LOADER, "text", MT_DATA_INTERFACE, &table, NULL) == MT_OK, "%s",
          status_text());
    CHECK(registry_find(PLUGIN_LOADER, "text", MT_TOKENIZER_INTERFACE, &table, NULL) == MT_OK, "%s",
          status_text());
    CHECK(registry_find(PLUGIN_LOADER, "safetensors", MT_WEIGHTS_INTERFACE, &table, NULL) == MT_OK,
          "%s", status_text());
    CHECK(registry_find(PLUGIN_BACKEND, "cpu", MT_BACKEND_INTERFACE, &table, NULL) == MT_OK, "%s",
          status_text());
    registry_finish();
}

int main(int argc, char **argv)
{
    if (argc != 3 || !mkdtemp(folder) || chmod(folder, 0755) != 0)
        return 1;
    built = argv[1];
    in_tree = argv[2];
    RUN(test_wrong_descriptors);
    RUN(test_wrong_tables);
    RUN(test_wrong_manifests);
    RUN(test_unloadable);
    RUN(test_ownership);
    RUN(test_good);
    RUN(test_search);
    RUN(test_in_tree);
    registry_finish();
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) ? 1 : check_done();
}
