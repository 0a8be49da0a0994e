#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes fixtures/tokenizer/: small tokenizers of every style and what Hugging Face makes of texts.

A development-time tool (needs tokenizers 0.23); the fixtures are committed. Usage:
make_tokenizer_fixtures.py [STYLE | classes]...

    texts.txt      a text a line; bytes that are not printable ASCII, and \\, are \\xNN
    STYLE.json     a tokenizer.json
    classes.txt    a class of characters a line: its pattern, then its ranges, in hex
    STYLE.txt      three lines for each text: ids with what the template adds; ids with special
                   tokens in the text as mere text; the first ids decoded, escaped as above
"""
import json
import pathlib
import sys

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

import tokenizer_texts as texts

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "fixtures" / "tokenizer"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + SUFFIX +
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + SUFFIX +
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
DEEPSEEK_V2 = [r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ]+",
               r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+"]

# Adjacent and nested, special and not, stripping, single words, normalized or not.
ADDED = [AddedToken("<|endoftext|>", special=True, normalized=False),
         AddedToken("<|im_start|>", special=True, normalized=False),
         AddedToken("<|im_end|>", special=True, normalized=False),
         AddedToken("<tool>", special=False, normalized=False),
         AddedToken("<toolbox>", special=False, normalized=True),
         AddedToken("<strip>", special=True, normalized=False, lstrip=True, rstrip=True),
         AddedToken("word", special=False, normalized=False, single_word=True),
         AddedToken("Ṡoft", special=False, normalized=True),
         AddedToken("\n\n\n\n", special=False, normalized=False)]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(*steps, use_regex=False, prefix=False):
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(prefix, True, use_regex)])


def corpus():
    for seed in range(1500):
        yield texts.plain(texts.text(seed, 12))


def train(normalizer, pre_tokenizer, size, special, alphabet):
    t = Tokenizer(models.BPE())
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre_tokenizer
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, limit_alphabet=400,
        show_progress=False))
    return t


def bytes_style(pre_tokenizer, size, normalizer=None, ignore_merges=False, template=None):
    t = train(normalizer, pre_tokenizer, size, ["<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet())
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    if template:
        t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single=template, pair=template + " $B", special_tokens=[("<s>", 0), ("</s>", 1)])])
    t.add_tokens(ADDED)
    return edit(t, ignore_merges=ignore_merges)


def edit(t, **model):
    """The tokenizer with members of its model set."""
    tree = json.loads(t.to_str())
    tree["model"].update(model)
    return Tokenizer.from_str(json.dumps(tree))


def sentencepiece_style(size, normalizer, pre_tokenizer, decoder, template, legacy_merges=False):
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    t = train(None, pre_tokenizers.Metaspace(), size, ["<unk>", "<s>", "</s>"] + pieces, [])
    tree = json.loads(t.to_str())
    tree["added_tokens"] = tree["added_tokens"][:3]
    tree["model"].update(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    if legacy_merges:
        tree["model"]["merges"] = [" ".join(m) for m in tree["model"]["merges"]]
    tree["normalizer"] = tree["pre_tokenizer"] = None
    t = Tokenizer.from_str(json.dumps(tree))
    if normalizer:
        t.normalizer = normalizer
    if pre_tokenizer:
        t.pre_tokenizer = pre_tokenizer
    t.decoder = decoder
    t.post_processor = processors.TemplateProcessing(
        single=template, pair=template + " $B", special_tokens=[("<s>", 1), ("</s>", 2)])
    t.add_tokens(ADDED)
    return t


def llama2():
    return sentencepiece_style(
        900, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                           decoders.Strip(" ", 1, 0)]), "<s> $A", legacy_merges=True)


def mistral(scheme):
    return sentencepiece_style(
        800, None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                           decoders.Strip(" ", 1, 0)]), "<s> $A </s>")


def gemma():
    return sentencepiece_style(
        1000, normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(" ", "merged_with_previous", False),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), "<s> $A")


def unknowns():
    """Unknown characters without bytes to fall back to, each a token of its own."""
    t = train(normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(),
                                    normalizers.Strip(), normalizers.Replace(Regex(r"\p{Cc}+"), "~")]),
              pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("contiguous"),
                                       pre_tokenizers.Digits(True)]), 500, ["<unk>"], [])
    t.decoder = None
    t.add_tokens(ADDED)
    return edit(t, unk_token="<unk>", fuse_unk=False)


def words():
    """A suffix at the end of each word, a prefix inside; unknown ones fused; Metaspace to decode."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], limit_alphabet=300, show_progress=False,
        end_of_word_suffix="</w>", continuing_subword_prefix="##"))
    t.decoder = decoders.Sequence([decoders.Replace("</w>", "▁"), decoders.Metaspace()])
    t.post_processor = processors.RobertaProcessing(("<unk>", 0), ("<unk>", 0))
    t.add_tokens(ADDED)
    return edit(t, unk_token="<unk>", fuse_unk=True, continuing_subword_prefix="##", end_of_word_suffix="</w>")


def falcon():
    """ByteLevel in the middle: what follows sees its alphabet."""
    return bytes_style(pre_tokenizers.Sequence([
        pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.ByteLevel(True, True, True),
        pre_tokenizers.Digits(False), split("[0-9][0-9]", "merged_with_next"), split("[aeiou]+", "contiguous", True)]), 500)


STYLES = {
    "gpt2": lambda: bytes_style(byte_level(use_regex=True), 600),
    "gpt2-prefix": lambda: bytes_style(byte_level(use_regex=True, prefix=True), 400),
    "llama3": lambda: bytes_style(byte_level(split(LLAMA3)), 800, ignore_merges=True, template="<s> $A"),
    "qwen": lambda: bytes_style(byte_level(split(QWEN)), 700, normalizer=normalizers.NFC()),
    "o200k": lambda: bytes_style(byte_level(split(O200K)), 700),
    "tekken": lambda: bytes_style(byte_level(split(TEKKEN)), 700, ignore_merges=True, template="<s> $A"),
    "deepseek-v2": lambda: bytes_style(byte_level(*map(split, DEEPSEEK_V2), pre_tokenizers.Digits(True)), 600,
                                       template="<s> $A"),
    "deepseek-v3": lambda: bytes_style(byte_level(*map(split, DEEPSEEK)), 700, template="<s> $A"),
    "llama2": llama2,
    "mistral-always": lambda: mistral("always"),
    "mistral-first": lambda: mistral("first"),
    "mistral-never": lambda: mistral("never"),
    "gemma": gemma,
    "unknowns": unknowns,
    "words": words,
    "falcon": falcon,
}


CLASSES = [r"\s", r"\S", r"\p{L}", r"\p{Lu}", r"\p{Ll}", r"\p{Lt}", r"\p{Lm}", r"\p{Lo}", r"\p{M}", r"\p{N}", r"\p{P}",
           r"\p{S}", r"[^\s\p{L}\p{N}]", r"[^\r\n\p{L}\p{N}]", "(?i:s)", "(?i:l)", "(?i:t)", "(?i:v)", "(?i:r)"]


def ranges(pattern):
    """The characters that a pattern matches, of all there are."""
    everything = "".join(chr(c) for c in range(0x110000) if not 0xd800 <= c < 0xe000)
    kept = split(pattern, "removed", True).pre_tokenize_str(everything)
    found = []
    for c in sorted(ord(c) for piece, _ in kept for c in piece):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return " ".join(f"{a:x}-{b:x}" for a, b in found)


def escape(data):
    return "".join(chr(b) if 32 <= b < 127 and b != 92 else f"\\x{b:02x}" for b in data)


def all_texts():
    hand = ["", " ", "  ", "a", "Hello world", " Hello  world ", "Hello\r\nworld\r\n\r\n", "<|im_start|>user\nHi<|im_end|>",
            "<|im_start|><|im_end|><tool><toolbox>", "a <strip>  b", "  <strip>", "sword word wordy word.", "word",
            "<|im_start|", "I'LL we've DON'T it's", "\u180e\u3000\x85\u2028x", "\x00\x00a\x00", "Ṡoft S\u0307oft ṡoft",
            "中文" * 60, "é" * 200, "ab" * 400, " " * 300 + "x", "\n" * 50, "123456789 0x1F ١٢٣", "▁a ▁ b▁", "<s>a</s> <s>"]
    return [t.encode() for t in hand] + [b"\xff\xfe", b"caf\xc3", b"\xe4\xb8\xad\xe4\xb8"] + \
        [texts.text(10000 + i, 1 + i % 25) for i in range(150)]


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    samples = all_texts()
    (OUT / "texts.txt").write_text("".join(escape(t) + "\n" for t in samples))
    wanted = sys.argv[1:] or ["classes", *STYLES]
    if "classes" in wanted:
        (OUT / "classes.txt").write_text("".join(f"{p} {ranges(p)}\n" for p in CLASSES))
        wanted.remove("classes")
    for name in wanted:
        made = STYLES[name]()
        made.save(str(OUT / f"{name}.json"), pretty=False)
        t = Tokenizer.from_file(str(OUT / f"{name}.json"))
        lines = []
        for sample in samples:
            ids = t.encode(texts.plain(sample)).ids
            t.encode_special_tokens = True
            literal = t.encode(texts.plain(sample), add_special_tokens=False).ids
            t.encode_special_tokens = False
            lines += [" ".join(map(str, ids)), " ".join(map(str, literal)),
                      escape(t.decode(ids, skip_special_tokens=False).encode())]
        (OUT / f"{name}.txt").write_text("".join(line + "\n" for line in lines))
        print(name, t.get_vocab_size(), sum(len(line) for line in lines))


if __name__ == "__main__":
    main()
