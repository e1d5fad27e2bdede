"""A process that tokenizes the same data in many rounds, each beginning together with another such process.

    python racing_runs.py FOLDER NAME OTHER BASE DATA ROUNDS

Prints one JSON document a round: what happened, and the artifact's digest.
"""

import json
import sys
import time
from pathlib import Path

from tokenize_runs import TokenizeRuns


def main() -> None:
    folder, name, other, base, data, rounds = sys.argv[1:]
    for number in range(int(rounds)):
        root = Path(folder) / str(number)
        root.mkdir(exist_ok=True)
        (root / f"{name}.ready").touch()
        while not (root / f"{other}.ready").exists():
            time.sleep(0.001)
        ref, outcome = TokenizeRuns(root / "root", Path(base))(Path(data))
        sys.stdout.write(json.dumps({"action": outcome.action, "key": ref.key, "digest": ref.digest}) + "\n")


if __name__ == "__main__":
    main()
