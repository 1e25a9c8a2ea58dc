# SPDX-License-Identifier: Apache-2.0
"""Whether the Hugging Face Hub can be reached. Its client tries for about a minute before it says that it cannot, so it
is asked first; without an answer only the local cache is read. Imports no torch.
"""

import os
import ssl
import threading
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

SECONDS = 10.0
ENDPOINT = "https://huggingface.co"  # of huggingface_hub, as HF_ENDPOINT


def unreachable() -> str | None:
    """Return why files of the Hub can come from the local cache alone, or None where it answers."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name}={os.environ[name]}"
    endpoint, answers = os.environ.get("HF_ENDPOINT") or ENDPOINT, []
    # In a thread, since looking up a name has no time limit of its own.
    thread = threading.Thread(target=lambda: answers.append(_failure(endpoint)), name="hub", daemon=True)
    thread.start()
    thread.join(SECONDS)
    why = answers[0] if answers else f"no answer in {SECONDS:.0f} s"
    return None if why is None else f"{endpoint} cannot be reached: {why}"


def _failure(endpoint: str) -> str | None:
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:  # it has answered
        return None
    except URLError as error:  # the Hub's client has certificates of its own
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, ValueError) as error:
        return str(error)
    return None
