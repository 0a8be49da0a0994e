#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the tokenizer plugin with Hugging Face's tokenizers on generated mixed text.

A development-time tool. Ids must be equal; and, for every fourth text, so must the text that they
give back, and the ids where special tokens are mere text. Usage: tokenizer_check.py [--megabytes N] [--seed S] PLUGIN.so TOKENIZER.json...
"""
import argparse
import ctypes as c
import sys

from tokenizers import Tokenizer

import tokenizer_texts as texts

ADD_SPECIAL, LITERAL = 1, 2
SET_ERROR = c.CFUNCTYPE(None, c.c_char_p, c.c_char_p)
LOG = c.CFUNCTYPE(None, c.c_int32, c.c_char_p, c.c_char_p)


class Host(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("major", c.c_uint16), ("minor", c.c_uint16),
                ("set_error", SET_ERROR), ("log", LOG)]


class Plugin(c.Structure):
    _fields_ = [("magic", c.c_uint32), ("struct_size", c.c_uint32), ("major", c.c_uint16), ("minor", c.c_uint16),
                ("pointer_size", c.c_uint32), ("build_flags", c.c_uint32), ("cudart_major", c.c_uint32),
                ("name", c.c_char_p), ("version", c.c_char_p), ("licence", c.c_char_p),
                ("init", c.CFUNCTYPE(c.c_int32, c.POINTER(Host))), ("deinit", c.c_void_p),
                ("get_interface", c.CFUNCTYPE(c.c_void_p, c.c_char_p))]


class Interface(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("reserved", c.c_uint32), ("probe", c.c_void_p),
                ("open", c.CFUNCTYPE(c.c_int32, c.c_char_p, c.POINTER(c.c_void_p))), ("close", c.c_void_p),
                ("vocab_size", c.c_void_p), ("special", c.c_void_p), ("token_id", c.c_void_p),
                ("encode", c.CFUNCTYPE(c.c_int64, c.c_void_p, c.c_char_p, c.c_int64, c.c_uint32,
                                       c.POINTER(c.c_int32), c.c_int64)),
                ("decode", c.CFUNCTYPE(c.c_int64, c.c_void_p, c.POINTER(c.c_int32), c.c_int64, c.c_uint32,
                                       c.c_char_p, c.c_int64))]


class Ours:
    error = b""

    def __init__(self, plugin, path):
        def set_error(fmt, text):
            Ours.error = text
        Ours.callbacks = SET_ERROR(set_error), LOG(lambda level, fmt, text: print(text))
        Ours.host = Host(c.sizeof(Host), 1, 0, *Ours.callbacks)
        entry = c.CDLL(plugin).mt_plugin_entry_v1
        entry.restype = c.POINTER(Plugin)
        description = entry(1, 0).contents
        assert description.init(c.byref(Ours.host)) == 0
        self.table = c.cast(description.get_interface(b"megatrain.tokenizer/1"), c.POINTER(Interface)).contents
        self.tokenizer = c.c_void_p()
        if self.table.open(path.encode(), c.byref(self.tokenizer)):
            sys.exit(Ours.error.decode())

    def encode(self, data, flags):
        ids = (c.c_int32 * (3 * len(data) + 64))()
        n = self.table.encode(self.tokenizer, data, len(data), flags, ids, len(ids))
        return ids[:n]

    def decode(self, ids):
        given = (c.c_int32 * (len(ids) + 1))(*ids)
        n = self.table.decode(self.tokenizer, given, len(ids), 0, None, 0)
        text = c.create_string_buffer(n + 1)
        self.table.decode(self.tokenizer, given, len(ids), 0, text, n)
        return text.raw[:n]


def compare(ours, theirs, data, text, thoroughly):
    """What is wrong, None when nothing is; and the number of tokens."""
    expected = theirs.encode_batch_fast([text])[0].ids
    got = ours.encode(data, ADD_SPECIAL)
    if got != expected:
        at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
        return f"token {at} is {got[at:at + 4]}, expected {expected[at:at + 4]}", 0
    if not thoroughly:
        return None, len(got)
    if ours.decode(got).decode("utf-8", errors="replace") != theirs.decode(expected, skip_special_tokens=False):
        return "the decoded text", 0
    theirs.encode_special_tokens = True
    literal = theirs.encode_batch_fast([text], add_special_tokens=False)[0].ids
    theirs.encode_special_tokens = False
    if ours.encode(data, LITERAL) != literal:
        return "special tokens as mere text", 0
    return None, len(got)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--megabytes", type=float, default=50)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("plugin")
    p.add_argument("files", nargs="+")
    a = p.parse_args()
    pairs = [(path, Ours(a.plugin, path), Tokenizer.from_file(path)) for path in a.files]
    differ = dict.fromkeys(a.files, 0)
    tokens = dict.fromkeys(a.files, 0)
    done = seed = 0
    while done < a.megabytes * 1e6:
        data = texts.text(f"{a.seed}/{seed}", 1 + seed * 37 % 400)
        text = texts.plain(data)
        for path, ours, theirs in pairs:
            wrong, n = compare(ours, theirs, data, text, seed % 4 == 0)
            tokens[path] += n
            if wrong:
                differ[path] += 1
                if differ[path] <= 3:
                    print(f"{path}: text {a.seed}/{seed}: {wrong}", flush=True)
        seed += 1
        done += len(data)
        if seed % 1000 == 0:
            print(f"{done / 1e6:.1f} MB", file=sys.stderr, flush=True)
    for path in a.files:
        print(f"{path}: {done / 1e6:.1f} MB in {seed} texts, {tokens[path]} tokens, {differ[path]} texts differ")
    sys.exit(any(differ.values()))


if __name__ == "__main__":
    main()
