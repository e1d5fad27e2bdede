"""A store as a run leaves it, filled without running any stage, and what a configuration would still have to run."""

from typing import Any

from fake_child import ENV

from schemas.config import LlmConfig
from schemas.manifest import ArtifactRef, StageName, StageResult
from tasks.plan import Planner
from tasks.stages import STAGES
from tasks.store import Store


def fill(store: Store, config: LlmConfig, *, device: str = "CPU", stop_before: str = "") -> None:
    """Publish an artifact for each stage that has none, as a run would."""
    made: dict[StageName, ArtifactRef] = {}
    for stage in STAGES.values():
        if stage.name == stop_before:
            return
        decision = Planner(store, config).decide(stage, {name: made[name] for name in stage.takes}, device)
        if decision.ref is None:
            with store.lock(stage.name, decision.key):
                build = store.prepare_work(stage.name, decision.key) / "build"
                (build / "report.json").write_text(ENV.model_copy(update={"device": device}).model_dump_json())
                (build / "x").write_text(f"{stage.name} {decision.key}")
                inputs = {name: made[name] for name in stage.takes}
                made[stage.name] = store.publish(
                    stage.name, decision.key_document, StageResult(), inputs, "the-run", 1.0
                )
        else:
            made[stage.name] = decision.ref


def to_run(store: Store, config: LlmConfig, **options: Any) -> list[str]:
    """The stages that would run."""
    return [decision.stage for decision in Planner(store, config, **options).plan() if decision.ref is None]
