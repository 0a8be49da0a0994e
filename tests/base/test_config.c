/* SPDX-License-Identifier: Apache-2.0
 *
 * YAML and JSON into one tree: values, places in messages, overrides, suggestions, writing.
 */
#include "../check.h"
#include "core/base/status.h"
#include "core/manifest/config.h"

#include <math.h>
#include <unistd.h>

static char folder[] = "/tmp/mt-config-XXXXXX";

static const char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const char *text)
{
    FILE *f = fopen(path_of(name), "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0)
        abort();
}

static config *parse(const char *text)
{
    config *c = NULL;
    mt_status s = config_parse_yaml(text, strlen(text), "m.yaml", &c);
    CHECK(s == MT_OK, "%s", status_text());
    if (!c)
        exit(1);
    return c;
}

/* `text` must fail with exactly `expected`. */
static void refuse(const char *text, const char *expected)
{
    config *c = NULL;
    mt_status s = config_parse_yaml(text, strlen(text), "m.yaml", &c);
    CHECK(s != MT_OK && !c, "accepted: %s", text);
    CHECK(strcmp(status_text(), expected) == 0, "found: %s\n  expected: %s", status_text(),
          expected);
    config_destroy(c);
}

#define FAILS(call, expected)                                                                      \
    do {                                                                                           \
        mt_status s_ = (call);                                                                     \
        CHECK(s_ != MT_OK, "did not fail");                                                        \
        CHECK(strcmp(status_text(), expected) == 0, "found: %s", status_text());                   \
    } while (0)

static void test_scalars(void)
{
    config *c = parse("a: 12\nb: -0x1F\nh: 0x1f\no: 0o17\nc: 1e6\nd: 1.5\ne: .5\nf: true\ng: ~\n"
                      "i: '12'\nj: \"x\\ty\"\nk: .inf\nl: 1e400\nm: 12abc\nn: yes\np: 99999999999"
                      "999999999\nq: 1_000\nr:\ns: 9007199254740993\nt: -7\nu: 007\n");
    const mt_config *v = config_section(c, "");
    int64_t i = -1;
    double d = 0;
    bool b = false;
    const char *s = NULL;
    CHECK(v->get_int(v, "a", &i) == MT_OK && i == 12);
    CHECK(v->get_string(v, "b", &s) == MT_OK && strcmp(s, "-0x1F") == 0);
    CHECK(v->get_int(v, "h", &i) == MT_OK && i == 31);
    CHECK(v->get_int(v, "o", &i) == MT_OK && i == 15);
    CHECK(v->get_int(v, "c", &i) == MT_OK && i == 1000000);
    CHECK(v->get_int(v, "s", &i) == MT_OK && i == INT64_C(9007199254740993));
    CHECK(v->get_int(v, "t", &i) == MT_OK && i == -7);
    CHECK(v->get_int(v, "u", &i) == MT_OK && i == 7);
    CHECK(v->get_float(v, "d", &d) == MT_OK && d == 1.5);
    CHECK(v->get_float(v, "e", &d) == MT_OK && d == 0.5);
    CHECK(v->get_float(v, "a", &d) == MT_OK && d == 12);
    CHECK(v->get_float(v, "k", &d) == MT_ERR_INVALID &&
          strstr(status_text(), "'k' must be a finite number"));
    CHECK(v->get_bool(v, "f", &b) == MT_OK && b);
    CHECK(!v->has(v, "g") && !v->has(v, "r") && !v->has(v, "zz"));
    CHECK(v->get_string(v, "i", &s) == MT_OK && strcmp(s, "12") == 0);
    CHECK(v->get_string(v, "j", &s) == MT_OK && strcmp(s, "x\ty") == 0);
    CHECK(v->get_string(v, "m", &s) == MT_OK && strcmp(s, "12abc") == 0);
    CHECK(v->get_string(v, "q", &s) == MT_OK && strcmp(s, "1_000") == 0);

    i = 77;
    FAILS(v->get_int(v, "d", &i),
          "m.yaml:6:4: 'd' must be a whole number of at most 64 bits, found the number 1.5");
    FAILS(v->get_int(v, "p", &i), "m.yaml:16:4: 'p' must be a whole number of at most 64 bits, "
                                  "found the number 99999999999999999999");
    FAILS(v->get_bool(v, "n", &b),
          "m.yaml:15:4: 'n' must be true or false, found the string \"yes\"");
    FAILS(v->get_float(v, "i", &d), "m.yaml:10:4: 'i' must be a number, found the string \"12\"");
    FAILS(v->get_string(v, "a", &s), "m.yaml:1:4: 'a' must be a string (put it in quotes when it "
                                     "looks like something else), found the number 12");
    CHECK(v->get_int(v, "zz", &i) == MT_ERR_NOT_FOUND);
    CHECK(strcmp(status_text(), "m.yaml:1:1: key 'zz' is missing") == 0, "%s", status_text());
    CHECK(v->get_int(v, "g", &i) == MT_ERR_NOT_FOUND);
    CHECK(strcmp(status_text(), "m.yaml:9:4: key 'g' is null, but a value is needed") == 0, "%s",
          status_text());
    CHECK(v->is_null(v, "g") && !v->is_null(v, "zz") && !v->is_null(v, "a") && !v->has(v, "g"),
          "null is neither absent nor a value");
    CHECK(i == 77, "a failed getter wrote to its output");
    config_destroy(c);
}

static void test_paths(void)
{
    config *c = parse("rope:\n  factor: 8\n  list: [4, {x: 5}, six]\n");
    const mt_config *root = config_section(c, ""), *rope = config_section(c, "rope");
    const mt_config *none = config_section(c, "nothing.here");
    int64_t i = 0;
    const char *s = NULL;
    CHECK(root->get_int(root, "rope.factor", &i) == MT_OK && i == 8);
    CHECK(rope->get_int(rope, "list.0", &i) == MT_OK && i == 4);
    CHECK(root->get_int(root, "rope.list.1.x", &i) == MT_OK && i == 5);
    CHECK(rope->get_string(rope, "list.2", &s) == MT_OK && strcmp(s, "six") == 0);
    CHECK(!rope->has(rope, "list.3") && !rope->has(rope, "list.-1"));
    CHECK(rope->length(rope, "list") == 3 && rope->length(rope, "nope") == 0);
    CHECK(!none->has(none, "x"));
    CHECK(none->reject(none, "x", "must be %d", 7) == MT_ERR_INVALID);
    CHECK(strcmp(status_text(), "m.yaml:1:1: 'nothing.here.x' must be 7") == 0, "%s",
          status_text());
    FAILS(rope->reject(rope, "factor", "must be odd"), "m.yaml:2:11: 'rope.factor' must be odd");
    FAILS(rope->get_int(rope, "theta", &i), "m.yaml:1:1: key 'rope.theta' is missing");
    CHECK(strcmp(config_key(c, "rope", 1), "list") == 0 && !config_key(c, "rope", 2));
    config_destroy(c);
}

static void test_syntax(void)
{
    refuse("a: 1\nb: 2\na: 3\n",
           "m.yaml:3:1: key 'a' stands here a second time; it is already in line 1");
    refuse("a: 1\n---\nb: 2\n", "m.yaml:2:1: a second document starts here; expected one");
    refuse("a:\n\tb: 1\n", "m.yaml:2:1: a tab cannot indent; use spaces");
    refuse("a: [1, 2\nb: 3\n", "m.yaml:2:2: did not find expected ',' or ']' (while parsing a flow "
                               "sequence that starts in line 1)");
    refuse("a: *x\n", "m.yaml:1:4: alias '*x' has no anchor '&x' above it; a pattern that begins "
                      "with * wants quotes around it");
    refuse("a: &x [1, *x]\n", "m.yaml:1:11: alias '*x' stands inside its own anchor");
    refuse("1: a\n", "m.yaml:1:1: a key must be a string; put '1' in quotes");
    refuse("[a]: b\n", "m.yaml:1:1: a key must be a string");
    refuse("a: !!int 3\n", "m.yaml:1:4: tag 'tag:yaml.org,2002:int' is not supported");
    refuse("", "m.yaml: is empty; expected a map of keys");
    refuse("# only a comment\n", "m.yaml: is empty; expected a map of keys");
    refuse("- a\n", "m.yaml:1:1: expected a map of keys, found a list");
    refuse("a: \"x\\0y\"\n", "m.yaml:1:4: a string cannot contain a NUL character");
    refuse("a: {b: &b 1}\n<<: *b\n",
           "m.yaml:2:1: merge keys ('<<') are not part of YAML 1.2; write the keys out");
    config *c = NULL;
    CHECK(config_parse_yaml("a: \xff\xfe\n", 6, "m.yaml", &c) == MT_ERR_FORMAT);
    CHECK(strcmp(status_text(),
                 "m.yaml:1:4: invalid leading UTF-8 octet; text in UTF-8 is expected") == 0,
          "%s", status_text());
    refuse("a: 1\n\"\xc3\xbc\": \x01\n",
           "m.yaml:2:6: control characters are not allowed; text in UTF-8 is expected");

    char deep[1024];
    memset(deep, '[', sizeof deep - 1);
    deep[sizeof deep - 1] = '\0';
    memcpy(deep, "a: ", 3);
    CHECK(config_parse_yaml(deep, strlen(deep), "m.yaml", &c) == MT_ERR_FORMAT);
    CHECK(strstr(status_text(), "nested more than 100 deep") != NULL, "%s", status_text());
}

static void test_billion_laughs(void)
{
    char text[4096] = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n";
    for (int i = 1; i < 10; i++) {
        char line[256];
        snprintf(line, sizeof line, "a%d: &a%d [*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d]\n", i,
                 i, i - 1, i - 1, i - 1, i - 1, i - 1, i - 1, i - 1, i - 1, i - 1);
        strcat(text, line);
    }
    config *c = NULL;
    CHECK(config_parse_yaml(text, strlen(text), "m.yaml", &c) != MT_OK && !c);
    CHECK(strstr(status_text(), "aliases") != NULL, "%s", status_text());
}

static void test_aliases(void)
{
    config *c = parse("a: &x {k: 1}\nb: *x\n");
    const mt_config *v = config_section(c, "");
    int64_t i = 0;
    CHECK(v->get_int(v, "b.k", &i) == MT_OK && i == 1);
    CHECK(config_override(c, "b.k=2") == MT_OK);
    CHECK(v->get_int(v, "b.k", &i) == MT_OK && i == 2);
    CHECK(v->get_int(v, "a.k", &i) == MT_OK && i == 1, "an alias shares its anchor's values");
    config_destroy(c);
}

static void test_unused(void)
{
    config *c = parse("train:\n  learning_rat: 1\n  max_steps: 2\nlog: {x: 1}\nlist: [{y: 1}]\n");
    const mt_config *t = config_section(c, "train"), *root = config_section(c, "");
    t->has(t, "learning_rate");
    t->has(t, "max_steps");
    FAILS(config_check_unused(c, "train"), "m.yaml:2:3: unknown key 'learning_rat' in 'train'; did "
                                           "you mean 'learning_rate'?");
    FAILS(config_check_unused(c, "log"), "m.yaml:4:7: unknown key 'x' in 'log'");
    t->has(t, "learning_rat");
    CHECK(config_check_unused(c, "train") == MT_OK, "%s", status_text());
    root->has(root, "log.x");
    FAILS(config_check_unused(c, ""), "m.yaml:5:1: unknown key 'list'; known: train, log");
    root->length(root, "list");
    FAILS(config_check_unused(c, ""), "m.yaml:5:9: unknown key 'y' in 'list.0'");
    CHECK(config_check_unused(c, "absent") == MT_OK);
    config_destroy(c);
}

static void test_overrides(void)
{
    config *c = parse("train:\n  max_steps: 2\n  files: [a, b]\nempty:\n");
    const mt_config *v = config_section(c, "");
    int64_t i = 0;
    const char *s = NULL;
    CHECK(config_override(c, "train.max_steps=10") == MT_OK, "%s", status_text());
    CHECK(v->get_int(v, "train.max_steps", &i) == MT_OK && i == 10);
    CHECK(config_override(c, "new.deep.key=[1, {a: 5}]") == MT_OK, "%s", status_text());
    CHECK(v->get_int(v, "new.deep.key.1.a", &i) == MT_OK && i == 5);
    CHECK(config_override(c, "train.files.1=c=d") == MT_OK, "%s", status_text());
    CHECK(v->get_string(v, "train.files.1", &s) == MT_OK && strcmp(s, "c=d") == 0);
    CHECK(config_override(c, "empty.x=1") == MT_OK, "%s", status_text());
    CHECK(config_override(c, "train.max_steps=") == MT_OK && !v->has(v, "train.max_steps"));

    FAILS(config_override(c, "novalue"), "argument 'novalue': expected key=value");
    FAILS(config_override(c, "=3"), "argument '=3': expected key=value");
    FAILS(config_override(c, "a..b=3"),
          "argument 'a..b=3': the key has an empty part; expected section.key");
    FAILS(config_override(c, "a.=3"),
          "argument 'a.=3': the key has an empty part; expected section.key");
    FAILS(config_override(c, "train.files.2=x"),
          "argument 'train.files.2=x': '2' is no element of a list of 2");
    FAILS(
        config_override(c, "train.files.1.k=x"),
        "argument 'train.files.1.k=x': 'k' would be below the string \"c=d\", not below a section");
    FAILS(config_override(c, "a=[1"), "argument 'a=[1': did not find expected ',' or ']'");
    CHECK(config_override(c, "train.max_steps=abc") == MT_OK);
    FAILS(v->get_int(v, "train.max_steps", &i),
          "argument 'train.max_steps=abc': 'train.max_steps' must be a whole number of at most 64 "
          "bits, found the string \"abc\"");
    config_destroy(c);
}

static void test_bytes(void)
{
    config *c = parse("a: 24GiB\nb: 512MB\nc: 4096\nd: 1.5 KiB\ne: 24G\nf: -1\ng: GiB\nh: 1..5MB\n"
                      "i: [1]\nj: 1e30TB\nk: 9e9TB\n");
    const mt_config *v = config_section(c, "");
    static const int64_t expected[] = { INT64_C(24) << 30, 512000000, 4096, 1536 };
    int64_t n = 0;
    for (int i = 0; i < 4; i++) {
        char key[2] = { (char)('a' + i), 0 };
        CHECK(config_bytes(v, key, &n) == MT_OK && n == expected[i], "%s: %lld", key, (long long)n);
    }
    for (char k = 'e'; k <= 'k'; k++) {
        char key[2] = { k, 0 };
        CHECK(config_bytes(v, key, &n) == MT_ERR_INVALID, "%s", key);
    }
    FAILS(config_bytes(v, "e", &n), "m.yaml:5:4: 'e' must be a size such as 24GiB, 512MB or a "
                                    "number of bytes, found the string \"24G\"");
    config_destroy(c);
}

static void test_json(void)
{
    config *c = NULL;
    write_file("a.json",
               "{\"x\": 1e-05, \"n\": null, \"s\": {\"t\": [1, 2.5, \"z\"]}, \"b\": true}");
    CHECK(config_read_json(path_of("a.json"), &c) == MT_OK, "%s", status_text());
    const mt_config *v = config_section(c, "");
    double d = 0;
    int64_t i = 0;
    char text[400];
    CHECK(v->get_float(v, "x", &d) == MT_OK && d == 1e-05);
    CHECK(!v->has(v, "n") && v->length(v, "s.t") == 3);
    CHECK(v->get_int(v, "s.t.1", &i) == MT_ERR_INVALID);
    snprintf(text, sizeof text,
             "%s: 's.t.1' must be a whole number of at most 64 bits, found the number 2.5",
             path_of("a.json"));
    CHECK(strcmp(status_text(), text) == 0, "%s", status_text());
    config_destroy(c);

    static const char *const wrong[][2] = {
        { "{\"a\": 1, \"a\": 2}", "duplicate object key near '\"a\"'" },
        { "{\n\"a\": }", "unexpected token near '}'" },
        { "[1]", "expected an object at the top, found something else" },
        { "{\"a\": 1} x", "end of file expected near 'x'" },
    };
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        c = NULL;
        write_file("b.json", wrong[k][0]);
        CHECK(config_read_json(path_of("b.json"), &c) == MT_ERR_FORMAT && !c);
        CHECK(strstr(status_text(), wrong[k][1]) != NULL, "%s", status_text());
    }
    write_file("b.json", "{\n\"a\": }");
    CHECK(config_read_json(path_of("b.json"), &c) == MT_ERR_FORMAT);
    CHECK(strstr(status_text(), "b.json:2:6: ") != NULL, "%s", status_text());
    CHECK(config_read_json(path_of("none.json"), &c) == MT_ERR_NOT_FOUND);
    CHECK(config_read_yaml(folder, &c) == MT_ERR_IO);
}

static void same(const mt_config *a, const mt_config *b, const char *key)
{
    double x = 1, y = 2;
    CHECK(a->get_float(a, key, &x) == MT_OK && b->get_float(b, key, &y) == MT_OK, "%s",
          status_text());
    CHECK(memcmp(&x, &y, sizeof x) == 0, "%s: %.17g became %.17g", key, x, y);
}

static void test_round_trip(void)
{
    config *c =
        parse("doubles: [0.1, 1e-5, 1e22, 5e-324, 1.7976931348623157e308, -0.0, 3.0,\n"
              "  123456789.123456789, 1e6]\n"
              "strings: ['12', 'true', '~', '', ' x', \"a\\nb\", 'é', 'a: b', '# c', '1e5', "
              "'-', \"q\\\"\\\\\\u0001\"]\n"
              "map: {k: {l: []}, 'a b': null, e: {}}\nflag: false\nbig: -9223372036854775808\n");
    const mt_config *v = config_section(c, "");
    for (int json = 0; json < 2; json++) {
        config *back = NULL;
        const char *file = path_of(json ? "rt.json" : "rt.yaml");
        CHECK((json ? config_write_json : config_write_yaml)(c, file) == MT_OK, "%s",
              status_text());
        mt_status s = (json ? config_read_json : config_read_yaml)(file, &back);
        CHECK(s == MT_OK, "%s", status_text());
        if (!back)
            return;
        const mt_config *w = config_section(back, "");
        char key[32];
        for (int64_t i = 0; i < v->length(v, "doubles"); i++) {
            snprintf(key, sizeof key, "doubles.%d", (int)i);
            same(v, w, key);
        }
        CHECK(w->length(w, "strings") == v->length(v, "strings"));
        for (int64_t i = 0; i < v->length(v, "strings"); i++) {
            const char *x = "x", *y = "y";
            snprintf(key, sizeof key, "strings.%d", (int)i);
            CHECK(v->get_string(v, key, &x) == MT_OK && w->get_string(w, key, &y) == MT_OK, "%s",
                  status_text());
            CHECK(strcmp(x, y) == 0, "%s: \"%s\" became \"%s\"", key, x, y);
        }
        bool flag = true;
        int64_t big = 0;
        CHECK(w->get_bool(w, "flag", &flag) == MT_OK && !flag);
        CHECK(w->get_int(w, "big", &big) == MT_OK && big == INT64_MIN);
        CHECK(config_key(back, "map", 1) && strcmp(config_key(back, "map", 1), "a b") == 0);
        CHECK(w->has(w, "map.k.l") && w->has(w, "map.e") && !w->has(w, "map.a b"));
        config_destroy(back);
    }
    config_destroy(c);
    c = parse("x: .inf\n");
    CHECK(config_write_json(c, path_of("inf.json")) == MT_ERR_INVALID);
    CHECK(strstr(status_text(), "inf.json: 'x' is .inf, which JSON cannot hold"), "%s",
          status_text());
    CHECK(config_write_json(c, path_of("absent/x.json")) == MT_ERR_IO);
    CHECK(config_write_yaml(c, "/dev/full") == MT_ERR_IO, "a full disk went unnoticed");
    config_destroy(c);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    RUN(test_scalars);
    RUN(test_paths);
    RUN(test_syntax);
    RUN(test_billion_laughs);
    RUN(test_aliases);
    RUN(test_unused);
    RUN(test_overrides);
    RUN(test_bytes);
    RUN(test_json);
    RUN(test_round_trip);
    static const char *const files[] = { "a.json", "b.json", "rt.json", "rt.yaml", "inf.json" };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        unlink(path_of(files[i]));
    rmdir(folder);
    return check_done();
}
