# SPDX-License-Identifier: Apache-2.0
"""Chats of `zaya data prepare --chat`: read them from a jsonl line, and encode them by the tokenizer's own template.

The tokens of answers are marked (ANSWER of zaya_plugin.data.prepared), because training takes the loss on them alone.
A template that has `{% generation %}` marks them itself. With any other an answer is what comes between the prompt, as
it is rendered for a generation, and the end of its turn; this holds only if the tokens of each such beginning are the
first tokens of the whole chat, so a chat for which they are not is rejected.
"""

import json
import re

from zaya_plugin.data.prepared import ANSWER

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
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_text(record: dict) -> str:
    """Return the chat of a jsonl object as one text, equal for equal chats.

    Args:
        record: `messages`, each with role and content, or `conversations`, each with from and value; `tools`, if any,
            goes to the template too.

    Raises:
        ValueError: it is no chat; the message names the key and what is allowed.
    """
    field = next((name for name in ("messages", "conversations") if name in record), None)
    if field is None:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(f"no field 'messages' or 'conversations'; it has {names}")
    found = record[field]
    if not isinstance(found, list) or not found:
        raise ValueError(f"field {field!r} is not a list with messages but {json.dumps(found)[:40]}")
    messages, last = [], None
    for number, message in enumerate(found):
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
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("field 'tools' is not a list of objects")
    text = json.dumps({"messages": messages, "tools": tools or None}, ensure_ascii=False, sort_keys=True)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start].encode("utf-8", "replace").decode()
        raise ValueError(f"field {field!r} holds a lone surrogate behind {around!r}") from None
    return text


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
    return {"role": role, "content": content} if shared else {**message, "role": role}


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
        chat = json.loads(text)
        messages, tools = chat["messages"], chat["tools"]
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        template = self.tokenizer.get_chat_template(tools=tools)
        if MARKED.search(template):
            return self._marked_by_template(messages, tools, len(answers))
        ids = self._render(messages, tools)
        marks = [0] * len(ids)
        for number in answers:
            prompt = self._render(messages[:number], tools, add_generation_prompt=True)
            end = ids if number == len(messages) - 1 else self._render(messages[: number + 1], tools)
            for name, tokens in (("the prompt of", prompt), ("the chat up to", end)):
                if ids[: len(tokens)] != tokens:
                    raise ValueError(
                        f"the chat template has no {{% generation %}}, and the tokens of {name} messages[{number}] are "
                        "not the first tokens of the whole chat, so its answer cannot be found"
                    )
            if len(end) <= len(prompt):
                raise ValueError(f"the chat template leaves out the answer messages[{number}]")
            marks[len(prompt) : len(end)] = [ANSWER] * (len(end) - len(prompt))
        return ids, marks

    def _marked_by_template(self, messages: list, tools: list | None, answers: int) -> tuple[list[int], list[int]]:
        found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = list(found["input_ids"]), [ANSWER * bool(mark) for mark in found["assistant_masks"]]
        stretches = sum(mark and not before for before, mark in zip([0, *marks], marks, strict=False))
        if stretches != answers:
            raise ValueError(
                f"the chat template's {{% generation %}} marks {stretches} stretches of tokens, and the chat has "
                f"{answers} answers"
            )
        return ids, marks

    def _render(self, messages: list, tools: list | None, **options) -> list[int]:
        return list(self._apply(messages, tools, return_dict=False, **options))

    def _apply(self, messages: list, tools: list | None, **options):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # templates are programs: they raise errors of Jinja, of Python, and their own
            reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
            raise ValueError(f"the chat template fails: {reason}") from error
