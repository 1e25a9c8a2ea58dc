# SPDX-License-Identifier: Apache-2.0
"""Chats of `zaya data prepare --chat`: read them from a jsonl line, and encode them by the tokenizer's own template.

The tokens of answers are marked (ANSWER of zaya_plugin.data.prepared), because training takes the loss on them alone.
A template that has `{% generation %}` marks them itself. With any other an answer is what comes between the prompt, as
it is rendered for a generation, and the end of its turn; this holds only if the tokens of each such beginning are the
first tokens of the whole chat, so a chat for which they are not is rejected.
"""

import contextlib
import json
import re

import numpy as np

from zaya_plugin.data.prepared import ANSWER, runs

ANSWERS = "assistant"
# Roles that may follow a role; None is the beginning.
AFTER = {
    None: ("system", "user"),
    "system": ("user",),
    "user": (ANSWERS,),
    ANSWERS: ("user", "tool"),
    "tool": ("tool", ANSWERS),
}
# Roles of `conversations`, as ShareGPT names them.
ROLE_OF = {"human": "user", "gpt": ANSWERS, "function_response": "tool"}
# Keys of a message, or of a whole chat, that take it out of the loss, and the value that leaves it in: `weight` is
# OpenAI's, `train` and `training` are axolotl's.
IN_LOSS = {"weight": 1, "train": 1, "training": 1, "loss": 1, "loss_weight": 1, "mask": 0}
KNOWN = {"role", "content", *IN_LOSS}
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_text(record: dict) -> str:
    """Return the chat of a jsonl object as one text, equal for equal chats.

    Args:
        record: `messages`, each with role and content, or `conversations`, each with from and value; `tools`, if any,
            goes to the template too.

    Raises:
        ValueError: it is not a chat; the message names the key and what is allowed.
    """
    field = next((name for name in ("messages", "conversations") if name in record), None)
    if field is None:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(f"no field 'messages' or 'conversations'; it has {names}")
    value = record[field]
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} is not a list with messages but {json.dumps(value)[:40]}")
    messages, last = [], None
    for number, message in enumerate(value):
        message = _message(f"{field}[{number}]", message, shared=field == "conversations")
        if message["role"] not in AFTER[last]:
            raise ValueError(
                f"{field}[{number}].role={message['role']} after {last or 'the beginning'}. "
                f"Allowed: {', '.join(AFTER[last])}"
            )
        messages.append(message)
        last = message["role"]
    if last != ANSWERS:
        raise ValueError(f"{field} ends with {last}, which has no answer. Allowed: an end with {ANSWERS}")
    _refuse_weights(record, "", "a chat")
    if not (in_loss(record) and any(message["role"] == ANSWERS and in_loss(message) for message in messages)):
        raise ValueError(f"no answer of {field} is in the loss: {', '.join(IN_LOSS)} of each, or of the chat, say so")
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("field 'tools' is not a list of objects")
    return json.dumps({"messages": messages, "tools": tools or None}, ensure_ascii=False, sort_keys=True)


def in_loss(message: dict) -> bool:
    """Return whether no key of a message, or of a whole chat, takes it out of the loss."""
    return all(message.get(name) in (None, inside) for name, inside in IN_LOSS.items())


def _refuse_weights(message: dict, key: str, what: str) -> None:
    """Raise ValueError if a key of IN_LOSS has a value that training cannot follow. key: begins the key's name."""
    for name, inside in IN_LOSS.items():
        value, answer = message.get(name), what in ("a chat", f"a message of {ANSWERS}")
        if value not in (None, 1 - inside, *[inside] * answer):
            outside = f"{json.dumps(not inside)}, {1 - inside}, since the loss is taken on answers alone"
            allowed = "true, false, 1, 0" if answer else outside
            raise ValueError(f"{key}{name}={json.dumps(value)[:40]} of {what}. Allowed: {allowed}")


def _message(key: str, message: object, shared: bool) -> dict:
    if not isinstance(message, dict):
        raise ValueError(f"{key} is not an object but {type(message).__name__}")
    role_key, text_key = ("from", "value") if shared else ("role", "content")
    role = message.get(role_key)
    role = ROLE_OF.get(role, role) if shared and isinstance(role, str) else role
    if not isinstance(role, str) or role not in AFTER:
        allowed = ", ".join(name for name in [*AFTER, *(ROLE_OF if shared else ())] if name)
        raise ValueError(f"{key}.{role_key}={role!r}. Allowed: {allowed}")
    content = message.get(text_key)
    calls = role == ANSWERS and bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (calls and content is None):
        raise ValueError(f"{key}.{text_key} is not a string but {type(content).__name__}")
    if role == ANSWERS and not calls and not content.strip():
        raise ValueError(f"{key}.{text_key} is an empty answer. Allowed: text")
    _refuse_weights(message, f"{key}.", f"a message of {role}")
    if not shared:
        return {**message, "role": role}
    further = {name: value for name, value in message.items() if name not in (role_key, text_key)}
    return {**further, "role": role, "content": content}


class ChatEncoder:
    """Encodes chats by the template of the tokenizer in a directory."""

    def __init__(self, directory: str):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat (see `chat_text`), and for each ANSWER or 0.

        Raises:
            ValueError: the template fails, or does not tell which tokens are answers.
        """
        messages, tools, answers, marked = self._read(text)
        ids, stretches = (self._marked_by_template if marked else self._between_prompts)(messages, tools, answers)
        marks = [0] * len(ids)
        for number, (begin, end) in zip(answers, stretches, strict=True):
            if in_loss(messages[number]):
                marks[begin:end] = [ANSWER] * (end - begin)
        return ids, marks

    def marks_prompt(self, text: str) -> bool:
        """Return whether the template's own marks of the last answer begin inside its generation prompt."""
        messages, tools, answers, marked = self._read(text)
        if not marked:
            return False
        ids, stretches = self._marked_by_template(messages, tools, answers)
        with contextlib.suppress(ValueError):  # the template fails for a part of the chat
            prompt = self._render(messages[:-1], tools, add_generation_prompt=True)
            return ids[: stretches[-1][0] + 1] == prompt[: stretches[-1][0] + 1]
        return False

    def unused(self, text: str) -> list[str]:
        """Return the keys of a chat's messages, once for each message, that the template does not name."""
        messages, tools, _, _ = self._read(text)
        if not (further := [key for message in messages for key in message if key not in KNOWN]):
            return []
        words = set(re.findall(r"\w+", self.tokenizer.get_chat_template(tools=tools)))
        return [key for key in further if key not in words]

    def _read(self, text: str) -> tuple[list, list | None, list[int], bool]:
        """Return messages and tools of a chat, the numbers of its answers, and whether its template marks them."""
        messages, tools = (chat := json.loads(text))["messages"], chat["tools"]
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        return messages, tools, answers, bool(MARKED.search(self.tokenizer.get_chat_template(tools=tools)))

    def _between_prompts(
        self, messages: list, tools: list | None, answers: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        ids, stretches = self._render(messages, tools), []
        for number in answers:
            prompt = self._render(messages[:number], tools, add_generation_prompt=True)
            end = ids if number == len(messages) - 1 else self._render(messages[: number + 1], tools)
            for name, tokens in (("the prompt of", prompt), ("the chat up to", end)):
                if ids[: len(tokens)] != tokens:
                    raise ValueError(
                        f"the chat template has no {{% generation %}}, and the tokens of {name} messages[{number}] are "
                        "not the first tokens of the whole chat, so the place of its answer is unknown"
                    )
            if len(end) <= len(prompt):
                raise ValueError(f"the chat template leaves out the answer messages[{number}]")
            stretches.append((len(prompt), len(end)))
        return ids, stretches

    def _marked_by_template(
        self, messages: list, tools: list | None, answers: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        stretches = runs(np.array(encoded["assistant_masks"], bool))
        if len(stretches) != len(answers):
            raise ValueError(
                f"the chat template's {{% generation %}} marks {len(stretches)} stretches of tokens, and the chat has "
                f"{len(answers)} answers"
            )
        return list(encoded["input_ids"]), stretches

    def _render(self, messages: list, tools: list | None, **options) -> list[int]:
        return list(self._apply(messages, tools, return_dict=False, **options))

    def _apply(self, messages: list, tools: list | None, **options):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # templates are programs: they raise errors of Jinja, of Python, and their own
            reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
            raise ValueError(f"the chat template fails: {reason}") from error
