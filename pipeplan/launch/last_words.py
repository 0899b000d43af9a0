"""What a rank says before it ends in failure: to people, and to the launcher that reports on it.

torchrun ends with a report of some forty lines in which, for each rank, stands what the rank left
in the file that the variable TORCHELASTIC_ERROR_FILE names (its own protocol, see
torch.distributed.elastic.multiprocessing.errors), or nothing of use.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress


def say(line: str) -> None:
    """Print `line` to stderr and leave it for torchrun's report, which comes below it."""
    print(line, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    told = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": told}, file)
