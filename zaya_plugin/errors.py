# SPDX-License-Identifier: Apache-2.0
"""The one form of a message about a user's mistake: what was given, what is wrong, what is allowed, what to type
instead.
"""

# The exit code of a run that was asked to end by a signal, and has saved and left before its last step: EX_TEMPFAIL of
# sysexits.h, "try again later". 2 is a user's mistake; 16, 17, 93, 100 and 128 + n have a meaning in other launchers.
ENDED_EARLY = 75

_NOT_GIVEN = object()


class RunEndedError(RuntimeError):
    """Training cannot go on, and the message says all that a user needs: it is shown without a traceback, with exit
    code 1.
    """


def message(key: str, value: object = _NOT_GIVEN, *, problem: str, allowed: str = "", fix: str = "") -> str:
    """Return `<key>=<value>: <problem>. Allowed: <allowed>. Fix: <fix>.`

    `key` is a recipe key, an option such as --output, or a file; without `value` it stands alone. `allowed` lists
    values or states the condition with its current values. `fix` is what to type. Parts that are empty are left out.
    """
    given = key if value is _NOT_GIVEN else f"{key}={as_typed(value)}"
    text = f"{given}: {problem.rstrip('.')}."
    if allowed:
        text += f" Allowed: {allowed.rstrip('.')}."
    if fix:
        text += f" Fix: {fix.rstrip('.')}."
    return text


def mistake(key: str, value: object = _NOT_GIVEN, *, problem: str, allowed: str = "", fix: str = "") -> ValueError:
    """Return the ValueError with `message`'s text, for `raise mistake(...)`. Commands print the text without a
    traceback.
    """
    return ValueError(message(key, value, problem=problem, allowed=allowed, fix=fix))


def as_typed(value: object) -> str:
    """Write `value` as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
