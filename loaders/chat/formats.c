/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of formats. Each follows the chat template that the model was published with, without
 * tools; tests/chat compares them with those templates.
 */
#include "chat.h"

/* Turns of a family that differ in the role's name only. */
#define IM(role)     "<|im_start|>" role "\n{content}<|im_end|>\n"
#define HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define EOT(role)    HEADER(role) "{content}<|eot_id|>"
#define TURN(role)   "<start_of_turn>" role "\n{content}<end_of_turn>\n"

/* What the families of ChatML have in common. */
#define CHATML_TURNS                                                                               \
    .system = IM("system"), .user = IM("user"), .assistant = IM("assistant"),                      \
    .prompt = "<|im_start|>assistant\n", .tokens = { "<|im_start|>", "<|im_end|>" }
#define QWEN3_THOUGHT                                                                              \
    "<|im_start|>assistant\n<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>\n"
#define QWEN_TOOLS                                                                                 \
    .tools_before = "<|im_start|>user", .tool = "\n<tool_response>\n{content}\n</tool_response>",  \
    .tools_after = "<|im_end|>\n"

/* Qwen 3.5 and 3.6: the generation prompt opens the thought, or holds an empty one. */
#define QWEN3_5_TURNS                                                                              \
    QWEN_TOOLS, .first_system = IM("system"), .user = IM("user"), .assistant = IM("assistant"),    \
                .thought = QWEN3_THOUGHT, .tokens = { "<|im_start|>", "<|im_end|>" },              \
                .placement = CHAT_SYSTEM_FIRST, .thinking = CHAT_THINKING_QWEN3_5,                 \
                .flags = CHAT_TRIM_SYSTEM | CHAT_TRIM_USER | CHAT_TRIM_TOOL

#define LLAMA3_TURNS                                                                               \
    .begin = "{bos}", .system = EOT("system"), .user = EOT("user"), .assistant = EOT("assistant"), \
    .prompt = HEADER("assistant"),                                                                 \
    .tokens = { "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>" },                        \
    .flags = CHAT_TRIM_SYSTEM | CHAT_TRIM_USER | CHAT_TRIM_ASSISTANT

#define GEMMA_TURNS                                                                                \
    .begin = "{bos}", .user = TURN("user"), .assistant = TURN("model"),                            \
    .prompt = "<start_of_turn>model\n", .tokens = { "<start_of_turn>", "<end_of_turn>" },          \
    .flags = CHAT_TRIM_USER | CHAT_TRIM_ASSISTANT | CHAT_ALTERNATE

#define DEEPSEEK_TURNS                                                                             \
    .begin = "{bos}", .first_system = "{content}", .user = "<｜User｜>{content}",                  \
    .assistant = "<｜Assistant｜>{content}<｜end▁of▁sentence｜>",                                  \
    .tokens = { "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>" },                        \
    .placement = CHAT_SYSTEM_FIRST

/* The template asks for today's date; a training set must not depend on the day it is read. */
#define HARMONY_DATE    "2025-06-28"
#define HARMONY_THOUGHT "<|start|>assistant<|channel|>analysis<|message|>{reasoning}<|end|>"
#define HARMONY_FINAL   "<|start|>assistant<|channel|>final<|message|>{content}"

const chat_format chat_formats[] = {
    { .name = "chatml", CHATML_TURNS, .tool = IM("tool") },
    { .name = "qwen2",
      CHATML_TURNS,
      .default_system = "You are a helpful assistant.",
      .tool = IM("tool") },
    { .name = "qwen2.5",
      CHATML_TURNS,
      QWEN_TOOLS,
      .default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant." },
    { .name = "qwen3",
      CHATML_TURNS,
      QWEN_TOOLS,
      .thought = QWEN3_THOUGHT,
      .thinking = CHAT_THINKING_QWEN3 },
    { .name = "qwen3-instruct", CHATML_TURNS, QWEN_TOOLS },
    { .name = "qwen3.5", QWEN3_5_TURNS, .prompt = "<|im_start|>assistant\n<think>\n" },
    { .name = "qwen3.5-nothink",
      QWEN3_5_TURNS,
      .prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n" },

    { .name = "llama-2",
      .joined = "<<SYS>>\n{system}\n<</SYS>>\n\n{content}",
      .user = "{bos}[INST] {content} [/INST]",
      .assistant = " {content} {eos}",
      .placement = CHAT_SYSTEM_FIRST_USER,
      .flags = CHAT_TRIM_JOINED | CHAT_TRIM_ASSISTANT | CHAT_ALTERNATE },
    { .name = "llama-3", LLAMA3_TURNS },
    { .name = "llama-3.1",
      LLAMA3_TURNS,
      .first_system = HEADER("system") "Cutting Knowledge Date: December 2023\n"
                                       "Today Date: 26 Jul 2024\n\n{content}<|eot_id|>",
      .default_system = "" },

    { .name = "mistral-v0",
      .begin = "{bos}",
      .user = "[INST] {content} [/INST]",
      .assistant = "{content}{eos}",
      .placement = CHAT_SYSTEM_NONE,
      .flags = CHAT_ALTERNATE },
    { .name = "mistral-v1",
      .begin = "{bos}",
      .joined = "{system}\n\n{content}",
      .user = " [INST] {content} [/INST]",
      .assistant = " {content}{eos}",
      .placement = CHAT_SYSTEM_FIRST_USER,
      .flags = CHAT_ALTERNATE },
    { .name = "mistral-v3",
      .begin = "{bos}",
      .joined = "{system}\n\n{content}",
      .user = "[INST] {content}[/INST]",
      .assistant = " {content}{eos}",
      .tokens = { "[INST]", "[/INST]" },
      .placement = CHAT_SYSTEM_LAST_USER,
      .flags = CHAT_TRIM_ASSISTANT | CHAT_ALTERNATE },
    { .name = "mistral-v3-tekken",
      .begin = "{bos}",
      .joined = "{system}\n\n{content}",
      .user = "[INST]{content}[/INST]",
      .assistant = "{content}{eos}",
      .tokens = { "[INST]", "[/INST]" },
      .placement = CHAT_SYSTEM_LAST_USER,
      .flags = CHAT_ALTERNATE },
    { .name = "mistral-v7",
      .begin = "{bos}",
      .system = "[SYSTEM_PROMPT] {content}[/SYSTEM_PROMPT]",
      .user = "[INST] {content}[/INST]",
      .assistant = " {content}{eos}",
      .tokens = { "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]" } },
    { .name = "mistral-v7-tekken",
      .begin = "{bos}",
      .system = "[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]",
      .user = "[INST]{content}[/INST]",
      .assistant = "{content}{eos}",
      .tokens = { "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]" } },

    { .name = "gemma", GEMMA_TURNS, .placement = CHAT_SYSTEM_NONE },
    { .name = "gemma-3",
      GEMMA_TURNS,
      .joined = "{system}\n\n{content}",
      .placement = CHAT_SYSTEM_FIRST_USER },

    { .name = "deepseek-v2",
      .begin = "{bos}",
      .system = "{content}\n\n",
      .user = "User: {content}\n\n",
      .assistant = "Assistant: {content}{eos}",
      .prompt = "Assistant:" },
    { .name = "deepseek-v3", DEEPSEEK_TURNS, .prompt = "<｜Assistant｜>" },
    { .name = "deepseek-r1",
      DEEPSEEK_TURNS,
      .thought = "<｜Assistant｜><think>\n{reasoning}\n</think>\n\n{content}<｜end▁of▁sentence｜>",
      .prompt = "<｜Assistant｜><think>\n",
      .thinking = CHAT_THINKING_CUT },

    { .name = "harmony",
      .begin = "<|start|>system<|message|>You are ChatGPT, a large language model trained by "
               "OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " HARMONY_DATE "\n\n"
               "Reasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must "
               "be included for every message.<|end|>",
      .first_system = "<|start|>developer<|message|># Instructions\n\n{content}\n\n<|end|>",
      .user = "<|start|>user<|message|>{content}<|end|>",
      .assistant = HARMONY_FINAL "<|end|>",
      .last = HARMONY_FINAL "<|return|>",
      .thought = HARMONY_THOUGHT HARMONY_FINAL "<|return|>",
      .prompt = "<|start|>assistant",
      .tokens = { "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>" },
      .stops = { "<|return|>", "<|call|>" },
      .placement = CHAT_SYSTEM_FIRST,
      .thinking = CHAT_THINKING_LAST,
      .flags = CHAT_SKIP_EMPTY_SYSTEM },

    { .name = "zephyr",
      .system = "<|system|>\n{content}{eos}\n",
      .user = "<|user|>\n{content}{eos}\n",
      .assistant = "<|assistant|>\n{content}{eos}\n",
      .prompt = "<|assistant|>\n" },
    { .name = "alpaca",
      .begin = "{bos}",
      .first_system = "{content}\n\n",
      .default_system = "Below is an instruction that describes a task. Write a response that "
                        "appropriately completes the request.",
      .user = "### Instruction:\n{content}\n\n",
      .assistant = "### Response:\n{content}{eos}\n\n",
      .prompt = "### Response:\n",
      .placement = CHAT_SYSTEM_FIRST },
    /* The contents as they are, one after the other: prompt and completion. */
    { .name = "plain",
      .begin = "{bos}",
      .system = "{content}",
      .user = "{content}",
      .assistant = "{content}{eos}" },
    { 0 },
};
