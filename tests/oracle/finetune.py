#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
#
# Checks the folder that docs/examples/finetune/run has exported against transformers: the mean loss
# over the answers, and the greedy answer to every dialogue's first question. Development only.
# Usage: finetune.py MEGATRAIN RUN_FOLDER   (from the root of the source tree, after the example)
#
# 2026-11-29, transformers' Llama in FP32 on the CPU: loss 0.011483 against 0.011483 over 682
# targets, 64 of 64
# answers the same.
import json
import shutil
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

megatrain, run = sys.argv[1:]
data = "docs/examples/finetune/dialogues.jsonl"
dialogues = [json.loads(line)["messages"] for line in open(data, encoding="utf-8")]
tokenizer = AutoTokenizer.from_pretrained(run + "/model")
model = AutoModelForCausalLM.from_pretrained(run + "/model", torch_dtype=torch.float32).eval()


def ids_of(messages, prompt=False):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


total, targets = 0.0, 0
for messages in dialogues:
    ids = ids_of(messages)
    labels = [-100] * len(ids)
    for i, m in enumerate(messages):
        if m["role"] == "assistant":  # the answer and its end-of-turn token
            start, end = len(ids_of(messages[:i], True)), len(ids_of(messages[: i + 1])) - 1
            labels[start:end] = ids[start:end]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    total += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
    targets += sum(x != -100 for x in labels[1:])
there = total / targets

with tempfile.TemporaryDirectory() as folder:
    copy = shutil.copy(data, folder)
    out = subprocess.run(
        [megatrain, "eval", run + "/run.yaml", "precision=fp32", "--data", copy, "--checkpoint", run + "/model"],
        check=True, capture_output=True, text=True).stdout
here, here_targets = float(out.split()[2]), int(out.split()[-2])
print(f"loss: {here:.6f} over {here_targets} targets here, {there:.6f} over {targets} there")
assert here_targets == targets and abs(here - there) < 2e-5

same = 0
for messages in dialogues:
    first = next(i for i, m in enumerate(messages) if m["role"] == "user")
    prompt = ids_of(messages[: first + 1], True)
    made = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False,
                          pad_token_id=tokenizer.pad_token_id)[0][len(prompt):]
    theirs = tokenizer.decode(made, skip_special_tokens=True)
    system = ["--system", messages[0]["content"]] if messages[0]["role"] == "system" else []
    ours = subprocess.run(
        [megatrain, "generate", run + "/model", "--chat", "--temperature", "0", "--precision", "fp32",
         "--device", "cpu", "--prompt", messages[first]["content"], *system],
        check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.rstrip("\n")
    same += ours == theirs == messages[first + 1]["content"]
    if ours != theirs:
        print(f"here '{ours}', there '{theirs}'")
print(f"{same} of {len(dialogues)} answers are the same and right")
assert same == len(dialogues)
