"""One stage of a run again, from the artifacts that the run has for the stages before it."""

from prefect import flow

from schemas.manifest import ArtifactRef, RunSpec, StageName
from tasks.cached import Stages


@flow(name="rerun-stage", flow_run_name="{spec.run}-{stage}")
def rerun_stage(spec: RunSpec, stage: StageName, inputs: list[ArtifactRef]) -> ArtifactRef:
    """Run one stage alone.

    Args:
        spec: the run and the configuration to run with.
        stage: the stage to run.
        inputs: the artifacts that it takes, and `validate_env`.
    """
    return Stages(spec)(stage, *inputs)
