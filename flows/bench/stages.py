"""Runs the first stages of one configuration as a flow does, without Prefect; a program of its own to be measured.

    python -m flows.bench.stages CONFIG.json ROOT STAGE...

Prints the folder of each stage's artifact, one a line.
"""

import sys
from pathlib import Path
from typing import cast

from schemas.config import LlmConfig
from schemas.manifest import ArtifactRef, RunSpec, StageName
from tasks.runner import StageRun
from tasks.store import Store


def main() -> None:
    """Make the artifacts, and say where they lie."""
    config = LlmConfig.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    store = Store(Path(sys.argv[2]))
    spec = RunSpec(run=store.new_run(config, "bench", "bench").run, config=config, root=str(store.root))
    made: dict[StageName, ArtifactRef] = {}
    for name in cast(list[StageName], sys.argv[3:]):
        made[name] = StageRun(name, spec, made).make(lambda line: None, lambda done, total, text: None)
        sys.stdout.write(f"{store.root / made[name].location}\n")


if __name__ == "__main__":
    main()
