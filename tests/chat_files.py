# SPDX-License-Identifier: Apache-2.0
"""Small chats, and templates in which the tokenizer's end of document ends every turn, as in most chat models."""

import json
import random
from pathlib import Path

TURN = "{{ '<' + message['role'] + '>' }}"
BODY = "{{ message['content'] + eos_token }}"
PROMPT = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
PLAIN = "{% for message in messages %}" + TURN + BODY + "{% endfor %}" + PROMPT
MARKING = (
    "{% for message in messages %}" + TURN + "{% if message['role'] == 'assistant' %}{% generation %}" + BODY
    + "{% endgeneration %}{% else %}" + BODY + "{% endif %}{% endfor %}" + PROMPT
)  # fmt: skip


def chat(*contents: str, **answers) -> list[dict]:
    """Messages of a user and an assistant in turn. answers: further keys of the assistant's."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return [{**message, **(answers if message["role"] == "assistant" else {})} for message in messages]


def write_chats(path: Path, count: int = 80, seed: int = 0) -> list[list[dict]]:
    """Write sums and their results, of one to three turns, one chat a line."""
    rng, chats = random.Random(seed), []
    for _ in range(count):
        turns = []
        for _ in range(rng.randint(1, 3)):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            turns += [f"add {a} and {b}", f"sum {a + b}"]
        chats.append(chat(*turns))
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return chats
