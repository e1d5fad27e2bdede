"""The job `finetune-llm`: a causal language model with LoRA, from records to an evaluated MindIR."""

from prefect import flow

from schemas.manifest import ArtifactRef, RunSpec
from tasks.cached import Stages


@flow(name="finetune-llm", flow_run_name="{spec.run}")
def finetune_llm(spec: RunSpec) -> ArtifactRef:
    """Make or reuse the six artifacts of a run; gives the evaluation.

    Args:
        spec: the run, its configuration and where its artifacts lie.
    """
    stage = Stages(spec)
    env = stage("validate_env")
    tokens = stage("tokenize")
    adapter = stage("train", env, tokens)
    model = stage("merge", env, adapter)
    mindir = stage("export", env, model)
    return stage("evaluate", env, tokens, mindir)
